// Frozen parameters in 8 or 4 bits: groups of kGroup elements share a scale, their largest magnitude, which is stored
// exactly in the dtype of the parameters. A code is the nearest of a table's levels to value / scale:
//     eight: c / 127 for c from -127 to 127, a signed byte; ties to the even code
//     nf4:   the 16 levels of NormalFloat 4 (Dettmers et al. 2023, QLoRA); ties to the lower level
// A value decodes to level * scale in fp32, rounded to nearest with ties to even. 1, the scale's level, gives the scale
// back, so the values of a decoded array encode to an array that decodes to the same values.
//
// A record holds the codes of kRecord elements, then their scales. Codes of nf4 fill a byte with those of two elements
// of a group: element i in the low half, element i + 32 in the high one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fp16.h"
#include "types.h"

namespace infinity::adam {

enum class Code : std::uint8_t { kEight = 0, kNf4 = 1 };

inline constexpr std::size_t kGroup = 64, kRecord = 2048, kGroups = kRecord / kGroup;

namespace {  // of each translation unit, since the linker would choose one instruction set for all

INFINITY_FN constexpr std::size_t width_of(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }
INFINITY_FN constexpr std::size_t code_bytes(Code code) { return code == Code::kEight ? kRecord : kRecord / 2; }
INFINITY_FN constexpr std::size_t record_bytes(Code code, DType dtype) {
    return code_bytes(code) + kGroups * width_of(dtype);
}
constexpr std::size_t kMostRecordBytes = record_bytes(Code::kEight, DType::kFp32);

constexpr float kEightStep = 1.0f / 127.0f;  // 127 * kEightStep is 1 in fp32

INFINITY_FN inline float nf4_level(unsigned code) {
    constexpr float kLevels[16] = {-1.0f,
                                   -0.6961928009986877f,
                                   -0.5250730514526367f,
                                   -0.39491748809814453f,
                                   -0.28444138169288635f,
                                   -0.18477343022823334f,
                                   -0.09105003625154495f,
                                   0.0f,
                                   0.07958029955625534f,
                                   0.16093020141124725f,
                                   0.24611230194568634f,
                                   0.33791524171829224f,
                                   0.44070982933044434f,
                                   0.5626170039176941f,
                                   0.7229568362236023f,
                                   1.0f};
    return kLevels[code];
}

// Rounds a finite value to bf16, to nearest with ties to even.
INFINITY_FN inline std::uint16_t to_bf16(float x) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
    return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

INFINITY_FN inline float from_bf16(std::uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

// Returns how many records from number i on can be decoded at once, in any order, if the records end where the target
// ends: those whose elements end where record i begins, at least one. Until then every write was below record i.
constexpr std::size_t records_at_once(std::size_t i, std::size_t count, std::size_t record, std::size_t decoded) {
    // Record j begins (count - j) * record bytes before the end, and its elements (count - j) * decoded bytes.
    const std::size_t room = (count - i) * (decoded - record) / decoded;
    return room > 0 ? room : 1;
}

}  // namespace

// Decodes a record to kRecord elements elsewhere.
using DecodeFn = void (*)(const std::uint8_t* record, void* to);
// Encodes kRecord elements. Returns false for a value that is not finite.
using EncodeFn = bool (*)(const void* from, std::uint8_t* record);

// The functions of one instruction set, by code and dtype.
struct FrozenKernels {
    DecodeFn decode[2][kDTypes];
    EncodeFn encode[2][kDTypes];
};

const FrozenKernels& frozen_plain();
const FrozenKernels& frozen_avx2();    // only in builds for x86-64
const FrozenKernels& frozen_avx512();  // likewise

// Encodes n elements, a multiple of kRecord. Returns the number of the first value that is not finite; n without one.
std::size_t encode(const FrozenKernels& kernels, Code code, DType dtype, const void* from, std::uint8_t* records,
                   std::size_t n, int threads);

// Decodes n elements, a multiple of kRecord, and returns their fingerprint (adam.h). Records overlap the target
// nowhere, or end where it ends. hash: of the same instruction set.
std::uint64_t decode(const FrozenKernels& kernels, FingerprintFn hash, Code code, DType dtype,
                     const std::uint8_t* records, void* to, std::size_t n, int threads);

}  // namespace infinity::adam
