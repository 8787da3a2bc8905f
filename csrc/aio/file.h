// Open files as the engine sees them: one, or several over which the bytes are striped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checksum.h"

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
//    block through both descriptors. What remains is order in time, and there the kernel keeps the two coherent: a
//    direct read first writes dirty pages of its range back, a direct write drops the pages of its range before and
//    after.
//  - Every buffered write is synchronous (RWF_DSYNC): when it is reported done, its page is clean and on the device,
//    and an error of the device or a full file system is that request's result, not a later writeback's.
//  - Read-ahead is off for `buffered_fd` (POSIX_FADV_RANDOM) when there is a direct one, so that reading an edge never
//    pulls its neighbours, which may be under a direct write, into the page cache.
// Read-modify-write of the edge blocks in direct mode would need a lock per block between requests that share one, and
// would round the length of a file up to whole blocks. `alignment` should not be less than the page size, or blocks
// would share a page.
struct Member {
    int direct_fd;     // -1: everything is buffered
    int buffered_fd;   // both belong to the caller
    std::string path;  // for messages; bytes in the file system's encoding

    int fd(bool direct) const { return direct ? direct_fd : buffered_fd; }
};

// Bytes [c * chunk, (c + 1) * chunk) of a striped file are chunk c / n of member c % n. A file of one member is one
// chunk.
class File {
  public:
    // Throws std::invalid_argument.
    File(int direct_fd, int buffered_fd, std::string path, int64_t alignment);
    File(const std::vector<std::shared_ptr<File>>& files, int64_t chunk);

    struct Place {
        size_t member;
        uint64_t offset;  // in that member
        uint64_t bytes;   // that follow there
    };
    Place locate(uint64_t offset) const;
    // How many of the bytes [0, offset) are the member's.
    uint64_t owned(size_t member, uint64_t offset) const;
    // The first byte at or after `offset` that is the member's.
    uint64_t next_owned(size_t member, uint64_t offset) const;

    const std::vector<Member>& members() const { return members_; }
    uint64_t stripe() const { return chunk_ * members_.size(); }
    bool has_direct() const { return direct_; }
    uint64_t alignment() const { return alignment_; }
    std::string path() const;  // of all members

    // From now on, what is written is recorded and what is read is verified. Before any request.
    void keep_checksums(int64_t nbytes, int64_t block);
    Checksums* checksums() const { return checksums_.get(); }

  private:
    std::vector<Member> members_;
    uint64_t chunk_;
    uint64_t alignment_;
    bool direct_;
    std::unique_ptr<Checksums> checksums_;
};

}  // namespace infinity::aio
