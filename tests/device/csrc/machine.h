// The strict device: streams that run late, memory that the host cannot touch, and a record of who used what after whom.
//
//   memory.cpp     addresses: device memory mapped twice, and the host ranges that are registered
//   streams.cpp    a thread for each stream, events, who follows whom
//   races.cpp      accesses that nothing orders
//   allocator.cpp  blocks by stream, handed out again at once
//   runtime.cpp    what torch asks of a device: guard, hooks, generators
//   kernels.cpp    operators: copies, views, and one fallback for everything else
//   bind.cpp       what tests ask
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace strict {

constexpr int kDevices = 2;
constexpr int kStreams = 33;  // of each device: the default one, and a pool that is handed out in turn
constexpr int kNumbers = kDevices * kStreams;

// Everything that the host decides happens under this lock: enqueueing, allocating, recording. It is never held while
// Python's lock is taken, or while a kernel runs.
std::mutex& world();

// ---- memory.cpp

constexpr uintptr_t kHeapBytes = uintptr_t{6} << 30;  // of address space, for each device

// Where kernels find the byte at an address of device memory. Nobody else may touch that address.
char* alias(const void* address);
bool is_device(const void* address);
int device_of(const void* address);
// Fresh device memory, in whole pages; zeros.
void* heap_take(int device, size_t nbytes);
// Give the pages of a range back to the system. The addresses are not used again.
void heap_return(void* address, size_t nbytes);

// ---- races.cpp

struct Access {
  uintptr_t start, stop;
  int stream;
  uint64_t number;  // of the task on its stream
  bool writes;
  std::string what;
};

// The accesses to one piece of memory, as far as they still matter.
struct History {
  std::vector<Access> accesses;
};

using Clock = std::vector<uint64_t>;  // for each stream: the last of its tasks that is certainly over

// Under the lock: report what conflicts with an access that nothing orders after it, and note it.
void note(History& history, Access access, const Clock& follows);
// Under the lock: the memory is given up by a stream, or by the host; what is still under way there is reported.
void note_end(History& history, const Clock& follows, const std::string& what);
void report(const std::string& what);
std::vector<std::string> take_reports();

// ---- streams.cpp

struct Operand {
  uintptr_t start, stop;
  bool writes;
};

struct Work {
  std::string what;
  std::vector<Operand> operands;
  std::function<void()> run;
  size_t bytes = 0;         // moved between host and device; 0 for kernels
  bool untimed = false;     // no real device does it: it takes no modelled time
  bool prompt = false;      // others wait for it elsewhere: it is not put off until somebody here asks for it
};

struct Event {
  int stream = -1;
  uint64_t number = 0;
  Clock clock;
  double when = 0;  // in the modelled time
};

int number_of(c10::Stream stream);
c10::Stream stream_of(int number);
int current(int device);  // the number of the calling thread's current stream
int exchange_current(int device, int number);
int new_stream(int device);
int current_device();
int exchange_device(int device);

void enqueue(int stream, Work work);
void enqueue_locked(int stream, Work work);
void record(Event& event, int stream);
void wait_on_stream(const Event& event, int stream);
bool query(const Event& event);
void synchronize(const Event& event, const char* why);
void synchronize_stream(int stream, const char* why);
void synchronize_device(int device, const char* why);
bool is_over(int stream, uint64_t number);        // under the lock
Clock clock_of(int stream);                       // under the lock
Clock host_clock();                               // under the lock
uint64_t issued(int stream);                      // under the lock
void rethrow();                                   // the first error of a kernel, once

// Counts for tests.
struct Span {
  int stream;
  std::string what;
  double start, stop;  // seconds of the modelled time
  size_t bytes;
};
struct Settings {
  uint64_t seed = 0;
  double most_late = 0.02;         // seconds that work is put off, at most, unless somebody asks for it
  bool sites = false;              // note the line of Python that enqueued each piece of work
  double bytes_per_second = 0;     // of the modelled link, each way; 0: copies take no time
  double seconds_per_kernel = 0;   // of the modelled device
  bool spans = false;              // keep what ran when, in the modelled time
};
Settings& settings();
std::map<std::string, int64_t>& launches();       // by operator; under the lock
std::map<std::string, int64_t>& waits();          // by why and where; under the lock
std::map<std::string, int64_t>& copied();         // bytes by direction; under the lock
std::vector<Span>& spans();
std::string site();                               // the line of Python that the calling thread is at
void count_wait(const std::string& why);

// ---- allocator.cpp

// Under the lock: the history of the memory at an address of the device, or of registered host memory; or none.
History* history_of(uintptr_t address);
bool is_registered(const void* address, size_t nbytes);
void host_register(uintptr_t address, size_t nbytes);
void host_unregister(uintptr_t address);
void record_stream(void* address, int stream);
void install_allocators();
void empty_cache();
struct MemoryStatistics {
  int64_t allocated, peak, reserved, blocks;
};
MemoryStatistics memory_statistics(int device);
void reset_peak(int device);

// ---- runtime.cpp, kernels.cpp

void install_runtime();
uint64_t draw_seed(int device);
void set_sticky_error(std::exception_ptr error);

}  // namespace strict
