// A vector of one element, in plain C++: the reference for other instruction sets, and the code of a GPU thread.
#pragma once

#include <cmath>

#include "codec.h"
#include "fp16.h"
#include "types.h"

namespace infinity::adam {
namespace {

struct Plain {
    static constexpr std::size_t kWidth = 1, kDoubleWidth = 1;
    static constexpr bool kInterleaved = false, kPastCaches = false;
    using Interleaved = Plain;
    using Float = float;
    using Int = std::uint32_t;
    using Double = double;

    INFINITY_FN static Float load(const float* from) { return *from; }
    INFINITY_FN static void store(float* to, Float x) { *to = x; }
    INFINITY_FN static void keep(float* to, Float x) { *to = x; }
    INFINITY_FN static void end_stores() {}
    INFINITY_FN static Float set(float x) { return x; }
    INFINITY_FN static Float add(Float a, Float b) { return a + b; }
    INFINITY_FN static Float sub(Float a, Float b) { return a - b; }
    INFINITY_FN static Float mul(Float a, Float b) { return a * b; }
    // On a GPU, intrinsics make the rounding independent of nvcc's flags. A square is exact in fp64, so a fused
    // addition rounds like a separate one. The conversion to fp16 writes NaN as 0x7FFF, which is replaced by 0x7E00.
#ifdef __CUDA_ARCH__
    INFINITY_FN static Float fma(Float a, Float b, Float c) { return __fmaf_rn(a, b, c); }
    INFINITY_FN static Float div(Float a, Float b) { return __fdiv_rn(a, b); }
    INFINITY_FN static Float sqrt(Float x) { return __fsqrt_rn(x); }
    INFINITY_FN static Double add_square(Double sum, Double x) { return __fma_rn(x, x, sum); }
    INFINITY_FN static Float load_fp16(const std::uint16_t* from) {
        Float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(*from));
        return x;
    }
    INFINITY_FN static void store_fp16(std::uint16_t* to, Float x) {  // x: canonical
        std::uint16_t half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
        *to = x == x ? half : std::uint16_t{0x7E00};
    }
#else
    INFINITY_FN static Float fma(Float a, Float b, Float c) { return std::fma(a, b, c); }
    INFINITY_FN static Float div(Float a, Float b) { return a / b; }
    INFINITY_FN static Float sqrt(Float x) { return std::sqrt(x); }
    INFINITY_FN static Double add_square(Double sum, Double x) { return sum + x * x; }
    INFINITY_FN static Float load_fp16(const std::uint16_t* from) { return from_fp16(*from); }
    INFINITY_FN static void store_fp16(std::uint16_t* to, Float x) { *to = to_fp16(x); }
#endif
    INFINITY_FN static Float canonical(Float x) { return x == x ? x : __builtin_bit_cast(float, kCanonicalNan); }
    static bool any_nan(Float x) { return x != x; }

    INFINITY_FN static Float sign(Float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x + 0.0f; }

    INFINITY_FN static Int as_int(Float x) { return __builtin_bit_cast(std::uint32_t, x); }
    INFINITY_FN static Float as_float(Int x) { return __builtin_bit_cast(float, x); }
    INFINITY_FN static Int set_int(std::uint32_t x) { return x; }
    INFINITY_FN static Int add_int(Int a, Int b) { return a + b; }
    INFINITY_FN static Int mul_int(Int a, Int b) { return a * b; }
    INFINITY_FN static Int and_int(Int a, Int b) { return a & b; }
    INFINITY_FN static Int xor_int(Int a, Int b) { return a ^ b; }
    INFINITY_FN static Int blend(Int a, Int b, Int mask) { return (a & mask) | (b & ~mask); }
    INFINITY_FN static Int max_int(Int a, Int b) { return a > b ? a : b; }
    template <int bits>
    INFINITY_FN static Int shift_right(Int x) {
        return x >> bits;
    }
    template <int bits>
    INFINITY_FN static Int shift_left(Int x) {
        return x << bits;
    }
    INFINITY_FN static Int iota() { return 0; }
    INFINITY_FN static std::uint32_t largest(Int x) { return x; }
    INFINITY_FN static Int load_high_16(const std::uint16_t* from) { return static_cast<Int>(*from) << 16; }
    INFINITY_FN static Int load_signed_16(const std::int16_t* from) {
        return static_cast<Int>(static_cast<std::int32_t>(*from));
    }
    INFINITY_FN static void store_low_16(std::uint16_t* to, Int x) { *to = static_cast<std::uint16_t>(x); }
    INFINITY_FN static void store_high_16(std::uint16_t* to, Int x) { *to = static_cast<std::uint16_t>(x >> 16); }

    INFINITY_FN static Int load_8(const std::uint8_t* from) { return *from; }
    INFINITY_FN static Int load_signed_8(const std::uint8_t* from) {
        return static_cast<Int>(static_cast<std::int32_t>(static_cast<std::int8_t>(*from)));
    }
    INFINITY_FN static void store_8(std::uint8_t* to, Int x) { *to = static_cast<std::uint8_t>(x); }

    INFINITY_FN static Double zero_double() { return 0.0; }
    INFINITY_FN static Double load_double(const float* from) { return *from; }
    INFINITY_FN static Double load_double_bf16(const std::uint16_t* from) { return as_float(load_high_16(from)); }
    INFINITY_FN static Double load_double_fp16(const std::uint16_t* from) { return load_fp16(from); }
    INFINITY_FN static void store_double(double* to, Double x) { *to = x; }
};

}  // namespace
}  // namespace infinity::adam
