#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "crc32c_polynomial.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
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

// [i][byte]: the state of a byte with i bytes of zeros behind it.
constexpr auto kBytes = [] {
  std::array<std::array<std::uint32_t, 256>, 8> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    table[0][byte] = state;
  }
  for (std::size_t i = 1; i < 8; ++i)
    for (std::size_t byte = 0; byte < 256; ++byte)
      table[i][byte] = table[0][table[i - 1][byte] & 0xFF] ^ (table[i - 1][byte] >> 8);
  return table;
}();

std::uint64_t word_at(const unsigned char* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

#ifdef PENSTOCK_CRC_TARGET

#if defined(__x86_64__)
bool has_instruction() noexcept { return __builtin_cpu_supports("sse4.2"); }
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(_mm_crc32_u64(state, word));
}
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, unsigned char byte) noexcept {
  return _mm_crc32_u8(state, byte);
}
#else
bool has_instruction() noexcept { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, std::uint64_t word) noexcept {
  return __crc32cd(state, word);
}
PENSTOCK_CRC_TARGET inline std::uint32_t step(std::uint32_t state, unsigned char byte) noexcept {
  return __crc32cb(state, byte);
}
#endif

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

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes) noexcept {
  const auto* next = static_cast<const unsigned char*>(data);
  std::uint32_t state = ~0u;
  for (; nbytes >= 8; nbytes -= 8, next += 8) {
    const std::uint64_t word = word_at(next) ^ state;
    state = 0;
    for (int i = 0; i < 8; ++i) state ^= kBytes[7 - i][word >> (8 * i) & 0xFF];
  }
  for (; nbytes; --nbytes, ++next) state = kBytes[0][(state ^ *next) & 0xFF] ^ (state >> 8);
  return ~state;
}

// What this processor has, the fastest one last.
std::vector<Crc32cWay> find_ways() {
  std::vector<Crc32cWay> ways{{"portable", crc32c_portable}};
#ifdef PENSTOCK_CRC_TARGET
  if (has_instruction()) ways.push_back({"instruction", crc32c_instruction});
#endif
  if (const auto folded = crc32c_folded()) ways.push_back(*folded);
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
