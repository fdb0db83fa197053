// The border between Python and C++: addresses and lengths in, no tensors, no policy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstdint>

#include "pool.h"
#include "rules.h"

namespace nb = nanobind;
using namespace nb::literals;
using penstock::DType;
using penstock::Master;
using penstock::Pool;

namespace {

// An address as Python holds it. Nothing can check that it is valid: src/penstock/rules/native.py does.
using Address = std::uintptr_t;

// Lets other Python threads run during a call. A daemon thread that wants the interpreter back after its end is unwound
// by force, which a destructor must not let pass: such a thread stays here until the process is gone.
class InterpreterReleased {
 public:
  InterpreterReleased() noexcept : thread_(PyEval_SaveThread()) {}
  ~InterpreterReleased() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {
      for (;;) pause();
    }
  }
  InterpreterReleased(const InterpreterReleased&) = delete;
  InterpreterReleased& operator=(const InterpreterReleased&) = delete;

 private:
  PyThreadState* thread_;
};
using Release = nb::call_guard<InterpreterReleased>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_native, m) {
  // A pool that outlives the interpreter is ended by the process: no reason for a warning.
  nb::set_leak_warnings(false);

  nb::enum_<DType>(m, "DType").value("FP32", DType::fp32).value("BF16", DType::bf16).value("FP16", DType::fp16);
  nb::enum_<Master>(m, "Master")
      .value("NONE", Master::none)
      .value("REMAINDER", Master::remainder)
      .value("FP32", Master::fp32);

  m.def("isas", &penstock::isas);
  m.def("isa", &penstock::isa);
  m.def("set_isa", &penstock::set_isa, "name"_a);

  nb::class_<Pool>(m, "Pool")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &Pool::threads)
      .def(
          "copy",
          [](Pool& pool, Address dst, Address src, std::size_t nbytes) {
            penstock::copy(&pool, pointer<void>(dst), pointer<const void>(src), nbytes);
          },
          Release(), "dst"_a, "src"_a, "nbytes"_a)
      .def("close", &Pool::close, Release());

  m.def(
      "adam",
      [](Pool* pool, std::size_t numel, Address param, DType param_dtype, Address grad, DType grad_dtype,
         Address master, Master master_kind, Address exp_avg, Address exp_avg_sq, float grad_scale, float l2,
         float decay, float lerp_weight, bool lerp_from_grad, float beta2, float grad_sq_weight, float bias2_sqrt,
         float eps, float neg_step_size) {
        const penstock::AdamTask task{
            .param = pointer<void>(param),
            .grad = pointer<const void>(grad),
            .master = pointer<void>(master),
            .exp_avg = pointer<float>(exp_avg),
            .exp_avg_sq = pointer<float>(exp_avg_sq),
            .grad_scale = grad_scale,
            .l2 = l2,
            .decay = decay,
            .lerp_weight = lerp_weight,
            .lerp_from_grad = lerp_from_grad,
            .beta2 = beta2,
            .grad_sq_weight = grad_sq_weight,
            .bias2_sqrt = bias2_sqrt,
            .eps = eps,
            .neg_step_size = neg_step_size,
        };
        penstock::adam(pool, numel, task, param_dtype, master_kind, grad_dtype);
      },
      Release(), "pool"_a.none(), "numel"_a, "param"_a, "param_dtype"_a, "grad"_a, "grad_dtype"_a, "master"_a,
      "master_kind"_a, "exp_avg"_a, "exp_avg_sq"_a, nb::kw_only(), "grad_scale"_a, "l2"_a, "decay"_a, "lerp_weight"_a,
      "lerp_from_grad"_a, "beta2"_a, "grad_sq_weight"_a, "bias2_sqrt"_a, "eps"_a, "neg_step_size"_a);

  m.def(
      "deposit",
      [](Pool* pool, std::size_t numel, Address dst, DType dst_dtype, Address src, DType src_dtype, bool add) {
        return penstock::deposit(pool, numel, pointer<void>(dst), dst_dtype, pointer<const void>(src), src_dtype, add);
      },
      Release(), "pool"_a.none(), "numel"_a, "dst"_a, "dst_dtype"_a, "src"_a, "src_dtype"_a, nb::kw_only(), "add"_a);

  m.def(
      "squared_norm",
      [](Pool* pool, std::size_t numel, Address src, DType dtype) {
        return penstock::squared_norm(pool, numel, pointer<const void>(src), dtype);
      },
      Release(), "pool"_a.none(), "numel"_a, "src"_a, "dtype"_a);
}
