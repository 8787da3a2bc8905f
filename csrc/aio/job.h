// How a request becomes pieces: one call of the kernel each.
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
    uint64_t offset = 0;   // bytes into the file
    uint64_t address = 0;  // of its first byte in memory
    uint64_t left = 0;     // bytes still to move
    bool direct = false;
    unsigned retries = 0;  // in a row, without progress

    void advance(uint64_t bytes) {
        offset += bytes;
        address += bytes;
        left -= bytes;
        retries = 0;
    }
};

// The bytes [begin, end) of a request's file, given to one thread, which cuts them into pieces one by one. Whole blocks
// come first, so that they are in flight when the buffered edges, which block, are served.
class Job {
  public:
    Job(std::shared_ptr<Request> request, uint64_t begin, uint64_t end, uint64_t block_size)
        : request_(std::move(request)), block_size_(block_size) {
        const File& file = *request_->file;
        const uint64_t alignment = file.alignment();
        if (!file.has_direct() || (request_->address - request_->offset) % alignment != 0) {
            parts_ = {Part{begin, begin, true}, Part{begin, end, false}, Part{end, end, false}};
            return;
        }
        const uint64_t head = std::min(end, round_up(begin, alignment));
        const uint64_t tail = std::max(head, round_down(end, alignment));
        parts_ = {Part{head, tail, true}, Part{begin, head, false}, Part{tail, end, false}};
    }

    const std::shared_ptr<Request>& request() const { return request_; }

    uint64_t remaining() const {
        uint64_t bytes = 0;
        for (const Part& part : parts_) bytes += part.end - part.begin;
        return bytes;
    }

    // The next piece; only while something remains.
    Piece next() {
        Part& part = *std::find_if(parts_.begin(), parts_.end(), [](const Part& p) { return p.begin < p.end; });
        const uint64_t begin = part.begin;
        part.begin = std::min(part.end, begin + block_size_);
        return Piece{begin, request_->address + (begin - request_->offset), part.begin - begin, part.direct};
    }

  private:
    struct Part {
        uint64_t begin = 0, end = 0;
        bool direct = false;
    };

    std::shared_ptr<Request> request_;
    uint64_t block_size_;  // a multiple of the file's alignment
    std::array<Part, 3> parts_;
};

}  // namespace infinity::aio
