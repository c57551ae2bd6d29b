// Where the keys and values of a row lie, and sixteen of them as scores and sums want them.
#pragma once
#include "common.h"

#include <cstring>
#include <utility>

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = LANES;  // keys between two looks at the largest score; more were slower
constexpr int64_t WIDEST = 256;   // numbers of a head, a multiple of 16

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

// sums[i] in lane i.
inline __m512 across(const __m512 *sums) {
  __m512 four[4];
  for (int i = 0; i < 4; i++) {
    const __m512 *s = sums + 4 * i;
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(four[0], four[1]), fold(four[2], four[3]));
}

// f(0), ..., f(COUNT - 1), each with a constant, so that arrays indexed by it stay in registers.
template <int COUNT, class F, int... I>
inline void each(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int COUNT, class F>
inline void each(F f) {
  each<COUNT>(f, std::make_integer_sequence<int, COUNT>());
}

// Where the keys and values of one block lie. A path that ends in the block leaves its last lanes empty.
template <class T>
struct Places {
  const T *keys[BLOCK], *values[BLOCK];
  int64_t begin, end;  // lanes in use

  Places(const Plan &plan, const Span &span, int64_t row, int64_t from, int64_t to, const Side<T> &k, const Side<T> &v,
         int64_t head)
      : begin(from % BLOCK), end(begin + to - from) {
    int64_t last = -2, page = 0, offset = 0;
    for (int64_t index = from; index < to; index++) {
      const int64_t entry = plan.entry(span, row, index);
      if (entry == last + 1 && offset + 1 < plan.page_size) {
        offset++;
      } else {
        page = plan.tables[span.table + entry / plan.page_size];
        offset = entry % plan.page_size;
      }
      last = entry;
      keys[index % BLOCK] = k.at(page, head, offset);
      values[index % BLOCK] = v.at(page, head, offset);
    }
  }
};

// The keys and values of one block, as scores and sums want them.
template <class T>
struct Block;

template <>
struct Block<float> {
  static constexpr int together(int) { return 1; }
  const float *keys[BLOCK], *values[BLOCK];

  void bring(const Places<float> &from, int64_t) {
    for (int64_t lane = from.begin; lane < from.end; lane++) {
      keys[lane] = from.keys[lane];
      values[lane] = from.values[lane];
    }
  }

  template <int CHUNKS, int>
  void score(const float *const *queries, float *scores, int64_t begin, int64_t end) const {
    __m512 products[LANES];
    const auto product = [&](int64_t j) {
      __m512 sum = _mm512_setzero_ps();
      each<CHUNKS>([&](auto c) {
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(*queries + LANES * c), _mm512_loadu_ps(keys[j] + LANES * c), sum);
      });
      return sum;
    };
    if (begin == 0 && end == BLOCK) {
      each<BLOCK>([&](auto j) { products[j] = product(j); });
    } else {
      each<BLOCK>([&](auto j) { products[j] = _mm512_setzero_ps(); });
      for (int64_t j = begin; j < end; j++) products[j] = product(j);
    }
    _mm512_storeu_ps(scores, across(products));
  }

  template <int CHUNKS, int>
  void gather(float *sums, const float *shrink, const float *weights, int64_t begin, int64_t end) const {
    __m512 out[CHUNKS];
    each<CHUNKS>([&](auto c) { out[c] = _mm512_mul_ps(_mm512_loadu_ps(sums + LANES * c), _mm512_set1_ps(*shrink)); });
    for (int64_t j = begin; j < end; j++)
      each<CHUNKS>([&](auto c) {
        out[c] = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), _mm512_loadu_ps(values[j] + LANES * c), out[c]);
      });
    each<CHUNKS>([&](auto c) { _mm512_storeu_ps(sums + LANES * c, out[c]); });
  }
};

#if defined(__AVX512BF16__)
// Pairs of numbers are multiplied at once: two neighbours of a key and its query, two neighbouring keys' values and
// weights. So keys lie [pair of numbers][key][2], values [pair of keys][number][2]. A weight is the sum of two numbers
// of 8 bits, LANES apart, or its rounding would show.
template <>
struct Block<uint16_t> {
  alignas(64) uint32_t keys[WIDEST / 2][LANES];
  alignas(64) uint16_t values[BLOCK / 2][2 * WIDEST];

  void bring(const Places<uint16_t> &from, int64_t width) {
    __m512i low, high;  // where two rows' numbers go when they are shuffled into pairs
    alignas(64) uint16_t order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = i / 2 + i % 2 * 32, order[1][i] = 16 + i / 2 + i % 2 * 32;
    low = _mm512_load_si512(order[0]);
    high = _mm512_load_si512(order[1]);
    for (int64_t at = 0; at < width; at += 32) {
      const __mmask32 mask = width - at >= 32 ? 0xffffffff : 0xffff;
      __m512i rows[LANES];
      for (int64_t lane = 0; lane < BLOCK; lane++)
        rows[lane] = lane >= from.begin && lane < from.end ? _mm512_maskz_loadu_epi16(mask, from.keys[lane] + at)
                                                            : _mm512_setzero_si512();
      transpose(rows, keys + at / 2, mask == 0xffff ? 8 : 16);
      for (int64_t lane = from.begin & ~1; lane < from.end; lane += 2) {
        const uint16_t *one = lane >= from.begin ? from.values[lane] : nullptr;
        const uint16_t *two = lane + 1 < from.end ? from.values[lane + 1] : nullptr;
        const __m512i a = one ? _mm512_maskz_loadu_epi16(mask, one + at) : _mm512_setzero_si512();
        const __m512i b = two ? _mm512_maskz_loadu_epi16(mask, two + at) : _mm512_setzero_si512();
        _mm512_store_si512(values[lane / 2] + 2 * at, _mm512_permutex2var_epi16(a, low, b));
        if (mask != 0xffff) _mm512_store_si512(values[lane / 2] + 2 * at + 32, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }

  // 16 rows of 16 words: word i of every row to to[i].
  static void transpose(const __m512i *rows, uint32_t (*to)[LANES], int count) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
      a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int k = 0; k < 2; k++) {
        b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + k + 2]);
        b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + k + 2]);
      }
    for (int k = 0; k < 4; k++) {  // words k, k + 4, k + 8 and k + 12 of four rows each
      const __m512i p = _mm512_shuffle_i32x4(b[k], b[k + 4], 0x88), q = _mm512_shuffle_i32x4(b[k + 8], b[k + 12], 0x88);
      const __m512i r = _mm512_shuffle_i32x4(b[k], b[k + 4], 0xdd), s = _mm512_shuffle_i32x4(b[k + 8], b[k + 12], 0xdd);
      _mm512_store_si512(to[k], _mm512_shuffle_i32x4(p, q, 0x88));
      _mm512_store_si512(to[k + 4], _mm512_shuffle_i32x4(r, s, 0x88));
      if (count == 8) continue;
      _mm512_store_si512(to[k + 8], _mm512_shuffle_i32x4(p, q, 0xdd));
      _mm512_store_si512(to[k + 12], _mm512_shuffle_i32x4(r, s, 0xdd));
    }
  }

  static __m512bh pair_of(const uint16_t *at) {
    int32_t pair;
    std::memcpy(&pair, at, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }

  // Queries at a time: with one, the steps of its sums wait for each other; more than 16 sums leave the registers.
  static constexpr int together(int chunks) { return chunks > 8 ? 1 : chunks > 4 ? 2 : 4; }

  template <int CHUNKS, int COUNT>
  void score(const uint16_t *const *queries, float *scores, int64_t, int64_t) const {
    __m512 sums[COUNT][4];
    each<COUNT>([&](auto q) { each<4>([&](auto i) { sums[q][i] = _mm512_setzero_ps(); }); });
    for (int64_t at = 0; at < LANES * CHUNKS / 2; at += 4)
      each<4>([&](auto i) {
        const auto key = (__m512bh)_mm512_load_si512(keys[at + i]);
        each<COUNT>([&](auto q) {
          sums[q][i] = _mm512_dpbf16_ps(sums[q][i], key, pair_of(queries[q] + 2 * (at + i)));
        });
      });
    each<COUNT>([&](auto q) {
      const __m512 halves[] = {_mm512_add_ps(sums[q][0], sums[q][1]), _mm512_add_ps(sums[q][2], sums[q][3])};
      _mm512_storeu_ps(scores + LANES * q, _mm512_add_ps(halves[0], halves[1]));
    });
  }

  template <int CHUNKS, int COUNT>
  void gather(float *sums, const float *shrink, const uint16_t *weights, int64_t begin, int64_t end) const {
    constexpr int64_t WIDTH = LANES * CHUNKS;
    __m512 out[COUNT][CHUNKS];
    each<COUNT>([&](auto q) {
      const __m512 less = _mm512_set1_ps(shrink[q]);
      each<CHUNKS>([&](auto c) { out[q][c] = _mm512_mul_ps(_mm512_loadu_ps(sums + WIDTH * q + LANES * c), less); });
    });
    for (int64_t j = begin & ~1; j < end; j += 2) {
      __m512bh high[COUNT], low[COUNT];
      each<COUNT>([&](auto q) {
        high[q] = pair_of(weights + 2 * LANES * q + j);
        low[q] = pair_of(weights + 2 * LANES * q + LANES + j);
      });
      // A key that is not the queries' own does not count, not even as 0 times NaN.
      const __mmask32 mask = (j < begin ? 0 : 0x55555555) | (j + 1 < end ? 0xaaaaaaaa : 0);
      each<CHUNKS>([&](auto c) {
        const auto value = (__m512bh)_mm512_maskz_loadu_epi16(mask, values[j / 2] + 2 * LANES * c);
        each<COUNT>([&](auto q) {
          out[q][c] = _mm512_dpbf16_ps(_mm512_dpbf16_ps(out[q][c], value, high[q]), value, low[q]);
        });
      });
    }
    each<COUNT>([&](auto q) {
      each<CHUNKS>([&](auto c) { _mm512_storeu_ps(sums + WIDTH * q + LANES * c, out[q][c]); });
    });
  }
};
#endif

}  // namespace
