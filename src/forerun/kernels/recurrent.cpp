// Recurrent mixers: gated delta net, Mamba-2, short convolution. A call loads and stores a sequence's state once for
// all of its rows: a block of its columns stays in the cache while row after row updates it. Every sum has one order,
// whatever the batch, and columns are independent.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t NONE = -1;
constexpr int WIDE = 2;  // vectors in a block's row
constexpr int64_t ACROSS = 16 * WIDE;
constexpr float UNIT_EPS = 1e-6f;  // of the L2 norm of keys and queries

Floats sigmoid(Floats v) { return broadcast(1) / (broadcast(1) + exponential(zeros() - v)); }
Floats silu(Floats v) { return v / (broadcast(1) + exponential(zeros() - v)); }
Floats softplus(Floats v) {
  const Floats one = broadcast(1), y = exponential(zeros() - abs(v)), w = one + y, lost = w - one - y;
  return max(v, zeros()) + (logarithm(w) - lost / w);
}

// A block of a state's columns; ``step`` numbers from row to row.
struct Side {
  float *at;
  int64_t step;
};

// The columns of a block: all of them (WHOLE), or a mask.
template <bool WHOLE>
struct Columns {
  First lanes[WIDE];
  explicit Columns(int64_t count) {
    for (int w = 0; w < WIDE; w++) lanes[w] = first(std::max<int64_t>(0, count - 16 * w));
  }
  Floats get(const float *at, int w) const { return WHOLE ? load(at + 16 * w) : load(at + 16 * w, lanes[w]); }
  void put(float *at, int w, Floats v) const {
    if (WHOLE) store(at + 16 * w, v);
    else store(at + 16 * w, lanes[w], v);
  }
  template <class T>
  void make(T *made, int w, Floats v) const {
    store(made + 16 * w, WHOLE ? first(16) : lanes[w], v);
  }
};

// One node of one head. ``to`` (the new state) and ``made`` (the output) may be null.
template <class T>
struct Step {
  Side from, to;
  const float *key, *query, *value;
  float decay, gate, skip;
  int64_t keys, ahead;  // rows of the state; prefetch distance, 0: none
  T *made;

  void ask(const float *row) const {
    if (!ahead) return;
    for (int64_t line = 0; line < ACROSS; line += 16) __builtin_prefetch(row + ahead + line);
  }
};

// S = decay S + key added^T; sums = S^T query. Even and odd rows have sums of their own.
template <bool WHOLE, bool ASKS, class T>
void change(const Columns<WHOLE> &columns, const Step<T> &s, const Floats *added, Floats *sums) {
  const Floats decay = broadcast(s.decay);
  Floats even[WIDE], odd[WIDE];
  for (int w = 0; w < WIDE; w++) even[w] = odd[w] = zeros();
  const auto row = [&](int64_t i, Floats *sum) {
    const Floats key = broadcast(s.key[i]), query = broadcast(s.query[i]);
    const float *const at = s.from.at + i * s.from.step;
    if (ASKS) s.ask(at);
    for (int w = 0; w < WIDE; w++) {
      const Floats v = fma(key, added[w], decay * columns.get(at, w));
      if (s.to.at) columns.put(s.to.at + i * s.to.step, w, v);
      sum[w] = fma(query, v, sum[w]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= s.keys; i += 2) row(i, even), row(i + 1, odd);
  if (i < s.keys) row(i, even);
  for (int w = 0; w < WIDE; w++) sums[w] = even[w] + odd[w];
}

template <bool WHOLE, class T>
void delta_step(const Columns<WHOLE> &columns, const Step<T> &s) {
  Floats even[WIDE], odd[WIDE], sums[WIDE];
  for (int w = 0; w < WIDE; w++) even[w] = odd[w] = zeros();
  const auto row = [&](int64_t i, Floats *sum) {
    const Floats key = broadcast(s.key[i]);
    const float *const at = s.from.at + i * s.from.step;
    s.ask(at);
    for (int w = 0; w < WIDE; w++) sum[w] = fma(key, columns.get(at, w), sum[w]);
  };
  int64_t i = 0;
  for (; i + 2 <= s.keys; i += 2) row(i, even), row(i + 1, odd);
  if (i < s.keys) row(i, even);
  for (int w = 0; w < WIDE; w++)
    even[w] = fnma(broadcast(s.decay), even[w] + odd[w], columns.get(s.value, w)) * broadcast(s.gate);
  change<WHOLE, false>(columns, s, even, sums);
  for (int w = 0; w < WIDE && s.made; w++) columns.make(s.made, w, sums[w]);
}

template <bool WHOLE, class T>
void mamba_step(const Columns<WHOLE> &columns, const Step<T> &s) {
  Floats added[WIDE], sums[WIDE];
  for (int w = 0; w < WIDE; w++) added[w] = columns.get(s.value, w) * broadcast(s.gate);
  change<WHOLE, true>(columns, s, added, sums);
  for (int w = 0; w < WIDE && s.made; w++)
    columns.make(s.made, w, fma(broadcast(s.skip), columns.get(s.value, w), sums[w]));
}

// Buffers for states that are read again and are not the checkpoint. A node may reuse its parent's buffer.
struct Places {
  std::vector<int64_t> of;  // the buffer of each node; NONE: none
  int64_t count = 0;

  explicit Places(const Replay &p) : of(p.nodes, NONE) {
    std::vector<int64_t> last(p.nodes, NONE), idle;
    for (int64_t r = 0; r < p.num_runs; r++) {
      const Run &run = p.runs[r];
      const int64_t end = run.first + run.nodes;
      for (int64_t node = run.first; node < end; node++)
        if (p.parents[node] != NONE) last[p.parents[node]] = node;
      for (int64_t node = run.first; node < end; node++) {
        const int64_t parent = p.parents[node];
        if (parent != NONE && of[parent] != NONE && last[parent] == node) idle.push_back(of[parent]);
        if (node == run.checkpoint || (last[node] == NONE && p.copies[node] == NONE)) continue;
        if (idle.empty()) idle.push_back(count++);
        of[node] = idle.back();
        idle.pop_back();
      }
    }
  }
};

template <class T>
class Recurring {
 public:
  Recurring(const Mixer &mixer, const Replay &replay, T *inputs, T *ring, float *numbers, T *out, int64_t rows, int threads)
      : m(mixer), p(replay), inputs(inputs), ring(ring), numbers(numbers), out(out), rows(rows), threads(threads),
        record(m.channels + m.gates), wide(m.channels + (m.kind == MIXER_mamba ? 2 : 1) * m.gates),
        stride(m.kind == MIXER_conv ? 3 * m.channels : record + m.d_inner) {}

  void run() {
    if (m.kind == MIXER_conv) {
      for (int64_t row = 0; row < rows; row++) open(inputs + row * stride);
      parallel_for(p.nodes, 8, threads, [&](int64_t from, int64_t to) {
        for (int64_t node = from; node < to; node++)
          if (p.rows[node] != NONE) convolve_row(node);
      });
    } else {
      static thread_local std::vector<float> kept;
      if (static_cast<int64_t>(kept.size()) < p.nodes * wide) kept.resize(p.nodes * wide);
      mixed = kept.data();
      parallel_for(p.nodes, 2, threads, [&](int64_t from, int64_t to) {
        for (int64_t node = from; node < to; node++) prepare(node, mixed + node * wide);
      });
      const Places places(p);
      parallel_for(p.num_runs * m.heads, 1, threads, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) change_head(p.runs[i / m.heads], i % m.heads, places);
      });
      parallel_for(rows, 4, threads, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) gate_row(inputs + row * stride + record, out + row * m.d_inner);
      });
    }
    for (int64_t i = 0; i < p.num_written; i++)
      std::memcpy(ring + p.written[i] * record, inputs + p.written_rows[i] * stride, record * sizeof(T));
  }

 private:
  // The convolution's input B * x, in place of B.
  void open(T *row) const {
    for (int64_t i = 0; i < m.channels; i += 16) {
      const First lanes = first(m.channels - i);
      store(row + i, lanes, load(row + i, lanes) * load(row + 2 * m.channels + i, lanes));
    }
  }

  const T *tap(int64_t node, int64_t column) const {
    const int64_t at = p.taps[node * (m.columns + 1) + column];
    return at < rows ? inputs + at * stride : ring + p.read[at - rows] * record;
  }

  template <class Use>
  void convolve(int64_t node, const Use &use) const {
    const T *taps[MOST_TAPS];
    for (int64_t column = 0; column <= m.columns; column++) taps[column] = tap(node, column);
    for (int64_t i = 0; i < m.channels; i += 16) {
      const First lanes = first(m.channels - i);
      Floats sum = m.bias ? load(m.bias + i, lanes) : zeros();
      for (int64_t column = 0; column <= m.columns; column++)
        sum = fma(load(taps[column] + i, lanes), load(m.conv + column * m.channels + i, lanes), sum);
      use(i, lanes, sum);
    }
  }

  void convolve_row(int64_t node) const {
    const T *const gate = inputs + p.rows[node] * stride + m.channels;
    T *const to = out + p.rows[node] * m.d_inner;
    convolve(node, [&](int64_t i, First lanes, Floats sum) {
      store(to + i, lanes, rounded<T>(sum) * load(gate + i, lanes));
    });
  }

  // Convolution, then the gates: [conv channels | gate (beta or dt) | decay] of a node.
  void prepare(int64_t node, float *to) const {
    convolve(node, [&](int64_t i, First lanes, Floats sum) { store(to + i, lanes, rounded<T>(silu(sum))); });
    const bool delta = m.kind == MIXER_delta;
    const T *const own = tap(node, m.columns) + m.channels;
    float *const gates = to + m.channels, *const decays = gates + m.heads;
    for (int64_t h = 0; h < m.heads; h += 16) {
      const First lanes = first(m.heads - h);
      const Floats step = softplus(load(own + (delta ? m.heads : 0) + h, lanes) + load(m.dt_bias + h, lanes));
      store(gates + h, lanes, delta ? sigmoid(load(own + h, lanes)) : step);
      store(decays + h, lanes, exponential(step * load(m.ssm_a + h, lanes)));
    }
    for (int64_t group = 0; delta && group < 2 * m.groups; group++)  // queries, then keys: L2 norm
      make_unit(to + group * m.key_dim, group < m.groups ? 1 / std::sqrt(static_cast<float>(m.key_dim)) : 1);
  }

  void make_unit(float *at, float size) const {
    Floats squares = zeros();
    for (int64_t i = 0; i < m.key_dim; i += 16) {
      const Floats v = load(at + i, first(m.key_dim - i));
      squares = fma(v, v, squares);
    }
    const Floats scale = broadcast(size / std::sqrt(reduce_sum(squares) + UNIT_EPS));
    for (int64_t i = 0; i < m.key_dim; i += 16) {
      const First lanes = first(m.key_dim - i);
      store(at + i, lanes, load(at + i, lanes) * scale);
    }
  }

  void change_head(const Run &run, int64_t head, const Places &places) const {
    static thread_local std::vector<float> kept;
    const int64_t needed = places.count * m.key_dim * ACROSS + 16;
    if (static_cast<int64_t>(kept.size()) < needed) kept.resize(needed);
    float *const buffers = kept.data() + (64 - reinterpret_cast<uintptr_t>(kept.data()) % 64) % 64 / sizeof(float);
    for (int64_t column = 0; column < m.value_dim; column += ACROSS) {
      if (m.value_dim - column >= ACROSS) change_block<true>(run, head, column, places, buffers);
      else change_block<false>(run, head, column, places, buffers);
    }
  }

  template <bool WHOLE>
  void change_block(const Run &run, int64_t head, int64_t column, const Places &places, float *buffers) const {
    const Columns<WHOLE> columns(m.value_dim - column);
    const bool delta = m.kind == MIXER_delta;
    const int64_t group = m.tiled ? head % m.groups : head / (m.heads / m.groups), all = m.groups * m.key_dim;
    const int64_t next = column + ACROSS < m.value_dim ? ACROSS : m.key_dim * m.value_dim - column;
    const auto stored = [&](int64_t slot) {
      return Side{numbers + (slot * m.heads + head) * m.key_dim * m.value_dim + column, m.value_dim};
    };
    const Side checkpoint = stored(run.slot);
    const auto buffer = [&](int64_t place) { return Side{buffers + place * m.key_dim * ACROSS, ACROSS}; };
    for (int64_t node = run.first; node < run.first + run.nodes; node++) {
      const int64_t parent = p.parents[node], row = p.rows[node];
      const float *const own = mixed + node * wide, *const gates = own + m.channels;
      const float *const keys = own + (delta ? 0 : m.d_inner);  // delta net: queries and keys; Mamba-2: B and C
      Step<T> s;
      s.from = parent == NONE || parent == run.checkpoint ? checkpoint : buffer(places.of[parent]);
      s.to = node == run.checkpoint ? checkpoint : places.of[node] == NONE ? Side{nullptr, 0} : buffer(places.of[node]);
      s.key = keys + (delta ? all : 0) + group * m.key_dim;
      s.query = keys + (delta ? 0 : all) + group * m.key_dim;
      s.value = own + (delta ? 2 * all : 0) + head * m.value_dim + column;
      s.gate = gates[head];
      s.decay = gates[m.heads + head];
      s.skip = delta ? 0 : m.ssm_d[head];
      s.keys = m.key_dim;
      s.ahead = parent == NONE ? next : 0;
      s.made = row == NONE ? nullptr : out + row * m.d_inner + head * m.value_dim + column;
      if (delta) delta_step(columns, s);
      else mamba_step(columns, s);
      if (p.copies[node] != NONE) copy(columns, s.to, stored(p.copies[node]));
    }
  }

  template <bool WHOLE>
  void copy(const Columns<WHOLE> &columns, const Side &from, const Side &to) const {
    for (int64_t i = 0; i < m.key_dim; i++)
      for (int w = 0; w < WIDE; w++) columns.put(to.at + i * to.step, w, columns.get(from.at + i * from.step, w));
  }

  void gate_row(const T *gate, T *row) const {
    const float eps = static_cast<float>(m.eps);
    const auto silu_gate = [&] {
      for (int64_t i = 0; i < m.d_inner; i += 16) {
        const First lanes = first(m.d_inner - i);
        store(row + i, lanes, load(row + i, lanes) * silu(load(gate + i, lanes)));
      }
    };
    if (m.kind == MIXER_mamba) {
      silu_gate();
      if (m.norm)
        norm(row, m.norm, row, static_cast<const T *>(nullptr), m.groups, m.groups, m.d_inner / m.groups, eps, false);
    } else {
      norm(row, m.norm, row, static_cast<const T *>(nullptr), m.heads, 1, m.value_dim, eps, false);
      silu_gate();
    }
  }

  const Mixer &m;
  const Replay &p;
  T *const inputs, *const ring;
  float *const numbers;
  T *const out;
  const int64_t rows;
  const int threads;
  const int64_t record, wide, stride;  // numbers of a record, of ``prepare``'s result, of an input row
  float *mixed = nullptr;
};

}  // namespace

template <class T>
void recur(const Mixer &mixer, const Replay &replay, T *inputs, T *records, float *numbers, T *out, int64_t rows,
           int threads) {
  Recurring<T>(mixer, replay, inputs, records, numbers, out, rows, threads).run();
}

#define INSTANTIATE(KIND, T) \
  template void recur(const Mixer &, const Replay &, T *, T *, float *, T *, int64_t, int);
FOR_EACH_TYPE(INSTANTIATE)
