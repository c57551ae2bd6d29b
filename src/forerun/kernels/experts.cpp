// Mixture of experts. Each expert runs once, over all rows routed to it; a row's bits do not depend on their number. A
// row's outputs are added in the order of the experts' indices.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

// The rows routed to an expert, and their weights.
struct Taken {
  std::vector<int64_t> rows;
  std::vector<float> weights;
};

// NaN ranks above all numbers.
bool higher(float x, float y) {
  if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
  return x > y;
}

// The experts with the highest ranks; of equal ones those with the lower index.
void choose_experts(const std::vector<float> &ranks, int64_t k, std::vector<int64_t> &order) {
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t a, int64_t b) {
    return higher(ranks[a], ranks[b]) || (!higher(ranks[b], ranks[a]) && a < b);
  });
}

// Group-limited routing (DeepSeek-V3): experts outside of the best groups get the rank -inf.
void mask_groups(const Experts &e, std::vector<float> &ranks) {
  const int64_t each = e.size / e.groups;
  std::vector<float> sums(e.groups), highest(e.group_top_k);
  std::vector<int64_t> order(e.groups);
  for (int64_t group = 0; group < e.groups; group++) {
    const float *const own = &ranks[group * each];
    std::partial_sort_copy(own, own + each, highest.begin(), highest.end(), higher);
    for (float rank : highest) sums[group] += rank;
  }
  choose_experts(sums, e.top_groups, order);
  for (int64_t i = e.top_groups; i < e.groups; i++)
    std::fill_n(&ranks[order[i] * each], each, -std::numeric_limits<float>::infinity());
}

template <class T>
void route(const Experts &e, const T *scores, int64_t row, std::vector<int64_t> &order, std::vector<float> &ranks,
           std::vector<float> &weights, std::vector<Taken> &taken) {
  const Floats one = broadcast(1);
  for (int64_t i = 0; i < e.size; i += 16) {
    const First lanes = first(e.size - i);
    const Floats score = load(scores + i, lanes);
    const Floats weight = e.sigmoid ? one / (one + exponential(zeros() - score)) : score;
    store(&weights[i], weight);
    store(&ranks[i], e.score_bias ? weight + load(e.score_bias + i, lanes) : weight);
  }
  float sum = e.sigmoid ? 1.0f : 0.0f;
  if (!e.sigmoid) {
    const Floats top = broadcast(*std::max_element(weights.begin(), weights.begin() + e.size));
    for (int64_t i = 0; i < e.size; i += 16) store(&weights[i], exponential(load(&weights[i]) - top));
    for (int64_t i = 0; !e.normalize && i < e.size; i++) sum += weights[i];
  }
  if (e.groups > e.top_groups) {
    if (!e.sigmoid) ranks = weights;
    mask_groups(e, ranks);
  }
  choose_experts(ranks, e.top_k, order);
  if (e.normalize) {
    sum = 0;
    for (int64_t i = 0; i < e.top_k; i++) sum += weights[order[i]];
    if (e.sigmoid) sum += static_cast<float>(e.eps);
  }
  for (int64_t i = 0; i < e.top_k; i++) {
    const int64_t expert = order[i] - e.first;
    if (expert < 0 || expert >= e.num_local) continue;
    taken[expert].rows.push_back(row);
    const float weight = weights[order[i]] / sum * static_cast<float>(e.scaling_factor);
    taken[expert].weights.push_back(e.scales ? weight * e.scales[order[i]] : weight);
  }
}

}  // namespace

template <class T>
int64_t moe(const Experts &e, const T *x, const T *scored, float *total, int64_t rows, int threads) {
  const int64_t hidden = e.router.inputs;
  std::vector<T> scores(rows * e.size), in(rows * hidden), made(rows * hidden), up, activated;
  std::vector<float> ranks((e.size + 15) / 16 * 16), weights(ranks.size());
  std::vector<int64_t> order(e.size);
  std::vector<Taken> taken(e.num_local);
  project(e.router, scored, scores.data(), static_cast<const T *>(nullptr), rows, threads);
  for (int64_t row = 0; row < rows; row++) route(e, &scores[row * e.size], row, order, ranks, weights, taken);
  std::fill(total, total + rows * hidden, 0.0f);
  int64_t read = 0;
  for (int64_t expert = 0; expert < e.num_local; expert++) {
    const Linear &gate_up = e.layers[2 * expert], &down = e.layers[2 * expert + 1];
    const auto &[rows_here, fractions] = taken[expert];
    const int64_t count = rows_here.size();
    if (!count) continue;
    read++;
    for (int64_t i = 0; i < count; i++) std::memcpy(&in[i * hidden], x + rows_here[i] * hidden, hidden * sizeof(T));
    up.resize(count * 2 * down.inputs);
    activated.resize(count * down.inputs);
    project(gate_up, in.data(), up.data(), static_cast<const T *>(nullptr), count, threads);
    apply_activation(e.activation, e.activation_params, e.gated != 0, up.data(), activated.data(), count, down.inputs);
    project(down, activated.data(), made.data(), static_cast<const T *>(nullptr), count, threads);
    for (int64_t i = 0; i < count; i++) {
      float *const to = total + rows_here[i] * hidden;
      const Floats weight = broadcast(fractions[i]);
      for (int64_t at = 0; at < hidden; at += 16) {
        const First lanes = first(hidden - at);
        store(to + at, lanes, fma(load(&made[i * hidden + at], lanes), weight, load(to + at, lanes)));
      }
    }
  }
  return read;
}

#define INSTANTIATE(KIND, T) template int64_t moe(const Experts &, const T *, const T *, float *, int64_t, int);
FOR_EACH_TYPE(INSTANTIATE)
