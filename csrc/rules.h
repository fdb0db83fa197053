// The arithmetic of the optimizers on host memory: picks the instruction set, splits the work, adds up norms.
#pragma once

#include <cstddef>
#include <string>
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

// One fused pass of Adam or AdamW over `numel` elements, in place.
void adam(Pool* pool, std::size_t numel, const AdamTask& task, DType param, Master master, DType grad);
// dst = src or dst += src; returns the squared norm of dst afterwards.
double deposit(Pool* pool, std::size_t numel, void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add);
double squared_norm(Pool* pool, std::size_t numel, const void* src, DType dtype);
// memcpy by several threads.
void copy(Pool* pool, void* dst, const void* src, std::size_t nbytes);

}  // namespace penstock
