// Integer dot products of weights' quants and rows' quants.
#pragma once
#include <cstring>

#include "quants.h"

namespace {

// A block's integer sums for 16 outputs and one row: AVX-VNNI, AVX-512 VNNI or NEON dot products, or else maddubs.
#if defined(HAS_BYTE_PRODUCTS)
template <int MAX_QUANT>
struct Sum {
  static constexpr bool SIGNED = BYTES_ARE_SIGNED && MAX_QUANT > 127;  // subtract 128: the operands are signed
  Ints v;
  static Ints bytes(Ints w) { return SIGNED ? bit_xor(w, broadcast_int(static_cast<int32_t>(0x80808080))) : w; }
  void begin(int32_t start) { v = broadcast_int(start); }
  void add(Ints w, Ints x) { v = add_byte_products(v, bytes(w), x); }
  Ints end() const { return v; }
  static Ints scale(Ints whole) { return whole; }
  Ints scaled(Ints scale) const { return multiply(v, scale); }
};
#else
template <int MAX_QUANT>
struct Sum {
  static constexpr bool SIGNED = MAX_QUANT > 127;
  static constexpr bool SHORT = 16 * 127 * MAX_QUANT < 1 << 15;  // a block's sums fit 16 bits
  Ints v;
  int32_t start;
  void begin(int32_t from) {
    v = zero_ints();
    start = from;
  }
  void add(Ints w, Ints x) {
    if constexpr (SIGNED) {  // |w| <= 128, |x| <= 127: pairs <= 32,512
      const Ints quants = bit_xor(w, broadcast_int(static_cast<int32_t>(0x80808080)));
      v = ::add(v, short_pairs(byte_pairs(byte_sizes(quants), with_sign_of(x, quants))));
    } else if constexpr (SHORT) {
      v = add_shorts(v, byte_pairs(w, x));
    } else {
      v = ::add(v, short_pairs(byte_pairs(w, x)));
    }
    stay(v);
  }
  Ints end() const { return ::add(SHORT ? short_pairs(v) : v, broadcast_int(start)); }
  static Ints scale(Ints whole) { return SHORT ? twice(whole) : whole; }
  Ints scaled(Ints scale) const { return SHORT ? short_products(v, scale) : multiply(v, scale); }
};
#endif

LANES_INLINE Ints four(const int8_t *at) {
  int32_t bytes;
  std::memcpy(&bytes, at, 4);
  return broadcast_int(bytes);
}

#if defined(HAS_ROW_PAIRS)
// The first PAIRS pairs of rows, by ARM's i8mm.
template <class K, int PAIRS>
LANES_INLINE void add_pair_products(const Ints *quants, const int8_t *x, Sum<K::MAX_QUANT> (*products)[K::NUM_SCALES]) {
  Pair sums[PAIRS][K::NUM_SCALES];
#pragma GCC unroll 4
  for (int i = 0; i < PAIRS; i++)
#pragma GCC unroll 2
    for (int p = 0; p < K::NUM_SCALES; p++) sums[i][p] = side_by_side(products[2 * i][p].v, products[2 * i + 1][p].v);
#pragma GCC unroll 4
  for (int j = 0; j < 8; j += 2) {
    const Pair w = eights(Sum<K::MAX_QUANT>::bytes(quants[j]), Sum<K::MAX_QUANT>::bytes(quants[j + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < PAIRS; i++)
      add_byte_products(sums[i][j * K::NUM_SCALES / 8], w, x + 4 * INPUTS * i + 4 * j, 2 * INPUTS);
  }
#pragma GCC unroll 4
  for (int i = 0; i < PAIRS; i++)
#pragma GCC unroll 2
    for (int p = 0; p < K::NUM_SCALES; p++) {
      const Pair rows = side_by_side(sums[i][p].low, sums[i][p].high);
      products[2 * i][p].v = rows.low;
      products[2 * i + 1][p].v = rows.high;
    }
}
#endif

// Adds the products of one block and ROWS rows.
template <class K, int ROWS>
LANES_INLINE void add_products(const Ints *quants, const int8_t *x, Sum<K::MAX_QUANT> (*products)[K::NUM_SCALES]) {
  constexpr int ALONE = ROWS_PER_INSTRUCTION == 2 ? ROWS / 2 * 2 : 0;
#if defined(HAS_ROW_PAIRS)
  if constexpr (ALONE > 0) add_pair_products<K, ALONE / 2>(quants, x, products);
#endif
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
    for (int r = ALONE; r < ROWS; r++) {
      products[r][0].add(quants[j], four(x + 2 * INPUTS * r + 4 * j));
      products[r][K::NUM_SCALES - 1].add(quants[4 + j], four(x + 2 * INPUTS * r + 16 + 4 * j));
    }
}

}  // namespace
