// One I/O thread: a queue of jobs, a context of its own, and the pieces in flight there.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "context.h"
#include "job.h"

namespace infinity::aio {

struct Counters {
    std::atomic<uint64_t> bytes_read{0};
    std::atomic<uint64_t> bytes_written{0};
    std::atomic<uint64_t> bytes_buffered{0};  // of both, those that went through the page cache
};

class Worker {
  public:
    // Starts the thread. `counters` outlives the worker.
    Worker(const Calls& calls, unsigned depth, const std::string& name, Counters& counters);
    ~Worker() { stop(); }

    unsigned depth() const { return context_.depth(); }
    // From any thread, until stop().
    void push(Job job);
    // Completes everything that was pushed, then ends the thread. Once only does something.
    void stop();

  private:
    struct Slot {
        iocb block;
        Piece piece;
        std::shared_ptr<Request> request;
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

    Context context_;
    Counters& counters_;

    std::mutex mutex_;  // guards the two below
    std::vector<Job> inbox_;
    bool stopping_ = false;

    // The thread's own.
    std::deque<Job> jobs_[2];  // reads and writes, served in turn: a burst of writes must not hold up a fetch
    size_t turn_ = 0;
    std::vector<Slot> slots_;
    std::vector<Slot*> free_;
    std::vector<Slot*> ready_;   // prepared, not yet taken by the kernel
    std::vector<iocb*> blocks_;  // scratch for submit()
    std::vector<io_event> events_;
    size_t in_flight_ = 0;
    unsigned stalls_ = 0;  // refusals to take a block while nothing was in flight
    int broken_ = 0;       // errno of the call that cost this thread its context

    std::thread thread_;
};

}  // namespace infinity::aio
