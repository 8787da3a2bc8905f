// The engine: requests in, split over a fixed number of I/O threads.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "worker.h"

namespace infinity::aio {

inline constexpr int64_t kLargestBlock = 1 << 30;  // bytes
inline constexpr int64_t kMostThreads = 1024;

struct Options {
    int64_t block_size = 1 << 20;  // bytes of one piece
    int64_t queue_depth = 32;      // pieces in flight per thread
    int64_t threads = 1;           // in all; a striped file's members share them out
};

// Thread safe.
class Engine {
  public:
    // Throws std::invalid_argument, std::system_error.
    Engine(const Options& options, const Backend& backend);
    ~Engine() { close(); }

    // Throws std::invalid_argument for numbers that mean nothing, std::logic_error after close().
    std::shared_ptr<Request> start(Direction direction, std::shared_ptr<const File> file, int64_t offset,
                                   uint64_t address, int64_t nbytes);
    // Completes what was started, then ends the threads. In a forked child, where there are no threads, does nothing.
    void close();

    // Memory that requests use again and again, which io_uring can pin once (elsewhere nothing happens). It must be
    // given up before it is unmapped. Returns whether it was pinned; what is not works as well.
    bool pin(uint64_t address, int64_t nbytes);
    void unpin(uint64_t address);

    const Backend& backend() const { return backend_; }
    const Options& options() const { return options_; }  // queue_depth as it was granted
    Counters& counters() { return counters_; }

  private:
    void open_workers();
    void check_blocks(uint64_t block, uint64_t offset) const;
    // The thread that gets the `turn`th part of what a member has.
    Worker& worker(size_t member, size_t members, size_t turn);

    const Backend& backend_;
    Options options_;
    const pid_t owner_;
    Counters counters_;

    std::mutex mutex_;  // guards what follows
    bool closed_ = false;
    std::vector<std::unique_ptr<Worker>> workers_;
    size_t turn_ = 0;  // parts of requests go to the threads in turn
};

}  // namespace infinity::aio
