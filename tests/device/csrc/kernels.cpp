// Operators. Nearly all of them are one fallback: shapes come from torch's meta kernels, outputs are allocated by the host
// at once, and the cpu's kernel runs late, on the memory that only kernels may touch. So the numbers are those of the cpu,
// bit for bit. What has to know values to know shapes makes the host wait, and is counted.
#include "machine.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace strict {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

// The second key never runs anything: the first one comes before it. It is one of those for which torch lets
// `parameter.data = ...` go from the host to a device, as it does for CUDA.
const auto kKeys = c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::MTIA});

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// From the first byte of a tensor to the last one.
std::pair<uintptr_t, uintptr_t> extent(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {start, start + static_cast<size_t>(last + 1) * tensor.element_size()};
}

void use(Work& work, const Tensor& tensor, bool writes) {
  if (tensor.defined() && tensor.numel() > 0) {
    const auto [start, stop] = extent(tensor);
    work.operands.push_back({start, stop, writes});
  }
}

// The same memory as a tensor of the cpu, for kernels. It keeps nothing alive.
Tensor for_kernels(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(alias(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// As a kernel sees its scalars: taken when it is enqueued.
Tensor taken_now(const Tensor& tensor) {
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

Tensor without_values(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Replace every tensor in an argument, and every device.
template <typename Change>
IValue changed(const IValue& value, c10::Device device, const Change& change) {
  if (value.isTensor()) {
    const Tensor tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    return list;
  }
  if (value.isDevice()) {
    return device;
  }
  return value;
}

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  changed(value, at::kCPU, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

c10::Device device_of_arguments(c10::ArrayRef<IValue> arguments, const char* name) {
  std::optional<c10::Device> found;
  for (const IValue& value : arguments) {
    each_tensor(value, [&](const Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(!found || *found == tensor.device(), name, ": tensors on ", *found, " and on ", tensor.device());
        found = tensor.device();
      }
    });
    if (value.isDevice() && value.toDevice().type() == kType) {
      found = found.value_or(value.toDevice());
    }
  }
  return c10::Device(kType, found && found->has_index() ? found->index() : static_cast<c10::DeviceIndex>(current_device()));
}

// Tensors of the host are taken as they are now where they are scalars; larger ones would have to be copied first.
void check_host_tensors(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    each_tensor(arguments[index], [&](const Tensor& tensor) {
      TORCH_CHECK(
          is_ours(tensor) || (tensor.device().is_cpu() && tensor.dim() == 0 && !writes(schema.arguments()[index])),
          schema.name(), ": argument '", schema.arguments()[index].name(), "' is on ", tensor.device(),
          ", the others are on the strict device");
    });
  }
}

// What the cpu's kernel is called with, once it runs.
std::shared_ptr<Stack> late_arguments(c10::ArrayRef<IValue> arguments, const c10::OperatorHandle& op, int device) {
  auto stack = std::make_shared<Stack>();
  const auto& schema = op.schema().arguments();
  for (size_t index = 0; index < arguments.size(); ++index) {
    IValue value = changed(arguments[index], at::kCPU, [](const Tensor& tensor) {
      return is_ours(tensor) ? for_kernels(tensor) : taken_now(tensor);
    });
    const auto& type = schema[index].type();
    const bool draws = type->str().find("Generator") != std::string::npos;
    if (draws && op.hasTag(at::Tag::nondeterministic_seeded)) {
      uint64_t seed = 0;
      if (arguments[index].isNone()) {
        seed = draw_seed(device);
      } else {
        at::Generator given = arguments[index].toGenerator();
        const uint64_t drawn = given.get_offset() + 1;
        given.set_offset(drawn);
        seed = given.current_seed() * 0x9E3779B97F4A7C15ull + drawn;
      }
      value = at::make_generator<at::CPUGeneratorImpl>(seed);
    }
    stack->push_back(std::move(value));
  }
  return stack;
}

// Nobody records what a kernel does: that was done when it was called.
void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // An output that is given is returned by reference: torch before 2.13 drops the stack, and the output with it, before
  // it reads that reference.
  const Stack kept = stack;
  op.callBoxed(&stack);
}

Stack shapes_of_results(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  Stack stack;
  const auto& schema = op.schema().arguments();
  for (size_t index = 0; index < arguments.size(); ++index) {
    const bool draws = schema[index].type()->str().find("Generator") != std::string::npos;
    stack.push_back(draws ? IValue() : changed(arguments[index], at::kMeta, [](const Tensor& tensor) {
      return is_ours(tensor) ? without_values(tensor) : tensor;
    }));
  }
  call(op, stack);
  return stack;
}

Tensor like(const Tensor& shape, c10::Device device) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

// The host waits, and the kernel runs at once: its results decide what comes next.
void run_now(const c10::OperatorHandle& op, Stack* stack, c10::Device device, const std::string& name) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  auto late = late_arguments(arguments, op, device.index());
  Work reads;
  reads.what = name;
  for (const IValue& value : arguments) {
    each_tensor(value, [&](const Tensor& tensor) { use(reads, tensor, false); });
  }
  reads.run = [] {};
  const int stream = current(device.index());
  enqueue(stream, std::move(reads));
  synchronize_stream(stream, (name + " needs values").c_str());
  call(op, *late);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (const IValue& result : *late) {
    stack->push_back(changed(result, device, [&](const Tensor& tensor) {
      Tensor ours = like(tensor, device);
      if (tensor.numel() > 0) {
        for_kernels(ours).copy_(tensor);  // its stream has nothing to do, and no other knows the memory
      }
      return ours;
    }));
  }
}

// The dtype of layer norm's statistics: fp32 only beside weights of another dtype.
at::ScalarType as_the_cpu_keeps(c10::ArrayRef<IValue> arguments) {
  const at::ScalarType input = arguments[0].toTensor().scalar_type();
  const bool mixed = arguments[2].isTensor() && arguments[2].toTensor().scalar_type() != input;
  return mixed ? at::kFloat : input;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  const c10::Device device = device_of_arguments(arguments, schema.name().c_str());
  const c10::DeviceGuard guard(device);
  const bool gives_fresh = !schema.returns().empty() && schema.returns()[0].alias_info() == nullptr;
  TORCH_CHECK(
      gives_fresh || schema.returns().empty() || schema.returns()[0].alias_info()->isWrite(),
      schema.name(), " returns a view, which the strict device does not know");
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    run_now(op, stack, device, name);
    return;
  }
  check_host_tensors(schema, arguments);
  // Outputs: new ones, those that the caller gave, or the arguments that are changed in place.
  Stack results;
  if (gives_fresh) {
    results = shapes_of_results(op, arguments);
    if (name == "native_layer_norm" && arguments[0].toTensor().scalar_type() == as_the_cpu_keeps(arguments)) {
      for (size_t turn = 1; turn < results.size(); ++turn) {  // mean and deviation: meta kernels know CUDA's dtype
        results[turn] = results[turn].toTensor().to(arguments[0].toTensor().scalar_type());
      }
    }
    for (IValue& result : results) {
      result = changed(result, device, [&](const Tensor& shape) { return like(shape, device); });
    }
  } else {
    for (size_t index = 0; index < count; ++index) {
      if (schema.arguments()[index].is_out() && arguments[index].isTensor() && arguments[index].toTensor().numel() == 0) {
        Stack shapes = shapes_of_results(op, arguments);
        size_t turn = 0;
        for (size_t other = 0; other < count; ++other) {
          if (schema.arguments()[other].is_out() && arguments[other].isTensor() && turn < shapes.size()) {
            arguments[other].toTensor().resize_(shapes[turn++].toTensor().sizes());
          }
        }
        break;
      }
    }
    for (size_t index = 0; index < count && results.size() < schema.returns().size(); ++index) {
      if (writes(schema.arguments()[index])) {
        results.push_back(arguments[index]);
      }
    }
  }
  auto late = late_arguments(arguments, op, device.index());
  Work work;
  work.what = name;
  for (size_t index = 0; index < count; ++index) {
    each_tensor(arguments[index], [&](const Tensor& tensor) {
      if (is_ours(tensor)) {
        use(work, tensor, writes(schema.arguments()[index]));
      }
    });
  }
  auto targets = std::make_shared<std::vector<Tensor>>();
  if (gives_fresh) {
    for (const IValue& result : results) {
      each_tensor(result, [&](const Tensor& tensor) {
        use(work, tensor, true);
        targets->push_back(for_kernels(tensor));
      });
    }
  }
  work.run = [op, late, targets] {
    call(op, *late);
    size_t turn = 0;
    for (const IValue& result : *late) {
      each_tensor(result, [&](const Tensor& tensor) {
        if (turn < targets->size()) {
          (*targets)[turn++].copy_(tensor);
        }
      });
    }
  };
  enqueue(current(device.index()), std::move(work));
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

// ---- copies

void copy_late(const Tensor& source, const Tensor& target, const std::string& what, size_t bytes, int stream) {
  const Tensor from = is_ours(source) ? for_kernels(source) : source.detach();
  const Tensor to = is_ours(target) ? for_kernels(target) : target.detach();
  // Of the host's memory nothing is kept either: a driver knows addresses.
  const auto bare = [](const Tensor& tensor) {
    return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options());
  };
  Work work;
  work.what = what;
  work.bytes = bytes;
  use(work, source, false);
  use(work, target, true);
  work.run = [from = bare(from), to = bare(to)] { to.copy_(from); };
  enqueue(stream, std::move(work));
}

void count_copied(const char* direction, size_t bytes) {
  const std::lock_guard<std::mutex> lock(world());
  copied()[direction] += static_cast<int64_t>(bytes);
}

bool is_pinned(const Tensor& tensor) {
  const auto [start, stop] = extent(tensor);
  return is_registered(reinterpret_cast<void*>(start), stop - start);
}

// As a driver does it: bytes move as they are, in one piece; values are cast on the side that they come from.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  Tensor from = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (is_ours(source) && is_ours(target)) {
    const c10::DeviceGuard guard(source.device());
    const int stream = current(source.device().index());
    if (source.device() == target.device()) {
      copy_late(from, target, "copy", 0, stream);
      return target;
    }
    Event before, after;  // both devices take part
    const int other = current(target.device().index());
    record(before, other);
    wait_on_stream(before, stream);
    copy_late(from, target, "copy across", target.nbytes(), stream);
    record(after, stream);
    wait_on_stream(after, other);
    return target;
  }
  const bool up = is_ours(target);
  const c10::DeviceGuard guard(up ? target.device() : source.device());
  const int stream = current((up ? target : source).device().index());
  const bool plain = from.scalar_type() == target.scalar_type() && from.strides() == target.strides() &&
      from.is_non_overlapping_and_dense();
  if (!plain) {
    // The temporary on the host is pageable, whatever the tensor was.
    Tensor values = from.to(target.scalar_type()).contiguous();
    Tensor place = target.is_contiguous() ? target : at::empty(target.sizes(), target.options());
    if (values.is_same(from) && place.is_same(target)) {
      values = from.clone(at::MemoryFormat::Contiguous);
    }
    copy_from(values, place, non_blocking && target.is_contiguous());
    if (!place.is_same(target)) {
      target.copy_(place, non_blocking);
    }
    return target;
  }
  const bool pinned = is_pinned(up ? from : target);
  count_copied(up ? "up" : "down", target.nbytes());
  copy_late(from, target, up ? "copy up" : "copy down", target.nbytes(), stream);
  if (!(pinned && non_blocking)) {
    synchronize_stream(
        stream, pinned ? (up ? "blocking copy up" : "blocking copy down")
                       : (up ? "copy up from pageable memory" : "copy down to pageable memory"));
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Tensor here = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
  const c10::DeviceGuard guard(self.device());
  const int stream = current(self.device().index());
  copy_late(self, here, "copy down", 0, stream);
  synchronize_stream(stream, "item");
  return here.item();
}

// ---- memory and views, which are the host's alone

Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kType), kKeys, c10::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kType), kKeys,
      c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }

Tensor& set_part(
    Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_on(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr().get_context(), number_of(stream));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_on);
  m.impl("native_dropout", native_dropout);
  // One kernel on a real device too, where torch would compose it of others.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define STRICT_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define STRICT_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(STRICT_LOWER)
  AT_FORALL_FP32(STRICT_FP32)
}

}  // namespace strict
