// CUDA kernel that brings results to the host.
#pragma once

#include "runs.cuh"

namespace infinity::adam {
namespace {

// Runs as one block and writes `n` bytes to host memory that the device can address.
__global__ void __launch_bounds__(kThreads) store_bytes(const unsigned char* from, unsigned char* to, std::size_t n) {
    for (std::size_t i = threadIdx.x; i < n; i += kThreads) to[i] = from[i];
}

}  // namespace
}  // namespace infinity::adam
