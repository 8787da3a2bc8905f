#include "coefficients.h"

#include <cmath>

#include "float_environment.h"

namespace infinity::adam {
namespace {

// Not inlined, since the compiler may move arithmetic across a change of the floating-point environment.
[[gnu::noinline]] Coefficients compute_coefficients(const Hyper& h) {
    const double step = static_cast<double>(h.step);
    Coefficients c{};
    c.grad_scale = static_cast<float>(h.grad_scale);
    c.decay = static_cast<float>(1.0 - h.lr * h.weight_decay);
    c.weight_decay = static_cast<float>(h.weight_decay);
    c.eps = static_cast<float>(h.eps);
    c.random = h.random;
    double step_size = h.lr;
    const float weight = static_cast<float>(1.0 - h.beta1);
    c.avg_weight = weight;
    c.beta2 = static_cast<float>(h.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
    switch (h.rule) {
        case Rule::kAdam:
        case Rule::kAdamW:
            c.lerp_from_grad = weight >= 0.5f;
            c.avg_weight = c.lerp_from_grad ? weight - 1.0f : weight;
            c.inv_correction2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(h.beta2, step)));
            step_size /= 1.0 - std::pow(h.beta1, step);
            break;
        case Rule::kAdagrad:
            step_size /= 1.0 + (step - 1.0) * h.lr_decay;
            break;
        case Rule::kLion:
            break;
        case Rule::kSgd:
            c.beta2 = static_cast<float>(h.momentum);
            // As in torch: the first step and steps without momentum do not dampen the gradient.
            c.one_minus_beta2 = h.step == 1 || h.momentum == 0.0 ? 1.0f : static_cast<float>(1.0 - h.dampening);
            c.nesterov = h.nesterov;
            break;
    }
    c.step_size = static_cast<float>(-step_size);
    return c;
}

}  // namespace

Coefficients make_coefficients(const Hyper& hyper) {
    const FloatEnvironment environment;
    return compute_coefficients(hyper);
}

Rule effective_rule(const Hyper& h) { return h.rule == Rule::kAdam && h.weight_decay == 0.0 ? Rule::kAdamW : h.rule; }

}  // namespace infinity::adam
