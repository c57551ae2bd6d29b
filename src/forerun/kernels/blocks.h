// Blocks of paged keys and values: scores of queries, and weighted sums of values.
//
// WIDTH is the head size if it is known at compile time; 0: loops run to ``width``.
#pragma once
#include <algorithm>

#include "kernels.h"

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 128;  // keys per step of the online softmax; fits the L1 cache

namespace {

// Keys or values of one layer in the pool.
template <class T>
struct PagedRows {
  T *base;
  int64_t page, head, slot;
  T *at(int64_t page_index, int64_t head_index, int64_t offset) const {
    return base + page_index * page + head_index * head + offset * slot;
  }
};

// A vector of a head's numbers. Queries are stored as ``Asked``. A vector converts to PARTS vectors of float32.
template <class T>
struct Numbers {
  using Vector = Floats;
  using Asked = float;
  static constexpr int PARTS = 1, SIZE = LANES;

  template <class N>
  static Vector get(const N *at, int64_t left) { return load(at, first(left)); }
  static Vector get(const float *at, int64_t left) { return left >= SIZE ? load(at) : load(at, first(left)); }
  static Floats dot(Floats sum, Vector a, Vector b) { return fma(a, b, sum); }
  static Floats part(Vector v, int) { return v; }
  static void put(T *to, const Floats *parts, int64_t left) { store(to, first(left), parts[0]); }
};

#if defined(__AVX512BF16__)
template <>
struct Numbers<Bfloat16> {
  using Vector = __m512i;
  using Asked = Bfloat16;
  static constexpr int PARTS = 2, SIZE = 2 * LANES;  // part 0: even indices, part 1: odd ones

  static Vector get(const Bfloat16 *at, int64_t left) {
    return left >= SIZE ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16((1u << left) - 1, at);
  }
  static Floats dot(Floats sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static Floats part(Vector v, int index) {
    return _mm512_castsi512_ps(index ? _mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(v, 16));
  }
  static void put(Bfloat16 *to, const Floats *parts, int64_t left) {
    const __m512 low = _mm512_unpacklo_ps(parts[0], parts[1]), high = _mm512_unpackhi_ps(parts[0], parts[1]);
    const __m512i from = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    store(to, first(left), _mm512_permutex2var_ps(low, from, high));
    if (left <= LANES) return;
    const __m512i behind = _mm512_add_epi32(from, _mm512_set1_epi32(8));
    store(to + LANES, first(left - LANES), _mm512_permutex2var_ps(low, behind, high));
  }
};
#endif

// Addresses of the keys and values of a block. The last lanes are empty if the list of entries ends in it.
template <class T>
struct Block {
  using N = Numbers<T>;
  using Asked = typename N::Asked;
  const T *keys[BLOCK], *values[BLOCK];

  // Entries [from, to) of a row's list. Empty lanes get the first key's address, so that they can be read.
  void find(const Plan &plan, const Span &span, int64_t row, int64_t from, int64_t to, int64_t page_size,
            const PagedRows<T> &k, const PagedRows<T> &v, int64_t head) {
    const int64_t begin = from % BLOCK, end = begin + to - from;
    for (int64_t lane = begin, run; lane < end; lane += run) {
      const int64_t index = from + lane - begin, entry = plan.entry(span, row, index);
      const int64_t page = plan.tables[span.table + entry / page_size], offset = entry % page_size;
      run = 1;  // contiguous entries
      if (span.paths < 0 || index < span.base) {
        run = end - lane < page_size - offset ? end - lane : page_size - offset;
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

#if defined(__AVX512F__)
  static constexpr int QUARTERS = 4;  // of sixteen keys, unrolled
#else
  static constexpr int QUARTERS = 1;
#endif

  // Queries scored at a time: more of them share the loaded keys, but run out of registers.
  static constexpr int together([[maybe_unused]] int width) {
#if defined(__AVX512F__)
    const int vectors = width > 0 ? (width + N::SIZE - 1) / N::SIZE : 4;
    return vectors > 11 ? 1 : vectors > 6 ? 2 : vectors > 3 ? 3 : 4;
#else
    return 4;  // they are read from memory anyway
#endif
  }

  // The functions of a head size, by the number of queries less one.
  struct Sized {
    int together;
    void (Block::*score[4])(const Asked *const *, float *, int64_t, int64_t, bool, int64_t) const;
    void (Block::*gather[4])(float *, int64_t, const float *, const float *, int64_t, int64_t, const Block *,
                             int64_t) const;
  };
  template <int WIDTH>
  static constexpr Sized sized() {
    constexpr int MOST = together(WIDTH);
    return {MOST,
            {&Block::score<WIDTH, 1>, &Block::score<WIDTH, std::min(2, MOST)>, &Block::score<WIDTH, std::min(3, MOST)>,
             &Block::score<WIDTH, MOST>},
            {&Block::gather<WIDTH, 1>, &Block::gather<WIDTH, 2>, &Block::gather<WIDTH, 3>, &Block::gather<WIDTH, 4>}};
  }

  template <int WIDTH>
  static void prefetch(const T *at, int64_t width) {
    constexpr int LINE = 64 / sizeof(T);
    if constexpr (WIDTH > 0) {
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i += LINE) __builtin_prefetch(at + i);
    } else {
      for (int64_t i = 0; i < width; i += LINE) __builtin_prefetch(at + i);
    }
  }

  // Dot products of queries and keys, for all lanes of each sixteen. ``fresh``: prefetches the values.
  template <int WIDTH, int COUNT>
  void score(const Asked *const *queries, float *scores, int64_t begin, int64_t end, bool fresh, int64_t width) const {
    for (int64_t lane = begin / LANES * LANES; lane < end; lane += LANES) {
      Floats four[COUNT][4];
#pragma GCC unroll QUARTERS
      for (int i = 0; i < 4; i++) {
        Floats sums[COUNT][4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
          if (fresh) prefetch<WIDTH>(values[lane + 4 * i + k], width);
          const T *const from = keys[lane + 4 * i + k];
          if constexpr (WIDTH > 0) {
#pragma GCC unroll 16
            for (int at = 0; at < WIDTH; at += N::SIZE) {
              const auto key = N::get(from + at, WIDTH - at);
#pragma GCC unroll 4
              for (int q = 0; q < COUNT; q++)
                sums[q][k] = N::dot(at ? sums[q][k] : zeros(), key, N::get(queries[q] + at, WIDTH - at));
            }
          } else {
#pragma GCC unroll 4
            for (int q = 0; q < COUNT; q++) sums[q][k] = zeros();
            for (int64_t at = 0; at < width; at += N::SIZE) {
              const auto key = N::get(from + at, width - at);
#pragma GCC unroll 4
              for (int q = 0; q < COUNT; q++)
                sums[q][k] = N::dot(sums[q][k], key, N::get(queries[q] + at, width - at));
            }
          }
        }
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++) four[q][i] = quarters(sums[q]);
      }
#pragma GCC unroll 4
      for (int q = 0; q < COUNT; q++) store(scores + BLOCK * q + lane, whole(four[q]));
    }
  }

  // sums = shrink * sums + weights * values. A query has ``apart`` sums, in the order of PARTS. Prefetches the keys of
  // ``next``.
  template <int WIDTH, int COUNT>
  void gather(float *sums, int64_t apart, const float *shrink, const float *weights, int64_t begin, int64_t end,
              const Block *next, int64_t width) const {
    constexpr int SLICE = slice_of(COUNT), REMAINDER = WIDTH % SLICE;
    int64_t at = 0;
    for (; at + SLICE <= (WIDTH > 0 ? WIDTH : width); at += SLICE)
      slice<SLICE, COUNT>(at, sums + at, apart, shrink, weights, begin, end, next, SLICE);
    if constexpr (REMAINDER > 0)
      slice<REMAINDER, COUNT>(WIDTH - REMAINDER, sums + WIDTH - REMAINDER, apart, shrink, weights, begin, end, next, REMAINDER);
    if constexpr (WIDTH == 0)
      for (; at < width; at += N::SIZE)
        slice<0, COUNT>(at, sums + at, apart, shrink, weights, begin, end, next, width - at);
  }

 private:
  // Numbers of a head whose sums stay in registers for ``count`` queries.
  static constexpr int slice_of(int count) {
#if defined(__AVX512F__)
    return 4 * LANES;
#else
    return count == 1 ? 4 * LANES : count == 2 ? 2 * LANES : LANES;
#endif
  }

  // WIDTH 0: one vector, of which ``left`` numbers are valid.
  template <int WIDTH, int COUNT>
  void slice(int64_t from, float *sums, int64_t apart, const float *shrink, const float *weights, int64_t begin,
             int64_t end, const Block *next, int64_t left) const {
    constexpr int VECTORS = WIDTH > 0 ? (WIDTH + N::SIZE - 1) / N::SIZE : 1, PARTS = VECTORS * N::PARTS;
    Floats out[COUNT][PARTS];
#pragma GCC unroll 4
    for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++) out[q][i] = load(sums + apart * q + LANES * i) * broadcast(shrink[q]);
    for (int64_t j = begin; j < end; j++) {
      if (next) prefetch<WIDTH>(next->keys[j] + from, left);
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++) {
        const int at = i / N::PARTS * N::SIZE;
        const Floats part = N::part(N::get(values[j] + from + at, WIDTH > 0 ? WIDTH - at : left), i % N::PARTS);
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++) out[q][i] = fma(broadcast(weights[BLOCK * q + j]), part, out[q][i]);
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 4
      for (int i = 0; i < PARTS; i++) store(sums + apart * q + LANES * i, out[q][i]);
  }
};

}  // namespace
