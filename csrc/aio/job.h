// Splits a request into pieces, one kernel operation each.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "request.h"

namespace infinity::aio {

constexpr uint64_t round_down(uint64_t value, uint64_t multiple) { return value / multiple * multiple; }
constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return round_down(value + multiple - 1, multiple); }

struct Piece {
    uint64_t first = 0;   // its first byte in the file
    uint64_t offset = 0;  // its first byte in the file that is not transferred yet
    uint64_t left = 0;    // bytes not transferred yet
    bool direct = false;
    unsigned retries = 0;  // consecutive retries without progress

    void advance(uint64_t bytes) {
        offset += bytes;
        left -= bytes;
        retries = 0;
    }
};

// The part of the bytes [begin, end) of a request that is in one member of its file. One thread splits it into pieces.
// Aligned blocks come first, so that they are in flight when the buffered edges, which may block, are submitted.
class Job {
  public:
    Job(std::shared_ptr<Request> request, size_t member, uint64_t begin, uint64_t end, uint64_t block_size)
        : request_(std::move(request)), member_(member), block_size_(block_size) {
        const File& file = *request_->file;
        const uint64_t alignment = file.alignment();
        if (!file.has_direct() || (request_->address - request_->offset) % alignment != 0) {
            parts_ = {Part{begin, begin, true}, Part{begin, end, false}, Part{end, end, false}};
        } else {
            const uint64_t head = std::min(end, round_up(begin, alignment));
            const uint64_t tail = std::max(head, round_down(end, alignment));
            parts_ = {Part{head, tail, true}, Part{begin, head, false}, Part{tail, end, false}};
        }
        for (Part& part : parts_) skip(part);
    }

    const std::shared_ptr<Request>& request() const { return request_; }

    uint64_t remaining() const {
        const File& file = *request_->file;
        uint64_t bytes = 0;
        for (const Part& part : parts_) bytes += file.owned(member_, part.end) - file.owned(member_, part.begin);
        return bytes;
    }

    // Returns the next piece. Requires remaining() > 0.
    Piece next() {
        Part& part = *std::find_if(parts_.begin(), parts_.end(), [](const Part& p) { return p.begin < p.end; });
        const uint64_t begin = part.begin;
        const uint64_t bytes = std::min({block_size_, part.end - begin, request_->file->locate(begin).bytes});
        part.begin += bytes;
        skip(part);
        return Piece{begin, begin, bytes, part.direct};
    }

  private:
    struct Part {
        uint64_t begin = 0, end = 0;
        bool direct = false;
    };

    // Advances to the next byte in the member, or to the end.
    void skip(Part& part) const {
        if (part.begin < part.end) part.begin = std::min(part.end, request_->file->next_owned(member_, part.begin));
    }

    std::shared_ptr<Request> request_;
    size_t member_;
    uint64_t block_size_;  // a multiple of the file's alignment
    std::array<Part, 3> parts_;
};

}  // namespace infinity::aio
