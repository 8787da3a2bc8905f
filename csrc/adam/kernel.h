// The one kernel source. Each translation unit kernel_*.cpp defines a vector type V for its instruction set and
// instantiates kKernels<V>. Rules that keep the results the same, bit for bit, in all of them:
//   - the same operations in the same order on every element; fused multiply-adds are written out (V::fma) and the
//     compiler may not make others (-ffp-contract=off); only correctly rounded operations, so no reciprocal estimates;
//   - a NaN is stored as 0x7FC00000, because which payload survives an operation is the hardware's choice;
//   - the last elements, fewer than a vector, are staged in a zeroed block and go through the same code.
// Everything here has internal linkage: the linker must never merge a function compiled for AVX-512 with its namesake
// compiled for plain C++. For the same reason nothing of the standard library that is not a builtin is called here.
//
// An update is one pass, from memory to registers and back. 8-bit moments cannot be encoded before the largest of their
// block is known: they wait in the first-level cache, and are encoded while the divisions of the next block are under
// way.
#pragma once

#include <cstring>

#include "codec.h"
#include "rules.h"
#include "types.h"

namespace infinity::adam {
namespace {

constexpr std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }

// ---- 16-bit values from memory ----

template <class V>
struct GradFp32 {
    using Element = float;
    static typename V::Float load(const void* base, std::size_t i) {
        return V::load(static_cast<const float*>(base) + i);
    }
    static typename V::Double load_double(const void* base, std::size_t i) {
        return V::load_double(static_cast<const float*>(base) + i);
    }
};

template <class V>
struct GradBf16 {
    using Element = std::uint16_t;
    static typename V::Float load(const void* base, std::size_t i) {
        return V::as_float(V::load_high_16(static_cast<const std::uint16_t*>(base) + i));
    }
    static typename V::Double load_double(const void* base, std::size_t i) {
        return V::load_double_bf16(static_cast<const std::uint16_t*>(base) + i);
    }
};

template <class V>
struct GradFp16 {
    using Element = std::uint16_t;
    static typename V::Float load(const void* base, std::size_t i) {
        return V::load_fp16(static_cast<const std::uint16_t*>(base) + i);
    }
    static typename V::Double load_double(const void* base, std::size_t i) {
        return V::load_double_fp16(static_cast<const std::uint16_t*>(base) + i);
    }
};

template <class V>
inline typename V::Float load_grad(DType dtype, const void* grad, std::size_t i) {
    if (dtype == DType::kBf16) return GradBf16<V>::load(grad, i);
    if (dtype == DType::kFp16) return GradFp16<V>::load(grad, i);
    return GradFp32<V>::load(grad, i);
}

constexpr std::size_t grad_bytes(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

// ---- formats: the master value from memory and back ----

template <class V>
struct FormatFp32 {
    using Param = float;
    static constexpr std::size_t kMasterBytes = 0;
    static typename V::Float load(const Arrays& a, std::size_t i) { return V::load(static_cast<float*>(a.param) + i); }
    static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        V::store(static_cast<float*>(a.param) + i, V::canonical(value));
    }
};

template <class V>
struct FormatRemainder {
    using Param = std::uint16_t;
    static constexpr std::size_t kMasterBytes = 2;
    static typename V::Float load(const Arrays& a, std::size_t i) {
        return V::as_float(V::add_int(V::load_high_16(static_cast<std::uint16_t*>(a.param) + i),
                                      V::load_signed_16(static_cast<std::int16_t*>(a.master) + i)));
    }
    static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        const typename V::Int bits = V::as_int(V::canonical(value));
        V::store_low_16(static_cast<std::uint16_t*>(a.param) + i, round_to_bf16<V>(bits));
        V::store_low_16(static_cast<std::uint16_t*>(a.master) + i, bits);
    }
};

template <class V>
struct FormatMaster {
    using Param = std::uint16_t;
    static constexpr std::size_t kMasterBytes = 4;
    static typename V::Float load(const Arrays& a, std::size_t i) { return V::load(static_cast<float*>(a.master) + i); }
    static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        const typename V::Float clean = V::canonical(value);
        V::store(static_cast<float*>(a.master) + i, clean);
        V::store_low_16(static_cast<std::uint16_t*>(a.param) + i, round_to_bf16<V>(V::as_int(clean)));
    }
};

template <class V>
struct FormatMasterFp16 {
    using Param = std::uint16_t;
    static constexpr std::size_t kMasterBytes = 4;
    static typename V::Float load(const Arrays& a, std::size_t i) { return V::load(static_cast<float*>(a.master) + i); }
    static void store(const Arrays& a, std::size_t i, typename V::Float value) {
        const typename V::Float clean = V::canonical(value);
        V::store(static_cast<float*>(a.master) + i, clean);
        V::store_fp16(static_cast<std::uint16_t*>(a.param) + i, clean);
    }
};

// ---- moments ----

// Random bits of elements begin, begin + 1, ..., which do not cross a multiple of 2^32.
template <class V>
struct Numbers {
    typename V::Int key, first;
    Numbers(const Random& random, std::size_t begin)
        : key(V::set_int(random_key(random.key, random.first + begin))),
          first(V::add_int(V::iota(), V::set_int(static_cast<std::uint32_t>(random.first + begin)))) {}
    typename V::Int random(std::size_t i) const {
        return random_bits<V>(V::add_int(first, V::set_int(static_cast<std::uint32_t>(i))), key);
    }
};

template <class V>
struct MomentsFp32 {
    static constexpr std::size_t kBytes = 4;
    static typename V::Float load(const void* moment, std::size_t i) {
        return V::load(static_cast<const float*>(moment) + i);
    }
    template <int k>
    static void store(void* moment, std::size_t i, typename V::Float value, typename V::Int) {
        V::store(static_cast<float*>(moment) + i, value);
    }
    static typename V::Int random(const Numbers<V>&, std::size_t) { return V::set_int(0); }
};

template <class V>
struct MomentsBf16 {
    static constexpr std::size_t kBytes = 2;
    static typename V::Float load(const void* moment, std::size_t i) {
        return V::as_float(V::load_high_16(static_cast<const std::uint16_t*>(moment) + i));
    }
    template <int k>
    static void store(void* moment, std::size_t i, typename V::Float value, typename V::Int random) {
        V::store_low_16(static_cast<std::uint16_t*>(moment) + i, stochastic_bf16<V, k>(V::as_int(value), random));
    }
    static typename V::Int random(const Numbers<V>& numbers, std::size_t i) { return numbers.random(i); }
};

// ---- the update, with moments of 16 or 32 bits ----

template <class V, class F, class M, class R>
inline void update_vector(const Arrays& a, const R& rule, std::size_t i, typename V::Int random) {
    typename V::Float p = F::load(a, i);
    typename V::Float m = M::load(a.moment[0], i), v = R::kMoments == 2 ? M::load(a.moment[1], i) : m;
    rule(p, load_grad<V>(a.grad_dtype, a.grad, i), m, v);
    F::store(a, i, p);
    M::template store<0>(a.moment[0], i, V::canonical(m), random);
    if constexpr (R::kMoments == 2) M::template store<1>(a.moment[1], i, V::canonical(v), random);
}

// Some elements of the arrays, fewer than a vector, in memory of their own: nothing beyond them is touched.
template <class V, class F, std::size_t moment_bytes>
class Staged {
  public:
    Staged(const Arrays& a, std::size_t begin, std::size_t count, int moments)
        : from_(a), begin_(begin), count_(count), moments_(moments) {
        std::memcpy(param_, at(a.param, kParam), count * kParam);
        if constexpr (F::kMasterBytes != 0)
            std::memcpy(master_, at(a.master, F::kMasterBytes), count * F::kMasterBytes);
        const std::size_t grad = grad_bytes(a.grad_dtype);
        std::memcpy(grad_, static_cast<const char*>(a.grad) + begin * grad, count * grad);
        for (int k = 0; k < moments; ++k) std::memcpy(moment_[k], at(a.moment[k], moment_bytes), count * moment_bytes);
        arrays = a;
        arrays.param = param_;
        arrays.master = master_;
        arrays.grad = grad_;
        arrays.moment[0] = moment_[0];
        arrays.moment[1] = moment_[1];
    }
    void put_back() const {
        std::memcpy(at(from_.param, kParam), param_, count_ * kParam);
        if constexpr (F::kMasterBytes != 0) {
            std::memcpy(at(from_.master, F::kMasterBytes), master_, count_ * F::kMasterBytes);
        }
        for (int k = 0; k < moments_; ++k) {
            std::memcpy(at(from_.moment[k], moment_bytes), moment_[k], count_ * moment_bytes);
        }
    }
    Arrays arrays;

  private:
    static constexpr std::size_t kParam = sizeof(typename F::Param);
    char* at(void* array, std::size_t width) const { return static_cast<char*>(array) + begin_ * width; }

    const Arrays& from_;
    std::size_t begin_, count_;
    int moments_;
    float param_[V::kWidth] = {}, master_[V::kWidth] = {}, grad_[V::kWidth] = {}, moment_[2][V::kWidth] = {};
};

template <class V, class F, class M, class R>
void update_plainly(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;  // a local copy, so that stores through its pointers cannot change it
    const R rule(c);
    for (std::size_t at = begin, stop = begin; at < end; at = stop) {
        stop = at + least(end - at, (std::size_t{1} << 32) - static_cast<std::uint32_t>(c.random.first + at));
        const Numbers<V> numbers(c.random, at);
        std::size_t i = at;
        for (; i + V::kWidth <= stop; i += V::kWidth) {
            update_vector<V, F, M>(a, rule, i, M::random(numbers, i - at));
        }
        if constexpr (V::kWidth > 1) {
            if (i == stop) continue;
            Staged<V, F, M::kBytes> rest(a, i, stop - i, R::kMoments);
            update_vector<V, F, M>(rest.arrays, rule, 0, M::random(numbers, i - at));
            rest.put_back();
        }
    }
}

// ---- the update, with moments of 8 bits ----

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

// ---- norms and masters ----

// One tile of at most kSumTile values. A square of an fp32 value is exact in fp64, so only the additions round.
template <class V, class G>
double sum_of_squares(const void* values, std::size_t count) {
    using Double = typename V::Double;
    constexpr std::size_t kAccumulators = kSumLanes / V::kDoubleWidth;
    Double sums[kAccumulators];
    for (Double& sum : sums) sum = V::zero_double();
    const auto add_lanes = [&sums](const void* base, std::size_t offset) {
        for (std::size_t k = 0; k < kAccumulators; ++k) {
            const Double x = G::load_double(base, offset + k * V::kDoubleWidth);
            sums[k] = V::add_square(sums[k], x);
        }
    };
    std::size_t i = 0;
    for (; i + kSumLanes <= count; i += kSumLanes) add_lanes(values, i);
    if (i < count) {
        using Element = typename G::Element;
        Element rest[kSumLanes] = {};
        std::memcpy(rest, static_cast<const Element*>(values) + i, (count - i) * sizeof(Element));
        add_lanes(rest, 0);
    }
    double lanes[kSumLanes];
    for (std::size_t k = 0; k < kAccumulators; ++k) V::store_double(lanes + k * V::kDoubleWidth, sums[k]);
    for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
        for (std::size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    }
    return lanes[0];
}

template <class V>
void split(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t begin, std::size_t end) {
    const auto split_vector = [](const float* from, std::uint16_t* high, std::int16_t* low) {
        const typename V::Int bits = V::as_int(V::canonical(V::load(from)));
        V::store_low_16(high, round_to_bf16<V>(bits));
        V::store_low_16(reinterpret_cast<std::uint16_t*>(low), bits);
    };
    std::size_t i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) split_vector(master + i, param + i, remainder + i);
    if (i < end) {
        float from[V::kWidth] = {};
        std::uint16_t high[V::kWidth];
        std::int16_t low[V::kWidth];
        std::memcpy(from, master + i, (end - i) * sizeof(float));
        split_vector(from, high, low);
        std::memcpy(param + i, high, (end - i) * 2);
        std::memcpy(remainder + i, low, (end - i) * 2);
    }
}

template <class V>
void join(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t begin,
          std::size_t end) {
    const auto join_vector = [](const std::uint16_t* high, const std::int16_t* low, float* to) {
        V::store(to, V::as_float(V::add_int(V::load_high_16(high), V::load_signed_16(low))));
    };
    std::size_t i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) join_vector(param + i, remainder + i, master + i);
    if (i < end) {
        float to[V::kWidth];
        std::uint16_t high[V::kWidth] = {};
        std::int16_t low[V::kWidth] = {};
        std::memcpy(high, param + i, (end - i) * 2);
        std::memcpy(low, remainder + i, (end - i) * 2);
        join_vector(high, low, to);
        std::memcpy(master + i, to, (end - i) * sizeof(float));
    }
}

// ---- the bare pass ----

template <class V>
void touch(float* words, std::size_t n, bool writes) {
    const typename V::Int one = V::set_int(1);
    if (writes) {
        for (std::size_t i = 0; i < n; i += V::kWidth) {
            V::store(words + i, V::as_float(V::add_int(V::as_int(V::load(words + i)), one)));
        }
        return;
    }
    typename V::Int sum = one;
    for (std::size_t i = 0; i < n; i += V::kWidth) sum = V::add_int(sum, V::as_int(V::load(words + i)));
    asm volatile("" : : "m"(sum));  // the reads are wanted, their sum is not
}

// ---- the table ----

// `Root` keeps the root of moment number `root`, whose 8-bit codes are of it; -1: of none.
template <class V, class F, class R, class Root, int root>
void update_with(const Arrays& a, const Coefficients& c, std::size_t begin, std::size_t end) {
    switch (a.moments) {
        case Moments::kFp32:
            return update_plainly<V, F, MomentsFp32<V>, R>(a, c, begin, end);
        case Moments::kBf16:
            return update_plainly<V, F, MomentsBf16<V>, R>(a, c, begin, end);
        case Moments::kEight:
            return update_blocks<V, F, Root, root>(a, c, begin, end);
    }
}

template <class V, class F>
constexpr void fill_rules(UpdateFn (&row)[kRules]) {
    row[static_cast<std::size_t>(Rule::kAdam)] =
        update_with<V, F, RuleAdam<V, false, false>, RuleAdam<V, false, true>, 1>;
    row[static_cast<std::size_t>(Rule::kAdamW)] =
        update_with<V, F, RuleAdam<V, true, false>, RuleAdam<V, true, true>, 1>;
    row[static_cast<std::size_t>(Rule::kAdagrad)] = update_with<V, F, RuleAdagrad<V, false>, RuleAdagrad<V, true>, 0>;
    row[static_cast<std::size_t>(Rule::kLion)] = update_with<V, F, RuleLion<V>, RuleLion<V>, -1>;
    row[static_cast<std::size_t>(Rule::kSgd)] = update_with<V, F, RuleSgd<V>, RuleSgd<V>, -1>;
}

template <class V>
constexpr Kernels make_kernels() {
    Kernels k{};
    fill_rules<V, FormatFp32<V>>(k.update[static_cast<std::size_t>(Format::kFp32)]);
    fill_rules<V, FormatRemainder<V>>(k.update[static_cast<std::size_t>(Format::kRemainder)]);
    fill_rules<V, FormatMaster<V>>(k.update[static_cast<std::size_t>(Format::kMaster)]);
    fill_rules<V, FormatMasterFp16<V>>(k.update[static_cast<std::size_t>(Format::kMasterFp16)]);
    k.sum_of_squares[static_cast<std::size_t>(DType::kFp32)] = sum_of_squares<V, GradFp32<V>>;
    k.sum_of_squares[static_cast<std::size_t>(DType::kBf16)] = sum_of_squares<V, GradBf16<V>>;
    k.sum_of_squares[static_cast<std::size_t>(DType::kFp16)] = sum_of_squares<V, GradFp16<V>>;
    k.split = split<V>;
    k.join = join<V>;
    k.touch = touch<V>;
    return k;
}

}  // namespace
}  // namespace infinity::adam
