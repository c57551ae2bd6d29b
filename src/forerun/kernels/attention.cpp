// Attention of ragged rows over paged keys and values, and rotary positions.
//
// A row's keys are a list: the entries of its sequence from the first on, and for a node of a tree, behind the
// committed entries, its own path. They are taken in that order, a block at a time, whatever lies beside the row, so a
// row of a tree gets the bits of the same row decoded alone.
#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t TILE = 16;      // rows that share the keys brought in
constexpr double PARALLEL = 2e5;  // products worth a second thread

inline __m512 capped(__m512 scores, float softcap) {  // softcap * tanh(scores / softcap)
  const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2), cap = _mm512_set1_ps(softcap);
  const __m512 power = exponential(_mm512_mul_ps(two, _mm512_div_ps(scores, cap)));
  return _mm512_mul_ps(cap, _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(power, one))));
}

// A query's running softmax: its largest score and, by lanes, the sum of e^(score - largest); with it goes that sum
// weighted by values.
struct State {
  __m512 total = _mm512_setzero_ps();
  float top = -std::numeric_limits<float>::infinity();

  // From the scores of lanes [begin, end) to weights of the values; returns by how much the sums so far shrink.
  float weigh(float *scores, int64_t begin, int64_t end, float scale, float softcap) {
    const int64_t low = begin / LANES * LANES;
    const auto used = [&](int64_t lane) -> __mmask16 {
      if (lane >= begin && lane + LANES <= end) return 0xffff;
      return first(end - lane) & ~first(begin > lane ? begin - lane : 0);
    };
    __m512 most = _mm512_set1_ps(top);
    for (int64_t lane = low; lane < end; lane += LANES) {
      __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + lane), _mm512_set1_ps(scale));
      if (softcap > 0) scaled = capped(scaled, softcap);
      _mm512_storeu_ps(scores + lane, scaled);
      most = _mm512_mask_max_ps(most, used(lane), scaled, most);  // of a NaN and another number the latter
    }
    float shrink = 1;
    __m512 sum = total;
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(top), _CMP_GT_OQ)) {
      const float before = top;
      top = _mm512_reduce_max_ps(most);
      shrink = _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - top)));
      sum = _mm512_mul_ps(sum, _mm512_set1_ps(shrink));
    }
    const __m512 largest = _mm512_set1_ps(top);
    for (int64_t lane = low; lane < end; lane += LANES) {
      const __m512 found = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + lane), largest));
      sum = _mm512_mask_add_ps(sum, used(lane), sum, found);
      _mm512_storeu_ps(scores + lane, found);
    }
    total = sum;
    return shrink;
  }
};

// A query of a tile and the keys [begin, end) of a block that it takes.
struct Task {
  int64_t query, begin, end;
};

// The queries of a tile, their sums and states. A block is taken in three turns over all queries, because the steps of
// one query's softmax wait for each other.
template <class T, int WIDTH>
struct Queries {
  static constexpr int64_t ROOM = (WIDTH + Numbers<T>::SIZE - 1) / Numbers<T>::SIZE * Numbers<T>::SIZE;
  std::vector<const T *> queries;
  std::vector<float> sums, scores, shrink;
  std::vector<State> states;
  std::vector<Task> tasks;

  void clear(int64_t count) {
    queries.resize(count);
    sums.assign(ROOM * count, 0);
    scores.resize(BLOCK * count);
    shrink.resize(count);
    states.assign(count, State());
    tasks.clear();
  }

  // f(tasks, count): tasks of neighbouring queries whose keys begin alike, at most COUNT at a time. Their keys end alike
  // or later from row to row.
  template <int COUNT, class F>
  void runs(F f) const {
    for (size_t i = 0, count; i < tasks.size(); i += count) {
      const auto like = [&](const Task &task, int64_t after) {
        return task.query == tasks[i].query + after && task.begin == tasks[i].begin;
      };
      for (count = 1; count < COUNT && i + count < tasks.size() && like(tasks[i + count], count);) count++;
      some<COUNT>(f, &tasks[i], count);
    }
  }

  template <int COUNT, class F>
  static void some(F f, const Task *first, size_t count) {
    if (count == COUNT) return f(first, std::integral_constant<int, COUNT>());
    if constexpr (COUNT > 1) some<COUNT - 1>(f, first, count);
  }

  // Asks for the keys of ``next``, if there is one, meanwhile.
  void take(const Block<T> &block, float scale, float softcap, const Block<T> *next) {
    bool fresh = true;
    runs<Block<T>::together(ROOM / Numbers<T>::SIZE)>([&](const Task *task, auto count) {
      const int64_t at = task->query, most = task[count - 1].end;
      block.template score<WIDTH, count>(queries.data() + at, scores.data() + BLOCK * at, task->begin, most, fresh);
      fresh = false;
    });
    for (const Task &task : tasks)
      shrink[task.query] =
          states[task.query].weigh(scores.data() + BLOCK * task.query, task.begin, task.end, scale, softcap);
    runs<4>([&](const Task *task, auto count) {
      const int64_t at = task->query, least = task->end;
      const float *const weights = scores.data() + BLOCK * at;
      block.template gather<WIDTH, count>(sums.data() + ROOM * at, shrink.data() + at, weights, task->begin, least,
                                          next);
      next = nullptr;
      const float all = 1;
      for (int64_t q = 0; q < count; q++)
        if (task[q].end > least)
          block.template gather<WIDTH, 1>(sums.data() + ROOM * (at + q), &all, weights + BLOCK * q, least, task[q].end,
                                          nullptr);
    });
    tasks.clear();
  }
};

// Rows [from, to) of a span, all query heads of one key head.
struct Item {
  const Span &span;
  int64_t from, to, head, low, high;  // some row sees keys from low on, and none from high on

  bool shares(int64_t at) const { return span.paths < 0 || at + BLOCK <= span.base; }
};

// The block at hand, the one after it, whose keys are asked for meanwhile, and one that a row of a tree has alone.
template <class T>
struct Ahead {
  Block<T> blocks[2], own;
  const Block<T> *next = nullptr;
  int last = 0;

  template <class... A>
  const Block<T> *find(const A &...of) {
    last = 1 - last;
    blocks[last].find(of...);
    return &blocks[last];
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

  Item item(const Span &span, int64_t from, int64_t head) const {
    Item found{span, from, std::min(from + TILE, span.count), head, std::numeric_limits<int64_t>::max(), 0};
    for (int64_t row = from; row < found.to; row++) {
      found.low = std::min(found.low, first_seen(span, row));
      found.high = std::max(found.high, plan.seen(span, row));
    }
    return found;
  }

  int64_t first_seen(const Span &span, int64_t row) const {
    const int64_t seen = plan.seen(span, row);
    return window > 0 && seen > window ? seen - window : 0;
  }

  // ``after``: what comes next, or null; its first keys are asked for.
  template <int WIDTH>
  void tile(const Item &item, const Item *after, Ahead<T> &ahead) const {
    const auto &[span, from, to, head, low, high] = item;
    const int64_t groups = heads / kv_heads;
    static thread_local Queries<T, WIDTH> kept;
    Queries<T, WIDTH> &queries = kept;
    queries.clear((to - from) * groups);
    for (int64_t row = from; row < to; row++)
      for (int64_t group = 0; group < groups; group++)
        queries.queries[(row - from) * groups + group] =
            q + (span.first + row) * q_stride + (head * groups + group) * WIDTH;
    const auto find = [&](const Item &of, int64_t at) {
      return ahead.find(plan, of.span, of.from, at, std::min(at + BLOCK, of.high), keys, values, of.head);
    };
    for (int64_t at = low / BLOCK * BLOCK; at < high; at += BLOCK) {
      const bool shared = item.shares(at);
      const Block<T> *block = ahead.next, *next = nullptr;
      if (shared && !block) block = find(item, at);
      if (at + BLOCK < high) {
        if (item.shares(at + BLOCK)) next = find(item, at + BLOCK);
      } else if (after && after->shares(after->low / BLOCK * BLOCK)) {
        next = find(*after, after->low / BLOCK * BLOCK);
      }
      for (int64_t row = from; row < to; row++) {
        const int64_t begin = std::max(first_seen(span, row), at), end = std::min(plan.seen(span, row), at + BLOCK);
        if (begin >= end) continue;
        for (int64_t group = 0; group < groups; group++)
          queries.tasks.push_back({(row - from) * groups + group, begin - at, end - at});
        if (shared) continue;
        ahead.own.find(plan, span, row, begin, end, keys, values, head);
        queries.take(ahead.own, scale, softcap, nullptr);
      }
      if (shared) queries.take(*block, scale, softcap, next);
      ahead.next = next;
    }
    for (int64_t index = 0; index < (to - from) * groups; index++) {
      const int64_t row = span.first + from + index / groups, query_head = head * groups + index % groups;
      const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(queries.states[index].total));
      T *to_row = out + (row * heads + query_head) * WIDTH;
      for (int64_t i = 0; i < WIDTH; i += Numbers<T>::SIZE) {
        __m512 parts[Numbers<T>::PARTS];
        for (int p = 0; p < Numbers<T>::PARTS; p++)
          parts[p] = _mm512_mul_ps(_mm512_loadu_ps(queries.sums.data() + queries.ROOM * index + i + LANES * p), share);
        Numbers<T>::put(to_row + i, parts, WIDTH - i);
      }
    }
  }

  void pick(const Item &item, const Item *after, Ahead<T> &ahead) const {
    switch (keys.width) {
#define CASE(WIDTH) \
  case WIDTH: return tile<WIDTH>(item, after, ahead);
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

  static Ahead<T> &ahead() {
    static thread_local Ahead<T> own;
    return own;
  }

  void run(int threads) const {
    std::vector<Item> items;
    double products = 0;
    for (int64_t s = 0; s < plan.count; s++)
      for (int64_t row = 0; row < plan.spans[s].count; row += TILE)
        for (int64_t head = 0; head < kv_heads; head++) {
          items.push_back(item(plan.spans[s], row, head));
          const Item &last = items.back();
          products += static_cast<double>((last.to - row) * (heads / kv_heads) * keys.width) * last.high;
        }
    const int64_t count = items.size();
    if (threads > 1 && products > PARALLEL) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
      for (int64_t i = 0; i < count; i++) pick(items[i], nullptr, ahead());
    } else {  // entering a team of one costs as much as a hundred keys
      for (int64_t i = 0; i < count; i++) pick(items[i], i + 1 < count ? &items[i + 1] : nullptr, ahead());
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
