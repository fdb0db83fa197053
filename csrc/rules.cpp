#include "rules.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <stdexcept>

#include "crc32c.h"

namespace penstock {
namespace {

// Work is handed out in pieces of about this many elements: large against the cost of handing out, small against the
// imbalance at the end. A multiple of the norm block.
constexpr std::size_t piece_numel = 2 * norm_block_numel;
constexpr std::size_t copy_piece_bytes = std::size_t{1} << 19;
// A deposit of as many bytes is not read again before others have taken its place in the cache: a model with such
// parameters has many times as much state.
constexpr std::size_t streamed_bytes = std::size_t{1} << 20;

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#ifdef PENSTOCK_X86_64
  // Every processor with AVX2 has F16C, for which some compilers know no test.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found.push_back(&kernels_avx512);
  if (avx2) found.push_back(&kernels_avx2);
#endif
  found.push_back(&kernels_generic);
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{available().front()};
  return kernels;
}

// IEEE arithmetic for one piece of work: a thread may have been told to flush denormals or to round another way.
class DefaultArithmetic {
 public:
  DefaultArithmetic() noexcept {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

// Calls body(begin, end) for consecutive ranges of at most `piece` items that cover [0, count).
template <class Body>
void for_ranges(Pool* pool, std::size_t count, std::size_t piece, Body&& body) {
  const std::size_t pieces = count / piece + (count % piece != 0);
  const auto one = [&](std::size_t index) noexcept {
    const std::size_t begin = index * piece;
    body(begin, begin + std::min(piece, count - begin));
  };
  if (pool != nullptr) return pool->parallel_for(pieces, one);
  for (std::size_t index = 0; index < pieces; ++index) one(index);
}

// Adds up block_norm(begin, end) over the norm blocks, in their order.
template <class BlockNorm>
double sum_blocks(Pool* pool, std::size_t numel, BlockNorm&& block_norm) {
  std::vector<double> norms(numel / norm_block_numel + (numel % norm_block_numel != 0));
  for_ranges(pool, numel, piece_numel, [&](std::size_t begin, std::size_t end) noexcept {
    const DefaultArithmetic arithmetic;
    for (std::size_t at = begin; at < end; at += norm_block_numel)
      norms[at / norm_block_numel] = block_norm(at, std::min(at + norm_block_numel, end));
  });
  const DefaultArithmetic arithmetic;
  double sum = 0;
  for (const double norm : norms) sum += norm;
  return sum;
}

// A piece of work whose states or parameter are stored in fewer bits passes through fp32 buffers of this many elements,
// which stay in the nearest cache.
constexpr std::size_t staged_numel = 4 * block_numel;

std::size_t size_of(DType dtype) noexcept { return dtype == DType::fp32 ? 4 : 2; }
std::size_t size_of(Master kind) noexcept { return kind == Master::fp32 ? 4 : 2; }
std::size_t size_of(Storage storage) noexcept {
  constexpr std::size_t bytes[storage_count] = {4, 2, 2, 1, 1};
  return bytes[int(storage)];
}

// An array of an update, with a value for every `grain` elements.
struct Array {
  void** data;
  std::size_t value_bytes;
  std::size_t grain = 1;
  bool changes = true;

  std::size_t offset(std::size_t element) const noexcept { return (element + grain - 1) / grain * value_bytes; }
  char* at(std::size_t element) const noexcept { return static_cast<char*>(*data) + offset(element); }
  // The CRC-32C of the values of elements.
  std::uint32_t sum(std::size_t begin, std::size_t end) const noexcept { return crc32c(at(begin), offset(end) - offset(begin)); }
};

// The arrays that an update has, its own addresses of them included.
std::vector<Array> arrays_of(Update& update) {
  std::vector<Array> arrays{{&update.grad, size_of(update.grad_dtype), 1, false}, {&update.param, size_of(update.param_dtype)}};
  if (update.master != nullptr) arrays.push_back({&update.master, size_of(update.master_kind)});
  for (State& state : update.states) {
    arrays.push_back({&state.values, size_of(state.storage)});
    if (state.scales != nullptr) arrays.push_back({&state.scales, sizeof(float), block_numel});
  }
  return arrays;
}

template <class Kernel>
Kernel require(Kernel kernel, const char* what) {
  if (kernel == nullptr) throw std::invalid_argument(what);
  return kernel;
}

// An update by the kernels of an instruction set.
class Pass {
 public:
  Pass(const Kernels& kernels, const Update& update)
      : kernels_(kernels),
        update_(update),
        arrays_{update.param, update.grad, update.master, {}, {}, update.random_key, update.first_block} {
    bool staged = update.param_random;
    for (std::size_t k = 0; k < update.states.size(); ++k) {
      const State& state = update.states[k];
      arrays_.states[k] = state.values;
      arrays_.scales[k] = static_cast<float*>(state.scales);
      staged |= state.storage != Storage::fp32;
      draws_[k / 2] |= state.storage == Storage::bf16_random;
    }
    draws_[1] |= update.param_random;
    // Rounded stochastically, a parameter passes through an fp32 buffer.
    const int param = int(update.param_random ? DType::fp32 : update.param_dtype);
    fp32_ = require(kernels.update[int(update.rule)][param][int(update.master_kind)][int(update.grad_dtype)],
                    "no kernel for this dtype of the parameter with this kind of master");
    in_place_ = staged ? of_few_bits() : fp32_;
  }

  void run(std::size_t begin, std::size_t end) const noexcept {
    const std::size_t whole = begin + (end - begin) / block_numel * block_numel;
    blocks(begin, whole);
    if (whole < end) last(whole, end - whole);
  }

 private:
  // The kernel that needs no buffers for states in fewer bits, or null where there is none.
  UpdateKernel of_few_bits() const noexcept {
    const std::vector<State>& states = update_.states;
    const bool remainder = update_.master_kind == Master::remainder;
    if (states.empty() || update_.param_dtype != DType::bf16) return nullptr;
    const auto all = [&](auto&& stored) { return std::all_of(states.begin(), states.end(), stored); };
    if (remainder && all([](const State& state) { return state.scales != nullptr; }))
      return kernels_.update_int8[int(update_.rule)][int(update_.grad_dtype)];
    const bool random = states[0].storage == Storage::bf16_random;
    if (!all([&](const State& state) { return state.storage == (random ? Storage::bf16_random : Storage::bf16); }) ||
        (!remainder && update_.param_random != random))
      return nullptr;
    return kernels_.update_bf16[random][int(update_.rule)][int(update_.master_kind)][int(update_.grad_dtype)];
  }

  void blocks(std::size_t begin, std::size_t end) const noexcept {
    if (in_place_ != nullptr) return in_place_(arrays_, update_.scalars.data(), begin, end);
    for (; begin < end; begin += staged_numel) staged(begin, std::min(staged_numel, end - begin));
  }

  // Blocks by way of fp32 buffers.
  void staged(std::size_t at, std::size_t count) const noexcept {
    // Rows of a power of two would put the same element of all states on one line of the cache.
    alignas(64) float buffers[max_states + 1][staged_numel + 112];
    const auto shifted = [&](void* base, std::size_t bytes) {
      return base == nullptr ? nullptr : static_cast<char*>(base) + at * bytes;
    };
    Arrays arrays{shifted(update_.param, size_of(update_.param_dtype)), shifted(update_.grad, size_of(update_.grad_dtype)),
                  shifted(update_.master, size_of(update_.master_kind)), {}, {}};
    const State param{update_.param, nullptr, Storage::bf16_random};
    if (update_.param_random) arrays.param = decode(param, at, count, buffers[max_states]);
    for (std::size_t k = 0; k < update_.states.size(); ++k)
      arrays.states[k] = decode(update_.states[k], at, count, buffers[k]);
    fp32_(arrays, update_.scalars.data(), 0, count);
    for (std::size_t i = 0; i < count; i += block_numel) {
      alignas(64) unsigned random[2][block_numel];
      const std::uint64_t block = update_.first_block + (at + i) / block_numel;
      for (unsigned draw = 0; draw < 2; ++draw)
        if (draws_[draw]) kernels_.random(random[draw], block_key(update_.random_key, block, draw));
      for (std::size_t k = 0; k < update_.states.size(); ++k)
        encode(update_.states[k], at + i, static_cast<float*>(arrays.states[k]) + i, random[k / 2], k % 2);
      if (update_.param_random) encode(param, at + i, buffers[max_states] + i, random[1], true);
    }
  }

  // Fewer elements than a block: through a block of zeros.
  void last(std::size_t at, std::size_t count) const noexcept {
    alignas(64) char copies[max_states + 3][block_numel * sizeof(float)] = {};
    Update block = update_;
    block.first_block += at / block_numel;
    std::vector<std::pair<char*, Array>> copied;
    for (const Array& array : arrays_of(block)) {
      char* const from = array.at(at);
      *array.data = from;
      if (array.grain > 1) continue;
      *array.data = std::memcpy(copies[copied.size()], from, count * array.value_bytes);
      copied.emplace_back(from, array);
    }
    Pass(kernels_, block).blocks(0, block_numel);
    for (const auto& [to, array] : copied)
      if (array.changes) std::memcpy(to, *array.data, count * array.value_bytes);
  }

  void* decode(const State& state, std::size_t at, std::size_t count, float* buffer) const noexcept {
    const char* const values = static_cast<const char*>(state.values) + at * size_of(state.storage);
    if (state.storage == Storage::fp32) return const_cast<char*>(values);
    const auto* const scales = static_cast<const float*>(state.scales);
    for (std::size_t i = 0; i < count; i += block_numel)
      kernels_.decode[int(state.storage)](buffer + i, values + i * size_of(state.storage),
                                          scales == nullptr ? 0 : scales[(at + i) / block_numel]);
    return buffer;
  }

  void encode(const State& state, std::size_t at, const float* values, const unsigned* random, bool high) const noexcept {
    if (state.storage == Storage::fp32) return;
    char* const to = static_cast<char*>(state.values) + at * size_of(state.storage);
    const float scale = kernels_.encode[int(state.storage)][high](to, values, random);
    if (state.scales != nullptr) static_cast<float*>(state.scales)[at / block_numel] = scale;
  }

  const Kernels& kernels_;
  const Update& update_;
  Arrays arrays_;
  UpdateKernel fp32_, in_place_;
  bool draws_[2] = {};
};

}  // namespace

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->isa);
  return names;
}

std::string isa() { return chosen().load()->isa; }

void set_isa(const std::string& name) {
  for (const Kernels* kernels : available()) {
    if (name != kernels->isa) continue;
    chosen().store(kernels);
    return;
  }
  throw std::invalid_argument("no instruction set \"" + name + "\" on this machine");
}

std::vector<Sums> update(Pool* pool, std::size_t numel, Update update, const std::vector<std::uintptr_t>& summed) {
  const int rule = int(update.rule);
  if (int(update.states.size()) != state_count[rule] || int(update.scalars.size()) != scalar_count[rule])
    throw std::invalid_argument("not the states and scalars of this rule");
  if (update.param_random && (update.param_dtype != DType::bf16 || update.master_kind != Master::none))
    throw std::invalid_argument("only a bf16 parameter without master is rounded stochastically");
  const Pass pass(*chosen().load(), update);
  const std::vector<Array> all = arrays_of(update);
  std::vector<Array> arrays;
  for (const std::uintptr_t address : summed) {
    const auto is_there = [&](const Array& array) { return reinterpret_cast<std::uintptr_t>(*array.data) == address; };
    const auto found = std::find_if(all.begin(), all.end(), is_there);
    if (found == all.end()) throw std::invalid_argument("what is summed is no array of the update");
    arrays.push_back(*found);
  }
  // Those of the first piece's arrays, those of the second's, ...
  std::vector<Sums> sums(arrays.size() * (numel / piece_numel + (numel % piece_numel != 0)));
  for_ranges(pool, numel, piece_numel, [&](std::size_t begin, std::size_t end) noexcept {
    const DefaultArithmetic arithmetic;
    // While the piece is in the cache, where sums cost a third of what they do in memory.
    Sums* const of_piece = sums.data() + begin / piece_numel * arrays.size();
    for (std::size_t i = 0; i < arrays.size(); ++i) of_piece[i].first = of_piece[i].second = arrays[i].sum(begin, end);
    pass.run(begin, end);
    for (std::size_t i = 0; i < arrays.size(); ++i)
      if (arrays[i].changes) of_piece[i].second = arrays[i].sum(begin, end);
  });
  std::vector<Sums> joined(arrays.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const Array& array = arrays[i % arrays.size()];
    const std::size_t begin = i / arrays.size() * piece_numel;
    const std::size_t nbytes = array.offset(std::min(begin + piece_numel, numel)) - array.offset(begin);
    Sums& sum = joined[i % arrays.size()];
    sum = {crc32c_join(sum.first, sums[i].first, nbytes), crc32c_join(sum.second, sums[i].second, nbytes)};
  }
  return joined;
}

double deposit(Pool* pool, std::size_t numel, void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add) {
  const std::size_t nbytes = numel * size_of(dst_dtype);
  const bool on_line = reinterpret_cast<std::uintptr_t>(dst) % line_bytes == 0;
  const Write write = add ? Write::add : nbytes >= streamed_bytes && on_line ? Write::past_cache : Write::over;
  const auto kernel = chosen().load()->deposit[int(dst_dtype)][int(src_dtype)][int(write)];
  return sum_blocks(pool, numel,
                    [&](std::size_t begin, std::size_t end) noexcept { return kernel(dst, src, begin, end); });
}

double squared_norm(Pool* pool, std::size_t numel, const void* src, DType dtype) {
  const auto kernel = chosen().load()->squared_norm[int(dtype)];
  return sum_blocks(pool, numel, [&](std::size_t begin, std::size_t end) noexcept { return kernel(src, begin, end); });
}

void pack(Pool* pool, std::size_t blocks, Wire format, void* packed, const void* values, DType dtype) {
  const auto kernel = chosen().load()->pack[int(format)][int(dtype)];
  for_ranges(pool, blocks, piece_numel / block_numel, [&](std::size_t begin, std::size_t end) noexcept {
    const DefaultArithmetic arithmetic;
    kernel(static_cast<unsigned char*>(packed), values, begin, end);
  });
}

void unpack(Pool* pool, std::size_t blocks, Wire format, void* values, DType dtype, const void* packed, bool add) {
  const auto kernel = require(chosen().load()->unpack[int(format)][int(dtype)][add], "codes are added to fp32 alone");
  for_ranges(pool, blocks, piece_numel / block_numel, [&](std::size_t begin, std::size_t end) noexcept {
    const DefaultArithmetic arithmetic;
    kernel(values, static_cast<const unsigned char*>(packed), begin, end);
  });
}

void copy(Pool* pool, void* dst, const void* src, std::size_t nbytes) {
  for_ranges(pool, nbytes, copy_piece_bytes, [&](std::size_t begin, std::size_t end) noexcept {
    std::memcpy(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin, end - begin);
  });
}

}  // namespace penstock
