// Arithmetic of polynomials over GF(2) modulo the one of CRC-32C, at compile time. The highest power is in the lowest bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

constexpr std::uint32_t kPolynomial = 0x82F63B78;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    product ^= b & (0 - (a >> bit & 1));
    b = times_x(b);
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t power = 1u << 31, square = 1u << 30;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = multiply(square, power);
    square = multiply(square, square);
  }
  return power;
}

}  // namespace penstock
