// What Python lays out as arrays of int64, a field each. structs.py names the same fields in the same order; __init__.py
// compares the names when the library is loaded. F(type, name)
#pragma once
#include <cstdint>

// Rows of one sequence.
#define SPAN(F)                                                                                                     \
  F(int64_t, first)  /* its first row in the batch */                                                               \
  F(int64_t, rows)                                                                                     \
  F(int64_t, base)   /* committed entries: the part of a path that is not listed */                                 \
  F(int64_t, before) /* entries in the cache before this forward */                                                 \
  F(int64_t, table)  /* where its page table begins in ``tables`` */                                                \
  F(int64_t, paths)  /* where its rows' (begin, length) in ``paths`` begin; -1 for a chain */

#define PLAN(F)                                                                                                     \
  F(const Span *, spans)                                                                                            \
  F(int64_t, num_spans)                                                                                                 \
  F(const int64_t *, tables) /* pages of every span, end to end */                                                  \
  F(int64_t, num_tables)                                                                                            \
  F(const int64_t *, paths)                                                                                         \
  F(int64_t, num_paths)                                                                                             \
  F(const int64_t *, entries) /* those of every path */                                                             \
  F(int64_t, num_entries)

// One layer's keys and values, in numbers: [page][head][slot][width] or any strides with the width innermost.
#define POOL(F)                                                                                                     \
  F(int64_t, pages)                                                                                                 \
  F(int64_t, page_size)                                                                                             \
  F(int64_t, kv_heads)                                                                                              \
  F(int64_t, width)       /* of a key */                                                                            \
  F(int64_t, value_width) /* at most ``width``; values may be the first numbers of keys */                          \
  F(int64_t, key_page)                                                                                              \
  F(int64_t, key_head)                                                                                              \
  F(int64_t, key_slot)                                                                                              \
  F(int64_t, value_page)                                                                                            \
  F(int64_t, value_head)                                                                                            \
  F(int64_t, value_slot)

#define HEADS(F)                                                                                                    \
  F(int64_t, heads)                                                                                                 \
  F(int64_t, window)   /* 0: none */                                                                                \
  F(int64_t, q_stride) /* numbers from row to row */                                                                \
  F(int64_t, k_stride)                                                                                              \
  F(int64_t, v_stride)                                                                                              \
  F(const float *, bias) /* [heads, reach] added to scores, the last column to that of a row's own position, the one \
                            before it to that of the position before; or null */                                    \
  F(int64_t, reach)                                                                                                 \
  F(const float *, sinks) /* [heads] scores of a key without a value, which every row sees; or null */

// Weights in 2 to 8 bits with scales by blocks: inputs and bytes of a record of 16 outputs. F(name, inputs, bytes)
#define QUANTS(F)                                                                                                   \
  F(q4_0, 32, 288) F(q4_1, 32, 320) F(q4_k, 256, 2368) F(q5_0, 32, 544) F(q5_1, 32, 576) F(q5_k, 256, 4416)         \
  F(q6_k, 256, 4384) F(q8_0, 32, 544) F(iq4_nl, 32, 288) F(iq4_xs, 256, 2208) F(mxfp4, 32, 272)                     \
  F(q2_k, 256, 1344) F(q3_k, 256, 1824) F(codes, 256, 2384)

#define LINEAR(F)                                                                                                   \
  F(int64_t, kind) /* a ``Kind`` */                                                                                 \
  F(const char *, weight)                                                                                           \
  F(const float *, bias)                                                                                            \
  F(const float *, scales) /* of KIND_int8, as the offsets */                                                             \
  F(const int32_t *, offsets)                                                                                       \
  F(int64_t, outputs)                                                                                               \
  F(int64_t, inputs)                                                                                                \
  F(const Linear *, next) /* a layer over the same inputs whose outputs follow, or null */

// What is between a gate and the numbers that it multiplies.
#define ACTIVATIONS_OF(F) F(silu) F(gelu_tanh) F(xielu) F(clamped) F(sigmoid) F(relu2)

// Instead of gate_up and down: the experts of a row. Behind it the router's ``Linear``.
#define EXPERTS(F)                                                                                                  \
  F(int64_t, size)  /* how many there are in all */                                                                 \
  F(int64_t, first) /* the number of the first that is here */                                                      \
  F(int64_t, num_local)                                                                                                  \
  F(int64_t, top_k)                                                                                                \
  F(int64_t, normalize)     /* whether their weights add up to 1 */                                                \
  F(int64_t, sigmoid)        /* weights are the sigmoids of scores, not their softmax */                            \
  F(const float *, score_bias) /* [size] added to the weights where some are chosen, or null */                     \
  F(double, scaling_factor)          /* of the weights */                                                                   \
  F(double, eps)             /* added to the sum that sigmoids are divided by */                                    \
  F(int64_t, groups)         /* of experts, of which the ``top_groups`` are chosen among whose ``group_top_k`` highest add up to most */ \
  F(int64_t, top_groups)                                                                                                  \
  F(int64_t, group_top_k)                                                                                                  \
  F(int64_t, activation)                                                                                            \
  F(int64_t, gated)                                                                                                 \
  F(const float *, activation_params)  /* of the activation, or null */                                                       \
  F(const Linear *, layers)  /* gate_up and down of each that is here */                                            \
  F(const float *, scales)   /* what the weight of each one is multiplied by, or null */

// What is between qkv, the cache and out where the cache has a latent of each token and one turned key for all heads. A
// row of qkv is its queries, or their latent, and its entry. Behind it the ``Linear`` from that latent to queries.
#define LATENT(F)                                                                                                   \
  F(int64_t, kv_lora_rank)                                                                                                  \
  F(int64_t, q_lora_rank) /* 0: queries have no latent */                                                            \
  F(int64_t, nope_dim)      /* numbers of a head's query that are not turned, before those that are */                 \
  F(int64_t, rope_dim)                                                                                                \
  F(int64_t, v_dim)      /* of a head's values */                                                                   \
  F(const float *, q_a_norm)                                                                                      \
  F(const float *, kv_a_norm)                                                                                            \
  F(double, eps)                                                                                                    \
  F(const Linear *, k_b)   /* of each head, from a query's plain numbers to those of a latent */                   \
  F(const Linear *, v_b) /* of each head, from a latent */

// Instead of attention or beside it: a part of a layer that keeps a state. A row of its inputs is the row's record, what
// the convolution reads and then the gates, and behind it what the output is gated by; of a short convolution B, C and x.
#define MIXERS_OF(F) F(conv) F(delta) F(mamba)

#define MIXER(F)                                                                                                    \
  F(int64_t, kind)       /* a ``MixerKind`` */                                                                      \
  F(int64_t, channels)   /* that the convolution reads, each by itself */                                           \
  F(int64_t, columns)    /* rows before a row that it reads */                                                      \
  F(int64_t, d_inner)      /* numbers of a row's output */                                                            \
  F(int64_t, gates)                                                                                                 \
  F(int64_t, heads)                                                                                                 \
  F(int64_t, groups)     /* of keys and queries */                                                                  \
  F(int64_t, key_dim)                                                                                               \
  F(int64_t, value_dim)                                                                                             \
  F(int64_t, tiled)      /* head i has the keys of group i modulo the groups, not of its share of heads */          \
  F(const float *, conv) /* [columns + 1, channels], the oldest row first */                                        \
  F(const float *, bias) /* of the convolution, or null */                                                          \
  F(const float *, ssm_a) /* [heads] the logarithm of what a time step is multiplied by */                          \
  F(const float *, dt_bias) /* [heads] added to the time step */                                                       \
  F(const float *, ssm_d) /* [heads] what Mamba-2 multiplies x by and adds */                                        \
  F(const float *, norm) /* weights: [value_dim], or for Mamba-2 [inner] or null */                                 \
  F(double, eps)

// One sequence's nodes: rows of the batch, and records of rows that it had before.
#define RUN(F)                                                                                                      \
  F(int64_t, slot)                                                                                                  \
  F(int64_t, first) /* its first node: one run's come behind another's */                                           \
  F(int64_t, nodes)                                                                                                 \
  F(int64_t, checkpoint) /* behind this node the state is stored; -1: nowhere */

#define REPLAY(F)                                                                                                   \
  F(const Run *, runs)                                                                                              \
  F(int64_t, num_runs)                                                                                              \
  F(int64_t, nodes)                                                                                                 \
  F(const int64_t *, parents)  /* [nodes] the node whose state it changes; -1: the stored one */                     \
  F(const int64_t *, rows)    /* [nodes] its row in the batch; -1: none */                                          \
  F(const int64_t *, copies)  /* [nodes] the slot where the state behind it is stored as well; -1: nowhere */       \
  F(const int64_t *, taps)    /* [nodes, columns + 1] what the convolution reads, in [rows | records read] */       \
  F(int64_t, columns)                                                                                               \
  F(const int64_t *, read)    /* records of all slots, end to end */                                                \
  F(int64_t, num_read)                                                                                              \
  F(const int64_t *, written) /* where records of rows go */                                                        \
  F(const int64_t *, written_rows)    /* which rows those are */                                                            \
  F(int64_t, num_written)                                                                                           \
  F(int64_t, slots)                                                                                                 \
  F(int64_t, records)

// A norm that is null is not there.
#define LAYER(F)                                                                                                    \
  F(const float *, norm_attention)                                                                                  \
  F(const float *, norm_qk) /* of every head of queries and keys, and of values if ``normed`` counts them */         \
  F(const float *, norm_query) /* of all heads together, as norm_key */                                             \
  F(const float *, norm_key)                                                                                        \
  F(const float *, after_attention) /* of what attention adds, as after_mlp */                                      \
  F(const float *, norm_mlp)                                                                                        \
  F(const float *, after_mlp)                                                                                       \
  F(const float *, norm_token) /* attention reads the token's embedding, normed by this, beside the normed input */ \
  F(int64_t, rotary) /* which table of angles; -1: nothing is turned */                                             \
  F(int64_t, window)                                                                                                \
  F(const Experts *, experts) /* or null */                                                                         \
  F(const float *, activation_params)   /* of the activation, or null */                                                      \
  F(const float *, sinks)     /* as in ``Heads`` */                                                                  \
  F(int64_t, gated)           /* qkv makes a gate of attention's output behind the values */                        \
  F(const Mixer *, mixer)     /* or null */                                                                          \
  F(const Latent *, latent)   /* or null */                                                                         \
  F(const Linear *, shared_gate)    /* shared expert's gate: sigmoid of its one output; or null */ \
  F(int64_t, width)           /* of a head */                                                                       \
  F(int64_t, kv_heads)        /* of the keys and values that it reads */                                            \
  F(int64_t, has_kv)          /* qkv makes them, not queries alone */                                               \
  F(int64_t, kv_source)          /* the layer in whose part of the cache they are: this one, or one before it */       \
  F(int64_t, qk_norm_heads)          /* heads of qkv, from the first on, that have a norm_qk */                            \
  F(const float *, norm_experts)  /* of what experts read, in the place of norm_mlp */                              \
  F(const float *, norm_router)   /* as norm_experts */                                                             \
  F(const float *, after_experts) /* of what experts make, before that of the MLP beside them is added */           \
  F(const float *, after_beside)  /* of what that makes */                                                          \
  F(const float *, after_inputs)  /* of what ``per_layer_out`` adds */                                                \
  F(double, scale)            /* of the output */

#define MODEL(F)                                                                                                    \
  F(int64_t, heads)                                                                                                 \
  F(int64_t, hidden)                                                                                                \
  F(int64_t, intermediate) /* of the widest MLP, or gate of inputs */                                                      \
  F(int64_t, layers)                                                                                                \
  F(int64_t, num_embeddings) /* tokens with an embedding */                                                                  \
  F(const T *, embedding) /* or null: the rows of ``token_embd`` */                                                      \
  F(const float *, norm)                                                                                            \
  F(int64_t, rotaries)        /* tables of angles */                                                                \
  F(int64_t, activation)                                                                                            \
  F(int64_t, gated)           /* gate_up is a gate and what it multiplies, not the latter alone */                  \
  F(int64_t, layer_norm)         /* norms of rows are layer norms: weights, and biases behind them */                  \
  F(int64_t, parallel)        /* the MLP reads what attention read */                                               \
  F(int64_t, norm_after_rope)    /* norm_qk comes behind the rotary embedding */                                       \
  F(int64_t, attn_temp_floor)     /* Llama 4: queries at position p times 1 + scale * log(1 + p / floor) */           \
  F(int64_t, per_layer_size)          /* numbers of a per-layer embedding; 0: there are none */                             \
  F(const T *, per_layer_table)         /* [known, layers, inputs] of them, or null: the rows of ``per_layer_rows`` */            \
  F(const float *, per_layer_norm)                                                                                     \
  F(double, eps)                                                                                                    \
  F(double, scale)            /* of attention's scores */                                                           \
  F(double, softcap)          /* of attention's scores; 0: none */                                                  \
  F(double, logits_softcap)                                                                                         \
  F(double, embedding_scale)                                                                                        \
  F(double, residual_scale)   /* of what attention and MLP add */                                                   \
  F(double, logits_scale)                                                                                           \
  F(double, attn_temp_scale)                                                                                           \
  F(double, per_layer_scale)

// Adds up ``part`` [rows, hidden], float if it is ``wide`` and else as the rows are, with those of other processes, in
// float. What it returns is 0, or the call ends.
using AllReduce = int (*)(const void *part, int64_t is_float, float *total, int64_t rows);

#define CALL(F)                                                                                                     \
  F(int64_t, rows)                                                                                                  \
  F(int64_t, threads)                                                                                               \
  F(const int64_t *, ids)       /* tokens */                                                                        \
  F(const T *, inputs_embeds)           /* [rows, hidden], or null: the embeddings of ids */                               \
  F(const int64_t *, positions) /* [rows] */                                                                        \
  F(const float *const *, angles) /* of each table, [num_angles, width of its layers' heads] */                     \
  F(int64_t, num_angles)                                                                                            \
  F(const int64_t *, layer_ids) /* the layers to run */                                                                 \
  F(int64_t, num_layer_ids)                                                                                                 \
  F(T *const *, hidden_out) /* where each layer's input goes, or null; then the normed and the raw output */        \
  F(const int64_t *, logit_rows) /* the rows whose logits are wanted, ascending; read if they are not all */          \
  F(int64_t, num_logits)                                                                                               \
  F(T *, workspace)                                                                                                 \
  F(int64_t, workspace_size)                                                                                        \
  F(float *, logits)   /* [num_out, vocabulary]; null where the model has no head */                                \
  F(T *const *, kv) /* keys and values of every layer */                                                         \
  F(const Pool *, pools) /* of every layer */                                                                       \
  F(const Plan *, plan)                                                                                             \
  F(AllReduce, all_reduce) /* of attention's and MLP's partial sums over ranks, or null: one rank */                                 \
  F(const Replay *, replay)   /* null where no layer keeps a state */                                               \
  F(void *const *, states)    /* records and states of every layer; read for those that keep some */                \
  F(int64_t *, experts) /* grows by the experts that are read, those of all layers, or null */

// A call that drafts for a chain.
#define PASS(F)                                                                                                     \
  F(int64_t, rows)                                                                                                  \
  F(int64_t, nanoseconds)                                                                                           \
  F(int64_t, match)       /* tokens of the text's end that were found before it */                                  \
  F(int64_t, num_guessed)     /* tokens that followed there, and were read */                                           \
  F(int64_t, num_correct)       /* how many of them were drafted */

#define CHAINS(F)                                                                                                   \
  F(int64_t, sequences)       /* each with a row of the first call's logits, and one for each token ``num_guessed``, in order */ \
  F(int64_t, max_depth)         /* the most tokens of one */                                                          \
  F(const int64_t *, depths)  /* [sequences] tokens wanted */                                                           \
  F(const int64_t *, starts)  /* [sequences] entries of the cache before the first drafted token's */                   \
  F(const int64_t *, tables)  /* [sequences] where its pages begin in the plan's tables */                              \
  F(const float *, temperatures)     /* [sequences] its temperature; 0: the likeliest token */                          \
  F(const float *, thresholds)    /* [sequences, 2] its min-p and top-p */                                              \
  F(const int64_t *, top_ks)  /* [sequences] */                                                                         \
  F(const int32_t *, noise_ids)   /* [vocabulary] hashed ids that key the noise */                                                                       \
  F(const int64_t *, output_ids)   /* [vocabulary] EAGLE's d2t: the token of each output, or null: its index */ \
  F(const uint64_t *, keys)   /* [longest, sequences] of each choice's noise, or null: drawn from the softmax */        \
  F(const double *, quantiles)    /* [longest, sequences] where in its cumulative sum */                                \
  F(int64_t *, tokens)        /* [longest, sequences] what was chosen; -1: nothing, as no id is permitted or one is NaN */ \
  F(float *, q)               /* [longest, sequences, num_ids] softmax of each row with a temperature, or null */       \
  F(int64_t, num_ids)         /* target vocabulary: more than the draft's where there are output_ids */     \
  F(int64_t, feeds_hidden)           /* whether the output before the last norm is the next input, beside the token (EAGLE) */ \
  F(double, min_confidence)            /* a chain ends once the logs of its likeliest tokens' chances add up to less */          \
  F(const int64_t *, texts)   /* end to end, each with the tokens ``num_guessed`` behind it; null: nothing is guessed */      \
  F(const int64_t *, lengths) /* [sequences] of the texts */                                                            \
  F(const int64_t *, num_guessed) /* [sequences] tokens of the first call behind the one that its chain begins with */      \
  F(const int64_t *, max_guess)    /* [reach + 1] tokens to guess, by how many tokens the match has */                        \
  F(int64_t, max_match)                                                                                                 \
  F(Pass *, passes)           /* [longest] of the first sequence; no rows: there was none */                             \
  F(int64_t *, siblings)      /* [sequences] the next best choice beside the token that is below the floor, or -1; or null */

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

  int64_t seen(const Span &span, int64_t row) const {
    return span.paths < 0 ? span.before + row + 1 : span.base + paths[span.paths + 2 * row + 1];
  }
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
enum Kind : int64_t { KIND_own, KIND_int8, QUANTS(KIND) KINDS };  // own: as the rows are
#undef KIND

struct Linear {
  LINEAR(FIELD)
  // Of it and what follows.
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
  // Numbers of a row of qkv before its entry.
  int64_t first(int64_t heads) const { return q_lora_rank ? q_lora_rank : heads * query(); }
  // Numbers of a row of the workspace.
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
  Linear qkv, out;       // of attention; there is none where qkv's weight is null
  Linear mixer_in, mixer_out;  // before and behind the mixer
  Linear gate_up, down;  // of the MLP; in the place of experts, or beside them; there is none where gate_up's weight is null
  Linear per_layer_gate, per_layer_out;  // gate the layer's embedding, and read it
};

template <class T>
struct Model {
  MODEL(FIELD)
  Linear head, token_embd;  // either may be elsewhere: its weight is null
  Linear mix;  // makes the first layer's input of [the token's embedding, the given row]; its weight may be null
  Linear per_layer_rows, per_layer_project;  // of per-layer embeddings: their rows, and what is made of the first layer's input
};

template <class T>
struct Call {
  CALL(FIELD)
};

// A chain of drafted tokens for each sequence: choose a token from its row of logits, feed it, and so on.
template <class T>
struct Chains {
  CHAINS(FIELD)
};
