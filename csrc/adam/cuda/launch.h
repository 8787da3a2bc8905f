// Launches kernels on a stream, without synchronization. Addresses are in the device's memory. CUDA errors throw
// std::runtime_error with CUDA's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../frozen.h"
#include "../types.h"

namespace infinity::adam::cuda {

// A cudaStream_t of device number `device`.
struct Stream {
    int device;
    std::uintptr_t handle;
};

void update(Format format, Rule rule, const Arrays& arrays, const Coefficients& coefficients, std::size_t n,
            const Stream& stream);

// Arguments of a sum, defined in adam.h, that is written to `out`. tiles: memory for ceil(n / kSumTile) sums of tiles.
// initial_at: device address of `initial`, or null.
struct Sum {
    const void* values;
    std::size_t n;
    DType dtype;
    double scale, initial;
    const double* initial_at;
    double *tiles, *out;
};
void sum_of_squares(const Sum& sum, const Stream& stream);

// Adds the fingerprint of the bytes, defined in adam.h, to `sum`, modulo 2^64. nbytes: a multiple of 8.
void fingerprint(const void* memory, std::size_t nbytes, std::uint64_t* sum, const Stream& stream);

// Writes a few bytes to registered host memory by a kernel of one block, past the copy engines.
void store(const void* from, void* host, std::size_t nbytes, const Stream& stream);

void split(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n, const Stream& stream);
void join(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t n,
          const Stream& stream);

// Decodes n frozen parameters; see ../frozen.h. Records that end where the values end are decoded in several launches.
void decode(Code code, DType dtype, const std::uint8_t* records, void* values, std::size_t n, const Stream& stream);

// Returns 0 if there is no device or no driver; `refusal` returns CUDA's error then.
int device_count();
std::string refusal();
// Returns 10 * major + minor.
int compute_capability(int device);

}  // namespace infinity::adam::cuda
