// How blocks of weights in 4 and 8 bits lie, and what their levels stand for.
//
// A record holds 16 outputs of one block of 32 inputs, or of 8 blocks with common scales before them. Of a block first
// come the levels: in vector j of four, outputs side by side, inputs 4 j to 4 j + 3 of each in the low halves of its
// bytes and inputs 16 + 4 j on in the high ones; or in bytes, in eight vectors of four inputs. Then the scales and
// minima of the 16 outputs. A weight is scale (level - ZERO) + minimum. WHOLE: scales and minima of a record's blocks are
// whole numbers by which sums of levels are multiplied as such; the record's own come in once for 256 inputs.
#pragma once
#include "lanes.h"
#include "structs.h"

namespace {

constexpr int64_t OUTPUTS = 16, INPUTS = 32;  // of a block

template <int MOST_LEVEL>
struct Nibbles {
  static constexpr int MOST = MOST_LEVEL;
  static constexpr int64_t LEVELS = 256;  // bytes
  static void get(const char *at, int j, Ints &low, Ints &high) {
    const Ints v = load_ints(at + 64 * j), mask = broadcast_int(0x0f0f0f0f);
    low = bit_and(v, mask);
    high = bit_and(shift_right<4>(v), mask);
  }
};

template <int MOST_LEVEL>
struct Bytes {
  static constexpr int MOST = MOST_LEVEL;
  static constexpr int64_t LEVELS = 512;
  static void get(const char *at, int j, Ints &low, Ints &high) {
    low = load_ints(at + 64 * j);
    high = load_ints(at + 256 + 64 * j);
  }
};

// Scales of a block: one for its 32 inputs, or (PARTS = 2) one for each half.
template <int PARTS>
struct Scales {
  Floats part[PARTS], minimum;
};

LANES_INLINE Floats halves(const char *at) { return load_half(reinterpret_cast<const uint16_t *>(at), first(16)); }

template <class L, int ZERO_LEVEL>
struct Scaled : L {
  static constexpr int PARTS = 1, ZERO = ZERO_LEVEL;
  static constexpr bool MINIMA = false, WHOLE = false;
  static constexpr int64_t HEAD = 0, BLOCKS = 1, BLOCK = L::LEVELS + 32;
  static Scales<1> scales(const char *, const char *at) { return {{halves(at + L::LEVELS)}, zeros()}; }
};

template <class L>
struct ScaledAndMoved : L {
  static constexpr int PARTS = 1, ZERO = 0;
  static constexpr bool MINIMA = true, WHOLE = false;
  static constexpr int64_t HEAD = 0, BLOCKS = 1, BLOCK = L::LEVELS + 64;
  static Scales<1> scales(const char *, const char *at) {
    return {{halves(at + L::LEVELS)}, halves(at + L::LEVELS + 32)};
  }
};

// Eight blocks share a scale of their scales and one of their minima, which are whole numbers of 6 bits.
template <class L>
struct TwiceScaledAndMoved : L {
  static constexpr int PARTS = 1, ZERO = 0;
  static constexpr bool MINIMA = true, WHOLE = true;
  static constexpr int64_t HEAD = 64, BLOCKS = 8, BLOCK = L::LEVELS + 32;
  static Ints scale(const char *at) { return load_bytes(reinterpret_cast<const uint8_t *>(at + L::LEVELS)); }
  static Ints minimum(const char *at) { return load_bytes(reinterpret_cast<const uint8_t *>(at + L::LEVELS + 16)); }
  static Scales<1> scales(const char *head, const char *at) {
    return {{halves(head) * to_floats(scale(at))}, zeros() - halves(head + 32) * to_floats(minimum(at))};
  }
};

// Sixteen half blocks share a scale of their scales, which are whole numbers.
template <class L, int ZERO_LEVEL>
struct TwiceScaledHalves : L {
  static constexpr int PARTS = 2, ZERO = ZERO_LEVEL;
  static constexpr bool MINIMA = false, WHOLE = false;
  static constexpr int64_t HEAD = 32, BLOCKS = 8, BLOCK = L::LEVELS + 32;
  static Scales<2> scales(const char *head, const char *at) {
    const auto numbers = reinterpret_cast<const int8_t *>(at + L::LEVELS);
    const Floats scale = halves(head);
    return {{scale * to_floats(load_bytes(numbers)), scale * to_floats(load_bytes(numbers + 16))}, zeros()};
  }
};

using q4_0 = Scaled<Nibbles<15>, 8>;
using q4_1 = ScaledAndMoved<Nibbles<15>>;
using q4_k = TwiceScaledAndMoved<Nibbles<15>>;
using q5_0 = Scaled<Bytes<31>, 16>;
using q5_1 = ScaledAndMoved<Bytes<31>>;
using q5_k = TwiceScaledAndMoved<Bytes<31>>;
using q6_k = TwiceScaledHalves<Bytes<63>, 32>;
using q8_0 = Scaled<Bytes<255>, 128>;

template <class K>
constexpr int64_t RECORD = K::HEAD + K::BLOCKS * K::BLOCK;  // bytes

#define SAME(NAME, SIZE, BYTES) static_assert(INPUTS * NAME::BLOCKS == SIZE && RECORD<NAME> == BYTES);
QUANTS(SAME)
#undef SAME

}  // namespace
