// Attention of ragged rows over paged keys and values, and rotary positions.
//
// A row's keys are a list: the entries of its sequence from the first on, and for a node of a tree, behind the
// committed entries, its own path. They are taken in that order, a block at a time, whatever lies beside the row, so a
// row of a tree gets the bits of the same row decoded alone.
#include "blocks.h"

#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr int64_t TILE = 16;      // rows that share the keys brought in
constexpr double PARALLEL = 2e5;  // products worth a second thread

inline __m512 capped(__m512 scores, float softcap) {  // softcap * tanh(scores / softcap)
  const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2), cap = _mm512_set1_ps(softcap);
  const __m512 power = exponential(_mm512_mul_ps(two, _mm512_div_ps(scores, cap)));
  return _mm512_mul_ps(cap, _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(power, one))));
}

// Weights of values, as Block takes them.
inline void keep_weights(float *to, __m512 weights) { _mm512_storeu_ps(to, weights); }
#if defined(__AVX512BF16__)
inline void keep_weights(uint16_t *to, __m512 weights) {
  const __m256i high = (__m256i)_mm512_cvtneps_pbh(weights);
  const __m512 kept = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), high);
  const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(weights, kept));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + LANES), low);
}
#endif

// A query's running softmax: its largest score and, by lanes, the sum of e^(score - largest); with it goes that sum
// weighted by values.
struct State {
  __m512 total = _mm512_setzero_ps();
  float top = -std::numeric_limits<float>::infinity();

  // From scores to weights of the values; returns by how much the sums so far shrink.
  template <class T>
  float weigh(__m512 scores, __mmask16 mask, float scale, float softcap, T *weights) {
    scores = _mm512_mul_ps(scores, _mm512_set1_ps(scale));
    if (softcap > 0) scores = capped(scores, softcap);
    float shrink = 1;
    if (_mm512_mask_cmp_ps_mask(mask, scores, _mm512_set1_ps(top), _CMP_NLE_UQ)) {
      const float most = std::fmax(top, _mm512_mask_reduce_max_ps(mask, scores));
      shrink = _mm512_cvtss_f32(exponential(_mm512_set1_ps(top - most)));
      total = _mm512_mul_ps(total, _mm512_set1_ps(shrink));
      top = most;
    }
    const __m512 found = _mm512_maskz_mov_ps(mask, exponential(_mm512_sub_ps(scores, _mm512_set1_ps(top))));
    total = _mm512_add_ps(total, found);
    keep_weights(weights, found);
    return shrink;
  }
};

// A query of a tile and the keys [begin, end) of a block that it takes.
struct Task {
  int64_t query, begin, end;
};

// The queries of a tile, their sums and states. A block is taken in three turns over all queries, because the steps of
// one query's softmax wait for each other.
template <class T, int CHUNKS>
struct Queries {
  static constexpr int64_t WIDTH = LANES * CHUNKS;
  std::vector<const T *> queries;
  std::vector<float> sums, scores, shrink;
  std::vector<T> weights;
  std::vector<State> states;
  std::vector<Task> tasks;

  void clear(int64_t count) {
    queries.resize(count);
    sums.assign(WIDTH * count, 0);
    scores.resize(LANES * count);
    weights.resize(2 * LANES * count);
    shrink.resize(count);
    states.assign(count, State());
    tasks.clear();
  }

  // f(first, count): tasks of neighbouring queries with the same keys, so many at a time as a block takes.
  template <int COUNT = Block<T>::together(CHUNKS), class F>
  void runs(F f) const {
    for (size_t i = 0, count; i < tasks.size(); i += count) {
      const auto like = [&](const Task &task, int64_t after) {
        return task.query == tasks[i].query + after && task.begin == tasks[i].begin && task.end == tasks[i].end;
      };
      for (count = 1; count < COUNT && i + count < tasks.size() && like(tasks[i + count], count);) count++;
      some<COUNT>(f, tasks[i], count);
    }
  }

  template <int COUNT, class F>
  static void some(F f, const Task &first, size_t count) {
    if (count == COUNT) return f(first, std::integral_constant<int, COUNT>());
    if constexpr (COUNT > 1) some<COUNT - 1>(f, first, count);
  }

  void take(const Block<T> &block, float scale, float softcap) {
    runs([&](const Task &task, auto count) {
      const int64_t at = task.query;
      block.template score<CHUNKS, count>(queries.data() + at, scores.data() + LANES * at, task.begin, task.end);
    });
    for (const Task &task : tasks) {
      const __mmask16 mask = first(task.end) & static_cast<__mmask16>(~first(task.begin));
      const int64_t at = LANES * task.query;
      shrink[task.query] =
          states[task.query].weigh(_mm512_loadu_ps(scores.data() + at), mask, scale, softcap, weights.data() + 2 * at);
    }
    runs([&](const Task &task, auto count) {
      const int64_t at = task.query;
      block.template gather<CHUNKS, count>(sums.data() + WIDTH * at, shrink.data() + at,
                                           weights.data() + 2 * LANES * at, task.begin, task.end);
    });
    tasks.clear();
  }
};

template <class T>
struct Call {
  Plan plan;
  const T *q;
  T *out;
  int64_t q_stride, heads, kv_heads, window;
  float scale, softcap;
  Side<T> keys, values;

  // Rows [from, to) of a span, all query heads of one key head.
  template <int CHUNKS>
  void tile(const Span &span, int64_t from, int64_t to, int64_t head) const {
    const int64_t groups = heads / kv_heads;
    constexpr int64_t WIDTH = LANES * CHUNKS;
    static thread_local Queries<T, CHUNKS> queries;
    static thread_local Block<T> block;
    queries.clear((to - from) * groups);
    int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
    for (int64_t row = from; row < to; row++) {
      const int64_t seen = plan.seen(span, row), begin = window > 0 && seen > window ? seen - window : 0;
      low = begin < low ? begin : low;
      high = seen > high ? seen : high;
      for (int64_t group = 0; group < groups; group++)
        queries.queries[(row - from) * groups + group] =
            q + (span.first + row) * q_stride + (head * groups + group) * WIDTH;
    }
    for (int64_t at = low / BLOCK * BLOCK; at < high; at += BLOCK) {
      const bool shared = span.paths < 0 || at + BLOCK <= span.base;
      const auto bring = [&](int64_t row, int64_t begin, int64_t end) {
        block.bring(Places<T>(plan, span, row, begin, end, keys, values, head), WIDTH);
      };
      if (shared) bring(from, at, at + BLOCK < high ? at + BLOCK : high);
      for (int64_t row = from; row < to; row++) {
        const int64_t seen = plan.seen(span, row), least = window > 0 && seen > window ? seen - window : 0;
        const int64_t begin = least > at ? least : at, end = seen < at + BLOCK ? seen : at + BLOCK;
        if (begin >= end) continue;
        for (int64_t group = 0; group < groups; group++)
          queries.tasks.push_back({(row - from) * groups + group, begin - at, end - at});
        if (shared) continue;
        bring(row, begin, end);
        queries.take(block, scale, softcap);
      }
      queries.take(block, scale, softcap);
    }
    for (int64_t index = 0; index < (to - from) * groups; index++) {
      const int64_t row = span.first + from + index / groups, query_head = head * groups + index % groups;
      const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(queries.states[index].total));
      T *to_row = out + (row * heads + query_head) * WIDTH;
      for (int64_t i = 0; i < WIDTH; i += LANES)
        store(to_row + i, 0xffff, _mm512_mul_ps(_mm512_loadu_ps(queries.sums.data() + WIDTH * index + i), share));
    }
  }

  void pick(const Span &span, int64_t from, int64_t to, int64_t head) const {
    switch (keys.width) {
#define CASE(WIDTH) \
  case WIDTH: return tile<WIDTH / LANES>(span, from, to, head);
      CASE(16) CASE(32) CASE(64) CASE(80) CASE(96) CASE(112) CASE(128) CASE(256)
#undef CASE
    }
  }

  void keep(const T *k, const T *v, int64_t k_stride, int64_t v_stride) const {
    for (int64_t s = 0; s < plan.count; s++) {
      const Span &span = plan.spans[s];
      for (int64_t row = 0; row < span.count; row++) {
        const int64_t entry = span.before + row, page = plan.tables[span.table + entry / plan.page_size];
        for (int64_t head = 0; head < kv_heads; head++) {
          const T *from_k = k + (span.first + row) * k_stride + head * keys.width;
          const T *from_v = v + (span.first + row) * v_stride + head * values.width;
          T *to_k = keys.at(page, head, entry % plan.page_size), *to_v = values.at(page, head, entry % plan.page_size);
          for (int64_t i = 0; i < keys.width; i++) to_k[i] = from_k[i];
          for (int64_t i = 0; i < values.width; i++) to_v[i] = from_v[i];
        }
      }
    }
  }

  void run(int threads) const {
    std::vector<std::pair<int64_t, int64_t>> tiles;
    double products = 0;
    for (int64_t s = 0; s < plan.count; s++)
      for (int64_t row = 0; row < plan.spans[s].count; row += TILE) {
        tiles.emplace_back(s, row);
        const int64_t rows = plan.spans[s].count - row < TILE ? plan.spans[s].count - row : TILE;
        products += static_cast<double>(rows * heads * keys.width) * plan.seen(plan.spans[s], row);
      }
    const int64_t items = static_cast<int64_t>(tiles.size()) * kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && products > PARALLEL)
    for (int64_t item = 0; item < items; item++) {
      const auto [s, row] = tiles[item / kv_heads];
      const Span &span = plan.spans[s];
      pick(span, row, row + TILE < span.count ? row + TILE : span.count, item % kv_heads);
    }
  }
};

template <class T>
void turn(T *x, int64_t stride, const float *angles, int64_t rows, int64_t heads, int64_t width) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t i = 0; i < width; i += LANES) {
        T *at = x + row * stride + head * width + i;
        const __mmask16 mask = first(width - i);
        const __m512 v = load(at, mask), angle = load(angles + row * width + i, mask);
        const __m512 swapped = _mm512_mul_ps(_mm512_permute_ps(v, 0xb1), _mm512_movehdup_ps(angle));
        store(at, mask, _mm512_fmaddsub_ps(v, _mm512_moveldup_ps(angle), swapped));
      }
}

}  // namespace

extern "C" {

// sizes: heads, kv_heads, width, value_width, page_size, window (0: none), strides of q, k and v rows, then page, head
// and slot strides of keys and of values.
#define ATTENTION(KIND, T)                                                                                          \
  void attend_##KIND(const T *q, const T *k, const T *v, T *out, T *keys, T *values, const int64_t *sizes,           \
                     const int64_t *spans, int64_t count, const int64_t *tables, const int64_t *paths,               \
                     const int64_t *entries, float scale, float softcap, int threads) {                              \
    const Plan plan{reinterpret_cast<const Span *>(spans), count, tables, paths, entries, sizes[4]};                 \
    const Side<T> key_side{keys, sizes[9], sizes[10], sizes[11], sizes[2]};                                          \
    const Side<T> value_side{values, sizes[12], sizes[13], sizes[14], sizes[3]};                                     \
    const Call<T> call{plan, q, out, sizes[6], sizes[0], sizes[1], sizes[5], scale, softcap, key_side, value_side};  \
    call.keep(k, v, sizes[7], sizes[8]);                                                                             \
    call.run(threads);                                                                                               \
  }
#define TURN(KIND, T)                                                                                               \
  void turn_##KIND(T *x, int64_t stride, const float *angles, int64_t rows, int64_t heads, int64_t width) {          \
    turn<T>(x, stride, angles, rows, heads, width);                                                                  \
  }

ATTENTION(float32, float)
TURN(float32, float)
TURN(bfloat16, uint16_t)
#if defined(__AVX512BF16__)
ATTENTION(bfloat16, uint16_t)
#endif
}
