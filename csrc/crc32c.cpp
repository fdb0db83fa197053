#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define PENSTOCK_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define PENSTOCK_CRC_TARGET __attribute__((target("+crc")))
#endif

static_assert(std::endian::native == std::endian::little);

namespace penstock {
namespace {

// Polynomials over GF(2) modulo the one of CRC-32C. The highest power is in the lowest bit.
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

// [k] is x^(8 * 2^k): what 2^k bytes of zeros multiply a CRC by.
constexpr auto kZeros = [] {
  std::array<std::uint32_t, 64> powers{};
  powers[0] = power_of_x(8);
  for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}();

// The CRC's state after `nbytes` more bytes of zeros.
std::uint32_t append_zeros(std::uint32_t state, std::size_t nbytes) noexcept {
  for (std::size_t k = 0; nbytes; ++k, nbytes >>= 1)
    if (nbytes & 1) state = multiply(kZeros[k], state);
  return state;
}

// [byte]: the state of a byte.
constexpr auto kBytes = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit) table[byte] = times_x(table[byte]);
  }
  return table;
}();

std::uint64_t word_at(const unsigned char* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

#if defined(__x86_64__)
bool has_instruction() noexcept { return __builtin_cpu_supports("sse4.2"); }
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(_mm_crc32_u64(state, word));
}
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, unsigned char byte) noexcept {
  return _mm_crc32_u8(state, byte);
}
#elif defined(PENSTOCK_CRC_TARGET)
bool has_instruction() noexcept { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, std::uint64_t word) noexcept {
  return __crc32cd(state, word);
}
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, unsigned char byte) noexcept {
  return __crc32cb(state, byte);
}
#endif

#ifdef PENSTOCK_CRC_TARGET

// The instruction takes one word per cycle but answers after three: three thirds of the data go through it in turns.
PENSTOCK_CRC_TARGET std::uint32_t crc32c_instruction(const void* bytes, std::size_t nbytes) noexcept {
  const auto* data = static_cast<const unsigned char*>(bytes);
  const std::size_t third = nbytes / 24 * 8;
  std::uint32_t a = ~0u, b = 0, c = 0;
  for (std::size_t i = 0; i < third; i += 8) {
    a = step(a, word_at(data + i));
    b = step(b, word_at(data + third + i));
    c = step(c, word_at(data + 2 * third + i));
  }
  std::uint32_t state = append_zeros(append_zeros(a, third) ^ b, third) ^ c;
  for (std::size_t i = 3 * third; i < nbytes; ++i) state = step(state, data[i]);
  return ~state;
}

#endif

#if defined(__x86_64__)

// By folding: what 64 bytes contribute is multiplied over those that follow. Twice as fast as the instruction where the bytes
// are in a cache, and as fast as they can be read where not. Gopal et al., "Fast CRC computation for generic polynomials using
// PCLMULQDQ instruction", Intel 2009.
#define PENSTOCK_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

constexpr std::size_t kLane = 64;  // bytes of a register
constexpr std::size_t kLanes = 4;  // folded in turns: a product answers after several cycles
constexpr std::size_t kStride = kLanes * kLane;

constexpr long long factor(std::size_t exponent) { return static_cast<long long>(power_of_x(exponent)) << 32; }

// What each 128 bits are multiplied by to stand `kBits` earlier: their second half, and their first, which is 64 bits
// before it. One less, because the product of reflected operands is one bit short.
template <std::size_t kBits>
PENSTOCK_FOLD_TARGET inline __m512i distance() noexcept {
  constexpr long long second = factor(kBits - 1), first = factor(kBits + 63);
  return _mm512_broadcast_i32x4(_mm_set_epi64x(second, first));
}

PENSTOCK_FOLD_TARGET inline __m512i fold(__m512i lane, __m512i by, __m512i next) noexcept {
  constexpr int kXorOfThree = 0x96;
  const __m512i first = _mm512_clmulepi64_epi128(lane, by, 0x00), second = _mm512_clmulepi64_epi128(lane, by, 0x11);
  return _mm512_ternarylogic_epi64(first, second, next, kXorOfThree);
}

// The state after whole strides, at least one, from the state of no bytes.
PENSTOCK_FOLD_TARGET std::uint32_t fold_strides(const unsigned char* data, std::size_t strides) noexcept {
  const __m512i over_stride = distance<8 * kStride>(), over_lane = distance<8 * kLane>();
  __m512i lanes[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = _mm512_loadu_si512(data + kLane * i);
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)));
  for (data += kStride; --strides; data += kStride)
    for (std::size_t i = 0; i < kLanes; ++i)
      lanes[i] = fold(lanes[i], over_stride, _mm512_loadu_si512(data + kLane * i));
  for (std::size_t i = 1; i < kLanes; ++i) lanes[0] = fold(lanes[0], over_lane, lanes[i]);
  std::uint64_t words[kLane / 8];
  _mm512_storeu_si512(words, lanes[0]);
  std::uint32_t state = 0;
  for (const std::uint64_t word : words) state = step(state, word);
  return state;
}

PENSTOCK_FOLD_TARGET std::uint32_t crc32c_avx512(const void* bytes, std::size_t nbytes) noexcept {
  const auto* data = static_cast<const unsigned char*>(bytes);
  const std::size_t folded = nbytes / kStride * kStride;
  std::uint32_t state = folded ? fold_strides(data, folded / kStride) : ~0u;
  for (data += folded, nbytes -= folded; nbytes >= 8; data += 8, nbytes -= 8) state = step(state, word_at(data));
  for (; nbytes; ++data, --nbytes) state = step(state, *data);
  return ~state;
}

#endif

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t state = ~0u;
  for (std::size_t i = 0; i < nbytes; ++i) state = kBytes[(state ^ bytes[i]) & 0xFF] ^ (state >> 8);
  return ~state;
}

// What this processor has, the fastest one last.
std::vector<Crc32cWay> find_ways() {
  std::vector<Crc32cWay> ways{{"portable", crc32c_portable}};
#ifdef PENSTOCK_CRC_TARGET
  if (has_instruction()) ways.push_back({"instruction", crc32c_instruction});
#endif
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") && has_instruction())
    ways.push_back({"avx512", crc32c_avx512});
#endif
  return ways;
}

}  // namespace

const std::vector<Crc32cWay>& crc32c_ways() {
  static const std::vector<Crc32cWay> ways = find_ways();
  return ways;
}

std::uint32_t crc32c(const void* data, std::size_t nbytes) noexcept {
  static const auto fastest = crc32c_ways().back().compute;
  return fastest(data, nbytes);
}

std::uint32_t crc32c_join(std::uint32_t a, std::uint32_t b, std::size_t b_nbytes) noexcept {
  return append_zeros(a, b_nbytes) ^ b;
}

}  // namespace penstock
