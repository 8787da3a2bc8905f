// One transfer between memory and a file, and what became of it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "file.h"
#include "queue.h"

namespace infinity::aio {

struct Failure {
    int error;         // errno
    std::string what;  // what failed, where, of which request
    std::string path;  // of the file
    bool checksum;     // what was read is not what was written
};

// Done means that no byte of the buffer is, or will be, under the kernel any more: a request that failed is done only
// when all its pieces in flight have ended. Thread safe.
class Request {
  public:
    Request(Direction direction, std::shared_ptr<const File> file, uint64_t offset, uint64_t address, uint64_t nbytes);

    const Direction direction;
    const std::shared_ptr<const File> file;
    const uint64_t offset;   // bytes
    const uint64_t address;  // of the caller's buffer, which outlives the request
    const uint64_t nbytes;

    // For the I/O threads. Every byte of the request is ended exactly once: transferred, failed, or never tried after a
    // failure.
    void transferred(uint64_t bytes);
    // The first failure counts.
    void fail(int error, uint64_t at, uint64_t size, const std::string& hint, bool checksum = false);
    void end(uint64_t bytes);
    // Whether the bytes [from, to), which were read, are those that were written; fails if not.
    void verify(uint64_t from, uint64_t to);

    // Where byte `at` of the file is in memory.
    char* memory(uint64_t at) const { return reinterpret_cast<char*>(address + (at - offset)); }
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    bool done() const { return done_.load(std::memory_order_acquire); }
    uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }

    // Returns whether the request is done, at the latest after `timeout`.
    bool wait_for(std::chrono::duration<double> timeout);
    // Why it failed, if it did; for requests that are done.
    std::optional<Failure> failure() const;
    // The process whose threads serve it; a forked child would wait for ever.
    const pid_t owner;
    // "read of 4096 bytes at offset 0"
    static std::string describe(Direction direction, uint64_t nbytes, uint64_t offset);

  private:
    void verify_end();

    std::atomic<uint64_t> unfinished_;
    std::atomic<uint64_t> bytes_done_{0};
    std::atomic<bool> failed_{false};
    std::atomic<bool> done_{false};
    mutable std::mutex mutex_;  // guards failure_, and done_ against lost wake-ups
    std::condition_variable changed_;
    std::optional<Failure> failure_;
};

}  // namespace infinity::aio
