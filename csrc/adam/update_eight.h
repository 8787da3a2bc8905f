// The update with 8-bit moments. A block is encoded after its largest moment is known; until then its moments stay in
// the L1 cache. Included by kernel.h, whose rules apply.
#pragma once

#include <cstring>

#include "update.h"

namespace infinity::adam {
namespace {

// New moments of a block, before they are encoded.
struct PendingMoments {
    alignas(64) float values[2][kBlock];
};

// Encodes the `count` pending moments, of elements at, at + 1, ... of the arrays.
template <class V, int moments, int root>
inline void encode_block(const Arrays& a, const Random& random, const PendingMoments& w,
                         const std::uint32_t (&scale)[2], std::size_t at, std::size_t count) {
    const Codec8<V, 0, root == 0> first(scale[0]);
    const Codec8<V, 1, root == 1> second(scale[1]);
    const ElementRandom<V> element_random(random, at);
    std::uint8_t* codes[moments];
    for (int k = 0; k < moments; ++k) codes[k] = static_cast<std::uint8_t*>(a.moment[k]) + at;
    const auto encode = [&](std::size_t i, std::uint8_t* to0, std::uint8_t* to1) {
        const typename V::Int bits = element_random.bits(i);
        V::store_8(to0, first.encode(V::load(w.values[0] + i), bits));
        if constexpr (moments == 2) V::store_8(to1, second.encode(V::load(w.values[1] + i), bits));
    };
    std::size_t i = 0;
    for (; i + V::kWidth <= count; i += V::kWidth) encode(i, codes[0] + i, codes[moments - 1] + i);
    if (i < count) {
        std::uint8_t some[2][V::kWidth];
        encode(i, some[0], some[1]);
        for (int k = 0; k < moments; ++k) std::memcpy(codes[k] + i, some[k], count - i);
    }
    for (int k = 0; k < moments; ++k) {
        if (scale[k] == kNotFinite) std::memset(codes[k], 0, count);
    }
}

// Decodes and updates a block. Holds copies, since stores through byte pointers may alias the originals.
template <class V, class F, class R, int root>
struct Updater {
    Arrays a;
    R rule;
    Codec8<V, 0, root == 0> first;
    Codec8<V, 1, root == 1> second;
    typename V::Int largest[2];

    Updater(const Arrays& arrays, const R& rule, const std::uint32_t (&scale)[2])
        : a(arrays), rule(rule), first(scale[0]), second(scale[1]), largest{V::set_int(0), V::set_int(0)} {}

    // Updates the elements from i on, and writes their new moments to m_to and v_to.
    void update(std::size_t i, float* m_to, float* v_to) {
        const auto codes = [this, i](int k) { return static_cast<const std::uint8_t*>(a.from.moment[k]) + i; };
        typename V::Float p = F::load(a, i);
        typename V::Float m = first.load(codes(0)), v = m;
        if constexpr (R::kMoments == 2) v = second.load(codes(1));
        rule(p, load_grad<V>(a.grad_dtype, a.grad, i), m, v);
        F::store(a, i, V::canonical(p));
        V::keep(m_to, m);
        see<0>(m);
        if constexpr (R::kMoments == 2) {
            V::keep(v_to, v);
            see<1>(v);
        }
    }
    template <int k>
    void see(typename V::Float value) {
        largest[k] = V::max_int(largest[k], Codec8<V, k, root == k>::magnitude(value));
    }
};

// Updates the last elements of a block, fewer than a vector: i to n of those that start with element `at`.
template <class V, class F, class R, int root>
inline void update_end(Updater<V, F, R, root>& updater, PendingMoments& pending, std::size_t at, std::size_t i,
                       std::size_t n) {
    const Arrays whole = updater.a;
    const typename V::Int largest[2] = {updater.largest[0], updater.largest[1]};
    Staged<V, F, 1> rest(whole, at + i, n - i, R::kMoments);
    updater.a = rest.arrays;
    updater.update(0, pending.values[0] + i, pending.values[1] + i);
    rest.put_back();
    updater.a = whole;
    updater.largest[0] = largest[0];
    updater.largest[1] = largest[1];
    float some[2][V::kWidth] = {};  // zeros beyond the end, which do not affect the maximum
    std::memcpy(some[0], pending.values[0] + i, (n - i) * sizeof(float));
    updater.template see<0>(V::load(some[0]));
    if constexpr (R::kMoments == 2) {
        std::memcpy(some[1], pending.values[1] + i, (n - i) * sizeof(float));
        updater.template see<1>(V::load(some[1]));
    }
}

template <class V, class F, class R, int root>
[[gnu::flatten]] void update_blocks(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;
    const R rule(c);
    const Random random = c.random;
    PendingMoments pending;
    for (std::size_t at = begin; at < end; at += kBlock) {
        const std::size_t n = min(end - at, kBlock), block = at / kBlock;
        std::uint32_t scale[2] = {a.from.scale[0][block], R::kMoments == 2 ? a.from.scale[1][block] : kLeastScale};
        Updater<V, F, R, root> updater(a, rule, scale);
        std::size_t i = 0;
        for (; i + V::kWidth <= n; i += V::kWidth) updater.update(at + i, pending.values[0] + i, pending.values[1] + i);
        if constexpr (V::kWidth > 1) {
            if (i < n) update_end(updater, pending, at, i, n);
        }
        for (int k = 0; k < R::kMoments; ++k) {
            scale[k] = scale_of(V::largest(updater.largest[k]));
            a.scale[k][block] = static_cast<std::uint8_t>(scale[k]);
        }
        encode_block<V, R::kMoments, root>(a, random, pending, scale, at, n);
    }
    V::end_stores();
}

}  // namespace
}  // namespace infinity::adam
