// A decoder's layers in one call, from token ids to logits: what models/native.py does with the kernels one by one, with
// the same bits. For models whose layer takes microseconds, most of the time would go into the calls.
#include "common.h"

#include <cstring>

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

}  // namespace

extern "C" {

#define DECODER(KIND, T)                                                                                            \
  void decode_##KIND(const void *model, const void *layers, const void *call, float eps, float scale) {              \
    Decoder<T>(*static_cast<const Model<T> *>(model), static_cast<const Layer *>(layers),                           \
               *static_cast<const Call<T> *>(call), eps, scale)                                                     \
        .run();                                                                                                     \
  }

DECODER(float32, float)
#if defined(__AVX512BF16__)
DECODER(bfloat16, uint16_t)
#endif
}
