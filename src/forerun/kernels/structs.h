// The structs that Python fills, as arrays of int64: one per field. structs.py names the same fields in the same order;
// __init__.py compares the names when the library is loaded. F(type, name)
#pragma once
#include <cstdint>

// Rows of one sequence.
#define SPAN(F) \
  F(int64_t, first) /* its first row in the batch */ \
  F(int64_t, rows) \
  F(int64_t, base) /* committed entries; a tree row's path follows them */ \
  F(int64_t, before) /* entries in the cache before this forward */ \
  F(int64_t, table) /* offset of its block table in ``tables`` */ \
  F(int64_t, paths) /* offset of its rows' (begin, length) pairs in ``paths``; -1: a chain */

// What attention needs to know of a batch.
#define PLAN(F) \
  F(const Span *, spans) \
  F(int64_t, num_spans) \
  F(const int64_t *, tables) /* block tables of all spans, end to end */ \
  F(int64_t, num_tables) \
  F(const int64_t *, paths) \
  F(int64_t, num_paths) \
  F(const int64_t *, entries) /* cache entries of all tree paths, end to end */ \
  F(int64_t, num_entries)

// The KV cache of one layer: strides in numbers, as in [page][head][slot][width]. The width is contiguous.
#define POOL(F) \
  F(int64_t, pages) \
  F(int64_t, page_size) \
  F(int64_t, kv_heads) \
  F(int64_t, width) /* head size of keys */ \
  F(int64_t, value_width) /* head size of values, at most ``width``; MLA's values are the first numbers of its keys */ \
  F(int64_t, key_page) \
  F(int64_t, key_head) \
  F(int64_t, key_slot) \
  F(int64_t, value_page) \
  F(int64_t, value_head) \
  F(int64_t, value_slot)

#define HEADS(F) \
  F(int64_t, heads) \
  F(int64_t, window) /* sliding window; 0: none */ \
  F(int64_t, sink_tokens) /* this many first keys are seen besides the window */ \
  F(int64_t, q_stride) /* numbers from row to row */ \
  F(int64_t, k_stride) \
  F(int64_t, v_stride) \
  F(const float *, bias) /* [heads, reach] position bias, the last column for the row's own position; or null */ \
  F(int64_t, reach) \
  F(const float *, sinks) /* [heads] attention sinks (gpt-oss), or null */

// Block-quantized weights, by ggml's names (quants.h): block size, bytes of 16 interleaved blocks. F(name, size, bytes)
#define QUANTS(F)                                                                                                   \
  F(q4_0, 32, 288) F(q4_1, 32, 320) F(q4_k, 256, 2368) F(q5_0, 32, 544) F(q5_1, 32, 576) F(q5_k, 256, 4416)         \
  F(q6_k, 256, 4384) F(q8_0, 32, 544) F(iq4_nl, 32, 288) F(iq4_xs, 256, 2208) F(mxfp4, 32, 272)                     \
  F(q2_k, 256, 1344) F(q3_k, 256, 1824) F(codes, 256, 2384)

// A linear layer. ``next``: a layer over the same inputs whose outputs follow, or null.
#define LINEAR(F) \
  F(int64_t, kind) /* a ``Kind`` */ \
  F(const char *, weight) \
  F(const float *, bias) \
  F(const float *, scales) /* int8 only, as the offsets */ \
  F(const int32_t *, offsets) \
  F(int64_t, outputs) \
  F(int64_t, inputs) \
  F(const Linear *, next)

// Activation functions.
#define ACTIVATIONS_OF(F) F(silu) F(gelu_tanh) F(xielu) F(clamped) F(sigmoid) F(relu2)

// A mixture of experts, in the place of gate_up and down. The router's ``Linear`` follows in memory.
#define EXPERTS(F) \
  F(int64_t, size) /* all experts */ \
  F(int64_t, first) /* index of the first expert of this rank */ \
  F(int64_t, num_local) /* experts of this rank */ \
  F(int64_t, top_k) \
  F(int64_t, normalize) /* norm_topk_prob: weights of the chosen experts add up to 1 */ \
  F(int64_t, sigmoid) /* scores are sigmoids, not a softmax */ \
  F(const float *, score_bias) /* [size] e_score_correction_bias, or null */ \
  F(double, scaling_factor) /* routed_scaling_factor */ \
  F(double, eps) /* added to the sum that sigmoid scores are divided by */ \
  F(int64_t, groups) /* n_group */ \
  F(int64_t, top_groups) /* topk_group: groups that may be chosen from */ \
  F(int64_t, group_top_k) /* best experts of a group whose scores add up to the group's */ \
  F(int64_t, activation) \
  F(int64_t, gated) \
  F(const float *, activation_params) /* or null */ \
  F(const Linear *, layers) /* gate_up and down of each local expert */ \
  F(const float *, scales) /* [size] per-expert scales of the weights, or null */

// Multi-head latent attention (DeepSeek). All heads share a cache entry, [kv latent | rotated key]. A row of qkv is
// [queries or their latent | entry]. The ``Linear`` q_b follows in memory.
#define LATENT(F) \
  F(int64_t, kv_lora_rank) \
  F(int64_t, q_lora_rank) /* 0: queries have no latent */ \
  F(int64_t, nope_dim) /* query numbers of a head without RoPE; they come first */ \
  F(int64_t, rope_dim) \
  F(int64_t, v_dim) /* head size of values */ \
  F(const float *, q_a_norm) \
  F(const float *, kv_a_norm) \
  F(double, eps) \
  F(const Linear *, k_b) /* per head: nope part of a query to the latent's width */ \
  F(const Linear *, v_b) /* per head: latent to values */

// Recurrent mixers: short convolution (LFM2), gated delta net, Mamba-2. Input row: [conv channels | gates | output
// gate]; of a short convolution [B | C | x]. The cache keeps the last rows' [conv channels | gates] as records.
#define MIXERS_OF(F) F(conv) F(delta) F(mamba)

#define MIXER(F) \
  F(int64_t, kind) /* a ``MixerKind`` */ \
  F(int64_t, channels) /* of the depthwise convolution */ \
  F(int64_t, columns) /* d_conv - 1: earlier rows that the convolution reads */ \
  F(int64_t, d_inner) /* width of the output */ \
  F(int64_t, gates) /* numbers of a row's gates */ \
  F(int64_t, heads) \
  F(int64_t, groups) /* of keys and queries */ \
  F(int64_t, key_dim) \
  F(int64_t, value_dim) \
  F(int64_t, tiled) /* head i reads group i % groups, not i / (heads / groups) */ \
  F(const float *, conv) /* [columns + 1, channels] weights, oldest row first */ \
  F(const float *, bias) /* of the convolution, or null */ \
  F(const float *, ssm_a) /* [heads] A = -exp(A_log) */ \
  F(const float *, dt_bias) /* [heads] */ \
  F(const float *, ssm_d) /* [heads] D of Mamba-2 */ \
  F(const float *, norm) /* [value_dim]; Mamba-2: [d_inner] or null */ \
  F(double, eps)

// The nodes of one sequence: rows of the batch, and records of earlier rows that are replayed.
#define RUN(F) \
  F(int64_t, slot) /* of its state */ \
  F(int64_t, first) /* its first node; runs follow each other */ \
  F(int64_t, nodes) \
  F(int64_t, checkpoint) /* the state after this node is stored; -1: none */

#define REPLAY(F) \
  F(const Run *, runs) \
  F(int64_t, num_runs) \
  F(int64_t, nodes) \
  F(const int64_t *, parents) /* [nodes] the node whose state it continues; -1: the stored state */ \
  F(const int64_t *, rows) /* [nodes] its row in the batch; -1: none */ \
  F(const int64_t *, copies) /* [nodes] another slot that gets the state after it; -1: none */ \
  F(const int64_t *, taps) /* [nodes, columns + 1] the convolution's input rows, indices into [rows | records read] */ \
  F(int64_t, columns) \
  F(const int64_t *, read) /* which records of the cache are read */ \
  F(int64_t, num_read) \
  F(const int64_t *, written) /* which records of the cache are written */ \
  F(const int64_t *, written_rows) /* the rows that go there */ \
  F(int64_t, num_written) \
  F(int64_t, slots) /* in the cache */ \
  F(int64_t, records) /* in the cache */

// One decoder layer. A null norm is absent.
#define LAYER(F) \
  F(const float *, norm_attention) /* before attention */ \
  F(const float *, norm_qk) /* QK norm of each head; values too if ``qk_norm_heads`` counts them */ \
  F(const float *, norm_query) /* QK norm over all heads together, as norm_key */ \
  F(const float *, norm_key) \
  F(const float *, after_attention) /* post-attention norm */ \
  F(const float *, norm_mlp) /* before the MLP */ \
  F(const float *, after_mlp) /* post-MLP norm */ \
  F(const float *, norm_token) /* MTP: attention reads [normed token embedding | normed input] */ \
  F(int64_t, rotary) /* index of its RoPE table; -1: no RoPE */ \
  F(int64_t, window) /* sliding window; 0: none */ \
  F(int64_t, sink_tokens) /* as in ``Heads`` */ \
  F(const Experts *, experts) /* or null */ \
  F(const float *, activation_params) /* or null */ \
  F(const float *, sinks) /* as in ``Heads`` */ \
  F(int64_t, gated) /* qkv ends with an output gate of attention */ \
  F(const Mixer *, mixer) /* or null */ \
  F(const Latent *, latent) /* or null */ \
  F(const Linear *, shared_gate) /* shared expert's gate: sigmoid of its one output; or null */ \
  F(int64_t, width) /* head size */ \
  F(int64_t, kv_heads) \
  F(int64_t, has_kv) /* qkv has keys and values; 0: only queries */ \
  F(int64_t, kv_source) /* the layer whose KV cache it reads: itself or an earlier one */ \
  F(int64_t, qk_norm_heads) /* heads of qkv that norm_qk applies to, from the first on */ \
  F(const float *, norm_experts) /* of the experts' input, instead of norm_mlp */ \
  F(const float *, norm_router) /* of the router's input, instead of norm_mlp */ \
  F(const float *, after_experts) /* of the experts' output, before the shared expert is added */ \
  F(const float *, after_beside) /* of the shared expert's output */ \
  F(const float *, after_inputs) /* of per_layer_out's output */ \
  F(double, scale) /* of the layer's output */

#define MODEL(F) \
  F(int64_t, heads) \
  F(int64_t, hidden) \
  F(int64_t, intermediate) /* the widest MLP or per-layer gate */ \
  F(int64_t, layers) \
  F(int64_t, num_embeddings) \
  F(const T *, embedding) /* [num_embeddings, hidden], or null: the rows of ``token_embd`` */ \
  F(const float *, norm) /* the final norm */ \
  F(const float *, norm_embedding) /* fc's norm of the token embedding; or null */ \
  F(const float *, norm_given) /* fc's norm of inputs_embeds; or null */ \
  F(int64_t, rotaries) /* RoPE tables */ \
  F(int64_t, activation) \
  F(int64_t, gated) /* gate_up is [gate | up]; 0: up only */ \
  F(int64_t, layer_norm) /* norms are layer norms, biases after the weights; 0: RMS norms */ \
  F(int64_t, parallel) /* attention and MLP read the same input */ \
  F(int64_t, norm_after_rope) /* QK norm after RoPE */ \
  F(int64_t, attn_temp_floor) /* Llama 4: queries at position p times 1 + scale * log(1 + p / floor) */ \
  F(int64_t, per_layer_size) /* of Gemma's per-layer embeddings; 0: none */ \
  F(const T *, per_layer_table) /* [num_embeddings, layers, size], or null: the rows of ``per_layer_rows`` */ \
  F(const float *, per_layer_norm) \
  F(double, eps) \
  F(double, scale) /* of attention scores */ \
  F(double, softcap) /* of attention scores; 0: none */ \
  F(double, logits_softcap) /* 0: none */ \
  F(double, embedding_scale) \
  F(double, residual_scale) /* of what attention and MLP add */ \
  F(double, logits_scale) \
  F(double, attn_temp_scale) /* 0: none */ \
  F(double, per_layer_scale)

// Sums ``part`` [rows, hidden], in float32 or the rows' dtype, over all ranks into ``total``. The call ends unless it
// returns 0.
using AllReduce = int (*)(const void *part, int64_t is_float, float *total, int64_t rows);

// One forward.
#define CALL(F) \
  F(int64_t, rows) \
  F(int64_t, threads) \
  F(const int64_t *, ids) /* [rows] token ids */ \
  F(const T *, inputs_embeds) /* [rows, hidden], or null: the embeddings of ids */ \
  F(const int64_t *, positions) /* [rows] */ \
  F(const float *const *, angles) /* per RoPE table: [num_angles, head size] */ \
  F(int64_t, num_angles) \
  F(const int64_t *, layer_ids) /* the layers to run */ \
  F(int64_t, num_layer_ids) \
  F(T *const *, hidden_out) /* where each layer's input goes, or null; then the normed and the raw output */ \
  F(const int64_t *, logit_rows) /* rows that get logits, ascending; read only if they are not all */ \
  F(int64_t, num_logits) \
  F(T *, workspace) \
  F(int64_t, workspace_size) \
  F(float *, logits) /* [num_logits, vocabulary]; null without an output layer */ \
  F(T *const *, kv) /* keys and values of every layer */ \
  F(const Pool *, pools) /* of every layer */ \
  F(const Plan *, plan) \
  F(AllReduce, all_reduce) /* sums over tensor-parallel ranks, or null: one rank */ \
  F(const Replay *, replay) /* null without recurrent layers */ \
  F(void *const *, states) /* records and states of every layer; null for attention */ \
  F(int64_t *, experts) /* counts the experts that are read; or null */

// What one forward of a chain cost, and what prompt lookup guessed in it.
#define PASS(F) \
  F(int64_t, rows) \
  F(int64_t, nanoseconds) \
  F(int64_t, match) /* length of the match */ \
  F(int64_t, num_guessed) /* guessed tokens that it read */ \
  F(int64_t, num_correct) /* guesses that equal the draft */

#define CHAINS(F) \
  F(int64_t, sequences) /* each has a row of logits in the first call, and one for each guess */ \
  F(int64_t, max_depth) /* the most tokens of one */ \
  F(const int64_t *, depths) /* [sequences] tokens wanted */ \
  F(const int64_t *, starts) /* [sequences] cache entries before the first drafted token's */ \
  F(const int64_t *, tables) /* [sequences] offset of its block table in the plan's tables */ \
  F(const float *, temperatures) /* [sequences] 0: greedy */ \
  F(const float *, thresholds) /* [sequences, 2] min-p and top-p */ \
  F(const int64_t *, top_ks) /* [sequences] */ \
  F(const int32_t *, noise_ids) /* [vocabulary] hashed ids that key the noise */ \
  F(const int64_t *, output_ids) /* [vocabulary] EAGLE's d2t: the token of each output; null: its index */ \
  F(const uint64_t *, keys) /* [max_depth, sequences] Gumbel noise keys; null: draw from the softmax */ \
  F(const double *, quantiles) /* [max_depth, sequences] uniform draws, for the inverse CDF */ \
  F(int64_t *, tokens) /* [max_depth, sequences] drafted tokens; -1: none, as all logits are -inf or one is NaN */ \
  F(float *, q) /* [max_depth, sequences, num_ids] softmax of each sampled row, or null */ \
  F(int64_t, num_ids) /* target vocabulary: larger than the draft's if there are output_ids */ \
  F(int64_t, feeds_hidden) /* the next input is [token | output]: 1: before the final norm (EAGLE), 2: after it (MTP); 0: token */ \
  F(double, floor) /* log of confidence_threshold: a chain ends below this sum of top-1 log probabilities */ \
  F(const int64_t *, texts) /* each followed by its guess, end to end; null: no prompt lookup */ \
  F(const int64_t *, lengths) /* [sequences] of texts */ \
  F(const int64_t *, num_guessed) /* [sequences] guessed tokens in the first call */ \
  F(const int64_t *, max_guess) /* [max_match + 1] most tokens to guess, by length of the match */ \
  F(int64_t, max_match) \
  F(Pass *, passes) /* [max_depth] of the first sequence; ends where rows is 0 */ \
  F(int64_t *, siblings) /* [sequences] second-best token where the chain ends for low confidence, or -1; or null */

#define FIELD(TYPE, NAME)                                   \
  TYPE NAME;                                                \
  static_assert(sizeof(TYPE) == 8, "a field takes 8 bytes");

struct Span {
  SPAN(FIELD)
};

struct Pass {
  PASS(FIELD)
};

struct Plan {
  PLAN(FIELD)

  // Keys that a row attends to.
  int64_t kv_len(const Span &span, int64_t row) const {
    return span.paths < 0 ? span.before + row + 1 : span.base + paths[span.paths + 2 * row + 1];
  }
  // The cache entry of its key number ``index``.
  int64_t entry(const Span &span, int64_t row, int64_t index) const {
    return span.paths < 0 || index < span.base ? index : entries[paths[span.paths + 2 * row] + index - span.base];
  }
};

struct Pool {
  POOL(FIELD)
};

struct Heads {
  HEADS(FIELD)
};

#define KIND(NAME, SIZE, BYTES) KIND_##NAME,
enum Kind : int64_t { KIND_own, KIND_int8, QUANTS(KIND) KINDS };  // own: the rows' dtype
#undef KIND

struct Linear {
  LINEAR(FIELD)
  // With those of the layers that follow.
  int64_t all_outputs() const { return outputs + (next ? next->all_outputs() : 0); }
};

#define ACTIVATION(NAME) ACTIVATION_##NAME,
enum Activation : int64_t { ACTIVATIONS_OF(ACTIVATION) ACTIVATIONS };
#undef ACTIVATION

struct Experts {
  EXPERTS(FIELD)
  Linear router;
};

struct Latent {
  LATENT(FIELD)
  Linear q_b;

  int64_t query() const { return nope_dim + rope_dim; }
  int64_t entry() const { return kv_lora_rank + rope_dim; }
  // Width of the queries, or of their latent, in a row of qkv.
  int64_t first(int64_t heads) const { return q_lora_rank ? q_lora_rank : heads * query(); }
  // Width of a row of the workspace.
  int64_t needed(int64_t heads) const { return q_lora_rank + heads * (query() + entry() + kv_lora_rank); }
};

#define MIXER_NAME(NAME) MIXER_##NAME,
enum MixerKind : int64_t { MIXERS_OF(MIXER_NAME) MIXERS };
#undef MIXER_NAME

struct Mixer {
  MIXER(FIELD)
};

struct Run {
  RUN(FIELD)
};

struct Replay {
  REPLAY(FIELD)
};

struct Layer {
  LAYER(FIELD)
  Linear qkv, out;                       // null weights: no attention
  Linear mixer_in, mixer_out;            // null weights: no mixer
  Linear gate_up, down;                  // the MLP, or with experts the shared expert; null weights: none
  Linear per_layer_gate, per_layer_out;  // Gemma's per_layer_input_gate and per_layer_projection
};

template <class T>
struct Model {
  MODEL(FIELD)
  Linear head, token_embd;                   // null weights: another rank or process has them
  Linear fc;                                 // EAGLE, MTP: [token embedding | inputs_embeds] to hidden; or null
  Linear per_layer_rows, per_layer_project;  // Gemma's embed_tokens_per_layer and per_layer_model_projection
};

template <class T>
struct Call {
  CALL(FIELD)
};

// Drafts a chain for each sequence: sample a token from its row of logits, feed it, and so on.
template <class T>
struct Chains {
  CHAINS(FIELD)
};
