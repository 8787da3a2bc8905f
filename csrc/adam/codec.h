// Between fp32 and the formats that take fewer bytes. All of it is integer arithmetic on the bits of fp32 values, so
// that every instruction set gives the same; the processors' own bf16 conversion is not used (it flushes
// subnormals).
//
// 8-bit moments. A block of kBlock values shares a scale byte: the biased exponent of its largest magnitude, at least
// kLeastScale. With delta = 2^(scale - 127 - kOctaves), a magnitude x is kept as x + delta, an fp32 number of which the
// exponent, counted from delta's, and the upper mantissa bits are the code:
//     signed (exp_avg, momentum):  sign bit, 4 bits of exponent, 3 of mantissa
//     root (exp_avg_sq, sum):      4 bits of exponent, 4 of mantissa, of the square root of the value
// So codes are dynamic, 1/8 or 1/16 of an octave wide, down to 2^-14 of the largest, and evenly spaced below that; 0 is
// code 0 and stays 0. What is between two codes goes to either with a probability that makes the mean right. A block
// with a value that is not finite has scale 255 and codes 0, and reads as NaN.
#pragma once

#include "rules.h"
#include "types.h"

namespace infinity::adam {
namespace {

constexpr std::uint32_t kCanonicalNan = 0x7FC00000u;
constexpr std::uint32_t kOctaves = 14;
constexpr std::uint32_t kLeastScale = kOctaves + 2;  // delta stays a normal number
constexpr std::uint32_t kNotFinite = 255;

// bf16 by rounding half away from zero, in integers: the carry goes through the exponent up to infinity. The 16-bit
// difference to the fp32 value then always fits a signed integer, and is its low half.
// bits: canonical fp32 patterns, so that no NaN can round to infinity or wrap round to zero.
template <class V>
INFINITY_FN inline typename V::Int round_to_bf16(typename V::Int bits) {
    return V::template shift_right<16>(V::add_int(bits, V::set_int(0x8000u)));
}

// 32 random bits for element `index` (lowbias32, a mixer by Chris Wellons, found by search for the least bias).
template <class V>
INFINITY_FN inline typename V::Int random_bits(typename V::Int index, typename V::Int key) {
    typename V::Int x = V::xor_int(index, key);
    x = V::xor_int(x, V::template shift_right<16>(x));
    x = V::mul_int(x, V::set_int(0x7FEB352Du));
    x = V::xor_int(x, V::template shift_right<15>(x));
    x = V::mul_int(x, V::set_int(0x846CA68Bu));
    return V::xor_int(x, V::template shift_right<16>(x));
}

// The key of 2^32 elements: a 32-bit digest of all that decides, and the high half of the elements' numbers
// (splitmix64's finaliser).
INFINITY_FN inline std::uint32_t random_key(std::uint64_t key, std::uint64_t index) {
    std::uint64_t x = key ^ ((index >> 32) * 0x9E3779B97F4A7C15u);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return static_cast<std::uint32_t>(x ^ (x >> 31));
}

// Those of an element's random bits that decide how a moment is rounded which gives up `cut` bits: the first moment's
// come from the top, the second's from the bottom.
template <class V, int moment, int cut>
INFINITY_FN inline typename V::Int chance(typename V::Int random) {
    if constexpr (moment == 0) return V::template shift_right<32 - cut>(random);
    return V::and_int(random, V::set_int((1u << cut) - 1u));
}

// bf16 of canonical bits, in the low half.
template <class V, int moment>
INFINITY_FN inline typename V::Int stochastic_bf16(typename V::Int bits, typename V::Int random) {
    return V::template shift_right<16>(V::add_int(bits, chance<V, moment, 16>(random)));
}

// Bits of delta for a block's scale.
INFINITY_FN inline std::uint32_t delta_bits(std::uint32_t scale) { return (scale - kOctaves) << 23; }

// The scale byte for the bits of a block's largest magnitude; a NaN, whatever its sign, is larger than all others.
INFINITY_FN inline std::uint32_t scale_of(std::uint32_t largest) {
    const std::uint32_t exponent = (largest >> 23) & 0xFFu;
    return exponent < kLeastScale ? kLeastScale : exponent;
}

// Codes of one block's scale, for moment number `moment`. With `root` the values are not negative.
template <class V, int moment, bool root>
struct Eight {
    static constexpr int kShift = root ? 19 : 20;
    typename V::Int delta;    // its bits
    typename V::Float start;  // its value; NaN for a block that was not finite, which makes all that is decoded NaN

    INFINITY_FN explicit Eight(std::uint32_t scale)
        : delta(V::set_int(delta_bits(scale))),
          start(V::as_float(V::set_int(scale == kNotFinite ? kCanonicalNan : delta_bits(scale)))) {}

    INFINITY_FN static typename V::Int magnitude(typename V::Float value) {
        if constexpr (root) return V::as_int(value);
        return V::and_int(V::as_int(value), V::set_int(0x7FFFFFFFu));
    }

    // The code, in the low 8 bits of each lane.
    INFINITY_FN typename V::Int encode(typename V::Float value, typename V::Int random) const {
        const typename V::Int shifted = V::as_int(V::add(V::as_float(magnitude(value)), V::as_float(delta)));
        const typename V::Int rounded = V::add_int(shifted, chance<V, moment, kShift>(random));
        const typename V::Int code = V::template shift_right<kShift>(V::sub_int(rounded, delta));
        if constexpr (root) return code;
        return V::blend(V::template shift_right<24>(V::as_int(value)), code, V::set_int(0x80u));
    }

    // `code`: zero-extended.
    INFINITY_FN typename V::Float decode(typename V::Int code) const {
        const typename V::Int octaves = root ? code : V::and_int(code, V::set_int(0x7Fu));
        const typename V::Int shifted = V::add_int(V::template shift_left<kShift>(octaves), delta);
        const typename V::Float size = V::sub(V::as_float(shifted), start);
        if constexpr (root) return size;
        const typename V::Int sign = V::template shift_left<24>(code);
        return V::as_float(V::blend(sign, V::as_int(size), V::set_int(0x80000000u)));
    }
};

}  // namespace
}  // namespace infinity::adam
