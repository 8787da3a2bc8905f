// A queue on io_uring through system calls; io_uring_enter submits, waits and reaps.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <string>
#include <vector>

#include "queue.h"

namespace infinity::aio {

// A range of memory shared with the kernel.
class Mapping {
  public:
    Mapping() = default;
    // Throws std::system_error.
    Mapping(int fd, uint64_t offset, size_t bytes);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();

    template <typename T>
    T* at(size_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(start_) + offset);
    }

  private:
    void* start_ = nullptr;
    size_t bytes_ = 0;
};

// A read of an eventfd is always in flight in the ring; wake() completes it. Registered buffers spare the kernel
// pinning and unpinning the pages in every operation, which is most of the cost of an operation on a large block.
class UringQueue final : public Queue {
  public:
    static std::string explain(int error);
    // Throws std::system_error.
    explicit UringQueue(unsigned depth);
    ~UringQueue() override;

    int submit(std::span<Operation* const> operations) override;
    int reap(std::span<Completion> completions, bool wait) override;
    void wake() override;
    void abandon(unsigned in_flight) override;
    bool register_buffer(uint64_t address, uint64_t bytes) override;
    void unregister_buffer(uint64_t address) override;

  private:
    struct RegisteredBuffer {
        uint64_t address, bytes;
        unsigned slot;
    };

    void map(const io_uring_params& parameters);
    // The ring belongs to the thread that uses it, and not to the one that created it.
    int begin();
    io_uring_sqe& next_entry();
    void listen();
    int enter(bool wait);
    size_t collect(std::span<Completion> completions);
    const RegisteredBuffer* registered(const Operation& operation) const;
    bool set_slot(unsigned slot, uint64_t address, uint64_t bytes);

    int ring_fd_ = -1;
    int event_fd_ = -1;
    uint64_t wakes_ = 0;  // target of the read of the eventfd
    bool begun_ = false;
    bool alive_ = true;

    Mapping rings_, entries_;
    unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr;
    unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr;
    io_uring_cqe* completions_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0, sq_size_ = 0;
    unsigned unsubmitted_ = 0;  // entries in the ring that are not submitted yet
    unsigned refusals_ = 0;     // consecutive failures of io_uring_enter

    std::vector<RegisteredBuffer> registered_;  // by address
    std::vector<unsigned> free_slots_;          // free entries of the kernel's buffer table; empty if it has no table
};

}  // namespace infinity::aio
