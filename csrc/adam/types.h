// Types of kernels, dispatcher and bindings. Contains no code, so that the layout is the same in every translation
// unit, for any instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

// Marks functions used in kernels, which nvcc compiles for host and device.
#ifdef __CUDACC__
#define INFINITY_FN __host__ __device__
#else
#define INFINITY_FN
#endif

namespace infinity::adam {

// Formats of a parameter.                  param   master     master value
enum class Format : std::uint8_t {
    kFp32 = 0,        //                      fp32    -          param itself
    kRemainder = 1,   //                      bf16    int16      bits = (param << 16) + sign-extended remainder
    kMaster = 2,      //                      bf16    fp32       master; param is a rounded copy, written only
    kMasterFp16 = 3,  //                      fp16    fp32       likewise
};
inline constexpr std::size_t kFormats = 4;

enum class DType : std::uint8_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };
inline constexpr std::size_t kDTypes = 3;

// Formats of the optimizer's moments; see codec.h.
enum class Moments : std::uint8_t {
    kFp32 = 0,
    kBf16 = 1,   // rounded stochastically
    kEight = 2,  // 8 bits each and one scale byte per kBlock elements, rounded stochastically
};
inline constexpr std::size_t kMomentFormats = 3;

// Elements that share a scale in Moments::kEight. Arrays start at a block.
inline constexpr std::size_t kBlock = 256;

// The number of an update rule in rules.h, and the most that any rule has.
enum class Rule : std::uint8_t {};
inline constexpr std::size_t kMostRules = 8, kMostConstants = 12;
inline constexpr int kMostMoments = 3;

// The arrays that an update reads. In place, they are those that it writes.
struct Sources {
    const void* param;
    const void* master;
    const void* moment[kMostMoments];
    const std::uint8_t* scale[kMostMoments];
};

// Flat arrays of n elements each, which are written, except for the gradient.
struct Arrays {
    void* param;
    void* master;  // unused in Format::kFp32
    const void* grad;
    void* moment[kMostMoments];         // null beyond those of the rule
    std::uint8_t* scale[kMostMoments];  // Moments::kEight: a byte per block
    DType grad_dtype;
    Moments moments;
    Sources from;
};

// Random bits of stochastic rounding. They depend only on the key and the number of the element, and are therefore the
// same for all tiles, threads, ranks and devices.
struct Random {
    std::uint64_t key;
    std::uint64_t first;  // number of the arrays' first element
};

// Values that are equal for all elements of a call. rule: bytes of the rule's struct, see rules.h.
struct Coefficients {
    alignas(8) unsigned char rule[64];
    Random random;
};

// One validated update.
struct UpdateCall {
    Format format;
    Rule rule;
    Arrays arrays;
    Coefficients coefficients;
    std::size_t n;
};

// Elements per tile of the sum of squares: part of its definition, see sum_of_squares in adam.h.
inline constexpr std::size_t kSumTile = 4096;
// fp64 lanes within such a tile: element i is added to lane i % 32, lanes are then added pairwise.
inline constexpr std::size_t kSumLanes = 32;

// Multiplier of a word's number (from 1) in a fingerprint: 2^64 divided by the golden ratio.
inline constexpr std::uint64_t kFingerprintKey = 0x9E3779B97F4A7C15u;

// [begin, end) of the arrays; begin is a multiple of kBlock.
using UpdateFn = void (*)(const Arrays&, const Coefficients&, std::size_t begin, std::size_t end);
using SumFn = double (*)(const void* values, std::size_t count);  // count <= kSumTile
// Copies `count` values of `dtype` to the target, or adds them to it; count <= kSumTile.
using ReceiveFn = void (*)(const void* source, DType dtype, void* target, std::size_t count, bool add);
using SplitFn = void (*)(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t begin,
                         std::size_t end);
using JoinFn = void (*)(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t begin,
                        std::size_t end);
// Reads n words with one addition each, and writes them back if `writes`; n is a multiple of 16.
using TouchFn = void (*)(float* words, std::size_t n, bool writes);

// Returns the fingerprint of `count` words from word number `first` on; see fingerprint in adam.h.
using FingerprintFn = std::uint64_t (*)(const std::uint64_t* words, std::size_t first, std::size_t count);
// Copies these words and returns their fingerprint.
using CopyFn = std::uint64_t (*)(const std::uint64_t* from, std::uint64_t* to, std::size_t first, std::size_t count);

// Bytes of a line of the caches.
inline constexpr std::size_t kLine = 64;

// The functions of one instruction set.
struct Kernels {
    UpdateFn update[kFormats][kMostRules];
    UpdateFn draft[kFormats][kMostRules];  // of other arrays than those that it reads, at multiples of kLine
    SumFn sum_of_squares[kDTypes];
    ReceiveFn receive[kDTypes];  // by the target's type
    SplitFn split;
    JoinFn join;
    TouchFn touch;
    FingerprintFn fingerprint;
    CopyFn copy;
};

}  // namespace infinity::adam
