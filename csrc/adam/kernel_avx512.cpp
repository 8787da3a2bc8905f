// AVX-512 F, BW, VL and DQ, 16 elements at a time. Compiled with those flags; called only where cpuid shows them.
// The bf16 conversion instructions are not used: they round to even and flush subnormals.
#include <immintrin.h>

#include "dispatch.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

struct Avx512 {
    static constexpr std::size_t kWidth = 16, kDoubleWidth = 8;
    using Float = __m512;
    using Int = __m512i;
    using Double = __m512d;

    static Float load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Float x) { _mm512_storeu_ps(to, x); }
    static Float set(float x) { return _mm512_set1_ps(x); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float sqrt(Float x) { return _mm512_sqrt_ps(x); }
    static Float canonical(Float x) {
        const Float nan = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kCanonicalNan)));
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    }

    static Int as_int(Float x) { return _mm512_castps_si512(x); }
    static Float as_float(Int x) { return _mm512_castsi512_ps(x); }
    static Int set_int(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int shift_right_16(Int x) { return _mm512_srli_epi32(x, 16); }
    static Int load_high_16(const std::uint16_t* from) {
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(from)), 16);
    }
    static Int load_signed_16(const std::int16_t* from) { return _mm512_cvtepi16_epi32(load_256(from)); }
    static void store_low_16(std::uint16_t* to, Int x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
    }

    static Double zero_double() { return _mm512_setzero_pd(); }
    static Double load_double(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
    static Double load_double_bf16(const std::uint16_t* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
    }
    static Double add_square(Double sum, Double x) { return _mm512_fmadd_pd(x, x, sum); }
    static void store_double(double* to, Double x) { _mm512_storeu_pd(to, x); }

  private:
    static __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
};

constexpr Kernels kTable = make_kernels<Avx512>();

}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace infinity::adam
