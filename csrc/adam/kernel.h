// The kernel source of all instruction sets. Each translation unit kernel_*.cpp defines a vector type V for its
// instruction set and instantiates make_kernels<V>. Rules that make the results bit-identical in all of them:
//   - Every element sees the same operations in the same order. Fused multiply-adds are explicit (V::fma), and the
//     compiler may not form others (-ffp-contract=off). Operations are correctly rounded: no reciprocal estimates.
//   - A NaN is stored as 0x7FC00000, since the payload that survives an operation depends on the hardware.
//   - The last elements, fewer than a vector, are staged in a zeroed block and processed by the same code.
// Copies, and updates of other arrays than those that they read (drafts), store vectors past the caches, since a store
// to the caches reads its line first.
// Everything here has internal linkage: the linker must not merge a function compiled for AVX-512 with its namesake
// compiled for plain C++. For the same reason no standard library function is called here, except builtins.
#pragma once

#include <cstring>

#include "formats.h"
#include "receive.h"
#include "rules.h"
#include "two.h"
#include "update.h"
#include "update_eight.h"

namespace infinity::adam {
namespace {

// ---- norms and masters ----

// Sums one tile of at most kSumTile values. The square of an fp32 value is exact in fp64, so only additions round.
template <class V, class G>
double sum_of_squares(const void* values, std::size_t count) {
    using Double = typename V::Double;
    constexpr std::size_t kAccumulators = kSumLanes / V::kDoubleWidth;
    Double sums[kAccumulators];
    for (Double& sum : sums) sum = V::zero_double();
    const auto add_lanes = [&sums](const void* base, std::size_t offset) {
        for (std::size_t k = 0; k < kAccumulators; ++k) {
            const Double x = G::load_double(base, offset + k * V::kDoubleWidth);
            sums[k] = V::add_square(sums[k], x);
        }
    };
    std::size_t i = 0;
    for (; i + kSumLanes <= count; i += kSumLanes) add_lanes(values, i);
    if (i < count) {
        using Element = typename G::Element;
        Element rest[kSumLanes] = {};
        std::memcpy(rest, static_cast<const Element*>(values) + i, (count - i) * sizeof(Element));
        add_lanes(rest, 0);
    }
    double lanes[kSumLanes];
    for (std::size_t k = 0; k < kAccumulators; ++k) V::store_double(lanes + k * V::kDoubleWidth, sums[k]);
    for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
        for (std::size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    }
    return lanes[0];
}

template <class V>
void split(const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t begin, std::size_t end) {
    const auto split_vector = [](const float* from, std::uint16_t* high, std::int16_t* low) {
        const typename V::Int bits = V::as_int(V::canonical(V::load(from)));
        V::store_high_16(high, round_high<V>(bits));
        V::store_low_16(reinterpret_cast<std::uint16_t*>(low), bits);
    };
    std::size_t i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) split_vector(master + i, param + i, remainder + i);
    if (i < end) {
        float from[V::kWidth] = {};
        std::uint16_t high[V::kWidth];
        std::int16_t low[V::kWidth];
        std::memcpy(from, master + i, (end - i) * sizeof(float));
        split_vector(from, high, low);
        std::memcpy(param + i, high, (end - i) * 2);
        std::memcpy(remainder + i, low, (end - i) * 2);
    }
}

template <class V>
void join(const std::uint16_t* param, const std::int16_t* remainder, float* master, std::size_t begin,
          std::size_t end) {
    const auto join_vector = [](const std::uint16_t* high, const std::int16_t* low, float* to) {
        V::store(to, V::as_float(V::add_int(V::load_high_16(high), V::load_signed_16(low))));
    };
    std::size_t i = begin;
    for (; i + V::kWidth <= end; i += V::kWidth) join_vector(param + i, remainder + i, master + i);
    if (i < end) {
        float to[V::kWidth];
        std::uint16_t high[V::kWidth] = {};
        std::int16_t low[V::kWidth] = {};
        std::memcpy(high, param + i, (end - i) * 2);
        std::memcpy(low, remainder + i, (end - i) * 2);
        join_vector(high, low, to);
        std::memcpy(master + i, to, (end - i) * sizeof(float));
    }
}

// ---- the bare pass ----

// Tuned for the speed of memory: four vectors at a time, and a prefetch kAhead bytes ahead, without which the switches
// between streams stall.
template <class V>
void touch(float* words, std::size_t n, bool writes) {
    constexpr std::size_t kVectors = 4, kAhead = 2048;
    const typename V::Int one = V::set_int(1);
    typename V::Int sums[kVectors] = {one, one, one, one};
    const auto touch_vector = [one, writes](float* at, typename V::Int& sum) {
        const typename V::Int x = V::as_int(V::load(at));
        if (writes) {
            V::store(at, V::as_float(V::add_int(x, one)));
        } else {
            sum = V::add_int(sum, x);
        }
    };
    std::size_t i = 0;
    for (; i + kVectors * V::kWidth <= n; i += kVectors * V::kWidth) {
        for (std::size_t k = 0; k < kVectors; ++k) {
            __builtin_prefetch(reinterpret_cast<const char*>(words + i + k * V::kWidth) + kAhead);
            touch_vector(words + i + k * V::kWidth, sums[k]);
        }
    }
    for (; i < n; i += V::kWidth) touch_vector(words + i, sums[0]);
    asm volatile("" : : "m"(sums));  // keeps the reads, whose sums are unused
}

// ---- fingerprints ----

// Independent lanes let the compiler vectorize the loop. Additions modulo 2^64 are associative.
template <class V>
std::uint64_t fingerprint(const std::uint64_t* words, std::size_t first, std::size_t count) {
    constexpr std::size_t kLanes = 32;
    const auto word = [](std::uint64_t w, std::uint64_t key) {
        const std::uint64_t x = w ^ key;
        return (x & 0xFFFFFFFFu) * (x >> 32) + (w << 32 | w >> 32);
    };
    std::uint64_t sums[kLanes] = {}, keys[kLanes];
    for (std::size_t k = 0; k < kLanes; ++k) keys[k] = (first + k + 1) * kFingerprintKey;
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (std::size_t k = 0; k < kLanes; ++k) {
            sums[k] += word(words[i + k], keys[k]);
            keys[k] += kLanes * kFingerprintKey;
        }
    }
    std::uint64_t total = 0;
    for (std::size_t k = 0; k < kLanes; ++k) total += sums[k];
    for (; i < count; ++i) total += word(words[i], (first + i + 1) * kFingerprintKey);
    return total;
}

// Copies words and returns their fingerprint. Each block is hashed and written while the first cache holds it. Vectors
// are written past the caches, since other writes read each line first.
template <class V>
std::uint64_t copy(const std::uint64_t* from, std::uint64_t* to, std::size_t first, std::size_t count) {
    constexpr std::size_t kBlockWords = 512;
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count; i += kBlockWords) {
        const std::size_t n = count - i < kBlockWords ? count - i : kBlockWords;
        total += fingerprint<V>(from + i, first + i, n);
        if (V::kPastCaches && n == kBlockWords && reinterpret_cast<std::uintptr_t>(to) % kLine == 0) {
            const auto* const source = reinterpret_cast<const float*>(from + i);
            auto* const target = reinterpret_cast<float*>(to + i);
            for (std::size_t k = 0; k < 2 * kBlockWords; k += V::kWidth) V::store(target + k, V::load(source + k));
        } else {
            std::memcpy(to + i, from + i, n * sizeof(std::uint64_t));
        }
    }
    V::end_stores();
    return total;
}

// ---- the table ----

template <class V, class F, class R>
void update_with(const Arrays& a, const Coefficients& c, std::size_t begin, std::size_t end) {
    switch (a.moments) {
        case Moments::kFp32:
            return update_plainly<V, F, MomentsFp32<V>, R>(a, c, begin, end);
        case Moments::kBf16:
            if constexpr (F::kMasterBytes == 2) {
                using E = typename V::Interleaved;
                if (a.grad_dtype == DType::kBf16) {
                    return update_plainly<E, FormatRemainder<E>, MomentsBf16<E>, R>(a, c, begin, end);
                }
            }
            return update_plainly<V, F, MomentsBf16<V>, R>(a, c, begin, end);
        case Moments::kEight:
            return update_blocks<V, F, R>(a, c, begin, end);
    }
}

template <class V, class F, class... R>
constexpr void fill_rules(UpdateFn (&row)[kMostRules], ListOf<R...>) {
    UpdateFn* next = row;
    ((*next++ = update_with<V, F, R>), ...);
}

template <class U>
constexpr void fill_updates(UpdateFn (&table)[kFormats][kMostRules]) {
    fill_rules<U, FormatFp32<U>>(table[static_cast<std::size_t>(Format::kFp32)], Rules{});
    fill_rules<U, FormatRemainder<U>>(table[static_cast<std::size_t>(Format::kRemainder)], Rules{});
    fill_rules<U, FormatMaster<U, false>>(table[static_cast<std::size_t>(Format::kMaster)], Rules{});
    fill_rules<U, FormatMaster<U, true>>(table[static_cast<std::size_t>(Format::kMasterFp16)], Rules{});
}

// V: a vector of the instruction set. P: one that is stored past the caches. U, UP: the vector types of the kernels
// over flat arrays.
template <class V, class P, class U = VectorPair<V>, class UP = VectorPair<P>>
constexpr Kernels make_kernels() {
    Kernels k{};
    fill_updates<U>(k.update);
    fill_updates<UP>(k.draft);
    k.sum_of_squares[static_cast<std::size_t>(DType::kFp32)] = sum_of_squares<V, GradFp32<V>>;
    k.sum_of_squares[static_cast<std::size_t>(DType::kBf16)] = sum_of_squares<V, GradBf16<V>>;
    k.sum_of_squares[static_cast<std::size_t>(DType::kFp16)] = sum_of_squares<V, GradFp16<V>>;
    k.receive[static_cast<std::size_t>(DType::kFp32)] = receive<U, IntoFp32<U>>;
    k.receive[static_cast<std::size_t>(DType::kBf16)] = receive<U, IntoBf16<U>>;
    k.receive[static_cast<std::size_t>(DType::kFp16)] = receive<U, IntoFp16<U>>;
    k.split = split<U>;
    k.join = join<U>;
    k.touch = touch<V>;
    k.fingerprint = fingerprint<V>;
    k.copy = copy<P>;
    return k;
}

}  // namespace
}  // namespace infinity::adam
