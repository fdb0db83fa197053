// A thread for each stream runs its work in order, and late: nothing runs before somebody asks for it (a host that waits,
// a stream that waits, a query), or before its time has come, which is drawn at random. What was not waited for is
// therefore not there, and not by luck either.
#include <Python.h>

#include "machine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

namespace strict {

namespace {

using Time = std::chrono::steady_clock;

struct Item {
  uint64_t number = 0;
  std::string what;
  std::function<void()> run;   // or:
  int other = -1;              // the stream that this one waits for,
  uint64_t other_number = 0;   // and how far it has to be
  Time::time_point due;
};

struct Stream {
  int number = 0;
  std::deque<Item> items;
  uint64_t issued = 0, demanded = 0, over = 0;
  Clock clock = Clock(kNumbers, 0);
  double now = 0;  // in the modelled time
  std::condition_variable work;
  std::thread thread;
};

struct State {
  std::array<Stream, kNumbers> streams;
  std::array<int, kDevices> handed_out{};
  std::condition_variable done;
  Clock host = Clock(kNumbers, 0);
  double host_now = 0;
  std::array<double, 2> link_free{};  // up and down, in the modelled time
  std::exception_ptr error;
};

State& state() {
  static auto* made = [] {
    auto* fresh = new State;
    for (int number = 0; number < kNumbers; ++number) {
      fresh->streams[number].number = number;
    }
    return fresh;
  }();
  return *made;
}

thread_local int this_device = 0;
thread_local std::array<int, kDevices> these_streams = {0, kStreams};

// A wait must not keep Python's lock: what is waited for may run Python.
class WithoutPython {
 public:
  WithoutPython() : saved_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (saved_ != nullptr) {
      PyEval_RestoreThread(saved_);
    }
  }
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;

 private:
  PyThreadState* saved_;
};

void merge(Clock& clock, const Clock& other) {
  for (int number = 0; number < kNumbers; ++number) {
    clock[number] = std::max(clock[number], other[number]);
  }
}

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

Time::time_point due(const Stream& stream, uint64_t number) {
  const uint64_t drawn = mix(settings().seed ^ mix(number * kNumbers + stream.number));
  const double late = settings().most_late * static_cast<double>(drawn >> 11) * 0x1p-53;
  return Time::now() + std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(late));
}

void demand(Stream& stream, uint64_t number) {
  if (stream.demanded < number) {
    stream.demanded = number;
    stream.work.notify_all();
  }
}

void wait_until_over(std::unique_lock<std::mutex>& lock, int stream, uint64_t number) {
  Stream& other = state().streams[stream];
  while (other.over < number) {
    demand(other, number);
    state().done.wait(lock);
  }
}

void serve(Stream& stream) {
  std::unique_lock<std::mutex> lock(world());
  for (;;) {
    stream.work.wait(lock, [&] { return !stream.items.empty(); });
    {
      const Item& next = stream.items.front();
      if (stream.demanded < next.number && Time::now() < next.due) {
        stream.work.wait_until(lock, next.due);
        continue;
      }
    }
    Item item = std::move(stream.items.front());
    stream.items.pop_front();
    if (item.other >= 0) {
      wait_until_over(lock, item.other, item.other_number);
    } else {
      lock.unlock();
      try {
        item.run();
      } catch (const c10::Error& error) {
        const std::string what = "kernel " + item.what + ": " + error.what_without_backtrace();
        set_sticky_error(std::make_exception_ptr(std::runtime_error(what)));
      } catch (const std::exception& error) {
        set_sticky_error(std::make_exception_ptr(std::runtime_error("kernel " + item.what + ": " + error.what())));
      }
      item.run = nullptr;
      lock.lock();
    }
    stream.over = item.number;
    state().done.notify_all();
  }
}

Item& push(Stream& stream) {
  if (!stream.thread.joinable()) {
    stream.thread = std::thread([&stream] { serve(stream); });
  }
  Item item;
  item.number = ++stream.issued;
  item.due = due(stream, item.number);
  stream.clock[stream.number] = item.number;
  stream.items.push_back(std::move(item));
  stream.work.notify_all();
  return stream.items.back();
}

void learn(const Clock& clock, double when) {
  merge(state().host, clock);
  state().host_now = std::max(state().host_now, when);
}

}  // namespace

Settings& settings() {
  static auto* made = new Settings;
  return *made;
}

std::map<std::string, int64_t>& launches() {
  static auto* made = new std::map<std::string, int64_t>;
  return *made;
}

std::map<std::string, int64_t>& waits() {
  static auto* made = new std::map<std::string, int64_t>;
  return *made;
}

std::map<std::string, int64_t>& copied() {
  static auto* made = new std::map<std::string, int64_t>;
  return *made;
}

std::vector<Span>& spans() {
  static auto* made = new std::vector<Span>;
  return *made;
}

std::string site() {
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string innermost, found = "(no Python)";
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* name = PyUnicode_AsUTF8(code->co_filename);
    const std::string path = name == nullptr ? "?" : name;
    const std::string here = path.substr(path.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
    if (innermost.empty()) {
      innermost = here;
    }
    if (path.find("/site-packages/") == std::string::npos && path.find("/lib/python") == std::string::npos) {
      found = here;  // the library's own line, or the test's
      Py_CLEAR(frame);
      PyGILState_Release(gil);
      return found;
    }
  }
  PyErr_Clear();
  PyGILState_Release(gil);
  return innermost.empty() ? found : innermost;
}

void count_wait(const std::string& why) {
  const std::string key = why + " at " + site();
  const std::lock_guard<std::mutex> lock(world());
  ++waits()[key];
}

void set_sticky_error(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(world());
  if (!state().error) {
    state().error = std::move(error);
  }
}

void rethrow() {
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(world());
    std::swap(error, state().error);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

int number_of(c10::Stream stream) {
  return static_cast<int>(stream.device_index() * kStreams + stream.id());
}

c10::Stream stream_of(int number) {
  const c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(number / kStreams));
  return c10::Stream(c10::Stream::UNSAFE, device, number % kStreams);
}

int current(int device) { return these_streams[device]; }

int exchange_current(int device, int number) { return std::exchange(these_streams[device], number); }

int new_stream(int device) {
  const std::lock_guard<std::mutex> lock(world());
  int& turn = state().handed_out[device];
  turn = turn % (kStreams - 1) + 1;
  return device * kStreams + turn;
}

int current_device() { return this_device; }

int exchange_device(int device) {
  if (device < 0) {
    return this_device;  // torch asks for the current device by that number
  }
  TORCH_CHECK(device < kDevices, "strict:", device, " is not there");
  return std::exchange(this_device, device);
}

void enqueue_locked(int number, Work work) {
  Stream& stream = state().streams[number];
  const std::string name = work.what;
  merge(stream.clock, state().host);
  Item& item = push(stream);
  item.run = std::move(work.run);
  item.what = name;
  for (const Operand& operand : work.operands) {
    if (History* history = history_of(operand.start)) {
      note(
          *history,
          Access{operand.start, operand.stop, number, item.number, operand.writes, work.what},
          stream.clock);
    }
  }
  double start = std::max(stream.now, state().host_now), stop = start;
  if (work.bytes > 0 && settings().bytes_per_second > 0) {
    double& link = state().link_free[name.rfind("copy up", 0) == 0 ? 0 : 1];
    start = std::max(start, link);
    stop = link = start + static_cast<double>(work.bytes) / settings().bytes_per_second;
  } else if (work.bytes == 0 && !work.untimed) {
    stop = start + settings().seconds_per_kernel;
  }
  stream.now = stop;
  if (settings().spans) {
    spans().push_back(Span{number, name, start, stop, work.bytes});
  }
  if (work.prompt) {
    demand(stream, item.number);
  }
}

void enqueue(int number, Work work) {
  const std::string counted = work.what;
  if (settings().sites) {
    work.what += " at " + site();
  }
  const std::lock_guard<std::mutex> lock(world());
  ++launches()[counted];
  enqueue_locked(number, std::move(work));
}

void record(Event& event, int number) {
  const std::lock_guard<std::mutex> lock(world());
  Stream& stream = state().streams[number];
  merge(stream.clock, state().host);
  event.stream = number;
  event.number = stream.issued;
  event.clock = stream.clock;
  event.when = std::max(stream.now, state().host_now);
}

void wait_on_stream(const Event& event, int number) {
  if (event.stream < 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(world());
  Stream& stream = state().streams[number];
  merge(stream.clock, event.clock);
  stream.now = std::max(stream.now, event.when);
  if (event.stream != number && state().streams[event.stream].over < event.number) {
    Item& item = push(stream);
    item.other = event.stream;
    item.other_number = event.number;
  }
}

bool query(const Event& event) {
  if (event.stream < 0) {
    return true;
  }
  const std::lock_guard<std::mutex> lock(world());
  Stream& stream = state().streams[event.stream];
  demand(stream, event.number);
  if (stream.over < event.number) {
    return false;
  }
  merge(state().host, event.clock);
  return true;
}

void synchronize(const Event& event, const char* why) {
  if (event.stream < 0) {
    return;
  }
  count_wait(why);
  {
    const WithoutPython released;
    std::unique_lock<std::mutex> lock(world());
    wait_until_over(lock, event.stream, event.number);
    learn(event.clock, event.when);
  }
  rethrow();
}

void synchronize_stream(int number, const char* why) {
  Event event;
  record(event, number);
  synchronize(event, why);
}

void synchronize_device(int device, const char* why) {
  count_wait(why);
  {
    const WithoutPython released;
    std::unique_lock<std::mutex> lock(world());
    for (int number = device * kStreams; number < (device + 1) * kStreams; ++number) {
      Stream& stream = state().streams[number];
      const Clock clock = stream.clock;
      const double now = stream.now;
      wait_until_over(lock, number, stream.issued);
      learn(clock, now);
    }
  }
  rethrow();
}

bool is_over(int stream, uint64_t number) { return state().streams[stream].over >= number; }

Clock clock_of(int stream) {
  Clock clock = state().streams[stream].clock;
  merge(clock, state().host);
  return clock;
}

Clock host_clock() { return state().host; }

uint64_t issued(int stream) { return state().streams[stream].issued; }

}  // namespace strict
