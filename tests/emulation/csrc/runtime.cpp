// A CUDA runtime and driver without a GPU: device memory is the host's, kernels do nothing, copies are at once.
// It is preloaded before torch's CUDA build, whose allocator, streams, events and process groups run on it unchanged.
#include "runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kGiB = size_t{1} << 30, kMiB = size_t{1} << 20;
constexpr size_t kDeviceBytes = 79 * kGiB + 200 * kMiB;  // of an H100
constexpr size_t kContextBytes = 500 * kMiB;             // what a context takes of them
constexpr size_t kGranularity = 2 * kMiB;
constexpr size_t kPage = 4096;
constexpr size_t kLargestMemset = 64 * kMiB;  // beyond, pages would be touched for nothing
constexpr int kCudaVersion = 13000;
constexpr size_t kKernelsTold = 25;

using Ranges = std::map<uintptr_t, size_t>;  // bytes by address

struct State {
  std::mutex mutex;
  Ranges device, registered, allocated_on_host;
  size_t used = 0;
  std::unordered_map<const void*, std::string> kernels;
  std::map<std::string, long> launches;
};

// Never destroyed: torch's own destructors come later than ours.
State& state() {
  static auto* made = new State;
  return *made;
}

struct Counts {
  std::atomic<long> launches, copies, pageable, registered, synchronized, events_synchronized, allocated;
  std::atomic<size_t> pageable_bytes, up, down, on_device, registered_bytes, registered_peak;
};
Counts counts;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

bool is_set(const char* name) { return getenv(name) != nullptr; }
const bool verbose = is_set("FAKE_VERBOSE");
const bool trap_pageable = is_set("FAKE_TRAP_PAGEABLE");

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

size_t rounded(size_t nbytes, size_t to) { return (std::max<size_t>(nbytes, 1) + to - 1) / to * to; }

// Whether all of the bytes lie in one range.
bool within(const Ranges& ranges, const void* address, size_t nbytes = 1) {
  auto next = ranges.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == ranges.begin()) return false;
  const auto& [start, length] = *std::prev(next);
  return reinterpret_cast<uintptr_t>(address) + nbytes <= start + length;
}

// Whether one of the bytes lies in a range.
bool touches(const Ranges& ranges, const void* address, size_t nbytes) {
  auto next = ranges.upper_bound(reinterpret_cast<uintptr_t>(address) + nbytes - 1);
  if (next == ranges.begin()) return false;
  const auto& [start, length] = *std::prev(next);
  return start + length > reinterpret_cast<uintptr_t>(address);
}

std::string readable(const std::string& symbol) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  std::string name = demangled == nullptr ? symbol : demangled;
  free(demangled);
  return name;
}

void note_kernel(const void* function) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  counts.launches++;
  auto found = s.kernels.find(function);
  s.launches[found == s.kernels.end() ? "?" : found->second]++;
}

// The counts of the process at its end, appended to the file that FAKE_STATS names.
__attribute__((destructor)) void tell() {
  const char* path = getenv("FAKE_STATS");
  FILE* file = path == nullptr ? nullptr : fopen(path, "a");
  if (file == nullptr) return;
  fprintf(file, "pid %d launches %ld copies %ld pageable %ld (%zu bytes) up %zu down %zu on device %zu registered %ld ",
          getpid(), counts.launches.load(), counts.copies.load(), counts.pageable.load(), counts.pageable_bytes.load(),
          counts.up.load(), counts.down.load(), counts.on_device.load(), counts.registered.load());
  fprintf(file, "at most %zu bytes, at the end %zu; synchronized %ld events %ld; allocated %ld\n",
          counts.registered_peak.load(), counts.registered_bytes.load(), counts.synchronized.load(),
          counts.events_synchronized.load(), counts.allocated.load());
  std::vector<std::pair<long, std::string>> sorted;
  for (const auto& [name, count] : state().launches) sorted.emplace_back(count, readable(name));
  std::sort(sorted.rbegin(), sorted.rend());
  if (sorted.size() > kKernelsTold) sorted.resize(kKernelsTold);
  for (const auto& [count, name] : sorted) fprintf(file, "   %8ld %s\n", count, name.substr(0, 160).c_str());
  fclose(file);
}

int devices() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr && *visible == '\0') return 0;
  const char* asked = getenv("FAKE_DEVICES");
  return asked == nullptr ? 1 : atoi(asked);
}

// Of an H100, by the numbers of cudaDeviceAttr, which are those of CUdevice_attribute.
int attribute(int number) {
  static const std::unordered_map<int, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrTotalConstantMemory, 65536},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrL2CacheSize, static_cast<int>(50 * kMiB)},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrAsyncEngineCount, 3},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrManagedMemory, 1},
      {cudaDevAttrConcurrentManagedAccess, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrMemoryPoolsSupported, 1},
  };
  auto found = values.find(number);
  return found == values.end() ? 0 : found->second;
}

double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
}

void* map_memory(size_t nbytes, int flags) {
  void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void count_copy(void* to, const void* from, size_t nbytes, bool async) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  counts.copies++;
  const bool up = within(s.device, to, nbytes), down = within(s.device, from, nbytes);
  if (up && down) counts.on_device += nbytes;
  if (up == down || nbytes == 0) return;
  (up ? counts.up : counts.down) += nbytes;
  const void* host = up ? from : to;
  if (within(s.registered, host, nbytes) || within(s.allocated_on_host, host, nbytes)) return;
  counts.pageable++;
  counts.pageable_bytes += nbytes;
  if (touches(s.registered, host, nbytes)) fprintf(stderr, "fake: a copy crosses the border of what is registered\n");
  if (trap_pageable && async) fprintf(stderr, "fake: pageable %s %zu bytes\n", up ? "up" : "down", nbytes);
}

cudaError_t copy(void* to, const void* from, size_t nbytes, bool async) {
  count_copy(to, from, nbytes, async);
  static const size_t most = is_set("FAKE_MOST_COPY") ? strtoull(getenv("FAKE_MOST_COPY"), nullptr, 10) : SIZE_MAX;
  if (nbytes <= most) memmove(to, from, nbytes);
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t nbytes) {
  if (nbytes <= kLargestMemset) memset(to, value, nbytes);
  return cudaSuccess;
}

template <typename Handle>
cudaError_t new_handle(Handle* handle) {
  static std::atomic<uintptr_t> next{0x1000};
  *handle = reinterpret_cast<Handle>(next += 16);
  return cudaSuccess;
}

struct Event {
  double at_ms;
  unsigned flags;
};

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void check_launch(const void* function, dim3 grid, dim3 block) {
  note_kernel(function);
  const unsigned threads = block.x * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > 1024) {
    fprintf(stderr, "fake: a launch of no block, or of a block of %u threads\n", threads);
    failed(cudaErrorInvalidConfiguration);
  }
}

CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

// ---- what the emulation is asked by tests

API void fake_note(const char* name) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  counts.launches++;
  state().launches[name]++;
}

API long fake_get(const char* name) {
  const std::map<std::string, long> found = {
      {"launches", counts.launches},
      {"copies", counts.copies},
      {"pageable", counts.pageable},
      {"pageable_bytes", static_cast<long>(counts.pageable_bytes)},
      {"up", static_cast<long>(counts.up)},
      {"down", static_cast<long>(counts.down)},
      {"on_device", static_cast<long>(counts.on_device)},
      {"registered", counts.registered},
      {"registered_bytes", static_cast<long>(counts.registered_bytes)},
      {"synchronized", counts.synchronized},
      {"events_synchronized", counts.events_synchronized},
      {"allocated", counts.allocated},
  };
  auto entry = found.find(name);
  return entry == found.end() ? -1 : entry->second;
}

// ---- devices

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA H100 80GB HBM3 (fake)");
  memset(found->uuid.bytes, 7 + device, 16);
  found->totalGlobalMem = kDeviceBytes;
  found->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  found->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  found->warpSize = attribute(cudaDevAttrWarpSize);
  found->memPitch = 2147483647;
  found->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  for (int axis = 0; axis < 3; ++axis) {
    found->maxThreadsDim[axis] = attribute(cudaDevAttrMaxBlockDimX + axis);
    found->maxGridSize[axis] = attribute(cudaDevAttrMaxGridDimX + axis);
  }
  found->totalConstMem = attribute(cudaDevAttrTotalConstantMemory);
  found->major = attribute(cudaDevAttrComputeCapabilityMajor);
  found->textureAlignment = 512;
  found->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  found->canMapHostMemory = 1;
  found->concurrentKernels = 1;
  found->unifiedAddressing = 1;
  found->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  found->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  found->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  found->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  found->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  found->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  found->managedMemory = 1;
  found->concurrentManagedAccess = 1;
  found->cooperativeLaunch = 1;
  found->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  found->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  found->hostRegisterSupported = 1;
  found->pciBusID = 1 + device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) {
  *value = attribute(number);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* value, int, int) {
  *value = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  counts.synchronized++;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return new_handle(pool); }
API const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "fakeError"; }
API const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  snprintf(text, sizeof text, "fake cuda error %d", static_cast<int>(error));
  return text;
}
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- memory

API cudaError_t cudaMalloc(void** address, size_t nbytes) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const size_t taken = rounded(nbytes, kGranularity);
  if (s.used + taken > kDeviceBytes - kContextBytes) return failed(cudaErrorMemoryAllocation);
  *address = map_memory(taken, MAP_NORESERVE);
  if (*address == nullptr) return failed(cudaErrorMemoryAllocation);
  s.device[reinterpret_cast<uintptr_t>(*address)] = taken;
  s.used += taken;
  counts.allocated++;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto found = s.device.find(reinterpret_cast<uintptr_t>(address));
  if (found == s.device.end()) return failed(cudaErrorInvalidValue);
  munmap(address, found->second);
  s.used -= found->second;
  s.device.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** address, size_t nbytes, cudaStream_t) { return cudaMalloc(address, nbytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *total = kDeviceBytes;
  *free = kDeviceBytes - kContextBytes - state().used;
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const size_t taken = rounded(nbytes, kPage);
  *address = map_memory(taken, 0);
  if (*address == nullptr) return failed(cudaErrorMemoryAllocation);
  s.allocated_on_host[reinterpret_cast<uintptr_t>(*address)] = taken;
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* address) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto found = s.allocated_on_host.find(reinterpret_cast<uintptr_t>(address));
  if (found == s.allocated_on_host.end()) return failed(cudaErrorInvalidValue);
  munmap(address, found->second);
  s.allocated_on_host.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned flags) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (verbose) fprintf(stderr, "fake: register %p, %zu bytes, flags %u\n", address, nbytes, flags);
  if (address == nullptr || nbytes == 0) return failed(cudaErrorInvalidValue);
  if (touches(s.registered, address, nbytes) || touches(s.allocated_on_host, address, nbytes)) {
    return failed(cudaErrorHostMemoryAlreadyRegistered);
  }
  if (touches(s.device, address, nbytes)) return failed(cudaErrorInvalidValue);
  s.registered[reinterpret_cast<uintptr_t>(address)] = nbytes;
  counts.registered++;
  counts.registered_bytes += nbytes;
  counts.registered_peak = std::max(counts.registered_peak.load(), counts.registered_bytes.load());
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto found = s.registered.find(reinterpret_cast<uintptr_t>(address));
  if (found == s.registered.end()) {
    fprintf(stderr, "fake: %p is unregistered, and was not registered\n", address);
    return failed(cudaErrorHostMemoryNotRegistered);
  }
  counts.registered_bytes -= found->second;
  s.registered.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  const State& s = state();
  const std::lock_guard<std::mutex> lock(state().mutex);
  memset(found, 0, sizeof *found);
  auto* plain = const_cast<void*>(address);
  found->type = cudaMemoryTypeUnregistered;
  if (within(s.device, address)) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = plain;
    return cudaSuccess;
  }
  found->hostPointer = plain;
  if (within(s.registered, address) || within(s.allocated_on_host, address)) {
    found->type = cudaMemoryTypeHost;
    found->devicePointer = plain;
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  return copy(to, from, nbytes, false);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, nbytes, true);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t) {
  return copy(to, from, nbytes, true);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++) {
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, true);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t nbytes) { return fill(to, value, nbytes); }
API cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t) { return fill(to, value, nbytes); }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbols[65536];
  *address = symbols;
  return cudaSuccess;
}

// ---- streams and events: everything is over when it returns

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return new_handle(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return new_handle(stream); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t) {
  counts.synchronized++;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{0, flags});
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
  event_of(event)->at_ms = now_ms();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  counts.events_synchronized++;
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  if (((event_of(start)->flags | event_of(stop)->flags) & cudaEventDisableTiming) != 0) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *milliseconds = static_cast<float>(event_of(stop)->at_ms - event_of(start)->at_ms);
  return cudaSuccess;
}

// ---- kernels: counted by name

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  state().kernels.emplace(host, name);
}
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configured;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configured = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid;
  *block = configured.block;
  *shared = configured.shared;
  *static_cast<void**>(stream) = configured.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
// As with the real one, an error that nobody has taken is found by the check of the launch that comes next.
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  check_launch(kernel, grid, block);
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  check_launch(function, grid, block);
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  check_launch(function, config->gridDim, config->blockDim);
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- the driver: as libcuda.so.1, and by the entry points that the runtime gives

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "fake driver error";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "FAKE";
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
  *count = devices();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice) {
  *value = attribute(number);
  return CUDA_SUCCESS;
}
static CUcontext any_context() { return reinterpret_cast<CUcontext>(8); }
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = any_context();
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = kMiB;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuModuleLoad(CUmodule* module, const char*) {
  *module = reinterpret_cast<CUmodule>(16);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void*) { return cuModuleLoad(module, nullptr); }
API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return cuModuleLoad(module, nullptr);
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  char* handle = strdup(name);  // kept: launches are counted by it
  state().kernels.emplace(handle, name);
  *function = reinterpret_cast<CUfunction>(handle);
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction) {
  *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream, void**, void**) {
  note_kernel(function);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) {
  note_kernel(function);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       unsigned, CUstream, void**) {
  note_kernel(function);
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute number, CUdeviceptr address) {
  if (number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<CUdeviceptr*>(value) = address;
  } else {
    *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE;
  }
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) {
  *count = 2;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 16;
  return CUDA_SUCCESS;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (*function == nullptr) *function = reinterpret_cast<void*>(unsupported);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
