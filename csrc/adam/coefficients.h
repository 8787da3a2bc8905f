// From what the user sets to what the kernels multiply by, the same for the CPU and for CUDA.
#pragma once

#include <cstdint>

#include "types.h"

namespace infinity::adam {

struct Hyper {
    Rule rule;
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    double momentum, dampening, lr_decay;  // SGD, SGD, Adagrad
    bool nesterov;                         // SGD
    std::int64_t step;                     // from 1
    Random random;
};

// Bias corrections and all else that does not depend on the element, in double, rounded to fp32 once.
Coefficients make_coefficients(const Hyper& hyper);
// Adam without weight decay is AdamW without weight decay, where a non-finite parameter cannot reach the gradient.
Rule effective_rule(const Hyper& hyper);

}  // namespace infinity::adam
