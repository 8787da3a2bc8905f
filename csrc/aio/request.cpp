#include "request.h"

#include <string.h>

#include <system_error>
#include <utility>

namespace infinity::aio {

Request::Request(Direction direction, std::shared_ptr<const File> file, uint64_t offset, uint64_t address,
                 uint64_t nbytes)
    : direction(direction),
      file(std::move(file)),
      offset(offset),
      address(address),
      nbytes(nbytes),
      unfinished_(nbytes),
      done_(nbytes == 0) {}

std::string Request::describe(Direction direction, uint64_t nbytes, uint64_t offset) {
    return std::string(direction == Direction::kRead ? "read" : "write") + " of " + std::to_string(nbytes) +
           " bytes at offset " + std::to_string(offset);
}

void Request::transferred(uint64_t bytes) {
    bytes_done_.fetch_add(bytes, std::memory_order_relaxed);
    end(bytes);
}

void Request::fail(int error, uint64_t at, uint64_t size, const std::string& hint) {
    std::string what = std::generic_category().message(error) + ": " + describe(direction, size, at);
    if (size != nbytes || at != offset) what += ", part of a " + describe(direction, nbytes, offset);
    if (!hint.empty()) what += "; " + hint;
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = Failure{error, std::move(what)};
    failed_.store(true, std::memory_order_release);
}

void Request::end(uint64_t bytes) {
    if (unfinished_.fetch_sub(bytes, std::memory_order_acq_rel) != bytes) return;
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
}

bool Request::wait_for(std::chrono::duration<double> timeout) {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return done(); });
}

std::optional<Failure> Request::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

}  // namespace infinity::aio
