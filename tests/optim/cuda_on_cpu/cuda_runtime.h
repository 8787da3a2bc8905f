// Enough of CUDA for a host compiler to compile csrc/adam/cuda, so that its kernels run, and are tested, on the CPU.
//
// Each thread of a block is a fiber with a stack of its own; blocks run one after another. Fibers take turns at the
// operations where a GPU's threads meet (__syncthreads, shuffles of a warp), from the first to the last and back, so
// that one may be far ahead of another. A meeting that some thread misses is an error, as it would be a hang or
// nonsense on a GPU. What this cannot show: a device's arithmetic, memory model and limits.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct dim3 {
    unsigned x, y = 1, z = 1;
    dim3(unsigned x = 1) : x(x) {}
};
inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

constexpr std::size_t kStack = 128 << 10;
constexpr unsigned kWarp = 32;
constexpr unsigned kMostBlocks = 2;  // so that small arrays take several turns of the kernels' loops

// Where `size` threads wait for each other.
struct Meeting {
    unsigned size = 0, arrived = 0, round = 0;
};

struct Fiber {
    ucontext_t context{};
    bool done = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    std::vector<std::uint64_t> slots;  // one for each thread
    Meeting all;
    ucontext_t scheduler{};
    std::function<void()> kernel;
    bool progress = false;
};
inline Block block;

inline void meet(Meeting& meeting) {
    const unsigned self = threadIdx.x, round = meeting.round;
    block.progress = true;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.round;
    }
    while (meeting.round == round) swapcontext(&block.fibers[self].context, &block.scheduler);
}

// Returns the value of lane `from` of the calling thread's warp.
template <class T>
T exchange(T value, unsigned from) {
    Meeting& warp = block.warps[threadIdx.x / kWarp];
    std::uint64_t* const slots = &block.slots[threadIdx.x / kWarp * kWarp];
    std::memcpy(slots + threadIdx.x % kWarp, &value, sizeof value);
    meet(warp);
    std::memcpy(&value, slots + from, sizeof value);
    meet(warp);  // before anybody brings the next
    return value;
}

inline void body() {
    const unsigned self = threadIdx.x;
    block.kernel();
    block.fibers[self].done = block.progress = true;
}

// Returns true if every thread of block number `index` ended.
inline bool run_block(unsigned index, unsigned threads, char* stacks) {
    blockIdx.x = index;
    block.fibers = std::vector<Fiber>(threads);
    block.warps.assign(threads / kWarp, Meeting{kWarp});
    block.slots.assign(threads, 0);
    block.all = Meeting{threads};
    for (unsigned k = 0; k < threads; ++k) {
        ucontext_t& context = block.fibers[k].context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks + k * kStack;
        context.uc_stack.ss_size = kStack;
        context.uc_link = &block.scheduler;
        makecontext(&context, body, 0);
    }
    bool forwards = false;
    do {
        block.progress = false;
        forwards = !forwards;
        for (unsigned k = 0; k < threads; ++k) {
            threadIdx.x = forwards ? k : threads - 1 - k;
            Fiber& fiber = block.fibers[threadIdx.x];
            if (!fiber.done) swapcontext(&block.scheduler, &fiber.context);
        }
    } while (block.progress);
    for (const Fiber& fiber : block.fibers) {
        if (!fiber.done) return false;
    }
    return true;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet(cuda_on_cpu::block.all); }

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned lanes) {
    return cuda_on_cpu::exchange(value, threadIdx.x % cuda_on_cpu::kWarp ^ lanes);
}

template <class T>
T __shfl_down_sync(unsigned, T value, unsigned lanes) {
    const unsigned lane = threadIdx.x % cuda_on_cpu::kWarp;
    return cuda_on_cpu::exchange(value, lane + lanes < cuda_on_cpu::kWarp ? lane + lanes : lane);
}

inline unsigned long long atomicAdd(unsigned long long* sum, unsigned long long value) {
    return *sum += value, *sum - value;
}

// ---- the run-time library ----

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes;
    cudaStream_t stream;
};

inline const char* cudaGetErrorName(cudaError_t) { return "cuda_on_cpu"; }
inline const char* cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorInvalidDevice ? "invalid device ordinal" : "some threads missed a meeting";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    return *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0, cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
    const unsigned threads = config->blockDim.x, asked = config->gridDim.x;
    static const std::unique_ptr<char[]> stacks(new char[1024 * cuda_on_cpu::kStack]);
    blockDim = config->blockDim;
    gridDim.x = asked < cuda_on_cpu::kMostBlocks ? asked : cuda_on_cpu::kMostBlocks;
    cuda_on_cpu::block.kernel = [=] { kernel(static_cast<Parameters>(arguments)...); };
    for (unsigned k = 0; k < gridDim.x; ++k) {
        if (!cuda_on_cpu::run_block(k, threads, stacks.get())) return cudaErrorLaunchFailure;
    }
    return cudaSuccess;
}
