// NCCL between processes of one machine, by a file in /dev/shm: each call returns when its data is there.
// All collectives are made of messages. What is missing here returns success and does nothing, see building.py.
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime.h"

namespace {

enum Result { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6 };
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kHalf, kFloat, kDouble, kBFloat16 };
enum Operation { kSum, kProduct, kMax, kMin, kAverage, kFirstScaled };

constexpr int kVersion = 22809;
constexpr size_t kIdBytes = 128;
constexpr size_t kMailboxBytes = size_t{1} << 18;  // longer messages go in pieces
constexpr double kLongestWait = 60;                // seconds that a rank waits for another one

struct UniqueId {
  char bytes[kIdBytes];
};

size_t size_of(int type) {
  static constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

// From one rank to another one: written while it is empty, read while it is full.
struct Mailbox {
  std::atomic<uint32_t> full;
  char bytes[kMailboxBytes];
};

// The ranks of a group: a mailbox for each pair, in shared memory.
class Communicator {
 public:
  Communicator(std::string path, int size, int rank) : path_(std::move(path)), size_(size), rank_(rank) {
    nbytes_ = sizeof(Shared) + sizeof(Mailbox) * size * size;
    const int file = open(path_.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0) return;
    void* mapped = MAP_FAILED;
    if (ftruncate(file, static_cast<off_t>(nbytes_)) == 0) {
      mapped = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (mapped == MAP_FAILED) return;
    shared_ = static_cast<Shared*>(mapped);
    if (++shared_->opened == static_cast<uint32_t>(size)) unlink(path_.c_str());  // all have it: no file stays behind
  }
  ~Communicator() {
    if (shared_ != nullptr) munmap(shared_, nbytes_);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return size_; }
  int rank() const { return rank_; }
  bool open_here() const { return shared_ != nullptr; }
  bool lost() const { return shared_->lost != 0; }
  void lose() { shared_->lost = 1; }
  Mailbox& mailbox(int from, int to) { return reinterpret_cast<Mailbox*>(shared_ + 1)[from * size_ + to]; }
  std::string path_of_split(int color) { return path_ + "-" + std::to_string(splits_++) + "-" + std::to_string(color); }

 private:
  struct Shared {
    std::atomic<uint32_t> opened, lost;
  };
  std::string path_;
  int size_, rank_, splits_ = 0;
  size_t nbytes_ = 0;
  Shared* shared_ = nullptr;
};

Communicator* comm_of(void* comm) { return static_cast<Communicator*>(comm); }

int open_communicator(void** comm, const std::string& path, int size, int rank) {
  auto* made = new Communicator(path, size, rank);
  *comm = made;
  return made->open_here() ? kSuccess : kSystemError;
}

std::string path_of(const UniqueId& id) { return "/dev/shm/fake-nccl-" + std::string(id.bytes); }

struct Message {
  Communicator* comm;
  bool sends;
  char* data;
  size_t left;
  int peer;

  auto way() const { return std::tuple(comm, sends, peer); }

  // Pass a piece on, where the mailbox is ready for it.
  bool advance() {
    Mailbox& box = sends ? comm->mailbox(comm->rank(), peer) : comm->mailbox(peer, comm->rank());
    if ((box.full != 0) == sends) return false;
    const size_t length = std::min(left, kMailboxBytes);
    sends ? memcpy(box.bytes, data, length) : memcpy(data, box.bytes, length);
    box.full = sends ? 1 : 0;
    data += length;
    left -= length;
    return true;
  }
};

// Pass messages, those of one way in their order, until none is left.
int pass(std::vector<Message> messages) {
  double ends = seconds_now() + kLongestWait;
  while (true) {
    bool advanced = false;
    std::map<decltype(messages[0].way()), bool> busy;
    for (Message& message : messages) {
      if (message.left == 0 || busy[message.way()]) continue;
      busy[message.way()] = true;
      advanced |= message.advance();
    }
    if (busy.empty()) return kSuccess;
    if (advanced) {
      ends = seconds_now() + kLongestWait;
      continue;
    }
    if (seconds_now() > ends) messages[0].comm->lose();
    if (messages[0].comm->lost()) return kRemoteError;
    usleep(20);
  }
}

// Send every rank its part of `mine`, or all of it, and receive theirs one behind the other.
int exchange(Communicator* comm, const void* mine, void* theirs, size_t nbytes, bool parts) {
  std::vector<Message> messages;
  for (int peer = 0; peer < comm->size(); peer++) {
    auto* part = static_cast<char*>(const_cast<void*>(mine)) + (parts ? peer * nbytes : 0);
    messages.push_back({comm, true, part, nbytes, peer});
    messages.push_back({comm, false, static_cast<char*>(theirs) + peer * nbytes, nbytes, peer});
  }
  return pass(std::move(messages));
}

float wide(uint16_t bits) {
  const uint32_t shifted = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &shifted, sizeof value);
  return value;
}
uint16_t narrow(float value) {
  if (value != value) return 0x7FC0;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

std::mutex scales_mutex;
std::deque<double> scales;  // of the operations that multiply before they add

double scale_of(int operation) {
  const std::lock_guard<std::mutex> lock(scales_mutex);
  return operation >= kFirstScaled ? scales.at(operation - kFirstScaled) : 1.0;
}

template <typename Value>
Value combined(Value a, Value b, int operation) {
  switch (operation) {
    case kProduct:
      return a * b;
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// Reduce what ranks sent, one behind the other, in their order; elements of a type that are computed as another one.
template <typename Element, typename Value, typename Read, typename Write>
void reduce_as(const char* given, int ranks, size_t count, void* out, int operation, Read read, Write write) {
  const double scale = scale_of(operation);
  const auto* elements = reinterpret_cast<const Element*>(given);
  for (size_t i = 0; i < count; i++) {
    Value total{};
    for (int rank = 0; rank < ranks; rank++) {
      Value value = read(elements[rank * count + i]);
      if (operation >= kFirstScaled) value = static_cast<Value>(value * scale);
      total = rank == 0 ? value : combined(total, value, operation);
    }
    if (operation == kAverage) total = static_cast<Value>(total / static_cast<Value>(ranks));
    static_cast<Element*>(out)[i] = write(total);
  }
}

template <typename Element>
void reduce_plain(const char* given, int ranks, size_t count, void* out, int operation) {
  const auto same = [](Element value) { return value; };
  reduce_as<Element, Element>(given, ranks, count, out, operation, same, same);
}

int reduce(const std::vector<char>& given, int ranks, size_t count, void* out, int type, int operation) {
  const char* data = given.data();
  switch (type) {
    case kInt8:
      reduce_plain<int8_t>(data, ranks, count, out, operation);
      break;
    case kUint8:
      reduce_plain<uint8_t>(data, ranks, count, out, operation);
      break;
    case kInt32:
      reduce_plain<int32_t>(data, ranks, count, out, operation);
      break;
    case kInt64:
      reduce_plain<int64_t>(data, ranks, count, out, operation);
      break;
    case kHalf:
      reduce_as<_Float16, float>(
          data, ranks, count, out, operation, [](_Float16 v) { return static_cast<float>(v); },
          [](float v) { return static_cast<_Float16>(v); });
      break;
    case kFloat:
      reduce_plain<float>(data, ranks, count, out, operation);
      break;
    case kDouble:
      reduce_plain<double>(data, ranks, count, out, operation);
      break;
    case kBFloat16:
      reduce_as<uint16_t, float>(data, ranks, count, out, operation, wide, narrow);
      break;
    default:
      return kInvalidArgument;
  }
  return kSuccess;
}

// Between ncclGroupStart and ncclGroupEnd messages wait for each other.
thread_local int group_depth = 0;
thread_local std::vector<Message> grouped;

int enqueue(Message message) {
  grouped.push_back(message);
  return group_depth > 0 ? kSuccess : pass(std::exchange(grouped, {}));
}

}  // namespace

API int ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
API const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "fake nccl: another rank did not come" : "fake nccl";
}
API const char* ncclGetLastError(void*) { return ""; }

API int ncclGetUniqueId(UniqueId* id) {
  static std::random_device random;
  snprintf(id->bytes, kIdBytes, "%08x%08x%08x", random(), random(), random());
  return kSuccess;
}
API int ncclCommInitRank(void** comm, int size, UniqueId id, int rank) {
  return open_communicator(comm, path_of(id), size, rank);
}
API int ncclCommInitRankConfig(void** comm, int size, UniqueId id, int rank, void*) {
  return open_communicator(comm, path_of(id), size, rank);
}
API int ncclCommInitRankScalable(void** comm, int size, int rank, int, UniqueId* ids, void*) {
  return open_communicator(comm, path_of(ids[0]), size, rank);
}
API int ncclCommInitAll(void**, int, const int*) { return kInvalidArgument; }
API int ncclCommSplit(void* from, int color, int key, void** comm, void*) {
  struct Asked {
    int color, key, rank;
  };
  Communicator* parent = comm_of(from);
  std::vector<Asked> all(parent->size());
  const Asked mine{color, key, parent->rank()};
  if (const int error = exchange(parent, &mine, all.data(), sizeof mine, false)) return error;
  const std::string path = parent->path_of_split(color);
  *comm = nullptr;
  if (color < 0) return kSuccess;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Asked& a) { return a.color != color; }), all.end());
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return std::tie(a.key, a.rank) < std::tie(b.key, b.rank); });
  auto found = std::find_if(all.begin(), all.end(), [&](const Asked& a) { return a.rank == parent->rank(); });
  return open_communicator(comm, path, static_cast<int>(all.size()), static_cast<int>(found - all.begin()));
}
API int ncclCommCount(void* comm, int* count) {
  *count = comm_of(comm)->size();
  return kSuccess;
}
API int ncclCommUserRank(void* comm, int* rank) {
  *rank = comm_of(comm)->rank();
  return kSuccess;
}
API int ncclCommGetAsyncError(void* comm, int* error) {
  *error = comm_of(comm)->lost() ? kRemoteError : kSuccess;
  return kSuccess;
}
API int ncclCommFinalize(void*) { return kSuccess; }
API int ncclCommDestroy(void* comm) {
  delete comm_of(comm);
  return kSuccess;
}
API int ncclCommAbort(void* comm) {  // not destroyed: another thread may be in a call
  comm_of(comm)->lose();
  return kSuccess;
}
API int ncclMemAlloc(void**, size_t) { return kInvalidArgument; }

API int ncclRedOpCreatePreMulSum(int* operation, void* scalar, int type, int, void*) {
  double value = 1.0;
  if (type == kFloat) value = *static_cast<float*>(scalar);
  if (type == kDouble) value = *static_cast<double*>(scalar);
  if (type == kHalf) value = static_cast<double>(*static_cast<_Float16*>(scalar));
  if (type == kBFloat16) value = wide(*static_cast<uint16_t*>(scalar));
  const std::lock_guard<std::mutex> lock(scales_mutex);
  scales.push_back(value);
  *operation = kFirstScaled + static_cast<int>(scales.size()) - 1;
  return kSuccess;
}

API int ncclGroupStart() {
  group_depth++;
  return kSuccess;
}
API int ncclGroupEnd() { return --group_depth > 0 ? kSuccess : pass(std::exchange(grouped, {})); }
API int ncclSend(const void* data, size_t count, int type, int peer, void* comm, void*) {
  auto* bytes = static_cast<char*>(const_cast<void*>(data));
  return enqueue({comm_of(comm), true, bytes, count * size_of(type), peer});
}
API int ncclRecv(void* data, size_t count, int type, int peer, void* comm, void*) {
  return enqueue({comm_of(comm), false, static_cast<char*>(data), count * size_of(type), peer});
}

API int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void*) {
  const size_t nbytes = count * size_of(type);
  const std::vector<char> mine(static_cast<const char*>(from), static_cast<const char*>(from) + nbytes);
  return exchange(comm_of(comm), mine.data(), to, nbytes, false);  // `from` may be a part of `to`
}
API int ncclAlltoAll(const void* from, void* to, size_t count, int type, void* comm, void*) {
  return exchange(comm_of(comm), from, to, count * size_of(type), true);
}
API int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, void* comm, void*) {
  const int ranks = comm_of(comm)->size();
  std::vector<char> given(ranks * count * size_of(type));
  if (const int error = exchange(comm_of(comm), from, given.data(), count * size_of(type), true)) return error;
  return reduce(given, ranks, count, to, type, operation);
}
API int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, void* comm, void*) {
  const int ranks = comm_of(comm)->size();
  std::vector<char> given(ranks * count * size_of(type));
  if (const int error = exchange(comm_of(comm), from, given.data(), count * size_of(type), false)) return error;
  return reduce(given, ranks, count, to, type, operation);
}
API int ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root, void* comm, void*) {
  const int ranks = comm_of(comm)->size();
  std::vector<char> given(ranks * count * size_of(type));
  if (const int error = exchange(comm_of(comm), from, given.data(), count * size_of(type), false)) return error;
  return comm_of(comm)->rank() == root ? reduce(given, ranks, count, to, type, operation) : kSuccess;
}
API int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* comm, void*) {
  Communicator* group = comm_of(comm);
  const size_t nbytes = count * size_of(type);
  std::vector<Message> messages{{group, false, static_cast<char*>(to), nbytes, root}};
  if (group->rank() == root) {
    if (to != from) memmove(to, from, nbytes);
    messages.clear();
    for (int peer = 0; peer < group->size(); peer++) {
      if (peer != root) messages.push_back({group, true, static_cast<char*>(to), nbytes, peer});
    }
  }
  return pass(std::move(messages));
}
API int ncclBcast(void* data, size_t count, int type, int root, void* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
