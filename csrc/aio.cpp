#include "aio.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "crc32c.h"

namespace penstock {

File::~File() { ::close(fd); }

struct Transfer::Work {
  Queue::Request request;
  std::size_t chunk_bytes;
  std::size_t chunks;
  std::size_t handed_out = 0;           // chunks; like all below, guarded by the queue's mutex
  std::size_t finished = 0;             // chunks
  std::vector<std::uint32_t> checksums;  // of the chunks
  std::uint32_t checksum = 0;
  int error = 0;
  std::uint64_t error_offset = 0;
  std::chrono::steady_clock::time_point ended;
  std::atomic<bool> done{false};

  Work(const Queue::Request& r, std::size_t chunk)
      : request(r), chunk_bytes(chunk), chunks((r.nbytes + chunk - 1) / chunk), checksums(r.checksum ? chunks : 0) {}

  std::size_t nbytes_of(std::size_t chunk) const noexcept {
    return std::min(chunk_bytes, request.nbytes - chunk * chunk_bytes);
  }
};

namespace {

// How often in a row the kernel may move less than a page before that counts as an error.
constexpr int kStalls = 8;

struct Outcome {
  int error = 0;
  std::size_t moved = 0;  // bytes
};

// Reads or writes all of a range. Direct I/O moves whole pages, so what came of a broken one is moved again.
Outcome move(int fd, bool write, char* memory, std::size_t nbytes, std::uint64_t offset) noexcept {
  Outcome outcome;
  for (int stalls = 0; outcome.moved < nbytes;) {
    char* const at = memory + outcome.moved;
    const std::size_t left = nbytes - outcome.moved;
    const auto place = static_cast<off_t>(offset + outcome.moved);
    const ssize_t count = write ? ::pwrite(fd, at, left, place) : ::pread(fd, at, left, place);
    if (count < 0) {
      if (errno == EINTR) continue;
      outcome.error = errno;
      return outcome;
    }
    const std::size_t whole = static_cast<std::size_t>(count) / kPageBytes * kPageBytes;
    outcome.moved += whole;
    stalls = whole ? 0 : stalls + 1;
    if (stalls == kStalls || (count == 0 && !write)) {
      outcome.error = write ? EIO : kEndOfFile;
      return outcome;
    }
  }
  return outcome;
}

}  // namespace

struct Queue::Shared {
  struct Direction {
    std::deque<std::shared_ptr<Transfer>> waiting;  // transfers with chunks to hand out, first come first
    std::size_t in_flight = 0;                      // chunks
  };

  pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable wake;                  // threads: a transfer came, or the queue closes
  std::condition_variable finished;              // waiters: a transfer is done
  Direction reads, writes;
  bool wrote_last = false;                       // the chunk handed out last was of a write
  std::vector<std::thread> threads;
  bool closing = false;

  // The threads and the state of the mutex stay behind in the parent when it forks.
  bool forked() const noexcept { return getpid() != owner; }

  // Where the next chunk comes from, or null. A read does not wait for all writes before it, nor a write for reads:
  // both are kept in flight while there are both. Needs the mutex.
  Direction* next() noexcept {
    if (reads.waiting.empty() || writes.waiting.empty())
      return !reads.waiting.empty() ? &reads : !writes.waiting.empty() ? &writes : nullptr;
    if (reads.in_flight != writes.in_flight) return reads.in_flight < writes.in_flight ? &reads : &writes;
    return wrote_last ? &reads : &writes;
  }

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      Direction* from = nullptr;
      wake.wait(lock, [&] { return (from = next()) != nullptr || closing; });
      if (!from) return;
      const std::shared_ptr<Transfer> transfer = from->waiting.front();
      Transfer::Work& work = *transfer->work_;
      const std::size_t chunk = work.handed_out++;
      if (work.handed_out == work.chunks) from->waiting.pop_front();
      wrote_last = from == &writes;
      ++from->in_flight;
      if (work.error == 0) {  // after an error the rest of the transfer is not tried
        lock.unlock();
        std::uint32_t checksum = 0;
        const Outcome outcome = move_chunk(work, chunk, checksum);
        lock.lock();
        if (work.request.checksum) work.checksums[chunk] = checksum;
        if (outcome.error != 0 && work.error == 0) {
          work.error = outcome.error;
          work.error_offset = work.request.offset + chunk * work.chunk_bytes + outcome.moved;
        }
      }
      --from->in_flight;
      if (++work.finished == work.chunks) finish(work);
    }
  }

  static Outcome move_chunk(const Transfer::Work& work, std::size_t chunk, std::uint32_t& checksum) noexcept {
    const Request& request = work.request;
    const std::size_t start = chunk * work.chunk_bytes, nbytes = work.nbytes_of(chunk);
    if (request.checksum && request.write) checksum = crc32c(request.memory + start, nbytes);
    const Outcome outcome =
        move(request.file->fd, request.write, request.memory + start, nbytes, request.offset + start);
    (request.write ? request.file->bytes_written : request.file->bytes_read) += outcome.moved;
    if (request.checksum && !request.write && outcome.error == 0) checksum = crc32c(request.memory + start, nbytes);
    return outcome;
  }

  // Needs the mutex.
  void finish(Transfer::Work& work) {
    for (std::size_t chunk = 0; chunk < work.checksums.size(); ++chunk)
      work.checksum = crc32c_join(work.checksum, work.checksums[chunk], work.nbytes_of(chunk));
    work.request.file.reset();  // who waited for a file's last transfer can close the file
    work.ended = std::chrono::steady_clock::now();
    work.done.store(true, std::memory_order_release);
    finished.notify_all();
  }
};

Queue::Queue(std::size_t depth, std::size_t chunk_bytes)
    : depth_(depth), chunk_bytes_(chunk_bytes), shared_(std::make_shared<Shared>()) {
  if (depth < 1) throw std::invalid_argument("a queue needs a depth of at least 1");
  if (chunk_bytes < 1 || chunk_bytes % kPageBytes) throw std::invalid_argument("chunks are whole pages of 4096 bytes");
  // Signals are for the interpreter's thread. Blocking them also turns a write past the limit of file sizes into EFBIG.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (std::size_t i = 0; i < depth; ++i)
      shared_->threads.emplace_back([shared = shared_.get()] { shared->serve(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Queue::~Queue() {
  close();
  // Destroying a std::thread that was never joined ends the process, and there is nothing to join after a fork.
  if (shared_->forked()) new std::shared_ptr<Shared>(shared_);
}

void Queue::close() noexcept {
  if (shared_->forked()) return;
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
    threads.swap(shared_->threads);
  }
  shared_->wake.notify_all();
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Transfer> Queue::submit(const Request& request) {
  if (request.offset % kPageBytes || reinterpret_cast<std::uintptr_t>(request.memory) % kPageBytes ||
      request.nbytes % kPageBytes)
    throw std::invalid_argument("offset, address and length are multiples of 4096");
  if (shared_->forked()) throw std::runtime_error("the queue belongs to the process that this one was forked from");
  auto transfer = std::make_shared<Transfer>(shared_, request, chunk_bytes_);
  const std::size_t chunks = transfer->work_->chunks;
  {
    std::lock_guard lock(shared_->mutex);
    if (shared_->closing) throw std::runtime_error("the queue is closed");
    if (chunks == 0) {
      shared_->finish(*transfer->work_);
    } else {
      (request.write ? shared_->writes : shared_->reads).waiting.push_back(transfer);
    }
  }
  if (chunks == 1) {
    shared_->wake.notify_one();
  } else {
    shared_->wake.notify_all();
  }
  return transfer;
}

Transfer::Transfer(std::shared_ptr<Queue::Shared> queue, const Queue::Request& request, std::size_t chunk_bytes)
    : queue_(std::move(queue)), work_(std::make_unique<Work>(request, chunk_bytes)) {}

Transfer::~Transfer() = default;

bool Transfer::done() const noexcept { return work_->done.load(std::memory_order_acquire); }

bool Transfer::wait(std::chrono::milliseconds limit) const {
  if (done()) return true;
  if (queue_->forked()) throw std::runtime_error("the transfer belongs to the process that this one was forked from");
  std::unique_lock lock(queue_->mutex);
  return queue_->finished.wait_for(lock, limit, [this] { return done(); });
}

int Transfer::error() const noexcept { return work_->error; }

std::uint64_t Transfer::error_offset() const noexcept { return work_->error_offset; }

std::uint32_t Transfer::checksum() const noexcept { return work_->checksum; }

double Transfer::ended() const noexcept {
  return std::chrono::duration<double>(work_->ended.time_since_epoch()).count();
}

}  // namespace penstock
