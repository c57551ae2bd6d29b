// Buffers for converted rows, and prefetch of weights.
#pragma once
#include <cstdint>
#include <vector>

#include "structs.h"

constexpr float MIN_ABSMAX = 1e-30f;  // smaller inputs quantize to 0, so that scales are never denormal

// Bytes from row to row: an odd number of cache lines. At a power of two, rows would evict each other from the cache.
inline int64_t row_stride(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

inline char *workspace(int64_t bytes) {
  static thread_local std::vector<char> kept;
  if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
  return kept.data();
}

// How weights are prefetched, by kind and number of rows. NEAR: into the L1 cache, where pending lines delay other
// loads if arithmetic is the bottleneck. FAR: into the L2 cache, but processors drop some of these if memory is the
// bottleneck. TILED: the matrix unit multiplies, if there is one and no bits change; prefetch as NEAR.
enum Prefetch : uint8_t { NOTHING, NEAR, FAR, TILED };
constexpr int64_t MAX_PREFETCH_ROWS = 32;  // more rows use the same setting
constexpr int64_t FAR_AHEAD = 1 << 15;  // bytes from the weight in use to the prefetched one

struct PrefetchSettings {
  Prefetch by_rows[KINDS][MAX_PREFETCH_ROWS + 1];
  constexpr PrefetchSettings() : by_rows() {  // as measured on AMD Zen 4
    for (int64_t kind = 0; kind < KINDS; kind++)
      for (int64_t rows = 1; rows <= MAX_PREFETCH_ROWS; rows++) by_rows[kind][rows] = rows > 5 ? FAR : NEAR;
  }
  Prefetch of(int64_t kind, int64_t rows) const { return by_rows[kind][rows < MAX_PREFETCH_ROWS ? rows : MAX_PREFETCH_ROWS]; }
};
extern PrefetchSettings prefetch_settings;

struct Prefetcher {
  const char *at;
  int64_t step;  // bytes per group of weights in use; 0: no prefetch
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
