// Mixtures of experts. An expert takes the rows that chose it in one call, and their bits do not depend on how many those
// are; a row's results are added up in the order of the experts' numbers.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

// Which rows go to an expert, and with which weights.
struct Taken {
  std::vector<int64_t> rows;
  std::vector<float> weights;
};

// The experts of a row with the highest scores, of equal ones those with lower numbers; a NaN is higher than any number.
template <class T>
void route(const Experts &e, const T *scores, int64_t row, std::vector<int64_t> &order, std::vector<float> &probabilities,
           std::vector<Taken> &taken) {
  for (int64_t i = 0; i < e.size; i += 16) store(&probabilities[i], load(scores + i, first(e.size - i)));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + e.chosen, order.end(), [&](int64_t a, int64_t b) {
    const float x = probabilities[a], y = probabilities[b];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
    return x > y || (!(x < y) && a < b);
  });
  const Floats top = broadcast(probabilities[order[0]]);
  for (int64_t i = 0; i < e.size; i += 16) store(&probabilities[i], exponential(load(&probabilities[i]) - top));
  float sum = 0;
  if (e.normalised)
    for (int64_t i = 0; i < e.chosen; i++) sum += probabilities[order[i]];
  else
    for (int64_t i = 0; i < e.size; i++) sum += probabilities[i];
  for (int64_t i = 0; i < e.chosen; i++) {
    const int64_t expert = order[i] - e.first;
    if (expert < 0 || expert >= e.here) continue;
    taken[expert].rows.push_back(row);
    taken[expert].weights.push_back(probabilities[order[i]] / sum);
  }
}

}  // namespace

template <class T>
void mix(const Experts &e, const T *x, float *total, int64_t rows, int threads) {
  const int64_t hidden = e.router.inputs;
  std::vector<T> scores(rows * e.size), in(rows * hidden), made(rows * hidden), wide, inner;
  std::vector<float> probabilities((e.size + 15) / 16 * 16);
  std::vector<int64_t> order(e.size);
  std::vector<Taken> taken(e.here);
  project(e.router, x, scores.data(), static_cast<const T *>(nullptr), rows, threads);
  for (int64_t row = 0; row < rows; row++) route(e, &scores[row * e.size], row, order, probabilities, taken);
  std::fill(total, total + rows * hidden, 0.0f);
  for (int64_t expert = 0; expert < e.here; expert++) {
    const Linear &gate_up = e.layers[2 * expert], &down = e.layers[2 * expert + 1];
    const auto &[which, weights] = taken[expert];
    const int64_t count = which.size();
    if (!count) continue;
    for (int64_t i = 0; i < count; i++) std::memcpy(&in[i * hidden], x + which[i] * hidden, hidden * sizeof(T));
    wide.resize(count * 2 * down.inputs);
    inner.resize(count * down.inputs);
    project(gate_up, in.data(), wide.data(), static_cast<const T *>(nullptr), count, threads);
    gate(e.activation, e.numbers, true, wide.data(), inner.data(), count, down.inputs);
    project(down, inner.data(), made.data(), static_cast<const T *>(nullptr), count, threads);
    for (int64_t i = 0; i < count; i++) {
      float *const to = total + which[i] * hidden;
      const Floats weight = broadcast(weights[i]);
      for (int64_t at = 0; at < hidden; at += 16) {
        const First lanes = first(hidden - at);
        store(to + at, lanes, fma(load(&made[i * hidden + at], lanes), weight, load(to + at, lanes)));
      }
    }
  }
}

#define INSTANTIATE(KIND, T) template void mix(const Experts &, const T *, float *, int64_t, int);
FOR_EACH_TYPE(INSTANTIATE)
