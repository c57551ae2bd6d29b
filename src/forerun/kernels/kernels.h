// The kernels; border.cpp checks the arguments that come from Python. T: float, Bfloat16 or Float16.
#pragma once
#include "lanes.h"
#include "structs.h"
#include "threads.h"

#define FOR_EACH_TYPE(F) F(float32, float) F(bfloat16, Bfloat16) F(float16, Float16)

constexpr int64_t WIDEST = 1024;    // numbers in a head
constexpr int64_t MOST_TAPS = 16;   // rows that a convolution reads
constexpr int64_t ROUND_UP = 32;    // numbers to which a piece of a decoder's workspace is rounded up

// Rows of y and ``add`` are ``stride`` numbers apart.
template <class T>
void linear(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows, int64_t outputs,
            int64_t inputs, int64_t stride, int threads);
template <class T>
void linear_int8(const char *w, const T *x, T *y, const T *add, const float *bias, const float *scales,
                 const int32_t *offsets, int64_t rows, int64_t outputs, int64_t inputs, int64_t stride, int threads);
template <class T>
void linear_quants(int64_t kind, const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows,
                   int64_t outputs, int64_t inputs, int64_t stride, int threads);
// A layer of any kind and its parts. Rows of y and ``add`` are ``stride`` numbers apart; 0: end to end.
template <class T>
void project(const Linear &layer, const T *x, T *y, const T *add, int64_t rows, int threads, int64_t stride = 0);
// Numbers from row to row, and in a row from one layer's part to the next one's.
struct Apart {
  int64_t row, part;
};
// Several layers of one size, each for its own part of every row.
template <class T>
void project_each(const Linear *layers, int64_t count, const T *x, Apart in, T *y, Apart out, int64_t rows, int threads);
// Rows of weights, as numbers: of a layer in T, of any kind but KIND_int8.
template <class T>
void get_rows_quants(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs);
template <class T>
void get_rows(int64_t kind, const char *w, const int64_t *ids, T *y, int64_t count, int64_t inputs);
// ``add``, which may be y or null, is added to what is normed. ``layer_norm``: a layer norm, its biases behind the weights.
template <class T>
void norm(const T *x, const float *weights, T *y, const T *add, int64_t rows, int64_t kinds, int64_t width, float eps,
          bool layer_norm);
// activation(gate) * up of rows [gate, up]; not ``gated``: activation(up). ``params``: xielu's slope squared and below,
// slope and eps; clamped's steepness and limit.
template <class T>
void apply_activation(int64_t activation, const float *params, bool gated, const T *x, T *y, int64_t rows, int64_t width);
// Angles of a row are row number ``positions[row]`` of ``angles``, or ``row`` where that is null.
template <class T>
void apply_rotary(T *x, int64_t stride, const float *angles, const int64_t *positions, int64_t rows, int64_t heads,
                  int64_t width);
// Stores k and v of the plan's rows, unless they are null, and attends.
template <class T>
void attend(const T *q, const T *k, const T *v, T *out, T *keys, T *values, const Pool &pool, const Heads &heads,
            const Plan &plan, float scale, float softcap, int threads);
// What a row's experts make of it, added up in the order of their numbers: of those that are here. The router reads
// ``scored`` in the place of x. Returns how many experts were read.
template <class T>
int64_t moe(const Experts &experts, const T *x, const T *scored, float *total, int64_t rows, int threads);
// Rows of a layer that keeps a state, from the inputs that its projection made, which change, to what the projection
// behind it reads. ``records`` and ``numbers`` are the layer's, of all sequences.
template <class T>
void recur(const Mixer &mixer, const Replay &replay, T *inputs, T *records, float *numbers, T *out, int64_t rows,
           int threads);
// Whether every sum was had.
template <class T>
bool decode(const Model<T> &model, const Layer *layers, const Call<T> &call);
template <class T>
void draft(const Model<T> &model, const Layer *layers, const Call<T> &call, const Chains<T> &chains);

// Looks the end of a text up in what is before it. Of the longest match, at most ``max_match`` tokens, the last one:
// ``out`` gets what follows, at most ``room`` tokens and ``max_guess`` of the match's length. Returns the match's length and
// how many tokens these are.
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
