// The engine: requests in, split over a fixed number of I/O threads.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "worker.h"

namespace infinity::aio {

struct Options {
    int64_t block_size = 1 << 20;  // bytes of one piece
    int64_t queue_depth = 32;      // pieces in flight per thread
    int64_t threads = 1;
};

// Thread safe.
class Engine {
  public:
    // Throws std::invalid_argument, std::system_error.
    Engine(const Options& options, const Calls& calls);
    ~Engine() { close(); }

    // Throws std::invalid_argument for numbers that mean nothing, std::logic_error after close().
    std::shared_ptr<Request> start(Direction direction, std::shared_ptr<const File> file, int64_t offset,
                                   uint64_t address, int64_t nbytes);
    // Completes what was started, then ends the threads. In a forked child, where there are no threads, does nothing.
    void close();

    const Calls& calls() const { return calls_; }
    const Options& options() const { return options_; }  // queue_depth as it was granted
    const Counters& counters() const { return counters_; }

  private:
    const Calls& calls_;
    Options options_;
    const pid_t owner_;
    Counters counters_;

    std::mutex mutex_;  // guards what follows
    bool closed_ = false;
    std::vector<std::unique_ptr<Worker>> workers_;
    size_t next_ = 0;  // the thread that gets the next request, or its first part
};

}  // namespace infinity::aio
