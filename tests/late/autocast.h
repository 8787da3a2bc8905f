// torch.autocast("late"): the operators that matter to transformers and convolutions, cast as on other accelerators.
#pragma once

#include <torch/library.h>

#include "operators.h"

// Declared in ATen/autocast_mode.h, which includes every operator and would double the time to compile.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace late {

constexpr std::array in_lower_precision = {
    "conv1d", "conv2d", "conv3d", "prelu", "addmm",   "matmul", "mm",
    "mv",     "linear", "addbmm", "bmm",   "baddbmm", "einsum", "scaled_dot_product_attention"};

constexpr std::array in_fp32 = {"exp",
                                "log",
                                "rsqrt",
                                "pow.Tensor_Scalar",
                                "softplus",
                                "layer_norm",
                                "native_layer_norm",
                                "rms_norm",
                                "group_norm",
                                "nll_loss",
                                "l1_loss",
                                "mse_loss",
                                "smooth_l1_loss",
                                "kl_div",
                                "binary_cross_entropy_with_logits",
                                "softmax.int",
                                "log_softmax.int",
                                "logsumexp"};

template <bool fp32>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
    const auto dtype = fp32 ? at::kFloat : at::autocast::get_autocast_dtype(c10::kPrivateUse1);
    for (auto argument = stack->end() - op.schema().arguments().size(); argument != stack->end(); ++argument) {
        *argument = map_tensors(*argument, [&](const at::Tensor& tensor) {
            return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, c10::kPrivateUse1) : tensor;
        });
    }
    op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
    for (const char* name : in_lower_precision) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
    }
    for (const char* name : in_fp32) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace late
