// Paged attention over ragged rows (flash attention with an online softmax), and RoPE.
//
// A row attends to a list of cache entries: those of its sequence, or for a row of a draft tree the committed entries
// and then its own path. It reads them in that order, block by block, whatever else is in the batch. So a row of a tree
// has the same bits as if it were decoded alone.
#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t TILE = 16;      // rows that share a block of keys
constexpr int64_t GROUP = 8;      // query heads of one KV head per work item; at most twice this many
constexpr double PARALLEL = 2e5;  // multiplications from which a second thread pays

// A query's online softmax: the largest score so far and, per lane, the sum of e^(score - largest).
struct State {
  Floats total = zeros();
  float top = -std::numeric_limits<float>::infinity();

  // Turns the scores of lanes [begin, end) into weights of the values. Returns the factor for the sums so far. ``bias``
  // of the first lane, or null.
  float weigh(float *scores, int64_t begin, int64_t end, float scale, float softcap, const float *bias) {
    const int64_t low = begin / LANES * LANES;
    const auto used = [&](int64_t lane) -> Mask {
      if (lane >= begin && lane + LANES <= end) return first(LANES);
      return without(first(end - lane), first(begin > lane ? begin - lane : 0));
    };
    Floats most = broadcast(top);
    for (int64_t lane = low; lane < end; lane += LANES) {
      Floats scaled = load(scores + lane) * broadcast(scale);
      if (softcap > 0) scaled = capped(scaled, softcap);
      if (bias) scaled = scaled + load(bias + lane, first(end - lane));
      store(scores + lane, scaled);
      most = select(used(lane), max(scaled, most), most);  // max ignores a NaN in its first argument
    }
    float shrink = 1;
    Floats sum = total;
    if (bits(greater(most, broadcast(top)))) {
      const float before = top;
      top = reduce_max(most);
      shrink = front(exponential(broadcast(before - top)));
      sum = sum * broadcast(shrink);
    }
    const Floats largest = broadcast(top);
    for (int64_t lane = low; lane < end; lane += LANES) {
      const Floats result = exponential(load(scores + lane) - largest);
      sum = select(used(lane), sum + result, sum);
      store(scores + lane, result);
    }
    total = sum;
    return shrink;
  }
};

// A query of a tile and the keys [begin, end) of a block that it attends to; ``bias`` of the block's first key, or
// null.
struct Task {
  int64_t query, begin, end;
  const float *bias;
};

// The queries of a tile, their sums and states. Each step (scores, softmax, weighted values) runs over all queries
// before the next step: within one query the steps depend on each other and would stall.
template <class T>
struct Queries {
  using N = Numbers<T>;
  using Asked = typename N::Asked;
  static constexpr bool AS_THEY_ARE = std::is_same_v<T, Asked>;
  int64_t width, padded, value_width, value_padded;  // head sizes, and rounded up to whole vectors
  std::vector<const Asked *> queries;
  std::vector<Asked> converted;
  std::vector<float> sums, scores, shrink;
  std::vector<State> states;
  std::vector<Task> tasks;

  void clear(int64_t count, const Pool &pool) {
    width = pool.width;
    value_width = pool.value_width;
    padded = (width + N::SIZE - 1) / N::SIZE * N::SIZE;
    value_padded = (value_width + N::SIZE - 1) / N::SIZE * N::SIZE;
    queries.resize(count);
    if (!AS_THEY_ARE) converted.resize(padded * count);
    sums.assign(value_padded * count, 0);
    scores.resize(BLOCK * count);
    shrink.resize(count);
    states.assign(count, State());
    tasks.clear();
  }

  void set(int64_t index, const T *query) {
    if constexpr (AS_THEY_ARE) {
      queries[index] = query;
    } else {
      Asked *const to = converted.data() + padded * index;
      for (int64_t i = 0; i < width; i += LANES) store(to + i, load(query + i, first(width - i)));
      queries[index] = to;
    }
  }

  // Calls f(tasks, count) for neighbouring queries with the same first key, at most ``most`` at a time. Later queries
  // have the same last key or a later one.
  template <class F>
  void runs(int64_t most, F f) const {
    for (int64_t i = 0, count, all = tasks.size(); i < all; i += count) {
      const auto like = [&](const Task &task, int64_t after) {
        return task.query == tasks[i].query + after && task.begin == tasks[i].begin;
      };
      for (count = 1; count < most && i + count < all && like(tasks[i + count], count);) count++;
      f(&tasks[i], count);
    }
  }

  // Attends to a block. Prefetches the keys of ``next``, if there is one.
  void take(const typename Block<T>::Sized &sized, const Block<T> &block, float scale, float softcap,
            const Block<T> *next) {
    bool fresh = true;
    runs(sized.together, [&](const Task *task, int64_t count) {
      const int64_t at = task->query;
      (block.*sized.score[count - 1])(&queries[at], &scores[BLOCK * at], task->begin, task[count - 1].end, fresh, width);
      fresh = false;
    });
    for (const Task &task : tasks)
      shrink[task.query] =
          states[task.query].weigh(&scores[BLOCK * task.query], task.begin, task.end, scale, softcap, task.bias);
    runs(4, [&](const Task *task, int64_t count) {
      const int64_t at = task->query, least = task->end;
      const float *const weights = &scores[BLOCK * at];
      const float all = 1;
      (block.*sized.gather[count - 1])(&sums[value_padded * at], value_padded, &shrink[at], weights, task->begin, least,
                                       next, value_width);
      next = nullptr;
      for (int64_t q = 0; q < count; q++)
        if (task[q].end > least)
          (block.*sized.gather[0])(&sums[value_padded * (at + q)], value_padded, &all, weights + BLOCK * q, least,
                                   task[q].end, nullptr, value_width);
    });
    tasks.clear();
  }
};

// Rows [from, to) of a span, query heads [group, end) of one key head.
struct Item {
  const Span &span;
  int64_t from, to, head, group, end, low, high;  // its rows attend to keys in [low, high)

  bool has_same_keys(int64_t at) const { return span.paths < 0 || at + BLOCK <= span.base; }
};

// The current block, the next one, whose keys are prefetched, and one for a tree row's own path.
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
struct Attention {
#if defined(__AVX512F__)
  static constexpr bool MANY = !std::is_same_v<T, Float16>;  // head sizes with code of their own
#else
  static constexpr bool MANY = false;
#endif
  const Plan &plan;
  const Pool &pool;
  const T *q;
  T *out;
  int64_t q_stride, heads, kv_heads, window, sink_tokens;
  float scale, softcap;
  PagedRows<T> keys, values;
  const float *bias;
  int64_t reach;
  const float *sinks;
  const typename Block<T>::Sized &sized = pick(pool);

  Item item(const Span &span, int64_t from, int64_t head, int64_t group, int64_t size) const {
    const int64_t to = std::min(from + TILE, span.rows), end = std::min(group + size, heads / kv_heads);
    Item result{span, from, to, head, group, end, std::numeric_limits<int64_t>::max(), 0};
    for (int64_t row = from; row < result.to; row++) {
      result.low = std::min(result.low, first_key(span, row));
      result.high = std::max(result.high, plan.kv_len(span, row));
    }
    return result;
  }

  int64_t first_key(const Span &span, int64_t row) const {
    const int64_t len = plan.kv_len(span, row);
    return window > 0 && len > window ? len - window : 0;
  }

  // The position bias of a row's key ``at`` and those after it.
  const float *biased(const Span &span, int64_t row, int64_t query_head, int64_t at) const {
    return bias ? bias + (query_head + 1) * reach - plan.kv_len(span, row) + at : nullptr;
  }

  // ``after``: the next item, or null; its first keys are prefetched.
  void tile(const Item &item, const Item *after, Ahead<T> &ahead) const {
    const auto &[span, from, to, head, group_from, group_to, low, high] = item;
    const int64_t groups = group_to - group_from, first_head = head * (heads / kv_heads) + group_from;
    static thread_local Queries<T> kept;
    Queries<T> &queries = kept;
    const int64_t width = pool.width, value_width = pool.value_width;
    queries.clear((to - from) * groups, pool);
    for (int64_t row = from; row < to; row++)
      for (int64_t group = 0; group < groups; group++)
        queries.set((row - from) * groups + group,
                    q + (span.first + row) * q_stride + (first_head + group) * width);
    for (int64_t row = from; row < to && sink_tokens > 0; row++) {
      const int64_t end = std::min(sink_tokens, first_key(span, row));
      if (end <= 0) continue;
      for (int64_t group = 0; group < groups; group++)
        queries.tasks.push_back({(row - from) * groups + group, 0, end, biased(span, row, first_head + group, 0)});
      ahead.own.find(plan, span, row, 0, end, pool.page_size, keys, values, head);
      queries.take(sized, ahead.own, scale, softcap, nullptr);
    }
    const auto find = [&](const Item &of, int64_t at) {
      return ahead.find(plan, of.span, of.from, at, std::min(at + BLOCK, of.high), pool.page_size, keys,
                        values, of.head);
    };
    for (int64_t at = low / BLOCK * BLOCK; at < high; at += BLOCK) {
      const bool shared = item.has_same_keys(at);
      const Block<T> *block = ahead.next, *next = nullptr;
      if (shared && !block) block = find(item, at);
      if (at + BLOCK < high) {
        if (item.has_same_keys(at + BLOCK)) next = find(item, at + BLOCK);
      } else if (after && after->has_same_keys(after->low / BLOCK * BLOCK)) {
        next = find(*after, after->low / BLOCK * BLOCK);
      }
      for (int64_t row = from; row < to; row++) {
        const int64_t begin = std::max(first_key(span, row), at), end = std::min(plan.kv_len(span, row), at + BLOCK);
        if (begin >= end) continue;
        for (int64_t group = 0; group < groups; group++)
          queries.tasks.push_back({(row - from) * groups + group, begin - at, end - at,
                                   biased(span, row, first_head + group, at)});
        if (shared) continue;
        ahead.own.find(plan, span, row, begin, end, pool.page_size, keys, values, head);
        queries.take(sized, ahead.own, scale, softcap, nullptr);
      }
      if (shared) queries.take(sized, *block, scale, softcap, next);
      ahead.next = next;
    }
    for (int64_t index = 0; index < (to - from) * groups; index++) {
      const int64_t row = span.first + from + index / groups, query_head = first_head + index % groups;
      float total = reduce_sum(queries.states[index].total), own = 1;
      if (sinks) {
        const float sink = sinks[query_head], result = queries.states[index].top, top = std::max(result, sink);
        own = front(exponential(broadcast(result - top)));
        total = std::fma(total, own, front(exponential(broadcast(sink - top))));  // one rounding on every target
      }
      const Floats inverse_total = broadcast(own / total);
      T *to_row = out + (row * heads + query_head) * value_width;
      for (int64_t i = 0; i < value_width; i += Numbers<T>::SIZE) {
        Floats parts[Numbers<T>::PARTS];
        for (int p = 0; p < Numbers<T>::PARTS; p++)
          parts[p] = load(queries.sums.data() + queries.value_padded * index + i + LANES * p) * inverse_total;
        Numbers<T>::put(to_row + i, parts, value_width - i);
      }
    }
  }

  static const typename Block<T>::Sized &pick(const Pool &pool) {
#define CASE(WIDTH)                                              \
  if (pool.width == WIDTH && pool.value_width == WIDTH) {        \
    static constexpr auto own = Block<T>::template sized<WIDTH>(); \
    return own;                                                  \
  }
    CASE(64) CASE(128)
    if constexpr (MANY) {
      CASE(16) CASE(32) CASE(80) CASE(96) CASE(112) CASE(256)
    }
#undef CASE
    static constexpr auto any = Block<T>::template sized<0>();
    return any;
  }

  void store_kv(const T *k, const T *v, int64_t k_stride, int64_t v_stride) const {
    for (int64_t s = 0; s < plan.num_spans; s++) {
      const Span &span = plan.spans[s];
      for (int64_t row = 0; row < span.rows; row++) {
        const int64_t entry = span.before + row, page = plan.tables[span.table + entry / pool.page_size];
        for (int64_t head = 0; head < kv_heads; head++) {
          const T *from_k = k + (span.first + row) * k_stride + head * pool.width;
          const T *from_v = v + (span.first + row) * v_stride + head * pool.value_width;
          std::memcpy(keys.at(page, head, entry % pool.page_size), from_k, pool.width * sizeof(T));
          if (values.base != keys.base)  // else MLA: values are a part of the keys
            std::memcpy(values.at(page, head, entry % pool.page_size), from_v, pool.value_width * sizeof(T));
        }
      }
    }
  }

  static Ahead<T> &ahead() {
    static thread_local Ahead<T> own;
    return own;
  }

  // Query heads of one key head per item. Few items, since each reads all keys; as many as threads, for balance.
  int64_t dealt(int64_t threads) const {
    const int64_t all = heads / kv_heads, least = (all + 2 * GROUP - 1) / (2 * GROUP);
    const int64_t deals = (least + threads - 1) / threads * threads;
    return all <= GROUP ? GROUP : (all + deals - 1) / deals;
  }

  void run(int threads) const {
    const int64_t size = dealt(threads);
    std::vector<Item> items;
    double products = 0;
    for (int64_t s = 0; s < plan.num_spans; s++)
      for (int64_t row = 0; row < plan.spans[s].rows; row += TILE)
        for (int64_t head = 0; head < kv_heads; head++)
          for (int64_t group = 0; group < heads / kv_heads; group += size) {
            items.push_back(item(plan.spans[s], row, head, group, size));
            const Item &last = items.back();
            products += static_cast<double>((last.to - row) * (last.end - group) * pool.width) * last.high;
          }
    const int64_t count = items.size();
    if (products <= PARALLEL) threads = 1;
    parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) tile(items[i], i + 1 < end ? &items[i + 1] : nullptr, ahead());
    });
  }
};

}  // namespace

template <class T>
void attend(const T *q, const T *k, const T *v, T *out, T *keys, T *values, const Pool &pool, const Heads &heads,
            const Plan &plan, float scale, float softcap, int threads) {
  const PagedRows<T> key_rows{keys, pool.key_page, pool.key_head, pool.key_slot};
  const PagedRows<T> value_rows{values, pool.value_page, pool.value_head, pool.value_slot};
  const Attention<T> attention{plan,  pool,    q,        out,        heads.q_stride, heads.heads, pool.kv_heads, heads.window,
                               heads.sink_tokens, scale, softcap, key_rows, value_rows, heads.bias,     heads.reach, heads.sinks};
  if (k) attention.store_kv(k, v, heads.k_stride, heads.v_stride);
  attention.run(threads);
}

template <class T>
void apply_rotary(T *x, int64_t stride, const float *angles, const int64_t *positions, int64_t rows, int64_t heads,
                  int64_t width) {
  for (int64_t row = 0; row < rows; row++) {
    const float *const own = angles + (positions ? positions[row] : row) * width;
    for (int64_t head = 0; head < heads; head++)
      for (int64_t i = 0; i < width; i += LANES) {
        T *at = x + row * stride + head * width + i;
        const First lanes = first(width - i);
        const Floats v = load(at, lanes), angle = load(own + i, lanes);
        store(at, lanes, fma_subadd(v, even_twice(angle), swap_pairs(v) * odd_twice(angle)));
      }
  }
}

#define INSTANTIATE(KIND, T)                                                                                          \
  template void attend(const T *, const T *, const T *, T *, T *, T *, const Pool &, const Heads &, const Plan &,     \
                       float, float, int);                                                                            \
  template void apply_rotary(T *, int64_t, const float *, const int64_t *, int64_t, int64_t, int64_t);
FOR_EACH_TYPE(INSTANTIATE)
