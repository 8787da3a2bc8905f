// Reads and writes flat arrays in runs of kRun consecutive elements per thread, one access each, so that a warp
// accesses consecutive bytes for any element width. Runs at an array's end, and runs of arrays aligned only to their
// elements, are accessed element by element.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../formats.h"
#include "../plain.h"

namespace infinity::adam {
namespace {

constexpr int kRun = 4;  // 16 bytes of fp32, the widest access
constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;

// The elements of a run: `count` of kRun from element i on. whole: all of them, in one access.
struct Extent {
    std::size_t i;
    int count;
    bool whole;

    __device__ Extent(std::size_t i, std::size_t n, bool aligned)
        : i(i), count(i < n ? static_cast<int>(n - i < kRun ? n - i : kRun) : 0), whole(aligned && count == kRun) {}
};

// The type of one access, which may alias the elements.
template <std::size_t bytes>
struct [[gnu::may_alias]] alignas(bytes) Word {
    std::uint32_t words[bytes / 4];
};

template <class T>
__device__ void load_run(T (&to)[kRun], const void* array, const Extent& e) {
    const T* const from = static_cast<const T*>(array) + e.i;
    if (e.whole) {
        reinterpret_cast<Word<sizeof to>&>(to) = *reinterpret_cast<const Word<sizeof to>*>(from);
        return;
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) to[k] = k < e.count ? from[k] : T{};
}

template <class T>
__device__ void store_run(void* array, const T (&from)[kRun], const Extent& e) {
    T* const to = static_cast<T*>(array) + e.i;
    if (e.whole) {
        *reinterpret_cast<Word<sizeof from>*>(to) = reinterpret_cast<const Word<sizeof from>&>(from);
        return;
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
        if (k < e.count) to[k] = from[k];
    }
}

__device__ inline void load_grads(float (&to)[kRun], const Arrays& a, const Extent& e) {
    if (a.grad_dtype == DType::kFp32) return load_run(to, a.grad, e);
    alignas(16) std::uint16_t halves[kRun];
    load_run(halves, a.grad, e);
#pragma unroll
    for (int k = 0; k < kRun; ++k) to[k] = load_grad<Plain>(a.grad_dtype, halves, k);
}

template <std::size_t bytes>
using Element = std::conditional_t<bytes == 1, std::uint8_t, std::conditional_t<bytes == 2, std::uint16_t, float>>;

template <int k>
struct Number {
    static constexpr int value = k;
};
// Calls body(Number<0>()), ..., body(Number<count - 1>()): a loop whose index is a constant.
template <int count, class Body>
__device__ inline void each(const Body& body) {
    if constexpr (count > 0) {
        each<count - 1>(body);
        body(Number<count - 1>());
    }
}

// One run of all arrays, in registers.
template <class F, std::size_t moment_bytes, int moments>
struct Registers {
    static constexpr bool kHasMaster = F::kMasterBytes != 0;

    Extent extent;
    alignas(16) typename F::Param param[kRun];
    alignas(16) Element<kHasMaster ? F::kMasterBytes : 4> master[kRun];
    alignas(16) float grad[kRun];
    alignas(16) Element<moment_bytes> moment[moments][kRun];

    __device__ Registers(const Arrays& a, const Extent& e) : extent(e) {
        if constexpr (F::kReadsParam) load_run(param, a.param, e);
        if constexpr (kHasMaster) load_run(master, a.master, e);
        load_grads(grad, a, e);
#pragma unroll
        for (int k = 0; k < moments; ++k) load_run(moment[k], a.moment[k], e);
    }
    // Returns the registers as arrays for the formats.
    __device__ Arrays values() {
        Arrays arrays{};
        arrays.from.param = arrays.param = param;
        arrays.from.master = arrays.master = master;
        return arrays;
    }
    __device__ void store_values(const Arrays& a) const {
        store_run(a.param, param, extent);
        if constexpr (kHasMaster) store_run(a.master, master, extent);
    }
    __device__ void store_moments(const Arrays& a) const {
#pragma unroll
        for (int k = 0; k < moments; ++k) store_run(a.moment[k], moment[k], extent);
    }
};

}  // namespace
}  // namespace infinity::adam
