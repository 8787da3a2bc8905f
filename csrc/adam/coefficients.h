// Converts hyper-parameters to the kernels' coefficients, the same for CPU and CUDA.
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

// Returns bias corrections and other values that are equal for all elements, computed in double, rounded to fp32 once.
Coefficients make_coefficients(const Hyper& hyper);
// Returns AdamW for Adam without weight decay, since there a non-finite parameter cannot reach the gradient.
Rule effective_rule(const Hyper& hyper);

}  // namespace infinity::adam
