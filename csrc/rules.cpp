#include "rules.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <stdexcept>

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
static_assert(piece_numel % staged_numel == 0);

std::size_t size_of(DType dtype) noexcept { return dtype == DType::fp32 ? 4 : 2; }
std::size_t size_of(Master kind) noexcept { return kind == Master::fp32 ? 4 : 2; }
std::size_t size_of(Storage storage) noexcept {
  return storage == Storage::fp32 ? 4 : storage == Storage::bf16 || storage == Storage::bf16_random ? 2 : 1;
}

using UpdateKernel = void (*)(const Arrays&, const float*, std::size_t, std::size_t) noexcept;

struct Words {
  alignas(64) unsigned words[2][block_numel];
};

class Staged {
 public:
  Staged(const Kernels& kernels, UpdateKernel kernel, const Update& update) noexcept
      : kernels_(kernels), kernel_(kernel), update_(update) {
    for (const State& state : update.states) draws_[0] |= state.storage == Storage::bf16_random;
    draws_[1] = update.param_random || (update.states.size() > 2 && update.states[2].storage == Storage::bf16_random);
  }

  void run(std::size_t begin, std::size_t end) const noexcept {
    for (; begin + block_numel <= end; begin += staged_numel) {
      const std::size_t count = std::min(staged_numel, (end - begin) / block_numel * block_numel);
      whole(begin, count);
      if (count < staged_numel) {
        begin += count;
        break;
      }
    }
    if (begin < end) last(begin, end - begin);
  }

 private:
  // Blocks of the arrays as they lie in memory.
  void whole(std::size_t at, std::size_t count) const noexcept {
    // Rows of a power of two would put the same element of all states on one line of the cache.
    alignas(64) float buffers[max_states + 1][staged_numel + 112];
    Arrays arrays{};
    const auto shift = [&](const void* base, std::size_t size) {
      return base == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(base)) + at * size;
    };
    arrays.grad = shift(update_.grad, size_of(update_.grad_dtype));
    arrays.master = shift(update_.master, size_of(update_.master_kind));
    arrays.param = shift(update_.param, size_of(update_.param_dtype));
    auto* const param = static_cast<unsigned short*>(arrays.param);
    if (update_.param_random) {
      arrays.param = buffers[max_states];
      for (std::size_t i = 0; i < count; i += block_numel) kernels_.decode_bf16(buffers[max_states] + i, param + i);
    }
    for (std::size_t k = 0; k < update_.states.size(); ++k) arrays.states[k] = decode(update_.states[k], at, count, buffers[k]);
    kernel_(arrays, update_.scalars.data(), 0, count);
    for (std::size_t i = 0; i < count; i += block_numel) {
      const std::uint64_t block = update_.first_block + (at + i) / block_numel;
      Words random;
      for (unsigned draw = 0; draw < 2; ++draw) {
        if (!draws_[draw]) continue;
        kernels_.random(random.words[draw], block_key(update_.random_key, block, draw));
      }
      for (std::size_t k = 0; k < update_.states.size(); ++k)
        encode(update_.states[k], at + i, static_cast<float*>(arrays.states[k]) + i, random.words[k / 2], k % 2);
      if (update_.param_random) kernels_.encode_bf16_random[1](param + i, buffers[max_states] + i, random.words[1]);
    }
  }

  // Fewer elements than a block: through a block of zeros.
  void last(std::size_t at, std::size_t count) const noexcept {
    alignas(64) char copies[max_states + 3][block_numel * sizeof(float)] = {};
    Update block = update_;
    const auto move = [&](void*& address, std::size_t size, int k) {
      if (address == nullptr) return;
      char* const from = static_cast<char*>(address) + at * size;
      std::memcpy(copies[k], from, count * size);
      address = copies[k];
    };
    const auto back = [&](void* address, std::size_t size, int k) {
      if (address != nullptr) std::memcpy(static_cast<char*>(address) + at * size, copies[k], count * size);
    };
    void* grad = const_cast<void*>(update_.grad);
    const std::size_t param_size = size_of(update_.param_dtype), grad_size = size_of(update_.grad_dtype);
    const std::size_t master_size = size_of(update_.master_kind);
    move(block.param, param_size, max_states);
    move(block.master, master_size, max_states + 1);
    move(grad, grad_size, max_states + 2);
    block.grad = grad;
    for (std::size_t k = 0; k < block.states.size(); ++k) {
      move(block.states[k].values, size_of(block.states[k].storage), int(k));
      if (block.states[k].scales != nullptr) block.states[k].scales += at / block_numel;
    }
    block.first_block += at / block_numel;
    Staged(kernels_, kernel_, block).whole(0, block_numel);
    back(update_.param, param_size, max_states);
    back(update_.master, master_size, max_states + 1);
    for (std::size_t k = 0; k < update_.states.size(); ++k)
      back(update_.states[k].values, size_of(update_.states[k].storage), int(k));
  }

  void* decode(const State& state, std::size_t at, std::size_t count, float* buffer) const noexcept {
    if (state.storage == Storage::fp32) return static_cast<float*>(state.values) + at;
    for (std::size_t i = 0; i < count; i += block_numel) {
      if (state.storage == Storage::bf16 || state.storage == Storage::bf16_random) {
        kernels_.decode_bf16(buffer + i, static_cast<const unsigned short*>(state.values) + at + i);
      } else {
        kernels_.decode_int8[state.storage == Storage::int8_signed](
            buffer + i, static_cast<const unsigned char*>(state.values) + at + i, state.scales[(at + i) / block_numel]);
      }
    }
    return buffer;
  }

  void encode(const State& state, std::size_t at, const float* values, const unsigned* random, bool high) const noexcept {
    switch (state.storage) {
      case Storage::fp32:
        return;
      case Storage::bf16:
        return kernels_.encode_bf16(static_cast<unsigned short*>(state.values) + at, values);
      case Storage::bf16_random:
        return kernels_.encode_bf16_random[high](static_cast<unsigned short*>(state.values) + at, values, random);
      case Storage::int8_signed:
      case Storage::int8_unsigned:
        state.scales[at / block_numel] = kernels_.encode_int8[state.storage == Storage::int8_signed](
            static_cast<unsigned char*>(state.values) + at, values);
    }
  }

  const Kernels& kernels_;
  UpdateKernel kernel_;
  const Update& update_;
  bool draws_[2] = {};
};

// The kernel that needs no buffers for states in fewer bits, or null where there is none.
UpdateKernel direct(const Kernels& kernels, const Update& update) {
  const bool remainder = update.master_kind == Master::remainder;
  if (update.states.empty() || update.param_dtype != DType::bf16 || update.master_kind == Master::fp32) return nullptr;
  const auto all = [&](auto&& stored) { return std::all_of(update.states.begin(), update.states.end(), stored); };
  if (remainder && all([](const State& state) { return state.scales != nullptr; }))
    return kernels.update_int8[int(update.rule)][int(update.grad_dtype)];
  const bool random = update.states[0].storage == Storage::bf16_random;
  if (!all([&](const State& state) { return state.storage == (random ? Storage::bf16_random : Storage::bf16); }))
    return nullptr;
  if (!remainder && update.param_random != random) return nullptr;
  return kernels.update_bf16[random][int(update.rule)][remainder][int(update.grad_dtype)];
}

// The arrays of an update that lie at these addresses.
std::vector<SummedArray> arrays_at(const std::vector<const void*>& addresses, const Update& update) {
  if (addresses.empty()) return {};
  std::vector<SummedArray> all{{update.grad, size_of(update.grad_dtype), 1, false},
                               {update.param, size_of(update.param_dtype), 1, true},
                               {update.master, size_of(update.master_kind), 1, true}};
  for (const State& state : update.states) {
    all.push_back({state.values, size_of(state.storage), 1, true});
    all.push_back({state.scales, sizeof(float), block_numel, true});
  }
  std::vector<SummedArray> found;
  for (const void* const address : addresses) {
    const auto at = std::find_if(all.begin(), all.end(), [&](const SummedArray& array) { return array.data == address; });
    if (address == nullptr || at == all.end()) throw std::invalid_argument("what is summed is no array of the update");
    found.push_back(*at);
  }
  return found;
}

template <class Kernel>
Kernel require(Kernel kernel, const char* what) {
  if (kernel == nullptr) throw std::invalid_argument(what);
  return kernel;
}

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

std::vector<Sums> update(Pool* pool, std::size_t numel, const Update& update, const std::vector<const void*>& summed) {
  const Kernels& kernels = *chosen().load();
  const int rule = int(update.rule);
  if (int(update.states.size()) != state_count[rule] || int(update.scalars.size()) != scalar_count[rule])
    throw std::invalid_argument("not the states and scalars of this rule");
  if (update.param_random && (update.param_dtype != DType::bf16 || update.master_kind != Master::none))
    throw std::invalid_argument("only a bf16 parameter without master is rounded stochastically");
  bool staged = update.param_random;
  Arrays arrays{update.param, update.grad, update.master, {}, {}, update.random_key, update.first_block};
  for (std::size_t k = 0; k < update.states.size(); ++k) {
    arrays.states[k] = update.states[k].values;
    arrays.scales[k] = update.states[k].scales;
    staged |= update.states[k].storage != Storage::fp32;
  }
  // Rounded stochastically, a parameter passes through an fp32 buffer.
  const int param = int(update.param_random ? DType::fp32 : update.param_dtype);
  const auto kernel = require(kernels.update[rule][param][int(update.master_kind)][int(update.grad_dtype)],
                              "no kernel for this dtype of the parameter with this kind of master");
  const Staged through_buffers(kernels, kernel, update);
  const auto without_buffers = direct(kernels, update);
  const auto change = [&](std::size_t begin, std::size_t end) noexcept {
    const DefaultArithmetic arithmetic;
    if (without_buffers != nullptr) {
      const std::size_t whole = begin + (end - begin) / block_numel * block_numel;
      without_buffers(arrays, update.scalars.data(), begin, whole);
      begin = whole;
    }
    if (staged) return through_buffers.run(begin, end);
    kernel(arrays, update.scalars.data(), begin, end);
  };
  PieceSums sums(arrays_at(summed, update), numel, piece_numel);
  for_ranges(pool, numel, piece_numel, [&](std::size_t begin, std::size_t end) noexcept {
    sums.before(begin);
    change(begin, end);
    sums.after(begin);
  });
  return sums.join();
}

double deposit(Pool* pool, std::size_t numel, void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add) {
  const std::size_t nbytes = numel * (dst_dtype == DType::fp32 ? 4 : 2);
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
