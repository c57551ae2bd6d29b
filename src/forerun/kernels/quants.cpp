// Linear layers of block-quantized weights, as GGUF files have them (ggml's mul_mat and vec_dot_*).
//
// Rows are quantized to 8 bits with a d for each 32 inputs (as ggml's q8_0 and q8_1), or for each 256 where INT_SCALES
// (as q8_K); d is float32. Integer sums are exact in 32 bits. Float sums run over the inputs in one order. So a row's
// bits depend neither on the other rows nor on the processor.
#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "products.h"
#include "rows.h"
#include "tiles.h"

namespace {

constexpr int64_t AHEAD = 1 << 12;   // bytes from the weight in use to the prefetched one
constexpr int64_t CACHED = 1 << 18;  // bytes of quantized rows that each tile of weights is multiplied by
constexpr int ROWS_PER_PASS = 16;    // rows that share one read of the weights
constexpr int64_t LEAST_GROUPS = 4, MOST_GROUPS = 16;  // groups of rows quantized at a time
constexpr int FEW_ROWS = 8;          // INT_SCALES: up to this many rows the matrix unit multiplies block by block
constexpr int ROWS_IN_REGISTERS = 4; // a multiple of ROWS_PER_INSTRUCTION

// 32 inputs of a row, without their quants: as ggml's block_q8_1.
struct BlockQ8 {
  float d;
  float sums[2];     // d * sum of quants: of each half, or sums[0] of all
  int32_t start[2];  // -ZERO * sum of quants, from which integer sums begin
};

// 256 inputs of a row: as ggml's block_q8_K, a bsum for each 32.
struct alignas(64) BlockQ8K {
  Bfloat16 bsum_parts[32];  // each bsum as two exact terms, for the matrix unit; then zeros
  float d;
  int16_t bsums[8];
};

template <class K>
using RowBlock = std::conditional_t<K::INT_SCALES, BlockQ8K, BlockQ8>;
template <class K>
constexpr int64_t SPAN = K::INT_SCALES ? INPUTS * K::BLOCKS : INPUTS;

// A group of quantized rows. Two blocks of a row share a cache line; the same blocks of all rows are contiguous.
template <class K>
struct Rows {
  const int8_t *quants;
  const RowBlock<K> *row_blocks;  // [blocks, count]
  int64_t count;         // rows, with padding

  const int8_t *at(int64_t block) const { return quants + (block >> 1) * count * 2 * INPUTS + (block & 1) * INPUTS; }
};

template <class K>
constexpr int ZERO = Sum<K::MAX_QUANT>::SIGNED ? 0 : K::ZERO;

// sum += d_w * d_x * integer sum + m * d_x * sum of the row's quants
template <class K>
LANES_INLINE Floats add_scaled(Floats sum, const Ints *whole, const Scales<K::NUM_SCALES> &scales, const BlockQ8 &row_block) {
  const Floats d = broadcast(row_block.d);
#pragma GCC unroll 2
  for (int p = 0; p < K::NUM_SCALES; p++) sum = fma(to_floats(whole[p]), scales.d[p] * d, sum);
  if constexpr (K::HAS_MINS)
#pragma GCC unroll 2
    for (int p = 0; p < K::NUM_SCALES; p++) sum = fma(scales.m[p], broadcast(row_block.sums[p]), sum);
  return sum;
}

// The dot product of one block: vec_dot_q4_0_q8_0, vec_dot_q6_K_q8_K and so on, for 16 outputs and ROWS rows.
// ``quants`` are the unpacked weights, ``x`` the rows' quants.
template <class K, int ROWS>
LANES_INLINE void add_block(const Ints *quants, const Scales<K::NUM_SCALES> &scales, const int8_t *x, const BlockQ8 *row_blocks,
                            Floats *sums) {
  Sum<K::MAX_QUANT> products[ROWS][K::NUM_SCALES];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < K::NUM_SCALES; p++) products[r][p].begin(row_blocks[r].start[p]);
  add_products<K, ROWS>(quants, x, products);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    Ints whole[K::NUM_SCALES];
#pragma GCC unroll 2
    for (int p = 0; p < K::NUM_SCALES; p++) whole[p] = products[r][p].end();
    sums[r] = add_scaled<K>(sums[r], whole, scales, row_blocks[r]);
  }
}

// INT_SCALES (vec_dot_q4_K_q8_K, vec_dot_q5_K_q8_K): adds scale * sum of one block; ``add_record`` multiplies the totals
// of 256 inputs by d and subtracts the mins.
template <class K, int ROWS>
LANES_INLINE void add_block(const Ints *quants, const Ints &scale, const int8_t *x, const BlockQ8K *, Ints *totals) {
  Sum<K::MAX_QUANT> products[ROWS][1];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) products[r][0].begin(0);
  add_products<K, ROWS>(quants, x, products);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) totals[r] = add(totals[r], products[r][0].scaled(scale));
}

// ``add_block`` for ROWS rows, at most ROWS_IN_REGISTERS at a time, in parts as even as possible.
template <class K, int ROWS, int PART, class S, class N>
LANES_INLINE void add_blocks(const Ints *quants, const S &scales, const int8_t *x, const RowBlock<K> *row_blocks, N *sums) {
  constexpr int PARTS = (ROWS + ROWS_IN_REGISTERS - 1) / ROWS_IN_REGISTERS, UNITS = (ROWS + ROWS_PER_INSTRUCTION - 1) / ROWS_PER_INSTRUCTION;
  constexpr int FIRST = UNITS * PART / PARTS * ROWS_PER_INSTRUCTION, END = std::min(ROWS, UNITS * (PART + 1) / PARTS * ROWS_PER_INSTRUCTION);
  add_block<K, END - FIRST>(quants, scales, x + 2 * INPUTS * FIRST, row_blocks + FIRST, sums + FIRST);
  if constexpr (PART + 1 < PARTS) add_blocks<K, ROWS, PART + 1>(quants, scales, x, row_blocks, sums);
}

// out += d * d_x * total - dmin * d_x * mins
LANES_INLINE void add_record(const char *head, int64_t record, float d, Ints total, Floats mins, float *out) {
  const Floats before = record ? load(out) : zeros(), scale = halves(head), least = halves(head + 32);
  const Floats sum = fma(to_floats(total), scale * broadcast(d), before);
  store(out, fnma(mins, least * broadcast(d), sum));
}

// The mins times bsums of each row, then ``add_record``; clears the totals.
template <class K, int ROWS>
LANES_INLINE void add_records(const char *head, int64_t record, const BlockQ8K *row_blocks, Ints *totals, float *out) {
  int32_t saved[OUTPUTS * ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    store(saved + OUTPUTS * r, totals[r]);
    totals[r] = zero_ints();
  }
  const char *const at = head + K::HEAD;
  Ints mins[K::BLOCKS / 2];
#pragma GCC unroll 4
  for (int b = 0; b < K::BLOCKS / 2; b++)
    mins[b] = add(K::mins(at + 2 * b * K::BLOCK), shift_left<16>(K::mins(at + (2 * b + 1) * K::BLOCK)));
#pragma GCC unroll 1
  for (int r = 0; r < ROWS; r++) {
    Ints whole = zero_ints();
#pragma GCC unroll 4
    for (int b = 0; b < K::BLOCKS / 2; b++)
      whole = add(whole, short_products(mins[b], four(reinterpret_cast<const int8_t *>(row_blocks[r].bsums + 2 * b))));
    add_record(head, record, row_blocks[r].d, load_ints(saved + OUTPUTS * r), to_floats(whole), out + OUTPUTS * r);
  }
}

// Sums in registers: floats of all blocks, or integers of one record.
template <bool INT_SCALES>
struct Accumulator {
  using Number = Floats;
  static Number zero() { return zeros(); }
};
template <>
struct Accumulator<true> {
  using Number = Ints;
  static Number zero() { return zero_ints(); }
};

// 16 outputs of ROWS rows.
template <class K, int ROWS>
void pass(const char *w, const Rows<K> &x, int64_t records, float *out, Prefetcher prefetcher) {
  const int8_t *at = x.quants;
  const RowBlock<K> *row_blocks = x.row_blocks;
  typename Accumulator<K::INT_SCALES>::Number sums[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sums[r] = Accumulator<K::INT_SCALES>::zero();
  for (int64_t record = 0; record < records; record++) {
    const char *const head = w;
    w += K::HEAD;
    prefetcher.at += K::HEAD;
    for (int64_t block = record * K::BLOCKS, end = block + K::BLOCKS; block < end; block++, w += K::BLOCK) {
      if (prefetcher.step) {
        for (int64_t i = 0; i < K::BLOCK; i += 64) prefetcher.line(i);
        prefetcher.at += prefetcher.step;
      }
      Ints quants[8];
      K::get(head, w, quants);
      if constexpr (K::INT_SCALES)
        add_blocks<K, ROWS, 0>(quants, Sum<K::MAX_QUANT>::scale(K::scale(w)), at, row_blocks, sums);
      else
        add_blocks<K, ROWS, 0>(quants, K::scales(head, w), at, row_blocks, sums);
      at += block & 1 ? (2 * x.count - 1) * INPUTS : INPUTS;
      if (!K::INT_SCALES) row_blocks += x.count;
    }
    if constexpr (K::INT_SCALES) {
      add_records<K, ROWS>(head, record, row_blocks, sums, out);
      row_blocks += x.count;
    }
  }
  if constexpr (!K::INT_SCALES)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) store(out + OUTPUTS * r, sums[r]);
}

// The number of rows with padding, for which there is code. Results of a padding row are ignored.
template <class K>
constexpr int64_t padded_rows(int64_t rows) { return K::EVERY_ROW_COUNT || rows <= 6 ? rows : rows + rows % 2; }

template <class K, int ROWS>
void passes(int64_t rows, const char *w, const Rows<K> &x, int64_t records, float *out, Prefetcher prefetcher) {
  if constexpr (padded_rows<K>(ROWS) == ROWS)
    if (rows == ROWS) return pass<K, ROWS>(w, x, records, out, prefetcher);
  if constexpr (ROWS > 1) passes<K, ROWS - 1>(rows, w, x, records, out, prefetcher);
}

// Bytes of a row in a tile: half a block, a block, or two.
template <class K>
constexpr int64_t tile_row_bytes(int64_t rows) {
  return K::INT_SCALES && rows > FEW_ROWS ? 2 * INPUTS : INPUTS / K::NUM_SCALES;
}

// Exact for integers with at most 8 significant bits.
inline Bfloat16 as_bfloat16(int32_t whole) {
  const auto value = static_cast<float>(whole);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return {static_cast<uint16_t>(bits >> 16)};
}

// Quantizes a row (quantize_row_q8_1, quantize_row_q8_K) into every ``count``-th block of ``to``. d is NaN or infinite
// if an input is, and then so is every output. ``zero``: the weights' ZERO; ``parts``: their NUM_SCALES.
template <class S, class T>
void quantize(const T *x, int64_t inputs, int64_t spans, int8_t *quants, S *to, int64_t count, int zero, int parts) {
  constexpr bool INT_SCALES = std::is_same<S, BlockQ8K>::value;
  constexpr int64_t SIZE = INPUTS * (INT_SCALES ? 8 : 1), VECTORS = SIZE / 16;
  for (int64_t from = 0, end = SIZE * spans, block = 0; from < end; from += SIZE, to += count) {
    const auto get = [=](int64_t v) {
      const int64_t at = from + 16 * v;
      return at < inputs ? load(x + at, first(inputs - at)) : zeros();
    };
    Mask broken{};
    Floats top = zeros();
    for (int64_t v = 0; v < VECTORS; v++) {
      broken |= is_nan(get(v));
      top = max(top, abs(get(v)));
    }
    const float largest = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(top);
    const float d = largest <= MIN_ABSMAX ? 1 : largest / 127;
    const Floats scale = broadcast(1 / d);
    to->d = d;
    if constexpr (INT_SCALES) std::memset(to->bsum_parts, 0, sizeof to->bsum_parts);
    for (int64_t v = 0; v < VECTORS; v += 2, block++) {
      int8_t *const at = quants + (block >> 1) * count * 2 * INPUTS + (block & 1) * INPUTS;
      const Ints low = to_nearest(get(v) * scale), high = to_nearest(get(v + 1) * scale);
      store_bytes(reinterpret_cast<uint8_t *>(at), first(16), low);
      store_bytes(reinterpret_cast<uint8_t *>(at + 16), first(16), high);
      const auto sum = [=](Ints of) {
        return std::isfinite(d) ? static_cast<int32_t>(reduce_sum(to_floats(of))) : 0;
      };
      if constexpr (INT_SCALES) {
        const int32_t whole = sum(add(low, high)), top = whole & ~63;
        to->bsums[v / 2] = static_cast<int16_t>(whole);
        to->bsum_parts[v] = as_bfloat16(top);
        to->bsum_parts[v + 1] = as_bfloat16(whole - top);
      } else {
        const int32_t second = parts == 2 ? sum(high) : 0, first = parts == 2 ? sum(low) : sum(add(low, high));
        to->sums[0] = d * static_cast<float>(first);
        to->sums[1] = d * static_cast<float>(second);
        to->start[0] = -zero * first;
        to->start[1] = -zero * second;
      }
    }
  }
}

template <class T>
struct Output {
  T *y;
  const T *add;
  const float *bias;
  int64_t stride, outputs;  // stride in numbers

  void put(int64_t row, int64_t from, const float *sums) const {
    const First lanes = first(outputs - from);
    Floats v = load(sums);
    if (bias) v = v + load(bias + from, lanes);
    if (add) v = v + load(add + row * stride + from, lanes);
    store(y + row * stride + from, lanes, v);
  }
};

// Groups of at most ROWS_PER_PASS rows, as even as possible.
struct Groups {
  int64_t rows, count;
  explicit Groups(int64_t rows) : rows(rows), count((rows + ROWS_PER_PASS - 1) / ROWS_PER_PASS) {}
  int64_t most() const { return (rows + count - 1) / count; }
  int64_t begin(int64_t group) const { return group * (rows / count) + std::min(group, rows % count); }
};

// All groups of quantized rows, each with room for as many rows as the largest. The content of unused room is ignored.
template <class K>
struct QuantizedRows {
  Groups groups;
  int64_t lines, blocks_per_row, count;  // count: rows of a group, with padding
  int8_t *at;

  QuantizedRows(int64_t rows, int64_t blocks)
      : groups(rows), lines((blocks + 1) / 2), blocks_per_row(blocks * INPUTS / SPAN<K>), count(padded_rows<K>(groups.most())),
        at(reinterpret_cast<int8_t *>(aligned(workspace(groups.count * count * place(blocks) + 63)))) {}
  static char *aligned(char *workspace) { return workspace + -reinterpret_cast<uintptr_t>(workspace) % 64; }
  static int64_t place(int64_t blocks) {
    return (blocks + 1) / 2 * 2 * INPUTS + blocks * INPUTS / SPAN<K> * static_cast<int64_t>(sizeof(RowBlock<K>));
  }
  int8_t *quants(int64_t group) const { return at + group * count * lines * 2 * INPUTS; }
  RowBlock<K> *row_blocks_of(int64_t group) const {
    return reinterpret_cast<RowBlock<K> *>(quants(groups.count)) + group * count * blocks_per_row;
  }
  Rows<K> rows(int64_t group) const { return {quants(group), row_blocks_of(group), count}; }

  template <class T>
  void fill(const T *x, int64_t inputs, int64_t group) const {
    for (int64_t first = groups.begin(group), r = first; r < groups.begin(group + 1); r++)
      quantize(x + r * inputs, inputs, blocks_per_row, quants(group) + (r - first) * 2 * INPUTS, row_blocks_of(group) + r - first,
               count, ZERO<K>, K::NUM_SCALES);
  }
};

// By the matrix unit (AMX), 16 outputs. It works at the same time as the vector units if neither reads what the other
// has just written: blocks are unpacked four ahead of the product, and products are made one block ahead of their
// scaling.
constexpr int64_t UNPACK_AHEAD = 4, RING = 8, PIECE = 32;  // blocks
constexpr int64_t TILES_AHEAD = 1 << 14;                    // bytes of prefetch
constexpr int64_t UNPACKED = 8 * TILE_BYTES;                // bytes of a block's quants
using Products = int32_t[OUTPUTS * TILE_ROWS];
template <int N>
using Number = std::integral_constant<int, N>;

template <class K>
const char *head_of(const char *w, int64_t block) {
  return w + block / K::BLOCKS * RECORD<K>;
}
template <class K>
const char *block_at(const char *w, int64_t block) {
  return head_of<K>(w, block) + K::HEAD + block % K::BLOCKS * K::BLOCK;
}

#if defined(TILES_WRITTEN_OUT)
#define HERE  // compiles sooner, in tests
#else
#define HERE __attribute__((always_inline))  // else sums are in memory
#endif

// Blocks [from, to) of ROWS rows. ``unpacked`` has room for ``places`` blocks; ``fresh``: they have to be unpacked.
template <class K, int ROWS>
void pass_by_blocks(const char *w, const Rows<K> &x, int64_t from, int64_t to, char (*unpacked)[UNPACKED], int64_t places,
                    bool fresh, float *out) {
  alignas(64) Products products[2][K::NUM_SCALES];
  typename Accumulator<K::INT_SCALES>::Number sums[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    sums[r] = Accumulator<K::INT_SCALES>::zero();
    if constexpr (!K::INT_SCALES)
      if (from) sums[r] = load(out + OUTPUTS * r);
  }
  const auto unpack = [&](int64_t block) HERE {
    if (!fresh || block >= to) return;
    const char *const at = block_at<K>(w, block);
    const Prefetcher prefetcher{at, TILES_AHEAD, K::BLOCK, FAR, TILES_AHEAD};
    for (int64_t line = 0; line < K::BLOCK; line += 64) prefetcher.line(line);
    if constexpr (K::QUANT_BYTES != UNPACKED) {
      Ints quants[8];
      K::get(head_of<K>(w, block), at, quants);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) store(reinterpret_cast<int32_t *>(unpacked[block % places] + TILE_BYTES * j), quants[j]);
    }
  };
  const auto multiply = [&](int64_t block, auto buffer) HERE {
    if (block >= to) return;
    const char *const quants = K::QUANT_BYTES == UNPACKED ? block_at<K>(w, block) : unpacked[block % places];
    const auto part = [&](auto p, auto sum) HERE {
      clear_tile<sum>();
      load_tile<4 + sum / 2>(x.at(block) + 16 * p, 2 * INPUTS);
      load_tile<6 + sum % 2>(quants + 4 * TILE_BYTES * p, TILE_BYTES);
      add_signed_unsigned<sum>();
      store_tile<sum>(products[buffer][p], TILE_BYTES);
    };
    if constexpr (K::NUM_SCALES == 2) {
      part(Number<0>(), Number<0>());
      part(Number<1>(), Number<3>());
    } else {
      part(Number<0>(), Number<3 * buffer>());  // sums 0 and 3 have no tile in common
    }
  };
  const auto scale = [&](int64_t block, int buffer) HERE {
    const char *const head = head_of<K>(w, block), *const at = block_at<K>(w, block);
    if constexpr (K::INT_SCALES) {
      const Ints scale = K::scale(at);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
        sums[r] = add(sums[r], ::multiply(load_ints(products[buffer][0] + OUTPUTS * r), scale));
      if (block % K::BLOCKS == K::BLOCKS - 1) {
        const int64_t record = block / K::BLOCKS;
        add_records<K, ROWS>(head, record, x.row_blocks + record * x.count, sums, out);
      }
    } else {
      const auto scales = K::scales(head, at);
      const BlockQ8 *const row_blocks = x.row_blocks + block * x.count;
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Ints whole[K::NUM_SCALES];
#pragma GCC unroll 2
        for (int p = 0; p < K::NUM_SCALES; p++) {
          whole[p] = load_ints(products[buffer][p] + OUTPUTS * r);
          if (K::ZERO) whole[p] = add(whole[p], broadcast_int(row_blocks[r].start[p]));
        }
        sums[r] = add_scaled<K>(sums[r], whole, scales, row_blocks[r]);
      }
    }
  };
  for (int64_t block = from; block < from + UNPACK_AHEAD; block++) unpack(block);
  multiply(from, Number<0>());
  for (int64_t block = from; block < to; block += 2) {
    unpack(block + UNPACK_AHEAD);
    multiply(block + 1, Number<1>());
    scale(block, 0);
    if (block + 1 == to) break;
    unpack(block + 1 + UNPACK_AHEAD);
    multiply(block + 2, Number<0>());
    scale(block + 1, 1);
  }
  if constexpr (!K::INT_SCALES)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) store(out + OUTPUTS * r, sums[r]);
}

#undef HERE

template <class K, int ROWS, class... More>
void passes_by_blocks(int64_t rows, More... more) {
  if constexpr (padded_rows<K>(ROWS) == ROWS)
    if (rows == ROWS) return pass_by_blocks<K, ROWS>(more...);
  if constexpr (ROWS > 1) passes_by_blocks<K, ROWS - 1>(rows, more...);
}

// INT_SCALES and many rows: quants times 3 of the 6 bits of their scale still fit a byte, so the unit can sum the
// products over a whole record. Each record is unpacked while the unit multiplies the one before.
template <class K>
struct ByRecords {
  static constexpr int STEPS = K::BLOCKS / 2, LOW = 3;  // steps of two blocks; low bits of a scale
  alignas(64) char weights[2][STEPS][2][2 * UNPACKED], mins[2][TILE_ROWS * TILE_BYTES] = {};
  alignas(64) Products products[2][2][3];  // double buffer, of two groups: low bits, high bits, mins
  const char *w;
  const QuantizedRows<K> &rows_q8;
  float *out;

  ByRecords(const char *w, const QuantizedRows<K> &rows_q8, float *out) : w(w), rows_q8(rows_q8), out(out) {}

  void unpack(int64_t record, int step) {
    for (int i = 0; i < 2; i++) {
      const int block = 2 * step + i;
      const char *const at = block_at<K>(w, record * K::BLOCKS + block);
      const Prefetcher prefetcher{at, TILES_AHEAD, K::BLOCK, FAR, TILES_AHEAD};
      for (int64_t line = 0; line < K::BLOCK; line += 64) prefetcher.line(line);
      const Ints part = broadcast_int(0x00070007), scale = twice(K::scale(at));
      const Ints parts[2] = {bit_and(scale, part), bit_and(shift_right<LOW>(scale), part)};
      Ints quants[8];
      K::get(nullptr, at, quants);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++)
        for (int p = 0; p < 2; p++)
          store(reinterpret_cast<int32_t *>(weights[record & 1][step][p] + UNPACKED * i + TILE_BYTES * j),
                multiply_shorts(quants[j], parts[p]));
      const Ints top = as_ints(to_floats(K::mins(at)));  // Bfloat16 in the high half
      store(reinterpret_cast<int32_t *>(mins[record & 1] + TILE_BYTES * block), add(top, shift_right<16>(top)));
    }
  }

  template <bool TWO>
  void finish(int64_t record, int64_t group, int buffer) const {
    for (int64_t g = 0; g < (TWO ? 2 : 1); g++) {
      const Products *const parts = products[buffer][g];
      const Rows<K> x = rows_q8.rows(group + g);
      for (int64_t r = 0; r < rows_q8.count; r++) {
        const auto part = [&](int p) { return load_ints(parts[p] + OUTPUTS * r); };
        add_record(w + record * RECORD<K>, record, x.row_blocks[record * x.count + r].d,
                   add(part(0), shift_left<LOW>(part(1))), as_floats(part(2)),
                   out + ((group + g) * rows_q8.count + r) * OUTPUTS);
      }
    }
  }

  // One record of one or two groups. ``lanes`` is the vector units' work meanwhile.
  template <bool TWO, class Lanes>
  void multiply(int64_t record, int64_t group, int buffer, Lanes lanes) {
    const Rows<K> x = rows_q8.rows(group), next = rows_q8.rows(group + TWO);
    clear_tile<0>();
    clear_tile<1>();
    if constexpr (TWO) clear_tile<2>();
    if constexpr (TWO) clear_tile<3>();
    for (int step = 0; step < STEPS; step++) {
      const int64_t block = record * K::BLOCKS + 2 * step;
      load_tile<4>(x.at(block), 2 * INPUTS);
      if constexpr (TWO) load_tile<5>(next.at(block), 2 * INPUTS);
      load_tile<6>(weights[record & 1][step][0], TILE_BYTES);
      load_tile<7>(weights[record & 1][step][1], TILE_BYTES);
      add_signed_unsigned<0>();
      add_signed_unsigned<1>();
      if constexpr (TWO) add_signed_unsigned<2>();
      if constexpr (TWO) add_signed_unsigned<3>();
      lanes(step);
    }
    store_tile<0>(products[buffer][0][0], TILE_BYTES);
    store_tile<1>(products[buffer][0][1], TILE_BYTES);
    if constexpr (TWO) store_tile<2>(products[buffer][1][0], TILE_BYTES);
    if constexpr (TWO) store_tile<3>(products[buffer][1][1], TILE_BYTES);
    load_tile<4>(x.row_blocks[record * x.count].bsum_parts, sizeof(BlockQ8K));
    if constexpr (TWO) load_tile<5>(next.row_blocks[record * x.count].bsum_parts, sizeof(BlockQ8K));
    load_tile<6>(mins[record & 1], TILE_BYTES);
    clear_tile<0>();
    add_bfloats<0>();
    store_tile<0>(products[buffer][0][2], TILE_BYTES);
    if constexpr (TWO) clear_tile<2>();
    if constexpr (TWO) add_bfloats<2>();
    if constexpr (TWO) store_tile<2>(products[buffer][1][2], TILE_BYTES);
  }

  void run(int64_t records) {
    const int64_t pairs = (rows_q8.groups.count + 1) / 2, units = records * pairs;
    const auto finish = [&](int64_t unit) {
      const int64_t group = unit % pairs * 2;
      if (group + 1 < rows_q8.groups.count)
        this->template finish<true>(unit / pairs, group, unit & 1);
      else
        this->template finish<false>(unit / pairs, group, unit & 1);
    };
    for (int step = 0; step < STEPS; step++) unpack(0, step);
    for (int64_t unit = 0; unit < units; unit++) {
      const int64_t record = unit / pairs, group = unit % pairs * 2;
      const auto lanes = [&](int step) {
        if (group == 0 && record + 1 < records) unpack(record + 1, step);
        if (step == 1 && unit) finish(unit - 1);
      };
      if (group + 1 < rows_q8.groups.count)
        multiply<true>(record, group, unit & 1, lanes);
      else
        multiply<false>(record, group, unit & 1, lanes);
    }
    finish(units - 1);
  }
};

template <class K>
void pass_by_tiles(const char *w, const QuantizedRows<K> &rows_q8, int64_t records, float *out) {
  if constexpr (K::INT_SCALES)
    if (rows_q8.count > FEW_ROWS) return ByRecords<K>(w, rows_q8, out).run(records);
  const int64_t blocks = records * K::BLOCKS, groups = rows_q8.groups.count;
  const int64_t places = groups > 1 ? PIECE : RING, piece = groups > 1 ? PIECE : blocks;
  alignas(64) char unpacked[PIECE][UNPACKED];
  for (int64_t from = 0; from < blocks; from += piece)
    for (int64_t g = 0; g < groups; g++)
      passes_by_blocks<K, K::INT_SCALES ? FEW_ROWS : ROWS_PER_PASS>(rows_q8.count, w, rows_q8.rows(g), from, std::min(blocks, from + piece),
                                                     unpacked, places, g == 0, out + g * rows_q8.count * OUTPUTS);
}

template <class K, class T>
void multiply(const char *w, const T *x, const Output<T> &out, int64_t rows, int64_t inputs, int threads, Prefetch how) {
  const int64_t records = (inputs + INPUTS * K::BLOCKS - 1) / (INPUTS * K::BLOCKS), blocks = records * K::BLOCKS;
  const int64_t tiles = (out.outputs + OUTPUTS - 1) / OUTPUTS;
  const int64_t fit = CACHED / QuantizedRows<K>::place(blocks) / ROWS_PER_PASS;
  const int64_t most = std::clamp(fit, LEAST_GROUPS, MOST_GROUPS) * ROWS_PER_PASS;
  const bool tiled = MAY_TILE && how == TILED && tiles_serve();
  for (int64_t from = 0; from < rows; from += most) {
    const QuantizedRows<K> rows_q8(std::min(rows - from, most), blocks);
    const Groups &groups = rows_q8.groups;
    parallel_for(groups.count, 1, groups.count > 2 ? threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; g++) rows_q8.fill(x + from * inputs, inputs, g);
    });
    const int64_t grain = std::max<int64_t>(1, GRAIN / (records * RECORD<K>));
    parallel_for(tiles, grain, threads, [&](int64_t begin, int64_t end) {
      const Shaped shaped(tiled, rows_q8.count, tile_row_bytes<K>(rows_q8.count));
      for (int64_t t = begin; t < end; t++) {
        float sums[OUTPUTS * ROWS_PER_PASS * MOST_GROUPS];
        const char *const tile = w + t * records * RECORD<K>;
        if constexpr (MAY_TILE)
          if (tiled) pass_by_tiles<K>(tile, rows_q8, records, sums);
        for (int64_t g = 0; g < groups.count && !tiled; g++)
          passes<K, ROWS_PER_PASS>(padded_rows<K>(groups.begin(g + 1) - groups.begin(g)), tile, rows_q8.rows(g), records,
                              sums + g * rows_q8.count * OUTPUTS, {tile, AHEAD, K::BLOCK, g ? NOTHING : how});
        for (int64_t g = 0; g < groups.count; g++)
          for (int64_t first = groups.begin(g), r = first; r < groups.begin(g + 1); r++)
            out.put(from + r, t * OUTPUTS, sums + (g * rows_q8.count + r - first) * OUTPUTS);
      }
    });
  }
}

// Dequantizes one row of the weights (dequantize_row_*).
template <class K, class T>
void get_row_quants(const char *w, int64_t row, T *to, int64_t inputs) {
  const int64_t records = (inputs + INPUTS * K::BLOCKS - 1) / (INPUTS * K::BLOCKS), lane = row % OUTPUTS;
  w += row / OUTPUTS * records * RECORD<K>;
  for (int64_t from = 0; from < inputs; from += INPUTS * K::BLOCKS, w += RECORD<K>)
    for (int64_t b = 0; b < K::BLOCKS && from + INPUTS * b < inputs; b++) {
      const char *const at = w + K::HEAD + b * K::BLOCK;
      const auto scales = K::scales(w, at);
      float parts[K::NUM_SCALES][16], mins[K::NUM_SCALES][16], values[INPUTS];
      for (int p = 0; p < K::NUM_SCALES; p++) store(parts[p], scales.d[p]);
      for (int p = 0; p < K::NUM_SCALES; p++) store(mins[p], scales.m[p]);
      Ints vectors[8];
      K::get(w, at, vectors);
      for (int j = 0; j < 8; j++) {
        alignas(64) int32_t bytes[16];
        store(bytes, vectors[j]);
        uint8_t quants[4];
        std::memcpy(quants, bytes + lane, 4);
        const int part = j * K::NUM_SCALES / 8;
        for (int i = 0; i < 4; i++)
          values[4 * j + i] = parts[part][lane] * static_cast<float>(quants[i] - K::ZERO) + mins[part][lane];
      }
      for (int64_t i = from + INPUTS * b; i < from + INPUTS * (b + 1) && i < inputs; i += 16)
        store(to + i, first(inputs - i), load(values + i - from - INPUTS * b));
    }
}

template <class K, int64_t KIND, class T>
QuantKernels<T> kernels_of() {
  return {[](const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs, int64_t inputs,
             int64_t stride, int threads) {
            const Output<T> out{y, add, bias, stride, outputs};
            multiply<K>(w, x, out, rows, inputs, threads, prefetch_settings.of(KIND, rows));
          },
          [](const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs) {
            for (int64_t i = 0; i < count; i++, y += inputs) get_row_quants<K>(w, ids[i], y, inputs);
          }};
}

#ifndef COMPILED  // else the compiler's command says which (``units_of``)
#define COMPILED QUANTS
#endif
#define GIVE(NAME, SIZE, BYTES)                                                                           \
  quant_kernels[KIND_##NAME] = {kernels_of<NAME, KIND_##NAME, float>(), kernels_of<NAME, KIND_##NAME, Bfloat16>(), \
                                kernels_of<NAME, KIND_##NAME, Float16>()};
const bool given = [] {  // as the library is loaded
  COMPILED(GIVE)
  return true;
}();

}  // namespace
