// One line for a group of kernels: a digest of what they make of hard inputs. Equal output means equal bits: on another
// processor, of another compiler, and beside digests.txt, which holds for every instruction set. test_digests.py compares.
//
//     digests [INSTRUCTION SET [all]]
//
// With `all`: every bit pattern of fp32 through the roundings, and every magnitude below that of a block through the codes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
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
constexpr std::uint64_t empty = 14695981039346656037u;
std::uint64_t digest(std::uint64_t hash, const Bytes& bytes, DType dtype) {
  const std::uint32_t infinity[] = {0x7F800000u, 0x7F80u, 0x7C00u};
  return digest(hash, bytes, dtype == DType::fp32 ? 4 : 2, infinity[int(dtype)]);
}

const std::vector<float> scalars[rule_count] = {
    {0.7f, 0.1f, 0.999f, 0.1f, 0.99f, 0.01f, 0.3f, 1e-8f, -1e-3f, 1, 0, 0, 0},
    {0.7f, 0.1f, 1.0f, -0.4f, 0.99f, 0.01f, 1.0f, 1e-8f, -1e-3f, 0, 1, 0, 0},
    {-0.7f, 0.1f, -1e-3f, 0, 0, 1, 0, 0, 0},
    {0.7f, 0.1f, -1e-3f, 0.9f, 0.7f, 1, 0, 0, 1},
    {0.7f, 0.1f, 1e-10f, -1e-3f, 1, 0, 0, 0},
    {0.7f, 0.99f, 0.9f, 0.1f, 0.99f, 0.01f, -1e-3f, 0, 0, 0, 0},
};

std::uint64_t one_update(std::uint64_t hash, Pool& pool, int rule, DType param, Master master, DType grad, Storage storage) {
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
  for (int k = 0; k < state_count[rule]; ++k) {
    const bool is_unsigned = k > 0 || Rule(rule) == Rule::adagrad;
    given.push_back({states[k].data(), coded ? scales[k].data() : nullptr,
                     coded && is_unsigned ? Storage::int8_unsigned : storage});
  }
  const bool param_random = random && param == DType::bf16 && master == Master::none;
  update(&pool, numel,
         {Rule(rule), param, master, grad, p.data(), g.data(), m.empty() ? nullptr : m.data(), given, scalars[rule],
          param_random, 0x123456789ABCDEFu, std::uint64_t{1} << 33});
  hash = digest(hash, p, param);
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
  return hash;
}

std::uint64_t digest(std::uint64_t hash, double norm) {
  if (norm != norm) norm = std::numeric_limits<double>::infinity();
  std::uint64_t bits;
  std::memcpy(&bits, &norm, sizeof bits);
  return (hash ^ bits) * 1099511628211u;
}

// The first are few; the others, from a line of the cache on, are enough to be written past it.
std::uint64_t one_deposit(std::uint64_t hash, Pool& pool, DType to, DType from, bool add) {
  state = 2;
  Bytes dst = values(to);
  const Bytes src = values(from);
  const double norm = deposit(&pool, numel, dst.data(), to, src.data(), from, add);
  hash = digest(digest(hash, dst, to), norm);
  if (add) return hash;
  constexpr std::size_t times = 120;
  Bytes many, large(times * dst.size() + line_bytes);
  for (std::size_t i = 0; i < times; ++i) many.insert(many.end(), src.begin(), src.end());
  void* line = large.data();
  std::size_t room = large.size();
  std::align(line_bytes, times * dst.size(), line, room);
  hash = digest(hash, deposit(&pool, times * numel, line, to, many.data(), from, add));
  const auto* const first = static_cast<const unsigned char*>(line);
  return digest(hash, Bytes(first, first + times * dst.size()), to);
}

// Ordinary values alone, so that the norm is a number; and hard ones.
std::uint64_t one_norm(std::uint64_t hash, Pool& pool, DType dtype) {
  state = 3;
  Bytes src = values(dtype);
  hash = digest(hash, squared_norm(&pool, numel, src.data(), dtype));
  const int size = dtype == DType::fp32 ? 4 : 2;
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = (next() & 0x807FFFFFu) | (100 + next() % 40) << 23;
    const std::uint16_t half = std::uint16_t(dtype == DType::fp16 ? bits & 0xBFFF : bits >> 16);
    std::memcpy(&src[size * i], size == 4 ? static_cast<const void*>(&bits) : &half, size);
  }
  return digest(hash, squared_norm(&pool, numel, src.data(), dtype));
}

constexpr std::size_t code_bytes[wire_count] = {block_numel, block_numel, block_numel / 2};

// Values of any kind, and blocks without specials: those with codes.
std::uint64_t one_wire(std::uint64_t hash, Pool& pool, Wire format, DType dtype) {
  state = 4;
  Bytes from = values(dtype);
  const std::size_t size = dtype == DType::fp32 ? 4 : 2, blocks = numel / block_numel;
  for (std::size_t i = 0; i < blocks / 2 * block_numel; ++i) {
    const std::uint32_t bits = (next() & 0x807FFFFFu) | (117 + next() % 20) << 23;
    const std::uint16_t half = std::uint16_t(dtype == DType::fp16 ? bits & 0xBFFF : bits >> 16);
    std::memcpy(&from[size * i], size == 4 ? static_cast<const void*>(&bits) : &half, size);
  }
  Bytes packed(blocks * (sizeof(float) + code_bytes[int(format)]));
  pack(&pool, blocks, format, packed.data(), from.data(), dtype);
  hash = digest(hash, packed, 1, 0);
  for (unsigned char& byte : packed) byte = std::uint8_t(next() % 8 == 0 ? next() : byte);  // and codes that none packs
  for (const bool add : {false, true}) {
    if (add && dtype != DType::fp32) continue;
    unpack(&pool, blocks, format, from.data(), dtype, packed.data(), add);
    hash = digest(hash, from, dtype);
  }
  return hash;
}

// Every pattern of fp32, or, of codes, every magnitude up to 2, in blocks whose largest it is.
void all_patterns(Pool& pool) {
  constexpr std::size_t count = std::size_t{1} << 16;
  std::uint64_t rounded[3] = {empty, empty, empty}, coded[wire_count] = {empty, empty, empty}, states[2] = {empty, empty};
  Bytes from(count * 4), to(count * 2), packed(count / block_numel * (sizeof(float) + block_numel));
  Bytes zeros(count * 2), codes(count), master(count * 4);
  std::vector<float> scales(count / block_numel);
  for (std::uint64_t first = 0; first < std::uint64_t{1} << 32; first += count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t bits = std::uint32_t(first) + i;
      std::memcpy(&from[4 * i], &bits, 4);
    }
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      deposit(&pool, count, to.data(), dtype, from.data(), DType::fp32, false);
      rounded[int(dtype)] = digest(rounded[int(dtype)], to, dtype);
    }
    // A step of no length rounds a parameter the other way.
    master = from;
    update(&pool, count, {Rule::sgd, DType::bf16, Master::fp32, DType::bf16, to.data(), zeros.data(), master.data(), {},
                          {0, 0, 0, 0, 0, 0, 0, 0, 0}, false, 0, 0});
    rounded[0] = digest(rounded[0], to, DType::bf16);
    if ((first & 0x7FFFFFFFu) >= 0x40000000u) continue;
    const float two = 2;
    for (std::size_t i = 0; i < count; i += block_numel) std::memcpy(&from[4 * i], &two, 4);
    for (int format = 0; format < wire_count; ++format) {
      packed.resize(count / block_numel * (sizeof(float) + code_bytes[format]));
      pack(&pool, count / block_numel, Wire(format), packed.data(), from.data(), DType::fp32);
      coded[format] = digest(coded[format], packed, 1, 0);
    }
    for (const bool positive : {false, true}) {
      if (positive && first >= 0x80000000u) continue;
      // Adagrad's state is the sum of squares, SGD's momentum is 0 times itself and the gradient.
      std::fill(codes.begin(), codes.end(), 0);
      const Rule rule = positive ? Rule::adagrad : Rule::sgd_momentum;
      std::vector<float> given = positive ? std::vector<float>{1, 0, 1, 0, 0, 0, 0, 0} : std::vector<float>{1, 0, 0, 0, 1, 0, 0, 0, 0};
      update(&pool, count, {rule, DType::fp32, Master::none, DType::fp32, master.data(), from.data(), nullptr,
                            {{codes.data(), scales.data(), positive ? Storage::int8_unsigned : Storage::int8_signed}},
                            given, false, 0, 0});
      states[positive] = digest(states[positive], codes, 1, 0);
    }
  }
  for (const std::uint64_t hash : rounded) std::printf("all rounded %016llx\n", static_cast<unsigned long long>(hash));
  for (const std::uint64_t hash : coded) std::printf("all coded %016llx\n", static_cast<unsigned long long>(hash));
  for (const std::uint64_t hash : states) std::printf("all states %016llx\n", static_cast<unsigned long long>(hash));
}

template <class... Numbers>
void print(const char* what, std::uint64_t hash, Numbers... numbers) {
  std::printf("%s", what);
  (std::printf(" %d", int(numbers)), ...);
  std::printf(" %016llx\n", static_cast<unsigned long long>(hash));
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) set_isa(arguments[1]);
  Pool pool(2);
  if (count > 2) return all_patterns(pool), 0;
  constexpr DType dtypes[] = {DType::fp32, DType::bf16, DType::fp16};
  const std::pair<DType, Master> stores[] = {{DType::fp32, Master::none},
                                             {DType::bf16, Master::none},
                                             {DType::bf16, Master::remainder},
                                             {DType::bf16, Master::fp32},
                                             {DType::fp16, Master::fp32}};
  for (int rule = 0; rule < rule_count; ++rule) {
    for (const Storage storage : {Storage::fp32, Storage::bf16, Storage::bf16_random, Storage::int8_signed}) {
      for (const auto& [param, master] : stores) {
        std::uint64_t hash = empty;
        for (const DType grad : dtypes) hash = one_update(hash, pool, rule, param, master, grad, storage);
        print("update", hash, rule, storage, param, master);
      }
    }
  }
  for (const DType to : dtypes) {
    for (const DType from : dtypes)
      print("deposit", one_deposit(one_deposit(empty, pool, to, from, false), pool, to, from, true), to, from);
    print("norm", one_norm(empty, pool, to), to);
    for (int format = 0; format < wire_count; ++format) print("wire", one_wire(empty, pool, Wire(format), to), format, to);
  }
}
