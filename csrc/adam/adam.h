// Complete calls: divide arrays into tiles for threads and kernels. The bindings check the arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "thread_pool.h"
#include "types.h"

namespace infinity::adam {

// One step. Writes past the caches, if it reads other arrays than it writes.
void update(const Kernels& kernels, Format format, Rule rule, const Arrays& arrays, const Coefficients& coefficients,
            std::size_t n, int threads, Priority priority);

// Performs all calls in one job of the pool, which wakes its threads once. Calls that share memory run in their order.
void update_all(const Kernels& kernels, const std::vector<UpdateCall>& calls, int threads);

// Lower bound of an update's time, set by memory: reads each stream and writes back those with `writes`, in an update's
// access pattern, with one addition per word. Destroys the data of written streams.
struct Stream {
    char* begin;
    std::size_t nbytes;
    bool writes;
};
void bare(const Kernels& kernels, const std::vector<Stream>& streams, int threads);

// Writes zeros with the threads and shares of an update of fp32 arrays, since Linux places a page on the NUMA node of
// the thread that first writes to it.
void first_touch(void* memory, std::size_t nbytes, int threads);

// Returns initial + sum over tiles of kSumTile elements, in order, of scale * scale * (the tile's sum of squares), in
// fp64. The bits depend on the values, n, scale and initial only. A range split at multiples of kSumTile, with each
// part's result as the next part's `initial`, is bit-identical to a single call.
double sum_of_squares(const Kernels& kernels, DType dtype, const void* values, std::size_t n, double scale,
                      double initial, int threads);

// Copies a gradient to `target`, or adds it there, and returns initial + the sum of squares of the result, as above
// with scale 1, in the same pass over memory.
double receive(const Kernels& kernels, const void* source, DType source_dtype, void* target, DType target_dtype,
               std::size_t n, bool add, double initial, int threads);

// Returns a hash of the bytes, with a collision probability of 2^-64. It is the sum modulo 2^64, over words w[i] of 8
// bytes, of low32(x) * high32(x) + rotate(w[i], 32) with x = w[i] ^ (i + 1) * kFingerprintKey. The product is NH's
// (Black et al. 1999). The rotated word prevents a factor of zero from hiding the other factor. nbytes is a multiple of
// 8.
std::uint64_t fingerprint(const Kernels& kernels, const void* memory, std::size_t nbytes, int threads);

// Copies the bytes, which must not overlap, and returns their fingerprint, in one pass over memory.
std::uint64_t copy(const Kernels& kernels, const void* source, void* target, std::size_t nbytes, int threads);

void split(const Kernels& kernels, const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n,
           int threads);
void join(const Kernels& kernels, const std::uint16_t* param, const std::int16_t* remainder, float* master,
          std::size_t n, int threads);

}  // namespace infinity::adam
