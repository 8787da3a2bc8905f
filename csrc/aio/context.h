// An AIO context of the kernel, and the eventfd its thread sleeps on.
#pragma once

#include <span>

#include "calls.h"

namespace infinity::aio {

// One eventfd carries both reasons to wake: the kernel adds to it with every completion (IOCB_FLAG_RESFD), other
// threads add to it when they bring work. So a thread with transfers in flight learns of a new request at once, and no
// time-out is needed.
class Context {
  public:
    // Room for `depth` blocks in flight. When the system's AIO slots are used up (EAGAIN, /proc/sys/fs/aio-max-nr),
    // takes half as many, down to one. Throws std::system_error.
    Context(const Calls& calls, unsigned depth);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    unsigned depth() const { return depth_; }
    unsigned patience() const { return calls_.patience; }

    // Completions of `block` will wake this context.
    void attach(iocb& block) const;
    // How many blocks, from the first, the kernel took; or a negative errno.
    int submit(std::span<iocb*> blocks) const;
    // How many completions were there, without waiting; or a negative errno.
    int reap(std::span<io_event> events) const;
    // Returns when something completed, or wake() was called, since the last sleep().
    void sleep() const;
    void wake() const;
    // Gives the kernel's context up; returns when nothing is in flight any more. Further calls of submit() fail.
    void destroy();

  private:
    const Calls& calls_;
    aio_context_t context_ = 0;
    bool alive_ = false;
    unsigned depth_ = 0;
    int event_fd_ = -1;
};

}  // namespace infinity::aio
