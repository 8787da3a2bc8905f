// A queue on io_uring, by its system calls: one of them submits, waits and reaps.
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

// A read of an eventfd is always under way in the ring; what wakes from elsewhere completes it. Registered buffers
// (pin()) save the kernel taking and giving back the pages of every operation, which is most of what an operation of a
// large block costs.
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
    bool pin(uint64_t address, uint64_t bytes) override;
    void unpin(uint64_t address) override;

  private:
    struct Pinned {
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
    const Pinned* pinned(const Operation& operation) const;
    bool set_slot(unsigned slot, uint64_t address, uint64_t bytes);

    int ring_fd_ = -1;
    int event_fd_ = -1;
    uint64_t wakes_ = 0;  // where the read of the eventfd puts what it read
    bool begun_ = false;
    bool alive_ = true;

    Mapping rings_, entries_;
    unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr;
    unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr;
    io_uring_cqe* completions_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0, sq_size_ = 0;
    unsigned unsubmitted_ = 0;  // entries that the kernel was not told of yet
    unsigned refusals_ = 0;     // of the kernel to enter, in a row

    std::vector<Pinned> pinned_;        // by address
    std::vector<unsigned> free_slots_;  // of the kernel's table of buffers; empty where it has none
};

}  // namespace infinity::aio
