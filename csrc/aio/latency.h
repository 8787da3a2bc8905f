// Latencies of pieces: a lock-free histogram.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

namespace infinity::aio {

class Latencies {
  public:
    void add(std::chrono::nanoseconds time) {
        counts_[bucket(static_cast<uint64_t>(time.count()))].fetch_add(1, std::memory_order_relaxed);
    }

    // Returns (nanoseconds, pieces) of every non-empty bucket, ascending, and clears all buckets.
    std::vector<std::pair<double, uint64_t>> take() {
        std::vector<std::pair<double, uint64_t>> buckets;
        for (size_t i = 0; i < counts_.size(); ++i) {
            const uint64_t count = counts_[i].exchange(0, std::memory_order_relaxed);
            if (count > 0) buckets.emplace_back(middle(i), count);
        }
        return buckets;
    }

  private:
    // Each octave has 32 buckets, so that reported values are within 2 % of the measured ones.
    static constexpr unsigned kBits = 5, kSteps = 1U << kBits;

    static size_t bucket(uint64_t nanoseconds) {
        if (nanoseconds < kSteps) return nanoseconds;
        const auto shift = static_cast<unsigned>(std::bit_width(nanoseconds)) - kBits - 1;
        return (size_t{shift} << kBits) + (nanoseconds >> shift);
    }
    static double middle(size_t bucket) {
        if (bucket < kSteps) return static_cast<double>(bucket);
        const unsigned shift = static_cast<unsigned>(bucket >> kBits) - 1;
        const uint64_t low = ((bucket & (kSteps - 1)) | kSteps) << shift;
        return static_cast<double>(low) + static_cast<double>(1ULL << shift) / 2;
    }

    std::array<std::atomic<uint64_t>, (64 - kBits + 1) * kSteps> counts_{};
};

}  // namespace infinity::aio
