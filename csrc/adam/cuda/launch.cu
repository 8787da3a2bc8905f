#include "launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "fingerprint.cuh"
#include "frozen.cuh"
#include "norms.cuh"
#include "results.cuh"
#include "update.cuh"

namespace infinity::adam::cuda {
namespace {

constexpr std::size_t kMostBlocks = std::size_t{1}
                                    << 20;  // of a grid; with more elements, each block processes several parts

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that later calls do not report it
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                             ")");
}

// Makes the stream's device current for one scope.
class OnDevice {
  public:
    explicit OnDevice(int device) : wanted_(device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != wanted_) check(cudaSetDevice(wanted_), "cudaSetDevice");
    }
    ~OnDevice() {
        if (before_ != wanted_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0, wanted_;
};

// Launches enough blocks for `n` elements, with `each` elements per block.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), std::size_t n, std::size_t each, const Stream& stream,
            Arguments... arguments) {
    const OnDevice on(stream.device);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min((n + each - 1) / each, kMostBlocks)));
    config.blockDim = dim3(kThreads);
    config.stream = reinterpret_cast<cudaStream_t>(stream.handle);
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a kernel");
}

// Returns true if an array with elements of `width` bytes is aligned to runs.
bool runs_of(std::size_t width, const void* array) {
    return reinterpret_cast<std::uintptr_t>(array) % (kRun * width) == 0;
}

bool aligned(Format format, const Arrays& a) {
    const std::size_t moment = a.moments == Moments::kEight ? 1 : a.moments == Moments::kBf16 ? 2 : 4;
    return runs_of(format == Format::kFp32 ? 4 : 2, a.param) &&
           runs_of(format == Format::kRemainder ? 2 : 4, a.master) && runs_of(grad_bytes(a.grad_dtype), a.grad) &&
           std::all_of(std::begin(a.moment), std::end(a.moment),
                       [moment](const void* array) { return runs_of(moment, array); });  // unused addresses are null
}

// ---- the table, as in kernel.h ----

using UpdateKernel = void (*)(Arrays, Coefficients, std::size_t, bool);

template <class F, class R>
UpdateKernel kernel_with(Moments moments) {
    switch (moments) {
        case Moments::kFp32:
            return update_runs<F, MomentsFp32<Plain>, R>;
        case Moments::kBf16:
            return update_runs<F, MomentsBf16<Plain>, R>;
        case Moments::kEight:
            return update_blocks<F, R>;
    }
    throw std::logic_error("moments");
}

template <class F, class... R>
UpdateKernel kernel_of(Rule rule, Moments moments, ListOf<R...>) {
    constexpr UpdateKernel (*kernels[])(Moments) = {kernel_with<F, R>...};
    return kernels[static_cast<std::size_t>(rule)](moments);
}

UpdateKernel kernel_of(Format format, Rule rule, Moments moments) {
    switch (format) {
        case Format::kFp32:
            return kernel_of<FormatFp32<Plain>>(rule, moments, Rules{});
        case Format::kRemainder:
            return kernel_of<FormatRemainder<Plain>>(rule, moments, Rules{});
        case Format::kMaster:
            return kernel_of<FormatMaster<Plain, false>>(rule, moments, Rules{});
        case Format::kMasterFp16:
            return kernel_of<FormatMaster<Plain, true>>(rule, moments, Rules{});
    }
    throw std::logic_error("format");
}

}  // namespace

void update(Format format, Rule rule, const Arrays& arrays, const Coefficients& coefficients, std::size_t n,
            const Stream& stream) {
    if (n == 0) return;
    const std::size_t each = arrays.moments == Moments::kEight ? kThreads / kWarp * kBlock : kThreads * kRun;
    launch(kernel_of(format, rule, arrays.moments), n, each, stream, arrays, coefficients, n, aligned(format, arrays));
}

void sum_of_squares(const Sum& s, const Stream& stream) {
    constexpr std::size_t kEach = kThreads / kWarp * kSumTile;
    if (s.n > 0) {
        void (*kernel)(const void*, std::size_t, double*) = sum_tiles<GradFp32<Plain>>;
        if (s.dtype == DType::kBf16) kernel = sum_tiles<GradBf16<Plain>>;
        if (s.dtype == DType::kFp16) kernel = sum_tiles<GradFp16<Plain>>;
        launch(kernel, s.n, kEach, stream, s.values, s.n, s.tiles);
    }
    const std::size_t tiles = (s.n + kSumTile - 1) / kSumTile;
    launch(add_tiles, 1, 1, stream, s.tiles, tiles, s.scale, s.initial, s.initial_at, s.out);
}

void fingerprint(const void* memory, std::size_t nbytes, std::uint64_t* sum, const Stream& stream) {
    if (nbytes == 0) return;
    const bool aligned = reinterpret_cast<std::uintptr_t>(memory) % sizeof(Pair) == 0;
    launch(add_words, nbytes / sizeof(std::uint64_t), kThreads * kWordsOfThread, stream,
           static_cast<const std::uint64_t*>(memory), nbytes / sizeof(std::uint64_t), aligned,
           reinterpret_cast<unsigned long long*>(sum));
}

void store(const void* from, void* host, std::size_t nbytes, const Stream& stream) {
    if (nbytes == 0) return;
    const OnDevice on(stream.device);
    void* to = nullptr;
    check(cudaHostGetDevicePointer(&to, host, 0), "cudaHostGetDevicePointer");
    launch(store_bytes, 1, 1, stream, static_cast<const unsigned char*>(from), static_cast<unsigned char*>(to), nbytes);
}

void split(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n, const Stream& stream) {
    if (n == 0) return;
    const bool aligned = runs_of(4, master) && runs_of(2, param) && runs_of(2, remainder);
    launch(split_runs, n, kThreads * kRun, stream, master, param, remainder, n, aligned);
}

void join(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t n,
          const Stream& stream) {
    if (n == 0) return;
    const bool aligned = runs_of(4, master) && runs_of(2, param) && runs_of(2, remainder);
    launch(join_runs, n, kThreads * kRun, stream, param, remainder, master, n, aligned);
}

namespace {

template <Code code, DType dtype>
void decode_as(const std::uint8_t* records, void* values, std::size_t n, const Stream& stream) {
    constexpr std::size_t kBytes = record_bytes(code, dtype), kDecoded = kRecord * sizeof(Value<dtype>);
    const std::size_t count = n / kRecord;
    const bool in_place = records + count * kBytes == static_cast<const std::uint8_t*>(values) + count * kDecoded;
    for (std::size_t i = 0; i < count;) {
        const std::size_t some = in_place ? records_at_once(i, count, kBytes, kDecoded) : count;
        launch(decode_records<code, dtype>, some, 1, stream, records + i * kBytes,
               static_cast<Value<dtype>*>(values) + i * kRecord, some);
        i += some;
    }
}

template <Code code>
void decode_as(DType dtype, const std::uint8_t* records, void* values, std::size_t n, const Stream& stream) {
    if (dtype == DType::kFp32) return decode_as<code, DType::kFp32>(records, values, n, stream);
    if (dtype == DType::kBf16) return decode_as<code, DType::kBf16>(records, values, n, stream);
    decode_as<code, DType::kFp16>(records, values, n, stream);
}

}  // namespace

void decode(Code code, DType dtype, const std::uint8_t* records, void* values, std::size_t n, const Stream& stream) {
    if (code == Code::kEight) return decode_as<Code::kEight>(dtype, records, values, n, stream);
    decode_as<Code::kNf4>(dtype, records, values, n, stream);
}

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

std::string refusal() {
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "there is no CUDA driver";
    cudaError_t status = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (status == cudaSuccess && count == 0) status = cudaErrorNoDevice;
    return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

int compute_capability(int device) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return 10 * major + minor;
}

}  // namespace infinity::adam::cuda
