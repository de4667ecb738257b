// NVFP4 by nearest rounding of BF16 tensors, in 16-bit lanes: one vector holds a unit. AVX2 only.
//
// The magnitudes of BF16 numbers are in the order of their bits, and the code of x grows with |x|.
// So a block's amax is a maximum of integers, and the code is how many of the block's seven bounds
// |x| has passed. The bounds are made in FP32, once a block; each element only compares.

#pragma once

#include "cpu_vectors.h"

namespace {

constexpr int GROUP = 8 * UNIT;  // columns of eight blocks, one in each FP32 lane
constexpr int BOUNDS = 7;
constexpr int16_t DOUBLE = 0x80;  // what doubling a BF16 number adds to its bits

inline bool all(i32x8 mask) { return _mm256_movemask_ps((__m256)mask) == 0xff; }

// The larger of both 16-bit halves of each lane.
inline i32x8 max16(i32x8 a, i32x8 b) { return (i32x8)max((i16x16)a, (i16x16)b); }

inline u8x8 low_bytes(i32x8 v) {
  const __m256i packed = (__m256i)narrow(v, v, v, v);
  return (u8x8)_mm_cvtsi128_si64(_mm256_castsi256_si128(packed));
}

// Of each pair of codes, the even one + 16 times the odd one.
inline i32x8 join_pairs(i16x16 codes) {
  return (i32x8)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(16 << 16 | 1));
}

// The largest BF16 number, in both halves of a lane, whose product with `factor` in FP32 is still
// under `start`, where the next code begins.
//
// Why this is exact: let T be the smallest real number with fp32(T * factor) >= start. As factor is
// fp32(1 / decode), fp32(start * decode) is T to within 2^-22 of it. `nearest` is that, rounded to
// BF16. Neighbours in BF16 lie 2^-8 of their size apart or more, so the one before `nearest` is
// below T and the one after it above. On which side `nearest` itself lies, the very product decides
// that defines the code. No number here may be subnormal or overflow: see `prepare_group`.
inline i16x16 bound(float start, f32x8 decode, f32x8 factor) {
  const i32x8 nearest = ((i32x8)(start * decode) + 0x8000) & int32_t(0xffff0000);
  const i32x8 reached = (f32x8)nearest * factor >= start;
  return (i16x16)(nearest | nearest >> 16) + (i16x16)reached;
}

// Code i + 1 begins halfway between the values of codes i and i + 1: there, if the tie goes to it
// because it is even, else at the next float. A start that doubles another doubles its bound.
inline void make_bounds(f32x8 decode, f32x8 factor, i16x16 (&bounds)[BOUNDS]) {
  bounds[0] = bound(0x1.000002p-2f, decode, factor);  // over 0.25
  bounds[1] = bound(0.75f, decode, factor);
  bounds[2] = bound(0x1.400002p0f, decode, factor);  // over 1.25
  bounds[3] = bound(1.75f, decode, factor);
  bounds[4] = bounds[2] + DOUBLE;  // over 2.5
  bounds[5] = bounds[3] + DOUBLE;  // 3.5
  bounds[6] = bounds[4] + DOUBLE;  // over 5
}

// Codes of one unit, two in the low byte of each lane.
inline i32x8 encode_bf16(const uint16_t* unit, const i16x16 (&bounds)[BOUNDS]) {
  const i16x16 x = load<i16x16>(unit), magnitude = x & 0x7fff;
  i16x16 code = (-x > 0) & 8;  // the sign; -0 has none, for as an integer it is its own negative
#pragma GCC unroll 7
  for (int i = 0; i < BOUNDS; i++) code -= magnitude > bounds[i];
  return join_pairs(code);
}

// ROWS rows of a row of blocks: where they lie, and the strides from row to row in elements.
struct Place {
  const uint16_t* x;
  int64_t x_stride;
  uint8_t* codes;  // half as far apart as x's rows
  uint8_t* scales;
  int64_t scales_stride;
};

// The blocks of one step: FP32 bits of their amax, their bounds, and which groups have bounds.
struct Step {
  alignas(32) int32_t amax[MAX_UNITS];
  alignas(32) int32_t bounds[BOUNDS][MAX_UNITS + 8];  // no power of two: they are read together
  bool regular[MAX_UNITS / 8];
};

// The amax of each of eight blocks; a NaN is larger than infinity.
template <int ROWS>
inline void measure_group(const Place& p, int64_t u, Step& step) {
  i32x8 most[8];
#pragma GCC unroll 8
  for (int k = 0; k < 8; k++) most[k] = load<i32x8>(p.x + (u + k) * UNIT) & 0x7fff7fff;
  for (int r = 1; r < ROWS; r++) {
    const uint16_t* x = p.x + r * p.x_stride + u * UNIT;
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
      most[k] = max16(most[k], load<i32x8>(x + k * UNIT) & 0x7fff7fff);
    }
  }
  const i32x8 halves = largest_of_each(most, max16);
  store(step.amax + u, max16(halves, halves << 16) & int32_t(0xffff0000));
}

// Scales and bounds of eight blocks.
template <int ROWS>
inline void prepare_group(const Place& p, const ScaleRule& rule, int64_t u, Step& step) {
  const i32x8 amax = load<i32x8>(step.amax + u);
  const Nvfp4Scale scale = nvfp4_scale((f32x8)amax, rule);
  const f32x8 decode = amax == 0 ? splat(1.0f) : scale.decode;  // a zero passes no bound at all
  // From 2^-120 every number in `bound` is normal. Up to 2^16 no product underflows, which would
  // take the sign from the code: the least BF16 number is 2^-133, the least FP32 one 2^-149.
  step.regular[u / 8] = all((amax <= 0x7f800000) & (decode >= 0x1p-120f) & (decode <= 0x1p16f));
  i16x16 bounds[BOUNDS];
  make_bounds(decode, 1.0f / decode, bounds);
#pragma GCC unroll 7
  for (int i = 0; i < BOUNDS; i++) store(step.bounds[i] + u, bounds[i]);
  const u8x8 bytes = low_bytes(scale.code);
  for (int r = 0; r < ROWS; r++) store(p.scales + r * p.scales_stride + u, bytes);
}

inline void bounds_of(const Step& step, int64_t unit, i16x16 (&bounds)[BOUNDS]) {
#pragma GCC unroll 7
  for (int i = 0; i < BOUNDS; i++) bounds[i] = (i16x16)splat(step.bounds[i][unit]);
}

// Four units of one row.
inline void encode_row(const Place& p, const Step& step, int64_t u) {
  i32x8 codes[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    i16x16 bounds[BOUNDS];
    bounds_of(step, u + k, bounds);
    codes[k] = encode_bf16(p.x + (u + k) * UNIT, bounds);
  }
  store(p.codes + u * UNIT / 2, narrow(codes[0], codes[1], codes[2], codes[3]));
}

// One unit of each of sixteen rows.
inline void encode_square(const Place& p, const Step& step, int64_t u) {
  i16x16 bounds[BOUNDS];
  bounds_of(step, u, bounds);
  for (int r = 0; r < UNIT; r += 4) {
    i32x8 codes[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      codes[k] = encode_bf16(p.x + (r + k) * p.x_stride + u * UNIT, bounds);
    }
    const u64x4 packed = (u64x4)narrow(codes[0], codes[1], codes[2], codes[3]);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      store(p.codes + ((r + k) * p.x_stride + u * UNIT) / 2, uint64_t(packed[k]));
    }
  }
}

// The first `groups` times eight blocks of ROWS x 16. Groups that are not `regular` get no codes.
// Each loop's iterations are independent, so that the latencies of one hide behind the others.
template <int ROWS>
inline void pack_bf16(const Place& p, const ScaleRule& rule, int groups, Step& step) {
  for (int64_t u = 0; u < 8 * groups; u += 8) measure_group<ROWS>(p, u, step);
  for (int64_t u = 0; u < 8 * groups; u += 8) prepare_group<ROWS>(p, rule, u, step);
  for (int64_t u = 0; u < 8 * groups; u += 4) {
    if (!step.regular[u / 8]) continue;
    if (ROWS == 1) {
      prefetch<4 * UNIT * sizeof(uint16_t), false>(p.x + u * UNIT, CHUNK * sizeof(uint16_t));
      encode_row(p, step, u);
    } else {
      for (int k = 0; k < 4; k++) encode_square(p, step, u + k);
    }
  }
}

}  // namespace
