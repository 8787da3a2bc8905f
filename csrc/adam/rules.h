// Update rules of one element: (master, gradient, moments) -> (master, moments).
//
// V is a vector type of an instruction set. The operations and their order are the same for all V.
#pragma once

#include "types.h"

namespace infinity::adam {
namespace {

// Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019) in the order of torch.optim's single-tensor loop, except
// that the division by sqrt(1 - beta2^step) is a multiplication by its reciprocal, rounded once on the host.
// With `root`, the second moment is read and written as its square root, which 8-bit codes store.
template <class V, bool decoupled, bool root>
struct RuleAdam {
    using Float = typename V::Float;
    template <class W>
    using With = RuleAdam<W, decoupled, root>;
    static constexpr int kMoments = 2;
    Float grad_scale, decay, weight_decay, avg_weight, beta2, one_minus_beta2, inv_correction2, eps, step_size;
    bool lerp_from_grad;

    INFINITY_FN explicit RuleAdam(const Coefficients& c)
        : grad_scale(V::set(c.grad_scale)),
          decay(V::set(c.decay)),
          weight_decay(V::set(c.weight_decay)),
          avg_weight(V::set(c.avg_weight)),
          beta2(V::set(c.beta2)),
          one_minus_beta2(V::set(c.one_minus_beta2)),
          inv_correction2(V::set(c.inv_correction2)),
          eps(V::set(c.eps)),
          step_size(V::set(c.step_size)),
          lerp_from_grad(c.lerp_from_grad) {}

    INFINITY_FN void operator()(Float& p, Float g, Float& m, Float& v) const {
        g = V::mul(g, grad_scale);
        if constexpr (decoupled) {
            p = V::mul(p, decay);
        } else {
            g = V::fma(p, weight_decay, g);
        }
        const Float difference = V::sub(g, m);
        if (lerp_from_grad) {  // two calls: GCC would select a pair of vectors through memory
            m = V::fma(avg_weight, difference, g);
        } else {
            m = V::fma(avg_weight, difference, m);
        }
        if constexpr (root) v = V::mul(v, v);
        v = V::fma(V::mul(one_minus_beta2, g), g, V::mul(v, beta2));
        const Float deviation = V::sqrt(v);
        if constexpr (root) v = deviation;
        const Float denominator = V::fma(deviation, inv_correction2, eps);
        p = V::add(p, V::div(V::mul(step_size, m), denominator));
    }
};

// Adagrad (Duchi, Hazan & Singer 2011): the moment is the sum of squares.
template <class V, bool root>
struct RuleAdagrad {
    using Float = typename V::Float;
    template <class W>
    using With = RuleAdagrad<W, root>;
    static constexpr int kMoments = 1;
    Float grad_scale, weight_decay, eps, step_size;
    bool decays;

    INFINITY_FN explicit RuleAdagrad(const Coefficients& c)
        : grad_scale(V::set(c.grad_scale)),
          weight_decay(V::set(c.weight_decay)),
          eps(V::set(c.eps)),
          step_size(V::set(c.step_size)),
          decays(c.weight_decay != 0.0f) {}

    INFINITY_FN void operator()(Float& p, Float g, Float& sum, Float&) const {
        g = V::mul(g, grad_scale);
        if (decays) g = V::fma(p, weight_decay, g);  // without decay, a non-finite parameter does not reach the moment
        if constexpr (root) sum = V::mul(sum, sum);
        sum = V::fma(g, g, sum);
        const Float deviation = V::sqrt(sum);
        if constexpr (root) sum = deviation;
        p = V::add(p, V::div(V::mul(step_size, g), V::add(deviation, eps)));
    }
};

// Lion (Chen et al. 2023): the step is the sign of an interpolation between the mean of gradients and the gradient.
template <class V>
struct RuleLion {
    using Float = typename V::Float;
    template <class W>
    using With = RuleLion<W>;
    static constexpr int kMoments = 1;
    Float grad_scale, decay, avg_weight, beta2, one_minus_beta2, step_size;

    INFINITY_FN explicit RuleLion(const Coefficients& c)
        : grad_scale(V::set(c.grad_scale)),
          decay(V::set(c.decay)),
          avg_weight(V::set(c.avg_weight)),
          beta2(V::set(c.beta2)),
          one_minus_beta2(V::set(c.one_minus_beta2)),
          step_size(V::set(c.step_size)) {}

    INFINITY_FN void operator()(Float& p, Float g, Float& m, Float&) const {
        g = V::mul(g, grad_scale);
        const Float direction = V::fma(avg_weight, V::sub(g, m), m);
        p = V::fma(step_size, V::sign(direction), V::mul(p, decay));
        m = V::fma(one_minus_beta2, g, V::mul(m, beta2));
    }
};

// Stochastic gradient descent with momentum, as in torch.optim.SGD. Without momentum the moment is the gradient.
template <class V>
struct RuleSgd {
    using Float = typename V::Float;
    template <class W>
    using With = RuleSgd<W>;
    static constexpr int kMoments = 1;
    Float grad_scale, weight_decay, momentum, one_minus_dampening, step_size;
    bool decays, nesterov;

    INFINITY_FN explicit RuleSgd(const Coefficients& c)
        : grad_scale(V::set(c.grad_scale)),
          weight_decay(V::set(c.weight_decay)),
          momentum(V::set(c.beta2)),
          one_minus_dampening(V::set(c.one_minus_beta2)),
          step_size(V::set(c.step_size)),
          decays(c.weight_decay != 0.0f),
          nesterov(c.nesterov) {}

    INFINITY_FN void operator()(Float& p, Float g, Float& m, Float&) const {
        g = V::mul(g, grad_scale);
        if (decays) g = V::fma(p, weight_decay, g);
        m = V::fma(one_minus_dampening, g, V::mul(m, momentum));
        p = V::fma(step_size, nesterov ? V::fma(momentum, m, g) : m, p);
    }
};

}  // namespace
}  // namespace infinity::adam
