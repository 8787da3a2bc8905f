#include "checksum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace infinity::aio {
namespace {

// The definition of CRC-32C, bit by bit for one byte, with reversed bits.
constexpr std::array<uint32_t, 256> byte_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78U : 0U);
        table[byte] = crc;
    }
    return table;
}

// Lanes are multiplied by an odd factor (2^64 / golden ratio) before they are combined. Otherwise a changed bit in one
// lane and a changed bit in the next lane, one row later, would cancel out, since both have the same position in a CRC.
constexpr uint64_t kSpread = 0x9E3779B97F4A7C15U;

uint64_t word_at(const char* memory) {
    uint64_t word = 0;
    std::memcpy(&word, memory, sizeof word);
    return word;
}

struct Portable {
    static uint32_t byte(uint32_t crc, uint8_t value) {
        static constexpr std::array<uint32_t, 256> kTable = byte_table();
        return (crc >> 8) ^ kTable[(crc ^ value) & 0xFF];
    }
    static uint32_t word(uint32_t crc, uint64_t value) {
        for (int i = 0; i < 8; ++i) crc = byte(crc, static_cast<uint8_t>(value >> (8 * i)));
        return crc;
    }
};

#if defined(__x86_64__)
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
struct Instruction {
    INFINITY_CRC_TARGET static uint32_t byte(uint32_t crc, uint8_t value) { return _mm_crc32_u8(crc, value); }
    INFINITY_CRC_TARGET static uint32_t word(uint32_t crc, uint64_t value) {
        return static_cast<uint32_t>(_mm_crc32_u64(crc, value));
    }
    static bool available() { return __builtin_cpu_supports("sse4.2"); }
    static constexpr const char* kName = "crc32c instruction (SSE4.2)";
};
#elif defined(__aarch64__)
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
struct Instruction {
    INFINITY_CRC_TARGET static uint32_t byte(uint32_t crc, uint8_t value) { return __crc32cb(crc, value); }
    INFINITY_CRC_TARGET static uint32_t word(uint32_t crc, uint64_t value) { return __crc32cd(crc, value); }
    static bool available() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
    static constexpr const char* kName = "crc32c instruction (ARMv8)";
};
#else
#define INFINITY_CRC_TARGET
struct Instruction : Portable {
    static bool available() { return false; }
    static constexpr const char* kName = "";
};
#endif

// Compiled once per implementation: `Crc` must be inlined, which requires the target of its instruction.
#define INFINITY_CHECKSUM(NAME, CRC, TARGET)                                               \
    TARGET uint32_t NAME(const void* memory, size_t bytes) {                               \
        const char* at = static_cast<const char*>(memory);                                 \
        uint32_t lane[4] = {~0U, ~1U, ~2U, ~3U};                                           \
        for (; bytes >= 32; bytes -= 32, at += 32) {                                       \
            for (int i = 0; i < 4; ++i) lane[i] = CRC::word(lane[i], word_at(at + 8 * i)); \
        }                                                                                  \
        uint32_t crc = ~0U;                                                                \
        for (int i = 0; i < 4; ++i) crc = CRC::word(crc, lane[i] * kSpread);               \
        for (; bytes > 0; --bytes, ++at) crc = CRC::byte(crc, static_cast<uint8_t>(*at));  \
        return ~crc;                                                                       \
    }

#define INFINITY_NO_TARGET
INFINITY_CHECKSUM(with_table, Portable, INFINITY_NO_TARGET)
INFINITY_CHECKSUM(with_instruction, Instruction, INFINITY_CRC_TARGET)

bool has_instruction() {
    static const bool has = Instruction::available();
    return has;
}

}  // namespace

uint32_t checksum(const void* memory, size_t bytes) {
    return has_instruction() ? with_instruction(memory, bytes) : with_table(memory, bytes);
}

uint32_t portable_checksum(const void* memory, size_t bytes) { return with_table(memory, bytes); }

const char* checksum_kind() { return has_instruction() ? Instruction::kName : "crc32c by table"; }

Checksums::Checksums(uint64_t nbytes, uint64_t block) : block_(block) {
    if (block == 0 || block % 4096 != 0) {
        throw std::invalid_argument("a checksum's block is " + std::to_string(block) +
                                    " bytes; it must be a multiple of 4096");
    }
    sums_ = std::vector<std::atomic<uint32_t>>((nbytes + block - 1) / block);
}

namespace {
uint32_t known(uint32_t sum) { return sum == 0 ? 1 : sum; }
}  // namespace

void Checksums::record(uint64_t from, uint64_t to, uint64_t end, const char* memory) {
    for (uint64_t at = (from + block_ - 1) / block_ * block_; at < to && at / block_ < sums_.size(); at += block_) {
        const uint64_t bytes = std::min(block_, end - at);
        sums_[at / block_].store(known(checksum(memory + (at - from), bytes)), std::memory_order_relaxed);
    }
}

std::optional<uint64_t> Checksums::find_wrong(uint64_t from, uint64_t to, uint64_t end, const char* memory) const {
    for (uint64_t at = (from + block_ - 1) / block_ * block_; at < to && at / block_ < sums_.size(); at += block_) {
        const uint64_t bytes = std::min(block_, end - at);
        if (at + bytes > to) break;
        const uint32_t expected = sums_[at / block_].load(std::memory_order_relaxed);
        if (expected != 0 && expected != known(checksum(memory + (at - from), bytes))) return at;
    }
    return std::nullopt;
}

}  // namespace infinity::aio
