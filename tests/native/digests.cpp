// One line per kernel: a digest of what it makes of hard inputs. Equal output on two processors means equal bits.
//
// By hand, where there is a cross compiler and an emulator (g++-aarch64-linux-gnu and qemu-user-static in Debian), from
// the repository's root; docs/lab-log.md has the outcome:
//
//     flags="-std=c++20 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Icsrc -pthread -static"
//     files="tests/native/digests.cpp csrc/pool.cpp csrc/rules.cpp csrc/sums.cpp csrc/crc32c.cpp
//       csrc/crc32c_folded.cpp csrc/kernels_generic.cpp"
//     g++ $flags $files -o build/here && aarch64-linux-gnu-g++ $flags $files -o build/there
//     diff <(build/here generic) <(qemu-aarch64-static build/there) && echo same bits
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "rules.h"

using namespace penstock;

namespace {

constexpr std::size_t numel = 5000;  // whole vectors and blocks, and some of neither

std::uint64_t state;
std::uint32_t next() {
  state += 0x9E3779B97F4A7C15u;
  return std::uint32_t(mix(state) >> 32);
}

// fp32 bits: ordinary sizes, and every eighth of any pattern: denormals, infinities, NaNs.
std::uint32_t pattern() {
  const std::uint32_t bits = next();
  return next() % 8 == 0 ? bits : (bits & 0x807FFFFFu) | (100 + next() % 40) << 23;
}

using Bytes = std::vector<unsigned char>;

Bytes values(DType dtype, bool positive = false) {
  const std::size_t size = dtype == DType::fp32 ? 4 : 2;
  Bytes bytes(numel * size);
  for (std::size_t i = 0; i < numel; ++i) {
    std::uint32_t bits = pattern();
    if (positive) bits &= 0x7FFFFFFFu;
    // Of fp16 any pattern at all.
    const std::uint16_t half = std::uint16_t(dtype == DType::fp16 ? next() & 0xBFFF : bits >> 16);
    if (size == 4) {
      std::memcpy(&bytes[4 * i], &bits, 4);
    } else {
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  return bytes;
}

// FNV-1a; a NaN counts as a NaN, whatever its payload.
std::uint64_t digest(std::uint64_t hash, const Bytes& bytes, int word, std::uint32_t infinity) {
  for (std::size_t at = 0; at < bytes.size(); at += word) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bytes[at], word);
    const std::uint32_t magnitude = word == 4 ? bits & 0x7FFFFFFFu : bits & 0x7FFFu;
    if (infinity != 0 && magnitude > infinity) bits = infinity + 1;
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}
std::uint64_t digest(std::uint64_t hash, const Bytes& bytes, DType dtype) {
  const std::uint32_t infinity[] = {0x7F800000u, 0x7F80u, 0x7C00u};
  return digest(hash, bytes, dtype == DType::fp32 ? 4 : 2, infinity[int(dtype)]);
}

const std::vector<float> scalars[rule_count] = {
    {0.7f, 0.1f, 0.999f, 0.1f, 0.99f, 0.01f, 0.3f, 1e-8f, -1e-3f, 1, 0},
    {0.7f, 0.1f, 1.0f, -0.4f, 0.99f, 0.01f, 1.0f, 1e-8f, -1e-3f, 0, 1},
    {-0.7f, 0.1f, -1e-3f, 1},
    {0.7f, 0.1f, -1e-3f, 0.9f, 0.7f, 1, 0, 1},
    {0.7f, 0.1f, 1e-10f, -1e-3f, 1},
    {0.7f, 0.99f, 0.9f, 0.1f, 0.99f, 0.01f, -1e-3f},
};

void one_update(Pool& pool, int rule, DType param, Master master, DType grad, Storage storage) {
  state = 1;
  Bytes p = values(param), g = values(grad), m;
  if (master != Master::none) m = values(master == Master::fp32 ? DType::fp32 : DType::bf16);
  const bool coded = storage == Storage::int8_signed, random = storage == Storage::bf16_random;
  std::vector<Bytes> states;
  std::vector<std::vector<float>> scales;
  std::vector<State> given;
  for (int k = 0; k < state_count[rule]; ++k) {
    const DType dtype = storage == Storage::fp32 ? DType::fp32 : DType::bf16;
    states.push_back(values(dtype, k > 0));
    scales.emplace_back();
    if (coded) {
      states.back().resize(numel);
      scales.back().assign((numel + block_numel - 1) / block_numel, 0.01f);
    }
  }
  for (int k = 0; k < state_count[rule]; ++k)
    given.push_back({states[k].data(), coded ? scales[k].data() : nullptr,
                     coded && k > 0 ? Storage::int8_unsigned : storage});
  const bool param_random = random && param == DType::bf16 && master == Master::none;
  update(&pool, numel,
         {Rule(rule), param, master, grad, p.data(), g.data(), m.empty() ? nullptr : m.data(), given, scalars[rule],
          param_random, 0x123456789ABCDEFu, std::uint64_t{1} << 33});
  std::uint64_t hash = digest(14695981039346656037u, p, param);
  if (master == Master::fp32) hash = digest(hash, m, DType::fp32);
  if (master == Master::remainder) hash = digest(hash, m, 2, 0);
  for (int k = 0; k < state_count[rule]; ++k) {
    if (coded) {
      Bytes scale(scales[k].size() * sizeof(float));
      std::memcpy(scale.data(), scales[k].data(), scale.size());
      hash = digest(digest(hash, states[k], 1, 0), scale, DType::fp32);
    } else {
      hash = digest(hash, states[k], storage == Storage::fp32 ? DType::fp32 : DType::bf16);
    }
  }
  std::printf("update %d %d %d %d %d %016llx\n", rule, int(param), int(master), int(grad), int(storage),
              static_cast<unsigned long long>(hash));
}

void one_deposit(Pool& pool, DType to, DType from, bool add) {
  state = 2;
  Bytes dst = values(to);
  const Bytes src = values(from);
  double norm = deposit(&pool, numel, dst.data(), to, src.data(), from, add);
  if (norm != norm) norm = std::numeric_limits<double>::infinity();
  std::printf("deposit %d %d %d %016llx %a\n", int(to), int(from), add,
              static_cast<unsigned long long>(digest(14695981039346656037u, dst, to)), norm);
}

// Ordinary values alone, so that the norm is a number.
void one_norm(Pool& pool) {
  state = 3;
  Bytes src(numel * 4);
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = (next() & 0x807FFFFFu) | (100 + next() % 40) << 23;
    std::memcpy(&src[4 * i], &bits, 4);
  }
  std::printf("norm %a\n", squared_norm(&pool, numel, src.data(), DType::fp32));
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) set_isa(arguments[1]);
  Pool pool(2);
  const std::pair<DType, Master> stores[] = {{DType::fp32, Master::none},
                                             {DType::bf16, Master::none},
                                             {DType::bf16, Master::remainder},
                                             {DType::bf16, Master::fp32},
                                             {DType::fp16, Master::fp32}};
  for (int rule = 0; rule < rule_count; ++rule)
    for (const auto& [param, master] : stores)
      for (const DType grad : {DType::fp32, DType::bf16, DType::fp16})
        for (const Storage storage : {Storage::fp32, Storage::bf16, Storage::bf16_random, Storage::int8_signed})
          one_update(pool, rule, param, master, grad, storage);
  for (const DType to : {DType::fp32, DType::bf16, DType::fp16})
    for (const DType from : {DType::fp32, DType::bf16, DType::fp16})
      for (const bool add : {false, true}) one_deposit(pool, to, from, add);
  one_norm(pool);
}
