// Copies gradients to their buffer, or adds them to it, a tile at a time, which is summed while it is in the L1 cache.
// Included by kernel.h, whose rules apply.
#pragma once

#include <cstring>

#include "formats.h"

namespace infinity::adam {
namespace {

// Rounds canonical `bits` to bf16, to nearest with ties to even, as torch does.
template <class V>
inline typename V::Int round_to_even_bf16(typename V::Int bits) {
    const typename V::Int odd = V::and_int(V::template shift_right<16>(bits), V::set_int(1u));
    return V::template shift_right<16>(V::add_int(V::add_int(bits, V::set_int(0x7FFFu)), odd));
}

// Dtypes in which gradients are accumulated.
template <class V>
struct IntoFp32 : GradFp32<V> {
    static void store(void* base, std::size_t i, typename V::Float x) { V::store(static_cast<float*>(base) + i, x); }
};
template <class V>
struct IntoBf16 : GradBf16<V> {
    static void store(void* base, std::size_t i, typename V::Float x) {
        V::store_low_16(static_cast<std::uint16_t*>(base) + i, round_to_even_bf16<V>(V::as_int(x)));
    }
};
template <class V>
struct IntoFp16 : GradFp16<V> {
    static void store(void* base, std::size_t i, typename V::Float x) {
        V::store_fp16(static_cast<std::uint16_t*>(base) + i, x);
    }
};

template <class V, class Into>
void receive(const void* source, DType dtype, void* target, std::size_t count, bool add) {
    const auto receive_vector = [dtype, add](const void* from, void* to, std::size_t i) {
        typename V::Float x = load_grad<V>(dtype, from, i);
        if (add) x = V::add(Into::load(to, i), x);
        Into::store(to, i, V::canonical(x));
    };
    std::size_t i = 0;
    for (; i + V::kWidth <= count; i += V::kWidth) receive_vector(source, target, i);
    if constexpr (V::kWidth > 1) {
        if (i == count) return;
        using Element = typename Into::Element;
        const std::size_t rest = count - i, width = grad_bytes(dtype);
        float from[V::kWidth] = {};
        Element to[V::kWidth] = {};
        std::memcpy(from, static_cast<const char*>(source) + i * width, rest * width);
        std::memcpy(to, static_cast<Element*>(target) + i, rest * sizeof(Element));
        receive_vector(from, to, 0);
        std::memcpy(static_cast<Element*>(target) + i, to, rest * sizeof(Element));
    }
}

}  // namespace
}  // namespace infinity::adam
