// Whole calls: tiles and threads around the kernels. Arguments are checked by the bindings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace infinity::adam {

void update(const Kernels& kernels, Format format, Rule rule, const Arrays& arrays, const Coefficients& coefficients,
            std::size_t n, int threads);

// The floor that memory sets: the bytes of each stream read, and those that `writes` says written back, by turns as an
// update goes over them, with one addition for each word. Spoils what it writes.
struct Stream {
    char* begin;
    std::size_t nbytes;
    bool writes;
};
void bare(const Kernels& kernels, const std::vector<Stream>& streams, int threads);

// Zeros, written by as many threads at once and in such shares as an update of fp32 arrays there would be: the system
// puts a page on the node of the thread that first writes to it.
void first_touch(void* memory, std::size_t nbytes, int threads);

// initial + sum over tiles of kSumTile elements, in order, of scale * scale * (the tile's sum of squares), in fp64.
// The bits depend on the values, n, scale and initial only. A range cut at multiples of kSumTile, each part's result
// passed on as the next part's `initial`, gives the bits of the whole.
double sum_of_squares(const Kernels& kernels, DType dtype, const void* values, std::size_t n, double scale,
                      double initial, int threads);

// Copies a gradient to where it is collected, or adds it to what is there; returns the sum of squares of the result, as
// above with scale 1, in the same pass over memory.
double receive(const Kernels& kernels, const void* source, DType source_dtype, void* target, DType target_dtype,
               std::size_t n, bool add, int threads);

// A hash of the bytes: any change of them changes it, except with probability 2^-64. It is the sum modulo 2^64, over
// words w[i] of 8 bytes, of low32(x) * high32(x) + rotate(w[i], 32) with x = w[i] ^ (i + 1) * kFingerprintKey. The
// product is NH's (Black et al. 1999); the rotated word keeps a factor of zero from hiding the other factor. nbytes is
// a multiple of 8.
std::uint64_t fingerprint(const Kernels& kernels, const void* memory, std::size_t nbytes, int threads);

void split(const Kernels& kernels, const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n,
           int threads);
void join(const Kernels& kernels, const std::uint16_t* param, const std::int16_t* remainder, float* master,
          std::size_t n, int threads);

}  // namespace infinity::adam
