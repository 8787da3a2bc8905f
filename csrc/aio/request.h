// One transfer between memory and a file, and its result.
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
#include <vector>

#include "file.h"
#include "queue.h"

namespace infinity::aio {

struct Failure {
    int error;         // errno
    std::string what;  // the failed operation, its offset and its request
    std::string path;  // of the file
    bool checksum;     // the bytes read do not match their checksum
};

// A block whose bytes were wrong at first and right in a second read.
struct Repaired {
    uint64_t offset;  // in the file of `path`
    uint64_t bytes;
    std::string path;
    uint64_t count;  // of such blocks of the request's file so far
};

// Done means that the kernel no longer accesses the buffer: a failed request is done only once all its pieces in flight
// have ended. Thread safe.
class Request {
  public:
    Request(Direction direction, std::shared_ptr<const File> file, uint64_t offset, uint64_t address, uint64_t nbytes);

    const Direction direction;
    const std::shared_ptr<const File> file;
    const uint64_t offset;   // bytes
    const uint64_t address;  // of the caller's buffer, which outlives the request
    const uint64_t nbytes;

    // Called by the I/O threads. Every byte of the request is ended exactly once: transferred, failed, or skipped after
    // a failure.
    void transferred(uint64_t bytes);
    // Records the first failure; ignores later ones.
    void fail(int error, uint64_t at, uint64_t size, const std::string& hint, bool checksum = false);
    void end(uint64_t bytes);
    // Compares the bytes [from, to), which were read, with their checksums. A block that differs is read once more; if
    // it is wrong again, calls fail().
    void verify(uint64_t from, uint64_t to);

    // Returns the address of byte `at` of the file in memory.
    char* memory(uint64_t at) const { return reinterpret_cast<char*>(address + (at - offset)); }
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    bool done() const { return done_.load(std::memory_order_acquire); }
    uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
    // Returns when a request that is done ended.
    std::chrono::steady_clock::time_point ended() const { return ended_; }

    // Waits for at most `timeout`; returns true if the request is done.
    bool wait_for(std::chrono::duration<double> timeout);
    // Returns the failure of a request that is done, if it failed.
    std::optional<Failure> failure() const;
    // Returns the blocks that a second read repaired since the last call.
    std::vector<Repaired> take_repaired();
    const std::chrono::steady_clock::time_point began;  // when it was submitted
    // The process that has the I/O threads; in a forked child a wait would never end.
    const pid_t owner;
    // Returns a text such as "read of 4096 bytes at offset 0".
    static std::string describe(Direction direction, uint64_t nbytes, uint64_t offset);

  private:
    void verify_end();

    std::atomic<uint64_t> unfinished_;
    std::atomic<uint64_t> bytes_done_{0};
    std::atomic<bool> failed_{false};
    std::atomic<bool> done_{false};
    std::chrono::steady_clock::time_point ended_;  // written once, before done_
    mutable std::mutex mutex_;  // guards failure_ and repaired_, and prevents lost wake-ups for done_
    std::condition_variable changed_;
    std::optional<Failure> failure_;
    std::vector<Repaired> repaired_;
};

}  // namespace infinity::aio
