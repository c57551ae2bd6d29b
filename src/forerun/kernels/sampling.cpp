// Keyed Gumbel noise, the best id of perturbed rows, and what two distributions share.
//
// Rows are float32 [rows, size], contiguous; -inf is a banned id. Entry i of a key's noise depends on the key and i alone.
#include "common.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr double PARALLEL = 1e6;  // entries worth a second thread

// ln x of positive normal numbers: cephes' polynomial around 1.
inline __m512 logarithm(__m512 x) {
  const __m512 one = _mm512_set1_ps(1);
  __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero), e = _mm512_getexp_ps(x);
  const __mmask16 large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
  m = _mm512_mask_mul_ps(m, large, m, _mm512_set1_ps(0.5f));
  e = _mm512_mask_add_ps(e, large, e, one);
  const __m512 r = _mm512_sub_ps(m, one), z = _mm512_mul_ps(r, r);
  __m512 p = _mm512_set1_ps(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_mul_ps(_mm512_mul_ps(p, z), r);
  p = _mm512_fmadd_ps(e, _mm512_set1_ps(-2.12194440e-4f), p);
  p = _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), z, p);
  return _mm512_fmadd_ps(e, _mm512_set1_ps(0.693359375f), _mm512_add_ps(r, p));
}

struct Key {
  __m512i odd, plus;
  explicit Key(uint64_t key)
      : odd(_mm512_set1_epi32(static_cast<int32_t>(key | 1))), plus(_mm512_set1_epi32(static_cast<int32_t>(key >> 32))) {}

  // One of 2^31 numbers in (0, 1) each; ``ids`` are well-mixed words, one for each entry.
  __m512 uniform(__m512i ids) const {
    const auto fold = [](__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16)); };
    __m512i x = fold(_mm512_add_epi32(_mm512_mullo_epi32(ids, odd), plus));
    x = fold(_mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D)));
    const __m512 u = _mm512_add_ps(_mm512_abs_ps(_mm512_cvtepi32_ps(x)), _mm512_set1_ps(0.5f));
    return _mm512_min_ps(_mm512_mul_ps(u, _mm512_set1_ps(4.656612873e-10f)), _mm512_set1_ps(1 - 5.9604645e-8f));
  }

  // -ln(-ln(1 - u))
  static __m512 noise(__m512 u) {
    const __m512 one = _mm512_set1_ps(1);
    const __m512 w = _mm512_sub_ps(one, u), lost = _mm512_sub_ps(_mm512_sub_ps(one, w), u);  // of u, in w
    const __m512 wait = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_add_ps(logarithm(w), _mm512_div_ps(lost, w)));
    return _mm512_sub_ps(_mm512_setzero_ps(), logarithm(wait));
  }

  // What the noise does not exceed, from the exponent alone: -ln u, rounded up.
  static __m512 bound(__m512 u) {
    return _mm512_fnmadd_ps(_mm512_getexp_ps(u), _mm512_set1_ps(0.69314718f), _mm512_set1_ps(0.001f));
  }
};

// Where a row's largest number is.
struct Best {
  __m512 floor = _mm512_set1_ps(-std::numeric_limits<float>::infinity());  // the largest of all lanes
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 broken = 0;

  void see(__m512 v, __mmask16 mask, int64_t at) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 more = _mm512_mask_cmp_ps_mask(mask, v, top, _CMP_GT_OQ);
    broken |= _mm512_mask_cmp_ps_mask(mask, v, v, _CMP_UNORD_Q);
    top = _mm512_mask_mov_ps(top, more, v);
    place = _mm512_mask_add_epi32(place, more, lanes, _mm512_set1_epi32(static_cast<int32_t>(at)));
  }

  // The same for v + noise, which is computed only where it may be the largest so far.
  void see(__m512 v, __mmask16 mask, int64_t at, const Key &key, const int32_t *ids) {
    const __m512 u = key.uniform(_mm512_maskz_loadu_epi32(mask, ids + at));
    if (!_mm512_mask_cmp_ps_mask(mask, _mm512_add_ps(v, Key::bound(u)), floor, _CMP_NLT_UQ)) return;
    see(_mm512_add_ps(v, Key::noise(u)), mask, at);
    floor = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  }

  // The first of equals; NaN if one was seen.
  void end(float *value, int64_t *id) const {
    *value = broken ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(top);
    const __mmask16 at = _mm512_cmp_ps_mask(top, _mm512_set1_ps(_mm512_reduce_max_ps(top)), _CMP_EQ_OQ);
    *id = _mm512_mask_reduce_min_epi32(at, place);
  }
};

// Softmax of a row: ``powers``, e^(v - top), times ``share``, one over their sum.
struct Softmax {
  float *const powers;
  float share;

  Softmax(const float *row, int64_t size, float *powers) : powers(powers) {
    __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      most = _mm512_mask_max_ps(most, mask, most, load(row + i, mask));
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      const __m512 x = _mm512_sub_ps(load(row + i, mask), top);
      const __mmask16 counts = mask & _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87), _CMP_NLT_UQ);
      const __m512 power = _mm512_maskz_mov_ps(counts, exponential(x));
      store(powers + i, mask, power);
      sum = _mm512_add_ps(sum, power);
    }
    share = 1 / _mm512_reduce_add_ps(sum);
  }

  __m512 operator()(int64_t at, __mmask16 mask) const {
    return _mm512_mul_ps(load(powers + at, mask), _mm512_set1_ps(share));
  }
};

// The first id whose cumulative weight exceeds its share of the sum; never one of weight 0, unless all are. The sum runs
// over blocks in double precision, so that rounding can at most leave the search at the end of the right block.
int64_t invert(const float *weights, int64_t size, double spot) {
  constexpr int64_t STEP = 128;
  static thread_local std::vector<double> reach;
  reach.clear();
  double total = 0;
  for (int64_t at = 0; at < size; at += STEP) {
    __m512d sum = _mm512_setzero_pd();
    for (int64_t i = at; i < at + STEP && i < size; i += 16) {
      const __m512 v = load(weights + i, first(size - i));
      sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
      sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
    }
    total += _mm512_reduce_add_pd(sum);
    reach.push_back(total);
  }
  const double goal = total * (spot < 1 - 0x1p-40 ? spot : 1 - 0x1p-40);
  size_t block = 0;
  while (block < reach.size() && !(reach[block] > goal)) block++;
  if (block == reach.size()) return size - 1;  // nothing, or NaN
  double sum = block ? reach[block - 1] : 0;
  int64_t found = size - 1;
  for (int64_t i = block * STEP; i < (static_cast<int64_t>(block) + 1) * STEP && i < size; i++)
    if (weights[i] > 0) {
      found = i;
      sum += weights[i];
      if (sum > goal) break;
    }
  return found;
}

}  // namespace

extern "C" {

// Per row of weights, the id at which its share ``spots`` of the sum is passed.
void draw(const float *weights, int64_t rows, int64_t size, const double *spots, int64_t *out) {
  for (int64_t r = 0; r < rows; r++) out[r] = invert(weights + r * size, size, spots[r]);
}

void gumbel(uint64_t key, const int32_t *ids, float *out, int64_t size) {
  const Key noise(key);
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 mask = first(size - i);
    store(out + i, mask, Key::noise(noise.uniform(_mm512_maskz_loadu_epi32(mask, ids + i))));
  }
}

// Per row, the largest of scores + the noise of its key (where ``noisy``) and its id; and the softmax of the scores.
void choose(const float *scores, int64_t rows, int64_t size, const int32_t *ids, const uint64_t *keys,
            const int64_t *noisy, float *tops, int64_t *places, float *softmax, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && static_cast<double>(rows) * size > PARALLEL)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = scores + r * size;
    const Key noise(keys[r]);
    Best best;
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      const __m512 v = load(row + i, mask);
      if (noisy[r])
        best.see(v, mask, i, noise, ids);
      else
        best.see(v, mask, i);
    }
    best.end(tops + r, places + r);
    if (!softmax) continue;
    const Softmax law(row, size, softmax + r * size);
    for (int64_t i = 0; i < size; i += 16) store(law.powers + i, first(size - i), law(i, first(size - i)));
  }
}

// What chains of drafted tokens come to. ``residual``: per row, softmax of its scores, or for a greedy row all on its best id;
// and in a trial's row max(0, factor * p - q), unless nothing is left. The factor is 1, and where the trial ``follows`` the
// one before it, that one's weight; a weight is factor * p / (lenience * q) of the trial's token, at most 1. A trial without q
// has all of it on its token. ``left``: what is left of each trial's row; ``shared``: the sum of min(p, q).
void weigh(const float *scores, int64_t rows, int64_t size, const int64_t *greedy, int64_t trials, const int64_t *at,
           const int64_t *tokens, const float *const *qs, const int64_t *follows, float lenience, float *residual,
           float *tops, float *weights, float *left, float *shared) {
  static thread_local std::vector<float> room;
  if (static_cast<int64_t>(room.size()) < size) room.resize(size);
  for (int64_t r = 0; r < rows; r++) {
    float *const out = residual + r * size;
    const Softmax law(scores + r * size, size, out);
    Best best;
    int64_t place;
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      best.see(load(scores + r * size + i, mask), mask, i);
      store(out + i, mask, greedy[r] ? _mm512_setzero_ps() : law(i, mask));
    }
    best.end(tops + r, &place);
    if (greedy[r]) out[place] = 1;
  }
  for (int64_t t = 0; t < trials; t++) {
    float *const row = residual + at[t] * size;
    const float *const q = qs[t];
    const float factor = follows[t] ? weights[t - 1] : 1, kept = row[tokens[t]];
    const float weight = factor * kept / (lenience * (q ? q[tokens[t]] : 1));
    weights[t] = weight > 1 ? 1 : weight;
    const __m512 times = _mm512_set1_ps(factor), none = _mm512_setzero_ps();
    __m512 sum = none, common = none;
    if (!q) row[tokens[t]] = 0;
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      const __m512 a = load(row + i, mask), b = q ? load(q + i, mask) : none;
      const __m512 more = _mm512_max_ps(_mm512_fmsub_ps(times, a, b), none);
      store(room.data() + i, mask, more);
      sum = _mm512_add_ps(sum, more);
      common = _mm512_add_ps(common, _mm512_min_ps(a, b));
    }
    left[t] = _mm512_reduce_add_ps(sum);
    shared[t] = q ? _mm512_reduce_add_ps(common) : kept;
    if (!q) row[tokens[t]] = kept;
    if (left[t] > 0) std::memcpy(row, room.data(), size * sizeof(float));
  }
}

// The ``count`` best ids of some rows of scores, best first and the first of equals, and the logs of their softmax; row
// at[t] goes to row into[t] of ``ids`` and ``logs``, which end with -1 and -inf where fewer ids are permitted.
void rank(const float *scores, int64_t size, int64_t trials, const int64_t *at, int64_t count, const int64_t *into,
          int32_t *ids, float *logs) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < trials; t++) {
    const float *row = scores + at[t] * size;
    int32_t *const id = ids + into[t] * count;
    float *const value = logs + into[t] * count;
    std::fill(id, id + count, -1);
    std::fill(value, value + count, NONE);
    // The sum of e^(v - base): a new largest number seldom comes, and then all before it counts for less.
    __m512 sum = _mm512_setzero_ps(), base = _mm512_set1_ps(NONE), floor = base;
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(NONE), mask, row + i);
      __mmask16 better = _mm512_cmp_ps_mask(v, floor, _CMP_GT_OQ);
      while (better) {
        const int lane = __builtin_ctz(better);
        const float found = row[i + lane];
        better &= better - 1;
        if (!(found > value[count - 1])) continue;
        int64_t place = count - 1;
        for (; place > 0 && found > value[place - 1]; place--) value[place] = value[place - 1], id[place] = id[place - 1];
        value[place] = found;
        id[place] = static_cast<int32_t>(i + lane);
        floor = _mm512_set1_ps(value[count - 1]);
        if (place) continue;
        const __m512 top = _mm512_set1_ps(found);
        sum = _mm512_mul_ps(sum, exponential(_mm512_sub_ps(base, top)));
        base = top;
      }
      const __m512 x = _mm512_sub_ps(v, base);
      const __mmask16 counts = _mm512_cmp_ps_mask(v, _mm512_set1_ps(NONE), _CMP_NEQ_UQ) &
                               _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87), _CMP_NLT_UQ);
      sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(counts, exponential(x)));
    }
    const float all = value[0] + std::log(_mm512_reduce_add_ps(sum));
    for (int64_t k = 0; k < count; k++) value[k] = id[k] < 0 ? NONE : value[k] - all;
  }
}

// Per trial, the sum of min(p, q), p being the softmax of its row of scores; without q, p of its token.
void overlaps(const float *scores, int64_t size, int64_t trials, const int64_t *rows, const float *const *qs,
              const int64_t *tokens, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && static_cast<double>(trials) * size > PARALLEL)
  for (int64_t t = 0; t < trials; t++) {
    static thread_local std::vector<float> room;
    if (static_cast<int64_t>(room.size()) < size) room.resize(size);
    const Softmax law(scores + rows[t] * size, size, room.data());
    const float *const q = qs[t];
    if (!q) {
      out[t] = law.powers[tokens[t]] * law.share;
      continue;
    }
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = first(size - i);
      sum = _mm512_add_ps(sum, _mm512_min_ps(law(i, mask), load(q + i, mask)));
    }
    out[t] = _mm512_reduce_add_ps(sum);
  }
}
}
