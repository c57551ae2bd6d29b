// Sixteen lanes in one register of AVX-512; lanes.h describes the functions.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define LANES_INLINE inline __attribute__((always_inline))

using Floats = __m512;
using Ints = __m512i;
using Doubles = __m512d;  // eight numbers
using Mask = __mmask16;
using First = __mmask16;

LANES_INLINE First first(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
LANES_INLINE uint32_t bits(Mask mask) { return mask; }
LANES_INLINE Mask without(Mask a, Mask b) { return a & ~b; }

LANES_INLINE Floats zeros() { return _mm512_setzero_ps(); }
LANES_INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
LANES_INLINE Floats load(const float *at) { return _mm512_loadu_ps(at); }
LANES_INLINE void store(float *at, Floats v) { _mm512_storeu_ps(at, v); }
LANES_INLINE Floats load(const float *at, First lanes) { return _mm512_maskz_loadu_ps(lanes, at); }
LANES_INLINE void store(float *at, First lanes, Floats v) { _mm512_mask_storeu_ps(at, lanes, v); }

LANES_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
LANES_INLINE Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
LANES_INLINE Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
LANES_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
LANES_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
LANES_INLINE Floats abs(Floats v) { return _mm512_abs_ps(v); }
LANES_INLINE Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
LANES_INLINE Floats round_nearest(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
LANES_INLINE Floats times_power(Floats v, Floats power) { return _mm512_scalef_ps(v, power); }
LANES_INLINE Floats exponent(Floats v) { return _mm512_getexp_ps(v); }
LANES_INLINE Floats mantissa(Floats v) { return _mm512_getmant_ps(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero); }
LANES_INLINE Floats compress(Mask mask, Floats v) { return _mm512_maskz_compress_ps(mask, v); }
LANES_INLINE float front(Floats v) { return _mm512_cvtss_f32(v); }
LANES_INLINE float reduce_sum(Floats v) { return _mm512_reduce_add_ps(v); }
LANES_INLINE float reduce_max(Floats v) { return _mm512_reduce_max_ps(v); }

LANES_INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
LANES_INLINE Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
LANES_INLINE Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
LANES_INLINE Mask not_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
LANES_INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
LANES_INLINE Mask not_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
LANES_INLINE Mask is_nan(Floats v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }

LANES_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
LANES_INLINE Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
LANES_INLINE Ints lane_ids() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
LANES_INLINE Ints load_ints(const void *at) { return _mm512_loadu_si512(at); }
LANES_INLINE Ints load_ints(const int32_t *at, First lanes) { return _mm512_maskz_loadu_epi32(lanes, at); }
LANES_INLINE void store(int32_t *at, Ints v) { _mm512_storeu_si512(at, v); }
LANES_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
LANES_INLINE Ints add_shorts(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
LANES_INLINE Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
LANES_INLINE Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
LANES_INLINE Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
LANES_INLINE Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int BITS>
LANES_INLINE Ints shift_left(Ints v) { return _mm512_slli_epi32(v, BITS); }
template <int BITS>
LANES_INLINE Ints shift_right(Ints v) { return _mm512_srli_epi32(v, BITS); }
LANES_INLINE Ints select(Mask mask, Ints yes, Ints no) { return _mm512_mask_mov_epi32(no, mask, yes); }
LANES_INLINE int32_t reduce_min(Mask mask, Ints v) { return _mm512_mask_reduce_min_epi32(mask, v); }
LANES_INLINE Floats as_floats(Ints v) { return _mm512_castsi512_ps(v); }
LANES_INLINE Ints as_ints(Floats v) { return _mm512_castps_si512(v); }
LANES_INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
LANES_INLINE Ints to_nearest(Floats v) { return _mm512_cvtps_epi32(v); }
LANES_INLINE Ints truncate(Floats v) { return _mm512_cvttps_epi32(v); }
LANES_INLINE void store_bytes(uint8_t *at, First lanes, Ints v) {
  _mm_mask_storeu_epi8(at, lanes, _mm512_cvtepi32_epi8(v));
}
LANES_INLINE Ints load_bytes(const uint8_t *at) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}
LANES_INLINE Ints load_bytes(const int8_t *at) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}
LANES_INLINE Ints load_shorts(const uint16_t *at, First lanes) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, at));
}
LANES_INLINE void store_shorts(uint16_t *at, First lanes, Ints v) {
  _mm256_mask_storeu_epi16(at, lanes, _mm512_cvtepi32_epi16(v));
}
LANES_INLINE Floats load_half(const uint16_t *at, First lanes) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, at));
}
LANES_INLINE Floats round_half(Floats v) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
LANES_INLINE void store_half(uint16_t *at, First lanes, Floats v) {
  _mm256_mask_storeu_epi16(at, lanes, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

LANES_INLINE Doubles zero_doubles() { return _mm512_setzero_pd(); }
LANES_INLINE Doubles add_lanes(Doubles sum, Floats v) {
  sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
  return _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
}
LANES_INLINE double reduce_sum(Doubles v) { return _mm512_reduce_add_pd(v); }

LANES_INLINE Floats swap_pairs(Floats v) { return _mm512_permute_ps(v, 0xb1); }
LANES_INLINE Floats even_twice(Floats v) { return _mm512_moveldup_ps(v); }
LANES_INLINE Floats odd_twice(Floats v) { return _mm512_movehdup_ps(v); }
LANES_INLINE Floats fma_subadd(Floats a, Floats b, Floats c) { return _mm512_fmaddsub_ps(a, b, c); }

LANES_INLINE Floats quarters(const Floats *s) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
LANES_INLINE Floats whole(const Floats *four) {
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(four[0], four[1]), fold(four[2], four[3]));
}

#if defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS 1
constexpr bool BYTES_ARE_SIGNED = false;
LANES_INLINE Ints add_byte_products(Ints sum, Ints x, Ints w) { return _mm512_dpbusd_epi32(sum, x, w); }
#endif
LANES_INLINE Ints in_register(Ints v) {  // or GCC reloads it for every use
  asm("" : "+v"(v));
  return v;
}
LANES_INLINE void stay(Ints &) {}
LANES_INLINE Ints byte_sizes(Ints v) { return _mm512_abs_epi8(v); }
LANES_INLINE Ints with_sign_of(Ints v, Ints of) {
  return _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(of), _mm512_setzero_si512(), v);
}
LANES_INLINE Ints byte_pairs(Ints a, Ints b) { return _mm512_maddubs_epi16(a, b); }
LANES_INLINE Ints multiply_shorts(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
LANES_INLINE Ints short_products(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
LANES_INLINE Ints table_lookup(const void *table, Ints places) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i *>(table))), places);
}
