// Linear layers, norms and activations for few rows on processors with AVX-512, bound by reading the weights.
//
// Weights lie in the order in which they are read, one stream: tiles of 32 outputs; within a tile, inputs in groups of
// four bytes (one float32, two bfloat16 or four int8), each group's 32 outputs side by side. They are asked for ahead of
// their use, even beyond the layer's end, where the next layer's lie: beside the arithmetic of several rows the processor
// does not look far enough ahead. A few rows share one pass; more rows share chunks of a tile that stay cached. An
// output's sum runs over the inputs in one order whatever the number of rows, so a row's bits do not depend on the rows
// beside it.
//
// Pointers are contiguous row-major arrays; __init__.py states the arguments.
#include "common.h"

#include <cmath>
#include <cstring>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t TILE = 32, GROUP_BYTES = 4 * TILE;
constexpr int64_t BLOCK = 48;   // rows whose sums are kept at a time
constexpr int64_t CHUNK = 256;  // groups of inputs, 32 KiB of weights, that all rows of a block pass over in turn
constexpr int64_t AHEAD = 1 << 14;  // bytes from a weight that is used to the one asked for: a third of the L1 cache
constexpr int64_t FAR = 1 << 23;    // bytes of weights, surely in memory, of which a lone row has enough on the way

struct Float {
  using Sum = __m512;
  static constexpr int64_t TOGETHER = 12;  // rows in one pass
  static Sum zero() { return _mm512_setzero_ps(); }
  static void add(Sum &sum, const char *w, const char *x) {
    float one;
    std::memcpy(&one, x, 4);
    sum = _mm512_fmadd_ps(_mm512_loadu_ps(w), _mm512_set1_ps(one), sum);
  }
};

#if defined(__AVX512BF16__)
struct Bfloat {
  using Sum = __m512;
  static constexpr int64_t TOGETHER = 12;
  static Sum zero() { return _mm512_setzero_ps(); }
  static void add(Sum &sum, const char *w, const char *x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
  }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8 {
  using Sum = __m512i;
  static constexpr int64_t TOGETHER = 8;
  static Sum zero() { return _mm512_setzero_si512(); }
  static void add(Sum &sum, const char *w, const char *x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
  }
};
#endif

template <class K, int ROWS>
void pass(const char *w, const char *x, int64_t stride, int64_t groups, typename K::Sum *sums, bool fresh, bool ask) {
  typename K::Sum s[ROWS][2];
  for (int r = 0; r < ROWS; r++)
    for (int h = 0; h < 2; h++) s[r][h] = fresh ? K::zero() : sums[2 * r + h];
  for (int64_t g = 0; g < groups; g++, w += GROUP_BYTES, x += 4) {
    if (ask) {
      _mm_prefetch(w + AHEAD, _MM_HINT_T0);
      _mm_prefetch(w + AHEAD + GROUP_BYTES / 2, _MM_HINT_T0);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      K::add(s[r][0], w, x + r * stride);
      K::add(s[r][1], w + GROUP_BYTES / 2, x + r * stride);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int h = 0; h < 2; h++) sums[2 * r + h] = s[r][h];
}

template <class K, int ROWS = K::TOGETHER>
void passes(int64_t rows, const char *w, const char *x, int64_t stride, int64_t groups, typename K::Sum *sums,
            bool fresh, bool ask) {
  if (rows == ROWS) return pass<K, ROWS>(w, x, stride, groups, sums, fresh, ask);
  if constexpr (ROWS > 1) passes<K, ROWS - 1>(rows, w, x, stride, groups, sums, fresh, ask);
}

template <class K>
void tile(const char *w, const char *x, int64_t stride, int64_t rows, int64_t groups, typename K::Sum *sums, bool ask) {
  const int64_t turns = (rows + K::TOGETHER - 1) / K::TOGETHER, chunk = turns > 1 ? CHUNK : groups;
  for (int64_t at = 0; at < groups; at += chunk) {
    const int64_t some = groups - at < chunk ? groups - at : chunk;
    for (int64_t turn = 0, row = 0; turn < turns; turn++) {
      const int64_t count = rows / turns + (turn < rows % turns);
      passes<K>(count, w + at * GROUP_BYTES, x + row * stride + at * 4, stride, some, sums + 2 * row, at == 0,
                ask && turn == 0);
      row += count;
    }
  }
}

template <class K, class Write>
void multiply(const char *w, const char *x, int64_t stride, int64_t rows, int64_t outputs, int64_t groups, int threads,
              Write write) {
  const int64_t tiles = (outputs + TILE - 1) / TILE;
  const bool ask = rows > 1 || tiles * groups * GROUP_BYTES < FAR;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tiles; t++) {
    typename K::Sum sums[2 * BLOCK];
    for (int64_t from = 0; from < rows; from += BLOCK) {
      const int64_t some = rows - from < BLOCK ? rows - from : BLOCK;
      tile<K>(w + t * groups * GROUP_BYTES, x + from * stride, stride, some, groups, sums, ask && from == 0);
      for (int64_t r = 0; r < some; r++)
        for (int64_t h = 0; h < 2; h++) {
          const int64_t out = t * TILE + 16 * h;
          if (out < outputs) write(from + r, out, first(outputs - out), sums[2 * r + h]);
        }
    }
  }
}

// Rows an odd number of cache lines apart: at a power of two they would push each other out of the cache.
int64_t apart(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

char *room(int64_t bytes) {
  static thread_local std::vector<char> kept;
  if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
  return kept.data();
}

template <class K, class T>
void linear(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,
            int64_t inputs, int threads) {
  const int64_t bytes = inputs * sizeof(T);
  const char *from = reinterpret_cast<const char *>(x);
  int64_t stride = bytes;
  if (rows > 2) {
    stride = apart(bytes);
    char *to = room(rows * stride);
    for (int64_t r = 0; r < rows; r++) std::memcpy(to + r * stride, from + r * bytes, bytes);
    from = to;
  }
  multiply<K>(w, from, stride, rows, outputs, bytes / 4, threads,
              [=](int64_t row, int64_t out, __mmask16 mask, __m512 sum) {
                if (bias) sum = _mm512_add_ps(sum, load(bias + out, mask));
                if (add) sum = _mm512_add_ps(sum, load(add + row * outputs + out, mask));
                store(y + row * outputs + out, mask, sum);
              });
}

#if defined(__AVX512VNNI__)
// A row in 255 levels of its own, as bytes from 1 to 255; 128 stands for 0. Returns the step between levels.
template <class T>
float quantize(const T *x, int64_t inputs, uint8_t *levels, int64_t padded) {
  __m512 top = _mm512_setzero_ps();
  for (int64_t i = 0; i < inputs; i += 16) top = _mm512_max_ps(top, _mm512_abs_ps(load(x + i, first(inputs - i))));
  const float largest = _mm512_reduce_max_ps(top), step = largest > 0 ? largest / 127 : 1;
  const __m512 scale = _mm512_set1_ps(1 / step);
  for (int64_t i = 0; i < padded; i += 16) {
    const __m512 v = i < inputs ? load(x + i, first(inputs - i)) : _mm512_setzero_ps();
    const __m512i level = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v, scale)), _mm512_set1_epi32(128));
    _mm_mask_storeu_epi8(levels + i, first(padded - i), _mm512_cvtepi32_epi8(level));
  }
  return step;
}

template <class T>
void linear_int8(const char *w, const T *x, T *y, const T *add, const float *bias, const float *scales,
                 const int32_t *offsets, int64_t rows, int64_t outputs, int64_t inputs, int threads) {
  const int64_t groups = (inputs + 3) / 4, stride = apart(4 * groups);
  char *kept = room(rows * (stride + 4));
  auto levels = reinterpret_cast<uint8_t *>(kept);
  auto steps = reinterpret_cast<float *>(kept + rows * stride);
  for (int64_t r = 0; r < rows; r++) steps[r] = quantize(x + r * inputs, inputs, levels + r * stride, 4 * groups);
  multiply<Int8>(w, kept, stride, rows, outputs, groups, threads,
                 [=](int64_t row, int64_t out, __mmask16 mask, __m512i sum) {
                   sum = _mm512_sub_epi32(sum, _mm512_maskz_loadu_epi32(mask, offsets + out));
                   const __m512 scale = _mm512_mul_ps(load(scales + out, mask), _mm512_set1_ps(steps[row]));
                   __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
                   if (bias) v = _mm512_add_ps(v, load(bias + out, mask));
                   if (add) v = _mm512_add_ps(v, load(add + row * outputs + out, mask));
                   store(y + row * outputs + out, mask, v);
                 });
}
#endif

template <class T>
void norm(const T *x, const float *weights, T *y, int64_t rows, int64_t kinds, int64_t width, float eps) {
  for (int64_t r = 0; r < rows; r++, x += width, y += width) {
    const float *weight = weights + r % kinds * width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 v = load(x + i, first(width - i));
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = first(width - i);
      store(y + i, mask, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), load(weight + i, mask)));
    }
  }
}

template <class T>
void silu_times(const T *x, T *y, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++, x += 2 * width, y += width)
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = first(width - i);
      const __m512 gate = load(x + i, mask), up = load(x + width + i, mask), one = _mm512_set1_ps(1.0f);
      const __m512 low = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
      store(y + i, mask, _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, low)), up));
    }
}

}  // namespace

extern "C" {

void advise(char *at, int64_t bytes) {  // large pages: 10 % faster to stream
#if defined(__linux__)
  const uintptr_t large = 1 << 21, start = (reinterpret_cast<uintptr_t>(at) + large - 1) / large * large;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + bytes) / large * large;
  if (end > start) madvise(reinterpret_cast<void *>(start), end - start, MADV_HUGEPAGE);
#endif
}

#define LINEAR(NAME, K, T)                                                                                          \
  void NAME(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,        \
            int64_t inputs, int threads) {                                                                          \
    linear<K, T>(w, x, y, add, bias, rows, outputs, inputs, threads);                                               \
  }
#define INT8(NAME, T)                                                                                               \
  void NAME(const char *w, const T *x, T *y, const T *add, const float *bias, const float *scales,                  \
            const int32_t *offsets, int64_t rows, int64_t outputs, int64_t inputs, int threads) {                   \
    linear_int8<T>(w, x, y, add, bias, scales, offsets, rows, outputs, inputs, threads);                            \
  }
#define ROWS(KIND, T)                                                                                               \
  void norm_##KIND(const T *x, const float *weights, T *y, int64_t rows, int64_t kinds, int64_t width, float eps) {  \
    norm<T>(x, weights, y, rows, kinds, width, eps);                                                                \
  }                                                                                                                 \
  void silu_times_##KIND(const T *x, T *y, int64_t rows, int64_t width) { silu_times<T>(x, y, rows, width); }

LINEAR(linear_float32, Float, float)
ROWS(float32, float)
ROWS(bfloat16, uint16_t)
#if defined(__AVX512BF16__)
LINEAR(linear_bfloat16, Bfloat, uint16_t)
#endif
#if defined(__AVX512VNNI__)
INT8(linear_int8_float32, float)
INT8(linear_int8_bfloat16, uint16_t)
#endif
}
