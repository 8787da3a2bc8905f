#include "checksum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace infinity::aio {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78U;  // of CRC-32C, with reversed bits

// Multiplies a polynomial by x. Bits are reversed: the highest one is the coefficient of x^0.
constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ ((value & 1) ? kPolynomial : 0U); }

// The definition of CRC-32C, bit by bit for one byte.
constexpr std::array<uint32_t, 256> byte_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
        table[byte] = crc;
    }
    return table;
}

constexpr std::array<uint32_t, 256> kByte = byte_table();

uint32_t with_table(const void* memory, size_t bytes) {
    uint32_t crc = ~0U;
    for (const auto* at = static_cast<const uint8_t*>(memory); bytes > 0; --bytes, ++at) {
        crc = (crc >> 8) ^ kByte[(crc ^ *at) & 0xFF];
    }
    return ~crc;
}

#if defined(__x86_64__)
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
INFINITY_CRC_TARGET inline uint32_t crc_byte(uint32_t crc, uint8_t value) { return _mm_crc32_u8(crc, value); }
INFINITY_CRC_TARGET inline uint32_t crc_word(uint32_t crc, uint64_t value) {
    return static_cast<uint32_t>(_mm_crc32_u64(crc, value));
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
constexpr const char* kInstruction = "crc32c instruction (SSE4.2)";
#elif defined(__aarch64__)
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
INFINITY_CRC_TARGET inline uint32_t crc_byte(uint32_t crc, uint8_t value) { return __crc32cb(crc, value); }
INFINITY_CRC_TARGET inline uint32_t crc_word(uint32_t crc, uint64_t value) { return __crc32cd(crc, value); }
bool has_instruction() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
constexpr const char* kInstruction = "crc32c instruction (ARMv8)";
#endif

#ifdef INFINITY_CRC_TARGET
uint64_t word_at(const char* memory) {
    uint64_t word = 0;
    std::memcpy(&word, memory, sizeof word);
    return word;
}

// Continues `crc`, which is not inverted, by `bytes` at `at`.
INFINITY_CRC_TARGET uint32_t extend(uint32_t crc, const char* at, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, at += 8) crc = crc_word(crc, word_at(at));
    for (; bytes > 0; --bytes, ++at) crc = crc_byte(crc, static_cast<uint8_t>(*at));
    return crc;
}

// Four lanes are summed at once: the instruction takes a word each cycle, and three cycles for each.
constexpr size_t kLanes = 4, kLane = 1024;

// Multiplies by x^(8 * kLane), which is what kLane zero bytes do to a CRC, by the byte of the factor.
constexpr std::array<std::array<uint32_t, 256>, 4> lane_tables() {
    std::array<std::array<uint32_t, 256>, 4> tables{};
    std::array<uint32_t, 32> bits{};
    for (uint32_t bit = 0; bit < 32; ++bit) {
        uint32_t value = 1U << bit;
        for (size_t byte = 0; byte < kLane; ++byte) value = (value >> 8) ^ kByte[value & 0xFF];
        bits[bit] = value;
    }
    for (uint32_t place = 0; place < 4; ++place) {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            for (uint32_t bit = 0; bit < 8; ++bit) {
                if (byte >> bit & 1) tables[place][byte] ^= bits[8 * place + bit];
            }
        }
    }
    return tables;
}

uint32_t past_lane(uint32_t crc) {
    static constexpr auto kTables = lane_tables();
    return kTables[0][crc & 0xFF] ^ kTables[1][crc >> 8 & 0xFF] ^ kTables[2][crc >> 16 & 0xFF] ^ kTables[3][crc >> 24];
}

INFINITY_CRC_TARGET uint32_t with_instruction(const void* memory, size_t bytes) {
    const char* at = static_cast<const char*>(memory);
    uint32_t crc = ~0U;
    for (; bytes >= kLanes * kLane; bytes -= kLanes * kLane) {
        uint32_t first = crc, second = 0, third = 0, fourth = 0;
        for (size_t from = 0; from < kLane; from += 8) {
            // The lanes are too short for the processor to fetch them ahead by itself.
            if (from % 16 == 0) __builtin_prefetch(at + kLanes * (2 * kLane + from));
            first = crc_word(first, word_at(at + from));
            second = crc_word(second, word_at(at + kLane + from));
            third = crc_word(third, word_at(at + 2 * kLane + from));
            fourth = crc_word(fourth, word_at(at + 3 * kLane + from));
        }
        at += kLanes * kLane;
        crc = past_lane(past_lane(past_lane(first) ^ second) ^ third) ^ fourth;
    }
    return ~extend(crc, at, bytes);
}
#else
bool has_instruction() { return false; }
uint32_t with_instruction(const void* memory, size_t bytes) { return with_table(memory, bytes); }
constexpr const char* kInstruction = "";
#endif

#if defined(__x86_64__)
// Folding (Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009) with four registers
// of four 128-bit parts. A part p is congruent to p.low * x^(n + 32) + p.high * x^(n - 32) that lies n bits further on,
// so that all of the memory shrinks to its last 256 bytes, which the CRC instruction sums.
constexpr size_t kFolded = 256;  // bytes

constexpr uint64_t folding_factor(size_t power) {
    uint32_t value = 1U << 31;
    for (size_t i = 0; i < power; ++i) value = times_x(value);
    return uint64_t{value} << 1;
}

__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) uint32_t with_folding(const void* memory, size_t bytes) {
    if (bytes < 2 * kFolded) return with_instruction(memory, bytes);
    constexpr uint64_t kLow = folding_factor(8 * kFolded + 32), kHigh = folding_factor(8 * kFolded - 32);
    const char* at = static_cast<const char*>(memory);
    const __m512i factors = _mm512_set4_epi64(kHigh, kLow, kHigh, kLow);
    __m512i parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = _mm512_loadu_si512(at + 64 * i);
    parts[0] = _mm512_xor_si512(parts[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)));  // the initial CRC of ~0
    for (at += kFolded, bytes -= kFolded; bytes >= kFolded; at += kFolded, bytes -= kFolded) {
        for (int i = 0; i < 4; ++i) {
            const __m512i low = _mm512_clmulepi64_epi128(parts[i], factors, 0x00);
            const __m512i high = _mm512_clmulepi64_epi128(parts[i], factors, 0x11);
            parts[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + 64 * i), 0x96);
        }
    }
    char folded[kFolded];
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(folded + 64 * i, parts[i]);
    return ~extend(extend(0, folded, kFolded), at, bytes);
}

bool has_folding() {
    return has_instruction() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}
#else
bool has_folding() { return false; }
uint32_t with_folding(const void* memory, size_t bytes) { return with_instruction(memory, bytes); }
#endif

struct Implementation {
    uint32_t (*checksum)(const void* memory, size_t bytes);
    const char* name;
};

const Implementation& best() {
    static const Implementation chosen = has_folding()       ? Implementation{with_folding, "crc32c by VPCLMULQDQ"}
                                         : has_instruction() ? Implementation{with_instruction, kInstruction}
                                                             : Implementation{with_table, "crc32c by table"};
    return chosen;
}

}  // namespace

uint32_t checksum(const void* memory, size_t bytes) { return best().checksum(memory, bytes); }

uint32_t portable_checksum(const void* memory, size_t bytes) { return with_table(memory, bytes); }

uint32_t instruction_checksum(const void* memory, size_t bytes) {
    return has_instruction() ? with_instruction(memory, bytes) : with_table(memory, bytes);
}

const char* checksum_kind() { return best().name; }

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

std::vector<uint32_t> Checksums::values() const {
    std::vector<uint32_t> found(sums_.size());
    for (size_t i = 0; i < found.size(); ++i) found[i] = sums_[i].load(std::memory_order_relaxed);
    return found;
}

void Checksums::restore(const std::vector<uint32_t>& values) {
    if (values.size() != sums_.size()) {
        throw std::invalid_argument("a file of " + std::to_string(sums_.size()) + " blocks cannot have " +
                                    std::to_string(values.size()) + " checksums");
    }
    for (size_t i = 0; i < values.size(); ++i) sums_[i].store(values[i], std::memory_order_relaxed);
}

}  // namespace infinity::aio
