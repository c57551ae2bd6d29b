// All layers of a decoder in one call, from token ids to logits. It runs the same kernels as models/run/native.py, with the
// same bits; per-layer Python calls would dominate for small models. ``Drafting`` drafts whole chains in one call.
#include "kernels.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

int64_t rounded(int64_t numbers) { return (numbers + ROUND_UP - 1) / ROUND_UP * ROUND_UP; }

// Widths of the workspace's buffers: the largest of all layers.
struct Widths {
  int64_t input, made = 0, attended = 0, mixed = 0, latent = 0;

  template <class T>
  Widths(const Model<T> &m, const Layer *layers) : input(m.fc.weight ? 2 * m.hidden : m.hidden) {
    for (int64_t i = 0; i < m.layers; i++) {
      const Layer &layer = layers[i];
      input = std::max(input, layer.qkv.inputs);
      made = std::max({made, layer.qkv.all_outputs(), layer.mixer_in.all_outputs()});
      attended = std::max(attended, layer.out.inputs);
      mixed = std::max(mixed, layer.mixer_out.inputs);
      if (layer.latent) latent = std::max(latent, layer.latent->needed(m.heads));
    }
  }
};

template <class T>
class Decoder {
 public:
  Decoder(const Model<T> &model, const Layer *layers, const Call<T> &call)
      : m(model), layers(layers), c(call), eps(static_cast<float>(model.eps)), threads(static_cast<int>(call.threads)) {
    const Widths widths(m, layers);
    T *at = c.workspace;
    const auto take = [&at](int64_t numbers) {
      T *result = at;
      at += rounded(numbers);
      return result;
    };
    x = take(c.rows * m.hidden);
    normed = take(c.rows * widths.input);
    qkv = take(c.rows * widths.made);
    attended = take(c.rows * widths.attended);
    mixed = take(c.rows * widths.mixed);
    latent = take(c.rows * widths.latent);
    up = take(c.rows * 2 * m.intermediate);
    activated = take(c.rows * m.intermediate);
    per_layer = take(c.rows * m.layers * m.per_layer_size);
    scores = take(c.num_logits * m.head.outputs);
  }

  // False if an all-reduce failed.
  bool run() {
    for (int64_t row = 0; row < c.rows; row++) {
      if (m.fc.weight) {
        T *const to = normed + row * 2 * m.hidden;
        embed(row, to);
        std::memcpy(to + m.hidden, c.inputs_embeds + row * m.hidden, m.hidden * sizeof(T));
        if (m.norm_embedding) normalise(to, m.norm_embedding, to, 1);
        if (m.norm_given) normalise(to + m.hidden, m.norm_given, to + m.hidden, 1);
      } else if (c.inputs_embeds) {
        std::memcpy(x + row * m.hidden, c.inputs_embeds + row * m.hidden, m.hidden * sizeof(T));
      } else {
        embed(row, x + row * m.hidden);
      }
    }
    if (m.fc.weight) multiply(m.fc, normed, x, nullptr, c.rows);
    if (m.per_layer_size) embed_per_layer();
    int64_t rows = c.rows;  // the last layer's MLP needs only rows with logits
    T *const output = c.hidden_out[c.num_layer_ids];
    for (int64_t i = 0; i < c.num_layer_ids && rows; i++) {
      const Layer &layer = layers[c.layer_ids[i]];
      if (c.hidden_out[i]) std::memcpy(c.hidden_out[i], x, rows * m.hidden * sizeof(T));
      run_attention(layer, c.layer_ids[i]);
      if (i == c.num_layer_ids - 1 && !output && c.num_logits < rows) {
        pick(x, m.hidden);
        pick(attended, layer.out.inputs);
        pick(mixed, layer.mixer_out.inputs);
        if (m.parallel) pick(layer.norm_attention ? normed : x, m.hidden);
        if (m.per_layer_size) pick(per_layer, m.layers * m.per_layer_size);
        rows = c.num_logits;
      }
      if (rows) output_and_mlp(layer, c.layer_ids[i], rows);
      if (failed) return false;
    }
    if (c.hidden_out[c.num_layer_ids + 1]) std::memcpy(c.hidden_out[c.num_layer_ids + 1], x, rows * m.hidden * sizeof(T));
    if (!m.head.weight && !output) return true;
    normalise(x, m.norm, normed, rows);
    if (output) {
      std::memcpy(output, normed, rows * m.hidden * sizeof(T));
      if (c.num_logits < rows) pick(normed, m.hidden);
    }
    if (!c.num_logits || !m.head.weight) return true;
    multiply(m.head, normed, scores, nullptr, c.num_logits);
    const Floats factor = broadcast(static_cast<float>(m.logits_scale));
    for (int64_t i = 0, all = c.num_logits * m.head.outputs; i < all; i += 16)
      store(c.logits + i, first(all - i), load(scores + i, first(all - i)) * factor);
    if (m.logits_softcap > 0) softcap(c.logits, c.num_logits * m.head.outputs, static_cast<float>(m.logits_softcap));
    return true;
  }

 private:
  void embed(int64_t row, T *to) const { get_row(m.embedding, m.token_embd, m.embedding_scale, row, to, m.hidden); }

  // The embedding of a row's token, from ``numbers`` or, if null, from ``layer``; times ``factor``.
  void get_row(const T *numbers, const Linear &layer, double factor, int64_t row, T *to, int64_t width) const {
    if (numbers)
      std::memcpy(to, numbers + c.ids[row] * width, width * sizeof(T));
    else
      get_rows(layer.kind, layer.weight, c.ids + row, to, 1, width);
    if (factor != 1) scale(to, static_cast<float>(factor), width);
  }

  // Gemma's per-layer inputs: (norm(project(x)) + per-layer embedding) / sqrt(2).
  void embed_per_layer() const {
    const int64_t width = m.layers * m.per_layer_size;
    multiply(m.per_layer_project, x, per_layer, nullptr, c.rows);
    scale(per_layer, static_cast<float>(std::pow(static_cast<double>(m.hidden), -0.5)), c.rows * width);
    norm(per_layer, m.per_layer_norm, per_layer, static_cast<const T *>(nullptr), c.rows * m.layers, 1, m.per_layer_size, eps,
         m.layer_norm != 0);
    std::vector<T> own(width);
    for (int64_t row = 0; row < c.rows; row++) {
      get_row(m.per_layer_table, m.per_layer_rows, m.per_layer_scale, row, own.data(), width);
      T *const at = per_layer + row * width;
      for (int64_t i = 0; i < width; i += 16)
        store(at + i, first(width - i), load(at + i, first(width - i)) + load(&own[i], first(width - i)));
    }
    scale(per_layer, 0.70710678f, c.rows * width);
  }

  // Moves the rows that get logits to the front.
  void pick(T *from, int64_t width) const {
    for (int64_t i = 0; i < c.num_logits; i++)
      if (c.logit_rows[i] != i) std::memcpy(from + i * width, from + c.logit_rows[i] * width, width * sizeof(T));
  }

  void multiply(const Linear &layer, const T *in, T *out, const T *add, int64_t rows) const {
    project(layer, in, out, add, rows, threads);
  }

  // RMS norm or layer norm of rows of the hidden size.
  void normalise(const T *in, const float *weights, T *out, int64_t rows) const {
    norm(in, weights, out, static_cast<const T *>(nullptr), rows, 1, m.hidden, eps, m.layer_norm != 0);
  }

  void norm_heads(T *at, const float *weights, int64_t count, int64_t width) const {
    if (weights) norm(at, weights, at, static_cast<const T *>(nullptr), count, count, width, eps, false);
  }

  // x, normed if there are weights.
  const T *read(const float *weights, int64_t rows) const {
    if (weights) normalise(x, weights, normed, rows);
    return weights ? normed : x;
  }

  // x += after(all_reduce(layer(in))) * residual_scale; ``after`` is a post-norm, or null.
  void add(const Linear &layer, const T *in, const float *after, int64_t rows) {
    if (!after && !c.all_reduce && m.residual_scale == 1) return multiply(layer, in, x, x, rows);
    multiply(layer, in, normed, nullptr, rows);
    if (c.all_reduce) {
      std::vector<float> total(rows * m.hidden);
      all_reduce(normed, false, total, rows);
      for (int64_t i = 0; i < rows * m.hidden; i += 16) {
        const First lanes = first(rows * m.hidden - i);
        const Floats made = load(&total[i], lanes);
        if (after || m.residual_scale != 1) store(normed + i, lanes, made);
        else store(x + i, lanes, made + load(x + i, lanes));
      }
    }
    if (after) norm(normed, after, x, x, rows, 1, m.hidden, eps, m.layer_norm != 0);
    else if (m.residual_scale != 1) add_scaled(rows);
  }

  // x += normed * residual_scale
  void add_scaled(int64_t rows) {
    const int64_t all = rows * m.hidden;
    if (m.residual_scale != 1) scale(normed, static_cast<float>(m.residual_scale), all);
    for (int64_t i = 0; i < all; i += 16)
      store(x + i, first(all - i), load(x + i, first(all - i)) + load(normed + i, first(all - i)));
  }

  void all_reduce(const void *part, bool is_float, std::vector<float> &total, int64_t rows) {
    if (c.all_reduce(part, is_float, total.data(), rows)) failed = true;
  }

  void run_attention(const Layer &layer, int64_t index) const {
    if (layer.norm_token) {
      for (int64_t row = 0; row < c.rows; row++) {
        T *const to = normed + row * 2 * m.hidden;
        embed(row, to);
        normalise(to, layer.norm_token, to, 1);
        normalise(x + row * m.hidden, layer.norm_attention, to + m.hidden, 1);
      }
      multiply(layer.qkv, normed, qkv, nullptr, c.rows);
      return self_attention(layer);
    }
    if (!layer.mixer && !layer.qkv.weight) return;
    const T *const in = read(layer.norm_attention, c.rows);
    if (layer.mixer) {
      void *const *const held = c.states + 2 * index;
      multiply(layer.mixer_in, in, qkv, nullptr, c.rows);
      recur(*layer.mixer, *c.replay, qkv, static_cast<T *>(held[0]), static_cast<float *>(held[1]), mixed, c.rows,
            threads);
    }
    if (!layer.qkv.weight) return;
    multiply(layer.qkv, in, qkv, nullptr, c.rows);
    if (layer.latent) return latent_attention(layer, *layer.latent);
    self_attention(layer);
  }

  void rope(const Layer &layer, T *at, int64_t stride, int64_t heads) const {
    if (layer.rotary >= 0)
      apply_rotary(at, stride, c.angles[layer.rotary], c.positions, c.rows, heads, layer.width);
  }

  // MLA with absorbed projections: k_b is applied to queries and v_b to attention's output, so attention runs over the
  // latents as over one key head. Workspace: [query latents | queries | absorbed queries | attention output].
  void latent_attention(const Layer &layer, const Latent &n) const {
    const int64_t made = layer.qkv.all_outputs(), query = n.query(), entry = n.entry(), wide_query = m.heads * entry;
    T *const asked = latent + c.rows * n.q_lora_rank, *const q = asked + c.rows * m.heads * query;
    T *const out = q + c.rows * wide_query, *const k = qkv + n.first(m.heads);
    const float latent_eps = static_cast<float>(n.eps);
    const auto normalise_latent = [&](const T *from, const float *weights, T *to, int64_t width) {
      norm(from, weights, to, static_cast<const T *>(nullptr), 1, 1, width, latent_eps, false);
    };
    for (int64_t row = 0; row < c.rows; row++) {
      normalise_latent(k + row * made, n.kv_a_norm, k + row * made, n.kv_lora_rank);
      if (n.q_lora_rank) normalise_latent(qkv + row * made, n.q_a_norm, latent + row * n.q_lora_rank, n.q_lora_rank);
    }
    rope(layer, k + n.kv_lora_rank, made, 1);
    if (n.q_lora_rank) multiply(n.q_b, latent, asked, nullptr, c.rows);
    const T *const from = n.q_lora_rank ? asked : qkv;
    const Apart queries{n.q_lora_rank ? m.heads * query : made, query};
    project_each(n.k_b, m.heads, from, queries, q, {wide_query, entry}, c.rows, threads);
    for (int64_t head = 0; head < m.heads; head++) {
      T *const rope_part = q + head * entry + n.kv_lora_rank;
      for (int64_t row = 0; row < c.rows; row++)
        std::memcpy(rope_part + row * wide_query, from + row * queries.row + head * query + n.nope_dim, n.rope_dim * sizeof(T));
      rope(layer, rope_part, wide_query, 1);
    }
    scale_queries(q, wide_query, wide_query);
    const Heads heads{m.heads, layer.window, layer.sink_tokens, wide_query, made, made, nullptr, 0, layer.sinks};
    attend_cache(layer, q, k, k, out, heads);
    project_each(n.v_b, m.heads, out, {m.heads * n.kv_lora_rank, n.kv_lora_rank}, attended, {m.heads * n.v_dim, n.v_dim}, c.rows,
                 threads);
  }

  void attend_cache(const Layer &layer, const T *q, const T *k, const T *v, T *out, const Heads &heads) const {
    T *const *const kv = c.kv + 2 * layer.kv_source;
    attend(q, k, v, out, kv[0], kv[1], c.pools[layer.kv_source], heads, *c.plan, static_cast<float>(m.scale),
           static_cast<float>(m.softcap), threads);
  }

  // QK norm, RoPE, query scaling, attention and its output gate.
  void self_attention(const Layer &layer) const {
    const int64_t qkv_width = layer.qkv.all_outputs(), width = layer.width;
    const int64_t keys = layer.has_kv ? layer.kv_heads : 0, rotated = m.heads + keys;
    const int64_t queries = m.heads * width, shared = keys * width;
    for (int64_t row = 0; row < c.rows; row++) {
      T *const q = qkv + row * qkv_width;
      if (!m.norm_after_rope) norm_heads(q, layer.norm_qk, layer.qk_norm_heads, width);
      norm_heads(q, layer.norm_query, 1, queries);
      norm_heads(q + queries, layer.norm_key, 1, shared);
    }
    rope(layer, qkv, qkv_width, rotated);
    for (int64_t row = 0; m.norm_after_rope && row < c.rows; row++)
      norm_heads(qkv + row * qkv_width, layer.norm_qk, layer.qk_norm_heads, width);
    scale_queries(qkv, qkv_width, queries);
    const Heads heads{m.heads, layer.window, layer.sink_tokens, qkv_width, qkv_width, qkv_width, nullptr, 0, layer.sinks};
    const T *const k = layer.has_kv ? qkv + queries : nullptr, *const v = layer.has_kv ? k + shared : nullptr;
    attend_cache(layer, qkv, k, v, attended, heads);
    for (int64_t row = 0; layer.gated && row < c.rows; row++)
      sigmoid_gate(qkv + row * qkv_width + queries + 2 * shared, attended + row * queries, queries);
  }

  // at *= sigmoid(gate)
  static void sigmoid_gate(const T *gate, T *at, int64_t count) {
    const Floats one = broadcast(1);
    for (int64_t i = 0; i < count; i += 16) {
      const First lanes = first(count - i);
      store(at + i, lanes, one / (one + exponential(zeros() - load(gate + i, lanes))) * load(at + i, lanes));
    }
  }

  // Llama 4's attention temperature: scales queries at long positions, ``count`` numbers in each row.
  void scale_queries(T *queries, int64_t stride, int64_t count) const {
    for (int64_t row = 0; m.attn_temp_scale != 0 && row < c.rows; row++)
      if (c.positions[row] >= m.attn_temp_floor) scale_query(queries + row * stride, c.positions[row], count);
  }

  void scale_query(T *query, int64_t position, int64_t count) const {
    const double log_floor = std::log(static_cast<double>(1 + position / m.attn_temp_floor));
    const float by = static_cast<float>(std::fma(m.attn_temp_scale, log_floor, 1.0));
    T rounded[1];
    store(rounded, first(1), broadcast(by));
    scale(query, front(load(rounded, first(1))), count);
  }

  static void scale(T *at, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i += 16)
      store(at + i, first(count - i), load(at + i, first(count - i)) * broadcast(factor));
  }

  void output_and_mlp(const Layer &layer, int64_t index, int64_t rows) {
    if (m.parallel) multiply(layer.gate_up, layer.norm_attention ? normed : x, up, nullptr, rows);
    if (layer.mixer) add(layer.mixer_out, mixed, nullptr, rows);
    if (layer.qkv.weight) add(layer.out, attended, layer.after_attention, rows);
    if (failed || (!layer.experts && !layer.gate_up.weight)) return;
    const T *const in = m.parallel ? nullptr : read(layer.norm_mlp, rows);
    if (layer.experts) {
      add_experts(layer, in, rows);
    } else {
      if (in) multiply(layer.gate_up, in, up, nullptr, rows);
      apply_activation(m.activation, layer.activation_params, m.gated != 0, up, activated, rows, layer.down.inputs);
      add(layer.down, activated, layer.after_mlp, rows);
    }
    if (m.per_layer_size) add_per_layer(layer, index, rows);
    if (layer.scale != 1) scale(x, static_cast<float>(layer.scale), rows * m.hidden);
  }

  void add_per_layer(const Layer &layer, int64_t index, int64_t rows) {
    const int64_t bytes = m.per_layer_size * sizeof(T);
    multiply(layer.per_layer_gate, x, activated, nullptr, rows);
    for (int64_t row = 0; row < rows; row++) {
      T *const to = up + 2 * row * m.per_layer_size;
      std::memcpy(to, activated + row * m.per_layer_size, bytes);
      std::memcpy(to + m.per_layer_size, per_layer + (row * m.layers + index) * m.per_layer_size, bytes);
    }
    apply_activation(m.activation, layer.activation_params, true, up, activated, rows, m.per_layer_size);
    add(layer.per_layer_out, activated, layer.after_inputs, rows);
  }

  void add_experts(const Layer &layer, const T *in, int64_t rows) {
    const int64_t all = rows * m.hidden;
    std::vector<float> total(all);
    std::vector<T> own(layer.norm_experts ? all : 0), scored(layer.norm_router ? all : 0);
    if (layer.norm_experts) normalise(x, layer.norm_experts, own.data(), rows);
    if (layer.norm_router) normalise(x, layer.norm_router, scored.data(), rows);
    const int64_t read = moe(*layer.experts, layer.norm_experts ? own.data() : in,
                             layer.norm_router ? scored.data() : in, total.data(), rows, threads);
    if (c.experts) *c.experts += read;
    if (c.all_reduce) all_reduce(total.data(), true, total, rows);
    const std::vector<T> shared = layer.gate_up.weight ? shared_expert(layer, in, rows) : std::vector<T>();
    for (int64_t i = 0; i < all; i += 16) {
      const First lanes = first(all - i);
      store(normed + i, lanes, load(&total[i], lanes));
      if (shared.empty() || layer.after_experts) continue;
      store(normed + i, lanes, load(normed + i, lanes) + load(&shared[i], lanes));
    }
    if (layer.after_experts)
      norm(normed, layer.after_experts, normed, shared.empty() ? nullptr : shared.data(), rows, 1, m.hidden, eps,
           m.layer_norm != 0);
    if (layer.after_mlp) norm(normed, layer.after_mlp, x, x, rows, 1, m.hidden, eps, m.layer_norm != 0);
    else add_scaled(rows);
  }

  // The shared expert's output, with its sigmoid gate if it has one.
  std::vector<T> shared_expert(const Layer &layer, const T *in, int64_t rows) const {
    std::vector<T> made(rows * m.hidden), gate_logits(rows);
    multiply(layer.gate_up, in, up, nullptr, rows);
    apply_activation(m.activation, layer.activation_params, m.gated != 0, up, activated, rows, layer.down.inputs);
    multiply(layer.down, activated, made.data(), nullptr, rows);
    if (layer.after_beside) normalise(made.data(), layer.after_beside, made.data(), rows);
    if (!layer.shared_gate) return made;
    multiply(*layer.shared_gate, in, gate_logits.data(), nullptr, rows);
    const Floats one = broadcast(1);
    for (int64_t row = 0; row < rows; row++) {
      const Floats part = one / (one + exponential(zeros() - broadcast(front(load(&gate_logits[row], first(1))))));
      for (int64_t i = 0; i < m.hidden; i += 16) {
        const First lanes = first(m.hidden - i);
        T *const at = &made[row * m.hidden + i];
        store(at, lanes, part * load(at, lanes));
      }
    }
    return made;
  }

  const Model<T> &m;
  const Layer *layers;
  const Call<T> &c;
  const float eps;
  const int threads;
  T *x, *normed, *qkv, *attended, *mixed, *latent, *up, *activated, *per_layer, *scores;
  bool failed = false;
};

template <class T>
class Drafting {
 public:
  Drafting(const Model<T> &model, const Layer *layers, const Call<T> &first, const Chains<T> &chains)
      : model(model), layers(layers), first(first), d(chains), size(model.head.outputs), chains(d.sequences),
        no_hidden(first.num_layer_ids + 2), states(d.feeds_hidden ? d.sequences * model.hidden : 0) {
    std::fill(d.tokens, d.tokens + d.max_depth * d.sequences, -1);
    const int64_t *text = d.texts;
    for (int64_t i = 0, row = 0; i < d.sequences; i++) {
      Chain &chain = this->chains[i];
      active.push_back(i);
      chain.row = row++;
      if (!text) continue;
      chain.text.assign(text, text + d.lengths[i]);
      text += d.lengths[i];
      chain.guess.assign(text, text + d.num_guessed[i]);
      text += d.num_guessed[i];
      row += d.num_guessed[i];
    }
  }

  void run() {
    Call<T> call = first;
    for (Pass *pass = d.passes;; call = next()) {
      const auto begin = std::chrono::steady_clock::now();
      Decoder<T>(model, layers, call).run();
      const int threads = call.num_logits * size > 1000000 ? static_cast<int>(first.threads) : 1;
      parallel_for(active.size(), 1, threads, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) extend(active[i]);
      });
      if (pass) {
        const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
        const Chain &chain = chains[0];
        *pass++ = {call.rows, took.count(), chain.match, int64_t(chain.guess.size()), chain.num_correct};
      }
      if (!lay_out()) return;
    }
  }

 private:
  struct Chain {
    std::vector<int64_t> text, guess;
    int64_t row = 0;  // its first row of the last call's logits
    int64_t made = 0, match = 0, num_correct = 0;
    bool active = true;
    double confidence = 0;  // sum of top-1 log probabilities
  };

  // Samples a chain's next token, and one more for each correct guess.
  void extend(int64_t sequence) {
    Chain &chain = chains[sequence];
    chain.num_correct = 0;
    for (float *row = first.logits + chain.row * size; chain.active; row += size) {
      const int64_t at = chain.made * d.sequences + sequence, guessed = chain.guess.size();
      const int64_t place = choose_token(chain, sequence, row), token = d.tokens[at];
      chain.made++;
      const bool ends = token < 0 || d.depths[sequence] == chain.made;
      chain.active = !ends && chain.confidence >= d.floor;
      if (d.siblings && !ends && !chain.active) d.siblings[sequence] = next_best(at, sequence, row, place);
      chain.text.push_back(token);
      if (chain.num_correct == guessed || chain.guess[chain.num_correct] != token) return;
      chain.num_correct++;
    }
    chain.guess.resize(chain.num_correct);  // later guesses were not verified
  }

  // Adds the top-1 log probability of ``row``.
  void update_confidence(Chain &chain, const float *row) const {
    if (d.floor == -std::numeric_limits<double>::infinity()) return;
    const int64_t first = 0;
    int32_t id;
    float log;
    top_logprobs(row, size, 1, &first, 1, &first, &id, &log);
    chain.confidence += log;
  }

  // Samples from a row of logits. Returns the index in the row, or -1.
  int64_t choose_token(Chain &chain, int64_t sequence, float *row) const {
    update_confidence(chain, row);
    const int64_t at = chain.made * d.sequences + sequence;
    const float temperature = d.temperatures[sequence];
    float *const q = temperature != 0 && d.q ? d.q + at * d.num_ids : nullptr;
    std::vector<float> own_q(q && d.output_ids ? size : 0);
    float *const softmax_row = own_q.empty() ? q : own_q.data();
    if (temperature != 0)
      filter_row(row, size, temperature, d.thresholds[2 * sequence], d.top_ks[sequence], d.thresholds[2 * sequence + 1]);
    int64_t place = best(at, temperature, row, softmax_row);
    if (place < 0) return -1;
    if (softmax_row && d.quantiles) inverse_cdf(softmax_row, 1, size, d.quantiles + at, &place);
    d.tokens[at] = d.output_ids ? d.output_ids[place] : place;
    if (own_q.empty()) return place;
    std::memset(q, 0, d.num_ids * sizeof(float));
    for (int64_t i = 0; i < size; i++) q[d.output_ids[i]] = own_q[i];
    return place;
  }

  // Argmax of the row, with Gumbel noise where it samples; or -1.
  int64_t best(int64_t at, float temperature, const float *row, float *softmax_row) const {
    const int64_t noisy = temperature != 0 && d.keys;
    const uint64_t key = d.keys ? d.keys[at] : 0;
    float top;
    int64_t place;
    gumbel_max(row, 1, size, d.noise_ids, &key, &noisy, &top, &place, softmax_row, 1);
    return top > -std::numeric_limits<float>::infinity() ? place : -1;
  }

  // The token that would have been sampled if that at ``place`` were banned.
  int64_t next_best(int64_t at, int64_t sequence, float *row, int64_t place) const {
    row[place] = -std::numeric_limits<float>::infinity();
    const int64_t next = best(at, d.temperatures[sequence], row, nullptr);
    return next < 0 || !d.output_ids ? next : d.output_ids[next];
  }

  // Prompt lookup: guesses what follows a chain's last token. The next call reads and verifies the guess.
  void guess(Chain &chain, int64_t room) const {
    chain.match = 0;
    chain.guess.resize(d.texts ? *std::max_element(d.max_guess, d.max_guess + d.max_match + 1) : 0);
    if (chain.guess.empty()) return;
    const Found found = prompt_lookup(chain.text.data(), chain.text.size(), d.max_guess, d.max_match, room, chain.guess.data());
    chain.match = found.match;
    chain.guess.resize(found.count);
  }

  // Builds the next call's rows. False if there are none.
  bool lay_out() {
    std::vector<int64_t> on;
    const int64_t rows = ids.empty() ? first.rows : ids.size();  // of the last call
    ids.clear(), positions.clear(), spans.clear();
    for (size_t i = 0; i < active.size(); i++) {
      Chain &chain = chains[active[i]];
      if (!chain.active) {
        chain.guess.clear();
        chain.match = chain.num_correct = 0;
        continue;
      }
      if (d.feeds_hidden) {  // the last call's workspace begins with its output, then the normed one
        const T *const outputs = first.workspace + (d.feeds_hidden == 2 ? rounded(rows * model.hidden) : 0);
        std::memcpy(&states[on.size() * model.hidden], outputs + i * model.hidden, model.hidden * sizeof(T));
      }
      guess(chain, d.depths[active[i]] - chain.made - 1);
      chain.row = ids.size();
      const int64_t start = d.starts[active[i]], before = start + chain.made - 1, rows = 1 + chain.guess.size();
      ids.push_back(chain.text.back());
      ids.insert(ids.end(), chain.guess.begin(), chain.guess.end());
      for (int64_t row = 0; row < rows; row++) positions.push_back(before + row);
      spans.push_back({chain.row, rows, start, before, d.tables[active[i]], -1});
      on.push_back(active[i]);
    }
    active.swap(on);
    return !active.empty();
  }

  Call<T> next() {
    Call<T> call = first;
    plan = *first.plan;
    plan.spans = spans.data();
    plan.num_spans = spans.size();
    call.plan = &plan;
    call.rows = call.num_logits = ids.size();
    call.ids = ids.data();
    call.inputs_embeds = d.feeds_hidden ? states.data() : nullptr;
    call.positions = positions.data();
    call.hidden_out = no_hidden.data();
    return call;
  }

  const Model<T> &model;
  const Layer *const layers;
  const Call<T> &first;
  const Chains<T> &d;
  const int64_t size;
  std::vector<Chain> chains;
  std::vector<int64_t> active, ids, positions;
  std::vector<Span> spans;
  Plan plan;
  std::vector<T *> no_hidden;  // all null
  std::vector<T> states;
};

}  // namespace

template <class T>
bool decode(const Model<T> &model, const Layer *layers, const Call<T> &call) {
  return Decoder<T>(model, layers, call).run();
}

template <class T>
void draft(const Model<T> &model, const Layer *layers, const Call<T> &call, const Chains<T> &chains) {
  Drafting<T>(model, layers, call, chains).run();
}

template <class T>
int64_t workspace_needed(const Model<T> &m, const Layer *layers, int64_t rows, int64_t num_logits) {
  int64_t numbers = num_logits * m.head.outputs;
  const Widths w(m, layers);
  for (int64_t width :
       {m.hidden, w.input, w.made, w.attended, w.mixed, w.latent, 2 * m.intermediate, m.intermediate, m.layers * m.per_layer_size})
    numbers += rounded(rows * width);
  return numbers;
}

#define INSTANTIATE(KIND, T)                                                                \
  template bool decode(const Model<T> &, const Layer *, const Call<T> &);                   \
  template void draft(const Model<T> &, const Layer *, const Call<T> &, const Chains<T> &); \
  template int64_t workspace_needed(const Model<T> &, const Layer *, int64_t, int64_t);
FOR_EACH_TYPE(INSTANTIATE)
