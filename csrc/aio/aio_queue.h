// A queue on Linux AIO: a kernel context, and the eventfd that its thread sleeps on.
#pragma once

#include "calls.h"
#include "queue.h"

namespace infinity::aio {

// One eventfd signals both completions (IOCB_FLAG_RESFD) and new work from other threads. A thread with transfers in
// flight therefore handles a new request at once, without a time-out.
class AioQueue final : public Queue {
  public:
    static std::string explain(int error);
    // Throws std::system_error.
    AioQueue(const Calls& calls, unsigned depth);
    ~AioQueue() override;

    int submit(std::span<Operation* const> operations) override;
    int reap(std::span<Completion> completions, bool wait) override;
    void wake() override;
    void abandon(unsigned in_flight) override;

  private:
    iocb* describe(const Operation& operation);

    const Calls& calls_;
    aio_context_t context_ = 0;
    bool alive_ = false;
    int event_fd_ = -1;
    std::vector<iocb> blocks_;      // by the operations' index
    std::vector<iocb*> batch_;      // scratch
    std::vector<io_event> events_;  // scratch
};

}  // namespace infinity::aio
