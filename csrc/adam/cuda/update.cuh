// CUDA kernels of the update: rules, formats and codes of the CPU kernels, element by element in registers.
#pragma once

#include "../codec.h"
#include "../rules.h"
#include "runs.cuh"

namespace infinity::adam {
namespace {

// Updates with 16- or 32-bit moments. aligned: every array is aligned to kRun of its elements.
template <class F, class M, class R>
__global__ void __launch_bounds__(kThreads)
    update_runs(const Arrays a, const Coefficients c, std::size_t n, bool aligned) {
    const R rule(c);
    const std::size_t stride = std::size_t{gridDim.x} * kThreads * kRun;
    for (std::size_t i = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kRun; i < n; i += stride) {
        Registers<F, M::kBytes, R::kMoments> run(a, Extent(i, n, aligned));
        const ElementRandom<Plain> element_random(c.random,
                                                  i);  // no run crosses a multiple of 2^32, since `first` is at a block
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
            float p = F::load(run.values(), k);
            float m = M::load(run.moment[0], k), v = R::kMoments == 2 ? M::load(run.moment[1], k) : m;
            rule(p, run.grad[k], m, v);
            F::store(run.values(), k, Plain::canonical(p));
            const std::uint32_t random = M::random(element_random, k);
            M::template store<0>(run.moment[0], k, Plain::canonical(m), random);
            if constexpr (R::kMoments == 2) M::template store<1>(run.moment[1], k, Plain::canonical(v), random);
        }
        run.store_values(a);
        run.store_moments(a);
    }
}

__device__ inline std::uint32_t warp_max(std::uint32_t x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        const std::uint32_t other = __shfl_xor_sync(~0u, x, offset);
        x = x > other ? x : other;
    }
    return x;
}

// A thread's share of a block with 8-bit moments: values until the block's largest is known, and their codes.
template <int k, bool root, int runs>
struct Codes {
    using Code = Codec8<Plain, k, root>;
    float values[runs][kRun];
    std::uint32_t largest = 0;

    __device__ void see(float value) {
        const std::uint32_t magnitude = Code::magnitude(value);
        largest = largest > magnitude ? largest : magnitude;
    }
    // Returns the block's new scale. Collective over the warp.
    __device__ std::uint32_t scale() const { return scale_of(warp_max(largest)); }
    __device__ void encode(std::uint8_t (&to)[kRun], int run, std::uint32_t scale,
                           const ElementRandom<Plain>& element_random) const {
        const Code code(scale);
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
            const std::uint32_t byte = code.encode(values[run][j], element_random.bits(j));
            to[j] = scale == kNotFinite ? std::uint8_t{0} : static_cast<std::uint8_t>(byte);
        }
    }
};

// Updates with 8-bit moments, one warp per block.
template <class F, class R, int root>
__global__ void __launch_bounds__(kThreads)
    update_blocks(const Arrays a, const Coefficients c, std::size_t n, bool aligned) {
    constexpr int kRuns = kBlock / (kWarp * kRun);
    using Run = Registers<F, 1, R::kMoments>;
    const R rule(c);
    const unsigned lane = threadIdx.x % kWarp;
    const std::size_t stride = std::size_t{gridDim.x} * (kThreads / kWarp);
    for (std::size_t block = std::size_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; block * kBlock < n;
         block += stride) {
        const std::size_t begin = block * kBlock + lane * kRun;
        // All loads come before the first store, since the compiler cannot move them across it.
        Run runs[kRuns] = {Run(a, Extent(begin, n, aligned)), Run(a, Extent(begin + kWarp * kRun, n, aligned))};
        const Codec8<Plain, 0, root == 0> first(a.scale[0][block]);
        const Codec8<Plain, 1, root == 1> second(R::kMoments == 2 ? a.scale[1][block] : kLeastScale);
        Codes<0, root == 0, kRuns> codes0;
        Codes<1, root == 1, kRuns> codes1;
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
#pragma unroll
            for (int k = 0; k < kRun; ++k) {
                float p = F::load(runs[r].values(), k);
                float m = first.decode(runs[r].moment[0][k]), v = m;
                if constexpr (R::kMoments == 2) v = second.decode(runs[r].moment[1][k]);
                rule(p, runs[r].grad[k], m, v);
                F::store(runs[r].values(), k, Plain::canonical(p));
                codes0.values[r][k] = m;
                codes1.values[r][k] = v;
                if (k < runs[r].extent.count) {
                    codes0.see(m);
                    codes1.see(v);
                }
            }
        }
        const std::uint32_t scale0 = codes0.scale(), scale1 = R::kMoments == 2 ? codes1.scale() : kLeastScale;
        if (lane == 0) {
            a.scale[0][block] = static_cast<std::uint8_t>(scale0);
            if constexpr (R::kMoments == 2) a.scale[1][block] = static_cast<std::uint8_t>(scale1);
        }
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
            const ElementRandom<Plain> element_random(c.random, begin + r * kWarp * kRun);
            codes0.encode(runs[r].moment[0], r, scale0, element_random);
            if constexpr (R::kMoments == 2) codes1.encode(runs[r].moment[1], r, scale1, element_random);
            runs[r].store_values(a);
            runs[r].store_moments(a);
        }
    }
}

}  // namespace
}  // namespace infinity::adam
