// Checksums of a file's blocks in memory, which detect reads that differ from the last write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace infinity::aio {

// Four interleaved CRC-32C (Castagnoli) over the words of memory, combined by a fifth. Four hide the latency of the
// processor's CRC instruction, so that it runs at the speed of memory. The value is the same on every machine.
uint32_t checksum(const void* memory, size_t bytes);
// The same value without that instruction. For tests.
uint32_t portable_checksum(const void* memory, size_t bytes);
// Returns the implementation on this machine, such as "crc32c instruction (SSE4.2)".
const char* checksum_kind();

// Checksums of a file, 4 bytes of memory per block. A range of the file starts at the start of a block, and ends at the
// end of a block or at the end of the data in it. Thread safe if no two requests overlap.
class Checksums {
  public:
    // `block`: bytes, a multiple of 4096.
    Checksums(uint64_t nbytes, uint64_t block);

    uint64_t block() const { return block_; }
    // Records the blocks that start in [from, to), whose content starts at `memory` for byte `from`. The last block
    // ends at `end` at the latest.
    void record(uint64_t from, uint64_t to, uint64_t end, const char* memory);
    // Returns the first block in [from, to), or ending at `end`, whose bytes differ from the recorded ones. Blocks that
    // were never written are skipped.
    std::optional<uint64_t> find_wrong(uint64_t from, uint64_t to, uint64_t end, const char* memory) const;

  private:
    uint64_t block_;
    std::vector<std::atomic<uint32_t>> sums_;  // 0: never written
};

}  // namespace infinity::aio
