// Sixteen lanes in two registers of AVX2, with FMA and F16C; lanes.h describes the functions.
//
// Whole vectors are loaded and stored without a mask: masked stores are slow on some processors.
#pragma once
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#define LANES_INLINE inline __attribute__((always_inline))

// Two registers. Copies are explicit, or compilers copy through memory and leave sums there.
#define TWO(NAME, REGISTER)                                                 \
  struct NAME {                                                             \
    REGISTER a, b;                                                          \
    NAME() = default;                                                       \
    LANES_INLINE NAME(REGISTER a, REGISTER b) : a(a), b(b) {}               \
    LANES_INLINE NAME(const NAME &of) : a(of.a), b(of.b) {}                 \
    LANES_INLINE NAME &operator=(const NAME &of) {                          \
      a = of.a, b = of.b;                                                   \
      return *this;                                                         \
    }                                                                       \
  };
TWO(Floats, __m256)
TWO(Ints, __m256i)
TWO(Doubles, __m256d)  // eight numbers
#undef TWO
struct First {
  int64_t count;
};

LANES_INLINE First first(int64_t count) { return {count}; }
LANES_INLINE Ints lane_ids() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }

struct Mask {  // all ones or all zeros per lane
  __m256i a, b;
  Mask() : a(_mm256_setzero_si256()), b(_mm256_setzero_si256()) {}
  Mask(__m256i a, __m256i b) : a(a), b(b) {}
  Mask(__m256 a, __m256 b) : a(_mm256_castps_si256(a)), b(_mm256_castps_si256(b)) {}
  Mask(First lanes) {
    const __m256i count = _mm256_set1_epi32(static_cast<int32_t>(lanes.count > 16 ? 16 : lanes.count));
    a = _mm256_cmpgt_epi32(count, lane_ids().a);
    b = _mm256_cmpgt_epi32(count, lane_ids().b);
  }
};
LANES_INLINE Mask operator&(Mask x, Mask y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
LANES_INLINE Mask &operator|=(Mask &x, Mask y) {
  return x = {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
LANES_INLINE uint32_t bits(__m256i mask) { return _mm256_movemask_ps(_mm256_castsi256_ps(mask)); }
LANES_INLINE uint32_t bits(Mask mask) { return bits(mask.a) | bits(mask.b) << 8; }
LANES_INLINE Mask without(Mask x, Mask y) { return {_mm256_andnot_si256(y.a, x.a), _mm256_andnot_si256(y.b, x.b)}; }

LANES_INLINE Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
LANES_INLINE Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
LANES_INLINE Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
LANES_INLINE Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }

LANES_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LANES_INLINE Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LANES_INLINE Floats load(const float *at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
LANES_INLINE void store(float *at, Floats v) {
  _mm256_storeu_ps(at, v.a);
  _mm256_storeu_ps(at + 8, v.b);
}
LANES_INLINE Floats load(const float *at, First lanes) {
  if (lanes.count >= 16) return load(at);
  const Mask mask = lanes;
  return {_mm256_maskload_ps(at, mask.a), _mm256_maskload_ps(at + 8, mask.b)};
}
LANES_INLINE void store(float *at, First lanes, Floats v) {
  if (lanes.count >= 16) return store(at, v);
  const Mask mask = lanes;
  _mm256_maskstore_ps(at, mask.a, v.a);
  _mm256_maskstore_ps(at + 8, mask.b, v.b);
}

LANES_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
LANES_INLINE Floats fnma(Floats x, Floats y, Floats z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
LANES_INLINE Floats fms(Floats x, Floats y, Floats z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
LANES_INLINE Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
LANES_INLINE Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
LANES_INLINE Floats abs(Floats v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.a), _mm256_andnot_ps(sign, v.b)};
}
LANES_INLINE Floats select(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(mask.a)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(mask.b))};
}
LANES_INLINE Floats round_nearest(Floats v) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.a, HOW), _mm256_round_ps(v.b, HOW)};
}
LANES_INLINE float front(Floats v) { return _mm256_cvtss_f32(v.a); }
LANES_INLINE float reduce_sum(Floats v) {
  const __m256 eight = v.b + v.a;
  const __m128 four = _mm256_extractf128_ps(eight, 1) + _mm256_castps256_ps128(eight);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
LANES_INLINE float reduce_max(Floats v) {
  const __m256 eight = _mm256_max_ps(v.b, v.a);
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ps(two, _mm_movehdup_ps(two)));
}

#define COMPARE(NAME, HOW) \
  LANES_INLINE Mask NAME(Floats x, Floats y) { return {_mm256_cmp_ps(x.a, y.a, HOW), _mm256_cmp_ps(x.b, y.b, HOW)}; }
COMPARE(greater, _CMP_GT_OQ)
COMPARE(at_least, _CMP_GE_OQ)
COMPARE(less, _CMP_LT_OQ)
COMPARE(not_less, _CMP_NLT_UQ)
COMPARE(equal, _CMP_EQ_OQ)
COMPARE(not_equal, _CMP_NEQ_UQ)
COMPARE(unordered, _CMP_UNORD_Q)
#undef COMPARE
LANES_INLINE Mask is_nan(Floats v) { return unordered(v, v); }

LANES_INLINE Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
LANES_INLINE Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
LANES_INLINE Ints load_ints(const void *at) {
  const auto from = static_cast<const __m256i *>(at);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
LANES_INLINE Ints load_ints(const int32_t *at, First lanes) {
  if (lanes.count >= 16) return load_ints(at);
  const Mask mask = lanes;
  return {_mm256_maskload_epi32(at, mask.a), _mm256_maskload_epi32(at + 8, mask.b)};
}
LANES_INLINE void store(int32_t *at, Ints v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), v.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at + 8), v.b);
}
#define PAIRED(NAME, OPERATION) \
  LANES_INLINE Ints NAME(Ints x, Ints y) { return {OPERATION(x.a, y.a), OPERATION(x.b, y.b)}; }
PAIRED(add, _mm256_add_epi32)
PAIRED(add_shorts, _mm256_add_epi16)
PAIRED(subtract, _mm256_sub_epi32)
PAIRED(multiply, _mm256_mullo_epi32)
PAIRED(bit_and, _mm256_and_si256)
PAIRED(bit_xor, _mm256_xor_si256)
PAIRED(with_sign_of, _mm256_sign_epi8)
PAIRED(byte_pairs, _mm256_maddubs_epi16)
PAIRED(multiply_shorts, _mm256_mullo_epi16)
PAIRED(short_products, _mm256_madd_epi16)
#undef PAIRED
template <int BITS>
LANES_INLINE Ints shift_left(Ints v) { return {_mm256_slli_epi32(v.a, BITS), _mm256_slli_epi32(v.b, BITS)}; }
template <int BITS>
LANES_INLINE Ints shift_right(Ints v) { return {_mm256_srli_epi32(v.a, BITS), _mm256_srli_epi32(v.b, BITS)}; }
LANES_INLINE Ints select(Mask mask, Ints yes, Ints no) {
  return {_mm256_blendv_epi8(no.a, yes.a, mask.a), _mm256_blendv_epi8(no.b, yes.b, mask.b)};
}
LANES_INLINE int32_t reduce_min(Mask mask, Ints v) {
  const Ints kept = select(mask, v, broadcast_int(INT32_MAX));
  const __m256i eight = _mm256_min_epi32(kept.a, kept.b);
  const __m128i four = _mm_min_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_min_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_min_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
LANES_INLINE Floats as_floats(Ints v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
LANES_INLINE Ints as_ints(Floats v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }
LANES_INLINE Floats to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
LANES_INLINE Ints to_nearest(Floats v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
LANES_INLINE Ints truncate(Floats v) { return {_mm256_cvttps_epi32(v.a), _mm256_cvttps_epi32(v.b)}; }

LANES_INLINE Floats times_power(Floats v, Floats power) {
  return v * as_floats(shift_left<23>(add(to_nearest(power), broadcast_int(127))));
}
LANES_INLINE Floats exponent(Floats v) {
  return to_floats(subtract(shift_right<23>(as_ints(v)), broadcast_int(127)));
}
LANES_INLINE Floats mantissa(Floats v) {
  return as_floats(bit_xor(bit_and(as_ints(v), broadcast_int(0x007fffff)), broadcast_int(0x3f800000)));
}

// For each mask of eight lanes, the indices of its lanes, a byte each.
constexpr std::array<uint64_t, 256> lanes_in_masks() {
  std::array<uint64_t, 256> result{};
  for (unsigned mask = 0; mask < 256; mask++) {
    int count = 0;
    for (uint64_t lane = 0; lane < 8; lane++)
      if (mask >> lane & 1) result[mask] |= lane << 8 * count++;
  }
  return result;
}
inline constexpr std::array<uint64_t, 256> LANES_IN = lanes_in_masks();

LANES_INLINE Floats compress(Mask mask, Floats v) {
  float kept[16] = {};
  const uint32_t low = bits(mask.a), high = bits(mask.b);
  const int below = __builtin_popcount(low);
  const auto half = [](uint32_t mask, __m256 of, int count) {
    const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(LANES_IN[mask])));
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_ids().a);
    return _mm256_and_ps(_mm256_permutevar8x32_ps(of, order), _mm256_castsi256_ps(inside));
  };
  _mm256_storeu_ps(kept, half(low, v.a, below));
  _mm256_storeu_ps(kept + below, half(high, v.b, __builtin_popcount(high)));
  return load(kept);
}

// Up to 16 numbers of 16 bits: pairs, then the last one.
LANES_INLINE __m256i load_some(const uint16_t *at, First lanes) {
  if (lanes.count >= 16) return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
  const int32_t pairs = static_cast<int32_t>(lanes.count / 2);
  const __m256i count = _mm256_set1_epi32(pairs), index = lane_ids().a;
  const __m256i result = _mm256_maskload_epi32(reinterpret_cast<const int *>(at), _mm256_cmpgt_epi32(count, index));
  if (lanes.count % 2 == 0) return result;
  const __m256i last = _mm256_set1_epi32(at[lanes.count - 1]);
  return _mm256_or_si256(result, _mm256_and_si256(last, _mm256_cmpeq_epi32(count, index)));
}
LANES_INLINE void store_some(uint16_t *at, First lanes, __m256i v) {
  if (lanes.count >= 16) return _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), v);
  uint16_t all[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(all), v);
  for (int64_t i = 0; i < lanes.count; i++) at[i] = all[i];
}
LANES_INLINE __m256i shorts(Ints v) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(v.a, v.b), 0xd8); }
LANES_INLINE void store_bytes(uint8_t *at, First lanes, Ints v) {
  const Ints low = bit_and(v, broadcast_int(0xff));
  const __m256i two = shorts(low);
  uint8_t all[16];
  _mm_storeu_si128(reinterpret_cast<__m128i *>(all),
                   _mm_packus_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
  std::memcpy(at, all, lanes.count >= 16 ? 16 : lanes.count);
}
LANES_INLINE Ints load_bytes(const uint8_t *at) {
  return {_mm256_cvtepu8_epi32(_mm_loadu_si64(at)), _mm256_cvtepu8_epi32(_mm_loadu_si64(at + 8))};
}
LANES_INLINE Ints load_bytes(const int8_t *at) {
  return {_mm256_cvtepi8_epi32(_mm_loadu_si64(at)), _mm256_cvtepi8_epi32(_mm_loadu_si64(at + 8))};
}
LANES_INLINE Ints load_shorts(const uint16_t *at, First lanes) {
  const __m256i v = load_some(at, lanes);
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}
LANES_INLINE void store_shorts(uint16_t *at, First lanes, Ints v) { store_some(at, lanes, shorts(v)); }
LANES_INLINE Floats load_half(const uint16_t *at, First lanes) {
  const __m256i v = load_some(at, lanes);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}
LANES_INLINE Floats round_half(Floats v) {
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT)),
          _mm256_cvtph_ps(_mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT))};
}
LANES_INLINE void store_half(uint16_t *at, First lanes, Floats v) {
  store_some(at, lanes,
             _mm256_set_m128i(_mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT),
                              _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT)));
}

LANES_INLINE Doubles zero_doubles() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
LANES_INLINE Doubles add_lanes(Doubles sum, Floats v) {
  for (const __m256 eight : {v.a, v.b}) {
    sum.a = _mm256_add_pd(sum.a, _mm256_cvtps_pd(_mm256_castps256_ps128(eight)));
    sum.b = _mm256_add_pd(sum.b, _mm256_cvtps_pd(_mm256_extractf128_ps(eight, 1)));
  }
  return sum;
}
LANES_INLINE double reduce_sum(Doubles v) {
  const __m256d four = _mm256_add_pd(v.b, v.a);
  const __m128d two = _mm_add_pd(_mm256_extractf128_pd(four, 1), _mm256_castpd256_pd128(four));
  return two[0] + two[1];
}

LANES_INLINE Floats swap_pairs(Floats v) { return {_mm256_permute_ps(v.a, 0xb1), _mm256_permute_ps(v.b, 0xb1)}; }
LANES_INLINE Floats even_twice(Floats v) { return {_mm256_moveldup_ps(v.a), _mm256_moveldup_ps(v.b)}; }
LANES_INLINE Floats odd_twice(Floats v) { return {_mm256_movehdup_ps(v.a), _mm256_movehdup_ps(v.b)}; }
LANES_INLINE Floats fma_subadd(Floats x, Floats y, Floats z) {
  return {_mm256_fmaddsub_ps(x.a, y.a, z.a), _mm256_fmaddsub_ps(x.b, y.b, z.b)};
}

LANES_INLINE __m256 quarters(__m256 s, __m256 t, __m256 u, __m256 v) {
  const __m256 x = _mm256_add_ps(_mm256_unpacklo_ps(s, t), _mm256_unpackhi_ps(s, t));
  const __m256 y = _mm256_add_ps(_mm256_unpacklo_ps(u, v), _mm256_unpackhi_ps(u, v));
  const __m256d c = _mm256_castps_pd(x), d = _mm256_castps_pd(y);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(c, d)), _mm256_castpd_ps(_mm256_unpackhi_pd(c, d)));
}
LANES_INLINE Floats quarters(const Floats *s) {
  return {quarters(s[0].a, s[1].a, s[2].a, s[3].a), quarters(s[0].b, s[1].b, s[2].b, s[3].b)};
}
LANES_INLINE Floats whole(const Floats *four) {
  const auto fold = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  return {fold(fold(four[0].a, four[0].b), fold(four[1].a, four[1].b)),
          fold(fold(four[2].a, four[2].b), fold(four[3].a, four[3].b))};
}

#if defined(__AVXVNNI__)
#define HAS_BYTE_PRODUCTS 1
constexpr bool BYTES_ARE_SIGNED = false;
LANES_INLINE Ints add_byte_products(Ints sum, Ints x, Ints w) {
  return {_mm256_dpbusd_avx_epi32(sum.a, x.a, w.a), _mm256_dpbusd_avx_epi32(sum.b, x.b, w.b)};
}
#elif defined(TILES_WRITTEN_OUT)  // for tests on any machine
#define HAS_BYTE_PRODUCTS 1
constexpr bool BYTES_ARE_SIGNED = false;
LANES_INLINE __m256i add_byte_products(__m256i sum, __m256i x, __m256i w) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(w, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
LANES_INLINE Ints add_byte_products(Ints sum, Ints x, Ints w) {
  return {add_byte_products(sum.a, x.a, w.a), add_byte_products(sum.b, x.b, w.b)};
}
#endif
// ``stay`` keeps a sum's order: compilers would form all terms first, and spill them.
LANES_INLINE Ints in_register(Ints v) { return v; }  // too few registers
LANES_INLINE void stay(Ints &v) { asm("" : "+x"(v.a), "+x"(v.b)); }
LANES_INLINE Ints byte_sizes(Ints v) { return {_mm256_abs_epi8(v.a), _mm256_abs_epi8(v.b)}; }
LANES_INLINE Ints table_lookup(const void *table, Ints places) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(table)));
  return {_mm256_shuffle_epi8(twice, places.a), _mm256_shuffle_epi8(twice, places.b)};
}
