// A pool of threads for element-wise work on memory the caller owns.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock {

// Threads that wait for work of one owner, and what they share with it. The threads and the state of the mutex stay behind in the
// parent when the process forks.
struct Workers {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable wake;  // work came, or the owner closes
  std::vector<std::thread> threads;
  bool closing = false;

  bool forked() const noexcept { return getpid() != owner; }
  // Starts threads, with all signals blocked: those are for the interpreter's thread. Blocking them also turns a write past the
  // limit of file sizes into EFBIG.
  void start(std::size_t count, const std::function<void()>& serve);
  // Ends and joins the threads, which finish what they have to. Idempotent; does nothing in a forked process.
  void close() noexcept;
};

// Closes the workers, and drops them, but not in a forked process: destroying a std::thread that was never joined ends the
// process, and there is nothing to join.
template <class Owner>
void drop(Owner workers) noexcept {
  workers->close();
  if (workers->forked()) new Owner(std::move(workers));
}

// Runs numbered pieces of work on up to `threads` threads, the caller's own among them.
//
// Several callers may use one pool at once: each takes part in its own work, and the workers help the first of them.
// A process that was forked from the pool's owner has none of its workers and runs everything in the caller.
class Pool {
 public:
  // `threads` counts the calling thread, so 1 starts none. Throws std::invalid_argument below 1.
  // The threads that it starts run on `cores` alone, unless there are none or the system refuses.
  explicit Pool(int threads, const std::vector<int>& cores = {});
  // Starts none: work is done by the OpenMP threads of the caller, by way of a runtime's `GOMP_parallel`. Those that
  // have just done other work for the caller may still be awake, and spin on the cores that workers would need.
  using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  explicit Pool(Parallel parallel);
  // Joins the workers, as close() does.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const noexcept { return threads_; }

  // Calls body(0) ... body(count - 1), each exactly once, in any order; returns when all are done. `body` must not throw
  // and must not call the pool. Throws std::runtime_error after close().
  template <class Body>
  void parallel_for(std::size_t count, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(count, [](const void* context, std::size_t index) noexcept { (*static_cast<const Plain*>(context))(index); },
        &body);
  }

  // Ends and joins the workers; work under way in other threads is finished first by its callers. Idempotent.
  void close() noexcept;

 private:
  using Piece = void (*)(const void* context, std::size_t index) noexcept;
  struct Shared;

  void run(std::size_t count, Piece piece, const void* context);

  int threads_;
  Parallel parallel_ = nullptr;
  std::shared_ptr<Shared> shared_;
};

}  // namespace penstock
