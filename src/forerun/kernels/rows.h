// Where layers keep rows that they have brought into another form, and how they ask for weights ahead of their use.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <vector>

#include "structs.h"

constexpr float LEAST = 1e-30f;  // what is smaller counts as 0 in 8 bits: steps between levels stay normal

// Rows an odd number of cache lines apart: at a power of two they would push each other out of the cache.
inline int64_t apart(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

inline char *room(int64_t bytes) {
  static thread_local std::vector<char> kept;
  if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
  return kept.data();
}

// Rows from which a kind of weights is asked for FAR ahead, into the L2 cache: where arithmetic takes longer than memory,
// lines on their way into the L1 cache would hold up the ones in use. Where memory takes longer, a processor forgets
// what it is asked to bring to L2.
constexpr int64_t FAR = 1 << 15;  // bytes
inline int64_t far_from[KINDS] = {6, 6, 3, 3, 3, 6, 6, 6, 6, 6};  // as measured on AMD Zen 4

struct Ask {
  const char *at;
  int64_t step;  // bytes for each group of weights that is used; 0: nothing is asked for
  bool far;
  void line(int64_t offset) const {
    if (far)
      _mm_prefetch(at + offset, _MM_HINT_T1);
    else
      _mm_prefetch(at + offset, _MM_HINT_T0);
  }
};
