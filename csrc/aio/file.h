// Open files of the engine: one, or several over which the bytes are striped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checksum.h"

namespace infinity::aio {

// Choice of the descriptor
// ------------------------
// Aligned blocks (address, offset and length multiples of `alignment`) use `direct_fd`, opened with O_DIRECT: no copy
// and no page cache. Other bytes use `buffered_fd`: the head and the tail of a request that start or end inside a
// block, and whole requests whose address and offset differ modulo `alignment`, which O_DIRECT supports only with a
// copy.
//
// Three rules make it safe to use both descriptors of one file:
//  - A block belongs to one request at a time (callers wait before they overlap), and a request never uses both
//    descriptors for one block. Accesses to a block are therefore ordered, and the kernel keeps ordered accesses
//    coherent: a direct read first writes dirty pages of its range back, and a direct write drops the pages of its
//    range before and after.
//  - Every buffered write is synchronous (RWF_DSYNC): when it completes, its page is clean and on the device. A device
//    error or a full file system is therefore reported by that request, not by a later writeback.
//  - Read-ahead is disabled on `buffered_fd` (POSIX_FADV_RANDOM) if there is a direct descriptor, so that reading an
//    edge never loads neighbouring blocks, which may be under a direct write, into the page cache.
// Read-modify-write of the edge blocks in direct mode would need a lock per block between requests that share one, and
// would round the length of a file up to whole blocks. `alignment` should be at least the page size; otherwise blocks
// share a page.
struct Member {
    int direct_fd;     // -1: all I/O is buffered
    int buffered_fd;   // the caller owns both
    std::string path;  // for messages; bytes in the file system's encoding

    int fd(bool direct) const { return direct ? direct_fd : buffered_fd; }
};

// A stripe of a striped file has one chunk for each entry of `order`, the number of the member that holds it. A member
// holds its chunks in their order, without gaps; one that is not in `order` holds none. A file of one member is one
// chunk.
class File {
  public:
    // Throws std::invalid_argument.
    File(int direct_fd, int buffered_fd, std::string path, int64_t alignment);
    // order: empty: all members in turn.
    File(const std::vector<std::shared_ptr<File>>& files, int64_t chunk, const std::vector<int64_t>& order);

    struct Place {
        size_t member;
        uint64_t offset;  // in that member
        uint64_t bytes;   // contiguous bytes from there
    };
    Place locate(uint64_t offset) const;
    // Returns how many of the bytes [0, offset) are in the member.
    uint64_t owned(size_t member, uint64_t offset) const;
    // Returns the first byte at or after `offset` that is in the member; the largest number if there is none.
    uint64_t next_owned(size_t member, uint64_t offset) const;

    const std::vector<Member>& members() const { return members_; }
    uint64_t stripe() const { return chunk_ * order_.size(); }
    bool has_direct() const { return direct_; }
    uint64_t alignment() const { return alignment_; }
    std::string path() const;  // of all members

    // Records a checksum in every write and verifies it in every read. Call it before any request.
    void keep_checksums(int64_t nbytes, int64_t block);
    Checksums* checksums() const { return checksums_.get(); }

  private:
    // Returns the bytes of the member in whole chunks before chunk number `chunk`.
    uint64_t before(size_t member, uint64_t chunk) const;

    std::vector<Member> members_;
    uint64_t chunk_;
    std::vector<size_t> order_{0};
    std::vector<std::vector<uint64_t>> counts_;  // member, i → its chunks among the first i of a stripe
    uint64_t alignment_;
    bool direct_;
    std::unique_ptr<Checksums> checksums_;
};

}  // namespace infinity::aio
