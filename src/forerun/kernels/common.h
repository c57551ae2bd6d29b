// What the kernels share: numbers in and out of registers, and e^x.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

// Numbers as they come and go: float32, or bfloat16 as its 16 bits.
inline __m512 load(const float *at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
inline __m512 load(const uint16_t *at, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16));
}
inline void store(float *at, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(at, mask, v); }
inline void store(uint16_t *at, __mmask16 mask, __m512 v) {
  const __m512i bits = _mm512_castps_si512(v);  // to the nearest, ties to even; NaN stays NaN
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i top = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
  top = _mm512_mask_mov_epi32(top, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(at, mask, _mm512_cvtepi32_epi16(top));
}
// The first so many of 16 lanes.
inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

// e^x to about one unit in the last place: 2^n times a polynomial in what is left of x.
inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));  // NaN stays NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

// The kernels, for each other; the sources and __init__.py state the arguments.
extern "C" {
#define DECLARE(KIND, T)                                                                                            \
  void linear_##KIND(const char *w, const T *x, T *y, const T *add, const float *bias, int64_t rows,                 \
                     int64_t outputs, int64_t inputs, int threads);                                                 \
  void linear_int8_##KIND(const char *w, const T *x, T *y, const T *add, const float *bias, const float *scales,     \
                          const int32_t *offsets, int64_t rows, int64_t outputs, int64_t inputs, int threads);       \
  void norm_##KIND(const T *x, const float *weights, T *y, int64_t rows, int64_t kinds, int64_t width, float eps);   \
  void silu_times_##KIND(const T *x, T *y, int64_t rows, int64_t width);                                            \
  void attend_##KIND(const T *q, const T *k, const T *v, T *out, T *keys, T *values, const int64_t *sizes,           \
                     const int64_t *spans, int64_t count, const int64_t *tables, const int64_t *paths,               \
                     const int64_t *entries, float scale, float softcap, int threads);                              \
  void turn_##KIND(T *x, int64_t stride, const float *angles, int64_t rows, int64_t heads, int64_t width);
DECLARE(float32, float)
DECLARE(bfloat16, uint16_t)
#undef DECLARE
void choose(const float *scores, int64_t rows, int64_t size, const int32_t *ids, const uint64_t *keys,
            const int64_t *noisy, float *tops, int64_t *places, float *softmax, int threads);
void restrict_row(float *row, int64_t size, float heat, float min_p, int64_t top_k, float top_p);
void draw(const float *weights, int64_t rows, int64_t size, const double *spots, int64_t *out);
}
