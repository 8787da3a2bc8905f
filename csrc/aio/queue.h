// A queue of the kernel's: operations in, completions out, in any order.
//
// One thread, that of a worker, uses a queue; wake() alone may be called from others. This interface is the seam of the
// engine: Linux AIO and io_uring stand behind it, and the tests put faults in between (faulty_queue.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace infinity::aio {

enum class Direction { kRead, kWrite };

// One transfer, as the kernel is asked for it. Stays where it is until its completion is reaped.
struct Operation {
    unsigned index = 0;  // below the queue's depth; no two in flight have the same one
    Direction direction = Direction::kRead;
    bool durable = false;  // a write that is not done before its bytes are on the device (RWF_DSYNC)
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

    // How many operations, from the first, were taken; or a negative errno, which is about the first. Operations may
    // begin as late as at the next reap().
    virtual int submit(std::span<Operation* const> operations) = 0;
    // How many completions there were, or a negative errno. With `wait`, sleeps first until there is one, or wake() was
    // called since the last such sleep; so 0 is no error.
    virtual int reap(std::span<Completion> completions, bool wait) = 0;
    // Ends a sleep in reap(), or the next one. From any thread.
    virtual void wake() = 0;
    // Returns when none of `in_flight` operations is under the kernel any more; their results are lost, and no more can
    // be submitted.
    virtual void abandon(unsigned in_flight) = 0;

    // Memory that operations use again and again: a queue that can pins it once, and not at every operation. Returns
    // whether it did.
    virtual bool pin(uint64_t address, uint64_t bytes) { return (void)address, (void)bytes, false; }
    virtual void unpin(uint64_t address) { (void)address; }

    // How many EINTRs, or EAGAINs with waits of 1 to 10 ms, in a row are borne before they are reported.
    virtual unsigned patience() const { return 500; }  // about 5 seconds

  protected:
    Queue() = default;
};

struct Backend {
    const char* name;  // what `Engine.backend` says
    // A queue for `depth` operations in flight. Throws std::system_error; EAGAIN: so many are not to be had.
    std::unique_ptr<Queue> (*open)(unsigned depth);
    // Why open() failed with `error`, and what to do about it.
    std::string (*explain)(int error);
};

// Everything this build can use: Linux AIO first (libaio before the kernel's own ABI), then io_uring.
const std::vector<Backend>& available_backends();

// The backend named `name`, or the first when `name` is empty. Throws std::invalid_argument for a name not there.
const Backend& find_backend(std::string_view name);

}  // namespace infinity::aio
