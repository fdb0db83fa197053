// Asynchronous direct I/O: transfers between memory the caller owns and files, by a few threads that block when idle.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace penstock {

// Offsets, addresses and lengths are multiples of this.
constexpr std::size_t kPageBytes = 4096;

// Transfer::error of a read that met the end of the file.
constexpr int kEndOfFile = -1;

// An open descriptor, closed with its last owner: transfers own theirs until they are done.
struct File {
  explicit File(int descriptor) noexcept : fd(descriptor) {}
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const int fd;
  std::atomic<std::uint64_t> bytes_read{0};
  std::atomic<std::uint64_t> bytes_written{0};
};

class Transfer;

// `depth` threads with one request each. Transfers are cut into chunks. The chunks of reads are taken in the order of
// submission, so are those of writes, and where both wait, about half of the threads serve each. Several transfers are in
// flight at once and end in any order.
//
// A process that was forked from the queue's owner has none of its threads: it can submit nothing and wait for nothing.
class Queue {
 public:
  // Throws std::invalid_argument where either is 0 or the chunk is not whole pages.
  Queue(std::size_t depth, std::size_t chunk_bytes);
  // As close() does.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  struct Request {
    std::shared_ptr<File> file;
    bool write;
    std::uint64_t offset;
    char* memory;  // stays valid and, in a write, unchanged until the transfer is done
    std::size_t nbytes;
    bool checksum;  // compute the CRC-32C of the bytes
  };

  std::size_t depth() const noexcept { return depth_; }

  // Throws std::invalid_argument where something is not whole pages, std::runtime_error after close() or a fork.
  std::shared_ptr<Transfer> submit(const Request& request);

  // Finishes what was submitted, then ends and joins the threads. Idempotent; does nothing in a forked process.
  void close() noexcept;

 private:
  friend class Transfer;
  struct Shared;

  const std::size_t depth_;
  const std::size_t chunk_bytes_;
  std::shared_ptr<Shared> shared_;
};

// One read or write in flight. Results are there once it is done.
class Transfer {
 public:
  Transfer(std::shared_ptr<Queue::Shared> queue, const Queue::Request& request, std::size_t chunk_bytes);

  // Returns true once it is done, with or without an error.
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Blocks until done, at most `limit`; returns done(). Throws std::runtime_error in a forked process that would wait.
  bool wait(std::chrono::milliseconds limit) const;

  int error = 0;                   // an errno, or kEndOfFile
  std::uint64_t error_offset = 0;  // where in the file
  std::uint32_t checksum = 0;      // without an error: the CRC-32C of all bytes, 0 where none was asked for
  double ended = 0;                // when it was done, in seconds of the steady clock (CLOCK_MONOTONIC)

 private:
  friend class Queue;

  std::size_t nbytes_of(std::size_t chunk) const noexcept;

  const std::shared_ptr<Queue::Shared> queue_;
  Queue::Request request_;
  const std::size_t chunk_bytes_, chunks_;
  std::size_t handed_out_ = 0;            // chunks; like all below, guarded by the queue's mutex
  std::size_t finished_ = 0;              // chunks
  std::vector<std::uint32_t> checksums_;  // of the chunks
  std::atomic<bool> done_{false};
};

}  // namespace penstock
