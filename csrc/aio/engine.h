// The I/O engine: splits requests over a fixed number of I/O threads.
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

// Throws std::invalid_argument unless [address, address + nbytes) can be memory of this process.
void check_memory(uint64_t address, int64_t nbytes);

struct Options {
    int64_t block_size = 1 << 20;  // bytes of one piece
    int64_t queue_depth = 32;      // pieces in flight per thread
    int64_t threads = 1;           // total; the members of a striped file divide them
};

// Thread safe.
class Engine {
  public:
    // Throws std::invalid_argument, std::system_error.
    Engine(const Options& options, const Backend& backend);
    ~Engine() { close(); }

    // Throws std::invalid_argument for invalid numbers, std::logic_error after close().
    std::shared_ptr<Request> start(Direction direction, std::shared_ptr<const File> file, int64_t offset,
                                   uint64_t address, int64_t nbytes);
    // Completes all requests, then joins the threads. No-op in a forked child, which has no threads.
    void close();

    // Registers memory that many requests will use, so that io_uring pins its pages once (a no-op on Linux AIO).
    // Unregister it before it is unmapped. Returns false if it was not registered; requests work then, too.
    bool register_buffer(uint64_t address, int64_t nbytes);
    void unregister_buffer(uint64_t address);

    const Backend& backend() const { return backend_; }
    const Options& options() const { return options_; }  // with the granted queue_depth
    Counters& counters() { return counters_; }

  private:
    void open_workers();
    void check_blocks(uint64_t block, uint64_t offset) const;
    // Returns the thread for part number `turn` of a member.
    Worker& worker(size_t member, size_t members, size_t turn);

    const Backend& backend_;
    Options options_;
    const pid_t owner_;
    Counters counters_;

    std::mutex mutex_;  // guards the members below
    bool closed_ = false;
    std::vector<std::unique_ptr<Worker>> workers_;
    size_t turn_ = 0;  // assigns parts of requests to threads round-robin
};

}  // namespace infinity::aio
