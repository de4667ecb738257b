// Block quantizers for CPU tensors: one pass for the amax, one that rounds and packs.
//
// Every function equals the torch reference in `quant/` to the byte. All arithmetic is IEEE FP32,
// rounded to nearest even; the build forbids contraction and fast math. Vectors are those of GCC
// and Clang, so the same source serves any CPU.
//
// Legend: R rows, K columns, T tokens. A unit is 16 neighbouring elements; blocks are whole units.

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x4 __attribute__((vector_size(4)));

enum Dtype { BF16 = 0, FP32 = 1 };
enum Element { E2M1 = 0, E4M3 = 1 };
enum Scale { NVFP4 = 0, E8M0 = 1, FP32_POWER = 2, FP32_FREE = 3 };

constexpr int UNIT = 16;
constexpr int CHUNK = 1024;             // columns that a one-row pass holds in the first-level cache
constexpr int MAX_BUFFER = 128 * 128;   // the largest block, 128 x 128
constexpr int64_t SERIAL = 1 << 15;     // elements under which a second thread does not pay

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
inline i32x8 isplat(int32_t v) { return i32x8{v, v, v, v, v, v, v, v}; }
inline f32x8 magnitude(f32x8 v) { return (f32x8)((i32x8)v & 0x7fffffff); }
// The first operand where it is smaller (larger), else the second, so a NaN in the first is dropped.
inline f32x8 min(f32x8 a, f32x8 b) { return a < b ? a : b; }
inline f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }
inline i32x8 max(i32x8 a, i32x8 b) { return a > b ? a : b; }

inline f32x8 widen(u16x8 v) { return (f32x8)(__builtin_convertvector(v, i32x8) << 16); }

// FP32 to BF16 bits in 32-bit lanes: nearest even; any NaN becomes torch's.
inline i32x8 to_bf16(f32x8 v) {
  i32x8 b = (i32x8)v;
  i32x8 rounded = (i32x8)((b + 0x7fff + ((b >> 16) & 1))) >> 16 & 0xffff;
  return v == v ? rounded : isplat(0x7fc0);
}

// ---- Rounding to an element type ----------------------------------------------------------------

template <int ELEMENT>
struct Type;
template <>
struct Type<E2M1> {
  static constexpr int mantissa = 1, lowest = 127;  // lowest: biased FP32 exponent of the first normal
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

// Nearest even. Adding `magic`, whose unit in the last place is the element's step at this magnitude,
// rounds in the FP32 adder; the low bits of the sum are then the code within its binade.
template <int ELEMENT>
inline Rounded<ELEMENT> nearest(f32x8 magnitude) {
  using T = Type<ELEMENT>;
  i32x8 exponent = max((i32x8)magnitude & 0x7f800000, isplat(T::lowest << 23));
  i32x8 magic = exponent + ((23 - T::mantissa) << 23);
  f32x8 sum = magnitude + (f32x8)magic;
  i32x8 binade = ((exponent >> 23) - T::lowest) << T::mantissa;
  return {(i32x8)sum - magic + binade, sum - (f32x8)magic};
}

// Round E2M1 up when floor(256 * frac) + random reaches 256.
inline i32x8 stochastic_e2m1(f32x8 magnitude, i32x8 random) {
  i32x8 exponent = max((i32x8)magnitude & 0x7f800000, isplat(127 << 23));
  i32x8 factor = ((127 + 127 + 9) << 23) - exponent;  // 2^9, 2^8, 2^7 below 2, 4, 8
  i32x8 position = __builtin_convertvector(magnitude * (f32x8)factor, i32x8);
  i32x8 binade = ((exponent >> 23) - 127) << 9;
  return (position + binade + random) >> 8;
}

// ---- Philox4x32-10 ------------------------------------------------------------------------------

struct Random {
  uint32_t key[2];
  uint32_t counter[3];  // the words after the first, which is the index of the unit
};

// Product of the low halves of 64-bit lanes.
inline u64x4 multiply(u64x4 a, uint64_t b) {
#ifdef __AVX2__
  return (u64x4)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((long long)b));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// The bytes of `count` units from `first`, rounded up to four units: `out` has room for them.
// Words lie in 64-bit lanes, one unit a lane; their upper halves are not cleared in between.
void random_units(const Random& random, uint64_t first, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 4, out += 4 * UNIT) {
    uint64_t base = first + uint64_t(i);
    u64x4 zero = {};
    u64x4 c0 = u64x4{base, base + 1, base + 2, base + 3}, c1 = zero + random.counter[0];
    u64x4 c2 = zero + random.counter[1], c3 = zero + random.counter[2];
    uint32_t k0 = random.key[0], k1 = random.key[1];
    for (int round = 0; round < 10; round++) {
      u64x4 p0 = multiply(c0, 0xD2511F53u), p1 = multiply(c2, 0xCD9E8D57u);
      c0 = (p1 >> 32) ^ c1 ^ k0;
      c2 = (p0 >> 32) ^ c3 ^ k1;
      c1 = p1;
      c3 = p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    u64x4 front = (c0 & 0xffffffffu) | (c1 << 32), back = (c2 & 0xffffffffu) | (c3 << 32);
    for (int unit = 0; unit < 4; unit++) {
      uint64_t halves[2] = {front[unit], back[unit]};
      std::memcpy(out + unit * UNIT, halves, UNIT);
    }
  }
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

// Scales of eight blocks and the factor (or, for free FP32 scales, the divisor) of their elements.
struct Scales {
  i32x8 bits;
  f32x8 factor;
};

inline Scales nvfp4_scales(f32x8 amax, const ScaleRule& rule) {
  f32x8 wanted = min(amax * rule.block, splat(FLT_MAX));
  auto scale = nearest<E4M3>(min(wanted, splat(448.0f)));
  return {scale.code, min(1.0f / (scale.value * rule.rest), splat(FLT_MAX))};
}

inline Scales power_scales(f32x8 amax, const ScaleRule& rule) {
  bool four_bits = rule.element == E2M1;
  i32x8 bits = (i32x8)min(amax, splat(FLT_MAX));
  i32x8 biased = (bits >> 23) - (four_bits ? 2 : 8);  // exponent of 6 and of 448
  int32_t largest = four_bits ? 0x400000 : 0x600000;  // mantissa of 6 and of 448
  if (rule.up) biased += ((bits & 0x7fffff) > largest) & 1;
  bool fp32 = rule.kind == FP32_POWER;
  biased = max(biased, isplat(fp32 ? 1 : 0));
  if (fp32) biased = amax == 0.0f ? isplat(127) : biased;
  i32x8 inverse = 254 - biased;
  inverse = inverse == 0 ? isplat(0x400000) : inverse << 23;
  return {fp32 ? biased << 23 : biased, (f32x8)inverse};
}

inline Scales free_scales(f32x8 amax) {
  f32x8 scale = max(min(amax, splat(FLT_MAX)) / 448.0f, splat(FLT_MIN));
  scale = amax == 0.0f ? splat(1.0f) : scale;
  return {(i32x8)scale, scale};
}

inline Scales block_scales(f32x8 amax, const ScaleRule& rule) {
  if (rule.kind == NVFP4) return nvfp4_scales(amax, rule);
  return rule.kind == FP32_FREE ? free_scales(amax) : power_scales(amax, rule);
}

// ---- Quantize -----------------------------------------------------------------------------------

// `count` elements as FP32, then zeros up to `padded`.
template <int DTYPE>
void load_row(const void* x, int64_t start, int count, int padded, float* out) {
  if (DTYPE == BF16) {
    const uint16_t* p = (const uint16_t*)x + start;
    int i = 0;
    for (; i + 8 <= count; i += 8) store(out + i, widen(load<u16x8>(p + i)));
    for (; i < count; i++) {
      uint32_t bits = uint32_t(p[i]) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  } else {
    std::memcpy(out, (const float*)x + start, sizeof(float) * count);
  }
  std::fill(out + count, out + padded, 0.0f);
}

// Codes of one unit, one a byte.
template <int ELEMENT, bool STOCHASTIC>
inline void encode_unit(const float* x, f32x8 first, f32x8 factor, bool divide,
                        const uint8_t* random, uint8_t* codes) {
  for (int half = 0; half < UNIT; half += 8) {
    f32x8 v = load<f32x8>(x + half);
    f32x8 y = divide ? v / factor : (v * first) * factor;
    f32x8 a = min(magnitude(y), splat(Type<ELEMENT>::largest));
    i32x8 code;
    if (STOCHASTIC) {
      code = stochastic_e2m1(a, __builtin_convertvector(load<u8x8>(random + half), i32x8));
    } else {
      code = nearest<ELEMENT>(a).code;
    }
    if (ELEMENT == E2M1) {
      code |= (y < 0.0f) & 8;
    } else {
      code = y == y ? code : isplat(0x7f);
      code |= (i32x8)(((i32x8)y >> 24) & 0x80);
    }
    store(codes + half, __builtin_convertvector(code, u8x8));
  }
}

void pack(const uint8_t* codes, int count, uint8_t* out) {
  for (int i = 0; i < count / 2; i++) {
    uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    out[i] = uint8_t(pair | pair >> 4);
  }
}

struct Job {
  const void* x;
  int64_t rows, columns;
  int block_rows, block_columns;
  ScaleRule rule;
  Random random;
  int64_t offset;
  uint8_t* codes;
  void* scales;
};

// One row of blocks, `height` rows from `row`.
template <int DTYPE, int ELEMENT, bool STOCHASTIC>
void quantize_rows(const Job& job, int64_t row, int height, int width) {
  alignas(32) float buffer[MAX_BUFFER];
  alignas(32) float amax[CHUNK / UNIT], factor[CHUNK / UNIT];
  alignas(32) int32_t bits[CHUNK / UNIT];
  alignas(32) uint8_t codes[CHUNK], random[CHUNK + 5 * UNIT];
  const int units_a_block = job.block_columns / UNIT;
  const int64_t blocks_a_row = (job.columns + job.block_columns - 1) / job.block_columns;
  const bool divide = job.rule.kind == FP32_FREE;
  const bool wide_scale = job.rule.kind == FP32_POWER || divide;
  for (int64_t start = 0; start < job.columns; start += width) {
    const int count = int(std::min<int64_t>(width, job.columns - start));
    const int blocks = (count + job.block_columns - 1) / job.block_columns;
    const int padded = blocks * job.block_columns;
    std::memset(amax, 0, sizeof amax);
    for (int r = 0; r < height; r++) {
      float* x = buffer + r * width;
      load_row<DTYPE>(job.x, (row + r) * job.columns + start, count, padded, x);
      for (int b = 0, u = 0; b < blocks; b++) {
        f32x8 most = {};
        for (int i = 0; i < units_a_block; i++, u++) {
          most = max(magnitude(load<f32x8>(x + u * UNIT)), most);
          most = max(magnitude(load<f32x8>(x + u * UNIT + 8)), most);
        }
        float largest = amax[b];
        for (int lane = 0; lane < 8; lane++) largest = most[lane] > largest ? most[lane] : largest;
        amax[b] = largest;
      }
    }
    for (int b = 0; b < blocks; b += 8) {
      Scales scales = block_scales(load<f32x8>(amax + b), job.rule);
      store(bits + b, scales.bits);
      store(factor + b, scales.factor);
    }
    for (int r = 0; r < height; r++) {
      const float* x = buffer + r * width;
      const int64_t element = (row + r) * job.columns + start;
      const uint8_t* bytes = nullptr;
      if (STOCHASTIC) {
        const int64_t global = job.offset + element, unit = global / UNIT;
        const int64_t units = (global + count - 1) / UNIT - unit + 1;
        random_units(job.random, uint64_t(unit), units, random);
        bytes = random + (global - unit * UNIT);
      }
      for (int u = 0, b = 0; b < blocks; b++) {
        for (int i = 0; i < units_a_block; i++, u++) {
          encode_unit<ELEMENT, STOCHASTIC>(x + u * UNIT, splat(job.rule.first), splat(factor[b]),
                                           divide, bytes + u * UNIT, codes + u * UNIT);
        }
      }
      if (ELEMENT == E2M1) {
        pack(codes, count, job.codes + element / 2);
      } else {
        std::memcpy(job.codes + element, codes, count);
      }
      const int64_t block = (row + r) * blocks_a_row + start / job.block_columns;
      if (wide_scale) {
        std::memcpy((float*)job.scales + block, bits, sizeof(float) * blocks);
      } else {
        for (int b = 0; b < blocks; b++) ((uint8_t*)job.scales)[block + b] = uint8_t(bits[b]);
      }
    }
  }
}

template <int DTYPE, int ELEMENT, bool STOCHASTIC>
void quantize_all(const Job& job, int threads) {
  const int width = std::min(CHUNK, MAX_BUFFER / job.block_rows);
  const int64_t row_blocks = (job.rows + job.block_rows - 1) / job.block_rows;
  if (job.rows * job.columns < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < row_blocks; i++) {
    const int64_t row = i * job.block_rows;
    const int height = int(std::min<int64_t>(job.block_rows, job.rows - row));
    quantize_rows<DTYPE, ELEMENT, STOCHASTIC>(job, row, height, width);
  }
}

// ---- Amax and the count of NaN and infinity --------------------------------------------------------

struct Stats {
  uint32_t amax;  // magnitude bits of the largest element that is not NaN
  int64_t nonfinite;
};

template <class U, U INFINITE>
Stats stats(const U* x, int64_t n) {
  Stats total = {0, 0};
  for (int64_t start = 0; start < n; start += 4096) {
    const int64_t end = std::min(n, start + 4096);
    U amax = 0, count = 0;
    for (int64_t i = start; i < end; i++) {
      U bits = x[i] & U(U(~U(0)) >> 1);
      count = U(count + (bits >= INFINITE));
      U finite = bits > INFINITE ? U(0) : bits;
      amax = finite > amax ? finite : amax;
    }
    total.amax = std::max<uint32_t>(total.amax, amax);
    total.nonfinite += count;
  }
  return total;
}

inline Stats stats_of(const void* x, int dtype, int64_t start, int64_t n) {
  if (dtype == FP32) return stats<uint32_t, 0x7f800000u>((const uint32_t*)x + start, n);
  Stats s = stats<uint16_t, 0x7f80>((const uint16_t*)x + start, n);
  s.amax <<= 16;
  return s;
}

inline void merge(Stats& total, const Stats& part) {
  total.amax = std::max(total.amax, part.amax);
  total.nonfinite += part.nonfinite;
}

// ---- Random Hadamard transform, transposed ---------------------------------------------------------

constexpr int TILE = 64;  // tokens and columns of one step: whole cache lines on both sides

// Eight vectors of 32-bit lanes, transposed.
inline void transpose8(i32x8 (&r)[8]) {
  i32x8 t[8], s[8];
  for (int i = 0; i < 4; i++) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 2; j++) {
      const i32x8 a = t[4 * i + j], b = t[4 * i + 2 + j];
      s[4 * i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      s[4 * i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; i++) {
    r[i] = __builtin_shufflevector(s[i], s[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(s[i], s[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// SIZE tokens of eight columns: out[column * TILE + token], BF16 bits.
template <int SIZE>
inline void hadamard_tile(const float* x, const float* signs, uint16_t* out) {
  f32x8 v[SIZE];
  for (int t = 0; t < SIZE; t++) v[t] = load<f32x8>(x + t * TILE) * signs[t];
#pragma GCC unroll 5
  for (int stride = 1; stride < SIZE; stride *= 2) {
    for (int pair = 0; pair < SIZE / 2; pair++) {
      const int low = (pair / stride) * 2 * stride + pair % stride;
      const f32x8 a = v[low], b = v[low + stride];
      v[low] = a + b;
      v[low + stride] = a - b;
    }
  }
  const float scale = SIZE == 16 ? 0.25f : 0.17677669529663689f;
  for (int group = 0; group < SIZE; group += 16) {
    i32x8 pairs[8];
    for (int i = 0; i < 8; i++) {
      const int t = group + 2 * i;
      pairs[i] = to_bf16(v[t] * scale) | (to_bf16(v[t + 1] * scale) << 16);
    }
    transpose8(pairs);
    for (int column = 0; column < 8; column++) store(out + column * TILE + group, pairs[column]);
  }
}

template <int DTYPE, int SIZE>
void hadamard_block(const void* x, int64_t T, int64_t K, int64_t padded_T, int64_t k, int columns,
                    const float* signs, uint16_t* y, Stats& of_x, Stats& of_y) {
  alignas(32) float tile[TILE * TILE];
  alignas(32) uint16_t out[TILE * TILE];
  for (int64_t t = 0; t < padded_T; t += TILE) {
    const int tokens = int(std::min<int64_t>(TILE, padded_T - t));
    const int present = int(std::clamp<int64_t>(T - t, 0, TILE));
    for (int r = 0; r < present; r++) {
      load_row<DTYPE>(x, (t + r) * K + k, columns, TILE, tile + r * TILE);
      merge(of_x, stats_of(x, DTYPE, (t + r) * K + k, columns));
    }
    std::fill(tile + present * TILE, tile + TILE * TILE, 0.0f);
    for (int column = 0; column < columns; column += 8) {
      for (int group = 0; group < tokens; group += SIZE) {
        hadamard_tile<SIZE>(tile + group * TILE + column, signs, out + column * TILE + group);
      }
    }
    for (int column = 0; column < columns; column++) {
      uint16_t* target = y + (k + column) * padded_T + t;
      std::memcpy(target, out + column * TILE, sizeof(uint16_t) * tokens);
      merge(of_y, stats<uint16_t, 0x7f80>(out + column * TILE, tokens));
    }
  }
}

template <int DTYPE, int SIZE>
void hadamard_all(const void* x, int64_t T, int64_t K, const float* signs, uint16_t* y,
                  Stats& of_x, Stats& of_y, int threads) {
  const int64_t padded_T = (T + SIZE - 1) / SIZE * SIZE;
  if (T * K < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t k = 0; k < K; k += TILE) {
    Stats mine_x = {0, 0}, mine_y = {0, 0};
    const int columns = int(std::min<int64_t>(TILE, K - k));
    hadamard_block<DTYPE, SIZE>(x, T, K, padded_T, k, columns, signs, y, mine_x, mine_y);
#pragma omp critical
    {
      merge(of_x, mine_x);
      merge(of_y, mine_y);
    }
  }
}

// ---- Dequantize ------------------------------------------------------------------------------------

inline f32x8 decode_e2m1(const uint8_t* packed) {
  // One byte a 64-bit lane, then its two codes in that lane's halves.
  u64x4 bytes = __builtin_convertvector(load<u8x4>(packed), u64x4);
  i32x8 code = (i32x8)(bytes | bytes << 28) & 15;
  // 2^(code / 2 - 1) * 1 or 1.5 is the FP32 number with these bits; codes 0 and 1 are subnormal.
  i32x8 index = code & 7;
  i32x8 normal = (index << 22) + (126 << 23);
  i32x8 subnormal = -index & (126 << 23);
  i32x8 value = index < 2 ? subnormal : normal;
  return (f32x8)(value | (code & 8) << 28);
}

inline f32x8 decode_e4m3(const uint8_t* codes) {
  i32x8 code = __builtin_convertvector(load<u8x8>(codes), i32x8);
  i32x8 index = code & 0x7f;
  f32x8 normal = (f32x8)((index << 20) + (120 << 23));
  f32x8 subnormal = __builtin_convertvector(index, f32x8) * 0.001953125f;
  f32x8 value = index < 8 ? subnormal : normal;
  value = index == 0x7f ? (f32x8)isplat(0x7fc00000) : value;
  return (f32x8)((i32x8)value | (code & 0x80) << 24);
}

float scale_value(const void* scales, int kind, int64_t i) {
  uint32_t bits;
  if (kind == FP32_POWER || kind == FP32_FREE) return ((const float*)scales)[i];
  const uint8_t byte = ((const uint8_t*)scales)[i];
  if (kind == NVFP4) {
    alignas(32) uint8_t codes[8] = {byte};
    return decode_e4m3(codes)[0];
  }
  bits = byte == 255 ? 0x7fc00000u : byte ? uint32_t(byte) << 23 : 0x400000u;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <int ELEMENT>
void dequantize_row(const uint8_t* codes, const void* scales, int64_t first_block, int kind,
                    int block_columns, int64_t columns, float outer, int dtype, void* out) {
  alignas(32) float values[UNIT];
  for (int64_t start = 0; start < columns; start += UNIT) {
    const int count = int(std::min<int64_t>(UNIT, columns - start));
    const float scale = scale_value(scales, kind, first_block + start / block_columns);
    uint8_t last[UNIT] = {};
    const uint8_t* source = codes + (ELEMENT == E2M1 ? start / 2 : start);
    if (count < UNIT) {
      std::memcpy(last, source, ELEMENT == E2M1 ? (count + 1) / 2 : count);
      source = last;
    }
    for (int half = 0; half < UNIT; half += 8) {
      f32x8 v = ELEMENT == E2M1 ? decode_e2m1(source + half / 2) : decode_e4m3(source + half);
      v = (v * scale) * outer;
      if (dtype == BF16) {
        store((uint16_t*)values + half, __builtin_convertvector(to_bf16(v), u16x8));
      } else {
        store(values + half, v);
      }
    }
    const int size = dtype == BF16 ? 2 : 4;
    std::memcpy((char*)out + start * size, values, size_t(size) * count);
  }
}

}  // namespace

extern "C" {

// Codes and plain block scales of x [rows, columns]. `random` holds Philox's two key words and the
// counter's last three, or is null for nearest rounding.
void quantize(const void* x, int dtype, int64_t rows, int64_t columns, int element, int scale,
              int up, int block_rows, int block_columns, float first, float rest, float block,
              const uint32_t* random, int64_t offset, uint8_t* codes, void* scales, int threads) {
  Job job = {x, rows, columns, block_rows, block_columns,
             {scale, element, up, first, rest, block}, {}, offset, codes, scales};
  if (random) std::memcpy(&job.random, random, sizeof job.random);
  if (element == E4M3) {
    dtype == BF16 ? quantize_all<BF16, E4M3, false>(job, threads)
                  : quantize_all<FP32, E4M3, false>(job, threads);
  } else if (random) {
    dtype == BF16 ? quantize_all<BF16, E2M1, true>(job, threads)
                  : quantize_all<FP32, E2M1, true>(job, threads);
  } else {
    dtype == BF16 ? quantize_all<BF16, E2M1, false>(job, threads)
                  : quantize_all<FP32, E2M1, false>(job, threads);
  }
}

// Values code * scale * outer, `columns` a row, as BF16 or FP32.
void dequantize(const uint8_t* codes, const void* scales, int element, int scale,
                int block_columns, int64_t rows, int64_t columns, float outer, int dtype, void* out,
                int threads) {
  const int64_t blocks = (columns + block_columns - 1) / block_columns;
  const int64_t code_bytes = element == E2M1 ? columns / 2 : columns;
  if (rows * columns < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    auto row = element == E2M1 ? dequantize_row<E2M1> : dequantize_row<E4M3>;
    row(codes + r * code_bytes, scales, r * blocks, scale, block_columns, columns, outer, dtype,
        (char*)out + r * columns * (dtype == BF16 ? 2 : 4));
  }
}

// The largest magnitude of n elements, passing over NaN, and how many are NaN or infinite.
void amax_and_nonfinite(const void* x, int dtype, int64_t n, float* amax, int64_t* nonfinite,
                        int threads) {
  constexpr int64_t part = 1 << 16;
  Stats total = {0, 0};
  if (n < 4 * SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < n; start += part) {
    Stats mine = stats_of(x, dtype, start, std::min(part, n - start));
#pragma omp critical
    merge(total, mine);
  }
  std::memcpy(amax, &total.amax, 4);
  *nonfinite = total.nonfinite;
}

// y [columns, padded tokens] in BF16 = RHT of x [tokens, columns] along the tokens. `amax` receives
// the largest magnitude of x and of y, `nonfinite` x's count of NaN and infinity.
void rht_transpose(const void* x, int dtype, int64_t tokens, int64_t columns, int size,
                   const float* signs, uint16_t* y, float* amax, int64_t* nonfinite, int threads) {
  Stats of_x = {0, 0}, of_y = {0, 0};
  auto all = dtype == BF16
                 ? (size == 16 ? hadamard_all<BF16, 16> : hadamard_all<BF16, 32>)
                 : (size == 16 ? hadamard_all<FP32, 16> : hadamard_all<FP32, 32>);
  all(x, tokens, columns, signs, y, of_x, of_y, threads);
  of_y.amax <<= 16;
  std::memcpy(amax, &of_x.amax, 4);
  std::memcpy(amax + 1, &of_y.amax, 4);
  *nonfinite = of_x.nonfinite;
}
}
