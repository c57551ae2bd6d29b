// Gumbel-max sampling with keyed noise, acceptance of drafted tokens, and log probabilities.
//
// Rows are float32 [rows, size], contiguous; -inf is a banned token. Entry i of a key's noise depends on the key and i
// alone.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr double PARALLEL = 1e6;  // entries from which a second thread pays

struct Key {
  Ints odd, plus;
  explicit Key(uint64_t key)
      : odd(broadcast_int(static_cast<int32_t>(key | 1))), plus(broadcast_int(static_cast<int32_t>(key >> 32))) {}

  // A uniform number in (0, 1) for each of the hashed ``ids``.
  Floats uniform(Ints ids) const {
    const auto fold = [](Ints x) { return bit_xor(x, shift_right<16>(x)); };
    Ints x = fold(add(multiply(ids, odd), plus));
    x = fold(multiply(x, broadcast_int(0x7FEB352D)));
    const Floats u = abs(to_floats(x)) + broadcast(0.5f);
    return min(u * broadcast(4.656612873e-10f), broadcast(1 - 5.9604645e-8f));
  }

  // -ln(-ln(1 - u))
  static Floats noise(Floats u) {
    const Floats one = broadcast(1);
    const Floats w = one - u, lost = one - w - u;  // rounding error of w
    const Floats wait = zeros() - (logarithm(w) + lost / w);
    return zeros() - logarithm(wait);
  }

  // A cheap upper bound of the noise: -ln u, rounded up, from the exponent alone.
  static Floats bound(Floats u) {
    return fnma(exponent(u), broadcast(0.69314718f), broadcast(0.001f));
  }
};

// A running argmax.
struct Best {
  Floats floor = broadcast(-std::numeric_limits<float>::infinity());  // largest of all lanes
  Floats top = broadcast(-std::numeric_limits<float>::infinity());
  Ints index = lane_ids();
  Mask broken{};

  void update(Floats v, First mask, int64_t at) {
    const Ints lanes = lane_ids();
    const Mask more = mask & greater(v, top);
    broken |= mask & is_nan(v);
    top = select(more, v, top);
    index = select(more, add(lanes, broadcast_int(static_cast<int32_t>(at))), index);
  }

  // The same for v + noise. The noise is computed only where it may give a new maximum.
  void update(Floats v, First mask, int64_t at, const Key &key, const int32_t *ids) {
    const Floats u = key.uniform(load_ints(ids + at, mask));
    if (!bits(mask & not_less(v + Key::bound(u), floor))) return;
    update(v + Key::noise(u), mask, at);
    floor = broadcast(reduce_max(top));
  }

  // The first of equal maxima; NaN if there was one.
  void result(float *value, int64_t *id) const {
    *value = bits(broken) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(top);
    const Mask at = equal(top, broadcast(reduce_max(top)));
    *id = reduce_min(at, index);
  }
};

// Softmax of a row: ``powers`` e^(v - top), times ``inverse_sum``.
struct Softmax {
  float *const powers;
  float inverse_sum;

  Softmax(const float *row, int64_t size, float *powers) : powers(powers) {
    Floats most = broadcast(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      most = select(mask, max(most, load(row + i, mask)), most);
    }
    const Floats top = broadcast(reduce_max(most));
    Floats sum = zeros();
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      const Floats x = load(row + i, mask) - top;
      const Mask counts = mask & not_less(x, broadcast(-87));
      const Floats power = select(counts, exponential(x), zeros());
      store(powers + i, mask, power);
      sum = sum + power;
    }
    inverse_sum = 1 / reduce_sum(sum);
  }

  Floats operator()(int64_t at, First mask) const {
    return load(powers + at, mask) * broadcast(inverse_sum);
  }
};

// Inverse CDF: the first id whose cumulative weight exceeds ``quantile`` of the sum; never one of weight 0, unless all
// are. Sums over blocks are doubles, so that rounding can at most end the search at the last id of the right block.
int64_t invert(const float *weights, int64_t size, double quantile) {
  constexpr int64_t STEP = 128;
  static thread_local std::vector<double> reach;
  reach.clear();
  double total = 0;
  for (int64_t at = 0; at < size; at += STEP) {
    Doubles sum = zero_doubles();
    for (int64_t i = at; i < at + STEP && i < size; i += 16) {
      const Floats v = load(weights + i, first(size - i));
      sum = add_lanes(sum, v);
    }
    total += reduce_sum(sum);
    reach.push_back(total);
  }
  const double goal = total * (quantile < 1 - 0x1p-40 ? quantile : 1 - 0x1p-40);
  size_t block = 0;
  while (block < reach.size() && !(reach[block] > goal)) block++;
  if (block == reach.size()) return size - 1;  // all 0, or NaN
  double sum = block ? reach[block - 1] : 0;
  int64_t result = size - 1;
  for (int64_t i = block * STEP; i < (static_cast<int64_t>(block) + 1) * STEP && i < size; i++)
    if (weights[i] > 0) {
      result = i;
      sum += weights[i];
      if (sum > goal) break;
    }
  return result;
}

}  // namespace

// Samples an id from each row of weights.
void inverse_cdf(const float *weights, int64_t rows, int64_t size, const double *quantiles, int64_t *out) {
  for (int64_t r = 0; r < rows; r++) out[r] = invert(weights + r * size, size, quantiles[r]);
}

void gumbel(uint64_t key, const int32_t *ids, float *out, int64_t size) {
  const Key noise(key);
  for (int64_t i = 0; i < size; i += 16) {
    const First mask = first(size - i);
    store(out + i, mask, Key::noise(noise.uniform(load_ints(ids + i, mask))));
  }
}

// Per row, the maximum of scores + Gumbel noise (where ``noisy``) and its id; and the softmax of the scores.
void gumbel_max(const float *scores, int64_t rows, int64_t size, const int32_t *ids, const uint64_t *keys,
            const int64_t *noisy, float *tops, int64_t *ids_out, float *softmax, int threads) {
  if (static_cast<double>(rows) * size <= PARALLEL) threads = 1;
  const auto one = [=](int64_t r) {
    const float *row = scores + r * size;
    const Key noise(keys[r]);
    Best best;
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      const Floats v = load(row + i, mask);
      if (noisy[r])
        best.update(v, mask, i, noise, ids);
      else
        best.update(v, mask, i);
    }
    best.result(tops + r, ids_out + r);
    if (!softmax) return;
    const Softmax softmax_row(row, size, softmax + r * size);
    for (int64_t i = 0; i < size; i += 16) store(softmax_row.powers + i, first(size - i), softmax_row(i, first(size - i)));
  };
  parallel_for(rows, 1, threads, [&](int64_t begin, int64_t result) {
    for (int64_t r = begin; r < result; r++) one(r);
  });
}

// Acceptance of drafted chains (Leviathan et al. 2023). A trial is a drafted token with its p (a row of ``scores``) and
// q (null: a point mass). Its factor is 1, or the weight of the trial before if it ``follows`` that.
//
// weights: min(1, factor * p / (lenience * q)) of the token. residual: per row, p (greedy: a point mass at the argmax);
// in a trial's row max(0, factor * p - q), unless it is all 0. left: the residual's sum. shared: sum of min(p, q).
void acceptance(const float *scores, int64_t rows, int64_t size, const int64_t *greedy, int64_t trials, const int64_t *at,
           const int64_t *tokens, const float *const *qs, const int64_t *follows, float lenience, float *residual,
           float *tops, float *weights, float *left, float *shared) {
  static thread_local std::vector<float> workspace;
  if (static_cast<int64_t>(workspace.size()) < size) workspace.resize(size);
  for (int64_t r = 0; r < rows; r++) {
    float *const out = residual + r * size;
    const Softmax softmax_row(scores + r * size, size, out);
    Best best;
    int64_t place;
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      best.update(load(scores + r * size + i, mask), mask, i);
      store(out + i, mask, greedy[r] ? zeros() : softmax_row(i, mask));
    }
    best.result(tops + r, &place);
    if (greedy[r]) out[place] = 1;
  }
  for (int64_t t = 0; t < trials; t++) {
    float *const row = residual + at[t] * size;
    const float *const q = qs[t];
    const float factor = follows[t] ? weights[t - 1] : 1, kept = row[tokens[t]];
    const float weight = factor * kept / (lenience * (q ? q[tokens[t]] : 1));
    weights[t] = weight > 1 ? 1 : weight;
    const Floats times = broadcast(factor), none = zeros();
    Floats sum = none, common = none;
    if (!q) row[tokens[t]] = 0;
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      const Floats a = load(row + i, mask), b = q ? load(q + i, mask) : none;
      const Floats more = max(fms(times, a, b), none);
      store(workspace.data() + i, mask, more);
      sum = sum + more;
      common = common + min(a, b);
    }
    left[t] = reduce_sum(sum);
    shared[t] = q ? reduce_sum(common) : kept;
    if (!q) row[tokens[t]] = kept;
    if (left[t] > 0) std::memcpy(row, workspace.data(), size * sizeof(float));
  }
}

// The ``count`` best ids of rows ``at`` and their log probabilities, best first, into rows ``into`` of ``ids`` and
// ``logs``. Rows end with -1 and -inf if fewer ids are permitted.
void top_logprobs(const float *scores, int64_t size, int64_t trials, const int64_t *at, int64_t count, const int64_t *into,
          int32_t *ids, float *logs) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < trials; t++) {
    const float *row = scores + at[t] * size;
    int32_t *const id = ids + into[t] * count;
    float *const value = logs + into[t] * count;
    std::fill(id, id + count, -1);
    std::fill(value, value + count, NONE);
    // The sum of e^(v - base). A new maximum is rare; then the sum is rescaled.
    Floats sum = zeros(), base = broadcast(NONE), floor = base;
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      const Floats v = select(mask, load(row + i, mask), broadcast(NONE));
      uint32_t better = bits(greater(v, floor));
      while (better) {
        const int lane = __builtin_ctz(better);
        const float result = row[i + lane];
        better &= better - 1;
        if (!(result > value[count - 1])) continue;
        int64_t place = count - 1;
        for (; place > 0 && result > value[place - 1]; place--) value[place] = value[place - 1], id[place] = id[place - 1];
        value[place] = result;
        id[place] = static_cast<int32_t>(i + lane);
        floor = broadcast(value[count - 1]);
        if (place) continue;
        const Floats top = broadcast(result);
        sum = sum * exponential(base - top);
        base = top;
      }
      const Floats x = v - base;
      const Mask counts = not_equal(v, broadcast(NONE)) & not_less(x, broadcast(-87));
      sum = sum + select(counts, exponential(x), zeros());
    }
    const float all = value[0] + std::log(reduce_sum(sum));
    for (int64_t k = 0; k < count; k++) value[k] = id[k] < 0 ? NONE : value[k] - all;
  }
}

// Per trial, the sum of min(p, q), p = softmax of its row of scores; without q, p of its token.
void overlaps(const float *scores, int64_t size, int64_t trials, const int64_t *rows, const float *const *qs,
              const int64_t *tokens, float *out, int threads) {
  if (static_cast<double>(trials) * size <= PARALLEL) threads = 1;
  const auto one = [=](int64_t t) {
    static thread_local std::vector<float> workspace;
    if (static_cast<int64_t>(workspace.size()) < size) workspace.resize(size);
    const Softmax softmax_row(scores + rows[t] * size, size, workspace.data());
    const float *const q = qs[t];
    if (!q) {
      out[t] = softmax_row.powers[tokens[t]] * softmax_row.inverse_sum;
      return;
    }
    Floats sum = zeros();
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      sum = sum + min(softmax_row(i, mask), load(q + i, mask));
    }
    out[t] = reduce_sum(sum);
  };
  parallel_for(trials, 1, threads, [&](int64_t begin, int64_t result) {
    for (int64_t t = begin; t < result; t++) one(t);
  });
}
