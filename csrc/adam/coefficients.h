// Converts hyper-parameters to the kernels' coefficients, the same for CPU and CUDA.
#pragma once

#include <cstdint>

#include "types.h"

namespace infinity::adam {

struct Hyper {
    Rule rule;
    double constants[kMostConstants];  // in the order of the rule's kConstants
    double grad_scale;
    std::int64_t step;  // from 1
    Random random;
};

// Returns bias corrections and other values that are equal for all elements, computed in double, rounded to fp32 once.
Coefficients make_coefficients(const Hyper& hyper);
// Returns AdamW for Adam without weight decay, since there a non-finite parameter cannot reach the gradient.
Rule effective_rule(const Hyper& hyper);

}  // namespace infinity::adam
