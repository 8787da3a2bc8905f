// Devices, streams and events as torch sees them.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace late {

struct Event {
    std::atomic<TaskPtr> mark;  // recorded by one thread while another waits
};

inline int checked(c10::DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < devices, "late: there is no device ", static_cast<int>(index));
    return index;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
  public:
    c10::DeviceType type() const override { return c10::kPrivateUse1; }
    c10::DeviceIndex deviceCount() const noexcept override { return devices; }

    c10::Device getDevice() const override { return device_of(current_device); }
    void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
    c10::Device exchangeDevice(c10::Device device) const override {
        return device_of(std::exchange(current_device, checked(device.index())));
    }

    c10::Stream getStream(c10::Device device) const override {
        return stream_of(current_stream(device.has_index() ? checked(device.index()) : current_device));
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({checked(device.index()), 0}); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        static std::atomic<int64_t> next{1};
        return stream_of({device.has_index() ? checked(device.index()) : current_device, next++});
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto& current = current_streams.at(static_cast<size_t>(checked(stream.device_index())));
        return stream_of({stream.device_index(), std::exchange(current, stream.id())});
    }
    bool queryStream(const c10::Stream& stream) const override {
        return scheduler().query(scheduler().newest(key_of(stream)));
    }
    void synchronizeStream(const c10::Stream& stream) const override { scheduler().wait_for_stream(key_of(stream)); }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        scheduler().wait_for_device(checked(device));
    }
    void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
        DeviceMemory::instance().record(pointer, key_of(stream));
    }

    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event;
        static_cast<Event*>(*event)->mark = scheduler().enqueue(key_of(stream), Kind::mark, nullptr);
    }
    void block(void* event, const c10::Stream& stream) const override {
        scheduler().enqueue(key_of(stream), Kind::mark, nullptr, {static_cast<Event*>(event)->mark.load()});
    }
    bool queryEvent(void* event) const override { return scheduler().query(static_cast<Event*>(event)->mark.load()); }
    void synchronizeEvent(void* event) const override { scheduler().wait({static_cast<Event*>(event)->mark.load()}); }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
        const auto earlier = static_cast<Event*>(first)->mark.load(), later = static_cast<Event*>(second)->mark.load();
        const auto from = earlier->time, to = later->time;
        return std::chrono::duration<double, std::milli>(to - from).count();
    }

  private:
    static Scheduler& scheduler() { return Scheduler::instance(); }
    static c10::Stream stream_of(StreamKey key) {
        return c10::Stream(c10::Stream::UNSAFE, device_of(key.device), key.id);
    }
};

// Gives `storage` a size of `nbytes`; what it holds moves along in the order of the current stream.
inline void resize_storage(const c10::Storage& storage, size_t nbytes) {
    auto fresh = DeviceMemory::instance().allocate(nbytes);
    const auto kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
        auto move = [to = fresh.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); };
        Scheduler::instance().enqueue(current_stream(storage.device().index()), Kind::kernel, move);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
}

// Random numbers are the CPU's, so that results can be compared with the CPU's.
struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return devices; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return static_cast<c10::DeviceIndex>(std::exchange(current_device, checked(device)));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }
    bool isPinnedPtr(const void* data) const override { return PinnedMemory::instance().contains(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }
    c10::Device getDeviceFromPtr(void*) const override { return device_of(current_device); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        c10::OptionalDeviceGuard guard(storage.device());
        resize_storage(storage, nbytes);
    }
};

}  // namespace late
