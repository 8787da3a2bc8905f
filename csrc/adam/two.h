// A pair of an instruction set's vectors, for the update: packing two registers into 16-bit values takes half the
// instructions per element, and constants are loaded half as often.
// Included by kernel.h, whose rules apply.
#pragma once

#include "types.h"

namespace infinity::adam {
namespace {

template <class W>
struct EvenOdd;

template <class W>
struct VectorPair {
    static constexpr std::size_t kWidth = 2 * W::kWidth;
    static constexpr bool kInterleaved = false;
    using Interleaved = EvenOdd<W>;
    struct Float {
        typename W::Float a, b;
    };
    struct Int {
        typename W::Int a, b;
    };
    using Double = typename W::Double;

    static Float load(const float* from) { return {W::load(from), W::load(from + W::kWidth)}; }
    static void store(float* to, Float x) {
        W::store(to, x.a);
        W::store(to + W::kWidth, x.b);
    }
    static void keep(float* to, Float x) {
        W::keep(to, x.a);
        W::keep(to + W::kWidth, x.b);
    }
    static void end_stores() { W::end_stores(); }
    static Float set(float x) { return {W::set(x), W::set(x)}; }
    static Float add(Float x, Float y) { return {W::add(x.a, y.a), W::add(x.b, y.b)}; }
    static Float sub(Float x, Float y) { return {W::sub(x.a, y.a), W::sub(x.b, y.b)}; }
    static Float mul(Float x, Float y) { return {W::mul(x.a, y.a), W::mul(x.b, y.b)}; }
    static Float div(Float x, Float y) { return {W::div(x.a, y.a), W::div(x.b, y.b)}; }
    static Float fma(Float x, Float y, Float z) { return {W::fma(x.a, y.a, z.a), W::fma(x.b, y.b, z.b)}; }
    static Float sqrt(Float x) { return {W::sqrt(x.a), W::sqrt(x.b)}; }
    static Float canonical(Float x) { return {W::canonical(x.a), W::canonical(x.b)}; }
    static bool any_nan(Float x) { return W::any_nan(x.a, x.b); }
    static Float sign(Float x) { return {W::sign(x.a), W::sign(x.b)}; }

    static Int as_int(Float x) { return {W::as_int(x.a), W::as_int(x.b)}; }
    static Float as_float(Int x) { return {W::as_float(x.a), W::as_float(x.b)}; }
    static Int set_int(std::uint32_t x) { return {W::set_int(x), W::set_int(x)}; }
    static Int add_int(Int x, Int y) { return {W::add_int(x.a, y.a), W::add_int(x.b, y.b)}; }
    static Int mul_int(Int x, Int y) { return {W::mul_int(x.a, y.a), W::mul_int(x.b, y.b)}; }
    static Int and_int(Int x, Int y) { return {W::and_int(x.a, y.a), W::and_int(x.b, y.b)}; }
    static Int xor_int(Int x, Int y) { return {W::xor_int(x.a, y.a), W::xor_int(x.b, y.b)}; }
    static Int blend(Int x, Int y, Int mask) { return {W::blend(x.a, y.a, mask.a), W::blend(x.b, y.b, mask.b)}; }
    static Int max_int(Int x, Int y) { return {W::max_int(x.a, y.a), W::max_int(x.b, y.b)}; }
    template <int bits>
    static Int shift_right(Int x) {
        return {W::template shift_right<bits>(x.a), W::template shift_right<bits>(x.b)};
    }
    template <int bits>
    static Int shift_left(Int x) {
        return {W::template shift_left<bits>(x.a), W::template shift_left<bits>(x.b)};
    }
    static Int iota() { return {W::iota(), W::add_int(W::iota(), W::set_int(W::kWidth))}; }
    static std::uint32_t largest(Int x) { return W::largest(W::max_int(x.a, x.b)); }

    static Int load_high_16(const std::uint16_t* from) {
        return {W::load_high_16(from), W::load_high_16(from + W::kWidth)};
    }
    static Int load_signed_16(const std::int16_t* from) {
        return {W::load_signed_16(from), W::load_signed_16(from + W::kWidth)};
    }
    static void store_low_16(std::uint16_t* to, Int x) { W::store_low_16(to, x.a, x.b); }
    static void store_high_16(std::uint16_t* to, Int x) { W::store_high_16(to, x.a, x.b); }
    static Float load_fp16(const std::uint16_t* from) { return {W::load_fp16(from), W::load_fp16(from + W::kWidth)}; }
    static void store_fp16(std::uint16_t* to, Float x) {
        W::store_fp16(to, x.a);
        W::store_fp16(to + W::kWidth, x.b);
    }
    static Int load_8(const std::uint8_t* from) { return {W::load_8(from), W::load_8(from + W::kWidth)}; }
    static Int load_signed_8(const std::uint8_t* from) {
        return {W::load_signed_8(from), W::load_signed_8(from + W::kWidth)};
    }
    static void store_8(std::uint8_t* to, Int x) {
        W::store_8(to, x.a);
        W::store_8(to + W::kWidth, x.b);
    }
};

// A pair of elements 0, 2, 4, ... and elements 1, 3, 5, ..., for updates whose arrays all have 16 bits: a word of
// memory holds an element of each, so that none crosses a lane on its way to memory or back.
template <class W>
struct EvenOdd : VectorPair<W> {
    static constexpr bool kInterleaved = true;
    using typename VectorPair<W>::Int;

    static Int iota() {
        const typename W::Int even = W::template shift_left<1>(W::iota());
        return {even, W::add_int(even, W::set_int(1))};
    }
    static Int load_high_16(const std::uint16_t* from) {
        const typename W::Int words = load_words(from);
        return {W::template shift_left<16>(words), W::and_int(words, W::set_int(0xFFFF0000u))};
    }
    static Int load_signed_16(const std::int16_t* from) {
        const typename W::Int words = load_words(from);
        return {W::shift_right_signed_16(W::template shift_left<16>(words)), W::shift_right_signed_16(words)};
    }
    static void store_low_16(std::uint16_t* to, Int x) {
        store_words(to, W::halves(x.a, W::template shift_left<16>(x.b)));
    }
    static void store_high_16(std::uint16_t* to, Int x) {
        store_words(to, W::halves(W::template shift_right<16>(x.a), x.b));
    }

  private:
    static typename W::Int load_words(const void* from) { return W::as_int(W::load(static_cast<const float*>(from))); }
    static void store_words(void* to, typename W::Int x) { W::store(static_cast<float*>(to), W::as_float(x)); }
};

}  // namespace
}  // namespace infinity::adam
