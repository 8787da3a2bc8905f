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
    const R rule = rule_in<R>(c);
    const std::size_t stride = std::size_t{gridDim.x} * kThreads * kRun;
    for (std::size_t i = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kRun; i < n; i += stride) {
        Registers<F, M::kBytes, R::kMoments> run(a, Extent(i, n, aligned));
        const ElementRandom<Plain> element_random(c.random,
                                                  i);  // no run crosses a multiple of 2^32, since `first` is at a block
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
            float p = F::load(run.values(), k), m[R::kMoments];
            each<R::kMoments>([&](auto j) { m[j.value] = M::load(run.moment[j.value], k); });
            rule.template update<Plain, false>(p, run.grad[k], m);
            F::store(run.values(), k, Plain::canonical(p));
            const std::uint32_t random = M::random(element_random, k);
            each<R::kMoments>([&](auto j) {
                M::template store<j.value>(run.moment[j.value], k, Plain::canonical(m[j.value]), random);
            });
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

// A thread's share of one moment of a block: values until the block's largest is known, and their codes.
template <int runs>
struct Share {
    Codec8<Plain> old;
    float values[runs][kRun];
    std::uint32_t largest = 0;

    template <bool root>
    __device__ void see(float value) {
        const std::uint32_t magnitude = Codec8<Plain>::template magnitude<root>(value);
        largest = largest > magnitude ? largest : magnitude;
    }
    // Returns the block's new scale. Collective over the warp.
    __device__ std::uint32_t scale() const { return scale_of(warp_max(largest)); }
    template <int moment, bool root>
    __device__ void encode(std::uint8_t (&to)[kRun], int run, std::uint32_t scale,
                           const ElementRandom<Plain>& element_random) const {
        const Codec8<Plain> code(scale);
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
            const std::uint32_t byte = code.template encode<moment, root>(values[run][j], element_random.bits(j));
            to[j] = scale == kNotFinite ? std::uint8_t{0} : static_cast<std::uint8_t>(byte);
        }
    }
};

// Updates with 8-bit moments, one warp per block.
template <class F, class R>
__global__ void __launch_bounds__(kThreads)
    update_blocks(const Arrays a, const Coefficients c, std::size_t n, bool aligned) {
    constexpr int kRuns = kBlock / (kWarp * kRun);
    using Run = Registers<F, 1, R::kMoments>;
    const R rule = rule_in<R>(c);
    const unsigned lane = threadIdx.x % kWarp;
    const std::size_t stride = std::size_t{gridDim.x} * (kThreads / kWarp);
    for (std::size_t block = std::size_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; block * kBlock < n;
         block += stride) {
        const std::size_t begin = block * kBlock + lane * kRun;
        // All loads come before the first store, since the compiler cannot move them across it.
        Run runs[kRuns] = {Run(a, Extent(begin, n, aligned)), Run(a, Extent(begin + kWarp * kRun, n, aligned))};
        Share<kRuns> shares[R::kMoments];
        each<R::kMoments>([&](auto j) { shares[j.value].old = Codec8<Plain>(a.scale[j.value][block]); });
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
#pragma unroll
            for (int k = 0; k < kRun; ++k) {
                float p = F::load(runs[r].values(), k), m[R::kMoments];
                each<R::kMoments>([&](auto j) {
                    m[j.value] = shares[j.value].old.template decode<R::kRoot == j.value>(runs[r].moment[j.value][k]);
                });
                rule.template update<Plain, R::kRoot >= 0>(p, runs[r].grad[k], m);
                F::store(runs[r].values(), k, Plain::canonical(p));
                each<R::kMoments>([&](auto j) {
                    shares[j.value].values[r][k] = m[j.value];
                    if (k < runs[r].extent.count) shares[j.value].template see<R::kRoot == j.value>(m[j.value]);
                });
            }
        }
        std::uint32_t scale[R::kMoments];
        each<R::kMoments>([&](auto j) { scale[j.value] = shares[j.value].scale(); });
        if (lane == 0) {
            each<R::kMoments>([&](auto j) { a.scale[j.value][block] = static_cast<std::uint8_t>(scale[j.value]); });
        }
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
            const ElementRandom<Plain> element_random(c.random, begin + r * kWarp * kRun);
            each<R::kMoments>([&](auto j) {
                constexpr int kMoment = j.value;
                shares[kMoment].template encode<kMoment, R::kRoot == kMoment>(runs[r].moment[kMoment], r,
                                                                              scale[kMoment], element_random);
            });
            runs[r].store_values(a);
            runs[r].store_moments(a);
        }
    }
}

}  // namespace
}  // namespace infinity::adam
