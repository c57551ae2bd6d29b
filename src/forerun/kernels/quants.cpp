// Linear layers whose weights have 4 to 8 bits and scales by blocks of inputs, as GGUF files have them.
//
// A row's inputs are brought to 255 levels, each block of 32 with a step of its own, as ggml has them but for the step,
// which stays in float32. Products of levels add up in 32 bits exactly; then scales and sums over blocks are float32, in
// the order of the inputs. So a row's bits depend neither on the rows beside it nor on the processor.
#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "rows.h"
#include "tiles.h"

namespace {

constexpr int64_t AHEAD = 1 << 12;   // bytes from a weight that is used to the one asked for
constexpr int64_t CACHED = 1 << 18;  // bytes of rows over which each tile of weights passes
constexpr int TOGETHER = 16;        // rows that share one reading of the weights
constexpr int AT_ONCE = 4;          // of them whose sums of products are in registers

// A block of a row.
struct Levels {
  int8_t at[INPUTS];
  float step;
  float sum;         // of its inputs, as the levels give them
  int32_t start[2];  // where sums of products begin, such that a level's zero counts as 0: for both halves, or for all
};

// Sums over a block of weights' levels times inputs' levels.
#if defined(HAS_BYTE_PRODUCTS)
template <int MOST>
struct Sum {
  static constexpr bool SIGNED = false;  // whether weights' levels lose their zero here
  Ints v;
  void begin(int32_t start) { v = broadcast_int(start); }
  void add(Ints w, Ints x) { v = add_byte_products(v, w, x); }
  Ints end() const { return v; }
};
#else
template <int MOST>
struct Sum {
  static constexpr bool SIGNED = MOST > 127;
  static constexpr bool SHORT = 16 * 127 * MOST < 1 << 15;  // all eight pairs of a block add up in 16 bits
  Ints v;
  int32_t start;
  void begin(int32_t from) {
    v = zero_ints();
    start = from;
  }
  void add(Ints w, Ints x) {
    if constexpr (SIGNED) {  // |w| to 128, |x| to 127: pairs to 32,512
      const Ints levels = bit_xor(w, broadcast_int(static_cast<int32_t>(0x80808080)));
      v = ::add(v, short_pairs(byte_pairs(byte_sizes(levels), with_sign_of(x, levels))));
    } else if constexpr (SHORT) {
      v = add_shorts(v, byte_pairs(w, x));
    } else {
      v = ::add(v, short_pairs(byte_pairs(w, x)));
    }
    stay(v);
  }
  Ints end() const { return ::add(SHORT ? short_pairs(v) : v, broadcast_int(start)); }
};
#endif

template <class K>
constexpr int ZERO = Sum<K::MOST>::SIGNED ? 0 : K::ZERO;

LANES_INLINE Ints four(const int8_t *at) {
  int32_t bytes;
  std::memcpy(&bytes, at, 4);
  return broadcast_int(bytes);
}

// One block of some rows.
template <class K, int ROWS>
LANES_INLINE void add_block(const Ints *levels, const Scales<K::PARTS> &scales, const Levels *x, Floats *sums) {
  Sum<K::MOST> products[ROWS][K::PARTS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int p = 0; p < K::PARTS; p++) products[r][p].begin(x[r].start[p]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      products[r][0].add(levels[j], four(x[r].at + 4 * j));
      products[r][K::PARTS - 1].add(levels[4 + j], four(x[r].at + 16 + 4 * j));
    }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    const Floats step = broadcast(x[r].step);
#pragma GCC unroll 2
    for (int p = 0; p < K::PARTS; p++) sums[r] = fma(to_floats(products[r][p].end()), scales.part[p] * step, sums[r]);
    if (K::MINIMA) sums[r] = fma(scales.minimum, broadcast(x[r].sum), sums[r]);
  }
}

// One block of all rows, in parts as even as can be.
template <class K, int ROWS, int PART>
LANES_INLINE void add_blocks(const Ints *levels, const Scales<K::PARTS> &scales, const Levels *x, Floats *sums) {
  constexpr int PARTS = (ROWS + AT_ONCE - 1) / AT_ONCE, FIRST = ROWS * PART / PARTS, END = ROWS * (PART + 1) / PARTS;
  add_block<K, END - FIRST>(levels, scales, x + FIRST, sums + FIRST);
  if constexpr (PART + 1 < PARTS) add_blocks<K, ROWS, PART + 1>(levels, scales, x, sums);
}

// Outputs of one tile for so many rows, whose blocks lie side by side.
template <class K, int ROWS>
void pass(const char *w, const Levels *x, int64_t records, float *out, Ask ask) {
  Floats sums[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sums[r] = zeros();
  for (int64_t record = 0; record < records; record++) {
    const char *const head = w;
    w += K::HEAD;
    ask.at += K::HEAD;
    for (int64_t b = 0; b < K::BLOCKS; b++, w += K::BLOCK, x += ROWS) {
      if (ask.step) {
        for (int64_t i = 0; i < K::BLOCK; i += 64) ask.line(i);
        ask.at += ask.step;
      }
      Ints levels[8];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) K::get(w, j, levels[j], levels[4 + j]);
      const auto scales = K::scales(head, w);
      add_blocks<K, ROWS, 0>(levels, scales, x, sums);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) store(out + OUTPUTS * r, sums[r]);
}

template <class K, int ROWS>
void passes(int64_t rows, const char *w, const Levels *x, int64_t records, float *out, Ask ask) {
  if (rows == ROWS) return pass<K, ROWS>(w, x, records, out, ask);
  if constexpr (ROWS > 1) passes<K, ROWS - 1>(rows, w, x, records, out, ask);
}

// Products of levels of some blocks, or of their halves, by the matrix unit: for each of its sums, rows of 16 outputs.
template <class K, int SUM = 0>
void multiply_blocks(const char *const *levels, const Levels *x, int64_t rows, int some,
                     int32_t (*products)[OUTPUTS * TOGETHER]) {
  constexpr int BLOCK = SUM / K::PARTS, HALF = SUM % K::PARTS;
  if (BLOCK >= some) return;
  clear_tile<SUM>();
  load_tile<4 + SUM / 2>(x[BLOCK * rows].at + INPUTS / 2 * HALF, sizeof(Levels));
  load_tile<6 + SUM % 2>(levels[BLOCK] + 4 * TILE_BYTES * HALF, TILE_BYTES);
  add_signed_unsigned<SUM>();
  store_tile<SUM>(products[SUM], TILE_BYTES);
  if constexpr (SUM < 3) multiply_blocks<K, SUM + 1>(levels, x, rows, some, products);
}

// As ``passes``, by the matrix unit.
template <class K>
void pass_by_tiles(int64_t rows, const char *w, const Levels *x, int64_t records, float *out, Ask ask) {
  constexpr int SOME = 4 / K::PARTS;
  constexpr int64_t UNPACKED = 8 * TILE_BYTES;
  alignas(64) char unpacked[SOME][UNPACKED];
  alignas(64) int32_t products[4][OUTPUTS * TOGETHER];
  for (int64_t r = 0; r < rows; r++) store(out + OUTPUTS * r, zeros());
  for (int64_t block = 0, blocks = records * K::BLOCKS; block < blocks; block += SOME, x += SOME * rows) {
    const int some = static_cast<int>(std::min<int64_t>(SOME, blocks - block));
    const char *levels[SOME];
    Scales<K::PARTS> scales[SOME];
#pragma GCC unroll 4
    for (int i = 0; i < SOME; i++) {
      if (i == some) break;
      const char *const head = w + (block + i) / K::BLOCKS * RECORD<K>;
      const char *const at = head + K::HEAD + (block + i) % K::BLOCKS * K::BLOCK;
      if (ask.step)
        for (int64_t line = 0; line < K::BLOCK; line += 64) ask.line(at - w + line);
      levels[i] = K::LEVELS == UNPACKED ? at : unpacked[i];
      if constexpr (K::LEVELS != UNPACKED)
        for (int j = 0; j < 4; j++) {
          Ints sides[2];
          K::get(at, j, sides[0], sides[1]);
          for (int side = 0; side < 2; side++)
            std::memcpy(unpacked[i] + TILE_BYTES * (4 * side + j), &sides[side], TILE_BYTES);
        }
      scales[i] = K::scales(head, at);
    }
    multiply_blocks<K>(levels, x, rows, some, products);
    for (int64_t r = 0; r < rows; r++) {
      Floats sum = load(out + OUTPUTS * r);
#pragma GCC unroll 4
      for (int i = 0; i < SOME; i++) {
        if (i == some) break;
        const Levels &row = x[i * rows + r];
        const Floats step = broadcast(row.step);
        for (int p = 0; p < K::PARTS; p++) {
          Ints whole = load_ints(products[K::PARTS * i + p] + OUTPUTS * r);
          if (K::ZERO) whole = add(whole, broadcast_int(row.start[p]));
          sum = fma(to_floats(whole), scales[i].part[p] * step, sum);
        }
        if (K::MINIMA) sum = fma(scales[i].minimum, broadcast(row.sum), sum);
      }
      store(out + OUTPUTS * r, sum);
    }
  }
}

// A row, whose blocks are to lie ``apart`` from each other. Steps are NaN if an input is NaN, infinite if one is
// infinite, and so is or becomes every output.
template <class T>
void quantize(const T *x, int64_t inputs, Levels *to, int64_t apart, int64_t blocks, int32_t zero, bool halved) {
  for (int64_t i = 0; i < INPUTS * blocks; i += INPUTS, to += apart) {
    const auto get = [=](int64_t at) { return at < inputs ? load(x + at, first(inputs - at)) : zeros(); };
    const Floats low = get(i), high = get(i + 16);
    Mask broken = is_nan(low);
    broken |= is_nan(high);
    const float largest = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(max(abs(low), abs(high)));
    const float step = largest <= LEAST ? 1 : largest / 127;
    const Floats scale = broadcast(1 / step);
    const Ints levels[2] = {to_nearest(low * scale), to_nearest(high * scale)};
    int32_t sums[2];
    for (int half = 0; half < 2; half++) {
      store_bytes(reinterpret_cast<uint8_t *>(to->at + 16 * half), first(16), levels[half]);
      sums[half] = std::isfinite(step) ? static_cast<int32_t>(reduce_sum(to_floats(levels[half]))) : 0;
    }
    to->step = step;
    to->sum = step * static_cast<float>(sums[0] + sums[1]);
    to->start[0] = -zero * (halved ? sums[0] : sums[0] + sums[1]);
    to->start[1] = -zero * sums[1];
  }
}

template <class T>
struct Output {
  T *y;
  const T *add;
  const float *bias;
  int64_t stride, outputs;  // numbers from row to row

  void put(int64_t row, int64_t from, const float *sums) const {
    const First lanes = first(outputs - from);
    Floats v = load(sums);
    if (bias) v = v + load(bias + from, lanes);
    if (add) v = v + load(add + row * stride + from, lanes);
    store(y + row * stride + from, lanes, v);
  }
};

// Rows in groups that share a reading of the weights, as even as can be.
struct Groups {
  int64_t rows, count;
  explicit Groups(int64_t rows) : rows(rows), count((rows + TOGETHER - 1) / TOGETHER) {}
  int64_t most() const { return (rows + count - 1) / count; }
  int64_t begin(int64_t group) const { return group * (rows / count) + std::min(group, rows % count); }
};

template <class K, class T>
void multiply(const char *w, const T *x, const Output<T> &out, int64_t rows, int64_t inputs, int threads, Asking how) {
  const int64_t records = (inputs + INPUTS * K::BLOCKS - 1) / (INPUTS * K::BLOCKS), blocks = records * K::BLOCKS;
  const int64_t row = blocks * sizeof(Levels), tiles = (out.outputs + OUTPUTS - 1) / OUTPUTS;
  const int64_t most = std::max<int64_t>(CACHED / row / TOGETHER, 1) * TOGETHER;
  const auto kept = reinterpret_cast<Levels *>(room(std::min(rows, most) * row + sizeof(Levels)));
  const bool tiled = MAY_TILE && how == TILED && tiles_serve();
  for (int64_t from = 0; from < rows; from += most) {
    const Groups groups(std::min(rows - from, most));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && groups.count > 2)
    for (int64_t g = 0; g < groups.count; g++)
      for (int64_t first = groups.begin(g), end = groups.begin(g + 1), r = first; r < end; r++)
        quantize(x + (from + r) * inputs, inputs, kept + first * blocks + r - first, end - first, blocks, ZERO<K>,
                 K::PARTS == 2);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      const Shaped shaped(tiled, groups.most(), INPUTS / K::PARTS);  // a smaller group has a row of no matter behind it
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tiles; t++) {
        float sums[OUTPUTS * TOGETHER];
        for (int64_t g = 0; g < groups.count; g++) {
          const int64_t first = groups.begin(g), count = groups.begin(g + 1) - first;
          const char *const tile = w + t * records * RECORD<K>;
          const Ask ask{tile, AHEAD, K::BLOCK, g ? NOTHING : how};
          if (!tiled)
            passes<K, TOGETHER>(count, tile, kept + first * blocks, records, sums, ask);
          else if constexpr (MAY_TILE)
            pass_by_tiles<K>(count, tile, kept + first * blocks, records, sums, ask);
          for (int64_t r = 0; r < count; r++) out.put(from + first + r, t * OUTPUTS, sums + OUTPUTS * r);
        }
      }
    }
  }
}

// A weight's row, one output's.
template <class K, class T>
void take_row(const char *w, int64_t row, T *to, int64_t inputs) {
  const int64_t records = (inputs + INPUTS * K::BLOCKS - 1) / (INPUTS * K::BLOCKS), lane = row % OUTPUTS;
  w += row / OUTPUTS * records * RECORD<K>;
  for (int64_t from = 0; from < inputs; from += INPUTS * K::BLOCKS, w += RECORD<K>)
    for (int64_t b = 0; b < K::BLOCKS && from + INPUTS * b < inputs; b++) {
      const char *const at = w + K::HEAD + b * K::BLOCK;
      const auto scales = K::scales(w, at);
      float parts[2][16], minimum[16], values[INPUTS];
      for (int p = 0; p < K::PARTS; p++) store(parts[p], scales.part[p]);
      store(minimum, scales.minimum);
      for (int j = 0; j < 4; j++) {
        Ints sides[2];
        K::get(at, j, sides[0], sides[1]);
        for (int side = 0; side < 2; side++) {
          alignas(64) int32_t words[16];
          store(words, sides[side]);
          uint8_t levels[4];
          std::memcpy(levels, words + lane, 4);
          const float scale = parts[K::PARTS == 2 ? side : 0][lane];
          for (int i = 0; i < 4; i++)
            values[16 * side + 4 * j + i] = scale * static_cast<float>(levels[i] - K::ZERO) + minimum[lane];
        }
      }
      for (int64_t i = from + INPUTS * b; i < from + INPUTS * (b + 1) && i < inputs; i += 16)
        store(to + i, first(inputs - i), load(values + i - from - INPUTS * b));
    }
}

}  // namespace

template <class T>
void linear_quants(int64_t kind, const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows,
                   int64_t outputs, int64_t inputs, int64_t stride, int threads) {
  const Output<T> out{y, add, bias, stride, outputs};
  switch (kind) {
#define CASE(NAME, SIZE, BYTES) \
  case KIND_##NAME: return multiply<NAME>(w, x, out, rows, inputs, threads, habits.of(kind, rows));
    QUANTS(CASE)
#undef CASE
  }
}

template <class T>
void take_quants(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs) {
  for (int64_t i = 0; i < count; i++, y += inputs) switch (kind) {
#define CASE(NAME, SIZE, BYTES) \
  case KIND_##NAME: take_row<NAME>(w, ids[i], y, inputs); break;
      QUANTS(CASE)
#undef CASE
    }
}

#define INSTANTIATE(KIND, T)                                                                                    \
  template void linear_quants(int64_t, const char *, const T *, T *, const T *, const float *, int64_t, int64_t, \
                              int64_t, int64_t, int);                                                           \
  template void take_quants(int64_t, const char *, const int64_t *, T *, int64_t, int64_t);
FOR_EACH_TYPE(INSTANTIATE)
