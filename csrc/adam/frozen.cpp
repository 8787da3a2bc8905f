#include "frozen.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "float_environment.h"
#include "thread_pool.h"

namespace infinity::adam {
namespace {

constexpr std::size_t kPiece = 16;   // records of a thread's piece
constexpr std::size_t kInline = 32;  // the calling thread alone decodes fewer records

// Calls body(begin, end) over records [0, count) in the default floating-point environment.
template <class Body>
void for_records(std::size_t count, int threads, const Body& body) {
    auto piece = [&](std::size_t k) {
        const FloatEnvironment environment;
        body(k * kPiece, std::min(count, (k + 1) * kPiece));
    };
    const int workers = count < kInline ? 1 : threads > 0 ? threads : default_threads();
    parallel_for((count + kPiece - 1) / kPiece, workers, Priority::kNormal, piece);
}

bool is_finite(DType dtype, const void* array, std::size_t i) {
    if (dtype == DType::kFp32) return (static_cast<const std::uint32_t*>(array)[i] & 0x7F800000u) != 0x7F800000u;
    const std::uint16_t exponent = dtype == DType::kBf16 ? 0x7F80u : 0x7C00u;
    return (static_cast<const std::uint16_t*>(array)[i] & exponent) != exponent;
}

}  // namespace

std::size_t encode(const FrozenKernels& kernels, Code code, DType dtype, const void* from, std::uint8_t* records,
                   std::size_t n, int threads) {
    const EncodeFn kernel = kernels.encode[static_cast<std::size_t>(code)][static_cast<std::size_t>(dtype)];
    const std::size_t count = n / kRecord, decoded = kRecord * width_of(dtype), record = record_bytes(code, dtype);
    std::atomic<std::size_t> first = count;
    for_records(count, threads, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            if (kernel(static_cast<const char*>(from) + i * decoded, records + i * record)) continue;
            std::size_t before = first.load();
            while (i < before && !first.compare_exchange_weak(before, i)) continue;
            return;
        }
    });
    std::size_t at = first.load() * kRecord;
    while (at < n && is_finite(dtype, from, at)) ++at;
    return std::min(at, n);
}

std::uint64_t decode(const FrozenKernels& kernels, FingerprintFn hash, Code code, DType dtype,
                     const std::uint8_t* records, void* to, std::size_t n, int threads) {
    const DecodeFn kernel = kernels.decode[static_cast<std::size_t>(code)][static_cast<std::size_t>(dtype)];
    const std::size_t count = n / kRecord, decoded = kRecord * width_of(dtype), record = record_bytes(code, dtype);
    auto* const target = static_cast<char*>(to);
    const auto start = reinterpret_cast<std::uintptr_t>(records), begins = reinterpret_cast<std::uintptr_t>(to);
    const bool in_place = start < begins + count * decoded && begins < start + count * record;
    std::atomic<std::uint64_t> total = 0;
    const auto decode_some = [&](std::size_t begin, std::size_t end) {
        std::uint64_t sum = 0;
        for (std::size_t i = begin; i < end; ++i) {
            alignas(64) std::uint8_t copy[kMostRecordBytes];
            std::memcpy(copy, records + i * record, record);  // its elements may overwrite it
            kernel(copy, target + i * decoded);
            const std::size_t word = i * decoded / sizeof(std::uint64_t);
            sum += hash(reinterpret_cast<const std::uint64_t*>(target) + word, word, decoded / sizeof(std::uint64_t));
        }
        total.fetch_add(sum, std::memory_order_relaxed);
    };
    for (std::size_t i = 0; i < count;) {
        std::size_t most = in_place ? records_at_once(i, count, record, decoded) : count - i;
        if (threads == 1 || most < kInline) {
            // From low to high addresses: each record is read before elements are written above it.
            const FloatEnvironment environment;
            decode_some(i, count);
            break;
        }
        for_records(most, threads, [&](std::size_t begin, std::size_t end) { decode_some(i + begin, i + end); });
        i += most;
    }
    return total.load();
}

}  // namespace infinity::adam
