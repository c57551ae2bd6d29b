// Layout of block-quantized weights (ggml's types), repacked: a record interleaves the blocks of 16 outputs, as
// ggml's block_q4_Kx8 does with 8. A record of a K type has 8 blocks of 32 inputs and a head with d and dmin.
//
// A block has the quants first, then the scales and mins of its 16 outputs. Quants are vectors of 16 x 4 bytes: vector j
// has inputs 4 j to 4 j + 3 of every output. Types with less than 8 bits pack several vectors into one; inputs 16 to 31
// are in the higher bits. A weight is d (quant - ZERO) + m.
//
// INT_SCALES: scales and mins of the 8 blocks are integers. They multiply the integer sums; d and dmin multiply once
// per 256 inputs, as in ggml's vec_dot_q4_K_q8_K.
#pragma once
#include "lanes.h"
#include "structs.h"

namespace {

constexpr int64_t OUTPUTS = 16, INPUTS = 32;  // of a block

// ``get`` unpacks the quants of block ``at`` of record ``head`` into eight vectors, inputs in order. EVERY_ROW_COUNT:
// code for each number of rows; it takes long to compile.
template <int MAX>
struct Bits4 {
  static constexpr bool EVERY_ROW_COUNT = true;
  static constexpr int MAX_QUANT = MAX;
  static constexpr int64_t QUANT_BYTES = 256;  // of a block
  static void get(const char *, const char *at, Ints *quants) {
    const Ints mask = broadcast_int(0x0f0f0f0f);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const Ints v = load_ints(at + 64 * j);
      quants[j] = bit_and(v, mask);
      quants[4 + j] = bit_and(shift_right<4>(v), mask);
    }
  }
};

template <int MAX>
struct Bits8 {
  static constexpr bool EVERY_ROW_COUNT = true;
  static constexpr int MAX_QUANT = MAX;
  static constexpr int64_t QUANT_BYTES = 512;
  static void get(const char *, const char *at, Ints *quants) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) quants[j] = load_ints(at + 64 * j);
  }
};

// Two bits: each vector holds half of the inputs.
struct Bits2 {
  static constexpr bool EVERY_ROW_COUNT = false;
  static constexpr int MAX_QUANT = 3;
  static constexpr int64_t QUANT_BYTES = 128;
  static void get(const char *, const char *at, Ints *quants) {
    const Ints mask = broadcast_int(0x03030303);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const Ints v = load_ints(at + 64 * half);
      quants[4 * half] = bit_and(v, mask);
      quants[4 * half + 1] = bit_and(shift_right<2>(v), mask);
      quants[4 * half + 2] = bit_and(shift_right<4>(v), mask);
      quants[4 * half + 3] = bit_and(shift_right<6>(v), mask);
    }
  }
};

// Three bits: as two, and a vector with the high bits.
struct Bits3 {
  static constexpr bool EVERY_ROW_COUNT = false;
  static constexpr int MAX_QUANT = 7;
  static constexpr int64_t QUANT_BYTES = 192;
  static void get(const char *head, const char *at, Ints *quants) {
    Bits2::get(head, at, quants);
    const Ints v = load_ints(at + 128), mask = broadcast_int(0x04040404);
    const Ints high_bits[8] = {shift_left<2>(v),  shift_left<1>(v),  v,
                            shift_right<1>(v), shift_right<2>(v), shift_right<3>(v),
                            shift_right<4>(v), shift_right<5>(v)};
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) quants[j] = bit_xor(quants[j], bit_and(high_bits[j], mask));
  }
};

// Four bits that index a codebook.
LANES_INLINE void get_codebook(const void *table, const char *at, Ints *quants) {
  Bits4<15>::get(nullptr, at, quants);
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) quants[j] = table_lookup(table, quants[j]);
}

template <const uint8_t *TABLE, int MAX>
struct Codebook {
  static constexpr bool EVERY_ROW_COUNT = false;
  static constexpr int MAX_QUANT = MAX;
  static constexpr int64_t QUANT_BYTES = 256;
  static void get(const char *, const char *at, Ints *quants) { get_codebook(TABLE, at, quants); }
};

// Scales and mins of a block: one for its 32 inputs, or (NUM_SCALES = 2) one for each 16.
template <int NUM_SCALES>
struct Scales {
  Floats d[NUM_SCALES], m[NUM_SCALES];
};

LANES_INLINE Floats halves(const char *at) { return load_half(reinterpret_cast<const uint16_t *>(at), first(16)); }

// d times the integer scales of a block.
template <int NUM_SCALES>
LANES_INLINE Scales<NUM_SCALES> times(Floats step, const char *at) {
  const auto numbers = reinterpret_cast<const int8_t *>(at);
  Scales<NUM_SCALES> result{};
#pragma GCC unroll 2
  for (int p = 0; p < NUM_SCALES; p++) result.d[p] = step * to_floats(load_bytes(numbers + 16 * p));
  return result;
}

template <class L, int ZERO_>
struct Scale : L {
  static constexpr int NUM_SCALES = 1, ZERO = ZERO_;
  static constexpr bool HAS_MINS = false, INT_SCALES = false;
  static constexpr int64_t HEAD = 0, BLOCKS = 1, BLOCK = L::QUANT_BYTES + 32;
  static Scales<1> scales(const char *, const char *at) { return {{halves(at + L::QUANT_BYTES)}, {}}; }
};

template <class L>
struct ScaleMin : L {
  static constexpr int NUM_SCALES = 1, ZERO = 0;
  static constexpr bool HAS_MINS = true, INT_SCALES = false;
  static constexpr int64_t HEAD = 0, BLOCKS = 1, BLOCK = L::QUANT_BYTES + 64;
  static Scales<1> scales(const char *, const char *at) {
    return {{halves(at + L::QUANT_BYTES)}, {halves(at + L::QUANT_BYTES + 32)}};
  }
};

// block_q4_K, block_q5_K: d, dmin, 6-bit scales and mins. dmin is subtracted, so m = -dmin * min.
template <class L>
struct SuperScaleMin : L {
  static constexpr int NUM_SCALES = 1, ZERO = 0;
  static constexpr bool HAS_MINS = true, INT_SCALES = true;
  static constexpr int64_t HEAD = 64, BLOCKS = 8, BLOCK = L::QUANT_BYTES + 32;
  static Ints scale(const char *at) { return load_bytes(reinterpret_cast<const uint8_t *>(at + L::QUANT_BYTES)); }
  static Ints mins(const char *at) { return load_bytes(reinterpret_cast<const uint8_t *>(at + L::QUANT_BYTES + 16)); }
  static Scales<1> scales(const char *head, const char *at) {
    return {{halves(head) * to_floats(scale(at))}, {zeros() - halves(head + 32) * to_floats(mins(at))}};
  }
};

// block_q6_K, block_q3_K (NUM_SCALES = 2), block_iq4_xs: d and integer scales.
template <class L, int ZERO_, int NUM_SCALES_>
struct SuperScale : L {
  static constexpr int NUM_SCALES = NUM_SCALES_, ZERO = ZERO_;
  static constexpr bool HAS_MINS = false, INT_SCALES = false;
  static constexpr int64_t HEAD = 32, BLOCKS = 8, BLOCK = L::QUANT_BYTES + 16 * NUM_SCALES;
  static Scales<NUM_SCALES> scales(const char *head, const char *at) {
    return times<NUM_SCALES>(halves(head), at + L::QUANT_BYTES);
  }
};

// block_q2_K: d, dmin, 4-bit scales (low) and mins (high bits of a byte), for each 16 inputs.
template <class L>
struct SuperScaleMinHalves : L {
  static constexpr int NUM_SCALES = 2, ZERO = 0;
  static constexpr bool HAS_MINS = true, INT_SCALES = false;
  static constexpr int64_t HEAD = 64, BLOCKS = 8, BLOCK = L::QUANT_BYTES + 32;
  static Scales<2> scales(const char *head, const char *at) {
    const Floats scale = halves(head), least = zeros() - halves(head + 32);
    const auto both = reinterpret_cast<const uint8_t *>(at + L::QUANT_BYTES);
    const Ints low = load_bytes(both), high = load_bytes(both + 16), mask = broadcast_int(15);
    return {{scale * to_floats(bit_and(low, mask)), scale * to_floats(bit_and(high, mask))},
            {least * to_floats(shift_right<4>(low)), least * to_floats(shift_right<4>(high))}};
  }
};

// block_mxfp4: an E8M0 scale, as GGML_E8M0_TO_FP32_HALF: 2^(e - 128). It may be denormal, so it is a product of two.
template <class L, int ZERO_>
struct ScaleE8M0 : L {
  static constexpr int NUM_SCALES = 1, ZERO = ZERO_;
  static constexpr bool HAS_MINS = false, INT_SCALES = false;
  static constexpr int64_t HEAD = 0, BLOCKS = 1, BLOCK = L::QUANT_BYTES + 16;
  static Floats power(Ints exponent) { return as_floats(shift_left<23>(add(exponent, broadcast_int(63)))); }
  static Scales<1> scales(const char *, const char *at) {
    const Ints byte = load_bytes(reinterpret_cast<const uint8_t *>(at + L::QUANT_BYTES)), half = shift_right<1>(byte);
    return {{power(half) * power(subtract(byte, half))}, {}};
  }
};

// Other types with at most 16 values, from -64 to 63, and integer scales for each 16 inputs. The codebook and a float32
// d come first in the record.
struct codes {
  static constexpr bool EVERY_ROW_COUNT = false;
  static constexpr int MAX_QUANT = 127, NUM_SCALES = 2, ZERO = 64;
  static constexpr bool HAS_MINS = false, INT_SCALES = false;
  static constexpr int64_t QUANT_BYTES = 256, TABLE = 16, HEAD = TABLE + 64, BLOCKS = 8, BLOCK = QUANT_BYTES + 32;
  static void get(const char *head, const char *at, Ints *quants) { get_codebook(head, at, quants); }
  static Scales<2> scales(const char *head, const char *at) {
    return times<2>(load(reinterpret_cast<const float *>(head + TABLE)), at + QUANT_BYTES);
  }
};

// ggml's kvalues_iq4nl + 128 and kvalues_mxfp4 + 12.
constexpr uint8_t IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// ggml's block and dot product. The dot products of all types are ``add_block`` in quants.cpp; on AMX ``pass_by_blocks``
// and ``ByRecords``.
using q4_0 = Scale<Bits4<15>, 8>;                // block_q4_0: d; vec_dot_q4_0_q8_0
using q4_1 = ScaleMin<Bits4<15>>;                // block_q4_1: d, m; vec_dot_q4_1_q8_1
using q4_k = SuperScaleMin<Bits4<15>>;           // block_q4_K: d, dmin, 6-bit scales and mins; vec_dot_q4_K_q8_K
using q5_0 = Scale<Bits8<31>, 16>;               // block_q5_0: d; vec_dot_q5_0_q8_0
using q5_1 = ScaleMin<Bits8<31>>;                // block_q5_1: d, m; vec_dot_q5_1_q8_1
using q5_k = SuperScaleMin<Bits8<31>>;           // block_q5_K: d, dmin, 6-bit scales and mins; vec_dot_q5_K_q8_K
using q6_k = SuperScale<Bits8<63>, 32, 2>;       // block_q6_K: d, 8-bit scales; vec_dot_q6_K_q8_K
using q8_0 = Scale<Bits8<255>, 128>;             // block_q8_0: d; vec_dot_q8_0_q8_0
using iq4_nl = Scale<Codebook<IQ4, 255>, 128>;   // block_iq4_nl: d, codebook; vec_dot_iq4_nl_q8_0
using iq4_xs = SuperScale<Codebook<IQ4, 255>, 128, 1>; // block_iq4_xs: d, 6-bit scales, codebook; vec_dot_iq4_xs_q8_K
using mxfp4 = ScaleE8M0<Codebook<E2M1, 24>, 12>; // block_mxfp4: e, codebook; vec_dot_mxfp4_q8_0
using q2_k = SuperScaleMinHalves<Bits2>;         // block_q2_K: d, dmin, 4-bit scales and mins; vec_dot_q2_K_q8_K
using q3_k = SuperScale<Bits3, 4, 2>;            // block_q3_K: d, 6-bit scales; vec_dot_q3_K_q8_K

template <class K>
constexpr int64_t RECORD = K::HEAD + K::BLOCKS * K::BLOCK;  // bytes

#define SAME(NAME, SIZE, BYTES) static_assert(INPUTS * NAME::BLOCKS == SIZE && RECORD<NAME> == BYTES);
QUANTS(SAME)
#undef SAME

}  // namespace
