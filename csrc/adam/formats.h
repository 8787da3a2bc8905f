// Loads and stores of vectors: gradients, parameters with their masters, and 16- and 32-bit moments.
// Included by kernel.h, whose rules apply.
#pragma once

#include "codec.h"
#include "types.h"

namespace infinity::adam {
namespace {

// ---- 16-bit values from memory ----

template <class V>
struct GradFp32 {
    using Element = float;
    INFINITY_FN static typename V::Float load(const void* base, std::size_t i) {
        return V::load(static_cast<const float*>(base) + i);
    }
    INFINITY_FN static typename V::Double load_double(const void* base, std::size_t i) {
        return V::load_double(static_cast<const float*>(base) + i);
    }
};

template <class V>
struct GradBf16 {
    using Element = std::uint16_t;
    INFINITY_FN static typename V::Float load(const void* base, std::size_t i) {
        return V::as_float(V::load_high_16(static_cast<const std::uint16_t*>(base) + i));
    }
    INFINITY_FN static typename V::Double load_double(const void* base, std::size_t i) {
        return V::load_double_bf16(static_cast<const std::uint16_t*>(base) + i);
    }
};

template <class V>
struct GradFp16 {
    using Element = std::uint16_t;
    INFINITY_FN static typename V::Float load(const void* base, std::size_t i) {
        return V::load_fp16(static_cast<const std::uint16_t*>(base) + i);
    }
    INFINITY_FN static typename V::Double load_double(const void* base, std::size_t i) {
        return V::load_double_fp16(static_cast<const std::uint16_t*>(base) + i);
    }
};

template <class V>
INFINITY_FN inline typename V::Float load_grad(DType dtype, const void* grad, std::size_t i) {
    if constexpr (V::kInterleaved) return GradBf16<V>::load(grad, i);
    if (dtype == DType::kBf16) return GradBf16<V>::load(grad, i);
    if (dtype == DType::kFp16) return GradFp16<V>::load(grad, i);
    return GradFp32<V>::load(grad, i);
}

INFINITY_FN constexpr std::size_t grad_bytes(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

// ---- formats: the master value from memory and back; stored values are canonical ----

template <class V>
struct FormatFp32 {
    using Param = float;
    static constexpr std::size_t kMasterBytes = 0;
    static constexpr bool kReadsParam = true;
    INFINITY_FN static typename V::Float load(const Arrays& a, std::size_t i) {
        return V::load(static_cast<const float*>(a.from.param) + i);
    }
    INFINITY_FN static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        V::store(static_cast<float*>(a.param) + i, value);
    }
};

template <class V>
struct FormatRemainder {
    using Param = std::uint16_t;
    static constexpr std::size_t kMasterBytes = 2;
    static constexpr bool kReadsParam = true;
    INFINITY_FN static typename V::Float load(const Arrays& a, std::size_t i) {
        return V::as_float(V::add_int(V::load_high_16(static_cast<const std::uint16_t*>(a.from.param) + i),
                                      V::load_signed_16(static_cast<const std::int16_t*>(a.from.master) + i)));
    }
    INFINITY_FN static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        const typename V::Int bits = V::as_int(value);
        V::store_high_16(static_cast<std::uint16_t*>(a.param) + i, round_high<V>(bits));
        V::store_low_16(static_cast<std::uint16_t*>(a.master) + i, bits);
    }
};

// fp16: the parameter is fp16, rounded to nearest, ties to even; otherwise bf16.
template <class V, bool fp16>
struct FormatMaster {
    using Param = std::uint16_t;
    static constexpr std::size_t kMasterBytes = 4;
    static constexpr bool kReadsParam = false;
    INFINITY_FN static typename V::Float load(const Arrays& a, std::size_t i) {
        return V::load(static_cast<const float*>(a.from.master) + i);
    }
    INFINITY_FN static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        auto* const param = static_cast<std::uint16_t*>(a.param) + i;
        V::store(static_cast<float*>(a.master) + i, value);
        if constexpr (fp16) {
            V::store_fp16(param, value);
        } else {
            V::store_high_16(param, round_high<V>(V::as_int(value)));
        }
    }
};

// ---- moments ----

// Random bits of elements begin, begin + 1, ...; the range must not cross a multiple of 2^32.
template <class V>
struct ElementRandom {
    typename V::Int first;
    INFINITY_FN ElementRandom(const Random& random, std::size_t begin) {
        const typename V::Int number = V::add_int(V::iota(), low_half(random.first + begin));
        const typename V::Int key = V::set_int(random_key(random.key, random.first + begin));
        first = V::add_int(V::mul_int(number, V::set_int(kStride)), key);
    }
    INFINITY_FN typename V::Int bits(std::size_t i) const {
        return random_bits<V>(V::add_int(first, low_half(i * kStride)));
    }

  private:
    INFINITY_FN static typename V::Int low_half(std::uint64_t x) { return V::set_int(static_cast<std::uint32_t>(x)); }
};

template <class V>
struct MomentsFp32 {
    static constexpr std::size_t kBytes = 4;
    INFINITY_FN static typename V::Float load(const void* moment, std::size_t i) {
        return V::load(static_cast<const float*>(moment) + i);
    }
    template <int k>
    INFINITY_FN static void store(void* moment, std::size_t i, typename V::Float value, typename V::Int) {
        V::store(static_cast<float*>(moment) + i, value);
    }
    INFINITY_FN static typename V::Int random(const ElementRandom<V>&, std::size_t) { return V::set_int(0); }
};

template <class V>
struct MomentsBf16 {
    static constexpr std::size_t kBytes = 2;
    INFINITY_FN static typename V::Float load(const void* moment, std::size_t i) {
        return V::as_float(V::load_high_16(static_cast<const std::uint16_t*>(moment) + i));
    }
    template <int k>
    INFINITY_FN static void store(void* moment, std::size_t i, typename V::Float value, typename V::Int random) {
        V::store_high_16(static_cast<std::uint16_t*>(moment) + i, stochastic_high<V, k>(V::as_int(value), random));
    }
    INFINITY_FN static typename V::Int random(const ElementRandom<V>& element_random, std::size_t i) {
        return element_random.bits(i);
    }
};

}  // namespace
}  // namespace infinity::adam
