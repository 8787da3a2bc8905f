// One I/O thread: its jobs, its kernel queue, and the pieces in flight.
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
    std::atomic<uint64_t> bytes_buffered{0};  // read or written through the page cache
    Latencies latencies;                      // of pieces, from submission to completion
};

class Worker {
  public:
    // Starts the thread, which keeps up to `depth` operations in flight in `queue`. `counters` outlives the worker.
    Worker(std::unique_ptr<Queue> queue, unsigned depth, const std::string& name, Counters& counters);
    ~Worker() { stop(); }

    // Callable from any thread, until stop().
    void push(Job job);
    // Runs `work` on the worker's thread and waits for it. Callable from any other thread, until stop().
    void call(const std::function<void(Queue&)>& work);
    // Completes all pushed jobs, then joins the thread. Idempotent.
    void stop();

  private:
    using Clock = std::chrono::steady_clock;

    struct Slot : Operation {
        Piece piece;
        std::shared_ptr<Request> request;
        Clock::time_point begun;
    };

    void run();
    bool collect();  // sleeps while idle; returns false once stop() was called and all jobs are done
    void fill();
    Job* next_job();  // returns the next unfinished job, alternating reads and writes; or null
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

    std::mutex mutex_;  // guards the next three members
    std::vector<Job> inbox_;
    std::vector<std::function<void()>> calls_;
    bool stopping_ = false;

    // Members below are used by the worker's thread only.
    std::deque<Job> jobs_[2];  // reads and writes, served alternately, so that a burst of writes delays no fetch
    size_t turn_ = 0;
    std::vector<Slot> slots_;
    std::vector<Slot*> free_;
    std::vector<Slot*> ready_;             // prepared, not yet accepted by the kernel
    std::vector<Operation*> operations_;   // scratch for submit()
    std::vector<Completion> completions_;  // scratch for reap()
    size_t in_flight_ = 0;
    unsigned stalls_ = 0;  // consecutive rejected submissions while nothing was in flight
    int broken_ = 0;       // errno of the call after which this thread abandoned its queue

    std::thread thread_;
};

}  // namespace infinity::aio
