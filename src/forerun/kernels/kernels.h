// The kernels; border.cpp checks the arguments that come from Python. T: float, Bfloat16 or Float16.
#pragma once
#include <tuple>

#include "lanes.h"
#include "structs.h"
#include "threads.h"

#ifndef FOR_EACH_TYPE  // else the compiler's command says which (``units_of``)
#define FOR_EACH_TYPE(F) F(float32, float) F(bfloat16, Bfloat16) F(float16, Float16)
#endif

constexpr int64_t WIDEST = 1024;    // largest head size
constexpr int64_t MOST_TAPS = 16;   // most taps of a short convolution
constexpr int64_t ROUND_UP = 32;    // numbers; alignment of the workspace's buffers

// y = x W^T + bias + add. Rows of y and ``add`` are ``stride`` numbers apart.
template <class T>
void linear(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,
            int64_t inputs, int64_t stride, int threads);
template <class T>
void linear_int8(const char *w, const T *x, T *y, const T *add, const float *bias, const float *scales,
                 const int32_t *offsets, int64_t rows, int64_t outputs, int64_t inputs, int64_t stride, int threads);
// The kernels of a block-quantized type, for rows in T; null until its library is loaded (``load``).
template <class T>
struct QuantKernels {
  void (*linear)(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,
                 int64_t inputs, int64_t stride, int threads);
  void (*get_rows)(const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs);
};
extern std::tuple<QuantKernels<float>, QuantKernels<Bfloat16>, QuantKernels<Float16>> quant_kernels[KINDS];
template <class T>
void linear_quants(int64_t kind, const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows,
                   int64_t outputs, int64_t inputs, int64_t stride, int threads) {
  std::get<QuantKernels<T>>(quant_kernels[kind]).linear(w, x, y, add, bias, rows, outputs, inputs, stride, threads);
}
// A linear layer of any kind, and those that follow it. ``stride`` 0: rows of y and ``add`` are contiguous.
template <class T>
void project(const Linear &layer, const T *x, T *y, const T *add, int64_t rows, int threads, int64_t stride = 0);
// Strides in numbers: from row to row, and within a row from one layer's part to the next.
struct Apart {
  int64_t row, part;
};
// Batched layers of one size (MLA's heads): each multiplies its own part of every row.
template <class T>
void project_each(const Linear *layers, int64_t count, const T *x, Apart in, T *y, Apart out, int64_t rows, int threads);
// Rows of weights in T, dequantized, as ggml_get_rows. Any kind but KIND_int8.
template <class T>
void get_rows_quants(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs) {
  std::get<QuantKernels<T>>(quant_kernels[kind]).get_rows(w, ids, y, count, inputs);
}
template <class T>
void get_rows(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs);
// y = norm(x) + add; ``add`` may be y or null. RMS norm, or a layer norm whose biases follow the weights. Row r has the
// weights r % kinds.
template <class T>
void norm(const T *x, const float *weights, T *y, const T *add, int64_t rows, int64_t kinds, int64_t width, float eps,
          bool layer_norm);
// y = activation(gate) * up of rows [gate | up]; not ``gated``: activation(x). ``params``: xIELU's alpha_p, alpha_n,
// beta and eps; of clamped (gpt-oss) alpha and limit.
template <class T>
void apply_activation(int64_t activation, const float *params, bool gated, const T *x, T *y, int64_t rows, int64_t width);
// RoPE in place, of pairs (x[2 i], x[2 i + 1]). A row's (cos, sin) pairs are ``angles[positions[row]]``; null: of
// ``row``.
template <class T>
void apply_rotary(T *x, int64_t stride, const float *angles, const int64_t *positions, int64_t rows, int64_t heads,
                  int64_t width);
// Writes k and v of the plan's rows to the cache, unless they are null, then attends.
template <class T>
void attend(const T *q, const T *k, const T *v, T *out, T *keys, T *values, const Pool &pool, const Heads &heads,
            const Plan &plan, float scale, float softcap, int threads);
// Sums the weighted outputs of each row's local experts. The router reads ``scored`` instead of x. Returns how many
// experts were read.
template <class T>
int64_t moe(const Experts &experts, const T *x, const T *scored, float *total, int64_t rows, int threads);
// A recurrent mixer, from mixer_in's output to mixer_out's input. ``inputs`` are overwritten. ``records`` (convolution
// inputs) and ``numbers`` (states) are the layer's caches, of all sequences.
template <class T>
void recur(const Mixer &mixer, const Replay &replay, T *inputs, T *records, float *numbers, T *out, int64_t rows,
           int threads);
// False if an all-reduce failed.
template <class T>
bool decode(const Model<T> &model, const Layer *layers, const Call<T> &call);
template <class T>
void draft(const Model<T> &model, const Layer *layers, const Call<T> &call, const Chains<T> &chains);

// Prompt lookup: finds the longest earlier match of a text's last tokens, at most ``max_match``; of equal ones the
// last. ``out`` gets the tokens that follow it, at most ``room`` and ``max_guess[match]``.
struct Found {
  int64_t match, count;
};
Found prompt_lookup(const int64_t *text, int64_t length, const int64_t *max_guess, int64_t max_match, int64_t room, int64_t *out);
template <class T>
int64_t workspace_needed(const Model<T> &model, const Layer *layers, int64_t rows, int64_t num_out);

void use_huge_pages(char *at, int64_t bytes);
void softcap(float *numbers, int64_t count, float cap);
void gumbel(uint64_t key, const int32_t *ids, float *out, int64_t size);
void gumbel_max(const float *scores, int64_t rows, int64_t size, const int32_t *ids, const uint64_t *keys,
            const int64_t *noisy, float *tops, int64_t *best, float *softmax, int threads);
void inverse_cdf(const float *weights, int64_t rows, int64_t size, const double *quantiles, int64_t *out);
void acceptance(const float *scores, int64_t rows, int64_t size, const int64_t *greedy, int64_t trials, const int64_t *at,
           const int64_t *tokens, const float *const *qs, const int64_t *follows, float lenience, float *residual,
           float *tops, float *weights, float *left, float *shared);
void top_logprobs(const float *scores, int64_t size, int64_t trials, const int64_t *at, int64_t count, const int64_t *into,
          int32_t *ids, float *logs);
void overlaps(const float *scores, int64_t size, int64_t trials, const int64_t *rows, const float *const *qs,
              const int64_t *tokens, float *out, int threads);
void filter_row(float *row, int64_t size, float temperature, float min_p, int64_t top_k, float top_p);
void filter_rows(float *rows, int64_t count, int64_t size, const float *temperatures, const float *thresholds,
                   const int64_t *top_ks, int threads);
void apply_penalties(float *row, int64_t size, const int64_t *text, int64_t length, int64_t output, float repetition,
              float frequency, float presence);
