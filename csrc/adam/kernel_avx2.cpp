// AVX2 + FMA + F16C, 8 elements at a time. Compiled with these flags; called only if cpuid reports them.
#include <immintrin.h>

#include "dispatch.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

// past_caches: `store` writes past the caches, at multiples of a vector; `keep` writes to them.
template <bool past_caches>
struct Avx2 {
    static constexpr std::size_t kWidth = 8, kDoubleWidth = 4;
    static constexpr bool kPastCaches = past_caches;
    using Float = __m256;
    using Int = __m256i;
    using Double = __m256d;

    static Float load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Float x) {
        if constexpr (past_caches) {
            _mm256_stream_ps(to, x);
        } else {
            keep(to, x);
        }
    }
    static void keep(float* to, Float x) { _mm256_storeu_ps(to, x); }
    static void end_stores() {
        if constexpr (past_caches) _mm_sfence();
    }
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
    static bool any_nan(Float x, Float y) {
        const Float unordered = _mm256_cmp_ps(x, y, _CMP_UNORD_Q);
        return _mm256_testz_ps(unordered, unordered) == 0;
    }

    static Float sign(Float x) {
        const Float one = _mm256_or_ps(_mm256_set1_ps(1.0f), _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
        const Float ordered = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ);
        return _mm256_blendv_ps(_mm256_add_ps(x, _mm256_setzero_ps()), one, ordered);
    }

    static Int as_int(Float x) { return _mm256_castps_si256(x); }
    static Float as_float(Int x) { return _mm256_castsi256_ps(x); }
    static Int set_int(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int mul_int(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
    static Int and_int(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int xor_int(Int a, Int b) { return _mm256_xor_si256(a, b); }
    static Int blend(Int a, Int b, Int mask) {  // mask ? a : b
        return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
    }
    static Int max_int(Int a, Int b) { return _mm256_max_epu32(a, b); }
    template <int bits>
    static Int shift_right(Int x) {
        return _mm256_srli_epi32(x, bits);
    }
    template <int bits>
    static Int shift_left(Int x) {
        return _mm256_slli_epi32(x, bits);
    }
    static Int shift_right_signed_16(Int x) { return _mm256_srai_epi32(x, 16); }
    static Int halves(Int low, Int high) { return _mm256_blend_epi16(low, high, 0xAA); }
    static Int iota() { return _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0); }
    static std::uint32_t largest(Int x) {
        std::uint32_t lanes[kWidth], most = 0;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), x);
        for (const std::uint32_t lane : lanes) most = lane > most ? lane : most;
        return most;
    }
    static Int load_high_16(const std::uint16_t* from) {
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(from)), 16);
    }
    static Int load_signed_16(const std::int16_t* from) { return _mm256_cvtepi16_epi32(load_128(from)); }
    static void store_low_16(std::uint16_t* to, Int a, Int b) {
        store_words(to, and_int(a, set_int(0xFFFFu)), and_int(b, set_int(0xFFFFu)));
    }
    static void store_high_16(std::uint16_t* to, Int a, Int b) {
        store_words(to, shift_right<16>(a), shift_right<16>(b));
    }

    static Float load_fp16(const std::uint16_t* from) { return _mm256_cvtph_ps(load_128(from)); }
    static void store_fp16(std::uint16_t* to, Float x) {
        const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
        auto* const at = reinterpret_cast<__m128i*>(to);
        if constexpr (past_caches) {
            _mm_stream_si128(at, halves);
        } else {
            _mm_storeu_si128(at, halves);
        }
    }
    static Int load_8(const std::uint8_t* from) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    static Int load_signed_8(const std::uint8_t* from) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    static void store_8(std::uint8_t* to, Int x) {
        const __m256i bytes = _mm256_shuffle_epi8(  // the low byte of each lane to the front of its half
            x, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
        const __m128i packed = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), packed);
    }

    static Double zero_double() { return _mm256_setzero_pd(); }
    static Double load_double(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
    static Double load_double_bf16(const std::uint16_t* from) {
        const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16)));
    }
    static Double load_double_fp16(const std::uint16_t* from) {
        return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
    static Double add_square(Double sum, Double x) { return _mm256_fmadd_pd(x, x, sum); }
    static void store_double(double* to, Double x) { _mm256_storeu_pd(to, x); }

  private:
    // Stores lanes below 2^16, first those of a, then those of b. The instruction packs within 128-bit halves.
    static void store_words(std::uint16_t* to, Int a, Int b) {
        const Int packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
        store(reinterpret_cast<float*>(to), as_float(packed));
    }
    static __m128i load_128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
};

constexpr Kernels kTable = make_kernels<Avx2<false>, Avx2<true>>();

}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace infinity::adam
