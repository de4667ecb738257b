// What the CPU kernels share: vectors of eight lanes, rounding to E2M1 and E4M3, statistics.
//
// All arithmetic is IEEE FP32, rounded to nearest even; the build forbids contraction, fast math.
// Vectors are those of GCC and Clang, so one source serves any (little-endian) CPU.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "nibbles and bytes are packed low first");

namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x4 __attribute__((vector_size(4)));

enum Dtype { BF16 = 0, FP32 = 1 };
enum Element { E2M1 = 0, E4M3 = 1 };
enum Scale { NVFP4 = 0, E8M0 = 1, FP32_POWER = 2, FP32_FREE = 3 };

constexpr int UNIT = 16;
constexpr int CHUNK = 1024;             // columns that one pass holds in the first-level cache
constexpr int MAX_BUFFER = 128 * 128;   // the largest block, 128 x 128
constexpr int MAX_UNITS = CHUNK / UNIT;
constexpr int64_t SERIAL = 1 << 15;     // elements under which a second thread does not pay

template <int ELEMENT>
constexpr int BITS = ELEMENT == E2M1 ? 4 : 8;

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline f32x8 splat(float v) { return f32x8{v, v, v, v, v, v, v, v}; }
inline i32x8 splat(int32_t v) { return i32x8{v, v, v, v, v, v, v, v}; }
inline f32x8 magnitude(f32x8 v) { return (f32x8)((i32x8)v & 0x7fffffff); }
inline i32x8 max(i32x8 a, i32x8 b) { return a > b ? a : b; }
inline i16x16 max(i16x16 a, i16x16 b) { return a > b ? a : b; }

// What compilers do not yet find by themselves for AVX2, and the same in general.
#ifdef __AVX2__
inline f32x8 min(f32x8 a, f32x8 b) { return _mm256_min_ps(a, b); }
inline f32x8 max(f32x8 a, f32x8 b) { return _mm256_max_ps(a, b); }
inline i32x8 widen(u16x8 v) { return (i32x8)_mm256_cvtepu16_epi32((__m128i)v); }
inline i32x8 widen_bytes(const uint8_t* p) {
  return (i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline u64x4 multiply(u64x4 a, uint32_t b) {
  return (u64x4)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
}
inline u8x32 narrow(i32x8 a, i32x8 b, i32x8 c, i32x8 d) {
  const __m256i ab = _mm256_packs_epi32((__m256i)a, (__m256i)b);
  const __m256i cd = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (u8x32)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order);
}
inline u8x16 narrow(u16x16 v) {
  const __m256i packed = _mm256_packus_epi16((__m256i)v, (__m256i)v);
  return (u8x16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline u16x8 narrow(i32x8 v) {
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (u16x8)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#else
// The first operand where it is smaller (larger), else the second: a NaN in the first is dropped.
inline f32x8 min(f32x8 a, f32x8 b) { return a < b ? a : b; }
inline f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }
inline i32x8 widen(u16x8 v) { return __builtin_convertvector(v, i32x8); }
inline i32x8 widen_bytes(const uint8_t* p) {
  return __builtin_convertvector(load<u8x8>(p), i32x8);
}
// Product of the low halves of 64-bit lanes.
inline u64x4 multiply(u64x4 a, uint32_t b) { return (a & 0xffffffffu) * uint64_t(b); }
// Low bytes, in order.
inline u8x32 narrow(i32x8 a, i32x8 b, i32x8 c, i32x8 d) {
  const i32x8 all[4] = {a, b, c, d};
  u8x32 out;
  for (int i = 0; i < 32; i++) out[i] = uint8_t(all[i / 8][i % 8]);
  return out;
}
inline u8x16 narrow(u16x16 v) { return __builtin_convertvector(v, u8x16); }
inline u16x8 narrow(i32x8 v) { return __builtin_convertvector(v, u16x8); }
#endif

// FP32 to BF16 bits in 32-bit lanes: nearest even; any NaN becomes torch's.
inline i32x8 to_bf16(f32x8 v) {
  i32x8 b = (i32x8)v;
  i32x8 rounded = (i32x8)((b + 0x7fff + ((b >> 16) & 1))) >> 16 & 0xffff;
  return v == v ? rounded : splat(0x7fc0);
}

// ---- Rounding to an element type ----------------------------------------------------------------

template <int ELEMENT>
struct Type;
template <>
struct Type<E2M1> {
  static constexpr int mantissa = 1, lowest = 127;  // biased FP32 exponent of the first normal
  static constexpr float largest = 6.0f;
};
template <>
struct Type<E4M3> {
  static constexpr int mantissa = 3, lowest = 121;
  static constexpr float largest = 448.0f;
};

template <int ELEMENT>
struct Rounded {
  i32x8 code;
  f32x8 value;
};

// Nearest even. Adding `magic`, whose last bit is worth the element's step at this magnitude, rounds
// in the FP32 adder; the low bits of the sum are then the code within its binade.
template <int ELEMENT>
inline Rounded<ELEMENT> nearest(f32x8 magnitude) {
  using T = Type<ELEMENT>;
  i32x8 exponent = max((i32x8)magnitude & 0x7f800000, splat(T::lowest << 23));
  i32x8 magic = exponent + ((23 - T::mantissa) << 23);
  f32x8 sum = magnitude + (f32x8)magic;
  i32x8 binade = (exponent >> (23 - T::mantissa)) - (T::lowest << T::mantissa);
  return {(i32x8)sum - magic + binade, sum - (f32x8)magic};
}

// Round E2M1 up when floor(256 * frac) + random reaches 256.
inline i32x8 stochastic_e2m1(f32x8 magnitude, i32x8 random) {
  i32x8 exponent = max((i32x8)magnitude & 0x7f800000, splat(127 << 23));
  i32x8 factor = ((127 + 127 + 9) << 23) - exponent;  // 2^9, 2^8, 2^7 below 2, 4, 8
  i32x8 position = __builtin_convertvector(magnitude * (f32x8)factor, i32x8);
  i32x8 binade = (exponent >> 14) - (127 << 9);
  return (position + binade + random) >> 8;
}

// ---- Block scales -------------------------------------------------------------------------------

struct ScaleRule {
  int kind;      // Scale
  int element;   // Element
  int up;        // powers of two: 1 rounds up, 0 down
  float first;   // NVFP4: power of two that x is multiplied by first, S_enc where it is capped
  float rest;    // NVFP4: what remains of S_dec, 1 where S_enc is capped
  float block;   // NVFP4: what a block's amax is multiplied by
};

// E4M3 codes of eight blocks, and what they and the tensor's scale decode by together.
struct Nvfp4Scale {
  i32x8 code;
  f32x8 decode;
};

inline Nvfp4Scale nvfp4_scale(f32x8 amax, const ScaleRule& rule) {
  f32x8 wanted = min(amax * rule.block, splat(FLT_MAX));
  auto scale = nearest<E4M3>(min(wanted, splat(448.0f)));
  return {scale.code, scale.value * rule.rest};
}

// The largest lane of each of eight vectors of eight.
template <class V, class Max>
inline V largest_of_each(const V (&v)[8], Max largest) {
  V pairs[4], quads[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const V a = v[2 * i], b = v[2 * i + 1];
    pairs[i] = largest(__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13),
                       __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const V a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = largest(__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13),
                       __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15));
  }
  return largest(__builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11),
                 __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15));
}

// ---- Amax and the count of NaN and infinity -----------------------------------------------------

struct Stats {
  uint32_t amax;  // magnitude bits of the largest element that is not NaN
  int64_t nonfinite;
};

inline void merge(Stats& total, const Stats& part) {
  total.amax = std::max(total.amax, part.amax);
  total.nonfinite += part.nonfinite;
}

// I: signed integers of the element's width, V: a vector of them.
template <class I, I INFINITE>
Stats stats_one_by_one(const I* x, int64_t n) {
  Stats total = {0, 0};
  for (int64_t i = 0; i < n; i++) {
    const I bits = x[i] & std::numeric_limits<I>::max();
    total.nonfinite += bits >= INFINITE;
    if (bits <= INFINITE) total.amax = std::max(total.amax, uint32_t(bits));
  }
  return total;
}

// Finite numbers only take a maximum. The few others are counted where that finds one.
template <class I, class V, I INFINITE>
Stats stats(const void* x, int64_t n) {
  constexpr int lanes = sizeof(V) / sizeof(I), step = 32 * lanes;
  Stats total = {0, 0};
  const I* p = (const I*)x;
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    V most[4] = {};
    for (int j = 0; j < step; j += 4 * lanes) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        most[k] = max(most[k], load<V>(p + i + j + k * lanes) & std::numeric_limits<I>::max());
      }
    }
    const V all = max(max(most[0], most[1]), max(most[2], most[3]));
    I amax = 0;
    for (int lane = 0; lane < lanes; lane++) amax = std::max(amax, I(all[lane]));
    merge(total, amax < INFINITE ? Stats{uint32_t(amax), 0}
                                 : stats_one_by_one<I, INFINITE>(p + i, step));
  }
  merge(total, stats_one_by_one<I, INFINITE>(p + i, n - i));
  return total;
}

inline Stats stats_bf16(const uint16_t* x, int64_t n) {
  return stats<int16_t, i16x16, 0x7f80>(x, n);
}

// FP32 bits of the amax.
inline Stats stats_of(const void* x, int dtype, int64_t start, int64_t n) {
  if (dtype == FP32) return stats<int32_t, i32x8, 0x7f800000>((const float*)x + start, n);
  Stats s = stats_bf16((const uint16_t*)x + start, n);
  s.amax <<= 16;
  return s;
}

// ---- Loading ------------------------------------------------------------------------------------

// Asks for BYTES that lie `ahead` bytes after p, maybe past the tensor's end: that never faults.
template <int BYTES, bool WRITE>
inline void prefetch(const void* p, int64_t ahead) {
  const char* first = (const char*)((uintptr_t)p + ahead);
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(first + i, WRITE, 3);
}

// `count` elements as FP32, then zeros up to `padded`.
template <int DTYPE>
void load_row(const void* x, int64_t start, int count, int padded, float* out) {
  if (DTYPE == BF16) {
    const uint16_t* p = (const uint16_t*)x + start;
    int i = 0;
    for (; i + 8 <= count; i += 8) store(out + i, widen(load<u16x8>(p + i)) << 16);
    for (; i < count; i++) {
      uint32_t bits = uint32_t(p[i]) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  } else {
    std::memcpy(out, (const float*)x + start, sizeof(float) * count);
  }
  std::fill(out + count, out + padded, 0.0f);
}

}  // namespace
