// Attention of ragged rows over paged keys and values, and rotary positions.
//
// A row's keys are a list: the entries of its sequence from the first on, and for a node of a tree, behind the committed
// entries, its own path. They are taken in that order, a block at a time, whatever lies beside the row, so a row of a
// tree gets the bits of the same row decoded alone.
#include "common.h"

#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = LANES;   // keys between two looks at the largest score; more were slower
constexpr int64_t TILE = 16;       // rows that share the keys brought in
constexpr int64_t WIDEST = 256;    // numbers of a head, a multiple of 16
constexpr double PARALLEL = 2e5;   // products worth a second thread

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

// The keys of one block as float32 rows: in place where they are that already.
template <class T>
struct Rows {
  alignas(64) float room[BLOCK][WIDEST];
  const float *at[BLOCK];
  void put(int64_t lane, const T *from, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) _mm512_store_ps(room[lane] + i, load(from + i, 0xffff));
    at[lane] = room[lane];
  }
};
template <>
struct Rows<float> {
  const float *at[BLOCK];
  void put(int64_t lane, const float *from, int64_t) { at[lane] = from; }
};

template <class T>
struct Block {
  Rows<T> keys, values;

  void bring(const Plan &plan, const Span &span, int64_t row, int64_t begin, int64_t end, const Side<T> &k,
             const Side<T> &v, int64_t head) {
    int64_t last = -2, page = 0, offset = 0;
    for (int64_t index = begin; index < end; index++) {
      const int64_t entry = plan.entry(span, row, index);
      if (entry == last + 1 && offset + 1 < plan.page_size) {
        offset++;
      } else {
        page = plan.tables[span.table + entry / plan.page_size];
        offset = entry % plan.page_size;
      }
      last = entry;
      keys.put(index % BLOCK, k.at(page, head, offset), k.width);
      values.put(index % BLOCK, v.at(page, head, offset), v.width);
    }
  }
};

inline __m512 capped(__m512 scores, float softcap) {  // softcap * tanh(scores / softcap)
  const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2), cap = _mm512_set1_ps(softcap);
  const __m512 power = exponential(_mm512_mul_ps(two, _mm512_div_ps(scores, cap)));
  return _mm512_mul_ps(cap, _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(power, one))));
}

// A query's running softmax: its largest score and the sum of e^(score - largest); with it goes that sum weighted by
// values.
struct State {
  float top = -std::numeric_limits<float>::infinity(), total = 0;

  // From scores to weights of the values; returns by how much the sums so far shrink.
  float weigh(__m512 scores, __mmask16 mask, float softcap, float *weights) {
    if (softcap > 0) scores = capped(scores, softcap);
    const float most = std::fmax(top, _mm512_mask_reduce_max_ps(mask, scores));
    const __m512 found = _mm512_maskz_mov_ps(mask, exponential(_mm512_sub_ps(scores, _mm512_set1_ps(most))));
    const float shrink = _mm512_cvtss_f32(exponential(_mm512_set1_ps(top - most)));
    total = total * shrink + _mm512_reduce_add_ps(found);
    top = most;
    _mm512_storeu_ps(weights, found);
    return shrink;
  }
};

// A query of a tile and the keys [begin, end) of a block that it takes.
struct Task {
  int64_t query, begin, end;
};

template <int CHUNKS, class T>
__m512 score(const float *query, const Block<T> &block, int64_t begin, int64_t end) {
  __m512 products[LANES];
  for (int64_t j = 0; j < LANES; j++) products[j] = _mm512_setzero_ps();
  for (int64_t j = begin; j < end; j++) {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int64_t c = 0; c < CHUNKS; c++)
      sum = _mm512_fmadd_ps(_mm512_loadu_ps(query + LANES * c), _mm512_loadu_ps(block.keys.at[j] + LANES * c), sum);
    products[j] = sum;
  }
  return across(products);
}

template <int CHUNKS, class T>
void gather(float *sums, const float *weights, float shrink, const Block<T> &block, int64_t begin, int64_t end) {
  __m512 out[CHUNKS];
  for (int64_t c = 0; c < CHUNKS; c++)
    out[c] = _mm512_mul_ps(_mm512_loadu_ps(sums + LANES * c), _mm512_set1_ps(shrink));
  for (int64_t j = begin; j < end; j++)
#pragma GCC unroll 16
    for (int64_t c = 0; c < CHUNKS; c++)
      out[c] = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), _mm512_loadu_ps(block.values.at[j] + LANES * c), out[c]);
  for (int64_t c = 0; c < CHUNKS; c++) _mm512_storeu_ps(sums + LANES * c, out[c]);
}

// The queries of a tile: each one's numbers, CHUNKS registers of itself and CHUNKS of its sums, and its state. A block is
// taken in three turns over all queries, because the steps of one query's softmax wait for each other.
template <int CHUNKS>
struct Queries {
  static constexpr int64_t WIDTH = LANES * CHUNKS;
  std::vector<float> numbers, scores;
  std::vector<State> states;
  std::vector<Task> tasks;

  float *query(int64_t index) { return numbers.data() + 2 * WIDTH * index; }
  float *sums(int64_t index) { return query(index) + WIDTH; }

  void clear(int64_t count) {
    numbers.assign(2 * WIDTH * count, 0);
    states.assign(count, State());
    scores.resize((LANES + 1) * count);
    tasks.clear();
  }

  template <class T>
  void take(const Block<T> &block, float softcap) {
    float *shrink = scores.data() + LANES * states.size(), *found = scores.data();
    for (const Task &task : tasks)
      _mm512_storeu_ps(found + LANES * task.query, score<CHUNKS>(query(task.query), block, task.begin, task.end));
    for (const Task &task : tasks) {
      const __mmask16 mask = first(task.end) & static_cast<__mmask16>(~first(task.begin));
      float *own = found + LANES * task.query;
      shrink[task.query] = states[task.query].weigh(_mm512_loadu_ps(own), mask, softcap, own);
    }
    for (const Task &task : tasks)
      gather<CHUNKS>(sums(task.query), found + LANES * task.query, shrink[task.query], block, task.begin, task.end);
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
    static thread_local Queries<CHUNKS> queries;
    static thread_local Block<T> block;
    queries.clear((to - from) * groups);
    int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
    for (int64_t row = from; row < to; row++) {
      const int64_t seen = plan.seen(span, row), begin = window > 0 && seen > window ? seen - window : 0;
      low = begin < low ? begin : low;
      high = seen > high ? seen : high;
      for (int64_t group = 0; group < groups; group++) {
        const T *query = q + (span.first + row) * q_stride + (head * groups + group) * WIDTH;
        float *to_query = queries.query((row - from) * groups + group);
        for (int64_t i = 0; i < WIDTH; i += LANES)
          _mm512_storeu_ps(to_query + i, _mm512_mul_ps(load(query + i, 0xffff), _mm512_set1_ps(scale)));
      }
    }
    for (int64_t at = low / BLOCK * BLOCK; at < high; at += BLOCK) {
      const bool shared = span.paths < 0 || at + BLOCK <= span.base;
      if (shared) block.bring(plan, span, from, at, at + BLOCK < high ? at + BLOCK : high, keys, values, head);
      for (int64_t row = from; row < to; row++) {
        const int64_t seen = plan.seen(span, row), least = window > 0 && seen > window ? seen - window : 0;
        const int64_t begin = least > at ? least : at, end = seen < at + BLOCK ? seen : at + BLOCK;
        if (begin >= end) continue;
        for (int64_t group = 0; group < groups; group++)
          queries.tasks.push_back({(row - from) * groups + group, begin - at, end - at});
        if (shared) continue;
        block.bring(plan, span, row, begin, end, keys, values, head);
        queries.take(block, softcap);
      }
      queries.take(block, softcap);
    }
    for (int64_t index = 0; index < (to - from) * groups; index++) {
      const int64_t row = span.first + from + index / groups, query_head = head * groups + index % groups;
      const __m512 share = _mm512_set1_ps(1 / queries.states[index].total);
      T *to_row = out + (row * heads + query_head) * WIDTH;
      for (int64_t i = 0; i < WIDTH; i += LANES)
        store(to_row + i, 0xffff, _mm512_mul_ps(_mm512_loadu_ps(queries.sums(index) + i), share));
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
  }                                                                                                                  \
  void turn_##KIND(T *x, int64_t stride, const float *angles, int64_t rows, int64_t heads, int64_t width) {          \
    turn<T>(x, stride, angles, rows, heads, width);                                                                  \
  }

ATTENTION(float32, float)
ATTENTION(bfloat16, uint16_t)
}
