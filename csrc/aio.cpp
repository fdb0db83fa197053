#include "aio.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <utility>

#include "crc32c.h"
#include "pool.h"

namespace penstock {

File::~File() { ::close(fd); }

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

struct Queue::Shared : Workers {
  struct Direction {
    std::deque<std::shared_ptr<Transfer>> waiting;  // transfers with chunks to hand out, first come first
    std::size_t in_flight = 0;                      // chunks
  };

  std::condition_variable finished;  // waiters: a transfer is done
  Direction reads, writes;
  bool wrote_last = false;  // the chunk handed out last was of a write

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
      const std::size_t chunk = transfer->handed_out_++;
      if (transfer->handed_out_ == transfer->chunks_) from->waiting.pop_front();
      wrote_last = from == &writes;
      ++from->in_flight;
      if (transfer->error == 0) move_chunk(*transfer, chunk, lock);  // after an error the rest is not tried
      --from->in_flight;
      if (++transfer->finished_ == transfer->chunks_) finish(*transfer);
    }
  }

  // Reads or writes one chunk, without the mutex.
  static void move_chunk(Transfer& transfer, std::size_t chunk, std::unique_lock<std::mutex>& lock) {
    const Request& request = transfer.request_;
    const std::size_t start = chunk * transfer.chunk_bytes_, nbytes = transfer.nbytes_of(chunk);
    char* const memory = request.memory + start;
    lock.unlock();
    std::uint32_t checksum = 0;
    if (request.checksum && request.write) checksum = crc32c(memory, nbytes);
    const Outcome outcome = move(request.file->fd, request.write, memory, nbytes, request.offset + start);
    (request.write ? request.file->bytes_written : request.file->bytes_read) += outcome.moved;
    if (request.checksum && !request.write && outcome.error == 0) checksum = crc32c(memory, nbytes);
    lock.lock();
    if (request.checksum) transfer.checksums_[chunk] = checksum;
    if (outcome.error == 0 || transfer.error != 0) return;
    transfer.error = outcome.error;
    transfer.error_offset = request.offset + start + outcome.moved;
  }

  // Needs the mutex.
  void finish(Transfer& transfer) {
    for (std::size_t chunk = 0; chunk < transfer.checksums_.size(); ++chunk)
      transfer.checksum = crc32c_join(transfer.checksum, transfer.checksums_[chunk], transfer.nbytes_of(chunk));
    transfer.request_.file.reset();  // who waited for a file's last transfer can close the file
    transfer.ended = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    transfer.done_.store(true, std::memory_order_release);
    finished.notify_all();
  }
};

Queue::Queue(std::size_t depth, std::size_t chunk_bytes)
    : depth_(depth), chunk_bytes_(chunk_bytes), shared_(std::make_shared<Shared>()) {
  if (depth < 1) throw std::invalid_argument("a queue needs a depth of at least 1");
  if (chunk_bytes < 1 || chunk_bytes % kPageBytes) throw std::invalid_argument("chunks are whole pages of 4096 bytes");
  shared_->start(depth, [shared = shared_.get()] { shared->serve(); });
}

Queue::~Queue() { drop(std::move(shared_)); }

void Queue::close() noexcept { shared_->close(); }

std::shared_ptr<Transfer> Queue::submit(const Request& request) {
  if (request.offset % kPageBytes || reinterpret_cast<std::uintptr_t>(request.memory) % kPageBytes ||
      request.nbytes % kPageBytes)
    throw std::invalid_argument("offset, address and length are multiples of 4096");
  if (shared_->forked()) throw std::runtime_error("the queue belongs to the process that this one was forked from");
  auto transfer = std::make_shared<Transfer>(shared_, request, chunk_bytes_);
  const std::size_t chunks = transfer->chunks_;
  {
    std::lock_guard lock(shared_->mutex);
    if (shared_->closing) throw std::runtime_error("the queue is closed");
    if (chunks == 0) {
      shared_->finish(*transfer);
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
    : queue_(std::move(queue)),
      request_(request),
      chunk_bytes_(chunk_bytes),
      chunks_((request.nbytes + chunk_bytes - 1) / chunk_bytes),
      checksums_(request.checksum ? chunks_ : 0) {}

std::size_t Transfer::nbytes_of(std::size_t chunk) const noexcept {
  return std::min(chunk_bytes_, request_.nbytes - chunk * chunk_bytes_);
}

bool Transfer::wait(std::chrono::milliseconds limit) const {
  if (done()) return true;
  if (queue_->forked()) throw std::runtime_error("the transfer belongs to the process that this one was forked from");
  std::unique_lock lock(queue_->mutex);
  return queue_->finished.wait_for(lock, limit, [this] { return done(); });
}

}  // namespace penstock
