// The border between Python and C++: addresses and lengths in, no tensors, no policy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "aio.h"
#include "crc32c.h"
#include "pool.h"
#include "rules.h"

namespace nb = nanobind;
using namespace nb::literals;
using penstock::DType;
using penstock::File;
using penstock::Master;
using penstock::Pool;
using penstock::Queue;
using penstock::Rule;
using penstock::Storage;
using penstock::Transfer;
using penstock::Wire;

namespace {

// An address as Python holds it. Nothing here can check that it is valid: src/penstock/rules/rule.py and
// src/penstock/runtime/aio.py do.
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

// A file as Python holds it. The threads of a queue drop theirs without the interpreter: were a file Python's own object,
// they would wait for the interpreter, and its holder for them.
struct FileHandle {
  std::shared_ptr<File> file;
};

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
      .def(nb::init<int, const std::vector<int>&>(), "threads"_a, "cores"_a = std::vector<int>{})
      .def_static(
          "openmp", [](Address parallel) { return std::make_unique<Pool>(reinterpret_cast<Pool::Parallel>(parallel)); },
          "parallel"_a)
      .def_prop_ro("threads", &Pool::threads)
      .def(
          "copy",
          [](Pool& pool, Address dst, Address src, std::size_t nbytes) {
            penstock::copy(&pool, pointer<void>(dst), pointer<const void>(src), nbytes);
          },
          Release(), "dst"_a, "src"_a, "nbytes"_a)
      .def("close", &Pool::close, Release());

  nb::enum_<Rule>(m, "Rule")
      .value("ADAM", Rule::adam)
      .value("AMSGRAD", Rule::amsgrad)
      .value("SGD", Rule::sgd)
      .value("SGD_MOMENTUM", Rule::sgd_momentum)
      .value("ADAGRAD", Rule::adagrad)
      .value("LION", Rule::lion);
  nb::enum_<Storage>(m, "Storage")
      .value("FP32", Storage::fp32)
      .value("BF16", Storage::bf16)
      .value("BF16_RANDOM", Storage::bf16_random)
      .value("INT8_SIGNED", Storage::int8_signed)
      .value("INT8_UNSIGNED", Storage::int8_unsigned);

  // A state is (address, address of the scales or 0, storage).
  m.def(
      "update",
      [](Pool* pool, Rule rule, std::size_t numel, Address param, DType param_dtype, Address grad, DType grad_dtype,
         Address master, Master master_kind, const std::vector<std::tuple<Address, Address, Storage>>& states,
         const std::vector<float>& scalars, bool param_random, std::uint64_t random_key, std::uint64_t first_block,
         const std::vector<Address>& summed) {
        penstock::Update update{
            .rule = rule,
            .param_dtype = param_dtype,
            .master_kind = master_kind,
            .grad_dtype = grad_dtype,
            .param = pointer<void>(param),
            .grad = pointer<void>(grad),
            .master = pointer<void>(master),
            .states = {},
            .scalars = scalars,
            .param_random = param_random,
            .random_key = random_key,
            .first_block = first_block,
        };
        for (const auto& [values, scales, storage] : states)
          update.states.push_back({pointer<void>(values), pointer<void>(scales), storage});
        return penstock::update(pool, numel, std::move(update), summed);
      },
      Release(), "pool"_a.none(), "rule"_a, "numel"_a, "param"_a, "param_dtype"_a, "grad"_a, "grad_dtype"_a,
      "master"_a, "master_kind"_a, "states"_a, "scalars"_a, nb::kw_only(), "param_random"_a, "random_key"_a,
      "first_block"_a, "summed"_a = std::vector<Address>{});

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

  nb::enum_<Wire>(m, "Wire").value("INT8", Wire::int8).value("FP8", Wire::fp8).value("INT4", Wire::int4);

  m.def(
      "pack",
      [](Pool* pool, std::size_t blocks, Wire format, Address packed, Address values, DType dtype) {
        penstock::pack(pool, blocks, format, pointer<void>(packed), pointer<const void>(values), dtype);
      },
      Release(), "pool"_a.none(), "blocks"_a, "format"_a, "packed"_a, "values"_a, "dtype"_a);

  m.def(
      "unpack",
      [](Pool* pool, std::size_t blocks, Wire format, Address values, DType dtype, Address packed, bool add) {
        penstock::unpack(pool, blocks, format, pointer<void>(values), dtype, pointer<const void>(packed), add);
      },
      Release(), "pool"_a.none(), "blocks"_a, "format"_a, "values"_a, "dtype"_a, "packed"_a, nb::kw_only(), "add"_a);

  m.attr("END_OF_FILE") = penstock::kEndOfFile;

  nb::class_<FileHandle>(m, "File")
      .def(
          "__init__", [](FileHandle* self, int fd) { new (self) FileHandle{std::make_shared<File>(fd)}; },
          "descriptor"_a)
      .def_prop_ro("bytes_read", [](const FileHandle& self) { return self.file->bytes_read.load(); })
      .def_prop_ro("bytes_written", [](const FileHandle& self) { return self.file->bytes_written.load(); });

  nb::class_<Transfer>(m, "Transfer")
      .def_prop_ro("done", &Transfer::done)
      .def(
          "wait",
          [](const Transfer& transfer, int limit_ms) { return transfer.wait(std::chrono::milliseconds(limit_ms)); },
          Release(), "limit_ms"_a)
      .def_ro("error", &Transfer::error)
      .def_ro("error_offset", &Transfer::error_offset)
      .def_ro("checksum", &Transfer::checksum)
      .def_ro("ended", &Transfer::ended);

  nb::class_<Queue>(m, "Queue")
      .def(nb::init<std::size_t, std::size_t>(), "depth"_a, "chunk_bytes"_a)
      .def_prop_ro("depth", &Queue::depth)
      .def(
          "submit",
          [](Queue& queue, const FileHandle& handle, bool write, std::uint64_t offset, Address memory,
             std::size_t nbytes, bool checksum) {
            return queue.submit({handle.file, write, offset, pointer<char>(memory), nbytes, checksum});
          },
          "file"_a, nb::kw_only(), "write"_a, "offset"_a, "memory"_a, "nbytes"_a, "checksum"_a)
      .def("close", &Queue::close, Release());

  m.def(
      "crc32c",
      [](Address memory, std::size_t nbytes) { return penstock::crc32c(pointer<const void>(memory), nbytes); },
      Release(), "memory"_a, "nbytes"_a);
  m.def("crc32c_join", &penstock::crc32c_join, "a"_a, "b"_a, "b_nbytes"_a);
  m.def("crc32c_ways", [] {
    std::vector<std::string> names;
    for (const auto& way : penstock::crc32c_ways()) names.emplace_back(way.name);
    return names;
  });
  m.def(
      "crc32c_by",
      [](const std::string& name, Address memory, std::size_t nbytes) {
        for (const auto& way : penstock::crc32c_ways())
          if (name == way.name) return way.compute(pointer<const void>(memory), nbytes);
        throw std::invalid_argument("this processor has no CRC-32C by " + name);
      },
      Release(), "way"_a, "memory"_a, "nbytes"_a);
}
