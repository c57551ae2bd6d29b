// Where the keys and values of a row lie, and a block of them as scores and sums want them.
#pragma once
#include "common.h"

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 128;  // keys between two looks at the largest score: after each all wait, and L1 holds one block

namespace {

// One layer's side of the pool, in numbers: [page][head][slot][width] or any strides with the width innermost.
template <class T>
struct Side {
  T *base;
  int64_t page, head, slot, width;
  T *at(int64_t page_index, int64_t head_index, int64_t offset) const {
    return base + page_index * page + head_index * head + offset * slot;
  }
};

// Spans as Python lays them out, SPAN numbers each.
struct Span {
  int64_t first;   // its first row in the batch
  int64_t count;   // rows
  int64_t base;    // committed entries: the part of a path that is not listed
  int64_t before;  // entries in the cache before this forward
  int64_t table;   // where its page table begins in ``tables``
  int64_t paths;   // where its rows' (begin, length) in ``paths`` begin; -1 for a chain
};

struct Plan {
  const Span *spans;
  int64_t count;
  const int64_t *tables, *paths, *entries;
  int64_t page_size;

  int64_t seen(const Span &span, int64_t row) const {
    return span.paths < 0 ? span.before + row + 1 : span.base + paths[span.paths + 2 * row + 1];
  }
  int64_t entry(const Span &span, int64_t row, int64_t index) const {
    return span.paths < 0 || index < span.base ? index : entries[paths[span.paths + 2 * row] + index - span.base];
  }
};

// Of sums s[0..3], of 16 lanes each, lanes 4 i to 4 i + 3 added up: sum k in lane 4 i + k.
inline __m512 quarters(const __m512 *s) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

// From the quarters of 16 sums: sum i in lane i.
inline __m512 whole(const __m512 *four) {
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(four[0], four[1]), fold(four[2], four[3]));
}

// A head's numbers in registers. A vector makes PARTS vectors of float32.
template <class T>
struct Numbers;

template <>
struct Numbers<float> {
  using Vector = __m512;
  static constexpr int PARTS = 1, SIZE = LANES;

  static Vector get(const float *at, int64_t) { return _mm512_loadu_ps(at); }
  static __m512 dot(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
  static __m512 part(Vector v, int) { return v; }
  static void put(float *to, const __m512 *parts, int64_t) { _mm512_storeu_ps(to, parts[0]); }
};

#if defined(__AVX512BF16__)
template <>
struct Numbers<uint16_t> {
  using Vector = __m512i;
  static constexpr int PARTS = 2, SIZE = 2 * LANES;  // part 0: the numbers of even index, part 1: those between

  static Vector get(const uint16_t *at, int64_t left) {
    return left >= SIZE ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16(0xffff, at);
  }
  static __m512 dot(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static __m512 part(Vector v, int which) {
    return _mm512_castsi512_ps(which ? _mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(v, 16));
  }
  static void put(uint16_t *to, const __m512 *parts, int64_t left) {
    const __m512 low = _mm512_unpacklo_ps(parts[0], parts[1]), high = _mm512_unpackhi_ps(parts[0], parts[1]);
    const __m512i from = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    store(to, 0xffff, _mm512_permutex2var_ps(low, from, high));
    if (left < SIZE) return;
    store(to + LANES, 0xffff, _mm512_permutex2var_ps(low, _mm512_add_epi32(from, _mm512_set1_epi32(8)), high));
  }
};
#endif

// Where the keys and values of one block lie. A path that ends in the block leaves its last lanes empty.
template <class T>
struct Block {
  const T *keys[BLOCK], *values[BLOCK];

  // The entries [from, to) of a row's list. Empty lanes beside them show the first one's key, which may be read.
  void find(const Plan &plan, const Span &span, int64_t row, int64_t from, int64_t to, const Side<T> &k,
            const Side<T> &v, int64_t head) {
    const int64_t begin = from % BLOCK, end = begin + to - from;
    for (int64_t lane = begin, run; lane < end; lane += run) {
      const int64_t index = from + lane - begin, entry = plan.entry(span, row, index);
      const int64_t page = plan.tables[span.table + entry / plan.page_size], offset = entry % plan.page_size;
      run = 1;  // entries side by side
      if (span.paths < 0 || index < span.base) {
        run = end - lane < plan.page_size - offset ? end - lane : plan.page_size - offset;
        if (span.paths >= 0 && run > span.base - index) run = span.base - index;
      }
      const T *const key = k.at(page, head, offset), *const value = v.at(page, head, offset);
      for (int64_t i = 0; i < run; i++) {
        keys[lane + i] = key + i * k.slot;
        values[lane + i] = value + i * v.slot;
      }
    }
    for (int64_t lane = begin / LANES * LANES; lane < begin; lane++) keys[lane] = keys[begin];
    for (int64_t lane = end; lane % LANES; lane++) keys[lane] = keys[begin];
  }

  // Queries of so many vectors that are scored at a time: more share the keys read, but leave the registers.
  static constexpr int together(int vectors) { return vectors > 11 ? 1 : vectors > 6 ? 2 : vectors > 3 ? 3 : 4; }

  template <int WIDTH>
  static void ask(const T *at) {
    constexpr int LINE = 64 / sizeof(T);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i += LINE) _mm_prefetch(at + i, _MM_HINT_T0);
  }

  // Products of queries and keys, in all lanes of a sixteen of which one is wanted. ``fresh``: asks for the values, which
  // come in while the scores are made.
  template <int WIDTH, int COUNT>
  void score(const T *const *queries, float *scores, int64_t begin, int64_t end, bool fresh) const {
    using N = Numbers<T>;
    for (int64_t lane = begin / LANES * LANES; lane < end; lane += LANES) {
      __m512 four[COUNT][4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m512 sums[COUNT][4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
          if (fresh) ask<WIDTH>(values[lane + 4 * i + k]);
#pragma GCC unroll 16
          for (int at = 0; at < WIDTH; at += N::SIZE) {
            const auto key = N::get(keys[lane + 4 * i + k] + at, WIDTH - at);
#pragma GCC unroll 4
            for (int q = 0; q < COUNT; q++)
              sums[q][k] = N::dot(at ? sums[q][k] : _mm512_setzero_ps(), key, N::get(queries[q] + at, WIDTH - at));
          }
        }
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++) four[q][i] = quarters(sums[q]);
      }
#pragma GCC unroll 4
      for (int q = 0; q < COUNT; q++) _mm512_storeu_ps(scores + BLOCK * q + lane, whole(four[q]));
    }
  }

  // Sums that shrink, and weighted values; a query's sums lie part by part. Asks for the keys of ``next``.
  template <int WIDTH, int COUNT>
  void gather(float *sums, const float *shrink, const float *weights, int64_t begin, int64_t end,
              const Block *next) const {
    constexpr int REST = WIDTH % SLICE, APART = (WIDTH + Numbers<T>::SIZE - 1) / Numbers<T>::SIZE * Numbers<T>::SIZE;
    for (int at = 0; at + SLICE <= WIDTH; at += SLICE)
      slice<SLICE, COUNT>(at, sums + at, APART, shrink, weights, begin, end, next);
    if constexpr (REST > 0)
      slice<REST, COUNT>(WIDTH - REST, sums + WIDTH - REST, APART, shrink, weights, begin, end, next);
  }

 private:
  static constexpr int SLICE = 4 * LANES;  // numbers whose sums stay in registers

  template <int WIDTH, int COUNT>
  void slice(int64_t first, float *sums, int64_t apart, const float *shrink, const float *weights, int64_t begin,
             int64_t end, const Block *next) const {
    using N = Numbers<T>;
    constexpr int VECTORS = (WIDTH + N::SIZE - 1) / N::SIZE, PARTS = VECTORS * N::PARTS;
    __m512 out[COUNT][PARTS];
#pragma GCC unroll 4
    for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++)
        out[q][i] = _mm512_mul_ps(_mm512_loadu_ps(sums + apart * q + LANES * i), _mm512_set1_ps(shrink[q]));
    for (int64_t j = begin; j < end; j++) {
      if (next) ask<WIDTH>(next->keys[j] + first);
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++) {
        const int at = i / N::PARTS * N::SIZE;
        const __m512 part = N::part(N::get(values[j] + first + at, WIDTH - at), i % N::PARTS);
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++)
          out[q][i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[BLOCK * q + j]), part, out[q][i]);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++) _mm512_storeu_ps(sums + apart * q + LANES * i, out[q][i]);
  }
};

}  // namespace
