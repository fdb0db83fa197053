// Memory of the device by stream, as torch's caching allocators have it, without their mercy: a block that is given up is
// spoilt in the order of its stream, and the next allocation of its size on that stream gets that very block. Whoever
// relies on a block that he has given up, or that another stream still uses, finds NaN there, and is reported.
#include "machine.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

namespace strict {

namespace {

constexpr size_t kGrain = 512;

struct Block {
  void* address = nullptr;
  size_t nbytes = 0;  // a multiple of the grain
  int stream = 0;     // to which it belongs
  bool taken = false;
  std::vector<int> others;  // streams that said they use it (record_stream)
  History history;
};

struct HostRange {
  uintptr_t stop = 0;
  bool own = false;  // pinned memory of torch's, mapped here
  History history;
};

struct Late {  // a block that other streams still use, as they said
  Block* block;
  std::vector<std::pair<int, uint64_t>> until;
};

struct Memory {
  std::map<uintptr_t, std::unique_ptr<Block>> blocks;                      // of the device, by address
  std::unordered_map<uint64_t, std::vector<Block*>> free;                  // by stream and size; the last one first
  std::vector<Late> late;
  std::map<uintptr_t, HostRange> host;                                     // registered
  std::vector<std::pair<uintptr_t, std::vector<std::pair<int, uint64_t>>>> late_host;
  std::array<MemoryStatistics, kDevices> statistics{};
};

Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

uint64_t key(int stream, size_t nbytes) { return (uint64_t{nbytes} << 8) | static_cast<uint64_t>(stream); }

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

Block* block_of(const void* address) {
  auto next = memory().blocks.upper_bound(number(address));
  if (next == memory().blocks.begin()) {
    return nullptr;
  }
  Block* block = std::prev(next)->second.get();
  return number(address) < number(block->address) + block->nbytes ? block : nullptr;
}

void put_back(Block* block, const std::vector<std::pair<int, uint64_t>>& over = {}) {
  const int device = block->stream / kStreams;
  Clock clock = clock_of(block->stream);
  for (const auto& [stream, number] : over) {
    clock[stream] = std::max(clock[stream], number);
  }
  note_end(block->history, clock, "device memory of " + std::to_string(block->nbytes) + " bytes");
  char* bytes = alias(block->address);
  const size_t nbytes = block->nbytes;
  Work spoil;
  spoil.what = "(given up)";
  spoil.untimed = true;
  spoil.operands.push_back({number(block->address), number(block->address) + nbytes, true});
  spoil.run = [bytes, nbytes] { std::memset(bytes, 0xFF, nbytes); };
  enqueue_locked(block->stream, std::move(spoil));
  memory().free[key(block->stream, nbytes)].push_back(block);
  memory().statistics[device].blocks -= 1;
  memory().statistics[device].allocated -= static_cast<int64_t>(nbytes);
}

bool all_over(const std::vector<std::pair<int, uint64_t>>& until) {
  return std::all_of(until.begin(), until.end(), [](const auto& each) { return is_over(each.first, each.second); });
}

void sweep() {
  auto& late = memory().late;
  for (size_t index = 0; index < late.size();) {
    if (all_over(late[index].until)) {
      const Late last = std::move(late[index]);
      late.erase(late.begin() + static_cast<std::ptrdiff_t>(index));
      put_back(last.block, last.until);
    } else {
      ++index;
    }
  }
}

void give_up(void* address) {
  const std::lock_guard<std::mutex> lock(world());
  sweep();
  Block* block = block_of(address);
  if (block == nullptr) {
    return;
  }
  block->taken = false;
  if (block->others.empty()) {
    put_back(block);
    return;
  }
  Late late{block, {}};
  for (const int stream : block->others) {
    late.until.emplace_back(stream, issued(stream));
  }
  late.until.emplace_back(block->stream, issued(block->stream));
  block->others.clear();
  memory().late.push_back(std::move(late));
}

void give_up_host(void* address) {
  const std::lock_guard<std::mutex> lock(world());
  auto found = memory().host.find(number(address));
  if (found == memory().host.end()) {
    return;
  }
  // As torch's allocators of pinned memory do: it is not used again before the copies that were enqueued are over.
  std::vector<std::pair<int, uint64_t>> until;
  for (const Access& access : found->second.history.accesses) {
    until.emplace_back(access.stream, access.number);
  }
  memory().late_host.emplace_back(found->first, std::move(until));
  auto& waiting = memory().late_host;
  waiting.erase(
      std::remove_if(
          waiting.begin(),
          waiting.end(),
          [](const auto& each) {
            if (!all_over(each.second)) {
              return false;
            }
            auto range = memory().host.find(each.first);
            munmap(reinterpret_cast<void*>(each.first), range->second.stop - each.first);
            memory().host.erase(range);
            return true;
          }),
      waiting.end());
}

struct StrictAllocator final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const int device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) {
      return {nullptr, nullptr, &give_up, where};
    }
    const size_t rounded = (nbytes + kGrain - 1) / kGrain * kGrain;
    const int stream = current(device);
    const std::lock_guard<std::mutex> lock(world());
    sweep();
    auto& statistics = memory().statistics[device];
    auto& free = memory().free[key(stream, rounded)];
    Block* block = nullptr;
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      auto made = std::make_unique<Block>();
      block = made.get();
      block->address = heap_take(device, rounded);
      block->nbytes = rounded;
      block->stream = stream;
      std::memset(alias(block->address), 0xFF, rounded);
      memory().blocks.emplace(number(block->address), std::move(made));
      statistics.reserved += static_cast<int64_t>(rounded);
    }
    block->taken = true;
    statistics.blocks += 1;
    statistics.allocated += static_cast<int64_t>(rounded);
    statistics.peak = std::max(statistics.peak, statistics.allocated);
    return {block->address, block->address, &give_up, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_up; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "the host cannot copy memory of the strict device");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStatistics now = memory_statistics(device);
    c10::CachingDeviceAllocator::DeviceStats statistics;
    auto& allocated = statistics.allocated_bytes[0];
    allocated.current = now.allocated;
    allocated.peak = now.peak;
    statistics.reserved_bytes[0].current = now.reserved;
    return statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kHeapBytes - static_cast<size_t>(memory_statistics(device).allocated), kHeapBytes};
  }
};

struct PinnedAllocator final : public at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, nullptr, &give_up_host, c10::kCPU};
    }
    void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, address != MAP_FAILED, "no host memory");
    const std::lock_guard<std::mutex> lock(world());
    HostRange range;
    range.stop = number(address) + nbytes;
    range.own = true;
    memory().host.emplace(number(address), std::move(range));
    return {address, address, &give_up_host, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_up_host; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

History* history_of(uintptr_t address) {
  if (is_device(reinterpret_cast<void*>(address))) {
    Block* block = block_of(reinterpret_cast<void*>(address));
    return block == nullptr ? nullptr : &block->history;
  }
  auto next = memory().host.upper_bound(address);
  if (next == memory().host.begin()) {
    return nullptr;
  }
  HostRange& range = std::prev(next)->second;
  return address < range.stop ? &range.history : nullptr;
}

bool is_registered(const void* address, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(world());
  auto next = memory().host.upper_bound(number(address));
  return next != memory().host.begin() && number(address) + nbytes <= std::prev(next)->second.stop;
}

void host_register(uintptr_t address, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(world());
  auto next = memory().host.upper_bound(address);
  const bool after = next != memory().host.end() && next->first < address + nbytes;
  const bool before = next != memory().host.begin() && std::prev(next)->second.stop > address;
  TORCH_CHECK(!after && !before, "a part of the range is registered already");
  HostRange range;
  range.stop = address + nbytes;
  memory().host.emplace(address, std::move(range));
}

void host_unregister(uintptr_t address) {
  const std::lock_guard<std::mutex> lock(world());
  auto found = memory().host.find(address);
  TORCH_CHECK(found != memory().host.end(), "no range that begins there is registered");
  note_end(found->second.history, host_clock(), "registered host memory");
  memory().host.erase(found);
}

void record_stream(void* address, int stream) {
  const std::lock_guard<std::mutex> lock(world());
  Block* block = block_of(address);
  if (block != nullptr && block->stream != stream) {
    block->others.push_back(stream);
  }
}

void empty_cache() {
  const std::lock_guard<std::mutex> lock(world());
  sweep();
  for (auto& [_, list] : memory().free) {
    list.erase(
        std::remove_if(
            list.begin(),
            list.end(),
            [](Block* block) {
              const auto& accesses = block->history.accesses;
              const bool quiet = std::all_of(accesses.begin(), accesses.end(), [](const Access& access) {
                return is_over(access.stream, access.number);
              });
              if (!quiet) {
                return false;
              }
              memory().statistics[block->stream / kStreams].reserved -= static_cast<int64_t>(block->nbytes);
              heap_return(block->address, block->nbytes);
              memory().blocks.erase(number(block->address));
              return true;
            }),
        list.end());
  }
}

MemoryStatistics memory_statistics(int device) {
  const std::lock_guard<std::mutex> lock(world());
  return memory().statistics[device];
}

void reset_peak(int device) {
  const std::lock_guard<std::mutex> lock(world());
  memory().statistics[device].peak = memory().statistics[device].allocated;
}

void install_allocators() {
  static auto* device = new StrictAllocator;
  static auto* pinned = new PinnedAllocator;
  c10::SetAllocator(c10::DeviceType::PrivateUse1, device, /*priority=*/1);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, pinned, /*priority=*/1);
}

}  // namespace strict
