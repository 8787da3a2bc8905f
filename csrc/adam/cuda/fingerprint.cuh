// CUDA kernel for fingerprints.
#pragma once

#include "runs.cuh"

namespace infinity::adam {
namespace {

constexpr int kWordsOfThread = 64;  // so that a block adds to the sum in memory only once in 128 KiB

struct alignas(16) Pair {
    std::uint64_t first, second;
};

// Returns what a word adds to the fingerprint. number: its number in memory, from 0.
__device__ inline std::uint64_t mixed(std::uint64_t word, std::size_t number) {
    const std::uint64_t x = word ^ (number + 1) * kFingerprintKey;
    return (x & 0xFFFFFFFFu) * (x >> 32) + (word << 32 | word >> 32);
}

// Adds the sum over all words to `total`. Additions modulo 2^64 have one result in any order. aligned: to pairs.
__global__ void __launch_bounds__(kThreads)
    add_words(const std::uint64_t* words, std::size_t n, bool aligned, unsigned long long* total) {
    const std::size_t stride = std::size_t{gridDim.x} * kThreads,
                      thread = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
    std::uint64_t sum = 0;
    if (aligned) {
#pragma unroll 4
        for (std::size_t pair = thread; pair < n / 2; pair += stride) {
            const Pair both = reinterpret_cast<const Pair*>(words)[pair];
            sum += mixed(both.first, 2 * pair) + mixed(both.second, 2 * pair + 1);
        }
        if (thread == 0 && n % 2 != 0) sum += mixed(words[n - 1], n - 1);
    } else {
        for (std::size_t i = thread; i < n; i += stride) sum += mixed(words[i], i);
    }
    __shared__ std::uint64_t warps[kThreads / kWarp];
#pragma unroll
    for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (unsigned k = 1; k < kThreads / kWarp; ++k) sum += warps[k];
    atomicAdd(total, static_cast<unsigned long long>(sum));
}

}  // namespace
}  // namespace infinity::adam
