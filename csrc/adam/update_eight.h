// The update with moments of 8 bits. A block cannot be encoded before the largest of its moments is known: they wait in
// the first-level cache, and are encoded while the divisions of the next block are under way. Included by kernel.h,
// whose rules hold here.
#pragma once

#include <cstring>

#include "update.h"

namespace infinity::adam {
namespace {

// A block whose new moments wait to be encoded.
struct Waiting {
    alignas(64) float values[2][kBlock];
    std::uint32_t scale[2] = {kLeastScale, kLeastScale};
    std::size_t begin = 0, count = 0;
};

// How a block is encoded. In the loops it is a local copy: what they store through byte pointers could else change it.
template <class V, int moments, int root>
struct Encoder {
    Eight<V, 0, root == 0> first;
    Eight<V, 1, root == 1> second;
    Numbers<V> numbers;
    std::uint8_t* codes[2];

    Encoder(const Arrays& a, const Random& random, const Waiting& w)
        : first(w.scale[0]),
          second(w.scale[1]),
          numbers(random, w.begin),
          codes{static_cast<std::uint8_t*>(a.moment[0]) + w.begin, static_cast<std::uint8_t*>(a.moment[1]) + w.begin} {}

    // Values i, i + 1, ... of the block to codes at `to`.
    [[gnu::always_inline]] void encode(const Waiting& w, std::size_t i, std::uint8_t* to0, std::uint8_t* to1) const {
        const typename V::Int random = numbers.random(i);
        V::store_8(to0, first.encode(V::load(w.values[0] + i), random));
        if constexpr (moments == 2) V::store_8(to1, second.encode(V::load(w.values[1] + i), random));
    }
    [[gnu::always_inline]] void encode(const Waiting& w, std::size_t i) const {
        encode(w, i, codes[0] + i, codes[1] + i);
    }
    // All from value i on.
    [[gnu::always_inline]] void finish(const Waiting& w, std::size_t i) const {
        for (; i + V::kWidth <= w.count; i += V::kWidth) encode(w, i);
        if (i < w.count) {
            std::uint8_t some[2][V::kWidth];
            encode(w, i, some[0], some[1]);
            for (int k = 0; k < moments; ++k) std::memcpy(codes[k] + i, some[k], w.count - i);
        }
        for (int k = 0; k < moments; ++k) {
            if (w.scale[k] == kNotFinite) std::memset(codes[k], 0, w.count);
        }
    }
};

// How a block is decoded and updated; local for the same reason.
template <class V, class F, class R, int root>
struct Updater {
    Arrays a;
    R rule;
    Eight<V, 0, root == 0> first;
    Eight<V, 1, root == 1> second;
    typename V::Int largest[2];

    Updater(const Arrays& arrays, const R& rule, const std::uint32_t (&scale)[2])
        : a(arrays), rule(rule), first(scale[0]), second(scale[1]), largest{V::set_int(0), V::set_int(0)} {}

    // Element i of the arrays; its new moments go to m_to and v_to.
    [[gnu::always_inline]] void update(std::size_t i, float* m_to, float* v_to) {
        const auto code = [this, i](int k) { return V::load_8(static_cast<const std::uint8_t*>(a.moment[k]) + i); };
        typename V::Float p = F::load(a, i);
        typename V::Float m = first.decode(code(0)), v = m;
        if constexpr (R::kMoments == 2) v = second.decode(code(1));
        rule(p, load_grad<V>(a.grad_dtype, a.grad, i), m, v);
        F::store(a, i, p);
        V::store(m_to, m);
        see<0>(m);
        if constexpr (R::kMoments == 2) {
            V::store(v_to, v);
            see<1>(v);
        }
    }
    template <int k>
    [[gnu::always_inline]] void see(typename V::Float value) {
        largest[k] = V::max_int(largest[k], Eight<V, k, root == k>::magnitude(value));
    }
};

// The last elements of a block, fewer than a vector: from element i on of the n that begin with element `at`.
template <class V, class F, class R, int root>
[[gnu::always_inline]] inline void update_end(Updater<V, F, R, root>& updater, Waiting& now, std::size_t at,
                                              std::size_t i, std::size_t n) {
    const Arrays whole = updater.a;
    const typename V::Int largest[2] = {updater.largest[0], updater.largest[1]};
    Staged<V, F, 1> rest(whole, at + i, n - i, R::kMoments);
    updater.a = rest.arrays;
    updater.update(0, now.values[0] + i, now.values[1] + i);
    rest.put_back();
    updater.a = whole;
    updater.largest[0] = largest[0];
    updater.largest[1] = largest[1];
    float some[2][V::kWidth] = {};  // what stands beyond the end must not count
    std::memcpy(some[0], now.values[0] + i, (n - i) * sizeof(float));
    updater.template see<0>(V::load(some[0]));
    if constexpr (R::kMoments == 2) {
        std::memcpy(some[1], now.values[1] + i, (n - i) * sizeof(float));
        updater.template see<1>(V::load(some[1]));
    }
}

template <class V, class F, class R, int root>
void update_blocks(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;
    const R rule(c);
    const Random random = c.random;
    Waiting blocks[2];
    int turn = 0;
    for (std::size_t at = begin; at < end; at += kBlock, turn = 1 - turn) {
        Waiting& now = blocks[turn];
        const Waiting& before = blocks[1 - turn];
        const std::size_t n = least(end - at, kBlock), block = at / kBlock;
        const std::uint32_t scale[2] = {a.scale[0][block], R::kMoments == 2 ? a.scale[1][block] : kLeastScale};
        Updater<V, F, R, root> updater(a, rule, scale);
        const Encoder<V, R::kMoments, root> encoder(a, random, before);
        std::size_t i = 0;
        if (before.count > 0) {
            for (; i + V::kWidth <= n; i += V::kWidth) {
                updater.update(at + i, now.values[0] + i, now.values[1] + i);
                encoder.encode(before, i);
            }
            encoder.finish(before, i);
        } else {
            for (; i + V::kWidth <= n; i += V::kWidth) updater.update(at + i, now.values[0] + i, now.values[1] + i);
        }
        if constexpr (V::kWidth > 1) {
            if (i < n) update_end(updater, now, at, i, n);
        }
        now.begin = at;
        now.count = n;
        for (int k = 0; k < R::kMoments; ++k) {
            now.scale[k] = scale_of(V::largest(updater.largest[k]));
            a.scale[k][block] = static_cast<std::uint8_t>(now.scale[k]);
        }
    }
    const Waiting& last = blocks[1 - turn];
    Encoder<V, R::kMoments, root>(a, random, last).finish(last, 0);
}

}  // namespace
}  // namespace infinity::adam
