// Conversions between fp32 and smaller formats. They use integer arithmetic on the bits of fp32 values, so that results
// are the same on every instruction set. The processors' bf16 conversion is not used, since it flushes subnormals.
//
// 8-bit moments. A block of kBlock values shares a scale byte: the biased exponent of its largest magnitude, at least
// kLeastScale. With delta = 2^(scale - 127 - kOctaves), the code of a magnitude x is taken from the fp32 number
// x + delta: its exponent, relative to delta's, and its upper mantissa bits:
//     signed (exp_avg, momentum):  sign bit, 4 bits of exponent, 3 of mantissa
//     root (exp_avg_sq, sum):      4 bits of exponent, 4 of mantissa, of the square root of the value
// Steps are 1/8 or 1/16 of an octave, down to 2^-14 of the largest value, and uniform below. 0 has code 0, exactly.
// Values between two codes are rounded stochastically, without bias, except that a non-zero root never becomes 0. A
// block with a non-finite value has scale 255 and codes 0, and decodes to NaN.
#pragma once

#include "rules.h"
#include "types.h"

namespace infinity::adam {
namespace {

constexpr std::uint32_t kCanonicalNan = 0x7FC00000u;
constexpr std::uint32_t kOctaves = 14;
constexpr std::uint32_t kLeastScale = kOctaves + 2;  // delta stays a normal number
constexpr std::uint32_t kNotFinite = 255;

// Rounds to bf16, half away from zero, in integers: the carry propagates through the exponent up to infinity. The
// difference to the fp32 value then always fits in a signed 16-bit integer, and is its low half.
// bits: canonical fp32 patterns, since other NaNs could round to infinity or wrap around to zero.
template <class V>
INFINITY_FN inline typename V::Int round_high(typename V::Int bits) {  // in the high half of each lane
    return V::add_int(bits, V::set_int(0x8000u));
}
template <class V>
INFINITY_FN inline typename V::Int round_to_bf16(typename V::Int bits) {  // in the low half, alone
    return V::template shift_right<16>(round_high<V>(bits));
}

// Returns 32 random bits for an element, from its number times kStride plus a key. After that multiplication, one round
// of a hash finaliser suffices; its constants were found by a search for the least correlation of neighbours.
constexpr std::uint32_t kStride = 0x85EBCA6Bu;
template <class V>
INFINITY_FN inline typename V::Int random_bits(typename V::Int x) {
    x = V::xor_int(x, V::template shift_right<13>(x));
    x = V::mul_int(x, V::set_int(0x297A2D39u));
    return V::xor_int(x, V::template shift_right<12>(x));
}

// Returns the 32-bit key of 2^32 elements: splitmix64's finaliser over the key and the high half of the elements'
// numbers.
INFINITY_FN inline std::uint32_t random_key(std::uint64_t key, std::uint64_t index) {
    std::uint64_t x = key ^ ((index >> 32) * 0x9E3779B97F4A7C15u);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return static_cast<std::uint32_t>(x ^ (x >> 31));
}

// Returns the random bits that round a moment from which `cut` bits are removed: the first moment uses the element's
// top bits, the second the bottom bits. The third uses the top bits of a product, which are uniform whatever the top or
// the bottom bits are.
template <class V, int moment, int cut>
INFINITY_FN inline typename V::Int chance(typename V::Int random) {
    if constexpr (moment == 1) return V::and_int(random, V::set_int((1u << cut) - 1u));
    if constexpr (moment == 2) random = V::mul_int(random, V::set_int(0x9E3779B1u));
    return V::template shift_right<32 - cut>(random);
}

// Rounds canonical bits stochastically to bf16, in the high half of each lane.
template <class V, int moment>
INFINITY_FN inline typename V::Int stochastic_high(typename V::Int bits, typename V::Int random) {
    return V::add_int(bits, chance<V, moment, 16>(random));
}

// Returns the scale byte for the bits of a block's largest magnitude. A NaN of either sign is larger than all numbers.
INFINITY_FN inline std::uint32_t scale_of(std::uint32_t largest) {
    const std::uint32_t exponent = (largest >> 23) & 0xFFu;
    return exponent < kLeastScale ? kLeastScale : exponent;
}

// Encodes and decodes with one block's scale. With `root` the values are not negative.
//
// Values are multiplied by kBase / delta, exactly, and kBase is added instead of delta. The exponent of kBase ends in
// four zeros, so that the code is a bit field of the sum and needs no subtraction.
template <class V>
struct Codec8 {
    static constexpr std::uint32_t kBaseExponent = 128;
    static constexpr std::uint32_t kBase = kBaseExponent << 23;  // 2.0
    typename V::Float up, down;                                  // kBase / delta and delta / kBase
    typename V::Float minus_delta;  // NaN for a non-finite block, so that all its values decode to NaN

    Codec8() = default;
    INFINITY_FN explicit Codec8(std::uint32_t scale) : Codec8(scale, scale - kOctaves) {}

    template <bool root>
    INFINITY_FN static typename V::Int magnitude(typename V::Float value) {
        if constexpr (root) return V::as_int(value);
        return V::and_int(V::as_int(value), V::set_int(0x7FFFFFFFu));
    }

    // Returns the code of moment number `moment` in the low 8 bits of each lane; the other bits are undefined.
    template <int moment, bool root>
    INFINITY_FN typename V::Int encode(typename V::Float value, typename V::Int random) const {
        constexpr int kCut = shift(root);
        const typename V::Float base = V::as_float(V::set_int(kBase));
        const typename V::Int sum = V::as_int(V::fma(V::as_float(magnitude<root>(value)), up, base));
        typename V::Int rounded = V::add_int(sum, chance<V, moment, kCut>(random));
        if constexpr (root) {  // code 0 only for 0, since an update divides by a root
            const typename V::Int not_zero = V::add_int(V::as_int(value), V::set_int(0x7FFFFFFFu));
            const typename V::Int one = V::template shift_left<kCut>(V::template shift_right<31>(not_zero));
            rounded = V::max_int(rounded, V::add_int(one, V::set_int(kBase)));
        }
        const typename V::Int code = V::template shift_right<kCut>(rounded);
        if constexpr (root) return code;
        return V::blend(V::template shift_right<24>(V::as_int(value)), code, V::set_int(0x80u));
    }

    // `code`: zero-extended.
    template <bool root>
    INFINITY_FN typename V::Float decode(typename V::Int code) const {
        if constexpr (root) return decode<root>(code, code);
        return decode<root>(code, V::template shift_left<24>(code));
    }
    // Codes from memory.
    template <bool root>
    INFINITY_FN typename V::Float load(const std::uint8_t* codes) const {
        if constexpr (root) return decode<root>(V::load_8(codes));
        const typename V::Int code = V::load_signed_8(codes);
        return decode<root>(code, code);
    }

  private:
    static constexpr int shift(bool root) { return root ? 19 : 20; }
    // A block that no step has written has scale 0 and codes 0. Its delta wraps around to -2^115, and code 0 decodes to
    // 0.
    INFINITY_FN Codec8(std::uint32_t scale, std::uint32_t delta_exponent)
        : up(power(kBaseExponent + 127 - delta_exponent)),
          down(power(delta_exponent + 127 - kBaseExponent)),
          minus_delta(scale == kNotFinite ? V::as_float(V::set_int(kCanonicalNan))
                                          : V::as_float(V::set_int(0x80000000u ^ (delta_exponent << 23)))) {}
    // 2^(exponent - 127).
    INFINITY_FN static typename V::Float power(std::uint32_t exponent) {
        return V::as_float(V::set_int(exponent << 23));
    }
    // sign: the codes' signs in its uppermost bits.
    template <bool root>
    INFINITY_FN typename V::Float decode(typename V::Int code, typename V::Int sign) const {
        constexpr std::uint32_t kCode = (root ? 0xFFu : 0x7Fu) << shift(root);
        const typename V::Int field = V::template shift_left<shift(root)>(code);
        const typename V::Int sum = V::blend(field, V::set_int(kBase), V::set_int(kCode));
        const typename V::Float size = V::fma(V::as_float(sum), down, minus_delta);
        if constexpr (root) return size;
        return V::as_float(V::blend(sign, V::as_int(size), V::set_int(0x80000000u)));
    }
};

}  // namespace
}  // namespace infinity::adam
