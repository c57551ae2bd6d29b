// A vector of sixteen lanes: one register of AVX-512, two of AVX2 or four of NEON. All give the same bits: lanes are
// independent, and reductions add halves, then quarters, and so on.
//
// ``Floats`` and ``Ints`` are 16 numbers of 32 bits, ``Mask`` is a bool for each, ``First`` the mask of the first n
// lanes. ``max`` and ``min`` return the second argument if one is NaN. ``fma``: a b + c; ``fnma``: c - a b; ``fms``: a
// b - c. ``exponent`` and ``mantissa`` take positive normal numbers; ``times_power`` whole powers with normal results.
// ``compress`` moves the lanes of a mask to the front and zeros the others. ``short_products``: 16-bit products, pairs
// added. ``add_byte_products``, if there is one: dot products of four bytes per lane, the second operand signed, the
// first one if BYTES_ARE_SIGNED. ``table_lookup``: a table of 16 bytes, indexed by each byte.
//
// HAS_ROW_PAIRS: one instruction multiplies two rows. ``side_by_side`` interleaves their sums into a ``Pair``, and the
// two halves of a pair back into rows. ``eights`` interleaves two vectors with four bytes per lane to eight bytes per
// lane.
#pragma once
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "lanes_avx512.h"
#elif defined(__aarch64__)
#include "lanes_neon.h"
#else
#include "lanes_avx2.h"
#endif

#include <initializer_list>

#if defined(HAS_ROW_PAIRS)
constexpr int ROWS_PER_INSTRUCTION = 2;
#else
constexpr int ROWS_PER_INSTRUCTION = 1;
#endif

LANES_INLINE Ints short_pairs(Ints v) { return short_products(v, broadcast_int(0x00010001)); }
LANES_INLINE Ints twice(Ints v) { return add(v, shift_left<16>(v)); }  // each 16 bits twice

// 16-bit types in memory.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

LANES_INLINE Floats load(const Bfloat16 *at, First lanes) {
  return as_floats(shift_left<16>(load_shorts(&at->bits, lanes)));
}
LANES_INLINE Ints to_bfloat16(Floats v) {
  const Ints odd = bit_and(shift_right<16>(as_ints(v)), broadcast_int(1));  // round to nearest even
  const Ints top = shift_right<16>(add(add(as_ints(v), odd), broadcast_int(0x7fff)));
  return select(is_nan(v), broadcast_int(0x7fc0), top);
}
LANES_INLINE void store(Bfloat16 *at, First lanes, Floats v) { store_shorts(&at->bits, lanes, to_bfloat16(v)); }
LANES_INLINE Floats load(const Float16 *at, First lanes) { return load_half(&at->bits, lanes); }
LANES_INLINE void store(Float16 *at, First lanes, Floats v) { store_half(&at->bits, lanes, v); }

// Rounded to T and back.
template <class T>
Floats rounded(Floats v);
template <>
LANES_INLINE Floats rounded<float>(Floats v) { return v; }
template <>
LANES_INLINE Floats rounded<Bfloat16>(Floats v) { return as_floats(shift_left<16>(to_bfloat16(v))); }
template <>
LANES_INLINE Floats rounded<Float16>(Floats v) { return round_half(v); }

// e^x to about one ulp: 2^n times a polynomial of the remainder.
LANES_INLINE Floats exponential(Floats x) {
  x = min(broadcast(88.0f), max(broadcast(-87.0f), x));  // NaN stays NaN
  const Floats n = round_nearest(x * broadcast(1.44269504f));
  Floats r = fnma(n, broadcast(0.693359375f), x);
  r = fnma(n, broadcast(-2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  return times_power(p, n);
}

// ln x of positive normal numbers: cephes' polynomial around 1.
LANES_INLINE Floats logarithm(Floats x) {
  const Floats one = broadcast(1);
  Floats m = mantissa(x), e = exponent(x);
  const Mask large = greater(m, broadcast(1.41421356f));
  m = select(large, m * broadcast(0.5f), m);
  e = select(large, e + one, e);
  const Floats r = m - one, z = r * r;
  Floats p = broadcast(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, r, broadcast(c));
  p = p * z * r;
  p = fma(e, broadcast(-2.12194440e-4f), p);
  p = fnma(broadcast(0.5f), z, p);
  return fma(e, broadcast(0.693359375f), r + p);
}

LANES_INLINE Floats capped(Floats v, float softcap) {  // softcap * tanh(v / softcap)
  const Floats one = broadcast(1), two = broadcast(2), cap = broadcast(softcap);
  const Floats power = exponential(two * (v / cap));
  return cap * (one - two / (power + one));
}
