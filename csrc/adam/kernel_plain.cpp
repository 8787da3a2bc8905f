// Plain C++: runs everywhere, and is the oracle of the others. One element at a time; on hardware with a fused
// multiply-add in its base instruction set (Arm) the compiler vectorises it.
#include <cmath>

#include "dispatch.h"
#include "fp16.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

struct Plain {
    static constexpr std::size_t kWidth = 1, kDoubleWidth = 1;
    using Float = float;
    using Int = std::uint32_t;
    using Double = double;

    static Float load(const float* from) { return *from; }
    static void store(float* to, Float x) { *to = x; }
    static Float set(float x) { return x; }
    static Float add(Float a, Float b) { return a + b; }
    static Float sub(Float a, Float b) { return a - b; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float div(Float a, Float b) { return a / b; }
    static Float fma(Float a, Float b, Float c) { return std::fma(a, b, c); }
    static Float sqrt(Float x) { return std::sqrt(x); }
    static Float canonical(Float x) { return x == x ? x : __builtin_bit_cast(float, kCanonicalNan); }

    static Float sign(Float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x + 0.0f; }

    static Int as_int(Float x) { return __builtin_bit_cast(std::uint32_t, x); }
    static Float as_float(Int x) { return __builtin_bit_cast(float, x); }
    static Int set_int(std::uint32_t x) { return x; }
    static Int add_int(Int a, Int b) { return a + b; }
    static Int sub_int(Int a, Int b) { return a - b; }
    static Int mul_int(Int a, Int b) { return a * b; }
    static Int and_int(Int a, Int b) { return a & b; }
    static Int or_int(Int a, Int b) { return a | b; }
    static Int xor_int(Int a, Int b) { return a ^ b; }
    static Int blend(Int a, Int b, Int mask) { return (a & mask) | (b & ~mask); }
    static Int max_int(Int a, Int b) { return a > b ? a : b; }
    template <int bits>
    static Int shift_right(Int x) {
        return x >> bits;
    }
    template <int bits>
    static Int shift_left(Int x) {
        return x << bits;
    }
    static Int iota() { return 0; }
    static std::uint32_t largest(Int x) { return x; }
    static Int load_high_16(const std::uint16_t* from) { return static_cast<Int>(*from) << 16; }
    static Int load_signed_16(const std::int16_t* from) { return static_cast<Int>(static_cast<std::int32_t>(*from)); }
    static void store_low_16(std::uint16_t* to, Int x) { *to = static_cast<std::uint16_t>(x); }

    static Float load_fp16(const std::uint16_t* from) { return from_fp16(*from); }
    static void store_fp16(std::uint16_t* to, Float x) { *to = to_fp16(x); }
    static Int load_8(const std::uint8_t* from) { return *from; }
    static void store_8(std::uint8_t* to, Int x) { *to = static_cast<std::uint8_t>(x); }

    static Double zero_double() { return 0.0; }
    static Double load_double(const float* from) { return *from; }
    static Double load_double_bf16(const std::uint16_t* from) { return as_float(load_high_16(from)); }
    static Double load_double_fp16(const std::uint16_t* from) { return from_fp16(*from); }
    static Double add_square(Double sum, Double x) { return sum + x * x; }
    static void store_double(double* to, Double x) { *to = x; }
};

constexpr Kernels kTable = make_kernels<Plain>();

}  // namespace

const Kernels& kernels_plain() { return kTable; }

}  // namespace infinity::adam
