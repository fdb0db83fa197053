// What every instruction set's translation unit offers: the same kernels, as plain function pointers.
#pragma once

#include <cstddef>
#include <type_traits>

namespace penstock {

enum class DType : int { fp32 = 0, bf16 = 1, fp16 = 2 };
inline constexpr int dtype_count = 3;

// How the fp32 value behind a parameter is kept.
enum class Master : int {
  none = 0,       // the parameter is the only copy
  remainder = 1,  // int16: what bf16(value), rounded half away, lacks to the fp32 bits
  fp32 = 2,       // a full fp32 copy; the parameter is that copy rounded to nearest even
};
inline constexpr int master_count = 3;

// Norms are summed in blocks of this many elements, counted from the start of the tensor, and the blocks' sums are
// added in order: neither threads nor instruction set can change a bit of the result.
inline constexpr std::size_t norm_block_numel = 16384;
// Within a block, element i is summed in lane i % norm_lanes; the lanes are added as a balanced tree.
inline constexpr std::size_t norm_lanes = 32;

// One update of Adam or AdamW. Pointers are to the first element; all arrays have the same number of elements.
struct AdamTask {
  void* param;
  const void* grad;
  void* master;  // null for Master::none
  float* exp_avg;
  float* exp_avg_sq;
  float grad_scale;      // g = grad * grad_scale; negative to maximize
  float l2;              // g += l2 * p (Adam's weight decay), unless 0
  float decay;           // p *= decay (AdamW's weight decay)
  float lerp_weight;     // exp_avg = fma(lerp_weight, g - exp_avg, lerp_from_grad ? g : exp_avg)
  bool lerp_from_grad;
  float beta2;
  float grad_sq_weight;  // exp_avg_sq = fma(grad_sq_weight * g, g, exp_avg_sq * beta2)
  float bias2_sqrt;      // denominator = sqrt(exp_avg_sq) / bias2_sqrt + eps
  float eps;
  float neg_step_size;   // p += neg_step_size * exp_avg / denominator
};

// The kernels of one instruction set, working on elements [begin, end). Null where a combination does not exist.
struct Kernels {
  const char* isa;
  // By parameter dtype, kind of master and gradient dtype.
  void (*adam[dtype_count][master_count][dtype_count])(const AdamTask&, std::size_t begin, std::size_t end) noexcept;
  // dst = src, or dst += src, by dtype of dst, dtype of src and whether to add; returns the squared norm of dst's
  // range afterwards. A range is at most one norm block and starts at one.
  double (*deposit[dtype_count][dtype_count][2])(void* dst, const void* src, std::size_t begin,
                                                 std::size_t end) noexcept;
  // The squared norm of a range that is at most one norm block and starts at one.
  double (*squared_norm[dtype_count])(const void* src, std::size_t begin, std::size_t end) noexcept;
};

extern const Kernels kernels_generic;
#ifdef PENSTOCK_X86_64
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace penstock
