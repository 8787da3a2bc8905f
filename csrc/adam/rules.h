// Update rules, a struct for each:
//   kName, kConstants    those of its row in infinity/rules.py, betas one by one
//   kMoments, kRoot      number of moments, and the one that is a sum or mean of squares (-1: none)
//   Given                the constants in double, in the order of kConstants
//   constructor          computes what is equal for all elements of a call, in double, and rounds it to fp32 once
//   update<V, root>      updates one element: (master, gradient, moments) -> (master, moments)
//
// V is a vector type of an instruction set. The operations and their order are the same for all V. With `root`, moment
// kRoot is read and written as its square root, which 8-bit codes store. Every rule adds to the parameter a function of
// each new moment, so that a NaN in one of them shows in the parameter.
#pragma once

#include <cmath>

#include "types.h"

namespace infinity::adam {
namespace {

enum class Range : std::uint8_t { kNotNegative, kBeta, kFinite };  // kBeta: in [0, 1)

struct Constant {
    const char* name;
    Range range = Range::kNotNegative;
};

// Numbers of a call beside its rule's constants. step: from 1.
struct CallNumbers {
    double grad_scale, step;
};

inline float single(double x) { return static_cast<float>(x); }

// Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019) in the order of torch.optim's single-tensor loop, except
// that the division by sqrt(1 - beta2^step) is a multiplication by its reciprocal.
template <bool decoupled>
struct RuleAdam {
    static constexpr const char* kName = decoupled ? "adamw" : "adam";
    static constexpr int kMoments = 2, kRoot = 1;
    static constexpr Constant kConstants[] = {
        {"lr"}, {"beta1", Range::kBeta}, {"beta2", Range::kBeta}, {"eps"}, {"weight_decay"}};
    struct Given {
        double lr, beta1, beta2, eps, weight_decay;
    };
    float grad_scale, decay, weight_decay, avg_weight, beta2, one_minus_beta2, inv_correction2, eps, step_size;
    bool lerp_from_grad;  // avg_weight is w - 1 in place of w = 1 - beta1, as torch.lerp does if w >= 0.5

    RuleAdam() = default;
    RuleAdam(const Given& h, const CallNumbers& call)
        : grad_scale(single(call.grad_scale)),
          decay(single(1.0 - h.lr * h.weight_decay)),
          weight_decay(single(h.weight_decay)),
          avg_weight(single(1.0 - h.beta1)),
          beta2(single(h.beta2)),
          one_minus_beta2(single(1.0 - h.beta2)),
          inv_correction2(single(1.0 / std::sqrt(1.0 - std::pow(h.beta2, call.step)))),
          eps(single(h.eps)),
          step_size(single(-(h.lr / (1.0 - std::pow(h.beta1, call.step))))),
          lerp_from_grad(avg_weight >= 0.5f) {
        if (lerp_from_grad) avg_weight -= 1.0f;
    }

    template <class V, bool root, class Float = typename V::Float>
    INFINITY_FN void update(Float& p, Float g, Float (&moments)[kMoments]) const {
        auto& [m, v] = moments;
        g = V::mul(g, V::set(grad_scale));
        if constexpr (decoupled) {
            p = V::mul(p, V::set(decay));
        } else {
            g = V::fma(p, V::set(weight_decay), g);
        }
        const Float difference = V::sub(g, m);
        if (lerp_from_grad) {  // two calls: GCC would select a pair of vectors through memory
            m = V::fma(V::set(avg_weight), difference, g);
        } else {
            m = V::fma(V::set(avg_weight), difference, m);
        }
        if constexpr (root) v = V::mul(v, v);
        v = V::fma(V::mul(V::set(one_minus_beta2), g), g, V::mul(v, V::set(beta2)));
        const Float deviation = V::sqrt(v);
        if constexpr (root) v = deviation;
        const Float denominator = V::fma(deviation, V::set(inv_correction2), V::set(eps));
        p = V::add(p, V::div(V::mul(V::set(step_size), m), denominator));
    }
};

// Adagrad (Duchi, Hazan & Singer 2011): the moment is the sum of squares.
struct RuleAdagrad {
    static constexpr const char* kName = "adagrad";
    static constexpr int kMoments = 1, kRoot = 0;
    static constexpr Constant kConstants[] = {{"lr"}, {"lr_decay"}, {"eps"}, {"weight_decay"}};
    struct Given {
        double lr, lr_decay, eps, weight_decay;
    };
    float grad_scale, weight_decay, eps, step_size;
    bool decays;

    RuleAdagrad() = default;
    RuleAdagrad(const Given& h, const CallNumbers& call)
        : grad_scale(single(call.grad_scale)),
          weight_decay(single(h.weight_decay)),
          eps(single(h.eps)),
          step_size(single(-(h.lr / (1.0 + (call.step - 1.0) * h.lr_decay)))),
          decays(weight_decay != 0.0f) {}

    template <class V, bool root, class Float = typename V::Float>
    INFINITY_FN void update(Float& p, Float g, Float (&moments)[kMoments]) const {
        auto& [sum] = moments;
        g = V::mul(g, V::set(grad_scale));
        // Without decay, a non-finite parameter does not reach the moment.
        if (decays) g = V::fma(p, V::set(weight_decay), g);
        if constexpr (root) sum = V::mul(sum, sum);
        sum = V::fma(g, g, sum);
        const Float deviation = V::sqrt(sum);
        if constexpr (root) sum = deviation;
        p = V::add(p, V::div(V::mul(V::set(step_size), g), V::add(deviation, V::set(eps))));
    }
};

// Lion (Chen et al. 2023): the step is the sign of an interpolation between the mean of gradients and the gradient.
struct RuleLion {
    static constexpr const char* kName = "lion";
    static constexpr int kMoments = 1, kRoot = -1;
    static constexpr Constant kConstants[] = {
        {"lr"}, {"beta1", Range::kBeta}, {"beta2", Range::kBeta}, {"weight_decay"}};
    struct Given {
        double lr, beta1, beta2, weight_decay;
    };
    float grad_scale, decay, avg_weight, beta2, one_minus_beta2, step_size;

    RuleLion() = default;
    RuleLion(const Given& h, const CallNumbers& call)
        : grad_scale(single(call.grad_scale)),
          decay(single(1.0 - h.lr * h.weight_decay)),
          avg_weight(single(1.0 - h.beta1)),
          beta2(single(h.beta2)),
          one_minus_beta2(single(1.0 - h.beta2)),
          step_size(single(-h.lr)) {}

    template <class V, bool, class Float = typename V::Float>
    INFINITY_FN void update(Float& p, Float g, Float (&moments)[kMoments]) const {
        auto& [m] = moments;
        g = V::mul(g, V::set(grad_scale));
        const Float direction = V::fma(V::set(avg_weight), V::sub(g, m), m);
        p = V::fma(V::set(step_size), V::sign(direction), V::mul(p, V::set(decay)));
        m = V::fma(V::set(one_minus_beta2), g, V::mul(m, V::set(beta2)));
    }
};

// Stochastic gradient descent with momentum, as in torch.optim.SGD. Without momentum the moment is the gradient.
struct RuleSgd {
    static constexpr const char* kName = "sgd";
    static constexpr int kMoments = 1, kRoot = -1;
    static constexpr Constant kConstants[] = {
        {"lr"}, {"momentum"}, {"dampening", Range::kFinite}, {"weight_decay"}, {"nesterov"}};
    struct Given {
        double lr, momentum, dampening, weight_decay, nesterov;
    };
    float grad_scale, weight_decay, momentum, one_minus_dampening, step_size;
    bool decays, nesterov;

    RuleSgd() = default;
    RuleSgd(const Given& h, const CallNumbers& call)
        : grad_scale(single(call.grad_scale)),
          weight_decay(single(h.weight_decay)),
          momentum(single(h.momentum)),
          // As in torch: the first step and steps without momentum do not dampen the gradient.
          one_minus_dampening(call.step == 1.0 || h.momentum == 0.0 ? 1.0f : single(1.0 - h.dampening)),
          step_size(single(-h.lr)),
          decays(weight_decay != 0.0f),
          nesterov(h.nesterov != 0.0) {}

    template <class V, bool, class Float = typename V::Float>
    INFINITY_FN void update(Float& p, Float g, Float (&moments)[kMoments]) const {
        auto& [m] = moments;
        g = V::mul(g, V::set(grad_scale));
        if (decays) g = V::fma(p, V::set(weight_decay), g);
        m = V::fma(V::set(one_minus_dampening), g, V::mul(m, V::set(momentum)));
        p = V::fma(V::set(step_size), nesterov ? V::fma(V::set(momentum), m, g) : m, p);
    }
};

// AdEMAMix (Pagliardini, Ablin & Grangier 2024): Adam with a second, slower mean of gradients, whose start from zero is
// not corrected. The slow mean's weight, alpha, grows linearly over t_alpha steps, and the half-life of its decay,
// beta3, from that of beta1 over t_beta3 steps.
struct RuleAdEMAMix {
    static constexpr const char* kName = "ademamix";
    static constexpr int kMoments = 3, kRoot = 2;
    static constexpr Constant kConstants[] = {{"lr"},
                                              {"beta1", Range::kBeta},
                                              {"beta2", Range::kBeta},
                                              {"beta3", Range::kBeta},
                                              {"alpha"},
                                              {"t_alpha"},
                                              {"t_beta3"},
                                              {"eps"},
                                              {"weight_decay"}};
    struct Given {
        double lr, beta1, beta2, beta3, alpha, t_alpha, t_beta3, eps, weight_decay;
    };
    float grad_scale, minus_decay, beta1, one_minus_beta1, beta3, one_minus_beta3, beta2, one_minus_beta2,
        inv_correction2, eps, fast_size, slow_size;

    RuleAdEMAMix() = default;
    RuleAdEMAMix(const Given& h, const CallNumbers& call) {
        double slow = h.beta3;
        if (call.step < h.t_beta3) {  // 1 / log(beta) is proportional to the half-life
            const double part = call.step / h.t_beta3;
            slow = std::exp(1.0 / ((1.0 - part) / std::log(h.beta1) + part / std::log(h.beta3)));
        }
        const double alpha = call.step < h.t_alpha ? h.alpha * (call.step / h.t_alpha) : h.alpha;
        grad_scale = single(call.grad_scale);
        minus_decay = single(-(h.lr * h.weight_decay));
        beta1 = single(h.beta1);
        one_minus_beta1 = single(1.0 - h.beta1);
        beta3 = single(slow);
        one_minus_beta3 = single(1.0 - slow);
        beta2 = single(h.beta2);
        one_minus_beta2 = single(1.0 - h.beta2);
        inv_correction2 = single(1.0 / std::sqrt(1.0 - std::pow(h.beta2, call.step)));
        eps = single(h.eps);
        fast_size = single(-(h.lr / (1.0 - std::pow(h.beta1, call.step))));
        slow_size = single(-(h.lr * alpha));
    }

    template <class V, bool root, class Float = typename V::Float>
    INFINITY_FN void update(Float& p, Float g, Float (&moments)[kMoments]) const {
        auto& [fast, slow, v] = moments;
        g = V::mul(g, V::set(grad_scale));
        fast = V::fma(V::set(one_minus_beta1), g, V::mul(fast, V::set(beta1)));
        slow = V::fma(V::set(one_minus_beta3), g, V::mul(slow, V::set(beta3)));
        if constexpr (root) v = V::mul(v, v);
        v = V::fma(V::mul(V::set(one_minus_beta2), g), g, V::mul(v, V::set(beta2)));
        const Float deviation = V::sqrt(v);
        if constexpr (root) v = deviation;
        const Float step = V::fma(V::set(slow_size), slow, V::mul(V::set(fast_size), fast));
        const Float denominator = V::fma(deviation, V::set(inv_correction2), V::set(eps));
        p = V::add(p, V::fma(p, V::set(minus_decay), V::div(step, denominator)));
    }
};

// ---- the list ----

// A rule's facts for callers that have its number.
struct RuleRow {
    const char* name;
    int moments, root;
    const Constant* constants;
    std::size_t count;  // of the constants
};

template <class R>
constexpr RuleRow row_of() {
    constexpr std::size_t count = sizeof(R::kConstants) / sizeof(Constant);
    static_assert(R::kMoments <= kMostMoments && R::kRoot < R::kMoments && count <= kMostConstants);
    static_assert(sizeof(typename R::Given) == count * sizeof(double), "kConstants and Given differ");
    static_assert(sizeof(R) <= sizeof(Coefficients::rule));
    return {R::kName, R::kMoments, R::kRoot, R::kConstants, count};
}

template <class... R>
struct ListOf {
    static constexpr RuleRow kRows[] = {row_of<R>()...};
};

// A rule's number is its place in this list.
using Rules = ListOf<RuleAdam<false>, RuleAdam<true>, RuleAdagrad, RuleLion, RuleSgd, RuleAdEMAMix>;

inline constexpr std::size_t kRules = sizeof(Rules::kRows) / sizeof(RuleRow);
static_assert(kRules <= kMostRules);

constexpr const RuleRow& row_of(Rule rule) { return Rules::kRows[static_cast<std::size_t>(rule)]; }

template <class Wanted, class... R>
constexpr Rule number_of(ListOf<R...>) {
    std::size_t number = 0;
    (void)((R::kName == Wanted::kName || (++number, false)) || ...);
    return static_cast<Rule>(number);
}

template <class R>
INFINITY_FN inline R rule_in(const Coefficients& c) {
    R rule;
    __builtin_memcpy(&rule, c.rule, sizeof rule);
    return rule;
}

}  // namespace
}  // namespace infinity::adam
