// Memory of the device, and pinned host memory. Both come from malloc; torch refuses to compute with the former on the
// CPU, and fresh and freed device memory is poison.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "scheduler.h"

namespace late {

// ---- the current device and streams of this thread, as on CUDA ----

inline thread_local int current_device = 0;
inline thread_local std::array<int64_t, devices> current_streams{};

inline StreamKey current_stream(int device) { return {device, current_streams.at(static_cast<size_t>(device))}; }
inline StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
inline c10::Device device_of(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

inline void* allocate_bytes(size_t nbytes) {
    constexpr size_t alignment = 4096;  // that of a page, for direct I/O
    void* memory = std::aligned_alloc(alignment, (nbytes + alignment - 1) / alignment * alignment);
    TORCH_CHECK(memory != nullptr, "late: out of memory: ", nbytes, " bytes");
    return memory;
}

// Freed in the order of the stream that was current at the allocation, as CUDA's allocator reuses it. A kernel on
// another stream that still needs the memory meets poison, unless that stream was recorded.
class DeviceMemory final : public c10::DeviceAllocator {
  public:
    static DeviceMemory& instance() {
        static auto* const only = new DeviceMemory;
        return *only;
    }

    c10::DataPtr allocate(size_t nbytes) override {
        check_limit(current_device, nbytes);
        auto* block = new Block{nullptr, nbytes, current_stream(current_device), {}};
        if (nbytes > 0) {
            block->memory = allocate_bytes(nbytes);
            std::memset(block->memory, poison, nbytes);
        }
        count(block->stream.device, static_cast<int64_t>(nbytes));
        return {block->memory, block, &release, device_of(block->stream.device)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "late: copy_data is unsupported"); }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record(pointer, key_of(stream)); }

    void record(const c10::DataPtr& pointer, StreamKey stream) {
        if (pointer.get_deleter() != &release) return;
        const std::lock_guard lock(mutex_);
        static_cast<Block*>(pointer.get_context())->users.insert(stream);
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        const std::lock_guard lock(mutex_);
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0] = allocated_.at(device);
        stats.reserved_bytes[0] = allocated_.at(device);
        return stats;
    }

    void resetAccumulatedStats(c10::DeviceIndex device) override {
        const std::lock_guard lock(mutex_);
        allocated_.at(device).reset_accumulated();
    }

    void resetPeakStats(c10::DeviceIndex device) override {
        const std::lock_guard lock(mutex_);
        allocated_.at(device).reset_peak();
    }

    // As torch.cuda.set_per_process_memory_fraction.
    void set_limit(c10::DeviceIndex device, size_t nbytes) {
        const std::lock_guard lock(mutex_);
        limits_.at(static_cast<size_t>(device)) = nbytes;
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        const std::lock_guard lock(mutex_);
        return {capacity - static_cast<size_t>(allocated_.at(device).current), capacity};
    }

    static constexpr size_t capacity = size_t{4} << 30;

  private:
    struct Block {
        void* memory;
        size_t nbytes;
        StreamKey stream;
        std::set<StreamKey> users;  // other streams that were recorded
    };

    static void release(void* context) {
        std::unique_ptr<Block> block(static_cast<Block*>(context));
        instance().count(block->stream.device, -static_cast<int64_t>(block->nbytes));
        if (block->memory == nullptr) return;
        auto& scheduler = Scheduler::instance();
        std::vector<TaskPtr> after;
        for (const auto& user : block->users) after.push_back(scheduler.newest(user));
        auto free = [&scheduler, memory = block->memory, nbytes = block->nbytes] {
            std::memset(memory, poison, nbytes);
            scheduler.retire(memory, nbytes, true);
        };
        scheduler.enqueue(block->stream, Kind::free, free, std::move(after));
    }

    void check_limit(int device, size_t nbytes) {
        const std::lock_guard lock(mutex_);
        const auto used = static_cast<size_t>(allocated_.at(static_cast<size_t>(device)).current);
        const size_t limit = limits_.at(static_cast<size_t>(device));
        TORCH_CHECK_WITH(OutOfMemoryError, nbytes <= limit && used <= limit - nbytes, "late: out of memory: ", nbytes,
                         " bytes beside ", used, " of ", limit);
    }

    void count(int device, int64_t nbytes) {
        const std::lock_guard lock(mutex_);
        auto& stat = allocated_.at(static_cast<size_t>(device));
        if (nbytes >= 0) {
            stat.increase(static_cast<size_t>(nbytes));
        } else {
            stat.decrease(static_cast<size_t>(-nbytes));
        }
    }

    std::mutex mutex_;
    std::array<c10::CachingAllocator::Stat, devices> allocated_{};
    std::array<size_t, devices> limits_ = [] {
        std::array<size_t, devices> unlimited{};
        unlimited.fill(std::numeric_limits<size_t>::max());  // simulated models are larger than `capacity`
        return unlimited;
    }();
};

// Host memory that counts as pinned: of torch's pinned tensors, and registered by tests.
class PinnedMemory final : public c10::Allocator {
  public:
    static PinnedMemory& instance() {
        static auto* const only = new PinnedMemory;
        return *only;
    }

    c10::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) return {nullptr, c10::kCPU};
        void* memory = allocate_bytes(nbytes);
        add(memory, nbytes);
        return {memory, memory, &release, c10::kCPU};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

    void add(void* memory, size_t nbytes) {
        const std::lock_guard lock(mutex_);
        regions_[reinterpret_cast<uintptr_t>(memory)] = nbytes;
    }

    // Returns the size of the region that begins at `memory`, which is not pinned any more.
    size_t remove(void* memory) {
        const std::lock_guard lock(mutex_);
        const auto found = regions_.find(reinterpret_cast<uintptr_t>(memory));
        if (found == regions_.end()) return 0;
        const size_t nbytes = found->second;
        regions_.erase(found);
        return nbytes;
    }

    bool contains(const void* pointer) {
        const std::lock_guard lock(mutex_);
        const auto address = reinterpret_cast<uintptr_t>(pointer);
        auto after = regions_.upper_bound(address);
        if (after == regions_.begin()) return false;
        --after;
        return address < after->first + after->second;
    }

  private:
    // Copies that were queued before still read or write it, as with CUDA's allocator of pinned memory.
    static void release(void* memory) {
        const size_t nbytes = instance().remove(memory);
        Scheduler::instance().retire(memory, nbytes, false);
    }

    std::mutex mutex_;
    std::map<uintptr_t, size_t> regions_;
};

}  // namespace late
