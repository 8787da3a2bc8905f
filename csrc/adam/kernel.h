// The one kernel source. Each translation unit kernel_*.cpp defines a vector type V for its instruction set and
// instantiates kKernels<V>. Rules that keep the results the same, bit for bit, in all of them:
//   - the same operations in the same order on every element; fused multiply-adds are written out (V::fma) and the
//     compiler may not make others (-ffp-contract=off); only correctly rounded operations, so no reciprocal estimates;
//   - a NaN is stored as 0x7FC00000, because which payload survives an operation is the hardware's choice;
//   - the last elements, fewer than a vector, are staged in a zeroed block and go through the same code.
// Everything here has internal linkage: the linker must never merge a function compiled for AVX-512 with its namesake
// compiled for plain C++. For the same reason nothing of the standard library that is not a builtin is called here.
#pragma once

#include <cstring>

#include "types.h"

namespace infinity::adam {
namespace {

constexpr std::uint32_t kCanonicalNan = 0x7FC00000u;

// bf16 by rounding half away from zero, in integers: the carry goes through the exponent up to infinity. The 16-bit
// difference to the fp32 value then always fits a signed integer, and is its low half.
// bits: canonical fp32 patterns, so that no NaN can round to infinity or wrap round to zero.
template <class V>
inline typename V::Int round_to_bf16(typename V::Int bits) {
    return V::shift_right_16(V::add_int(bits, V::set_int(0x8000u)));
}

// ---- gradients: fp32 values from memory ----

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

// ---- rules: (master, grad, exp_avg, exp_avg_sq) -> (master, exp_avg, exp_avg_sq) ----

// Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019) in the order of torch.optim's single-tensor loop, except
// that the division by sqrt(1 - beta2^step) is a multiplication by its reciprocal, rounded once on the host.
template <class V, bool decoupled>
struct RuleAdam {
    using Float = typename V::Float;
    Float grad_scale, decay, weight_decay, avg_weight, beta2, one_minus_beta2, inv_correction2, eps, neg_step_size;
    bool lerp_from_grad;

    explicit RuleAdam(const Coefficients& c)
        : grad_scale(V::set(c.grad_scale)),
          decay(V::set(c.decay)),
          weight_decay(V::set(c.weight_decay)),
          avg_weight(V::set(c.avg_weight)),
          beta2(V::set(c.beta2)),
          one_minus_beta2(V::set(c.one_minus_beta2)),
          inv_correction2(V::set(c.inv_correction2)),
          eps(V::set(c.eps)),
          neg_step_size(V::set(c.neg_step_size)),
          lerp_from_grad(c.lerp_from_grad) {}

    void operator()(Float& p, Float g, Float& m, Float& v) const {
        g = V::mul(g, grad_scale);
        if constexpr (decoupled) {
            p = V::mul(p, decay);
        } else {
            g = V::fma(p, weight_decay, g);
        }
        m = V::fma(avg_weight, V::sub(g, m), lerp_from_grad ? g : m);
        v = V::fma(V::mul(one_minus_beta2, g), g, V::mul(v, beta2));
        const Float denominator = V::fma(V::sqrt(v), inv_correction2, eps);
        p = V::add(p, V::div(V::mul(neg_step_size, m), denominator));
    }
};

template <class V>
struct RuleBare {
    using Float = typename V::Float;
    explicit RuleBare(const Coefficients&) {}
    void operator()(Float& p, Float g, Float& m, Float& v) const {
        p = V::add(p, g);
        m = V::add(m, g);
        v = V::add(v, g);
    }
};

// ---- loops ----

template <class V, class F, class G, class R>
inline void update_vector(const Arrays& a, const R& rule, std::size_t i) {
    typename V::Float p = F::load(a, i);
    typename V::Float m = V::load(a.exp_avg + i);
    typename V::Float v = V::load(a.exp_avg_sq + i);
    rule(p, G::load(a.grad, i), m, v);
    F::store(a, i, p);
    V::store(a.exp_avg + i, V::canonical(m));
    V::store(a.exp_avg_sq + i, V::canonical(v));
}

// The last `count` < V::kWidth elements from index `begin`, staged so that nothing beyond them is touched.
template <class V, class F, class G, class R>
inline void update_tail(const Arrays& a, const R& rule, std::size_t begin, std::size_t count) {
    constexpr std::size_t kParamBytes = sizeof(typename F::Param), kGradBytes = sizeof(typename G::Element);
    struct Block {
        float param[V::kWidth], master[V::kWidth], grad[V::kWidth], exp_avg[V::kWidth], exp_avg_sq[V::kWidth];
    } block{};
    char* const param = static_cast<char*>(a.param) + begin * kParamBytes;
    char* const master = static_cast<char*>(a.master) + begin * F::kMasterBytes;
    std::memcpy(block.param, param, count * kParamBytes);
    if constexpr (F::kMasterBytes != 0) std::memcpy(block.master, master, count * F::kMasterBytes);
    std::memcpy(block.grad, static_cast<const char*>(a.grad) + begin * kGradBytes, count * kGradBytes);
    std::memcpy(block.exp_avg, a.exp_avg + begin, count * sizeof(float));
    std::memcpy(block.exp_avg_sq, a.exp_avg_sq + begin, count * sizeof(float));
    update_vector<V, F, G>(Arrays{block.param, block.master, block.grad, block.exp_avg, block.exp_avg_sq}, rule, 0);
    std::memcpy(param, block.param, count * kParamBytes);
    if constexpr (F::kMasterBytes != 0) std::memcpy(master, block.master, count * F::kMasterBytes);
    std::memcpy(a.exp_avg + begin, block.exp_avg, count * sizeof(float));
    std::memcpy(a.exp_avg_sq + begin, block.exp_avg_sq, count * sizeof(float));
}

template <class V, class F, class G, class R>
void update(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;  // a local copy, so that stores through its pointers cannot change it
    const R rule(c);
    std::size_t i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) update_vector<V, F, G>(a, rule, i);
    if constexpr (V::kWidth > 1) {
        if (i < end) update_tail<V, F, G>(a, rule, i, end - i);
    }
}

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

// ---- the table ----

template <class V, class F, class G>
constexpr void fill_rules(UpdateFn (&row)[kRules]) {
    row[static_cast<std::size_t>(Rule::kAdam)] = update<V, F, G, RuleAdam<V, false>>;
    row[static_cast<std::size_t>(Rule::kAdamW)] = update<V, F, G, RuleAdam<V, true>>;
    row[static_cast<std::size_t>(Rule::kBare)] = update<V, F, G, RuleBare<V>>;
}

template <class V, class F>
constexpr void fill_format(UpdateFn (&rows)[kDTypes][kRules]) {
    fill_rules<V, F, GradFp32<V>>(rows[static_cast<std::size_t>(DType::kFp32)]);
    fill_rules<V, F, GradBf16<V>>(rows[static_cast<std::size_t>(DType::kBf16)]);
}

template <class V>
constexpr Kernels make_kernels() {
    Kernels k{};
    fill_format<V, FormatFp32<V>>(k.update[static_cast<std::size_t>(Format::kFp32)]);
    fill_format<V, FormatRemainder<V>>(k.update[static_cast<std::size_t>(Format::kRemainder)]);
    fill_format<V, FormatMaster<V>>(k.update[static_cast<std::size_t>(Format::kMaster)]);
    k.sum_of_squares[static_cast<std::size_t>(DType::kFp32)] = sum_of_squares<V, GradFp32<V>>;
    k.sum_of_squares[static_cast<std::size_t>(DType::kBf16)] = sum_of_squares<V, GradBf16<V>>;
    k.split = split<V>;
    k.join = join<V>;
    return k;
}

}  // namespace
}  // namespace infinity::adam
