// The kernels of frozen.h over a vector type V with kWidth lanes, 64 being a multiple of it.
#pragma once

#include <cstring>

#include "frozen.h"

namespace infinity::adam {
namespace {

template <DType dtype>
float load_value(const void* array, std::size_t i) {
    if constexpr (dtype == DType::kFp32) {
        return static_cast<const float*>(array)[i];
    } else {
        const std::uint16_t bits = static_cast<const std::uint16_t*>(array)[i];
        return dtype == DType::kBf16 ? from_bf16(bits) : from_fp16(bits);
    }
}

template <class V, Code code, DType dtype>
void decode_record(const std::uint8_t* record, void* to) {
    auto* out = static_cast<char*>(to);
    for (std::size_t group = 0; group < kGroups; ++group, out += kGroup * width_of(dtype)) {
        const auto scale = V::set(load_value<dtype>(record + code_bytes(code), group));
        if constexpr (code == Code::kEight) {
            for (std::size_t i = 0; i < kGroup; i += V::kWidth) {
                const auto level = V::mul(V::signed_bytes(record + group * kGroup + i), V::set(kEightStep));
                V::template store<dtype>(out + i * width_of(dtype), V::mul(level, scale));
            }
        } else {
            constexpr std::size_t kHalf = kGroup / 2;
            for (std::size_t i = 0; i < kHalf; i += V::kWidth) {
                const auto pairs = V::bytes(record + group * kHalf + i);
                V::template store<dtype>(out + i * width_of(dtype), V::mul(V::level(V::low(pairs)), scale));
                V::template store<dtype>(out + (i + kHalf) * width_of(dtype), V::mul(V::level(V::high(pairs)), scale));
            }
        }
    }
}

// Vectorized by the compiler, for the instruction set of its translation unit: each operation rounds once, so all
// vectors give the same bits.
template <Code code, DType dtype>
bool encode_record(const void* from, std::uint8_t* record) {
    constexpr float kRound = 12582912.0f;  // adding and subtracting 1.5 * 2^23 rounds to an integer, ties to even
    float middles[15];
    for (unsigned k = 0; k < 15; ++k) middles[k] = (nf4_level(k) + nf4_level(k + 1)) * 0.5f;
    for (std::size_t group = 0; group < kGroups; ++group) {
        float values[kGroup];
        std::uint32_t largest = 0;
        for (std::size_t i = 0; i < kGroup; ++i) {
            values[i] = load_value<dtype>(from, group * kGroup + i);
            const std::uint32_t magnitude = __builtin_bit_cast(std::uint32_t, values[i]) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= 0x7F800000u) return false;
        const float scale = __builtin_bit_cast(float, largest);
        std::uint8_t* const scales = record + code_bytes(code);
        if constexpr (dtype == DType::kFp32) {
            std::memcpy(scales + group * 4, &scale, 4);
        } else {
            const std::uint16_t bits = dtype == DType::kBf16 ? to_bf16(scale) : to_fp16(scale);
            std::memcpy(scales + group * 2, &bits, 2);
        }
        const float divisor = largest == 0 ? 1.0f : scale;
        std::int32_t codes[kGroup];
        for (std::size_t i = 0; i < kGroup; ++i) {
            const float x = values[i] / divisor;
            if constexpr (code == Code::kEight) {
                codes[i] = static_cast<std::int32_t>((x * 127.0f + kRound) - kRound);
            } else {
                std::int32_t below = 0;
                for (unsigned k = 0; k < 15; ++k) below += x > middles[k];
                codes[i] = below;
            }
        }
        if constexpr (code == Code::kEight) {
            for (std::size_t i = 0; i < kGroup; ++i) record[group * kGroup + i] = static_cast<std::uint8_t>(codes[i]);
        } else {
            constexpr std::size_t kHalf = kGroup / 2;
            for (std::size_t i = 0; i < kHalf; ++i) {
                record[group * kHalf + i] = static_cast<std::uint8_t>(codes[i] | codes[i + kHalf] << 4);
            }
        }
    }
    return true;
}

template <class V, Code code>
constexpr void add_code(FrozenKernels& k) {
    constexpr auto at = static_cast<std::size_t>(code);
    k.decode[at][0] = decode_record<V, code, DType::kFp32>;
    k.decode[at][1] = decode_record<V, code, DType::kBf16>;
    k.decode[at][2] = decode_record<V, code, DType::kFp16>;
    k.encode[at][0] = encode_record<code, DType::kFp32>;
    k.encode[at][1] = encode_record<code, DType::kBf16>;
    k.encode[at][2] = encode_record<code, DType::kFp16>;
}

template <class V>
constexpr FrozenKernels make_frozen_kernels() {
    FrozenKernels k{};
    add_code<V, Code::kEight>(k);
    add_code<V, Code::kNf4>(k);
    return k;
}

}  // namespace
}  // namespace infinity::adam
