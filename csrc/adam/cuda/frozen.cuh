// CUDA kernel for frozen parameters in a code (../frozen.h).
#pragma once

#include "../frozen.h"
#include "runs.cuh"

namespace infinity::adam {
namespace {

constexpr unsigned kOfThread = kRecord / kThreads;  // elements of a record that a thread decodes
constexpr unsigned kThreadsOfGroup = kGroup / kOfThread;
static_assert(kOfThread == 8);

template <DType dtype>
using Value = std::conditional_t<dtype == DType::kFp32, float, std::uint16_t>;

template <DType dtype>
__device__ float to_float(Value<dtype> value) {
    if constexpr (dtype == DType::kFp32) {
        return value;
    } else if constexpr (dtype == DType::kBf16) {
        return from_bf16(value);
    } else {
        return Plain::load_fp16(&value);
    }
}

template <DType dtype>
__device__ Value<dtype> to_value(float x) {
    if constexpr (dtype == DType::kFp32) {
        return x;
    } else if constexpr (dtype == DType::kBf16) {
        return to_bf16(x);
    } else {
        std::uint16_t half;
        Plain::store_fp16(&half, x);
        return half;
    }
}

// Decodes `count` records, one per block at a time. If a record's elements overwrite it, `count` is 1: the block has
// read it before it writes. records and values are aligned to 16 bytes.
template <Code code, DType dtype>
__global__ void __launch_bounds__(kThreads)
    decode_records(const std::uint8_t* records, Value<dtype>* values, std::size_t count) {
    __shared__ float levels[16];  // a bank for each, so that the threads of a warp read different ones at once
    if (code == Code::kNf4 && threadIdx.x < 16) levels[threadIdx.x] = nf4_level(threadIdx.x);
    const unsigned group = threadIdx.x / kThreadsOfGroup, part = threadIdx.x % kThreadsOfGroup;
    for (std::size_t i = blockIdx.x; i < count; i += gridDim.x) {
        const std::uint8_t* const record = records + i * record_bytes(code, dtype);
        const float scale = to_float<dtype>(reinterpret_cast<const Value<dtype>*>(record + code_bytes(code))[group]);
        alignas(8) std::uint8_t codes[code == Code::kEight ? 8 : 4];
        reinterpret_cast<Word<sizeof codes>&>(codes) = reinterpret_cast<const Word<sizeof codes>*>(record)[threadIdx.x];
        __syncthreads();
        alignas(16) Value<dtype> found[kOfThread];
        Value<dtype>* const to = values + i * kRecord + group * kGroup;
        if constexpr (code == Code::kEight) {
#pragma unroll
            for (unsigned k = 0; k < kOfThread; ++k) {
                found[k] = to_value<dtype>(static_cast<float>(static_cast<std::int8_t>(codes[k])) * kEightStep * scale);
            }
            reinterpret_cast<Word<sizeof found>*>(to)[part] = reinterpret_cast<const Word<sizeof found>&>(found);
        } else {
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                found[k] = to_value<dtype>(levels[codes[k] & 15u] * scale);
                found[k + 4] = to_value<dtype>(levels[codes[k] >> 4] * scale);
            }
            using Half = Word<sizeof found / 2>;
            reinterpret_cast<Half*>(to)[part] = reinterpret_cast<const Half*>(found)[0];
            reinterpret_cast<Half*>(to + kGroup / 2)[part] = reinterpret_cast<const Half*>(found)[1];
        }
    }
}

}  // namespace
}  // namespace infinity::adam
