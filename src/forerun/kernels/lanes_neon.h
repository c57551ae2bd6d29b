// Sixteen lanes in four registers of NEON; lanes.h describes the functions.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define LANES_INLINE inline __attribute__((always_inline))

// Four registers. Copies are explicit, or compilers copy through memory and leave sums there.
#define FOUR(NAME, REGISTER)                                                                              \
  struct NAME {                                                                                           \
    REGISTER a, b, c, d;                                                                                  \
    NAME() = default;                                                                                     \
    LANES_INLINE NAME(REGISTER a, REGISTER b, REGISTER c, REGISTER d) : a(a), b(b), c(c), d(d) {}         \
    LANES_INLINE NAME(const NAME &of) : a(of.a), b(of.b), c(of.c), d(of.d) {}                             \
    LANES_INLINE NAME &operator=(const NAME &of) {                                                        \
      a = of.a, b = of.b, c = of.c, d = of.d;                                                             \
      return *this;                                                                                       \
    }                                                                                                     \
  };
FOUR(Floats, float32x4_t)
FOUR(Ints, int32x4_t)
FOUR(Doubles, float64x2_t)  // eight numbers
#undef FOUR
struct First {
  int64_t count;
};

// A function that applies OPERATION to each register, with one, two or three arguments.
#define EACH(RESULT, NAME, OPERATION, OF) \
  LANES_INLINE RESULT NAME(OF x) { return {OPERATION(x.a), OPERATION(x.b), OPERATION(x.c), OPERATION(x.d)}; }
#define EACH_PAIR(RESULT, NAME, OPERATION, OF)                                                 \
  LANES_INLINE RESULT NAME(OF x, OF y) {                                                       \
    return {OPERATION(x.a, y.a), OPERATION(x.b, y.b), OPERATION(x.c, y.c), OPERATION(x.d, y.d)}; \
  }
#define EACH_TRIPLE(RESULT, NAME, OPERATION, FIRST, OF)                                                           \
  LANES_INLINE RESULT NAME(FIRST x, OF y, OF z) {                                                                 \
    return {OPERATION(x.a, y.a, z.a), OPERATION(x.b, y.b, z.b), OPERATION(x.c, y.c, z.c), OPERATION(x.d, y.d, z.d)}; \
  }

LANES_INLINE First first(int64_t count) { return {count}; }
LANES_INLINE Ints lane_ids() {
  constexpr int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {vld1q_s32(NUMBERS), vld1q_s32(NUMBERS + 4), vld1q_s32(NUMBERS + 8), vld1q_s32(NUMBERS + 12)};
}

struct Mask {  // all ones or all zeros per lane
  uint32x4_t a, b, c, d;
  Mask() : a(vdupq_n_u32(0)), b(a), c(a), d(a) {}
  Mask(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) : a(a), b(b), c(c), d(d) {}
  Mask(First lanes) {
    const int32x4_t count = vdupq_n_s32(static_cast<int32_t>(lanes.count > 16 ? 16 : lanes.count));
    const Ints at = lane_ids();
    a = vcgtq_s32(count, at.a), b = vcgtq_s32(count, at.b), c = vcgtq_s32(count, at.c), d = vcgtq_s32(count, at.d);
  }
};
EACH_PAIR(Mask, operator&, vandq_u32, Mask)
EACH_PAIR(Mask, operator|, vorrq_u32, Mask)
EACH_PAIR(Mask, without, vbicq_u32, Mask)
EACH(Mask, operator!, vmvnq_u32, Mask)
LANES_INLINE Mask &operator|=(Mask &x, Mask y) { return x = x | y; }
LANES_INLINE uint32_t bits(Mask mask) {
  constexpr uint8_t BITS[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vcombine_u16(vmovn_u32(mask.a), vmovn_u32(mask.b));
  const uint16x8_t high = vcombine_u16(vmovn_u32(mask.c), vmovn_u32(mask.d));
  const uint8x16_t one = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), vld1q_u8(BITS));
  return vaddv_u8(vget_low_u8(one)) | vaddv_u8(vget_high_u8(one)) << 8;
}

EACH_PAIR(Floats, operator+, vaddq_f32, Floats)
EACH_PAIR(Floats, operator-, vsubq_f32, Floats)
EACH_PAIR(Floats, operator*, vmulq_f32, Floats)
EACH_PAIR(Floats, operator/, vdivq_f32, Floats)

LANES_INLINE Floats broadcast(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {all, all, all, all};
}
LANES_INLINE Floats zeros() { return broadcast(0); }
LANES_INLINE Floats load(const float *at) { return {vld1q_f32(at), vld1q_f32(at + 4), vld1q_f32(at + 8), vld1q_f32(at + 12)}; }
LANES_INLINE void store(float *at, Floats v) {
  vst1q_f32(at, v.a), vst1q_f32(at + 4, v.b), vst1q_f32(at + 8, v.c), vst1q_f32(at + 12, v.d);
}
LANES_INLINE Floats load(const float *at, First lanes) {
  if (lanes.count >= 16) return load(at);
  float all[16] = {};
  std::memcpy(all, at, lanes.count * sizeof(float));
  return load(all);
}
LANES_INLINE void store(float *at, First lanes, Floats v) {
  if (lanes.count >= 16) return store(at, v);
  float all[16];
  store(all, v);
  std::memcpy(at, all, lanes.count * sizeof(float));
}

EACH_TRIPLE(Floats, add_product, vfmaq_f32, Floats, Floats)
EACH_TRIPLE(Floats, take_product, vfmsq_f32, Floats, Floats)
EACH(Floats, negative, vnegq_f32, Floats)
EACH(Floats, abs, vabsq_f32, Floats)
EACH(Floats, round_nearest, vrndnq_f32, Floats)
EACH_TRIPLE(Floats, select, vbslq_f32, Mask, Floats)
LANES_INLINE Floats fma(Floats x, Floats y, Floats z) { return add_product(z, x, y); }
LANES_INLINE Floats fnma(Floats x, Floats y, Floats z) { return take_product(z, x, y); }
LANES_INLINE Floats fms(Floats x, Floats y, Floats z) { return add_product(negative(z), x, y); }

EACH_PAIR(Mask, greater, vcgtq_f32, Floats)
EACH_PAIR(Mask, at_least, vcgeq_f32, Floats)
EACH_PAIR(Mask, less, vcltq_f32, Floats)
EACH_PAIR(Mask, equal, vceqq_f32, Floats)
LANES_INLINE Mask not_less(Floats x, Floats y) { return !less(x, y); }
LANES_INLINE Mask not_equal(Floats x, Floats y) { return !equal(x, y); }
LANES_INLINE Mask is_nan(Floats v) { return not_equal(v, v); }

// Not the instructions: those return NaN if one operand is NaN.
LANES_INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
LANES_INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
EACH_PAIR(Floats, max, larger, Floats)
EACH_PAIR(Floats, min, smaller, Floats)

LANES_INLINE float front(Floats v) { return vgetq_lane_f32(v.a, 0); }
LANES_INLINE float reduce_sum(Floats v) {
  const float32x4_t four = vaddq_f32(vaddq_f32(v.d, v.b), vaddq_f32(v.c, v.a));
  return vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
LANES_INLINE float reduce_max(Floats v) {
  const float32x4_t four = larger(larger(v.d, v.b), larger(v.c, v.a));
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}

LANES_INLINE Ints broadcast_int(int32_t x) {
  const int32x4_t all = vdupq_n_s32(x);
  return {all, all, all, all};
}
LANES_INLINE Ints zero_ints() { return broadcast_int(0); }
LANES_INLINE Ints load_ints(const void *at) {
  const auto from = static_cast<const uint8_t *>(at);  // may be unaligned
  return {vreinterpretq_s32_u8(vld1q_u8(from)), vreinterpretq_s32_u8(vld1q_u8(from + 16)),
          vreinterpretq_s32_u8(vld1q_u8(from + 32)), vreinterpretq_s32_u8(vld1q_u8(from + 48))};
}
LANES_INLINE Ints load_ints(const int32_t *at, First lanes) {
  if (lanes.count >= 16) return load_ints(at);
  int32_t all[16] = {};
  std::memcpy(all, at, lanes.count * sizeof(int32_t));
  return load_ints(all);
}
LANES_INLINE void store(int32_t *at, Ints v) {
  vst1q_s32(at, v.a), vst1q_s32(at + 4, v.b), vst1q_s32(at + 8, v.c), vst1q_s32(at + 12, v.d);
}
#define SHORTS(NAME, OPERATION)                                                                      \
  LANES_INLINE int32x4_t NAME(int32x4_t x, int32x4_t y) {                                            \
    return vreinterpretq_s32_s16(OPERATION(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));     \
  }                                                                                                  \
  EACH_PAIR(Ints, NAME, NAME, Ints)
SHORTS(add_shorts, vaddq_s16)
SHORTS(multiply_shorts, vmulq_s16)
#undef SHORTS
LANES_INLINE int32x4_t short_products(int32x4_t x, int32x4_t y) {
  const int16x8_t v = vreinterpretq_s16_s32(x), w = vreinterpretq_s16_s32(y);
  return vpaddq_s32(vmull_s16(vget_low_s16(v), vget_low_s16(w)), vmull_high_s16(v, w));
}
EACH_PAIR(Ints, short_products, short_products, Ints)
LANES_INLINE Ints table_lookup(const void *table, Ints places) {
  const uint8x16_t all = vld1q_u8(static_cast<const uint8_t *>(table));
  const auto of = [all](int32x4_t v) { return vreinterpretq_s32_u8(vqtbl1q_u8(all, vreinterpretq_u8_s32(v))); };
  return {of(places.a), of(places.b), of(places.c), of(places.d)};
}
EACH_PAIR(Ints, add, vaddq_s32, Ints)
EACH_PAIR(Ints, subtract, vsubq_s32, Ints)
EACH_PAIR(Ints, multiply, vmulq_s32, Ints)
EACH_PAIR(Ints, bit_and, vandq_s32, Ints)
EACH_PAIR(Ints, bit_xor, veorq_s32, Ints)
EACH_TRIPLE(Ints, select, vbslq_s32, Mask, Ints)
template <int BITS>
LANES_INLINE int32x4_t right(int32x4_t v) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), BITS)); }
template <int BITS>
LANES_INLINE Ints shift_left(Ints v) {
  return {vshlq_n_s32(v.a, BITS), vshlq_n_s32(v.b, BITS), vshlq_n_s32(v.c, BITS), vshlq_n_s32(v.d, BITS)};
}
template <int BITS>
LANES_INLINE Ints shift_right(Ints v) { return {right<BITS>(v.a), right<BITS>(v.b), right<BITS>(v.c), right<BITS>(v.d)}; }
LANES_INLINE int32_t reduce_min(Mask mask, Ints v) {
  const Ints kept = select(mask, v, broadcast_int(INT32_MAX));
  return vminvq_s32(vminq_s32(vminq_s32(kept.a, kept.b), vminq_s32(kept.c, kept.d)));
}
EACH(Floats, as_floats, vreinterpretq_f32_s32, Ints)
EACH(Ints, as_ints, vreinterpretq_s32_f32, Floats)
EACH(Floats, to_floats, vcvtq_f32_s32, Ints)
EACH(Ints, to_nearest, vcvtnq_s32_f32, Floats)
EACH(Ints, truncate, vcvtq_s32_f32, Floats)

LANES_INLINE Floats times_power(Floats v, Floats power) {
  return v * as_floats(shift_left<23>(add(to_nearest(power), broadcast_int(127))));
}
LANES_INLINE Floats exponent(Floats v) {
  return to_floats(subtract(shift_right<23>(as_ints(v)), broadcast_int(127)));
}
LANES_INLINE Floats mantissa(Floats v) {
  return as_floats(bit_xor(bit_and(as_ints(v), broadcast_int(0x007fffff)), broadcast_int(0x3f800000)));
}
LANES_INLINE Floats compress(Mask mask, Floats v) {
  float all[16], kept[16] = {};
  store(all, v);
  int count = 0;
  for (uint32_t left = bits(mask); left; left &= left - 1) kept[count++] = all[__builtin_ctz(left)];
  return load(kept);
}

LANES_INLINE void store_bytes(uint8_t *at, First lanes, Ints v) {
  const auto half = [](int32x4_t x, int32x4_t y) {
    return vmovn_u16(vcombine_u16(vmovn_u32(vreinterpretq_u32_s32(x)), vmovn_u32(vreinterpretq_u32_s32(y))));
  };
  uint8_t all[16];
  vst1_u8(all, half(v.a, v.b));
  vst1_u8(all + 8, half(v.c, v.d));
  std::memcpy(at, all, lanes.count >= 16 ? 16 : lanes.count);
}
LANES_INLINE Ints widen(uint16x8_t low, uint16x8_t high) {
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
          vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))};
}
LANES_INLINE Ints load_bytes(const uint8_t *at) { return widen(vmovl_u8(vld1_u8(at)), vmovl_u8(vld1_u8(at + 8))); }
LANES_INLINE Ints load_bytes(const int8_t *at) {
  const int16x8_t low = vmovl_s8(vld1_s8(at)), high = vmovl_s8(vld1_s8(at + 8));
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}

// Calls f with 16 numbers of 16 bits, zeros beyond ``lanes``.
template <class F>
LANES_INLINE auto with_shorts(const uint16_t *at, First lanes, F f) {
  uint16_t all[16] = {};
  if (lanes.count < 16) std::memcpy(all, at, lanes.count * sizeof(uint16_t)), at = all;
  return f(vld1q_u16(at), vld1q_u16(at + 8));
}
LANES_INLINE void store_shorts(uint16_t *at, First lanes, uint16x8_t low, uint16x8_t high) {
  uint16_t all[16];
  vst1q_u16(all, low);
  vst1q_u16(all + 8, high);
  std::memcpy(at, all, (lanes.count >= 16 ? 16 : lanes.count) * sizeof(uint16_t));
}
LANES_INLINE Ints load_shorts(const uint16_t *at, First lanes) { return with_shorts(at, lanes, widen); }
LANES_INLINE void store_shorts(uint16_t *at, First lanes, Ints v) {
  const auto half = [](int32x4_t x, int32x4_t y) {
    return vcombine_u16(vmovn_u32(vreinterpretq_u32_s32(x)), vmovn_u32(vreinterpretq_u32_s32(y)));
  };
  store_shorts(at, lanes, half(v.a, v.b), half(v.c, v.d));
}
LANES_INLINE Floats load_half(const uint16_t *at, First lanes) {
  return with_shorts(at, lanes, [](uint16x8_t low, uint16x8_t high) -> Floats {
    const float16x8_t l = vreinterpretq_f16_u16(low), h = vreinterpretq_f16_u16(high);
    return {vcvt_f32_f16(vget_low_f16(l)), vcvt_high_f32_f16(l), vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  });
}
LANES_INLINE float32x4_t round_half(float32x4_t v) { return vcvt_f32_f16(vcvt_f16_f32(v)); }
EACH(Floats, round_half, round_half, Floats)
LANES_INLINE void store_half(uint16_t *at, First lanes, Floats v) {
  const auto half = [](float32x4_t x, float32x4_t y) {
    return vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x), vcvt_f16_f32(y)));
  };
  store_shorts(at, lanes, half(v.a, v.b), half(v.c, v.d));
}

LANES_INLINE Doubles zero_doubles() { return {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)}; }
EACH_PAIR(Doubles, operator+, vaddq_f64, Doubles)
LANES_INLINE Doubles add_lanes(Doubles sum, Floats v) {
  const auto eight = [](float32x4_t low, float32x4_t high) -> Doubles {
    return {vcvt_f64_f32(vget_low_f32(low)), vcvt_high_f64_f32(low), vcvt_f64_f32(vget_low_f32(high)), vcvt_high_f64_f32(high)};
  };
  return sum + eight(v.a, v.b) + eight(v.c, v.d);
}
LANES_INLINE double reduce_sum(Doubles v) {
  return vaddvq_f64(vaddq_f64(vaddq_f64(v.d, v.b), vaddq_f64(v.c, v.a)));
}

EACH(Floats, swap_pairs, vrev64q_f32, Floats)
EACH_PAIR(Floats, first_of_pairs, vtrn1q_f32, Floats)
EACH_PAIR(Floats, second_of_pairs, vtrn2q_f32, Floats)
LANES_INLINE Floats even_twice(Floats v) { return first_of_pairs(v, v); }
LANES_INLINE Floats odd_twice(Floats v) { return second_of_pairs(v, v); }
LANES_INLINE Floats fma_subadd(Floats x, Floats y, Floats z) { return fma(x, y, first_of_pairs(negative(z), swap_pairs(z))); }

// ``quarters``: per quarter, the sums of four vectors; ``whole`` adds the quarters.
LANES_INLINE float32x4_t quarter(float32x4_t s, float32x4_t t, float32x4_t u, float32x4_t v) {
  const float64x2_t x = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(s, t), vzip2q_f32(s, t)));
  const float64x2_t y = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(u, v), vzip2q_f32(u, v)));
  return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
}
LANES_INLINE Floats quarters(const Floats *s) {
  return {quarter(s[0].a, s[1].a, s[2].a, s[3].a), quarter(s[0].b, s[1].b, s[2].b, s[3].b),
          quarter(s[0].c, s[1].c, s[2].c, s[3].c), quarter(s[0].d, s[1].d, s[2].d, s[3].d)};
}
LANES_INLINE float32x4_t whole(Floats v) { return vaddq_f32(vaddq_f32(v.a, v.b), vaddq_f32(v.c, v.d)); }
LANES_INLINE Floats whole(const Floats *four) { return {whole(four[0]), whole(four[1]), whole(four[2]), whole(four[3])}; }

#define HAS_BYTE_PRODUCTS 1
constexpr bool BYTES_ARE_SIGNED = true;
LANES_INLINE int32x4_t add_byte_products(int32x4_t sum, int32x4_t x, int32x4_t w) {
  const int8x16_t v = vreinterpretq_s8_s32(x), u = vreinterpretq_s8_s32(w);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, v, u);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(v), vget_low_s8(u)), high = vmull_high_s8(v, u);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
EACH_TRIPLE(Ints, add_byte_products, add_byte_products, Ints, Ints)
LANES_INLINE Ints in_register(Ints v) { return v; }

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_ROW_PAIRS 1
struct Pair {
  Ints low, high;  // of every four lanes, the first two and the last two
};
LANES_INLINE int32x4_t firsts(int32x4_t x, int32x4_t y) {
  return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
}
LANES_INLINE int32x4_t seconds(int32x4_t x, int32x4_t y) {
  return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
}
EACH_PAIR(Ints, firsts, firsts, Ints)
EACH_PAIR(Ints, seconds, seconds, Ints)
EACH_PAIR(Ints, zip_low, vzip1q_s32, Ints)
EACH_PAIR(Ints, zip_high, vzip2q_s32, Ints)
LANES_INLINE Pair side_by_side(Ints x, Ints y) { return {firsts(x, y), seconds(x, y)}; }
LANES_INLINE Pair eights(Ints w, Ints next) { return {zip_low(w, next), zip_high(w, next)}; }
LANES_INLINE int32x4_t add_eights(int32x4_t sums, int32x4_t rows, int32x4_t w) {
  return vmmlaq_s32(sums, vreinterpretq_s8_s32(rows), vreinterpretq_s8_s32(w));
}
EACH_TRIPLE(Ints, add_eights, add_eights, Ints, Ints)
// Eight bytes of two rows, ``apart`` bytes from each other.
LANES_INLINE void add_byte_products(Pair &sums, const Pair &w, const void *row, int64_t apart) {
  const auto at = static_cast<const uint8_t *>(row);
  const int32x4_t both = vreinterpretq_s32_u8(vcombine_u8(vld1_u8(at), vld1_u8(at + apart)));
  const Ints rows = {both, both, both, both};
  sums.low = add_eights(sums.low, rows, w.low);
  sums.high = add_eights(sums.high, rows, w.high);
}
#endif
#undef EACH
#undef EACH_PAIR
#undef EACH_TRIPLE
