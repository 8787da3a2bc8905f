// What the bindings call: kernels put on a stream, nothing waited for. Addresses are of the device's memory. What CUDA
// refuses is a std::runtime_error with CUDA's own words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../types.h"

namespace infinity::adam::cuda {

// A cudaStream_t of device number `device`.
struct Stream {
    int device;
    std::uintptr_t handle;
};

void update(Format format, Rule rule, const Arrays& arrays, const Coefficients& coefficients, std::size_t n,
            const Stream& stream);

// As adam.h defines it, to `out`. tiles: memory for the sums of ceil(n / kSumTile) tiles. initial_at: where `initial`
// is on the device, or null.
struct Sum {
    const void* values;
    std::size_t n;
    DType dtype;
    double scale, initial;
    const double* initial_at;
    double *tiles, *out;
};
void sum_of_squares(const Sum& sum, const Stream& stream);

void split(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n, const Stream& stream);
void join(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t n,
          const Stream& stream);

// 0 if there are none, or no driver for them: then `refusal` is what CUDA says.
int device_count();
std::string refusal();
// As 10 * major + minor.
int compute_capability(int device);

}  // namespace infinity::adam::cuda
