// Temperature, min-p, top-k, top-p and penalties. Each row is independent.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr double PARALLEL = 1e5;  // entries from which a second thread pays
constexpr int BINS = 512, WAYS = 4;
constexpr float PER_NAT = 32;
constexpr float INF = std::numeric_limits<float>::infinity();

// Finds the largest entries of a row by a histogram of their distance to the maximum.
class Largest {
 public:
  Largest(const float *row, int64_t size) : row(row), size(size) {
    Floats most = broadcast(-INF);
    for (int64_t i = 0; i < size; i += 16)
      most = select(first(size - i), max(load(row + i, first(size - i)), most), most);  // skips NaN
    top = reduce_max(most);
  }

  // The ``count``-th largest entry.
  float top_k_threshold(int64_t count) {
    weights.assign(size, 1);
    return find(count, -INF);
  }

  // The smallest entry of the nucleus: entries that are at least ``floor`` and add up to ``top_p`` of their
  // probability.
  float top_p_threshold(float top_p, float floor) {
    if (static_cast<int64_t>(weights.size()) < size) weights.resize(size);
    Doubles sum = zero_doubles();
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      const Floats v = load(row + i, mask), x = v - broadcast(top);
      const Mask counts = mask & at_least(v, broadcast(floor)) & at_least(x, broadcast(-87));
      const Floats weight = select(counts, exponential(x), zeros());
      store(weights.data() + i, mask, weight);
      sum = add_lanes(sum, weight);
    }
    return find(top_p * reduce_sum(sum), floor);
  }

  float top;

 private:
  // The entry at which the weights of entries that are at least ``floor``, largest first, reach ``goal``; or the last
  // one.
  float find(double goal, float floor) {
    for (float depth : {2.0f, 6.0f, 18.0f, INF})
      if (gather(std::max(floor, top - depth)) >= goal) break;
    const int32_t *const at = bins.data();
    const float *const value = values.data(), *const weight = probabilities.data();
    for (auto &way : sums) std::fill(way, way + BINS, 0.0);
    for (int64_t i = 0; i < near; i++) sums[i % WAYS][at[i]] += weight[i];  // shorter chains
    double before = 0;
    int reaching = 0;
    for (; reaching < BINS - 1; reaching++) {
      double sum = 0;
      for (const auto &way : sums) sum += way[reaching];
      if (before + sum >= goal) break;
      before += sum;
    }
    inside.clear();
    for (int64_t i = 0; i < near; i++)
      if (at[i] == reaching) inside.push_back({value[i], weight[i]});
    std::sort(inside.begin(), inside.end(), [](const Entry &a, const Entry &b) { return a.value > b.value; });
    float result = -INF;
    for (const Entry &entry : inside) {
      result = entry.value;
      before += entry.weight;
      if (before >= goal) break;
    }
    return result;
  }

  // Collects the entries that are at least ``least``. Returns the sum of their weights.
  double gather(float least) {
    if (static_cast<int64_t>(values.size()) < size + 16)
      values.resize(size + 16), probabilities.resize(size + 16), bins.resize(size + 16);
    near = 0;
    Doubles sum = zero_doubles();
    for (int64_t i = 0; i < size; i += 16) {
      const First mask = first(size - i);
      const Floats v = load(row + i, mask);
      const Mask in = mask & at_least(v, broadcast(least));
      if (!bits(in)) continue;
      const Floats weight = compress(in, load(weights.data() + i, mask));
      const Floats value = compress(in, v), below = broadcast(top) - value;
      const Floats bin = min(below * broadcast(PER_NAT), broadcast(BINS - 1));
      store(values.data() + near, value);
      store(bins.data() + near, truncate(bin));
      store(probabilities.data() + near, weight);
      near += __builtin_popcount(bits(in));
      sum = add_lanes(sum, weight);
    }
    return reduce_sum(sum);
  }

  struct Entry {
    float value, weight;
  };

  const float *const row;
  const int64_t size;
  int64_t near = 0;  // entries in values, probabilities and bins
  inline static thread_local std::vector<float> weights, values, probabilities;
  inline static thread_local std::vector<int32_t> bins;
  inline static thread_local std::vector<Entry> inside;
  double sums[WAYS][BINS];
};

}  // namespace

// Temperature, then min-p, top-k and top-p; 0, 0 and 1 are off. Ties with the last entry that stays, stay.
void filter_row(float *row, int64_t size, float temperature, float min_p, int64_t top_k, float top_p) {
  const Floats temperatures = broadcast(temperature), banned = broadcast(-INF);
  for (int64_t i = 0; temperature != 1 && i < size; i += 16)
    store(row + i, first(size - i), load(row + i, first(size - i)) / temperatures);
  const bool counts = top_k > 0 && top_k < size;
  if (!(min_p > 0) && !counts && !(top_p < 1)) return;
  Largest largest(row, size);
  if (!(largest.top > -INF)) return;  // all banned
  float floor = min_p > 0 ? largest.top + std::log(min_p) : -INF;
  if (counts) floor = std::max(floor, largest.top_k_threshold(top_k));
  if (top_p < 1) floor = std::max(floor, largest.top_p_threshold(top_p, floor));
  for (int64_t i = 0; i < size; i += 16) {
    const First mask = first(size - i);
    const Floats v = load(row + i, mask);
    const Mask low = less(v, broadcast(floor));
    store(row + i, mask, select(low, banned, v));
  }
}

// The same for rows whose temperature is not 0; ``thresholds`` alternates min-p and top-p.
void filter_rows(float *rows, int64_t count, int64_t size, const float *temperatures, const float *thresholds,
                   const int64_t *top_ks, int threads) {
  if (static_cast<double>(count) * size <= PARALLEL) threads = 1;
  parallel_for(count, 1, threads, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      if (temperatures[r] != 0)
        filter_row(rows + r * size, size, temperatures[r], thresholds[2 * r], top_ks[r], thresholds[2 * r + 1]);
  });
}

// Repetition penalty for all tokens of ``text``; frequency and presence penalties for those from ``output`` on.
void apply_penalties(float *row, int64_t size, const int64_t *text, int64_t length, int64_t output, float repetition,
              float frequency, float presence) {
  static thread_local std::vector<int32_t> seen;  // 1 + count in the output; all 0 between calls
  if (static_cast<int64_t>(seen.size()) < size) seen.resize(size);
  for (int64_t i = 0; i < length; i++)
    if (text[i] < size) seen[text[i]] = i < output ? 1 : std::max(seen[text[i]], 1) + 1;
  for (int64_t i = 0; i < length; i++) {
    if (text[i] >= size || !seen[text[i]]) continue;
    const float count = seen[text[i]] - 1;
    float &v = row[text[i]];
    if (repetition != 1) v = v > 0 ? v / repetition : v * repetition;
    v -= frequency * count;
    if (count > 0) v -= presence;
    seen[text[i]] = 0;
  }
}
