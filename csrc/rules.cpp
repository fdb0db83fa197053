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

void adam(Pool* pool, std::size_t numel, const AdamTask& task, DType param, Master master, DType grad) {
  const auto kernel = require(chosen().load()->adam[int(param)][int(master)][int(grad)],
                              "no Adam kernel for this dtype of the parameter with this kind of master");
  for_ranges(pool, numel, piece_numel, [&](std::size_t begin, std::size_t end) noexcept {
    const DefaultArithmetic arithmetic;
    kernel(task, begin, end);
  });
}

double deposit(Pool* pool, std::size_t numel, void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add) {
  const auto kernel = chosen().load()->deposit[int(dst_dtype)][int(src_dtype)][add];
  return sum_blocks(pool, numel,
                    [&](std::size_t begin, std::size_t end) noexcept { return kernel(dst, src, begin, end); });
}

double squared_norm(Pool* pool, std::size_t numel, const void* src, DType dtype) {
  const auto kernel = chosen().load()->squared_norm[int(dtype)];
  return sum_blocks(pool, numel, [&](std::size_t begin, std::size_t end) noexcept { return kernel(src, begin, end); });
}

void copy(Pool* pool, void* dst, const void* src, std::size_t nbytes) {
  for_ranges(pool, nbytes, copy_piece_bytes, [&](std::size_t begin, std::size_t end) noexcept {
    std::memcpy(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin, end - begin);
  });
}

}  // namespace penstock
