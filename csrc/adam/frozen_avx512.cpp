// AVX-512 F, BW, VL and DQ, 16 elements at a time. Compiled with these flags; called only if cpuid reports them.
#include <immintrin.h>

#include "frozen_kernel.h"

namespace infinity::adam {
namespace {

struct Avx512 {
    static constexpr std::size_t kWidth = 16;
    static __m512 set(float x) { return _mm512_set1_ps(x); }
    static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
    static __m512 signed_bytes(const std::uint8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    static __m512i bytes(const std::uint8_t* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static __m512i low(__m512i pairs) { return pairs; }  // `level` uses the low half only
    static __m512i high(__m512i pairs) { return _mm512_srli_epi32(pairs, 4); }
    static __m512 level(__m512i code) {
        const __m512 levels = _mm512_setr_ps(nf4_level(0), nf4_level(1), nf4_level(2), nf4_level(3),    //
                                             nf4_level(4), nf4_level(5), nf4_level(6), nf4_level(7),    //
                                             nf4_level(8), nf4_level(9), nf4_level(10), nf4_level(11),  //
                                             nf4_level(12), nf4_level(13), nf4_level(14), nf4_level(15));
        return _mm512_permutexvar_ps(code, levels);
    }
    template <DType dtype>
    static void store(char* to, __m512 x) {
        if constexpr (dtype == DType::kFp32) {
            _mm512_storeu_ps(reinterpret_cast<float*>(to), x);
        } else {
            __m256i halves;
            if constexpr (dtype == DType::kFp16) {
                halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
            } else {
                const __m512i bits = _mm512_castps_si512(x);
                const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
                const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
                halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
            }
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
        }
    }
};

constexpr FrozenKernels kTable = make_frozen_kernels<Avx512>();

}  // namespace

const FrozenKernels& frozen_avx512() { return kTable; }

}  // namespace infinity::adam
