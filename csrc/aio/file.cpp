#include "file.h"

#include <fcntl.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace infinity::aio {
namespace {

constexpr int64_t kLargestChunk = int64_t{1} << 30;  // so that products with blocks and numbers of files fit
constexpr size_t kLongestOrder = 4096;               // chunks
constexpr int64_t kLargestFile = int64_t{1} << 48;   // with checksums; theirs are in memory

}  // namespace

File::File(int direct_fd, int buffered_fd, std::string path, int64_t alignment)
    : members_{Member{direct_fd < 0 ? -1 : direct_fd, buffered_fd, std::move(path)}},
      chunk_(std::numeric_limits<uint64_t>::max()),
      alignment_(static_cast<uint64_t>(alignment)),
      direct_(direct_fd >= 0) {
    if (buffered_fd < 0) {
        throw std::invalid_argument(
            "buffered_fd must be an open descriptor: unaligned edges and short transfers need it");
    }
    if (alignment < 512 || alignment > kLargestChunk || (alignment & (alignment - 1)) != 0) {
        throw std::invalid_argument("alignment is " + std::to_string(alignment) +
                                    "; it must be a power of two of at least 512, and at most 1 GiB");
    }
    // Only advice: a descriptor that rejects it works, too.
    if (has_direct()) (void)posix_fadvise(buffered_fd, 0, 0, POSIX_FADV_RANDOM);
}

File::File(const std::vector<std::shared_ptr<File>>& files, int64_t chunk, const std::vector<int64_t>& order)
    : chunk_(static_cast<uint64_t>(chunk)), alignment_(0), direct_(true) {
    if (files.empty()) throw std::invalid_argument("a striped file needs at least one file");
    for (const auto& file : files) {
        if (!file || file->members_.size() != 1 || file->checksums_) {
            throw std::invalid_argument("a striped file is made of plain files, without checksums of their own");
        }
        members_.push_back(file->members_[0]);
        alignment_ = std::max(alignment_, file->alignment_);
        direct_ = direct_ && file->direct_;
    }
    if (chunk <= 0 || chunk > kLargestChunk || chunk_ % alignment_ != 0) {
        throw std::invalid_argument("chunk is " + std::to_string(chunk) + "; it must be a positive multiple of " +
                                    std::to_string(alignment_) + ", and at most 1 GiB");
    }
    order_.assign(order.begin(), order.end());
    for (size_t member = 0; order.empty() && member < members_.size(); ++member) order_.push_back(member);
    if (order.size() > kLongestOrder) {
        throw std::invalid_argument("order has " + std::to_string(order.size()) + " chunks; it may have " +
                                    std::to_string(kLongestOrder));
    }
    counts_.assign(members_.size(), {0});
    for (const size_t owner : order_) {
        if (owner >= members_.size()) throw std::invalid_argument("order must consist of the numbers of files");
        for (size_t member = 0; member < members_.size(); ++member) {
            counts_[member].push_back(counts_[member].back() + (member == owner ? 1 : 0));
        }
    }
}

uint64_t File::before(size_t member, uint64_t chunk) const {
    const auto& counts = counts_[member];
    return (chunk / order_.size() * counts.back() + counts[chunk % order_.size()]) * chunk_;
}

File::Place File::locate(uint64_t offset) const {
    const uint64_t chunk = offset / chunk_, within = offset % chunk_;
    if (members_.size() == 1) return {0, offset, chunk_ - within};
    const size_t member = order_[chunk % order_.size()];
    return {member, before(member, chunk) + within, chunk_ - within};
}

uint64_t File::owned(size_t member, uint64_t offset) const {
    if (members_.size() == 1) return offset;
    const uint64_t chunk = offset / chunk_;
    const bool inside = order_[chunk % order_.size()] == member;
    return before(member, chunk) + (inside ? offset % chunk_ : 0);
}

uint64_t File::next_owned(size_t member, uint64_t offset) const {
    if (members_.size() == 1) return offset;
    for (uint64_t chunk = offset / chunk_, tries = 0; tries < order_.size(); ++tries) {
        if (order_[(chunk + tries) % order_.size()] == member) return std::max(offset, (chunk + tries) * chunk_);
    }
    return std::numeric_limits<uint64_t>::max();
}

std::string File::path() const {
    std::string all = members_[0].path;
    for (size_t i = 1; i < members_.size(); ++i) all += " + " + members_[i].path;
    return all;
}

void File::keep_checksums(int64_t nbytes, int64_t block) {
    if (nbytes < 0 || nbytes > kLargestFile || block <= 0)
        throw std::invalid_argument("checksums need a size and a block, in bytes");
    if (members_.size() > 1 && chunk_ % static_cast<uint64_t>(block) != 0) {
        throw std::invalid_argument("a checksum's block (" + std::to_string(block) + ") must divide the chunk (" +
                                    std::to_string(chunk_) + ")");
    }
    checksums_ = std::make_unique<Checksums>(static_cast<uint64_t>(nbytes), static_cast<uint64_t>(block));
}

}  // namespace infinity::aio
