// AVX2 + F16C, 8 elements at a time. Compiled with these flags; called only if cpuid reports them.
#include <immintrin.h>

#include "frozen_kernel.h"

namespace infinity::adam {
namespace {

struct Avx2 {
    static constexpr std::size_t kWidth = 8;
    static __m256 set(float x) { return _mm256_set1_ps(x); }
    static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
    static __m256 signed_bytes(const std::uint8_t* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
    static __m256i bytes(const std::uint8_t* from) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    static __m256i low(__m256i pairs) { return pairs; }  // `level` uses the low half only
    static __m256i high(__m256i pairs) { return _mm256_srli_epi32(pairs, 4); }
    static __m256 level(__m256i code) {
        const __m256 below = _mm256_setr_ps(nf4_level(0), nf4_level(1), nf4_level(2), nf4_level(3),  //
                                            nf4_level(4), nf4_level(5), nf4_level(6), nf4_level(7));
        const __m256 above = _mm256_setr_ps(nf4_level(8), nf4_level(9), nf4_level(10), nf4_level(11),  //
                                            nf4_level(12), nf4_level(13), nf4_level(14), nf4_level(15));
        const __m256 fourth_bit = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(below, code), _mm256_permutevar8x32_ps(above, code),
                                fourth_bit);
    }
    template <DType dtype>
    static void store(char* to, __m256 x) {
        if constexpr (dtype == DType::kFp32) {
            _mm256_storeu_ps(reinterpret_cast<float*>(to), x);
        } else {
            __m128i halves;
            if constexpr (dtype == DType::kFp16) {
                halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
            } else {
                const __m256i bits = _mm256_castps_si256(x);
                const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
                const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
                const __m256i words = _mm256_srli_epi32(up, 16);
                halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            }
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
        }
    }
};

constexpr FrozenKernels kTable = make_frozen_kernels<Avx2>();

}  // namespace

const FrozenKernels& frozen_avx2() { return kTable; }

}  // namespace infinity::adam
