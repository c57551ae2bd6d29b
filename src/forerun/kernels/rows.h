// Where layers keep rows that they have brought into another form, and how they ask for weights ahead of their use.
#pragma once
#include <cstdint>
#include <vector>

#include "structs.h"

constexpr float MIN_ABSMAX = 1e-30f;  // what is smaller counts as 0 in 8 bits: steps between levels stay normal

// Rows an odd number of cache lines apart: at a power of two they would push each other out of the cache.
inline int64_t row_stride(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

inline char *workspace(int64_t bytes) {
  static thread_local std::vector<char> kept;
  if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
  return kept.data();
}

// How a kind of weights is asked for ahead of its use, by rows. NEAR: into the L1 cache; what is on its way there holds up
// what is in use, where arithmetic takes longer than memory. FAR: into the L2 cache; of that a processor forgets some
// where memory takes longer. TILED: NEAR, for rows that the matrix unit multiplies, if there is one and no bits change.
enum Prefetch : uint8_t { NOTHING, NEAR, FAR, TILED };
constexpr int64_t MAX_PREFETCH_ROWS = 32;  // more rows ask as these do
constexpr int64_t FAR_AHEAD = 1 << 15;  // bytes from a weight that is used to the one asked for

struct PrefetchSettings {
  Prefetch by_rows[KINDS][MAX_PREFETCH_ROWS + 1];
  constexpr PrefetchSettings() : by_rows() {  // as measured on AMD Zen 4
    for (int64_t kind = 0; kind < KINDS; kind++)
      for (int64_t rows = 1; rows <= MAX_PREFETCH_ROWS; rows++) by_rows[kind][rows] = rows > 5 ? FAR : NEAR;
  }
  Prefetch of(int64_t kind, int64_t rows) const { return by_rows[kind][rows < MAX_PREFETCH_ROWS ? rows : MAX_PREFETCH_ROWS]; }
};
inline PrefetchSettings prefetch_settings;

struct Prefetcher {
  const char *at;
  int64_t step;  // bytes for each group of weights that is used; 0: nothing is asked for
  bool far;
  Prefetcher(const char *used, int64_t near, int64_t step, Prefetch how, int64_t distance = FAR_AHEAD)
      : at(used + (how == FAR ? distance : near)), step(how == NOTHING ? 0 : step), far(how == FAR) {}
  void line(int64_t offset) const {
    if (far)
      __builtin_prefetch(at + offset, 0, 2);
    else
      __builtin_prefetch(at + offset);
  }
};
