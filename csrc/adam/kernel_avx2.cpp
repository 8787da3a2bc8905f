// AVX2 + FMA + F16C, 8 elements at a time. Compiled with those flags; called only where cpuid shows them.
#include <immintrin.h>

#include "dispatch.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

struct Avx2 {
    static constexpr std::size_t kWidth = 8, kDoubleWidth = 4;
    using Float = __m256;
    using Int = __m256i;
    using Double = __m256d;

    static Float load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Float x) { _mm256_storeu_ps(to, x); }
    static Float set(float x) { return _mm256_set1_ps(x); }
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float sqrt(Float x) { return _mm256_sqrt_ps(x); }
    static Float canonical(Float x) {
        const Float nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kCanonicalNan)));
        return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }

    static Int as_int(Float x) { return _mm256_castps_si256(x); }
    static Float as_float(Int x) { return _mm256_castsi256_ps(x); }
    static Int set_int(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int shift_right_16(Int x) { return _mm256_srli_epi32(x, 16); }
    static Int load_high_16(const std::uint16_t* from) {
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(from)), 16);
    }
    static Int load_signed_16(const std::int16_t* from) { return _mm256_cvtepi16_epi32(load_128(from)); }
    static void store_low_16(std::uint16_t* to, Int x) {
        const Int low = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
    }

    static Double zero_double() { return _mm256_setzero_pd(); }
    static Double load_double(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
    static Double load_double_bf16(const std::uint16_t* from) {
        const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16)));
    }
    static Double add_square(Double sum, Double x) { return _mm256_fmadd_pd(x, x, sum); }
    static void store_double(double* to, Double x) { _mm256_storeu_pd(to, x); }

  private:
    static __m128i load_128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
};

constexpr Kernels kTable = make_kernels<Avx2>();

}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace infinity::adam
