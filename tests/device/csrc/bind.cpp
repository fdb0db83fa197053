// What tests ask of the device, beyond what torch does.
#include "machine.h"

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

namespace {

using namespace strict;

template <typename Value>
Value taken(Value& kept) {
  const std::lock_guard<std::mutex> lock(world());
  Value now;
  std::swap(now, kept);
  return now;
}

// Run a Python function late, on a stream, as a kernel that reads and writes tensors: collectives of other libraries.
void enqueue_python(pybind11::function run, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  const at::Tensor& first = writes.empty() ? reads.at(0) : writes[0];
  auto kept = std::shared_ptr<pybind11::object>(new pybind11::object(std::move(run)), [](pybind11::object* object) {
    const pybind11::gil_scoped_acquire gil;
    delete object;
  });
  Work work;
  work.what = "python";
  work.prompt = true;
  for (const auto* tensors : {&reads, &writes}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.device() == first.device() && tensor.is_contiguous(), "contiguous tensors of one device");
      const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
      if (tensor.numel() > 0) {
        work.operands.push_back({start, start + tensor.nbytes(), tensors == &writes});
      }
    }
  }
  work.run = [kept] {
    const pybind11::gil_scoped_acquire gil;
    try {
      (*kept)();
    } catch (pybind11::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  };
  enqueue(current(first.device().index()), std::move(work));
}

// The memory of a tensor as kernels see it; for kernels that are written in Python.
at::Tensor for_kernels(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  return tensor.numel() == 0
      ? at::empty(tensor.sizes(), options)
      : at::from_blob(alias(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  install_allocators();
  install_runtime();
  m.attr("DEVICES") = kDevices;
  m.attr("HEAP_BYTES") = kHeapBytes;
  m.attr("STREAMS") = kStreams;
  m.def("configure", [](uint64_t seed, double most_late, bool sites) {
    const std::lock_guard<std::mutex> lock(world());
    settings().seed = seed;
    settings().most_late = most_late;
    settings().sites = sites;
  }, pybind11::arg("seed"), pybind11::arg("most_late"), pybind11::arg("sites"));
  m.def("model_time", [](double bytes_per_second, double seconds_per_kernel, bool keep) {
    const std::lock_guard<std::mutex> lock(world());
    settings().bytes_per_second = bytes_per_second;
    settings().seconds_per_kernel = seconds_per_kernel;
    settings().spans = keep;
  });
  m.def("take_races", [] {
    const std::lock_guard<std::mutex> lock(world());
    return take_reports();
  });
  m.def("take_waits", [] { return taken(waits()); });
  m.def("take_launches", [] { return taken(launches()); });
  m.def("take_copied", [] { return taken(copied()); });
  m.def("take_spans", [] {
    std::vector<std::tuple<int, std::string, double, double, size_t>> found;
    for (const Span& span : taken(spans())) {
      found.emplace_back(span.stream, span.what, span.start, span.stop, span.bytes);
    }
    return found;
  });
  m.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator(
        at::Device(at::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)));
  });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("memory", [](int device) {
    const MemoryStatistics now = memory_statistics(device);
    return std::map<std::string, int64_t>{
        {"allocated", now.allocated}, {"peak", now.peak}, {"reserved", now.reserved}, {"blocks", now.blocks}};
  });
  m.def("reset_peak", &reset_peak);
  m.def("empty_cache", &empty_cache);
  m.def("enqueue", &enqueue_python);
  m.def("for_kernels", &for_kernels);
  m.def("rethrow", &rethrow);
}
