#include "second_read.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>

namespace infinity::aio {
namespace {

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

// Reads up to `bytes`, until the end of the file. Returns how many were read, or a negative errno.
int64_t read_all(int fd, char* memory, uint64_t bytes, uint64_t offset) {
    uint64_t done = 0;
    while (done < bytes) {
        const ssize_t count = pread(fd, memory + done, bytes - done, static_cast<off_t>(offset + done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return done > 0 ? static_cast<int64_t>(done) : -errno;
        if (count == 0) break;
        done += static_cast<uint64_t>(count);
    }
    return static_cast<int64_t>(done);
}

}  // namespace

SecondRead read_again(const File& file, uint64_t at, uint64_t bytes, char* memory) {
    const File::Place place = file.locate(at);
    const Member& member = file.members()[place.member];
    const uint64_t whole = (bytes + file.alignment() - 1) / file.alignment() * file.alignment();
    const std::unique_ptr<char, Free> again(static_cast<char*>(std::aligned_alloc(file.alignment(), whole)));
    if (!again) return {false, "there is no memory for a second read"};
    // Buffered writes are synchronous, so their pages are clean and can be dropped.
    if (!file.has_direct()) {
        (void)posix_fadvise(member.buffered_fd, static_cast<off_t>(place.offset), static_cast<off_t>(whole),
                            POSIX_FADV_DONTNEED);
    }
    const int64_t count = read_all(member.fd(file.has_direct()), again.get(), whole, place.offset);
    if (count < 0) {
        return {false, "a second read failed: " + std::generic_category().message(static_cast<int>(-count))};
    }
    if (static_cast<uint64_t>(count) < bytes) return {false, "a second read found that the file ends before them"};
    if (std::memcmp(memory, again.get(), bytes) == 0) {
        return {false, "a second read returned the same bytes: a bad block, or a write that was lost or overwritten"};
    }
    std::memcpy(memory, again.get(), bytes);
    // Verified where they are used, so that memory that does not keep them is found, too.
    if (!file.checksums()->find_wrong(at, at + bytes, at + bytes, memory)) return {true, ""};
    return {false, "a second read returned other bytes, wrong too: a bad cable, controller or memory"};
}

}  // namespace infinity::aio
