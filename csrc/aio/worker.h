// One I/O thread: a list of jobs, a queue of the kernel's, and the pieces in flight there.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "job.h"
#include "latency.h"
#include "queue.h"

namespace infinity::aio {

struct Counters {
    std::atomic<uint64_t> bytes_read{0};
    std::atomic<uint64_t> bytes_written{0};
    std::atomic<uint64_t> bytes_buffered{0};  // of both, those that went through the page cache
    Latencies latencies;                      // of pieces, from their submission to their completion
};

class Worker {
  public:
    // Starts the thread, which keeps up to `depth` operations in flight in `queue`. `counters` outlives the worker.
    Worker(std::unique_ptr<Queue> queue, unsigned depth, const std::string& name, Counters& counters);
    ~Worker() { stop(); }

    // From any thread, until stop().
    void push(Job job);
    // Has the thread do something with its queue; returns when it is done. From any other thread, until stop().
    void call(const std::function<void(Queue&)>& work);
    // Completes everything that was pushed, then ends the thread. Once only does something.
    void stop();

  private:
    using Clock = std::chrono::steady_clock;

    struct Slot : Operation {
        Piece piece;
        std::shared_ptr<Request> request;
        Clock::time_point begun;
    };

    void run();
    bool collect();  // sleeps while there is nothing to do; false when stop() was called and nothing is left
    void fill();
    Job* next_job();  // the one whose turn it is, with something left to do; or null
    void submit();
    void reap();
    void prepare(Slot& slot);
    void finish(Slot& slot, int64_t result);
    void fail(Slot& slot, int error, const std::string& hint);
    void fail_first(int error, const std::string& hint);
    void release(Slot& slot);
    void break_down(int error);
    bool busy() const { return !jobs_[0].empty() || !jobs_[1].empty() || !ready_.empty() || in_flight_ > 0; }

    const std::unique_ptr<Queue> queue_;
    Counters& counters_;

    std::mutex mutex_;  // guards the three below
    std::vector<Job> inbox_;
    std::vector<std::function<void()>> calls_;
    bool stopping_ = false;

    // The thread's own.
    std::deque<Job> jobs_[2];  // reads and writes, served in turn: a burst of writes must not hold up a fetch
    size_t turn_ = 0;
    std::vector<Slot> slots_;
    std::vector<Slot*> free_;
    std::vector<Slot*> ready_;             // prepared, not yet taken by the kernel
    std::vector<Operation*> operations_;   // scratch for submit()
    std::vector<Completion> completions_;  // scratch for reap()
    size_t in_flight_ = 0;
    unsigned stalls_ = 0;  // refusals to take a block while nothing was in flight
    int broken_ = 0;       // errno of the call that cost this thread its queue

    std::thread thread_;
};

}  // namespace infinity::aio
