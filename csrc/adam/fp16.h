// Conversions of IEEE binary16 in integer arithmetic, bit-identical to the processors' instructions.
#pragma once

#include <cstdint>

#include "types.h"

namespace infinity::adam {
namespace {

INFINITY_FN inline float from_fp16(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    std::uint32_t exponent = (half >> 10) & 0x1Fu, mantissa = half & 0x3FFu;
    if (exponent == 0x1Fu) {  // infinity, or a NaN, which is made quiet
        const std::uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
        return __builtin_bit_cast(float, sign | 0x7F800000u | quiet | (mantissa << 13));
    }
    if (exponent == 0) {
        if (mantissa == 0) return __builtin_bit_cast(float, sign);
        for (exponent = 1; (mantissa & 0x400u) == 0; --exponent) mantissa <<= 1;  // wraps below 0, and back
        mantissa &= 0x3FFu;
    }
    return __builtin_bit_cast(float, sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Rounds to nearest, ties to even.
INFINITY_FN inline std::uint16_t to_fp16(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // 65520 and above
    std::uint32_t kept = magnitude - (112u << 23);
    std::uint32_t cut = 13;
    if (magnitude < 0x38800000u) {  // below 2^-14: in steps of 2^-24
        const std::uint32_t exponent = magnitude >> 23;
        if (exponent < 102) return static_cast<std::uint16_t>(sign);  // below 2^-25
        kept = (magnitude & 0x007FFFFFu) | 0x00800000u;
        cut = 126 - exponent;
    }
    const std::uint32_t odd = (kept >> cut) & 1u;
    const std::uint32_t rounded = (kept + (1u << (cut - 1)) - 1u + odd) >> cut;
    return static_cast<std::uint16_t>(sign | rounded);
}

}  // namespace
}  // namespace infinity::adam
