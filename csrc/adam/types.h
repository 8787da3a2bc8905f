// What the kernels, the dispatcher and the bindings share. No code: every translation unit sees the same layout,
// whatever instruction set it is compiled for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::adam {

// How a parameter is kept.                 param   master     master value
enum class Format : std::uint8_t {
    kFp32 = 0,       //                       fp32    -          param itself
    kRemainder = 1,  //                       bf16    int16      bits = (param << 16) + sign-extended remainder
    kMaster = 2,     //                       bf16    fp32       master; param is a rounded copy, written only
};
inline constexpr std::size_t kFormats = 3;

enum class DType : std::uint8_t { kFp32 = 0, kBf16 = 1 };
inline constexpr std::size_t kDTypes = 2;

// What is done to one element. kBare makes the same reads and writes with one addition each: the floor that the
// memory sets, for benchmarks.
enum class Rule : std::uint8_t { kAdam = 0, kAdamW = 1, kBare = 2 };
inline constexpr std::size_t kRules = 3;

// Flat arrays of n elements each; element types follow from Format and DType, moments are fp32.
struct Arrays {
    void* param;
    void* master;  // unused in Format::kFp32
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
};

// Everything that is the same for all elements of a call, computed once in double and rounded once.
struct Coefficients {
    float grad_scale;
    float decay;          // AdamW: 1 - lr * weight_decay
    float weight_decay;   // Adam (L2)
    float avg_weight;     // w = 1 - beta1, or w - 1 when lerp_from_grad
    bool lerp_from_grad;  // w >= 0.5: interpolate from the gradient's side, as torch.lerp does
    float beta2;
    float one_minus_beta2;
    float inv_correction2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float neg_step_size;  // -lr / (1 - beta1^step)
};

// Elements per tile of the sum of squares: part of its definition, see sum_of_squares in adam.h.
inline constexpr std::size_t kSumTile = 4096;
// fp64 lanes within such a tile: element i is added to lane i % 32, lanes are then added pairwise.
inline constexpr std::size_t kSumLanes = 32;

using UpdateFn = void (*)(const Arrays&, const Coefficients&, std::size_t begin, std::size_t end);
using SumFn = double (*)(const void* values, std::size_t count);  // count <= kSumTile
using SplitFn = void (*)(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t begin,
                         std::size_t end);
using JoinFn = void (*)(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t begin,
                        std::size_t end);

// The functions of one instruction set.
struct Kernels {
    UpdateFn update[kFormats][kDTypes][kRules];
    SumFn sum_of_squares[kDTypes];
    SplitFn split;
    JoinFn join;
};

}  // namespace infinity::adam
