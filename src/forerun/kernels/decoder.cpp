// A decoder's layers in one call, from token ids to logits: what models/native.py does with the kernels one by one, with
// the same bits. For models whose layer takes microseconds, most of the time would go into the calls.
#include "common.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace {

template <class T>
struct Kernels;

template <>
struct Kernels<float> {
  static constexpr auto linear = linear_float32;
  static constexpr auto norm = norm_float32;
  static constexpr auto silu_times = silu_times_float32;
  static constexpr auto attend = attend_float32;
  static constexpr auto turn = turn_float32;
#if defined(__AVX512VNNI__)
  static constexpr auto linear_int8 = linear_int8_float32;
#endif
};

#if defined(__AVX512BF16__)
template <>
struct Kernels<uint16_t> {
  static constexpr auto linear = linear_bfloat16;
  static constexpr auto norm = norm_bfloat16;
  static constexpr auto silu_times = silu_times_bfloat16;
  static constexpr auto attend = attend_bfloat16;
  static constexpr auto turn = turn_bfloat16;
#if defined(__AVX512VNNI__)
  static constexpr auto linear_int8 = linear_int8_bfloat16;
#endif
};
#endif

// The structs as models/fused.py lays them out, one int64 a field.
struct Linear {
  const char *weight;
  const float *bias, *scales;  // scales: int8 weights
  const int32_t *offsets;
  int64_t outputs, inputs;
};

struct Layer {
  const float *norm_attention, *norm_qk, *norm_mlp;
  const float *norm_token;  // not null: attention reads the token's embedding, normed by this, beside the normed input
  int64_t rope, window;
  Linear qkv, out, gate_up, down;
};

template <class T>
struct Model {
  int64_t heads, kv_heads, width, hidden, inner;
  const T *embedding;
  const float *norm;
  Linear head;
};

template <class T>
struct Call {
  int64_t rows, threads;
  const int64_t *ids;        // tokens
  const T *given;            // [rows, hidden], or null: the tokens' embeddings
  const int64_t *positions;  // [rows]
  const float *angles;       // [positions, width]
  const int64_t *which;      // the layers to run
  int64_t count;
  T *const *keep;  // for each of them where its input goes, or null; then where the output goes, normed and as it is
  const int64_t *rows_out;  // the rows whose logits are wanted, ascending; read if they are not all
  int64_t num_out;
  T *room;
  float *logits;  // [num_out, vocabulary]
  T *const *sides;  // keys and values of every layer
  const int64_t *strides;  // page, head and slot strides of keys, then of values, and the page size
  const int64_t *spans;
  int64_t num_spans;
  const int64_t *tables, *paths, *entries;
};

template <class T>
class Decoder {
 public:
  Decoder(const Model<T> &model, const Layer *layers, const Call<T> &call, float eps, float scale)
      : m(model), layers(layers), c(call), eps(eps), scale(scale), threads(static_cast<int>(call.threads)) {
    qkv_width = (m.heads + 2 * m.kv_heads) * m.width;
    T *at = c.room;
    const auto take = [&at](int64_t numbers) {
      T *found = at;
      at += (numbers + 31) / 32 * 32;
      return found;
    };
    x = take(c.rows * m.hidden);
    normed = take(c.rows * layers[0].qkv.inputs);
    qkv = take(c.rows * qkv_width);
    attended = take(c.rows * m.heads * m.width);
    wide = take(c.rows * 2 * m.inner);
    inner = take(c.rows * m.inner);
    angles = reinterpret_cast<float *>(take(c.rows * m.width * (sizeof(float) / sizeof(T))));
    scores = take(c.num_out * m.head.outputs);
  }

  void run() {
    for (int64_t row = 0; row < c.rows; row++) {
      const T *from = c.given ? c.given + row * m.hidden : m.embedding + c.ids[row] * m.hidden;
      std::memcpy(x + row * m.hidden, from, m.hidden * sizeof(T));
      std::memcpy(angles + row * m.width, c.angles + c.positions[row] * m.width, m.width * sizeof(float));
    }
    int64_t rows = c.rows;  // that go on
    T *const output = c.keep[c.count];
    for (int64_t i = 0; i < c.count && rows; i++) {
      const Layer &layer = layers[c.which[i]];
      if (c.keep[i]) std::memcpy(c.keep[i], x, rows * m.hidden * sizeof(T));
      attend(layer, c.which[i]);
      if (i == c.count - 1 && !output && c.num_out < rows) {
        pick(x, m.hidden);
        pick(attended, m.heads * m.width);
        rows = c.num_out;
      }
      if (rows) rest(layer, rows);
    }
    if (c.keep[c.count + 1]) std::memcpy(c.keep[c.count + 1], x, rows * m.hidden * sizeof(T));
    Kernels<T>::norm(x, m.norm, normed, rows, 1, m.hidden, eps);
    if (output) {
      std::memcpy(output, normed, rows * m.hidden * sizeof(T));
      if (c.num_out < rows) pick(normed, m.hidden);
    }
    if (!c.num_out) return;
    linear(m.head, normed, scores, nullptr, c.num_out);
    for (int64_t i = 0, all = c.num_out * m.head.outputs; i < all; i += 16)
      store(c.logits + i, first(all - i), load(scores + i, first(all - i)));
  }

 private:
  // The rows whose logits are wanted, to the front.
  void pick(T *from, int64_t width) const {
    for (int64_t i = 0; i < c.num_out; i++)
      if (c.rows_out[i] != i) std::memcpy(from + i * width, from + c.rows_out[i] * width, width * sizeof(T));
  }

  void linear(const Linear &l, const T *in, T *out, const T *add, int64_t rows) const {
#if defined(__AVX512VNNI__)
    if (l.scales)
      return Kernels<T>::linear_int8(l.weight, in, out, add, l.bias, l.scales, l.offsets, rows, l.outputs, l.inputs,
                                     threads);
#endif
    Kernels<T>::linear(l.weight, in, out, add, l.bias, rows, l.outputs, l.inputs, threads);
  }

  void attend(const Layer &layer, int64_t index) const {
    if (layer.norm_token) {
      for (int64_t row = 0; row < c.rows; row++) {
        T *const to = normed + row * 2 * m.hidden;
        Kernels<T>::norm(m.embedding + c.ids[row] * m.hidden, layer.norm_token, to, 1, 1, m.hidden, eps);
        Kernels<T>::norm(x + row * m.hidden, layer.norm_attention, to + m.hidden, 1, 1, m.hidden, eps);
      }
    } else {
      Kernels<T>::norm(x, layer.norm_attention, normed, c.rows, 1, m.hidden, eps);
    }
    linear(layer.qkv, normed, qkv, nullptr, c.rows);
    const int64_t turned = m.heads + m.kv_heads;
    for (int64_t row = 0; layer.norm_qk && row < c.rows; row++)
      Kernels<T>::norm(qkv + row * qkv_width, layer.norm_qk, qkv + row * qkv_width, turned, turned, m.width, eps);
    if (layer.rope) Kernels<T>::turn(qkv, qkv_width, angles, c.rows, turned, m.width);
    const int64_t *s = c.strides;
    const int64_t sizes[] = {m.heads, m.kv_heads, m.width, m.width, s[6], layer.window, qkv_width, qkv_width, qkv_width,
                             s[0], s[1], s[2], s[3], s[4], s[5]};
    T *const k = qkv + m.heads * m.width, *const v = k + m.kv_heads * m.width;
    Kernels<T>::attend(qkv, k, v, attended, c.sides[2 * index], c.sides[2 * index + 1], sizes, c.spans, c.num_spans,
                       c.tables, c.paths, c.entries, scale, 0, threads);
  }

  void rest(const Layer &layer, int64_t rows) const {
    linear(layer.out, attended, x, x, rows);
    Kernels<T>::norm(x, layer.norm_mlp, normed, rows, 1, m.hidden, eps);
    linear(layer.gate_up, normed, wide, nullptr, rows);
    Kernels<T>::silu_times(wide, inner, rows, m.inner);
    linear(layer.down, inner, x, x, rows);
  }

  const Model<T> &m;
  const Layer *layers;
  const Call<T> &c;
  const float eps, scale;
  const int threads;
  int64_t qkv_width;
  T *x, *normed, *qkv, *attended, *wide, *inner, *scores;
  float *angles;
};

// A chain of drafted tokens for each sequence: choose a token from its row of logits, feed it, and so on.
template <class T>
struct Chains {
  int64_t count, longest;  // sequences, each with a row of the first call's logits, in order; the most tokens of one
  const int64_t *depths;   // [count] tokens wanted
  const int64_t *starts;   // [count] entries of the cache before the first drafted token's
  const int64_t *tables;   // [count] where its pages begin in the call's tables
  const float *heats;      // [count] its temperature; 0: the likeliest token
  const float *shares;     // [count, 2] its min-p and top-p
  const int64_t *top_ks;   // [count]
  const int32_t *words;    // for noise
  const uint64_t *keys;    // [longest, count] of each choice's noise, or null: drawn from the softmax
  const double *spots;     // [longest, count] where in its cumulative sum
  int64_t *tokens;         // [longest, count] what was chosen; -1: nothing, where no id is permitted or one is NaN
  float *q;                // [longest, count, vocabulary] softmax of each row with a temperature, or null
  int64_t feeds;           // whether the output before the last norm is the next input, beside the token (EAGLE)
};

template <class T>
class Drafting {
 public:
  Drafting(const Model<T> &model, const Layer *layers, const Call<T> &first, const Chains<T> &chains, float eps,
           float scale)
      : model(model), layers(layers), first(first), d(chains), eps(eps), scale(scale), size(model.head.outputs),
        active(d.count), ids(d.count), positions(d.count), spans(6 * d.count), keep(first.count + 2),
        states(d.feeds ? d.count * model.hidden : 0) {
    for (int64_t i = 0; i < d.count; i++) active[i] = i;
    std::fill(d.tokens, d.tokens + d.longest * d.count, -1);
  }

  void run() {
    Decoder<T>(model, layers, first, eps, scale).run();
    for (int64_t step = 0; step < d.longest; step++) {
      const int64_t rows = active.size();
#pragma omp parallel for num_threads(first.threads) if (first.threads > 1 && rows * size > 1000000)
      for (int64_t row = 0; row < rows; row++) choose_token(step, active[row], first.logits + row * size);
      if (!advance(step)) return;
      Decoder<T>(model, layers, next(), eps, scale).run();
    }
  }

 private:
  void choose_token(int64_t step, int64_t sequence, float *row) const {
    const int64_t at = step * d.count + sequence;
    const float heat = d.heats[sequence];
    const int64_t noisy = heat != 0 && d.keys;
    const uint64_t key = d.keys ? d.keys[at] : 0;
    float *const law = heat != 0 && d.q ? d.q + at * size : nullptr;
    if (heat != 0)
      restrict_row(row, size, heat, d.shares[2 * sequence], d.top_ks[sequence], d.shares[2 * sequence + 1]);
    float top;
    int64_t place;
    choose(row, 1, size, d.words, &key, &noisy, &top, &place, law, 1);
    if (!(top > -std::numeric_limits<float>::infinity())) return;
    if (law && d.spots) draw(law, 1, size, d.spots + at, &place);
    d.tokens[at] = place;
  }

  // Lays out the next rows, and returns how many there are.
  size_t advance(int64_t step) {
    std::vector<int64_t> on;
    for (size_t row = 0; row < active.size(); row++) {
      const int64_t sequence = active[row], token = d.tokens[step * d.count + sequence];
      if (token < 0 || d.depths[sequence] <= step + 1) continue;
      const int64_t n = on.size(), start = d.starts[sequence];
      if (d.feeds) std::memcpy(&states[n * model.hidden], first.room + row * model.hidden, model.hidden * sizeof(T));
      ids[n] = token;
      positions[n] = start + step;
      const int64_t span[] = {n, 1, start, start + step, d.tables[sequence], -1};
      std::memcpy(&spans[6 * n], span, sizeof(span));
      on.push_back(sequence);
    }
    active.swap(on);
    return active.size();
  }

  Call<T> next() const {
    Call<T> call = first;
    call.rows = call.num_out = call.num_spans = active.size();
    call.ids = ids.data();
    call.given = d.feeds ? states.data() : nullptr;
    call.positions = positions.data();
    call.spans = spans.data();
    call.keep = keep.data();
    return call;
  }

  const Model<T> &model;
  const Layer *const layers;
  const Call<T> &first;
  const Chains<T> &d;
  const float eps, scale;
  const int64_t size;
  std::vector<int64_t> active, ids, positions, spans;
  std::vector<T *> keep;  // nothing
  std::vector<T> states;
};

}  // namespace

extern "C" {

#define DECODER(KIND, T)                                                                                            \
  void decode_##KIND(const void *model, const void *layers, const void *call, float eps, float scale) {              \
    Decoder<T>(*static_cast<const Model<T> *>(model), static_cast<const Layer *>(layers),                           \
               *static_cast<const Call<T> *>(call), eps, scale)                                                     \
        .run();                                                                                                     \
  }                                                                                                                 \
  void draft_##KIND(const void *model, const void *layers, const void *call, const void *chains, float eps,          \
                    float scale) {                                                                                  \
    Drafting<T>(*static_cast<const Model<T> *>(model), static_cast<const Layer *>(layers),                          \
                *static_cast<const Call<T> *>(call), *static_cast<const Chains<T> *>(chains), eps, scale)           \
        .run();                                                                                                     \
  }

DECODER(float32, float)
#if defined(__AVX512BF16__)
DECODER(bfloat16, uint16_t)
#endif
}
