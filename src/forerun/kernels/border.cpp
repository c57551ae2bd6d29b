// The C API that Python calls. It checks every size, and every index in a list, against the sizes that come with it, so
// that no call reads or writes outside of the caller's memory. Python guarantees that lists have their stated length,
// and tensors their type and shape. Functions return 0 or an ``Error``, which __init__.py raises.
#include "blocks.h"
#include "kernels.h"
#include "rows.h"
#include "tiles.h"

#include <new>

namespace {

enum Error : int {
  OK, NULL_POINTER, SIZE, HEADS_SIZE, SPAN_RANGE, PAGE_TABLE, PAGE_INDEX, PATH_RANGE, PATH_ENTRY, TOKEN_RANGE,
  POSITION_RANGE, LAYER_RANGE, ROW_RANGE, WORKSPACE_SIZE, CHAIN_RANGE, LAYER_KIND, MEMORY, ALL_REDUCE_FAILED,
  UNKNOWN,
};
const char *const MESSAGES[] = {
    "fine",
    "an address is null",
    "a number of rows, columns, layers or threads is out of range",
    "the numbers of heads or their width are out of range",
    "a span's rows or entries are out of range",
    "a span's page table is too short",
    "a page lies outside the pool",
    "a path is out of range",
    "an entry of a path lies outside its sequence",
    "a token has no embedding",
    "a position has no angles",
    "a layer is out of range",
    "a row is out of range or out of order",
    "the working workspace is too small",
    "a drafted chain is out of range",
    "a layer is of an unknown kind or has too many parts",
    "out of memory",
    "an all-reduce failed",
    "unknown",
};

constexpr int64_t MOST = int64_t(1) << 31;       // rows, columns, ids
constexpr int64_t MOST_INT8 = int64_t(1) << 16;  // inputs: integer sums fit 32 bits
constexpr int64_t MOST_PARTS = 8;                // of a joined layer
constexpr int64_t MOST_GUESSED = 64;             // tokens of prompt lookup
constexpr int MOST_THREADS = 1 << 12;

#define REQUIRE(CONDITION, ERROR) \
  if (!(CONDITION)) return ERROR

bool within(int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; }
bool has_kernels(int64_t kind) {
  return within(kind, 0, KIND_int8) || (within(kind, 0, KINDS - 1) && std::get<0>(quant_kernels[kind]).linear);
}
bool threads_fit(int64_t threads) { return within(threads, 1, MOST_THREADS); }
template <class... P>
bool non_null(const P &...pointers) {
  return (... && (pointers != nullptr));
}

template <class F>
int guarded(F run) {
  try {
    run();
    return OK;
  } catch (const std::bad_alloc &) {
    return MEMORY;
  }
}

Error pool_fits(const Pool &p) {
  REQUIRE(within(p.pages, 1, MOST) && within(p.page_size, 1, MOST), SIZE);
  REQUIRE(within(p.kv_heads, 1, MOST) && within(p.width, 2, WIDEST) && p.width % 2 == 0, HEADS_SIZE);
  REQUIRE(within(p.value_width, 2, p.width) && p.value_width % 2 == 0, HEADS_SIZE);
  for (int64_t stride : {p.key_page, p.key_head, p.key_slot, p.value_page, p.value_head, p.value_slot})
    REQUIRE(within(stride, 0, int64_t(1) << 48), SIZE);
  return OK;
}

// The block table of ``entries`` entries that begins at ``begin``.
Error pages_fit(const Plan &plan, const Pool &pool, int64_t begin, int64_t entries) {
  REQUIRE(within(entries, 0, MOST), SPAN_RANGE);
  const int64_t count = (entries + pool.page_size - 1) / pool.page_size;
  REQUIRE(begin >= 0 && begin <= plan.num_tables && count <= plan.num_tables - begin, PAGE_TABLE);
  REQUIRE(!count || plan.tables, NULL_POINTER);
  for (int64_t i = begin; i < begin + count; i++) REQUIRE(within(plan.tables[i], 0, pool.pages - 1), PAGE_INDEX);
  return OK;
}

Error paths_fit(const Plan &plan, const Span &span, bool stores) {
  if (span.paths < 0) return stores ? OK : PATH_RANGE;
  REQUIRE(span.paths <= plan.num_paths && 2 * span.rows <= plan.num_paths - span.paths, PATH_RANGE);
  REQUIRE(plan.paths && (plan.entries || !stores), NULL_POINTER);
  for (int64_t row = 0; row < span.rows; row++) {
    const int64_t begin = plan.paths[span.paths + 2 * row], length = plan.paths[span.paths + 2 * row + 1];
    REQUIRE(stores ? length >= 1 : !length && span.base >= 1, PATH_RANGE);
    REQUIRE(begin >= 0 && begin <= plan.num_entries && length <= plan.num_entries - begin, PATH_RANGE);
    for (int64_t i = begin; i < begin + length; i++)
      REQUIRE(within(plan.entries[i], 0, span.before + span.rows - 1), PATH_ENTRY);
  }
  return OK;
}

// With ``stores`` false (cross-attention) rows attend to entries that exist already.
Error plan_fits(const Plan &plan, const Pool &pool, int64_t rows, bool stores = true) {
  REQUIRE(within(plan.num_spans, 1, MOST), SPAN_RANGE);
  REQUIRE(plan.spans, NULL_POINTER);
  for (int64_t s = 0; s < plan.num_spans; s++) {
    const Span &span = plan.spans[s];
    REQUIRE(span.first >= 0 && span.rows >= 0 && span.first <= rows && span.rows <= rows - span.first, SPAN_RANGE);
    REQUIRE(span.base >= 0 && span.base <= span.before && span.before < MOST, SPAN_RANGE);
    const int64_t entries = span.before + (stores ? span.rows : 0);
    if (const Error error = pages_fit(plan, pool, span.table, entries)) return error;
    if (const Error error = paths_fit(plan, span, stores)) return error;
  }
  return OK;
}

Error bias_fits(const Plan &plan, const Heads &heads) {
  if (!heads.bias) return OK;
  for (int64_t s = 0; s < plan.num_spans; s++)
    for (int64_t row = 0; row < plan.spans[s].rows; row++)
      REQUIRE(plan.kv_len(plan.spans[s], row) <= heads.reach, SPAN_RANGE);
  return OK;
}

// A layer and its parts.
Error layer_fits(const Linear &all, int64_t inputs, int64_t outputs) {
  int64_t left = outputs, parts = 0;
  for (const Linear *l = &all; l; l = l->next, parts++) {
    REQUIRE(parts < MOST_PARTS && has_kernels(l->kind), LAYER_KIND);
    REQUIRE(l->weight, NULL_POINTER);
    REQUIRE(l->inputs == inputs && within(l->outputs, 1, left), SIZE);
    REQUIRE(l->kind != KIND_int8 || non_null(l->scales, l->offsets), NULL_POINTER);
    REQUIRE(l->kind != KIND_int8 || inputs <= MOST_INT8, SIZE);
    left -= l->outputs;
  }
  REQUIRE(!left, SIZE);
  return OK;
}

Error activation_fits(int64_t activation, const float *params, bool gated) {
  REQUIRE(within(activation, 0, ACTIVATIONS - 1) && (gated || activation != ACTIVATION_clamped), LAYER_KIND);
  REQUIRE(params || (activation != ACTIVATION_xielu && activation != ACTIVATION_clamped), NULL_POINTER);
  return OK;
}

// gate_up and down.
Error mlp_fits(const Linear &gate_up, const Linear &down, int64_t hidden, bool gated) {
  REQUIRE(within(down.inputs, 1, MOST), SIZE);
  if (const Error error = layer_fits(gate_up, hidden, (gated ? 2 : 1) * down.inputs)) return error;
  return layer_fits(down, down.inputs, hidden);
}

Error experts_fit(const Experts &e, int64_t hidden) {
  REQUIRE(within(e.size, 1, MOST) && within(e.first, 0, e.size) && within(e.num_local, 0, e.size - e.first), SIZE);
  REQUIRE(within(e.top_k, 1, e.size), SIZE);
  REQUIRE(within(e.gated, 0, 1), LAYER_KIND);
  if (const Error error = activation_fits(e.activation, e.activation_params, e.gated != 0)) return error;
  REQUIRE(!e.num_local || e.layers, NULL_POINTER);
  REQUIRE(within(e.sigmoid, 0, 1) && (e.sigmoid || !e.score_bias), LAYER_KIND);
  REQUIRE(within(e.groups, 1, e.size) && within(e.top_groups, 1, e.groups) && e.size % e.groups == 0, SIZE);
  const int64_t each = e.size / e.groups;
  REQUIRE(within(e.group_top_k, 1, each) && e.top_k <= e.top_groups * each, SIZE);
  if (const Error error = layer_fits(e.router, hidden, e.size)) return error;
  for (int64_t i = 0; i < e.num_local; i++)
    if (const Error error = mlp_fits(e.layers[2 * i], e.layers[2 * i + 1], hidden, e.gated != 0)) return error;
  return OK;
}

Error mixer_fits(const Mixer &m) {
  REQUIRE(within(m.kind, 0, MIXERS - 1), LAYER_KIND);
  REQUIRE(within(m.columns, 1, MOST_TAPS - 1) && within(m.channels, 1, MOST) && m.conv, SIZE);
  if (m.kind == MIXER_conv) {
    REQUIRE(m.d_inner == m.channels && !m.gates, SIZE);
    return OK;
  }
  for (int64_t size : {m.heads, m.groups, m.key_dim, m.value_dim}) REQUIRE(within(size, 1, MOST_INT8), HEADS_SIZE);
  REQUIRE(m.heads % m.groups == 0 && m.d_inner == m.heads * m.value_dim && m.d_inner % m.groups == 0, HEADS_SIZE);
  REQUIRE(m.channels == m.d_inner + 2 * m.groups * m.key_dim, HEADS_SIZE);
  REQUIRE(m.gates == m.heads * (m.kind == MIXER_delta ? 2 : 1), HEADS_SIZE);
  REQUIRE(non_null(m.ssm_a, m.dt_bias) && (m.kind == MIXER_delta ? m.norm : m.ssm_d), NULL_POINTER);
  return OK;
}

Error heads_fit(const Linear *layers, int64_t heads, int64_t inputs, int64_t outputs) {
  REQUIRE(layers, NULL_POINTER);
  for (int64_t head = 0; head < heads; head++) {
    REQUIRE(!layers[head].next, LAYER_KIND);
    if (const Error error = layer_fits(layers[head], inputs, outputs)) return error;
  }
  return OK;
}

// MLA. The layer's ``width`` is that of a RoPE table's row.
Error latent_fits(const Layer &l, int64_t heads, int64_t hidden) {
  const Latent &n = *l.latent;
  for (int64_t size : {n.kv_lora_rank, n.nope_dim, n.rope_dim, n.v_dim}) REQUIRE(within(size, 1, WIDEST), HEADS_SIZE);
  REQUIRE(n.rope_dim == l.width && l.kv_heads == 1 && l.has_kv, HEADS_SIZE);
  REQUIRE(n.kv_lora_rank % 2 == 0 && n.entry() <= WIDEST && within(n.q_lora_rank, 0, MOST), HEADS_SIZE);
  REQUIRE(heads <= MOST_INT8 && !l.norm_qk && !l.norm_query && !l.norm_key && !l.gated && !l.norm_token, LAYER_KIND);
  REQUIRE(n.kv_a_norm && (n.q_a_norm || !n.q_lora_rank), NULL_POINTER);
  if (const Error error = layer_fits(l.qkv, hidden, n.first(heads) + n.entry())) return error;
  if (n.q_lora_rank)
    if (const Error error = layer_fits(n.q_b, n.q_lora_rank, heads * n.query())) return error;
  if (const Error error = heads_fit(n.k_b, heads, n.nope_dim, n.kv_lora_rank)) return error;
  if (const Error error = heads_fit(n.v_b, heads, n.kv_lora_rank, n.v_dim)) return error;
  return layer_fits(l.out, heads * n.v_dim, hidden);
}

// The pool's entries are as wide as the layer's.
Error entry_fits(const Pool &p, const Layer &l) {
  const int64_t width = l.latent ? l.latent->entry() : l.width, value = l.latent ? l.latent->kv_lora_rank : l.width;
  REQUIRE(p.kv_heads == l.kv_heads && p.width == width && p.value_width == value, HEADS_SIZE);
  return OK;
}

// Width of mixer_in's output.
int64_t mixer_inputs(const Mixer &m) {
  return m.kind == MIXER_conv ? 3 * m.channels : m.channels + m.gates + m.d_inner;
}

// Two absent projections.
Error absent(const Linear &one, const Linear &other) {
  for (const Linear *l : {&one, &other}) REQUIRE(!l->weight && !l->next && !l->inputs && !l->outputs, SIZE);
  return OK;
}

Error mixing_fits(const Layer &l, int64_t hidden) {
  if (!l.mixer) return absent(l.mixer_in, l.mixer_out);
  if (const Error error = mixer_fits(*l.mixer)) return error;
  if (const Error error = layer_fits(l.mixer_in, hidden, mixer_inputs(*l.mixer))) return error;
  return layer_fits(l.mixer_out, l.mixer->d_inner, hidden);
}

Error list_fits(const int64_t *list, int64_t count, int64_t least, int64_t most, Error error) {
  REQUIRE(within(count, 0, MOST), SIZE);
  REQUIRE(!count || list, NULL_POINTER);
  for (int64_t i = 0; i < count; i++) REQUIRE(within(list[i], least, most), error);
  return OK;
}

Error replay_fits(const Replay &p, int64_t rows) {
  REQUIRE(within(p.num_runs, 1, MOST) && within(p.columns, 1, MOST_TAPS - 1), SIZE);
  REQUIRE(within(p.slots, 1, MOST) && within(p.records, 1, MOST) && within(p.num_read, 0, MOST), SIZE);
  REQUIRE(p.runs && p.parents, NULL_POINTER);
  int64_t nodes = 0;
  for (int64_t r = 0; r < p.num_runs; r++) {
    const Run &run = p.runs[r];
    REQUIRE(within(run.slot, 0, p.slots - 1) && run.first == nodes && within(run.nodes, 0, MOST), SPAN_RANGE);
    nodes += run.nodes;
    REQUIRE(nodes <= p.nodes && (run.checkpoint == -1 || within(run.checkpoint, run.first, nodes - 1)), SPAN_RANGE);
    for (int64_t node = run.first; node < nodes; node++)
      REQUIRE(p.parents[node] == -1 || within(p.parents[node], run.first, node - 1), PATH_ENTRY);
  }
  REQUIRE(nodes == p.nodes, SPAN_RANGE);
  if (const Error error = list_fits(p.rows, p.nodes, -1, rows - 1, ROW_RANGE)) return error;
  if (const Error error = list_fits(p.copies, p.nodes, -1, p.slots - 1, PAGE_INDEX)) return error;
  const int64_t taps = p.nodes * (p.columns + 1);
  if (const Error error = list_fits(p.taps, taps, 0, rows + p.num_read - 1, PATH_ENTRY)) return error;
  if (const Error error = list_fits(p.read, p.num_read, 0, p.records - 1, PAGE_INDEX)) return error;
  if (const Error error = list_fits(p.written, p.num_written, 0, p.records - 1, PAGE_INDEX)) return error;
  return list_fits(p.written_rows, p.num_written, 0, rows - 1, ROW_RANGE);
}

template <class T>
bool has_embedding(const Model<T> &m) {
  return m.embedding || m.token_embd.weight;
}

// An embedding stored as a linear layer.
Error rows_of_layer_fit(const Linear &l, int64_t count, int64_t width) {
  REQUIRE(l.kind != KIND_int8 && !l.next, LAYER_KIND);
  return layer_fits(l, width, count);
}

// Gemma's per-layer embeddings.
template <class T>
Error per_layer_fits(const Model<T> &m) {
  REQUIRE(within(m.per_layer_size, 0, m.gated ? m.intermediate : 0), SIZE);
  if (!m.per_layer_size) return absent(m.per_layer_rows, m.per_layer_project);
  REQUIRE(m.per_layer_norm, NULL_POINTER);
  if (const Error error = layer_fits(m.per_layer_project, m.hidden, m.layers * m.per_layer_size)) return error;
  return m.per_layer_table ? OK : rows_of_layer_fit(m.per_layer_rows, m.num_embeddings, m.layers * m.per_layer_size);
}

// Attention's projections, and the layer whose KV cache it reads.
template <class T>
Error attention_fits(const Model<T> &m, const Layer *layers, int64_t index) {
  const Layer &l = layers[index];
  if (!l.qkv.weight) return absent(l.qkv, l.out);
  REQUIRE(within(l.kv_heads, 1, MOST) && m.heads % l.kv_heads == 0, HEADS_SIZE);
  REQUIRE(within(l.width, 2, WIDEST) && l.width % 2 == 0, HEADS_SIZE);
  REQUIRE(within(l.has_kv, 0, 1) && within(l.kv_source, l.has_kv ? index : 0, index), LAYER_RANGE);
  REQUIRE(l.has_kv || !l.norm_key, LAYER_KIND);
  if (l.latent) {
    REQUIRE(!m.parallel, LAYER_KIND);
    return latent_fits(l, m.heads, m.hidden);
  }
  const Layer &source = layers[l.kv_source];
  REQUIRE(l.kv_source == index || source.has_kv, LAYER_RANGE);
  REQUIRE(source.qkv.weight && !source.latent && source.kv_heads == l.kv_heads && source.width == l.width, HEADS_SIZE);
  const int64_t made = l.has_kv * l.kv_heads, queries = m.heads * l.width;
  REQUIRE(!l.norm_qk || within(l.qk_norm_heads, 0, m.heads + 2 * made), HEADS_SIZE);
  const int64_t qkv = queries * (1 + l.gated) + 2 * made * l.width;
  if (const Error error = layer_fits(l.qkv, m.hidden * (l.norm_token ? 2 : 1), qkv)) return error;
  return layer_fits(l.out, queries, m.hidden);
}

template <class T>
Error model_fits(const Model<T> &m, const Layer *layers) {
  REQUIRE(within(m.heads, 1, MOST), HEADS_SIZE);
  REQUIRE(within(m.hidden, 1, MOST) && within(m.intermediate, 0, MOST) && within(m.num_embeddings, 1, MOST), SIZE);
  REQUIRE(within(m.rotaries, 0, m.layers), SIZE);
  REQUIRE(m.norm, NULL_POINTER);
  REQUIRE(m.attn_temp_floor >= 1, SIZE);
  REQUIRE(within(m.layers, 1, MOST) && within(m.head.outputs, m.head.weight ? 1 : 0, m.head.weight ? MOST : 0), SIZE);
  REQUIRE(!m.head.next, SIZE);
  if (!m.embedding && has_embedding(m))
    if (const Error error = rows_of_layer_fit(m.token_embd, m.num_embeddings, m.hidden)) return error;
  if (const Error error = per_layer_fits(m)) return error;
  if (m.head.weight)
    if (const Error error = layer_fits(m.head, m.hidden, m.head.outputs)) return error;
  REQUIRE(!m.fc.weight || has_embedding(m), NULL_POINTER);
  REQUIRE(m.fc.weight || (!m.norm_embedding && !m.norm_given), LAYER_KIND);
  if (m.fc.weight)
    if (const Error error = layer_fits(m.fc, 2 * m.hidden, m.hidden)) return error;
  for (int64_t i = 0; i < m.layers; i++) {
    const Layer &l = layers[i];
    REQUIRE((l.norm_attention && has_embedding(m)) || !l.norm_token, NULL_POINTER);
    REQUIRE(!m.parallel || (!l.experts && !l.norm_mlp && !l.norm_token), LAYER_KIND);
    REQUIRE(l.window >= 0 && within(l.sink_tokens, 0, BLOCK) && within(l.rotary, -1, m.rotaries - 1), SIZE);
    REQUIRE(within(l.gated, 0, 1) && !(!l.qkv.weight && (l.gated || l.norm_token || m.parallel)), LAYER_KIND);
    REQUIRE(!(l.mixer && (l.norm_token || m.parallel)), LAYER_KIND);
    if (const Error error = mixing_fits(l, m.hidden)) return error;
    if (const Error error = attention_fits(m, layers, i)) return error;
    if (!m.per_layer_size) {
      if (const Error error = absent(l.per_layer_gate, l.per_layer_out)) return error;
    } else {
      if (const Error error = activation_fits(m.activation, l.activation_params, true)) return error;
      if (const Error error = layer_fits(l.per_layer_gate, m.hidden, m.per_layer_size)) return error;
      if (const Error error = layer_fits(l.per_layer_out, m.per_layer_size, m.hidden)) return error;
    }
    if (l.experts) {
      if (const Error error = experts_fit(*l.experts, m.hidden)) return error;
      if (l.shared_gate)
        if (const Error error = layer_fits(*l.shared_gate, m.hidden, 1)) return error;
    }
    if (!l.gate_up.weight && (l.experts || !m.parallel)) {
      if (const Error error = absent(l.gate_up, l.down)) return error;
      continue;
    }
    REQUIRE(l.down.inputs <= m.intermediate, SIZE);
    if (const Error error = activation_fits(m.activation, l.activation_params, m.gated)) return error;
    if (const Error error = mlp_fits(l.gate_up, l.down, m.hidden, m.gated)) return error;
  }
  return OK;
}

template <class T>
Error call_fits(const Model<T> &m, const Layer *layers, const Call<T> &c) {
  REQUIRE(within(c.rows, 1, MOST) && threads_fit(c.threads) && within(c.num_layer_ids, 0, m.layers), SIZE);
  REQUIRE(non_null(c.ids, c.positions, c.angles, c.hidden_out, c.workspace, c.kv, c.pools, c.plan), NULL_POINTER);
  REQUIRE((!m.fc.weight && has_embedding(m)) || c.inputs_embeds, NULL_POINTER);
  for (int64_t table = 0; table < m.rotaries; table++) REQUIRE(c.angles[table], NULL_POINTER);
  REQUIRE(within(c.num_logits, 0, c.rows), ROW_RANGE);
  REQUIRE(workspace_needed(m, layers, c.rows, c.num_logits) <= c.workspace_size, WORKSPACE_SIZE);
  REQUIRE(!c.num_layer_ids || c.layer_ids, NULL_POINTER);
  for (int64_t i = 0; i < c.num_layer_ids; i++) REQUIRE(within(c.layer_ids[i], 0, m.layers - 1), LAYER_RANGE);
  for (int64_t row = 0; row < c.rows; row++) {
    REQUIRE(within(c.ids[row], 0, m.num_embeddings - 1), TOKEN_RANGE);
    REQUIRE(within(c.positions[row], 0, c.num_angles - 1), POSITION_RANGE);
  }
  REQUIRE(!c.num_logits || !m.head.weight == !c.logits, NULL_POINTER);
  if (c.num_logits && c.num_logits < c.rows) {
    REQUIRE(c.logit_rows, NULL_POINTER);
    for (int64_t i = 0; i < c.num_logits; i++)
      REQUIRE(within(c.logit_rows[i], i ? c.logit_rows[i - 1] + 1 : 0, c.rows - 1), ROW_RANGE);
  }
  REQUIRE(within(c.pools->pages, 1, MOST) && within(c.pools->page_size, 1, MOST), SIZE);
  bool keeps = false, stores = false, reads = false;
  for (int64_t i = 0; i < c.num_layer_ids; i++) {
    const int64_t at = 2 * c.layer_ids[i];
    const Layer &layer = layers[c.layer_ids[i]];
    const Mixer *const mixer = layer.mixer;
    if (layer.qkv.weight) {
      const Pool &pool = c.pools[layer.kv_source];
      if (const Error error = pool_fits(pool)) return error;
      REQUIRE(pool.pages == c.pools->pages && pool.page_size == c.pools->page_size, SIZE);
      if (const Error error = entry_fits(pool, layer)) return error;
      REQUIRE(non_null(c.kv[2 * layer.kv_source], c.kv[2 * layer.kv_source + 1]), NULL_POINTER);
      (layer.has_kv || layer.kv_source != c.layer_ids[i] ? stores : reads) = true;
    }
    if (!mixer) continue;
    REQUIRE(non_null(c.replay, c.states) && c.states[at], NULL_POINTER);
    REQUIRE(c.states[at + 1] || mixer->kind == MIXER_conv, NULL_POINTER);
    REQUIRE(c.replay->columns == mixer->columns, SIZE);
    keeps = true;
  }
  if (keeps)
    if (const Error error = replay_fits(*c.replay, c.rows)) return error;
  REQUIRE(!(stores && reads), LAYER_RANGE);
  return plan_fits(*c.plan, *c.pools, c.rows, !reads);
}

template <class T>
Error chains_fit(const Model<T> &m, const Layer *layers, const Call<T> &c, const Chains<T> &d) {
  for (int64_t i = 0; i < m.layers; i++)
    REQUIRE(!layers[i].mixer && (layers[i].has_kv || layers[i].kv_source != i), LAYER_KIND);
  REQUIRE(within(d.sequences, 1, c.num_logits) && within(d.max_depth, 1, MOST), CHAIN_RANGE);
  REQUIRE(m.head.weight && has_embedding(m) && !c.all_reduce, NULL_POINTER);
  REQUIRE(non_null(d.depths, d.starts, d.tables, d.temperatures, d.thresholds, d.top_ks, d.noise_ids, d.tokens), NULL_POINTER);
  REQUIRE(within(d.feeds_hidden, 0, 2), CHAIN_RANGE);
  REQUIRE(!d.feeds_hidden || m.hidden <= c.workspace_size, WORKSPACE_SIZE);
  REQUIRE(d.output_ids || m.head.outputs <= m.num_embeddings, TOKEN_RANGE);  // drafted tokens are fed
  for (int64_t i = 0; d.output_ids && i < m.head.outputs; i++) REQUIRE(within(d.output_ids[i], 0, m.num_embeddings - 1), TOKEN_RANGE);
  REQUIRE(!d.texts || non_null(d.lengths, d.num_guessed, d.max_guess), NULL_POINTER);
  REQUIRE(!d.texts || !d.feeds_hidden, CHAIN_RANGE);
  const int64_t *text = d.texts;
  int64_t requested = 0, wide = 0;
  REQUIRE(!d.texts || within(d.max_match, 0, MOST_GUESSED), CHAIN_RANGE);
  for (int64_t i = 0; d.texts && i <= d.max_match; i++) {
    REQUIRE(within(d.max_guess[i], 0, MOST_GUESSED), CHAIN_RANGE);
    wide = std::max(wide, d.max_guess[i]);
  }
  REQUIRE(workspace_needed(m, layers, d.sequences * (1 + wide), d.sequences * (1 + wide)) <= c.workspace_size, WORKSPACE_SIZE);
  for (int64_t i = 0; i < d.sequences; i++) {
    REQUIRE(within(d.depths[i], 1, d.max_depth) && within(d.starts[i], 0, MOST), CHAIN_RANGE);
    const int64_t guessed = text ? d.num_guessed[i] : 0;
    REQUIRE(within(guessed, 0, d.depths[i] - 1), CHAIN_RANGE);
    requested += 1 + guessed;
    REQUIRE(!text || within(d.lengths[i], 1, MOST), CHAIN_RANGE);
    for (int64_t left = text ? d.lengths[i] + guessed : 0; left > 0; left--, text++)
      REQUIRE(within(*text, 0, m.num_embeddings - 1), TOKEN_RANGE);
    REQUIRE(d.temperatures[i] == 0 || d.keys || d.quantiles, NULL_POINTER);
    REQUIRE(d.temperatures[i] == 0 || d.keys || d.q, NULL_POINTER);
    const int64_t fed = d.starts[i] + d.depths[i] - 1;
    REQUIRE(fed <= c.num_angles, POSITION_RANGE);
    if (const Error error = pages_fit(*c.plan, *c.pools, d.tables[i], fed)) return error;
  }
  REQUIRE(requested == c.num_logits, CHAIN_RANGE);
  return OK;
}

Error rows_fit(const void *rows, int64_t count, int64_t size) {
  REQUIRE(within(count, 0, MOST) && within(size, 1, MOST), SIZE);
  REQUIRE(!count || rows, NULL_POINTER);
  return OK;
}

Error indices_fit(const int64_t *indices, int64_t count, int64_t size, Error error) {
  REQUIRE(within(count, 0, MOST), SIZE);
  REQUIRE(!count || indices, NULL_POINTER);
  for (int64_t i = 0; i < count; i++) REQUIRE(within(indices[i], 0, size - 1), error);
  return OK;
}

template <class T>
Error linear_fits(const char *w, const T *x, const T *y, int64_t rows, int64_t outputs, int64_t inputs,
                      int64_t stride, int threads) {
  REQUIRE(within(rows, 0, MOST) && within(outputs, 1, MOST) && within(inputs, 1, MOST) && threads_fit(threads), SIZE);
  REQUIRE(within(stride, outputs, MOST), SIZE);
  REQUIRE(!rows || non_null(w, x, y), NULL_POINTER);
  return OK;
}

}  // namespace

#define CHECK(...) \
  if (const Error error = __VA_ARGS__) return error

extern "C" {

const char *forerun_error(int error) { return MESSAGES[within(error, 0, UNKNOWN) ? error : UNKNOWN]; }

#define FIELD_NAMES(TYPE, NAME) " " #NAME
#define FORM(NAME, SIZE, BYTES) " " #NAME " " #SIZE " " #BYTES
#define ITEM(NAME) " " #NAME
const char *forerun_layout() {
  return "Span" SPAN(FIELD_NAMES) "\nPlan" PLAN(FIELD_NAMES) "\nPool" POOL(FIELD_NAMES) "\nHeads" HEADS(FIELD_NAMES) "\nLinear" LINEAR(FIELD_NAMES)
         "\nExperts" EXPERTS(FIELD_NAMES) "\nLatent" LATENT(FIELD_NAMES) "\nMixer" MIXER(FIELD_NAMES) "\nRun" RUN(FIELD_NAMES) "\nReplay" REPLAY(FIELD_NAMES) "\nLayer" LAYER(FIELD_NAMES) "\nModel" MODEL(FIELD_NAMES) "\nCall" CALL(FIELD_NAMES)
         "\nPass" PASS(FIELD_NAMES) "\nChains" CHAINS(FIELD_NAMES) "\nKinds own int8" QUANTS(FORM) "\nActivations" ACTIVATIONS_OF(ITEM)
         "\nMixers" MIXERS_OF(ITEM);
}

int forerun_use_huge_pages(char *at, int64_t bytes) {
  REQUIRE(at && bytes >= 0, NULL_POINTER);
  use_huge_pages(at, bytes);
  return OK;
}

int forerun_tiles() { return tiles_serve(); }

int forerun_has_kernels(int64_t kind) { return has_kernels(kind); }

int forerun_stop_threads() {
  return guarded([] { stop_threads(); });
}

int forerun_set_prefetch(int64_t kind, int64_t rows, int64_t how) {
  REQUIRE(within(kind, 0, KINDS - 1), LAYER_KIND);
  REQUIRE(within(rows, 1, MAX_PREFETCH_ROWS) && within(how, NOTHING, tiles_serve() ? TILED : FAR), SIZE);
  prefetch_settings.by_rows[kind][rows] = static_cast<Prefetch>(how);
  return OK;
}

#define ENTRIES(KIND, T)                                                                                             \
  int forerun_linear_##KIND(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows,          \
                            int64_t outputs, int64_t inputs, int64_t stride, int threads) {                          \
    CHECK(linear_fits(w, x, y, rows, outputs, inputs, stride, threads));                                             \
    return guarded([=] { linear(w, x, y, add, bias, rows, outputs, inputs, stride, threads); });                     \
  }                                                                                                                  \
  int forerun_linear_int8_##KIND(const char *w, const T *x, T *y, const T *add, const float *bias,                   \
                                 const float *scales, const int32_t *offsets, int64_t rows, int64_t outputs,         \
                                 int64_t inputs, int64_t stride, int threads) {                                      \
    CHECK(linear_fits(w, x, y, rows, outputs, inputs, stride, threads));                                             \
    REQUIRE(non_null(scales, offsets), NULL_POINTER);                                                                   \
    REQUIRE(inputs <= MOST_INT8, SIZE);                                                                              \
    return guarded([=] { linear_int8(w, x, y, add, bias, scales, offsets, rows, outputs, inputs, stride, threads); });\
  }                                                                                                                  \
  int forerun_linear_quants_##KIND(int64_t kind, const char *w, const T *x, T *y, const T *add, const float *bias,   \
                                   int64_t rows, int64_t outputs, int64_t inputs, int64_t stride, int threads) {     \
    CHECK(linear_fits(w, x, y, rows, outputs, inputs, stride, threads));                                             \
    REQUIRE(kind > KIND_int8 && has_kernels(kind), LAYER_KIND);                                                      \
    return guarded([=] { linear_quants(kind, w, x, y, add, bias, rows, outputs, inputs, stride, threads); });        \
  }                                                                                                                  \
  int forerun_get_rows_##KIND(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t outputs,\
                               int64_t inputs) {                                                                     \
    REQUIRE(within(outputs, 1, MOST) && within(inputs, 1, MOST), SIZE);                                              \
    REQUIRE(kind != KIND_int8 && has_kernels(kind), LAYER_KIND);                                                     \
    CHECK(indices_fit(ids, count, outputs, ROW_RANGE));                                                              \
    REQUIRE(!count || non_null(w, y), NULL_POINTER);                                                                    \
    get_rows(kind, w, ids, y, count, inputs);                                                                       \
    return OK;                                                                                                     \
  }                                                                                                                  \
  int forerun_norm_##KIND(const T *x, const float *weights, T *y, const T *add, int64_t rows, int64_t kinds,         \
                          int64_t width, float eps, int layer_norm) {                                                   \
    CHECK(rows_fit(x, rows, width));                                                                                 \
    REQUIRE(within(kinds, 1, MOST), SIZE);                                                                           \
    REQUIRE(!rows || non_null(weights, y), NULL_POINTER);                                                               \
    norm(x, weights, y, add, rows, kinds, width, eps, layer_norm != 0);                                                               \
    return OK;                                                                                                     \
  }                                                                                                                  \
  int forerun_apply_activation_##KIND(int64_t activation, const float *params, int gated, const T *x, T *y, int64_t rows,       \
                          int64_t width) {                                                                           \
    CHECK(rows_fit(x, rows, width));                                                                                 \
    CHECK(activation_fits(activation, params, gated != 0));                                                         \
    REQUIRE(!rows || y, NULL_POINTER);                                                                               \
    apply_activation(activation, params, gated != 0, x, y, rows, width);                                                                             \
    return OK;                                                                                                     \
  }                                                                                                                  \
  int forerun_project_each_##KIND(const Linear *layers, int64_t count, const T *x, int64_t x_row, int64_t x_part,   \
                                  T *y, int64_t y_row, int64_t y_part, int64_t rows, int threads) {                 \
    REQUIRE(layers, NULL_POINTER);                                                                                   \
    REQUIRE(within(count, 1, MOST) && threads_fit(threads) && within(layers->outputs, 1, MOST), SIZE);               \
    for (int64_t i = 0; i < count; i++) CHECK(layer_fits(layers[i], layers->inputs, layers->outputs));               \
    CHECK(rows_fit(x, rows, layers->inputs));                                                                        \
    REQUIRE(within(x_row, 0, MOST) && within(x_part, 0, MOST) && within(y_part, 0, MOST), SIZE);                     \
    REQUIRE(within(y_row, layers->outputs, MOST), SIZE);                                                             \
    REQUIRE(!rows || y, NULL_POINTER);                                                                               \
    return guarded([=] { project_each(layers, count, x, {x_row, x_part}, y, {y_row, y_part}, rows, threads); });     \
  }                                                                                                                  \
  int forerun_moe_##KIND(const Experts *experts, const T *x, const T *scored, float *total, int64_t rows,            \
                         int threads, int64_t *read) {                                                               \
    REQUIRE(experts && read, NULL_POINTER);                                                                          \
    REQUIRE(threads_fit(threads), SIZE);                                                                             \
    CHECK(rows_fit(x, rows, experts->router.inputs));                                                                \
    CHECK(rows_fit(scored, rows, experts->router.inputs));                                                           \
    CHECK(experts_fit(*experts, experts->router.inputs));                                                            \
    REQUIRE(!rows || total, NULL_POINTER);                                                                           \
    return guarded([=] { *read = moe(*experts, x, scored, total, rows, threads); });                                 \
  }                                                                                                                  \
  int forerun_apply_rotary_##KIND(T *x, int64_t stride, const float *angles, int64_t rows, int64_t heads, int64_t width) {\
    CHECK(rows_fit(x, rows, width));                                                                                 \
    REQUIRE(width % 2 == 0 && within(heads, 1, MOST) && stride >= 0, HEADS_SIZE);                                    \
    REQUIRE(!rows || angles, NULL_POINTER);                                                                          \
    apply_rotary(x, stride, angles, nullptr, rows, heads, width);                                                    \
    return OK;                                                                                                     \
  }                                                                                                                  \
  int forerun_attend_##KIND(const T *q, const T *k, const T *v, T *out, T *keys, T *values, const Pool *pool,        \
                            const Heads *heads, const Plan *plan, int64_t rows, float scale, float softcap,          \
                            int threads) {                                                                           \
    REQUIRE(non_null(q, out, keys, values, pool, heads, plan) && !k == !v, NULL_POINTER);                               \
    REQUIRE(within(rows, 1, MOST) && threads_fit(threads) && heads->window >= 0, SIZE);                              \
    REQUIRE(within(heads->sink_tokens, 0, BLOCK), SIZE);                                                             \
    CHECK(pool_fits(*pool));                                                                                         \
    REQUIRE(within(heads->heads, 1, MOST) && heads->heads % pool->kv_heads == 0, HEADS_SIZE);                        \
    REQUIRE(heads->q_stride >= 0 && heads->k_stride >= 0 && heads->v_stride >= 0, HEADS_SIZE);                       \
    CHECK(plan_fits(*plan, *pool, rows, k));                                                                         \
    CHECK(bias_fits(*plan, *heads));                                                                                 \
    return guarded([=] { attend(q, k, v, out, keys, values, *pool, *heads, *plan, scale, softcap, threads); });      \
  }                                                                                                                  \
  int forerun_recur_##KIND(const Mixer *mixer, const Replay *replay, T *inputs, T *records, float *numbers, T *out,  \
                           int64_t rows, int threads) {                                                              \
    REQUIRE(non_null(mixer, replay, inputs, records, out), NULL_POINTER);                                               \
    REQUIRE(within(rows, 1, MOST) && threads_fit(threads), SIZE);                                                    \
    CHECK(mixer_fits(*mixer));                                                                                       \
    REQUIRE((numbers || mixer->kind == MIXER_conv), NULL_POINTER);                                                   \
    REQUIRE(replay->columns == mixer->columns, SIZE);                                                                \
    CHECK(replay_fits(*replay, rows));                                                                               \
    return guarded([=] { recur(*mixer, *replay, inputs, records, numbers, out, rows, threads); });                   \
  }                                                                                                                  \
  int forerun_decode_##KIND(const Model<T> *model, const Layer *layers, const Call<T> *call) {                       \
    REQUIRE(non_null(model, layers, call), NULL_POINTER);                                                             \
    CHECK(model_fits(*model, layers));                                                                               \
    CHECK(call_fits(*model, layers, *call));                                                                         \
    bool whole = true;                                                                                               \
    const int status = guarded([&] { whole = decode(*model, layers, *call); });                                      \
    return whole ? status : ALL_REDUCE_FAILED;                                                                                 \
  }                                                                                                                  \
  int forerun_draft_##KIND(const Model<T> *model, const Layer *layers, const Call<T> *call,                          \
                           const Chains<T> *chains) {                                                                \
    REQUIRE(non_null(model, layers, call, chains), NULL_POINTER);                                                     \
    CHECK(model_fits(*model, layers));                                                                               \
    CHECK(call_fits(*model, layers, *call));                                                                         \
    CHECK(chains_fit(*model, layers, *call, *chains));                                                               \
    return guarded([=] { draft(*model, layers, *call, *chains); });                                                  \
  }
FOR_EACH_TYPE(ENTRIES)

int forerun_softcap(float *numbers, int64_t count, float cap) {
  CHECK(rows_fit(numbers, 1, count));
  softcap(numbers, count, cap);
  return OK;
}

int forerun_gumbel(uint64_t key, const int32_t *ids, float *out, int64_t size) {
  CHECK(rows_fit(out, 1, size));
  REQUIRE(ids, NULL_POINTER);
  gumbel(key, ids, out, size);
  return OK;
}

int forerun_gumbel_max(const float *scores, int64_t rows, int64_t size, const int32_t *ids, const uint64_t *keys,
                   const int64_t *noisy, float *tops, int64_t *best, float *softmax, int threads) {
  CHECK(rows_fit(scores, rows, size));
  REQUIRE(threads_fit(threads), SIZE);
  REQUIRE(!rows || non_null(ids, keys, noisy, best, tops), NULL_POINTER);
  return guarded([=] { gumbel_max(scores, rows, size, ids, keys, noisy, tops, best, softmax, threads); });
}

int forerun_inverse_cdf(const float *weights, int64_t rows, int64_t size, const double *quantiles, int64_t *out) {
  CHECK(rows_fit(weights, rows, size));
  REQUIRE(!rows || non_null(quantiles, out), NULL_POINTER);
  return guarded([=] { inverse_cdf(weights, rows, size, quantiles, out); });
}

int forerun_acceptance(const float *scores, int64_t rows, int64_t size, const int64_t *greedy, int64_t trials,
                  const int64_t *at, const int64_t *tokens, const float *const *qs, const int64_t *follows,
                  float lenience, float *residual, float *tops, float *weights, float *left, float *shared) {
  CHECK(rows_fit(scores, rows, size));
  REQUIRE(!rows || non_null(greedy, residual, tops), NULL_POINTER);
  CHECK(indices_fit(at, trials, rows, ROW_RANGE));
  CHECK(indices_fit(tokens, trials, size, TOKEN_RANGE));
  REQUIRE(!trials || non_null(qs, follows, weights, left, shared), NULL_POINTER);
  REQUIRE(!trials || !follows[0], ROW_RANGE);
  return guarded([=] {
    acceptance(scores, rows, size, greedy, trials, at, tokens, qs, follows, lenience, residual, tops, weights, left, shared);
  });
}

int forerun_prompt_lookup(const int64_t *text, int64_t length, const int64_t *max_guess, int64_t max_match, int64_t room,
                    int64_t *out, int64_t *found) {
  REQUIRE(non_null(text, max_guess, out, found), NULL_POINTER);
  REQUIRE(within(length, 1, MOST) && within(max_match, 0, MOST_GUESSED) && within(room, 0, MOST), SIZE);
  for (int64_t i = 0; i <= max_match; i++) REQUIRE(within(max_guess[i], 0, MOST_GUESSED), SIZE);
  const Found result = prompt_lookup(text, length, max_guess, max_match, room, out);
  found[0] = result.match, found[1] = result.count;
  return OK;
}

int forerun_top_logprobs(const float *scores, int64_t rows, int64_t size, int64_t trials, const int64_t *at, int64_t count,
                 const int64_t *into, int64_t num_into, int32_t *ids, float *logs) {
  CHECK(rows_fit(scores, rows, size));
  REQUIRE(within(count, 1, MOST), SIZE);
  CHECK(indices_fit(at, trials, rows, ROW_RANGE));
  CHECK(indices_fit(into, trials, num_into, ROW_RANGE));
  REQUIRE(!trials || non_null(ids, logs), NULL_POINTER);
  top_logprobs(scores, size, trials, at, count, into, ids, logs);
  return OK;
}

int forerun_overlaps(const float *scores, int64_t rows, int64_t size, int64_t trials, const int64_t *at,
                     const float *const *qs, const int64_t *tokens, float *out, int threads) {
  CHECK(rows_fit(scores, rows, size));
  REQUIRE(threads_fit(threads), SIZE);
  CHECK(indices_fit(at, trials, rows, ROW_RANGE));
  CHECK(indices_fit(tokens, trials, size, TOKEN_RANGE));
  REQUIRE(!trials || non_null(qs, out), NULL_POINTER);
  return guarded([=] { overlaps(scores, size, trials, at, qs, tokens, out, threads); });
}

int forerun_filter_rows(float *rows, int64_t count, int64_t size, const float *temperatures, const float *thresholds,
                          const int64_t *top_ks, int threads) {
  CHECK(rows_fit(rows, count, size));
  REQUIRE(threads_fit(threads), SIZE);
  REQUIRE(!count || non_null(temperatures, thresholds, top_ks), NULL_POINTER);
  return guarded([=] { filter_rows(rows, count, size, temperatures, thresholds, top_ks, threads); });
}

int forerun_apply_penalties(float *row, int64_t size, const int64_t *text, int64_t length, int64_t output, float repetition,
                     float frequency, float presence) {
  CHECK(rows_fit(row, 1, size));
  REQUIRE(within(length, 0, MOST) && within(output, 0, MOST), SIZE);
  REQUIRE(!length || text, NULL_POINTER);
  for (int64_t i = 0; i < length; i++) REQUIRE(text[i] >= 0, TOKEN_RANGE);
  return guarded([=] { apply_penalties(row, size, text, length, output, repetition, frequency, presence); });
}
}
