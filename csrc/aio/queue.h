// A kernel queue: takes operations, and returns completions in any order.
//
// Only its worker's thread uses a queue, except wake(), which any thread may call. Linux AIO and io_uring implement
// this interface, and tests inject faults through it (faulty_queue.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace infinity::aio {

enum class Direction { kRead, kWrite };

// One transfer, as submitted to the kernel. Its address must not change until its completion is reaped.
struct Operation {
    unsigned index = 0;  // less than the queue's depth, and unique among the operations in flight
    Direction direction = Direction::kRead;
    bool durable = false;  // the write completes only once its bytes are on the device (RWF_DSYNC)
    int fd = -1;
    uint64_t offset = 0;   // bytes into the file
    uint64_t address = 0;  // of the first byte in memory
    uint64_t bytes = 0;
};

struct Completion {
    Operation* operation;
    int64_t result;  // bytes, or a negative errno
};

class Queue {
  public:
    virtual ~Queue() = default;
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Returns the number of leading operations that were accepted, or a negative errno for the first. Operations may
    // start as late as in the next reap().
    virtual int submit(std::span<Operation* const> operations) = 0;
    // Returns the number of completions, or a negative errno. With `wait`, first sleeps until there is a completion or
    // wake() has been called since the last such sleep, so 0 is not an error.
    virtual int reap(std::span<Completion> completions, bool wait) = 0;
    // Ends the present or the next sleep in reap(). Callable from any thread.
    virtual void wake() = 0;
    // Waits until the kernel has ended all `in_flight` operations and discards their results. Nothing can be submitted
    // afterwards.
    virtual void abandon(unsigned in_flight) = 0;

    // Registers memory that many operations will use, so that its pages are pinned once instead of in every operation.
    // Returns false if the queue did not register it.
    virtual bool register_buffer(uint64_t address, uint64_t bytes) { return (void)address, (void)bytes, false; }
    virtual void unregister_buffer(uint64_t address) { (void)address; }

    // Number of consecutive EINTRs, or EAGAINs with waits of 1 to 10 ms, that are retried before they are reported.
    virtual unsigned patience() const { return 500; }  // about 5 seconds

  protected:
    Queue() = default;
};

struct Backend {
    const char* name;  // value of `Engine.backend`
    // Returns a queue for `depth` operations in flight. Throws std::system_error, with EAGAIN if the depth is too
    // large.
    std::unique_ptr<Queue> (*open)(unsigned depth);
    // Returns why open() failed with `error`, and the fix.
    std::string (*explain)(int error);
};

// The backends of this build: Linux AIO first (libaio before the kernel's ABI), then io_uring.
const std::vector<Backend>& available_backends();

// Returns the backend named `name`, or the first if `name` is empty. Throws std::invalid_argument for unknown names.
const Backend& find_backend(std::string_view name);

}  // namespace infinity::aio
