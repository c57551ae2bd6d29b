// Where layers keep rows that they have brought into another form.
#pragma once
#include <cstdint>
#include <vector>

constexpr float LEAST = 1e-30f;  // what is smaller counts as 0 in 8 bits: steps between levels stay normal

// Rows an odd number of cache lines apart: at a power of two they would push each other out of the cache.
inline int64_t apart(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

inline char *room(int64_t bytes) {
  static thread_local std::vector<char> kept;
  if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
  return kept.data();
}
