// The update with 8-bit moments. A block is encoded after its largest moment is known; until then its moments stay in
// the L1 cache. Included by kernel.h, whose rules apply.
#pragma once

#include <cstring>

#include "update.h"

namespace infinity::adam {
namespace {

// New moments of a block, before they are encoded.
template <int moments>
struct PendingMoments {
    alignas(64) float values[moments][kBlock];
};

// Encodes the `count` pending moments, of elements at, at + 1, ... of the arrays.
template <class V, class R>
inline void encode_block(const Arrays& a, const Random& random, const PendingMoments<R::kMoments>& w,
                         const std::uint32_t (&scale)[R::kMoments], std::size_t at, std::size_t count) {
    const ElementRandom<V> element_random(random, at);
    Codec8<V> codecs[R::kMoments];
    std::uint8_t* codes[R::kMoments];
    each<R::kMoments>([&](auto k) {
        codecs[k.value] = Codec8<V>(scale[k.value]);
        codes[k.value] = static_cast<std::uint8_t*>(a.moment[k.value]) + at;
    });
    const auto encode = [&](std::size_t i, const auto& to) {
        const typename V::Int bits = element_random.bits(i);
        each<R::kMoments>([&](auto k) {
            const typename V::Float value = V::load(w.values[k.value] + i);
            V::store_8(to(k), codecs[k.value].template encode<k.value, R::kRoot == k.value>(value, bits));
        });
    };
    std::size_t i = 0;
    for (; i + V::kWidth <= count; i += V::kWidth) encode(i, [&](auto k) { return codes[k.value] + i; });
    if (i < count) {
        std::uint8_t some[R::kMoments][V::kWidth];
        encode(i, [&](auto k) { return some[k.value]; });
        for (int k = 0; k < R::kMoments; ++k) std::memcpy(codes[k] + i, some[k], count - i);
    }
    for (int k = 0; k < R::kMoments; ++k) {
        if (scale[k] == kNotFinite) std::memset(codes[k], 0, count);
    }
}

// Decodes and updates a block. Holds copies, since stores through byte pointers may alias the originals.
template <class V, class F, class R>
struct Updater {
    Arrays a;
    R rule;
    Codec8<V> codecs[R::kMoments];
    typename V::Int largest[R::kMoments];

    // Begins a block.
    void begin(const std::uint32_t (&scale)[R::kMoments]) {
        each<R::kMoments>([&](auto k) {
            codecs[k.value] = Codec8<V>(scale[k.value]);
            largest[k.value] = V::set_int(0);
        });
    }

    // Updates the elements from i on, and writes their new moments to place `to` of `pending`.
    void update(std::size_t i, PendingMoments<R::kMoments>& pending, std::size_t to) {
        typename V::Float p = F::load(a, i), m[R::kMoments];
        each<R::kMoments>([&](auto k) {
            const auto* const codes = static_cast<const std::uint8_t*>(a.from.moment[k.value]) + i;
            m[k.value] = codecs[k.value].template load<R::kRoot == k.value>(codes);
        });
        rule.template update<V, R::kRoot >= 0>(p, load_grad<V>(a.grad_dtype, a.grad, i), m);
        F::store(a, i, V::canonical(p));
        each<R::kMoments>([&](auto k) {
            V::keep(pending.values[k.value] + to, m[k.value]);
            see(k, m[k.value]);
        });
    }
    template <class K>
    void see(K k, typename V::Float value) {
        largest[k.value] = V::max_int(largest[k.value], Codec8<V>::template magnitude<R::kRoot == K::value>(value));
    }
};

// Updates the last elements of a block, fewer than a vector: i to n of those that start with element `at`.
template <class V, class F, class R>
inline void update_end(Updater<V, F, R>& updater, PendingMoments<R::kMoments>& pending, std::size_t at, std::size_t i,
                       std::size_t n) {
    const Arrays whole = updater.a;
    typename V::Int largest[R::kMoments];
    each<R::kMoments>([&](auto k) { largest[k.value] = updater.largest[k.value]; });
    Staged<V, F, 1> rest(whole, at + i, n - i, R::kMoments);
    updater.a = rest.arrays;
    updater.update(0, pending, i);
    rest.put_back();
    updater.a = whole;
    each<R::kMoments>([&](auto k) {
        updater.largest[k.value] = largest[k.value];
        float some[V::kWidth] = {};  // zeros beyond the end, which do not affect the maximum
        std::memcpy(some, pending.values[k.value] + i, (n - i) * sizeof(float));
        updater.see(k, V::load(some));
    });
}

template <class V, class F, class R>
[[gnu::flatten]] void update_blocks(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;
    const Random random = c.random;
    Updater<V, F, R> updater{a, rule_in<R>(c), {}, {}};
    PendingMoments<R::kMoments> pending;
    for (std::size_t at = begin; at < end; at += kBlock) {
        const std::size_t n = min(end - at, kBlock), block = at / kBlock;
        std::uint32_t scale[R::kMoments];
        for (int k = 0; k < R::kMoments; ++k) scale[k] = a.from.scale[k][block];
        updater.begin(scale);
        std::size_t i = 0;
        for (; i + V::kWidth <= n; i += V::kWidth) updater.update(at + i, pending, i);
        if constexpr (V::kWidth > 1) {
            if (i < n) update_end(updater, pending, at, i, n);
        }
        each<R::kMoments>([&](auto k) {
            scale[k.value] = scale_of(V::largest(updater.largest[k.value]));
            a.scale[k.value][block] = static_cast<std::uint8_t>(scale[k.value]);
        });
        encode_block<V, R>(a, random, pending, scale, at, n);
    }
    V::end_stores();
}

}  // namespace
}  // namespace infinity::adam
