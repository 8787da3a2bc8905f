// Plain C++, one element at a time: the reference for the other instruction sets.
#include "frozen_kernel.h"

namespace infinity::adam {
namespace {

struct Plain {
    static constexpr std::size_t kWidth = 1;
    static float set(float x) { return x; }
    static float mul(float a, float b) { return a * b; }
    static float signed_bytes(const std::uint8_t* from) { return static_cast<std::int8_t>(*from); }
    static unsigned bytes(const std::uint8_t* from) { return *from; }
    static unsigned low(unsigned pair) { return pair & 15u; }
    static unsigned high(unsigned pair) { return pair >> 4; }
    static float level(unsigned code) { return nf4_level(code); }
    template <DType dtype>
    static void store(char* to, float x) {
        if constexpr (dtype == DType::kFp32) {
            *reinterpret_cast<float*>(to) = x;
        } else {
            *reinterpret_cast<std::uint16_t*>(to) = dtype == DType::kBf16 ? to_bf16(x) : to_fp16(x);
        }
    }
};

constexpr FrozenKernels kTable = make_frozen_kernels<Plain>();

}  // namespace

const FrozenKernels& frozen_plain() { return kTable; }

}  // namespace infinity::adam
