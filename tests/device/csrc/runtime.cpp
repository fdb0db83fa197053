// What torch asks of a device: which one is current, its streams and events, its generators.
#include "machine.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <random>

namespace strict {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

// Operators that draw numbers run late, and in an order between streams that nobody knows. So each takes a seed when it
// is enqueued: numbers follow the order of the program.
struct Generator final : public c10::GeneratorImpl {
  explicit Generator(int index)
      : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  void set_offset(uint64_t offset) override { drawn_ = offset; }
  uint64_t get_offset() const override { return drawn_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  uint64_t draw() { return seed_ * 0x9E3779B97F4A7C15ull + ++drawn_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "a state of another generator");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], drawn_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions(at::kByte).device(at::kCPU));
    const uint64_t words[2] = {seed_, drawn_};
    std::memcpy(state.data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return kType; }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->drawn_ = drawn_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, drawn_ = 0;
};

const at::Generator& default_generator(int index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int each = 0; each < kDevices; ++each) {
      made->push_back(at::make_generator<Generator>(each));
    }
    return made;
  }();
  return (*generators)[index < 0 ? current_device() : index];
}

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kType); }
  bool isPinnedPtr(const void* data) const override { return is_registered(data, 1); }
  at::Device getDeviceFromPtr(void* data) const override { return device_at(device_of(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    at::DataPtr fresh = storage.allocator()->allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
      const auto from = reinterpret_cast<uintptr_t>(storage.data());
      const auto to = reinterpret_cast<uintptr_t>(fresh.get());
      char* source = alias(storage.data());
      char* target = alias(fresh.get());
      Work copy;
      copy.what = "resize";
      copy.operands = {{from, from + kept, false}, {to, to + kept, true}};
      copy.run = [=] { std::memcpy(target, source, kept); };
      enqueue(current(current_device()), std::move(copy));
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override { return device_at(exchange_device(to.index())); }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device to) const override { exchange_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange_device(to.index()); }
  c10::Stream getStream(c10::Device of) const override { return stream_of(current(index_of(of))); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream_of(index_of(of) * kStreams); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return stream_of(new_stream(index_of(of))); }
  c10::Stream getNewStream(c10::Device of, int) const override { return stream_of(new_stream(index_of(of))); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream_of(exchange_current(to.device_index(), number_of(to)));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    strict::record(*static_cast<Event*>(*event), number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_on_stream(*static_cast<Event*>(event), number_of(stream));
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<Event*>(event), "event.synchronize");
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    Event event;
    strict::record(event, number_of(stream));
    return query(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(number_of(stream), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(index < 0 ? current_device() : index, "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), number_of(stream));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events have to be recorded");
    return (static_cast<Event*>(to)->when - static_cast<Event*>(from)->when) * 1e3;
  }

 private:
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

}  // namespace

uint64_t draw_seed(int index) {
  at::Generator generator = default_generator(index);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<Generator>(generator)->draw();
}

void install_runtime() {
  static Guard guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace strict
