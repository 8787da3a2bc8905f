// AVX-512 F, BW, VL and DQ, 16 elements at a time. Compiled with these flags; called only if cpuid reports them.
// The bf16 conversion instructions are not used: they round to even and flush subnormals.
#include <immintrin.h>

#include "dispatch.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

// past_caches: `store` writes past the caches, at multiples of a vector; `keep` writes to them.
template <bool past_caches>
struct Avx512 {
    static constexpr std::size_t kWidth = 16, kDoubleWidth = 8;
    static constexpr bool kPastCaches = past_caches;
    using Float = __m512;
    using Int = __m512i;
    using Double = __m512d;

    static Float load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Float x) {
        if constexpr (past_caches) {
            _mm512_stream_ps(to, x);
        } else {
            keep(to, x);
        }
    }
    static void keep(float* to, Float x) { _mm512_storeu_ps(to, x); }
    static void end_stores() {
        if constexpr (past_caches) _mm_sfence();
    }
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
    static bool any_nan(Float x, Float y) { return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q) != 0; }

    static Float sign(Float x) {
        const Float one = _mm512_or_ps(_mm512_set1_ps(1.0f), _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
        const __mmask16 ordered = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        return _mm512_mask_mov_ps(_mm512_add_ps(x, _mm512_setzero_ps()), ordered, one);
    }

    static Int as_int(Float x) { return _mm512_castps_si512(x); }
    static Float as_float(Int x) { return _mm512_castsi512_ps(x); }
    static Int set_int(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int mul_int(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static Int and_int(Int a, Int b) { return _mm512_and_si512(a, b); }
    static Int or_int(Int a, Int b) { return _mm512_or_si512(a, b); }
    static Int xor_int(Int a, Int b) { return _mm512_xor_si512(a, b); }
    static Int blend(Int a, Int b, Int mask) { return _mm512_ternarylogic_epi32(mask, a, b, 0xCA); }  // mask ? a : b
    static Int max_int(Int a, Int b) { return _mm512_max_epu32(a, b); }
    template <int bits>
    static Int shift_right(Int x) {
        return _mm512_srli_epi32(x, bits);
    }
    template <int bits>
    static Int shift_left(Int x) {
        return _mm512_slli_epi32(x, bits);
    }
    static Int shift_right_signed_16(Int x) { return _mm512_srai_epi32(x, 16); }
    static Int halves(Int low, Int high) { return blend(high, low, set_int(0xFFFF0000u)); }
    static Int iota() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
    static std::uint32_t largest(Int x) { return _mm512_reduce_max_epu32(x); }
    static Int load_high_16(const std::uint16_t* from) {
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(from)), 16);
    }
    static Int load_signed_16(const std::int16_t* from) { return _mm512_cvtepi16_epi32(load_256(from)); }
    static void store_low_16(std::uint16_t* to, Int a, Int b) { store_words(to, words_of(a, b, 0)); }
    static void store_high_16(std::uint16_t* to, Int a, Int b) { store_words(to, words_of(a, b, 1)); }

    static Float load_fp16(const std::uint16_t* from) { return _mm512_cvtph_ps(load_256(from)); }
    static void store_fp16(std::uint16_t* to, Float x) {
        const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
        auto* const at = reinterpret_cast<__m256i*>(to);
        if constexpr (past_caches) {
            _mm256_stream_si256(at, halves);
        } else {
            _mm256_storeu_si256(at, halves);
        }
    }
    static Int load_8(const std::uint8_t* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static Int load_signed_8(const std::uint8_t* from) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void store_8(std::uint8_t* to, Int x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
    }

    static Double zero_double() { return _mm512_setzero_pd(); }
    static Double load_double(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
    static Double load_double_bf16(const std::uint16_t* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
    }
    static Double load_double_fp16(const std::uint16_t* from) {
        return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    static Double add_square(Double sum, Double x) { return _mm512_fmadd_pd(x, x, sum); }
    static void store_double(double* to, Double x) { _mm512_storeu_pd(to, x); }

  private:
    static void store_words(std::uint16_t* to, Int words) { store(reinterpret_cast<float*>(to), as_float(words)); }
    // Returns 16 bits of each lane of a, then of b: the low half, or the high half if `high` is 1.
    static Int words_of(Int a, Int b, std::uint32_t high) {
        const Int at = shift_left<2>(iota());  // lane i of the result is words 4i and 4i + 2 of both, or the next
        const Int words = add_int(or_int(at, shift_left<16>(at)), set_int(0x00020000u + 0x00010001u * high));
        return _mm512_permutex2var_epi16(a, words, b);
    }
    static __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
};

constexpr Kernels kTable = make_kernels<Avx512<false>, Avx512<true>>();

}  // namespace

const Kernels& kernels_avx512() { return kTable; }

}  // namespace infinity::adam
