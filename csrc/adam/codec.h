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
// code 0 and stays 0. What is between two codes goes to either with a probability that makes the mean right, but
// a root that is not 0 never becomes 0. A block
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
INFINITY_FN inline typename V::Int round_high(typename V::Int bits) {  // in the high half of each lane
    return V::add_int(bits, V::set_int(0x8000u));
}
template <class V>
INFINITY_FN inline typename V::Int round_to_bf16(typename V::Int bits) {  // in the low half, alone
    return V::template shift_right<16>(round_high<V>(bits));
}

// 32 random bits for an element, from its number times kStride plus a key. One round of what hash functions end with
// suffices after that multiplication; its numbers were found by search for the least correlation of neighbours.
constexpr std::uint32_t kStride = 0x85EBCA6Bu;
template <class V>
INFINITY_FN inline typename V::Int random_bits(typename V::Int x) {
    x = V::xor_int(x, V::template shift_right<13>(x));
    x = V::mul_int(x, V::set_int(0x297A2D39u));
    return V::xor_int(x, V::template shift_right<12>(x));
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

// bf16 of canonical bits, in the high half of each lane.
template <class V, int moment>
INFINITY_FN inline typename V::Int stochastic_high(typename V::Int bits, typename V::Int random) {
    return V::add_int(bits, chance<V, moment, 16>(random));
}

// The scale byte for the bits of a block's largest magnitude; a NaN, whatever its sign, is larger than all others.
INFINITY_FN inline std::uint32_t scale_of(std::uint32_t largest) {
    const std::uint32_t exponent = (largest >> 23) & 0xFFu;
    return exponent < kLeastScale ? kLeastScale : exponent;
}

// Codes of one block's scale, for moment number `moment`. With `root` the values are not negative.
//
// Values are multiplied by kBase / delta, which is exact, and kBase stands for delta: its exponent ends in four zeros,
// so that the code is a field of the sum's bits, with nothing to subtract.
template <class V, int moment, bool root>
struct Eight {
    static constexpr int kShift = root ? 19 : 20;
    static constexpr std::uint32_t kCode = (root ? 0xFFu : 0x7Fu) << kShift;
    static constexpr std::uint32_t kBaseExponent = 128;
    static constexpr std::uint32_t kBase = kBaseExponent << 23;  // 2.0
    typename V::Float up, down;                                  // kBase / delta and delta / kBase
    typename V::Float minus_delta;  // NaN for a block that was not finite, which makes all that is decoded NaN

    INFINITY_FN explicit Eight(std::uint32_t scale) : Eight(scale, scale - kOctaves) {}

    INFINITY_FN static typename V::Int magnitude(typename V::Float value) {
        if constexpr (root) return V::as_int(value);
        return V::and_int(V::as_int(value), V::set_int(0x7FFFFFFFu));
    }

    // The code, in the low 8 bits of each lane; those above mean nothing.
    INFINITY_FN typename V::Int encode(typename V::Float value, typename V::Int random) const {
        const typename V::Float base = V::as_float(V::set_int(kBase));
        const typename V::Int sum = V::as_int(V::fma(V::as_float(magnitude(value)), up, base));
        typename V::Int rounded = V::add_int(sum, chance<V, moment, kShift>(random));
        if constexpr (root) {  // to code 1 at least, or 0 of 0: an update divides by a root
            const typename V::Int not_zero = V::add_int(V::as_int(value), V::set_int(0x7FFFFFFFu));
            const typename V::Int one = V::template shift_left<kShift>(V::template shift_right<31>(not_zero));
            rounded = V::max_int(rounded, V::add_int(one, V::set_int(kBase)));
        }
        const typename V::Int code = V::template shift_right<kShift>(rounded);
        if constexpr (root) return code;
        return V::blend(V::template shift_right<24>(V::as_int(value)), code, V::set_int(0x80u));
    }

    // `code`: zero-extended.
    INFINITY_FN typename V::Float decode(typename V::Int code) const {
        if constexpr (root) return decode(code, code);
        return decode(code, V::template shift_left<24>(code));
    }
    // Codes from memory.
    INFINITY_FN typename V::Float load(const std::uint8_t* codes) const {
        if constexpr (root) return decode(V::load_8(codes));
        const typename V::Int code = V::load_signed_8(codes);
        return decode(code, code);
    }

  private:
    // A block that no step has written has scale 0 and codes 0; whose delta wraps round to -2^115, of which they are 0.
    INFINITY_FN Eight(std::uint32_t scale, std::uint32_t delta_exponent)
        : up(power(kBaseExponent + 127 - delta_exponent)),
          down(power(delta_exponent + 127 - kBaseExponent)),
          minus_delta(scale == kNotFinite ? V::as_float(V::set_int(kCanonicalNan))
                                          : V::as_float(V::set_int(0x80000000u ^ (delta_exponent << 23)))) {}
    // 2^(exponent - 127).
    INFINITY_FN static typename V::Float power(std::uint32_t exponent) {
        return V::as_float(V::set_int(exponent << 23));
    }
    // sign: with the codes' signs in its uppermost bits.
    INFINITY_FN typename V::Float decode(typename V::Int code, typename V::Int sign) const {
        const typename V::Int field = V::template shift_left<kShift>(code);
        const typename V::Int sum = V::blend(field, V::set_int(kBase), V::set_int(kCode));
        const typename V::Float size = V::fma(V::as_float(sum), down, minus_delta);
        if constexpr (root) return size;
        return V::as_float(V::blend(sign, V::as_int(size), V::set_int(0x80000000u)));
    }
};

}  // namespace
}  // namespace infinity::adam
