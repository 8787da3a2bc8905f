// Checksums of a file's blocks in memory, which detect reads that differ from the last write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace infinity::aio {

// CRC-32C (Castagnoli) of memory, as fast as memory is read: by carry-less multiplication of 64-byte registers, or by
// the processor's CRC instruction. The value is the same on every machine.
uint32_t checksum(const void* memory, size_t bytes);
// The same value by a table, and by the CRC instruction if there is one. For tests.
uint32_t portable_checksum(const void* memory, size_t bytes);
uint32_t instruction_checksum(const void* memory, size_t bytes);
// Returns the implementation on this machine, such as "crc32c by VPCLMULQDQ".
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
    // Returns the checksums of all blocks, for `restore` in another process. No request may be under way.
    std::vector<uint32_t> values() const;
    // Sets the checksums of all blocks. Throws std::invalid_argument if their number differs.
    void restore(const std::vector<uint32_t>& values);
    // Counts a block that was wrong when it was read, and right in a second read; returns how many there are so far.
    uint64_t count_repaired() { return repaired_.fetch_add(1, std::memory_order_relaxed) + 1; }
    uint64_t repaired() const { return repaired_.load(std::memory_order_relaxed); }

  private:
    uint64_t block_;
    std::atomic<uint64_t> repaired_{0};
    std::vector<std::atomic<uint32_t>> sums_;  // 0: never written
};

}  // namespace infinity::aio
