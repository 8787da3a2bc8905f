#include "request.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "second_read.h"

namespace infinity::aio {

Request::Request(Direction direction, std::shared_ptr<const File> file, uint64_t offset, uint64_t address,
                 uint64_t nbytes)
    : direction(direction),
      file(std::move(file)),
      offset(offset),
      address(address),
      nbytes(nbytes),
      began(std::chrono::steady_clock::now()),
      owner(getpid()),
      unfinished_(nbytes),
      done_(nbytes == 0),
      ended_(began) {}

std::string Request::describe(Direction direction, uint64_t nbytes, uint64_t offset) {
    return std::string(direction == Direction::kRead ? "read" : "write") + " of " + std::to_string(nbytes) +
           " bytes at offset " + std::to_string(offset);
}

void Request::transferred(uint64_t bytes) {
    bytes_done_.fetch_add(bytes, std::memory_order_relaxed);
    end(bytes);
}

void Request::fail(int error, uint64_t at, uint64_t size, const std::string& hint, bool checksum) {
    const File::Place place = file->locate(at);
    const bool striped = file->members().size() > 1;
    std::string what = std::generic_category().message(error) + ": " + describe(direction, size, place.offset);
    if (size != nbytes || at != offset || striped) what += ", part of a " + describe(direction, nbytes, offset);
    if (striped) what += " of " + file->path();
    if (!hint.empty()) what += "; " + hint;
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = Failure{error, std::move(what), file->members()[place.member].path, checksum};
    failed_.store(true, std::memory_order_release);
}

void Request::end(uint64_t bytes) {
    if (unfinished_.fetch_sub(bytes, std::memory_order_acq_rel) != bytes) return;
    verify_end();
    ended_ = std::chrono::steady_clock::now();
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
}

void Request::verify(uint64_t from, uint64_t to) {
    Checksums* sums = file->checksums();
    if (!sums || direction != Direction::kRead || failed()) return;
    const uint64_t end = offset + nbytes;
    while (const auto wrong = sums->find_wrong(from, to, end, memory(from))) {
        const uint64_t bytes = std::min(sums->block(), end - *wrong);
        const SecondRead second = read_again(*file, *wrong, bytes, memory(*wrong));
        if (!second.right) {
            fail(EBADMSG, *wrong, bytes,
                 "their checksum shows that these bytes are not those that were written there; " + second.diagnosis,
                 /*checksum=*/true);
            return;
        }
        const uint64_t count = sums->count_repaired();
        const File::Place place = file->locate(*wrong);
        const std::lock_guard lock(mutex_);
        repaired_.push_back(Repaired{place.offset, bytes, file->members()[place.member].path, count});
        from = *wrong + bytes;
    }
}

// A partial last block may arrive in two pieces, a direct and a buffered one, so it is verified at the end.
void Request::verify_end() {
    const Checksums* sums = file->checksums();
    const uint64_t end = offset + nbytes;
    if (sums && end % sums->block() != 0) verify(std::max(offset, end / sums->block() * sums->block()), end);
}

bool Request::wait_for(std::chrono::duration<double> timeout) {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return done(); });
}

std::vector<Repaired> Request::take_repaired() {
    const std::lock_guard lock(mutex_);
    return std::exchange(repaired_, {});
}

std::optional<Failure> Request::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

}  // namespace infinity::aio
