// Every operator of CUDA tensors, computed by the cpu's kernel on the same memory: device memory is the host's here.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

bool on_cuda(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The same memory as a tensor of the cpu's.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!on_cuda(tensor) || tensor.is_sparse()) return tensor;
  void* data = tensor.storage().data_ptr() ? tensor.data_ptr() : nullptr;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto alias = at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options, at::kCPU);
  if (tensor.is_conj()) alias = alias.conj();
  if (tensor.is_neg()) alias = at::_neg_view(alias);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

// A tensor of the cpu's in memory of the device, with the same strides.
at::Tensor to_cuda(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  auto there = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (tensor.numel() == 0) return there;
  if (tensor.is_non_overlapping_and_dense()) {
    memcpy(there.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size());
  } else {
    as_cpu(there).copy_(tensor);
  }
  return there;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The operator of its key, called with tensors and devices of the cpu's.
struct OnCpu : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size();
    const std::vector<IValue> given(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    c10::Device device(at::kCUDA, at::cuda::current_device());
    Stack inner;
    for (size_t i = 0; i < count; i++) inner.push_back(passed(given[i], schema.arguments()[i], device));
    if (device.index() < 0) device = c10::Device(at::kCUDA, at::cuda::current_device());
    {
      const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset |
                                                     c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
      op.callBoxed(&inner);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();  // as after a launch: an error that nobody has taken is found
    for (size_t i = 0; i < schema.returns().size(); i++) {
      const auto& result = schema.returns()[i];
      torch::jit::push(*stack, is_written(result) ? written(schema, given, result, inner[i])
                                                  : returned(inner[i], device));
    }
  }

 private:
  static IValue passed(const IValue& value, const c10::Argument& argument, c10::Device& device) {
    const auto alias = [&](const at::Tensor& tensor) {
      if (on_cuda(tensor)) device = tensor.device();
      return as_cpu(tensor);
    };
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      const bool to_be_sized = on_cuda(tensor) && is_written(argument) && argument.is_out() && tensor.numel() == 0;
      return to_be_sized ? at::empty({0}, tensor.options().device(at::kCPU)) : alias(tensor);
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(alias(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor.has_value() ? std::optional(alias(*tensor)) : tensor);
      }
      return tensors;
    }
    if (value.isDevice()) {
      device = value.toDevice();
      return c10::Device(at::kCPU);
    }
    return value.isGenerator() ? IValue() : value;  // the default one of the cpu
  }

  // The argument that a result is the same tensor as; it gets the size that the cpu's kernel gave its own.
  static IValue written(const c10::FunctionSchema& schema, const std::vector<IValue>& given, const c10::Argument& result,
                        const IValue& value) {
    for (size_t i = 0; i < given.size(); i++) {
      const auto& argument = schema.arguments()[i];
      if (!is_written(argument) || argument.alias_info()->beforeSets() != result.alias_info()->beforeSets()) continue;
      if (given[i].isTensor() && value.isTensor() && value.toTensor().sizes() != given[i].toTensor().sizes()) {
        const at::Tensor& target = given[i].toTensor();
        target.resize_(value.toTensor().sizes());
        as_cpu(target).copy_(value.toTensor());
      }
      return given[i];
    }
    TORCH_CHECK(false, "no argument of ", schema.name(), " is what it returns");
  }

  static IValue returned(const IValue& value, c10::Device device) {
    if (value.isTensor()) return to_cuda(value.toTensor(), device);
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(to_cuda(tensor, device));
    return tensors;
  }
};

// As torch's own: one copy by the runtime where nothing is cast nor arranged anew, else by way of a tensor on the device.
at::Tensor& copy_by_runtime(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const bool casts = self.scalar_type() != source.scalar_type() || self.is_conj() != source.is_conj();
  if (!casts && self.is_contiguous() && source.is_contiguous() && self.sizes() == source.sizes()) {
    at::native::copy_(self, source, non_blocking);
  } else if (self.is_cuda() && source.is_cuda()) {
    as_cpu(self).copy_(as_cpu(source));
  } else if (self.is_cuda()) {
    auto there = at::empty(source.sizes(), source.options().device(self.device()));
    at::native::copy_(there, source.contiguous(), non_blocking);
    as_cpu(self).copy_(as_cpu(there));
  } else {
    auto there = at::empty(source.sizes(), self.options().device(source.device()));
    as_cpu(there).copy_(as_cpu(source));
    if (self.is_contiguous()) {
      at::native::copy_(self, there, non_blocking);
    } else {
      auto here = at::empty(self.sizes(), self.options());
      at::native::copy_(here, there, false);
      self.copy_(here);
    }
  }
  return self;
}

// An operator of the device's alone: its kernel would do nothing, and nobody would know.
struct Refused : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the emulation has no values of ", op.schema().operator_name());
  }
};

// What only deals with memory and metadata is the device's own.
const std::set<std::string> kKept = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::as_strided",
    "aten::view",
    "aten::view.dtype",
    "aten::_reshape_alias",
    "aten::unfold",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::_local_scalar_dense",
    "aten::is_set_to",
    "aten::copy_",
    "aten::_fused_sdp_choice",
    "aten::_efficientzerotensor",
    "aten::_copy_from_and_resize",
    "aten::view_as_real",
    "aten::view_as_complex",
    "aten::_conj",
    "aten::_neg_view",
    "aten::storage_resize_",
};

bool has_cpu_kernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  constexpr DispatchKey keys[] = {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd,
                                  DispatchKey::CompositeImplicitAutograd,
                                  DispatchKey::CompositeExplicitAutogradNonFunctional};
  return std::any_of(std::begin(keys), std::end(keys), [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

// Put the cpu's kernels in the place of the device's; how many there are.
int install() {
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);  // each operator has a kernel already
  static std::vector<c10::RegistrationHandleRAII> registered;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!op || !op->hasSchema() || kKept.count(full) != 0 || name.name.rfind("aten::", 0) != 0) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    auto kernel = has_cpu_kernel(*op) ? c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<OnCpu>())
                                      : c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Refused>());
    registered.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr,
                                                 "the emulation's"));
  }
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("copy_", TORCH_FN(copy_by_runtime));
  // Of attention the cpu has one kernel for all: its sum of products. The others are the device's alone.
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return static_cast<int>(registered.size());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("install", &install); }
