// Linear layers in float32, 16 bits and int8, norms and activations. For few rows they are bound by memory bandwidth.
//
// Weights are repacked in the order in which they are read: tiles of 32 outputs; in a tile, groups of four bytes of
// input (one float32, two of 16 bits or four int8), 32 outputs each. They are prefetched, even beyond the layer's end,
// where the next layer's weights are: with several rows, the hardware prefetcher does not run far enough ahead. Few
// rows share one pass over the weights; more rows share chunks of a tile that stay in the cache. An output's sum runs
// over the inputs in one order whatever the number of rows, so a row's bits do not depend on the other rows.
#include "kernels.h"
#include "rows.h"
#include "tiles.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

constexpr int64_t TILE = 32, GROUP_BYTES = 4 * TILE, HALF = GROUP_BYTES / 2;
constexpr int64_t BLOCK = 48;       // rows whose sums are in memory at a time
constexpr int64_t AHEAD = 1 << 14;  // bytes from the weight in use to the prefetched one: a third of the L1 cache
#if defined(__AVX512F__)
constexpr bool NARROW = false;
constexpr int64_t CHUNK = 192;  // groups of inputs, 24 KiB of weights, that stay in L1
#else
constexpr bool NARROW = true;  // half a tile per pass: registers hold the sums of more rows
constexpr int64_t CHUNK = 128;
#endif

// How a group is multiplied, for 16 outputs. STEP: bytes of a row's converted inputs of a group.
struct Float {
  using Sum = Floats;
  using Weights = Floats;
  static constexpr Kind KIND = KIND_own;
  static constexpr int64_t STEP = 4, ROWS_PER_PASS = NARROW ? 6 : 12;  // rows in one pass over half a tile
  static constexpr int64_t WHOLE_TILE_ROWS = NARROW ? 5 : 12;     // and over a whole tile
  static Sum zero() { return zeros(); }
  static Weights get(const char *w) { return as_floats(load_ints(w)); }
  static void add(Sum &sum, const Weights &w, const char *x) {
    float one;
    std::memcpy(&one, x, 4);
    sum = fma(w, broadcast(one), sum);
  }
};

// Two inputs of 16 bits, converted to float32.
template <class T>
struct Widened {
  using Sum = Floats;
  struct Weights {
    Floats even, odd;
  };
  static constexpr Kind KIND = KIND_own;
  static constexpr int64_t STEP = 8, ROWS_PER_PASS = NARROW ? 5 : 12, WHOLE_TILE_ROWS = NARROW ? 3 : 12;
  static Sum zero() { return zeros(); }
  static Weights get(const char *w);
  static void add(Sum &sum, const Weights &w, const char *x) {
    float two[2];
    std::memcpy(two, x, 8);
    sum = fma(w.even, broadcast(two[0]), sum);
    sum = fma(w.odd, broadcast(two[1]), sum);
  }
};

template <>
Widened<Bfloat16>::Weights Widened<Bfloat16>::get(const char *w) {
  const Ints pairs = load_ints(w);
  return {as_floats(shift_left<16>(pairs)), as_floats(bit_and(pairs, broadcast_int(static_cast<int32_t>(0xffff0000))))};
}

template <>
Widened<Float16>::Weights Widened<Float16>::get(const char *w) {  // first inputs of 16 outputs, then second inputs
  const auto at = reinterpret_cast<const Float16 *>(w);
  return {load(at, first(16)), load(at + 16, first(16))};
}

#if defined(__AVX512BF16__)
struct Bfloat {
  using Sum = Floats;
  using Weights = Ints;
  static constexpr Kind KIND = KIND_own;
  static constexpr int64_t STEP = 4, ROWS_PER_PASS = 12, WHOLE_TILE_ROWS = 12;
  static Sum zero() { return zeros(); }
  static Weights get(const char *w) { return in_register(load_ints(w)); }
  static void add(Sum &sum, const Weights &w, const char *x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
  }
};
#else
using Bfloat = Widened<Bfloat16>;
#endif

#if defined(HAS_BYTE_PRODUCTS)
struct Int8 {
  using Sum = Ints;
  using Weights = Ints;
  static constexpr Kind KIND = KIND_int8;
  static constexpr int64_t STEP = 4, ROWS_PER_PASS = NARROW ? 6 : 8, WHOLE_TILE_ROWS = NARROW ? 3 : 8;
  static constexpr int32_t ZERO = BYTES_ARE_SIGNED ? 0 : 128;  // zero point of rows
  static Sum zero() { return zero_ints(); }
  static Weights get(const char *w) { return in_register(load_ints(w)); }
  static void add(Sum &sum, const Weights &w, const char *x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    sum = add_byte_products(sum, broadcast_int(four), w);
  }
};
#else
// maddubs adds pairs in 16 bits: |w| * (x with the sign of w). w and x are from -127 to 127, so a pair is at most
// 2 * 127 * 127 = 32,258 and nothing saturates.
struct Int8 {
  using Sum = Ints;
  struct Weights {
    Ints signs, sizes;
  };
  static constexpr Kind KIND = KIND_int8;
  static constexpr int64_t STEP = 4, ROWS_PER_PASS = NARROW ? 4 : 8, WHOLE_TILE_ROWS = NARROW ? 4 : 8;
  static constexpr int32_t ZERO = 0;
  static Sum zero() { return zero_ints(); }
  static Weights get(const char *w) {
    const Ints quants = load_ints(w);
    return {quants, byte_sizes(quants)};
  }
  static void add(Sum &sum, const Weights &w, const char *x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    sum = ::add(sum, short_pairs(byte_pairs(w.sizes, with_sign_of(broadcast_int(four), w.signs))));
  }
};
#endif

#if defined(HAS_ROW_PAIRS)
// ``pass`` by ARM's i8mm, two groups and two rows at a time. Returns how many groups it took.
template <int ROWS, int HALVES>
LANES_INLINE int64_t pass_pairs(const char *w, const char *x, int64_t stride, int64_t groups, Ints (*s)[HALVES], Prefetcher &prefetcher) {
  constexpr int PAIRS = ROWS / 2;
  Pair sums[PAIRS][HALVES];
  for (int i = 0; i < PAIRS; i++)
    for (int h = 0; h < HALVES; h++) sums[i][h] = side_by_side(s[2 * i][h], s[2 * i + 1][h]);
  int64_t g = 0;
  for (; g + 1 < groups; g += 2, w += 2 * GROUP_BYTES, x += 2 * Int8::STEP) {
    for (int i = 0; i < 2 && prefetcher.step; i++, prefetcher.at += prefetcher.step) {
      prefetcher.line(0);
      if (HALVES == 2) prefetcher.line(HALF);
    }
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) {
      const Ints first = Int8::get(w + HALF * h), second = Int8::get(w + GROUP_BYTES + HALF * h);
      const Pair both = eights(first, second);
#pragma GCC unroll 6
      for (int i = 0; i < PAIRS; i++) add_byte_products(sums[i][h], both, x + 2 * i * stride, stride);
      if constexpr (ROWS % 2) {
        Int8::add(s[ROWS - 1][h], first, x + (ROWS - 1) * stride);
        Int8::add(s[ROWS - 1][h], second, x + (ROWS - 1) * stride + Int8::STEP);
      }
    }
  }
  for (int i = 0; i < PAIRS; i++)
    for (int h = 0; h < HALVES; h++) {
      const Pair rows = side_by_side(sums[i][h].low, sums[i][h].high);
      s[2 * i][h] = rows.low;
      s[2 * i + 1][h] = rows.high;
    }
  return g;
}
#endif

// A whole tile (HALVES = 2) or half of one, for ROWS rows.
template <class K, int ROWS, int HALVES>
void pass(const char *w, const char *x, int64_t stride, int64_t groups, typename K::Sum *sums, bool fresh, Prefetcher prefetcher) {
  typename K::Sum s[ROWS][HALVES];
  for (int r = 0; r < ROWS; r++)
    for (int h = 0; h < HALVES; h++) s[r][h] = fresh ? K::zero() : sums[2 * r + h];
#if defined(HAS_ROW_PAIRS)
  if constexpr (std::is_same<K, Int8>::value && ROWS > 1) {
    const int64_t taken = pass_pairs<ROWS>(w, x, stride, groups, s, prefetcher);
    w += taken * GROUP_BYTES, x += taken * K::STEP, groups -= taken;
  }
#endif
  for (int64_t g = 0; g < groups; g++, w += GROUP_BYTES, x += K::STEP) {
    if (prefetcher.step) {
      prefetcher.line(0);
      if (HALVES == 2) prefetcher.line(HALF);
      prefetcher.at += prefetcher.step;
    }
    typename K::Weights weights[HALVES];
    for (int h = 0; h < HALVES; h++) weights[h] = K::get(w + HALF * h);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; h++) K::add(s[r][h], weights[h], x + r * stride);
  }
  for (int r = 0; r < ROWS; r++)
    for (int h = 0; h < HALVES; h++) sums[2 * r + h] = s[r][h];
}

template <class K, int HALVES, int ROWS>
void passes(int64_t rows, const char *w, const char *x, int64_t stride, int64_t groups, typename K::Sum *sums,
            bool fresh, Prefetcher prefetcher) {
  if (rows == ROWS) return pass<K, ROWS, HALVES>(w, x, stride, groups, sums, fresh, prefetcher);
  if constexpr (ROWS > 1) passes<K, HALVES, ROWS - 1>(rows, w, x, stride, groups, sums, fresh, prefetcher);
}

template <class K>
void tile(const char *w, const char *x, int64_t stride, int64_t rows, int64_t groups, typename K::Sum *sums, Prefetch how) {
  if (rows <= K::WHOLE_TILE_ROWS)
    return passes<K, 2, K::WHOLE_TILE_ROWS>(rows, w, x, stride, groups, sums, true, {w, AHEAD, GROUP_BYTES, how});
  constexpr int HALVES = NARROW ? 1 : 2;
  const int64_t batches = (rows + K::ROWS_PER_PASS - 1) / K::ROWS_PER_PASS, parts = NARROW ? 2 * batches : 1;
  const int64_t chunks = (groups + CHUNK - 1) / CHUNK, even = (groups + chunks - 1) / chunks;
  for (int64_t at = 0; at < groups; at += even, w += even * GROUP_BYTES) {
    const int64_t some = groups - at < even ? groups - at : even;
    for (int64_t batch = 0, row = 0, part = 0; batch < batches; batch++) {
      const int64_t count = rows / batches + (batch < rows % batches);
      const char *const from = x + row * stride + at * K::STEP;
      for (int64_t h = 0; h < 2; h += HALVES, part++) {
        const Prefetcher ahead{w + part * some * GROUP_BYTES / parts, AHEAD, GROUP_BYTES / parts, part < parts ? how : NOTHING};
        passes<K, HALVES, K::ROWS_PER_PASS>(count, w + HALF * h, from, stride, some, sums + 2 * row + h, at == 0, ahead);
      }
      row += count;
    }
  }
}

// Rows as matrices of at most 16 rows for the matrix unit, as even as possible. The content of padding rows is ignored.
struct Matrices {
  int64_t count, rows;  // in each
  explicit Matrices(int64_t all) : count((all + TILE_ROWS - 1) / TILE_ROWS), rows((all + count - 1) / count) {}
};
constexpr int64_t with_added(int64_t rows) { return rows + rows / TILE_ROWS; }

template <class K>
constexpr bool BY_TILES = false;
template <>
constexpr bool BY_TILES<Int8> = MAY_TILE;
#if defined(__AVX512BF16__)
template <>
constexpr bool BY_TILES<Bfloat> = MAY_TILE;
#endif

// Sixteen groups, with one or two matrices.
template <class K, bool TWO>
void add_groups(const char *w, const char *x, int64_t stride, int64_t rows) {
  const auto add = [](auto sum) {
    if constexpr (std::is_same<K, Int8>::value)
      add_unsigned_signed<sum>();
    else
      add_bfloats<sum>();
  };
  load_tile<4>(x, stride);
  if constexpr (TWO) load_tile<5>(x + rows * stride, stride);
  load_tile<6>(w, GROUP_BYTES);
  load_tile<7>(w + HALF, GROUP_BYTES);
  add(std::integral_constant<int, 0>());
  add(std::integral_constant<int, 1>());
  if constexpr (TWO) add(std::integral_constant<int, 2>());
  if constexpr (TWO) add(std::integral_constant<int, 3>());
}

template <class K, bool TWO>
void tile_by_tiles(const char *w, const char *x, int64_t stride, int64_t rows, int64_t groups, typename K::Sum *sums,
                   Prefetcher prefetcher) {
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (TWO) clear_tile<2>();
  if constexpr (TWO) clear_tile<3>();
  for (; groups >= TILE_ROWS; groups -= TILE_ROWS, w += TILE_ROWS * GROUP_BYTES, x += TILE_BYTES) {
    if (prefetcher.step)
      for (int64_t i = 0; i < TILE_ROWS; i++, prefetcher.at += prefetcher.step) {
        prefetcher.line(0);
        prefetcher.line(HALF);
      }
    add_groups<K, TWO>(w, x, stride, rows);
  }
  if (groups) {  // padded with zeros
    alignas(64) char weights[TILE_ROWS * GROUP_BYTES] = {}, inputs[2 * TILE_ROWS * TILE_BYTES] = {};
    std::memcpy(weights, w, groups * GROUP_BYTES);
    for (int64_t r = 0; r < (TWO ? 2 : 1) * rows; r++) std::memcpy(inputs + r * TILE_BYTES, x + r * stride, 4 * groups);
    add_groups<K, TWO>(weights, inputs, TILE_BYTES, rows);
  }
  constexpr int64_t APART = 2 * sizeof(typename K::Sum);
  store_tile<0>(sums, APART);
  store_tile<1>(sums + 1, APART);
  if constexpr (TWO) store_tile<2>(sums + 2 * rows, APART);
  if constexpr (TWO) store_tile<3>(sums + 2 * rows + 1, APART);
}

template <class K, class Write>
void multiply(const char *w, const char *x, int64_t stride, int64_t rows, int64_t outputs, int64_t groups, int threads,
              Write write) {
  if (!rows) return;
  const int64_t tiles = (outputs + TILE - 1) / TILE;
  const Prefetch how = prefetch_settings.of(K::KIND, rows);
  const Matrices matrices(rows);
  const bool tiled = BY_TILES<K> && (how == TILED || K::KIND == KIND_own) && tiles_serve();
  const int64_t block = tiled ? 2 * matrices.rows : BLOCK;
  const int64_t grain = std::max<int64_t>(1, GRAIN / (groups * GROUP_BYTES));
  parallel_for(tiles, grain, threads, [=](int64_t begin, int64_t end) {
    const Shaped shaped(tiled, matrices.rows, TILE_BYTES);
    for (int64_t t = begin; t < end; t++) {
      typename K::Sum sums[2 * BLOCK];
      for (int64_t from = 0; from < rows; from += block) {
        const int64_t some = rows - from < block ? rows - from : block;
        const char *const weights = w + t * groups * GROUP_BYTES, *const inputs = x + from * stride;
        const Prefetch prefetch = from ? NOTHING : how;
        if constexpr (BY_TILES<K>) {
          const Prefetcher prefetcher{weights, AHEAD, GROUP_BYTES, prefetch};
          if (!tiled)
            tile<K>(weights, inputs, stride, some, groups, sums, prefetch);
          else if (some > matrices.rows)
            tile_by_tiles<K, true>(weights, inputs, stride, matrices.rows, groups, sums, prefetcher);
          else
            tile_by_tiles<K, false>(weights, inputs, stride, matrices.rows, groups, sums, prefetcher);
        } else {
          tile<K>(weights, inputs, stride, some, groups, sums, prefetch);
        }
        for (int64_t r = 0; r < some; r++)
          for (int64_t h = 0; h < 2; h++) {
            const int64_t out = t * TILE + 16 * h;
            if (out < outputs) write(from + r, out, first(outputs - out), sums[2 * r + h]);
          }
      }
    }
  });
}

// Copies a row, or converts it to float32. The last group is padded with zeros.
template <bool WIDEN, class T>
void convert_row(const T *x, char *to, int64_t inputs, int64_t padded) {
  if constexpr (WIDEN) {
    const auto floats = reinterpret_cast<float *>(to);
    for (int64_t i = 0; i < padded; i += 16) {
      const Floats v = i < inputs ? load(x + i, first(inputs - i)) : zeros();
      store(floats + i, first(padded - i), v);
    }
  } else {
    std::memcpy(to, x, inputs * sizeof(T));
    std::memset(to + inputs * sizeof(T), 0, (padded - inputs) * sizeof(T));
  }
}

template <class K, class T>
void multiply_rows(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,
            int64_t inputs, int64_t y_stride, int threads) {
  constexpr int64_t GROUP = 4 / sizeof(T);
  constexpr bool WIDEN = K::STEP > 4;
  const int64_t groups = (inputs + GROUP - 1) / GROUP;
  const char *from = reinterpret_cast<const char *>(x);
  int64_t stride = groups * K::STEP;
  if (WIDEN || rows > 2 || inputs % GROUP) {
    stride = row_stride(stride);
    char *to = workspace(with_added(rows) * stride);
    for (int64_t r = 0; r < rows; r++) convert_row<WIDEN>(x + r * inputs, to + r * stride, inputs, groups * GROUP);
    from = to;
  }
  multiply<K>(w, from, stride, rows, outputs, groups, threads, [=](int64_t row, int64_t out, First lanes, Floats sum) {
    if (bias) sum = sum + load(bias + out, lanes);
    if (add) sum = sum + load(add + row * y_stride + out, lanes);
    store(y + row * y_stride + out, lanes, sum);
  });
}

// Quantizes a row to int8. Returns d: NaN or infinite if an input is, and then so is every output.
template <class T>
float quantize(const T *x, int64_t inputs, uint8_t *quants, int64_t padded) {
  Floats top = zeros();
  Mask broken{};
  for (int64_t i = 0; i < inputs; i += 16) {
    const Floats v = load(x + i, first(inputs - i));
    top = max(top, abs(v));
    broken |= is_nan(v);
  }
  const float largest = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(top);
  const float d = largest <= MIN_ABSMAX ? 1 : largest / 127;
  const Floats scale = broadcast(1 / d);
  for (int64_t i = 0; i < padded; i += 16) {
    const Floats v = i < inputs ? load(x + i, first(inputs - i)) : zeros();
    store_bytes(quants + i, first(padded - i), add(to_nearest(v * scale), broadcast_int(Int8::ZERO)));
  }
  return d;
}

template <class T>
struct KindOf {
  using Kind = Widened<T>;
};
template <>
struct KindOf<float> {
  using Kind = Float;
};
template <>
struct KindOf<Bfloat16> {
  using Kind = Bfloat;
};

// One row of the weights.
template <class T>
void get_row_own(const char *w, int64_t row, T *to, int64_t inputs) {
  constexpr int64_t PER_GROUP = 4 / sizeof(T);  // inputs of a group
  const int64_t lane = row % TILE;
  w += row / TILE * ((inputs + PER_GROUP - 1) / PER_GROUP) * GROUP_BYTES;
  int64_t first = 4 * lane, step = sizeof(T);  // offset and stride in a group
  if (std::is_same<T, Float16>::value) first = lane / 16 * HALF + lane % 16 * sizeof(T), step = HALF / 2;
  for (int64_t i = 0; i < inputs; i++)
    std::memcpy(to + i, w + i / PER_GROUP * GROUP_BYTES + first + i % PER_GROUP * step, sizeof(T));
}

}  // namespace

template <class T>
void linear(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,
            int64_t inputs, int64_t stride, int threads) {
  multiply_rows<typename KindOf<T>::Kind>(w, x, y, add, bias, rows, outputs, inputs, stride, threads);
}

template <class T>
void linear_int8(const char *w, const T *x, T *y, const T *add, const float *bias, const float *scales,
                 const int32_t *offsets, int64_t rows, int64_t outputs, int64_t inputs, int64_t stride, int threads) {
  const int64_t groups = (inputs + 3) / 4, bytes = row_stride(4 * groups);
  char *kept = workspace(with_added(rows) * bytes + 4 * rows);
  auto quants = reinterpret_cast<uint8_t *>(kept);
  auto row_scales = reinterpret_cast<float *>(kept + with_added(rows) * bytes);
  for (int64_t r = 0; r < rows; r++) row_scales[r] = quantize(x + r * inputs, inputs, quants + r * bytes, 4 * groups);
  multiply<Int8>(w, kept, bytes, rows, outputs, groups, threads, [=](int64_t row, int64_t out, First lanes, Ints sum) {
    if (Int8::ZERO) sum = subtract(sum, load_ints(offsets + out, lanes));
    const Floats scale = load(scales + out, lanes) * broadcast(row_scales[row]);
    Floats v = to_floats(sum) * scale;
    if (bias) v = v + load(bias + out, lanes);
    if (add) v = v + load(add + row * stride + out, lanes);
    store(y + row * stride + out, lanes, v);
  });
}

template <class T>
void project(const Linear &layer, const T *x, T *y, const T *add, int64_t rows, int threads, int64_t stride) {
  if (!stride) stride = layer.all_outputs();
  for (const Linear *at = &layer; at; y += at->outputs, add = add ? add + at->outputs : add, at = at->next) {
    const Linear &l = *at;
    if (l.kind == KIND_own)
      linear(l.weight, x, y, add, l.bias, rows, l.outputs, l.inputs, stride, threads);
    else if (l.kind == KIND_int8)
      linear_int8(l.weight, x, y, add, l.bias, l.scales, l.offsets, rows, l.outputs, l.inputs, stride, threads);
    else
      linear_quants(l.kind, l.weight, x, y, add, l.bias, rows, l.outputs, l.inputs, stride, threads);
  }
}

template <class T>
void project_each(const Linear *layers, int64_t count, const T *x, Apart in, T *y, Apart out, int64_t rows,
                  int threads) {
  const int64_t inputs = layers[0].inputs;
  const bool together = rows == 1 || in.row == inputs;
  parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
    std::vector<T> own(together ? 0 : rows * inputs);
    for (int64_t i = begin; i < end; i++) {
      const T *const from = x + i * in.part;
      for (int64_t row = 0; !together && row < rows; row++)
        std::memcpy(&own[row * inputs], from + row * in.row, inputs * sizeof(T));
      project(layers[i], together ? from : own.data(), y + i * out.part, static_cast<const T *>(nullptr), rows, 1,
              out.row);
    }
  });
}

template <class T>
void get_rows(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs) {
  if (kind != KIND_own) return get_rows_quants(kind, w, ids, y, count, inputs);
  for (int64_t i = 0; i < count; i++) get_row_own(w, ids[i], y + i * inputs, inputs);
}

template <class T>
void norm(const T *x, const float *weights, T *y, const T *add, int64_t rows, int64_t kinds, int64_t width, float eps,
          bool layer_norm) {
  for (int64_t r = 0; r < rows; r++, x += width, y += width, add = add ? add + width : add) {
    const float *weight = weights + r % kinds * width;
    const float *shift = layer_norm ? weight + kinds * width : nullptr;
    Floats squares = zeros(), mean = zeros();
    if (layer_norm) {
      for (int64_t i = 0; i < width; i += 16) mean = mean + load(x + i, first(width - i));
      mean = broadcast(reduce_sum(mean) / width);
    }
    for (int64_t i = 0; i < width; i += 16) {
      const First lanes = first(width - i);
      const Floats v = load(x + i, lanes) - mean;
      squares = layer_norm ? select(lanes, fma(v, v, squares), squares) : fma(v, v, squares);
    }
    const Floats scale = broadcast(1 / std::sqrt(reduce_sum(squares) / width + eps));
    for (int64_t i = 0; i < width; i += 16) {
      const First lanes = first(width - i);
      const Floats scaled = (load(x + i, lanes) - mean) * scale, w = load(weight + i, lanes);
      if (shift) {
        const Floats shifted = fma(scaled, w, load(shift + i, lanes));
        store(y + i, lanes, add ? shifted + load(add + i, lanes) : shifted);
      } else {
        store(y + i, lanes, add ? fma(scaled, w, load(add + i, lanes)) : scaled * w);
      }
    }
  }
}

template <class T>
void apply_activation(int64_t activation, const float *params, bool gated, const T *x, T *y, int64_t rows, int64_t width) {
  const Floats one = broadcast(1.0f);
  for (int64_t r = 0; r < rows; r++, x += gated ? 2 * width : width, y += width)
    for (int64_t i = 0; i < width; i += 16) {
      const First lanes = first(width - i);
      Floats v = load(x + i, lanes), up = gated ? load(x + width + i, lanes) : one;
      if (activation == ACTIVATION_xielu) {
        const Floats below = (exponential(min(v, broadcast(params[3]))) - one - v) * broadcast(params[1]);
        const Floats bent = select(greater(v, zeros()), broadcast(params[0]) * v * v, below);
        store(y + i, lanes, (bent + broadcast(params[2]) * v) * up);
        continue;
      }
      if (activation == ACTIVATION_relu2) {
        const Floats positive = max(v, zeros());
        store(y + i, lanes, positive * positive * up);
        continue;
      }
      Floats inside = v;
      if (activation == ACTIVATION_clamped) {
        const Floats limit = broadcast(params[1]);
        v = min(limit, v);
        inside = v * broadcast(params[0]);
        up = max(zeros() - limit, min(limit, up)) + one;
      }
      if (activation == ACTIVATION_gelu_tanh)  // 1 + tanh(u) is 2 sigmoid(2 u)
        inside = v * fma(v * v, broadcast(2 * 0.79788456f * 0.044715f), broadcast(2 * 0.79788456f));
      const Floats top = activation == ACTIVATION_sigmoid ? one : v;
      store(y + i, lanes, top / (one + exponential(zeros() - inside)) * up);
    }
}

#define INSTANTIATE(KIND, T)                                                                                       \
  template void get_rows(int64_t, const char *, const int64_t *, T *, int64_t, int64_t);                           \
  template void linear(const char *, const T *, T *, const T *, const float *, int64_t, int64_t, int64_t, int64_t,  \
                       int);                                                                                        \
  template void linear_int8(const char *, const T *, T *, const T *, const float *, const float *, const int32_t *, \
                            int64_t, int64_t, int64_t, int64_t, int);                                               \
  template void project(const Linear &, const T *, T *, const T *, int64_t, int, int64_t);                          \
  template void project_each(const Linear *, int64_t, const T *, Apart, T *, Apart, int64_t, int);                  \
  template void norm(const T *, const float *, T *, const T *, int64_t, int64_t, int64_t, float, bool);             \
  template void apply_activation(int64_t, const float *, bool, const T *, T *, int64_t, int64_t);
FOR_EACH_TYPE(INSTANTIATE)
