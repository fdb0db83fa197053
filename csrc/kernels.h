// The kernels that the translation unit of every instruction set has, as plain function pointers.
#pragma once

#include <cstddef>
#include <cstdint>
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

// The optimizers' arithmetic (rules_impl.h). Scalars are the factor on the gradient, those of the rule, and flags, 0 or 1: whether
// weight decay is added to the gradient, whether exp_avg is interpolated from the gradient, whether this is the first update, and
// whether the momentum looks ahead (nesterov).
enum class Rule : int { adam = 0, amsgrad = 1, sgd = 2, sgd_momentum = 3, adagrad = 4, lion = 5 };
inline constexpr int rule_count = 6;
inline constexpr int max_states = 3;
inline constexpr int flag_count = 4;
// How many states and scalars each takes.
inline constexpr int state_count[rule_count] = {2, 3, 0, 1, 1, 1};
inline constexpr int scalar_count[rule_count] = {13, 13, 9, 9, 8, 11};

// How a state, or a parameter without master, is stored. A parameter is bf16 (nearest even unless random) or as its dtype says;
// states are fp32, bf16 or 8-bit codes with an fp32 scale for each block of 256.
enum class Storage : int { fp32 = 0, bf16 = 1, bf16_random = 2, int8_signed = 3, int8_unsigned = 4 };
inline constexpr int storage_count = 5;

// The arrays of one update. Pointers are to the first element; all arrays have the same number of elements.
struct Arrays {
  void* param;
  const void* grad;
  void* master;  // null for Master::none
  void* states[max_states];
  float* scales[max_states];  // of 8-bit states, one for each block of 256
  std::uint64_t random_key = 0;   // of this step
  std::uint64_t first_block = 0;  // number of the first block of 256 elements, in the order of all parameters
};

// Random bits belong to blocks of this many elements, and so do the scales of 8-bit states.
inline constexpr std::size_t block_numel = 256;

// How a deposit writes. What is written past the cache must start at a line of it; a line that is written whole need not be
// read from memory first, and leaves the cache to others.
enum class Write : int { over = 0, add = 1, past_cache = 2 };
inline constexpr int write_count = 3;
inline constexpr std::size_t line_bytes = 64;

// Block quantization of values between ranks: for each block of 256 elements its scale in fp32, then its codes. The codes are
// signed integers of 8 bits, fp8 (e4m3, without infinities), or signed integers of 4 bits.
enum class Wire : int { int8 = 0, fp8 = 1, int4 = 2 };
inline constexpr int wire_count = 3;

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection in which every bit depends on every other.
namespace {
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
// The key of a block's random words: draw 0 for the states 0 and 1, draw 1 for the state 2 and the parameter.
inline std::uint64_t block_key(std::uint64_t random_key, std::uint64_t block, unsigned draw) {
  return mix(random_key ^ (2 * block + draw));
}
}  // namespace

// One fused pass of a rule over the elements [begin, end), whole blocks.
using UpdateKernel = void (*)(const Arrays&, const float* scalars, std::size_t begin, std::size_t end) noexcept;

// The kernels of one instruction set, working on elements [begin, end). Null where a combination does not exist.
struct Kernels {
  const char* isa;
  // By rule, parameter dtype, kind of master and gradient dtype; the states are fp32.
  UpdateKernel update[rule_count][dtype_count][master_count][dtype_count];
  // The same with all states in bf16, and a bf16 parameter with a remainder or without a master, which is then rounded like the
  // states: by rounding (nearest or random), rule, kind of master and gradient dtype.
  UpdateKernel update_bf16[2][rule_count][master_count][dtype_count];
  // The same with all states in 8 bits, for a bf16 parameter with remainder: by rule and gradient dtype.
  UpdateKernel update_int8[rule_count][dtype_count];
  // dst = src, or dst += src, by dtype of dst, dtype of src and how to write; returns the squared norm of dst's
  // range afterwards. A range is at most one norm block and starts at one.
  double (*deposit[dtype_count][dtype_count][write_count])(void* dst, const void* src, std::size_t begin,
                                                           std::size_t end) noexcept;
  // The squared norm of a range that is at most one norm block and starts at one.
  double (*squared_norm[dtype_count])(const void* src, std::size_t begin, std::size_t end) noexcept;

  // Storage of states and parameters in fewer bits, one block at a time.
  // The random words of a block, from its key.
  void (*random)(unsigned* to, std::uint64_t key) noexcept;
  // By storage. Only 8 bits have a scale.
  void (*decode[storage_count])(float* to, const void* from, float scale) noexcept;
  // By storage, and whether random bits are the high 16 of each word, or the low. Returns the scale.
  float (*encode[storage_count][2])(void* to, const float* from, const unsigned* random) noexcept;

  // Wire formats, on blocks [begin, end): by format and dtype of the values; the second by whether to add as well, which
  // goes into fp32 alone.
  void (*pack[wire_count][dtype_count])(unsigned char* packed, const void* values, std::size_t begin,
                                        std::size_t end) noexcept;
  void (*unpack[wire_count][dtype_count][2])(void* values, const unsigned char* packed, std::size_t begin,
                                             std::size_t end) noexcept;
};

extern const Kernels kernels_generic;
#ifdef PENSTOCK_X86_64
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace penstock
