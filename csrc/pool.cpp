#include "pool.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <stdexcept>

namespace penstock {
namespace {

// One parallel_for in progress. It lives on its caller's stack: `helpers` keeps the caller there until no worker can
// touch it any more.
struct Job {
  void (*piece)(const void*, std::size_t) noexcept;
  const void* context;
  std::size_t count;
  std::atomic<std::size_t> next{0};
  int helpers = 0;  // workers inside the job; guarded by the pool's mutex

  bool exhausted() const noexcept { return next.load(std::memory_order_relaxed) >= count; }

  void work() noexcept {
    for (;;) {
      const std::size_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      piece(context, index);
    }
  }
};

// Binds the calling thread. Cores that are not there, or that the process may not use, are left out by the system; where
// none remains it refuses, and the thread stays where it was.
void bind([[maybe_unused]] const std::vector<int>& cores) noexcept {
#ifdef __linux__
  int most = -1;
  for (const int core : cores) most = std::max(most, core);
  if (most < 0) return;
  cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(most) + 1);
  if (set == nullptr) return;
  const std::size_t size = CPU_ALLOC_SIZE(static_cast<std::size_t>(most) + 1);
  CPU_ZERO_S(size, set);
  for (const int core : cores) {
    if (core >= 0) CPU_SET_S(static_cast<std::size_t>(core), size, set);
  }
  (void)sched_setaffinity(0, size, set);
  CPU_FREE(set);
#endif
}

}  // namespace

void Workers::start(std::size_t count, const std::function<void()>& serve) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    while (threads.size() < count) threads.emplace_back(serve);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Workers::close() noexcept {
  if (forked()) return;
  std::vector<std::thread> ended;
  {
    std::lock_guard lock(mutex);
    closing = true;
    ended.swap(threads);
  }
  wake.notify_all();
  for (std::thread& thread : ended) thread.join();
}

struct Pool::Shared : Workers {
  std::condition_variable done;  // callers: a helper left a job
  std::deque<Job*> jobs;         // jobs that may still have pieces to hand out, first come first

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return closing || !jobs.empty(); });
      if (closing) return;
      Job& job = *jobs.front();
      ++job.helpers;
      lock.unlock();
      job.work();
      lock.lock();
      retire(job);
      if (--job.helpers == 0) done.notify_all();
    }
  }

  // Takes a job without pieces left out of the list, so that workers go on to the next one. Needs the mutex.
  void retire(Job& job) {
    const auto found = std::find(jobs.begin(), jobs.end(), &job);
    if (found != jobs.end()) jobs.erase(found);
  }
};

Pool::Pool(int threads, const std::vector<int>& cores) : threads_(threads), shared_(std::make_shared<Shared>()) {
  if (threads < 1) throw std::invalid_argument("a pool needs at least 1 thread, the caller's own");
  shared_->start(static_cast<std::size_t>(threads) - 1, [shared = shared_.get(), cores] {
    bind(cores);
    shared->serve();
  });
}

Pool::Pool(Parallel parallel) : threads_(1), parallel_(parallel), shared_(std::make_shared<Shared>()) {
  if (parallel == nullptr) throw std::invalid_argument("no address of GOMP_parallel");
}

Pool::~Pool() { drop(std::move(shared_)); }

void Pool::close() noexcept { shared_->close(); }

void Pool::run(std::size_t count, Piece piece, const void* context) {
  Job job{piece, context, count};
  Shared& shared = *shared_;
  if (shared.forked()) return job.work();
  {
    std::lock_guard lock(shared.mutex);
    if (shared.closing) throw std::runtime_error("the pool is closed");
    if (count > 1 && threads_ > 1) shared.jobs.push_back(&job);
  }
  if (parallel_ != nullptr && count > 1) {
    // As many threads as the caller's runtime has for it: another number would have it end some, or start more.
    return parallel_([](void* data) { static_cast<Job*>(data)->work(); }, &job, 0, 0);
  }
  if (count <= 1 || threads_ == 1) return job.work();
  if (count == 2) {
    shared.wake.notify_one();
  } else {
    shared.wake.notify_all();
  }
  job.work();
  std::unique_lock lock(shared.mutex);
  shared.retire(job);
  shared.done.wait(lock, [&job] { return job.helpers == 0; });
}

}  // namespace penstock
