// Checksums of a file's blocks, kept in memory: what is read is what was written, or it is an error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace infinity::aio {

// Four CRC-32C (Castagnoli) over the words of memory by turns, and one over the four, spread: as many as the
// processor's CRC instruction needs to be busy, so that it runs at the speed of memory. Every machine gives the same
// value.
uint32_t checksum(const void* memory, size_t bytes);
// The same, without that instruction. For tests.
uint32_t portable_checksum(const void* memory, size_t bytes);
// "crc32c instruction (SSE4.2)", or what else does it here.
const char* checksum_kind();

// 4 bytes of memory for each block. A range of a file starts at the start of a block, and ends at the end of one or at
// the end of everything in that block. Thread safe, as long as no two requests overlap.
class Checksums {
  public:
    // `block`: bytes, a multiple of 4096.
    Checksums(uint64_t nbytes, uint64_t block);

    uint64_t block() const { return block_; }
    // Blocks that begin in [from, to) were given the bytes at `memory`, which is where `from` goes; the last one ends
    // at `end` at the latest.
    void record(uint64_t from, uint64_t to, uint64_t end, const char* memory);
    // The first of the blocks that lie in [from, to), or end at `end`, whose bytes are not those that were recorded.
    // Blocks that were never written are right whatever they hold.
    std::optional<uint64_t> find_wrong(uint64_t from, uint64_t to, uint64_t end, const char* memory) const;

  private:
    uint64_t block_;
    std::vector<std::atomic<uint32_t>> sums_;  // 0: not known
};

}  // namespace infinity::aio
