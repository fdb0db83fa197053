// The arithmetic of the optimizers on host memory: picks the instruction set, splits the work, adds up norms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace penstock {

// The instruction sets that this build has and this processor can run, best first.
std::vector<std::string> isas();
// The one in use: the best, unless set_isa chose another.
std::string isa();
// Chooses another for the whole process, for tests: results do not depend on it. Throws std::invalid_argument.
void set_isa(const std::string& name);

// In all of these a null pool means the calling thread alone. Denormals are kept and rounding is to nearest even,
// whatever mode the calling thread is in. Throws std::invalid_argument for a combination without a kernel.

struct State {
  void* values;
  void* scales;  // of 8-bit states in fp32, else null
  Storage storage;
};

struct Update {
  Rule rule;
  DType param_dtype;
  Master master_kind;
  DType grad_dtype;
  void* param;
  void* grad;    // is only read
  void* master;  // null for Master::none
  std::vector<State> states;
  std::vector<float> scalars;
  bool param_random;          // a bf16 parameter without master is rounded stochastically
  std::uint64_t random_key;   // of this step
  std::uint64_t first_block;  // number of the segment's first block of 256, in the order of all parameters
};

// The CRC-32C of an array before an update, and after it.
using Sums = std::pair<std::uint32_t, std::uint32_t>;

// One fused pass of a rule over `numel` elements, in place. Returns the sums of those arrays of the update whose addresses are
// `summed`, in their order; throws std::invalid_argument for another address.
std::vector<Sums> update(Pool* pool, std::size_t numel, Update update, const std::vector<std::uintptr_t>& summed = {});
// dst = src or dst += src; returns the squared norm of dst afterwards.
double deposit(Pool* pool, std::size_t numel, void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add);
double squared_norm(Pool* pool, std::size_t numel, const void* src, DType dtype);
// Blocks of 256 elements into a wire format, and back: values = codes, or, of fp32 values, values += codes.
void pack(Pool* pool, std::size_t blocks, Wire format, void* packed, const void* values, DType dtype);
void unpack(Pool* pool, std::size_t blocks, Wire format, void* values, DType dtype, const void* packed, bool add);
// memcpy by several threads.
void copy(Pool* pool, void* dst, const void* src, std::size_t nbytes);

}  // namespace penstock
