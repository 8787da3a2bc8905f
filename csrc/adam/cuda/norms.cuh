// CUDA kernels for sums of squares, and for splitting and joining fp32 masters.
#pragma once

#include "runs.cuh"

namespace infinity::adam {
namespace {

// One warp per tile; lane k is lane k of the definition in infinity/native/_adam.pyi.
template <class G>
__global__ void __launch_bounds__(kThreads) sum_tiles(const void* values, std::size_t n, double* tiles) {
    static_assert(kSumLanes == kWarp);
    constexpr int kRows = kSumTile / kSumLanes;
    const unsigned lane = threadIdx.x % kWarp;
    const std::size_t stride = std::size_t{gridDim.x} * (kThreads / kWarp);
    for (std::size_t tile = std::size_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; tile * kSumTile < n;
         tile += stride) {
        const std::size_t begin = tile * kSumTile + lane;
        double sum = 0.0;
        if (n - tile * kSumTile >= kSumTile) {
#pragma unroll 16
            for (int row = 0; row < kRows; ++row) {
                sum = Plain::add_square(sum, G::load_double(values, begin + row * kSumLanes));
            }
        } else {
            for (std::size_t i = begin; i < n; i += kSumLanes) {
                sum = Plain::add_square(sum, G::load_double(values, i));
            }
        }
#pragma unroll
        for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
        if (lane == 0) tiles[tile] = sum;
    }
}

// Runs as one block and adds the tiles' sums in order, as in the definition. initial_at: address of `initial`, or null;
// may be `out`.
__global__ void __launch_bounds__(kThreads) add_tiles(const double* tiles, std::size_t count, double scale,
                                                      double initial, const double* initial_at, double* out) {
    __shared__ double some[kThreads];
    double total = initial_at != nullptr ? *initial_at : initial;
    for (std::size_t at = 0; at < count; at += kThreads) {
        const std::size_t rest = count - at < kThreads ? count - at : kThreads;
        if (threadIdx.x < rest) some[threadIdx.x] = tiles[at + threadIdx.x] * scale * scale;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (std::size_t k = 0; k < rest; ++k) total += some[k];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = total == total ? total : __builtin_nan("");
}

__global__ void __launch_bounds__(kThreads)
    split_runs(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n, bool aligned) {
    const std::size_t stride = std::size_t{gridDim.x} * kThreads * kRun;
    for (std::size_t i = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kRun; i < n; i += stride) {
        const Extent extent(i, n, aligned);
        alignas(16) float from[kRun];
        alignas(16) std::uint16_t high[kRun], low[kRun];
        load_run(from, master, extent);
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
            const std::uint32_t bits = Plain::as_int(Plain::canonical(from[k]));
            Plain::store_low_16(high + k, round_to_bf16<Plain>(bits));
            Plain::store_low_16(low + k, bits);
        }
        store_run(param, high, extent);
        store_run(remainder, low, extent);
    }
}

__global__ void __launch_bounds__(kThreads)
    join_runs(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t n, bool aligned) {
    const std::size_t stride = std::size_t{gridDim.x} * kThreads * kRun;
    for (std::size_t i = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kRun; i < n; i += stride) {
        const Extent extent(i, n, aligned);
        alignas(16) std::uint16_t high[kRun];
        alignas(16) std::int16_t low[kRun];
        alignas(16) float to[kRun];
        load_run(high, param, extent);
        load_run(low, remainder, extent);
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
            to[k] = Plain::as_float(Plain::add_int(Plain::load_high_16(high + k), Plain::load_signed_16(low + k)));
        }
        store_run(master, to, extent);
    }
}

}  // namespace
}  // namespace infinity::adam
