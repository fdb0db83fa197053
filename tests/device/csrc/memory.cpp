// Device memory is a file in memory that is mapped twice: tensors carry addresses that nobody may touch, kernels use the
// others. So a host that reads or writes a tensor of the device faults, as on a real one.
#include "machine.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>

namespace strict {

namespace {

constexpr size_t kPage = 4096;

struct Heap {
  char* touched_by_nobody = nullptr;
  char* touched_by_kernels = nullptr;
  size_t used = 0;
  int file = -1;

  Heap() {
    file = memfd_create("strict", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kHeapBytes) == 0, "no memory for the strict device");
    touched_by_nobody = static_cast<char*>(mmap(nullptr, kHeapBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    touched_by_kernels =
        static_cast<char*>(mmap(nullptr, kHeapBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(touched_by_nobody != MAP_FAILED && touched_by_kernels != MAP_FAILED, "no addresses for the device");
  }
};

std::array<Heap, kDevices>& heaps() {
  static auto* made = new std::array<Heap, kDevices>;
  return *made;
}

}  // namespace

std::mutex& world() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

int device_of(const void* address) {
  for (int device = 0; device < kDevices; ++device) {
    const char* start = heaps()[device].touched_by_nobody;
    if (address >= start && address < start + kHeapBytes) {
      return device;
    }
  }
  return -1;
}

bool is_device(const void* address) { return device_of(address) >= 0; }

char* alias(const void* address) {
  const int device = device_of(address);
  TORCH_INTERNAL_ASSERT(device >= 0, "no address of the strict device");
  const Heap& heap = heaps()[device];
  return heap.touched_by_kernels + (static_cast<const char*>(address) - heap.touched_by_nobody);
}

void* heap_take(int device, size_t nbytes) {
  Heap& heap = heaps()[device];
  const size_t pages = (nbytes + kPage - 1) / kPage * kPage;
  TORCH_CHECK_WITH(OutOfMemoryError, heap.used + pages <= kHeapBytes, "the strict device has no addresses left");
  void* address = heap.touched_by_nobody + heap.used;
  heap.used += pages;
  return address;
}

void heap_return(void* address, size_t nbytes) {
  const Heap& heap = heaps()[device_of(address)];
  const size_t pages = (nbytes + kPage - 1) / kPage * kPage;
  const auto offset = static_cast<char*>(address) - heap.touched_by_nobody;
  fallocate(heap.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(pages));
}

}  // namespace strict
