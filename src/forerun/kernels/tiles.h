// Intel's AMX, if the kernels are compiled for it: eight tiles per thread, of up to 16 rows of 64 bytes. Tiles 0 to 3
// are sums: tile s is tile 4 + s / 2 (rows of a layer's input) times tile 6 + s % 2 (weights: each row has four bytes,
// or two Bfloat16, of 16 outputs). Integer sums are exact, as with vectors. Bfloat16 sums round in another way than
// with vectors, the same for a row whatever the other rows.
//
// TILES_WRITTEN_OUT: plain code after Intel's manual, so that tests run the callers on any machine.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

#if defined(HAS_BYTE_PRODUCTS) && defined(TILES_WRITTEN_OUT)
#define HAS_TILES 1
#include <cmath>
#elif defined(HAS_BYTE_PRODUCTS) && defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_INT8__) && \
    defined(__AMX_BF16__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(HAS_TILES)
constexpr bool MAY_TILE = true;
#else
constexpr bool MAY_TILE = false;
#endif
#if defined(TILES_WRITTEN_OUT)
extern "C" inline int64_t tile_products = 0;  // counts, for tests
#endif
constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;  // bytes of a row

namespace {

struct TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // For ``count`` rows with ``wide`` bytes each.
  TileShapes(int64_t count, int64_t wide) {
    for (int t = 0; t < 8; t++) {
      const bool inputs = t == 4 || t == 5;
      bytes[t] = static_cast<uint16_t>(inputs ? wide : TILE_BYTES);
      rows[t] = static_cast<uint8_t>(t < 6 ? count : wide / 4);
    }
  }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(HAS_TILES) && defined(TILES_WRITTEN_OUT)

struct Tile {
  int64_t rows, bytes;
  char at[TILE_ROWS][TILE_BYTES];
};
inline thread_local Tile tiles[8];

inline bool have_tiles() { return true; }
inline void shape_tiles(const TileShapes &shapes) {
  for (int t = 0; t < 8; t++) tiles[t] = {shapes.rows[t], shapes.bytes[t], {}};
}
inline void leave_tiles() { std::memset(tiles, 0, sizeof tiles); }
template <int T>
void clear_tile() { std::memset(tiles[T].at, 0, sizeof tiles[T].at); }
template <int T>
void load_tile(const void *from, int64_t apart) {
  for (int64_t r = 0; r < tiles[T].rows; r++)
    std::memcpy(tiles[T].at[r], static_cast<const char *>(from) + r * apart, tiles[T].bytes);
}
template <int T>
void store_tile(void *to, int64_t apart) {
  for (int64_t r = 0; r < tiles[T].rows; r++)
    std::memcpy(static_cast<char *>(to) + r * apart, tiles[T].at[r], tiles[T].bytes);
}

template <class N>
N number(const Tile &tile, int64_t row, int64_t index) {
  N value;
  std::memcpy(&value, tile.at[row] + index * sizeof(N), sizeof(N));
  return value;
}

template <class X, class W, int S>
void add_bytes() {
  tile_products++;
  Tile &sums = tiles[S];
  const Tile &x = tiles[4 + S / 2], &w = tiles[6 + S % 2];
  for (int64_t r = 0; r < x.rows; r++)
    for (int64_t out = 0; out < sums.bytes / 4; out++) {
      int32_t sum = number<int32_t>(sums, r, out);
      for (int64_t i = 0; i < x.bytes; i++) sum += number<X>(x, r, i) * number<W>(w, i / 4, 4 * out + i % 4);
      std::memcpy(sums.at[r] + 4 * out, &sum, 4);
    }
}

// The unit flushes denormal inputs and outputs to zero.
inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

inline float of_bfloat16(const Tile &tile, int64_t row, int64_t index) {
  const uint32_t bits = static_cast<uint32_t>(number<uint16_t>(tile, row, index)) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

template <int S>
void add_bfloats() {
  tile_products++;
  Tile &sums = tiles[S];
  const Tile &x = tiles[4 + S / 2], &w = tiles[6 + S % 2];
  for (int64_t r = 0; r < x.rows; r++)
    for (int64_t out = 0; out < sums.bytes / 4; out++) {
      float parts[2] = {0, 0};
      for (int64_t i = 0; i < x.bytes / 2; i++)
        parts[i % 2] = flushed(std::fma(of_bfloat16(x, r, i), of_bfloat16(w, i / 2, 2 * out + i % 2), parts[i % 2]));
      const float sum = flushed(flushed(number<float>(sums, r, out)) + flushed(parts[0] + parts[1]));
      std::memcpy(sums.at[r] + 4 * out, &sum, 4);
    }
}
template <int S>
void add_unsigned_signed() { add_bytes<uint8_t, int8_t, S>(); }
template <int S>
void add_signed_unsigned() { add_bytes<int8_t, uint8_t, S>(); }

#elif defined(HAS_TILES)

// GCC does not know that the intrinsics read and write memory.
inline void memory_is_as_written() { asm volatile("" ::: "memory"); }

inline void shape_tiles(const TileShapes &shapes) {
  memory_is_as_written();
  _tile_loadconfig(&shapes);
}
inline void leave_tiles() { _tile_release(); }

// The intrinsics take a tile's number as a literal.
#define EACH_TILE(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
#define EACH_SUM(F) F(0, 4, 6) F(1, 4, 7) F(2, 5, 6) F(3, 5, 7)
#define CLEAR(N) \
  if constexpr (T == N) _tile_zero(N);
#define LOAD(N) \
  if constexpr (T == N) _tile_loadd(N, from, apart);
#define STORE(N) \
  if constexpr (T == N) _tile_stored(N, to, apart);
#define ADD_BFLOATS(N, X, W) \
  if constexpr (S == N) _tile_dpbf16ps(N, X, W);
#define ADD_US(N, X, W) \
  if constexpr (S == N) _tile_dpbusd(N, X, W);
#define ADD_SU(N, X, W) \
  if constexpr (S == N) _tile_dpbsud(N, X, W);
template <int T>
void clear_tile() { EACH_TILE(CLEAR) }
template <int T>
void load_tile(const void *from, int64_t apart) {
  memory_is_as_written();
  EACH_TILE(LOAD)
}
template <int T>
void store_tile(void *to, int64_t apart) {
  EACH_TILE(STORE)
  memory_is_as_written();
}
template <int S>
void add_bfloats() { EACH_SUM(ADD_BFLOATS) }
template <int S>
void add_unsigned_signed() { EACH_SUM(ADD_US) }
template <int S>
void add_signed_unsigned() { EACH_SUM(ADD_SU) }

// Linux gives a process tile state only on request.
inline bool have_tiles() {
  constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

#else
inline bool have_tiles() { return false; }
inline void shape_tiles(const TileShapes &) {}
inline void leave_tiles() {}
template <int T>
void clear_tile();
template <int T>
void load_tile(const void *from, int64_t apart);
template <int T>
void store_tile(void *to, int64_t apart);
template <int S>
void add_bfloats();
template <int S>
void add_unsigned_signed();
template <int S>
void add_signed_unsigned();
#endif

// Configures a thread's tiles for as long as it lives, if ``wanted``.
struct Shaped {
  bool wanted;
  Shaped(bool wanted, int64_t rows, int64_t wide) : wanted(wanted) {
    if (wanted) shape_tiles({rows, wide});
  }
  ~Shaped() {
    if (wanted) leave_tiles();
  }
  Shaped(const Shaped &) = delete;
};

}  // namespace

// Whether there are tiles and FORERUN_TILES is not 0; constant within a process. Hidden, or a library would use the
// answer of another one.
__attribute__((visibility("hidden"))) inline bool tiles_serve() {
  static const bool yes = [] {
    const char *const said = std::getenv("FORERUN_TILES");
    return (!said || std::strcmp(said, "0") != 0) && have_tiles();
  }();
  return yes;
}
