// An open file as the engine sees it: two descriptors of one file, which the caller owns.
#pragma once

#include <cstdint>
#include <string>

namespace infinity::aio {

// Which bytes take which descriptor
// ---------------------------------
// Whole blocks (address, offset and length multiples of `alignment`) go through `direct_fd`, opened with O_DIRECT: no
// copy and no page cache. The rest goes through `buffered_fd`: the head and the tail of a request that begin or end
// inside a block, and whole requests whose address and offset differ modulo `alignment`, which O_DIRECT cannot serve
// without a copy.
//
// Both kinds may touch one file, because of three rules:
//  - A block belongs to one request at a time (callers wait before they overlap), and a request never sends the same
//  block
//    through both descriptors. What remains is order in time, and there the kernel keeps the two coherent: a direct
//    read first writes dirty pages of its range back, a direct write drops the pages of its range before and after.
//  - Every buffered write is synchronous (RWF_DSYNC): when it is reported done, its page is clean and on the device,
//  and an error
//    of the device or a full file system is that request's result, not a later writeback's.
//  - Read-ahead is off for `buffered_fd` (POSIX_FADV_RANDOM) when there is a direct one, so that reading an edge never
//  pulls its
//    neighbours, which may be under a direct write, into the page cache.
// Read-modify-write of the edge blocks in direct mode would need a lock per block between requests that share one, and
// would round the length of a file up to whole blocks. `alignment` should not be less than the page size, or blocks
// would share a page.
class File {
  public:
    // `direct_fd` may be -1: everything is buffered then. Throws std::invalid_argument.
    File(int direct_fd, int buffered_fd, std::string path, int64_t alignment);

    int fd(bool direct) const { return direct ? direct_fd_ : buffered_fd_; }
    bool has_direct() const { return direct_fd_ >= 0; }
    uint64_t alignment() const { return alignment_; }
    const std::string& path() const { return path_; }  // for messages; bytes in the file system's encoding

  private:
    int direct_fd_;
    int buffered_fd_;
    std::string path_;
    uint64_t alignment_;
};

}  // namespace infinity::aio
