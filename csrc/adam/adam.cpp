#include "adam.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "float_environment.h"
#include "rules.h"
#include "thread_pool.h"

namespace infinity::adam {
namespace {

constexpr std::size_t kTile = 32768;      // elements that a thread claims at a time
constexpr std::size_t kCached = 4 << 20;  // bytes of a copy that caches keep for those who read it
constexpr std::size_t kInline = 65536;    // below this a second thread does not pay off

int threads_for(std::size_t n, int threads) {
    if (n < kInline) return 1;
    return threads > 0 ? threads : default_threads();
}

// Calls body(begin, end) over [0, n), split at multiples of `tile`, in the default floating-point environment.
template <class Body>
void for_tiles(std::size_t n, std::size_t tile, int threads, const Body& body, Priority priority = Priority::kNormal) {
    auto piece = [&](std::size_t k) {
        const FloatEnvironment environment;
        body(k * tile, std::min(n, (k + 1) * tile));
    };
    parallel_for((n + tile - 1) / tile, threads, priority, piece);
}

// Not inlined, for the reason in coefficients.cpp.
[[gnu::noinline]] double add_in_order(const std::vector<double>& tiles, double scale, double initial) {
    double total = initial;
    for (const double tile : tiles) total += tile * scale * scale;
    return std::isnan(total) ? std::numeric_limits<double>::quiet_NaN() : total;
}

std::size_t bytes_of(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

// Returns the sum of sum(at, count) over tiles of kSumTile elements.
template <class Sum>
double sum_tiles(std::size_t n, int threads, double scale, double initial, const Sum& sum) {
    std::vector<double> tiles((n + kSumTile - 1) / kSumTile);
    static_assert(kTile % kSumTile == 0);
    const auto sum_tile = [&](std::size_t begin, std::size_t end) {
        for (std::size_t at = begin; at < end; at += kSumTile) {
            tiles[at / kSumTile] = sum(at, std::min(kSumTile, end - at));
        }
    };
    for_tiles(n, kTile, threads_for(n, threads), sum_tile, Priority::kUrgent);
    const FloatEnvironment environment;
    return add_in_order(tiles, scale, initial);
}

// Returns true if a call writes memory that another one uses. Arrays of one call are disjoint.
bool share_memory(const std::vector<UpdateCall>& calls) {
    struct Range {
        std::uintptr_t begin, end;
        bool written;
    };
    std::vector<Range> ranges;
    for (const UpdateCall& call : calls) {
        const auto add = [&ranges](const void* array, std::size_t nbytes, bool written = true) {
            const auto begin = reinterpret_cast<std::uintptr_t>(array);
            if (nbytes > 0) ranges.push_back({begin, begin + nbytes, written});
        };
        const Arrays& a = call.arrays;
        const bool eight = a.moments == Moments::kEight;
        add(a.grad, call.n * bytes_of(a.grad_dtype), false);
        add(a.param, call.n * (call.format == Format::kFp32 ? 4 : 2));
        if (call.format != Format::kFp32) add(a.master, call.n * (call.format == Format::kRemainder ? 2 : 4));
        for (int k = 0; k < row_of(call.rule).moments; ++k) {
            add(a.moment[k], call.n * (eight ? 1 : a.moments == Moments::kBf16 ? 2 : 4));
            if (eight) add(a.scale[k], (call.n + kBlock - 1) / kBlock);
        }
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& x, const Range& y) { return x.begin < y.begin; });
    std::uintptr_t used = 0, written = 0;
    for (const Range& range : ranges) {
        if (range.begin < (range.written ? used : written)) return true;
        used = std::max(used, range.end);
        if (range.written) written = std::max(written, range.end);
    }
    return false;
}

// Returns true if other arrays are written than read, at addresses where a vector can be written past the caches.
bool is_draft(const Arrays& a) {
    const auto at_line = [](const void* array) { return reinterpret_cast<std::uintptr_t>(array) % kLine == 0; };
    bool at_lines = at_line(a.param) && at_line(a.master);
    for (const void* moment : a.moment) at_lines = at_lines && (a.moments == Moments::kEight || at_line(moment));
    return a.param != a.from.param && at_lines;
}

}  // namespace

void update(const Kernels& kernels, Format format, Rule rule, const Arrays& arrays, const Coefficients& c,
            std::size_t n, int threads, Priority priority) {
    static_assert(kTile % kBlock == 0);
    const auto& table = is_draft(arrays) ? kernels.draft : kernels.update;
    const UpdateFn kernel = table[static_cast<std::size_t>(format)][static_cast<std::size_t>(rule)];
    if (n < kInline) priority = Priority::kNormal;
    for_tiles(
        n, kTile, threads_for(n, threads), [&](std::size_t begin, std::size_t end) { kernel(arrays, c, begin, end); },
        priority);
}

void update_all(const Kernels& kernels, const std::vector<UpdateCall>& calls, int threads) {
    if (share_memory(calls)) {
        for (const UpdateCall& call : calls) update_all(kernels, {call}, threads);
        return;
    }
    std::vector<std::size_t> firsts;  // number of each call's first tile
    std::size_t tiles = 0, elements = 0;
    for (const UpdateCall& call : calls) {
        firsts.push_back(tiles);
        tiles += (call.n + kTile - 1) / kTile;
        elements += call.n;
    }
    auto piece = [&](std::size_t k) {
        const FloatEnvironment environment;
        const std::size_t at = std::upper_bound(firsts.begin(), firsts.end(), k) - firsts.begin() - 1;
        const UpdateCall& call = calls[at];
        const UpdateFn kernel =
            kernels.update[static_cast<std::size_t>(call.format)][static_cast<std::size_t>(call.rule)];
        const std::size_t begin = (k - firsts[at]) * kTile;
        kernel(call.arrays, call.coefficients, begin, std::min(call.n, begin + kTile));
    };
    parallel_for(tiles, threads_for(elements, threads), Priority::kNormal, piece);
}

void first_touch(void* memory, std::size_t nbytes, int threads) {
    const std::size_t words = (nbytes + sizeof(float) - 1) / sizeof(float);
    for_tiles(words, kTile, threads_for(words, threads), [&](std::size_t begin, std::size_t end) {
        const std::size_t from = begin * sizeof(float), to = std::min(nbytes, end * sizeof(float));
        std::memset(static_cast<char*>(memory) + from, 0, to - from);
    });
}

void bare(const Kernels& kernels, const std::vector<Stream>& streams, int threads) {
    constexpr std::size_t kPiece = 512, kPieces = 256;  // bytes of the longest stream at a time; pieces per tile
    std::size_t longest = 0;
    for (const Stream& stream : streams) longest = std::max(longest, stream.nbytes);
    const std::size_t pieces = (longest + kPiece - 1) / kPiece;
    const auto part = [pieces](std::size_t nbytes, std::size_t k) {
        return k == pieces ? nbytes : static_cast<std::size_t>(static_cast<double>(nbytes) / pieces * k) / 64 * 64;
    };
    for_tiles(pieces, kPieces, pieces < 2 * kPieces ? 1 : (threads > 0 ? threads : default_threads()),
              [&](std::size_t begin, std::size_t end) {
                  for (std::size_t k = begin; k < end; ++k) {
                      for (const Stream& stream : streams) {
                          const std::size_t from = part(stream.nbytes, k), to = part(stream.nbytes, k + 1);
                          kernels.touch(reinterpret_cast<float*>(stream.begin + from), (to - from) / 64 * 16,
                                        stream.writes);
                      }
                  }
              });
}

double sum_of_squares(const Kernels& kernels, DType dtype, const void* values, std::size_t n, double scale,
                      double initial, int threads) {
    const SumFn kernel = kernels.sum_of_squares[static_cast<std::size_t>(dtype)];
    const auto* const from = static_cast<const char*>(values);
    const std::size_t width = bytes_of(dtype);
    const auto sum = [&](std::size_t at, std::size_t count) { return kernel(from + at * width, count); };
    return sum_tiles(n, threads, scale, initial, sum);
}

double receive(const Kernels& kernels, const void* source, DType source_dtype, void* target, DType target_dtype,
               std::size_t n, bool add, double initial, int threads) {
    const ReceiveFn kernel = kernels.receive[static_cast<std::size_t>(target_dtype)];
    const SumFn sum = kernels.sum_of_squares[static_cast<std::size_t>(target_dtype)];
    const auto* const from = static_cast<const char*>(source);
    auto* const to = static_cast<char*>(target);
    return sum_tiles(n, threads, 1.0, initial, [&](std::size_t at, std::size_t count) {
        kernel(from + at * bytes_of(source_dtype), source_dtype, to + at * bytes_of(target_dtype), count, add);
        return sum(to + at * bytes_of(target_dtype), count);
    });
}

std::uint64_t fingerprint(const Kernels& kernels, const void* memory, std::size_t nbytes, int threads) {
    const auto* const words = static_cast<const std::uint64_t*>(memory);
    const std::size_t count = nbytes / sizeof(std::uint64_t);
    std::atomic<std::uint64_t> total = 0;
    for_tiles(count, kTile, threads_for(count, threads), [&](std::size_t begin, std::size_t end) {
        total.fetch_add(kernels.fingerprint(words + begin, begin, end - begin), std::memory_order_relaxed);
    });
    return total.load();
}

std::uint64_t copy(const Kernels& kernels, const void* source, void* target, std::size_t nbytes, int threads) {
    const auto* const from = static_cast<const std::uint64_t*>(source);
    auto* const to = static_cast<std::uint64_t*>(target);
    const std::size_t count = nbytes / sizeof(std::uint64_t);
    std::atomic<std::uint64_t> total = 0;
    for_tiles(count, kTile, threads_for(count, threads), [&](std::size_t begin, std::size_t end) {
        std::uint64_t sum;
        if (nbytes < kCached) {
            sum = kernels.fingerprint(from + begin, begin, end - begin);
            std::memcpy(to + begin, from + begin, (end - begin) * sizeof(std::uint64_t));
        } else {
            sum = kernels.copy(from + begin, to + begin, begin, end - begin);
        }
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    return total.load();
}

void split(const Kernels& kernels, const float* master, std::uint16_t* param, std::int16_t* remainder, std::size_t n,
           int threads) {
    for_tiles(n, kTile, threads_for(n, threads),
              [&](std::size_t begin, std::size_t end) { kernels.split(master, param, remainder, begin, end); });
}

void join(const Kernels& kernels, const std::uint16_t* param, const std::int16_t* remainder, float* master,
          std::size_t n, int threads) {
    for_tiles(n, kTile, threads_for(n, threads),
              [&](std::size_t begin, std::size_t end) { kernels.join(param, remainder, master, begin, end); });
}

}  // namespace infinity::adam
