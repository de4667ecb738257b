// Block quantizers for CPU tensors: one pass for the amax, one that rounds and packs.
//
// Every function equals the torch reference in `quant/` to the byte; `cpu.py` calls them.
//
// Legend: R rows, K columns. A unit is 16 neighbouring elements; blocks are whole units.

#include "cpu_vectors.h"
#ifdef __AVX2__
#include "cpu_bf16.h"
#endif

namespace {

// ---- Philox4x32-10 ------------------------------------------------------------------------------

struct Random {
  uint32_t key[2];
  uint32_t counter[3];  // the words after the first, which is the index of the unit
};

// The bytes of `count` units from `first`, rounded up to eight units: `out` has room for them.
// Words lie in 64-bit lanes, one unit a lane; their upper halves are not cleared in between. Two
// vectors advance together, because one alone would wait for its own products.
void random_units(const Random& random, uint64_t first, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 8) {
    u64x4 c0[2], c1[2], c2[2], c3[2];
    for (int v = 0; v < 2; v++) {
      c0[v] = u64x4{0, 1, 2, 3} + (first + uint64_t(i + 4 * v));
      c1[v] = u64x4{} + random.counter[0];
      c2[v] = u64x4{} + random.counter[1];
      c3[v] = u64x4{} + random.counter[2];
    }
    uint32_t k0 = random.key[0], k1 = random.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const u64x4 p0 = multiply(c0[v], 0xD2511F53u), p1 = multiply(c2[v], 0xCD9E8D57u);
        c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
        c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
        c1[v] = p1;
        c3[v] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int v = 0; v < 2; v++) {
      const u64x4 front = (c0[v] & 0xffffffffu) | (c1[v] << 32);
      const u64x4 back = (c2[v] & 0xffffffffu) | (c3[v] << 32);
      store(out, __builtin_shufflevector(front, back, 0, 4, 1, 5));
      store(out + 2 * UNIT, __builtin_shufflevector(front, back, 2, 6, 3, 7));
      out += 4 * UNIT;
    }
  }
}

// ---- Block scales -------------------------------------------------------------------------------

// Scales of eight blocks and the factor (or, for free FP32 scales, the divisor) of their elements.
struct Scales {
  i32x8 bits;
  f32x8 factor;
};

inline Scales nvfp4_scales(f32x8 amax, const ScaleRule& rule) {
  const Nvfp4Scale scale = nvfp4_scale(amax, rule);
  return {scale.code, min(1.0f / scale.decode, splat(FLT_MAX))};
}

inline Scales power_scales(f32x8 amax, const ScaleRule& rule) {
  bool four_bits = rule.element == E2M1;
  i32x8 bits = (i32x8)min(amax, splat(FLT_MAX));
  i32x8 biased = (bits >> 23) - (four_bits ? 2 : 8);  // exponent of 6 and of 448
  int32_t largest = four_bits ? 0x400000 : 0x600000;  // mantissa of 6 and of 448
  if (rule.up) biased += ((bits & 0x7fffff) > largest) & 1;
  bool fp32 = rule.kind == FP32_POWER;
  biased = max(biased, splat(fp32 ? 1 : 0));
  if (fp32) biased = amax == 0.0f ? splat(127) : biased;
  i32x8 inverse = 254 - biased;
  inverse = inverse == 0 ? splat(0x400000) : inverse << 23;
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

// Codes of eight elements.
template <int ELEMENT, bool STOCHASTIC>
inline i32x8 encode(const float* x, f32x8 factor, bool divide, const uint8_t* random) {
  const f32x8 v = load<f32x8>(x);
  const f32x8 y = ELEMENT == E4M3 && divide ? v / factor : v * factor;
  const f32x8 a = min(magnitude(y), splat(Type<ELEMENT>::largest));
  i32x8 code = STOCHASTIC ? stochastic_e2m1(a, widen_bytes(random)) : nearest<ELEMENT>(a).code;
  if (ELEMENT == E2M1) return code | ((y < 0.0f) & 8);
  code = y == y ? code : splat(0x7f);
  return code | (((i32x8)y >> 24) & 0x80);
}

// Two units: 16 packed bytes of E2M1, or 32 of E4M3.
template <int ELEMENT, bool STOCHASTIC>
inline void encode_units(const float* x, const float* factors, bool divide,
                         const uint8_t* random, uint8_t* out) {
  const f32x8 f0 = splat(factors[0]), f1 = splat(factors[1]);
  const u8x32 codes =
      narrow(encode<ELEMENT, STOCHASTIC>(x, f0, divide, random),
             encode<ELEMENT, STOCHASTIC>(x + 8, f0, divide, random + 8),
             encode<ELEMENT, STOCHASTIC>(x + 16, f1, divide, random + 16),
             encode<ELEMENT, STOCHASTIC>(x + 24, f1, divide, random + 24));
  if (ELEMENT == E4M3) return store(out, codes);
  const u16x16 pairs = (u16x16)codes;  // the even element is the low byte
  store(out, narrow((u16x16)((pairs | pairs >> 4) & 0xff)));
}

// Largest magnitude of each of eight units.
inline f32x8 unit_amax(const float* x) {
  f32x8 v[8];
#pragma GCC unroll 8
  for (int u = 0; u < 8; u++) {
    const f32x8 low = magnitude(load<f32x8>(x + u * UNIT));
    v[u] = max(magnitude(load<f32x8>(x + u * UNIT + 8)), max(low, f32x8{}));
  }
  return largest_of_each(v, [](f32x8 a, f32x8 b) { return max(a, b); });
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

void store_scales(const Job& job, int64_t block, int blocks, const int32_t* bits) {
  if (job.rule.kind == FP32_POWER || job.rule.kind == FP32_FREE) {
    std::memcpy((float*)job.scales + block, bits, sizeof(float) * blocks);
  } else {
    uint8_t* out = (uint8_t*)job.scales + block;
    for (int b = 0; b < blocks; b++) out[b] = uint8_t(bits[b]);
  }
}

// Columns [first, end) of one row of blocks, `height` rows from `row`, in steps of `width` columns.
template <int DTYPE, int ELEMENT, bool STOCHASTIC>
void quantize_columns(const Job& job, int64_t row, int height, int64_t first, int64_t end,
                      int width) {
  alignas(32) float buffer[MAX_BUFFER];
  alignas(32) float amax[MAX_UNITS], factor[MAX_UNITS];
  alignas(32) int32_t bits[MAX_UNITS];
  alignas(32) uint8_t codes[2 * UNIT], random[CHUNK + 9 * UNIT];
  const int units_a_block = job.block_columns / UNIT;
  const int64_t blocks_a_row = (job.columns + job.block_columns - 1) / job.block_columns;
  const bool divide = job.rule.kind == FP32_FREE;
  for (int64_t start = first; start < end; start += width) {
    const int count = int(std::min<int64_t>(width, end - start));
    const int blocks = (count + job.block_columns - 1) / job.block_columns;
    const int units = (count + UNIT - 1) / UNIT;
    std::memset(amax, 0, sizeof amax);
    for (int r = 0; r < height; r++) {
      float* x = buffer + r * width;
      load_row<DTYPE>(job.x, (row + r) * job.columns + start, count, round_up(count, 128), x);
      for (int u = 0; u < units; u += 8) {
        store(amax + u, max(unit_amax(x + u * UNIT), load<f32x8>(amax + u)));
      }
    }
    for (int b = 0; units_a_block > 1 && b < blocks; b++) {
      const float* of_units = amax + b * units_a_block;
      amax[b] = *std::max_element(of_units, of_units + units_a_block);
    }
    for (int b = 0; b < blocks; b += 8) {
      const Scales scales = block_scales(load<f32x8>(amax + b), job.rule);
      store(bits + b, scales.bits);
      store(factor + b, scales.factor);
    }
    for (int u = units - 1; units_a_block > 1 && u >= 0; u--) factor[u] = factor[u / units_a_block];
    for (int r = 0; r < height; r++) {
      float* x = buffer + r * width;
      for (int i = 0; job.rule.first != 1.0f && i < count; i++) x[i] *= job.rule.first;
      const int64_t element = (row + r) * job.columns + start;
      const uint8_t* bytes = random;
      if (STOCHASTIC) {
        const int64_t index = job.offset + element, unit = index / UNIT;
        random_units(job.random, uint64_t(unit), (index + count - 1) / UNIT - unit + 1, random);
        bytes = random + (index - unit * UNIT);
      }
      uint8_t* out = job.codes + element * BITS<ELEMENT> / 8;
      const int pairs = count / (2 * UNIT), rest = count % (2 * UNIT);
      for (int i = 0; i < pairs; i++) {
        encode_units<ELEMENT, STOCHASTIC>(x + i * 2 * UNIT, factor + 2 * i, divide,
                                          bytes + i * 2 * UNIT, out + i * 4 * BITS<ELEMENT>);
      }
      if (rest) {
        encode_units<ELEMENT, STOCHASTIC>(x + pairs * 2 * UNIT, factor + 2 * pairs, divide,
                                          bytes + pairs * 2 * UNIT, codes);
        std::memcpy(out + pairs * 4 * BITS<ELEMENT>, codes, rest * BITS<ELEMENT> / 8);
      }
      store_scales(job, (row + r) * blocks_a_row + start / job.block_columns, blocks, bits);
    }
  }
}

#ifdef __AVX2__
// One row of blocks, BF16 to NVFP4 by nearest rounding: in 16-bit lanes where that is exact.
template <int ROWS>
void quantize_bf16_row(const Job& job, int64_t row) {
  const int64_t blocks_a_row = (job.columns + UNIT - 1) / UNIT;
  const int64_t whole = job.columns / GROUP * GROUP;
  Step step;
  for (int64_t start = 0; start < whole; start += CHUNK) {
    const int groups = int(std::min<int64_t>(CHUNK, whole - start) / GROUP);
    const int64_t element = row * job.columns + start;
    const Place place = {(const uint16_t*)job.x + element, job.columns, job.codes + element / 2,
                         (uint8_t*)job.scales + row * blocks_a_row + start / UNIT, blocks_a_row};
    pack_bf16<ROWS>(place, job.rule, groups, step);
    for (int g = 0; g < groups; g++) {
      const int64_t first = start + g * GROUP;
      if (step.regular[g]) continue;
      quantize_columns<BF16, E2M1, false>(job, row, ROWS, first, first + GROUP, GROUP);
    }
  }
  if (whole == job.columns) return;
  quantize_columns<BF16, E2M1, false>(job, row, ROWS, whole, job.columns, GROUP);
}

// Whether there is a faster way for this row of blocks, and it was taken.
template <int DTYPE, int ELEMENT, bool STOCHASTIC>
bool quantize_short(const Job& job, int64_t row, int height) {
  const bool nvfp4 = job.rule.kind == NVFP4 && job.block_columns == UNIT;
  if (DTYPE != BF16 || ELEMENT != E2M1 || STOCHASTIC || !nvfp4 || job.rule.first != 1.0f) {
    return false;
  }
  if (job.block_rows == 1) return quantize_bf16_row<1>(job, row), true;
  if (height == UNIT) return quantize_bf16_row<UNIT>(job, row), true;
  return false;
}
#else
template <int DTYPE, int ELEMENT, bool STOCHASTIC>
bool quantize_short(const Job&, int64_t, int) {
  return false;
}
#endif

template <int DTYPE, int ELEMENT, bool STOCHASTIC>
void quantize_all(const Job& job, int threads) {
  const int width = std::min(CHUNK, MAX_BUFFER / job.block_rows);
  const int64_t row_blocks = (job.rows + job.block_rows - 1) / job.block_rows;
  if (job.rows * job.columns < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < row_blocks; i++) {
    const int64_t row = i * job.block_rows;
    const int height = int(std::min<int64_t>(job.block_rows, job.rows - row));
    if (quantize_short<DTYPE, ELEMENT, STOCHASTIC>(job, row, height)) continue;
    quantize_columns<DTYPE, ELEMENT, STOCHASTIC>(job, row, height, 0, job.columns, width);
  }
}

void quantize_any(const Job& job, int dtype, bool stochastic, int threads) {
  const bool bf16 = dtype == BF16;
  auto all = bf16 ? quantize_all<BF16, E2M1, false> : quantize_all<FP32, E2M1, false>;
  if (stochastic) all = bf16 ? quantize_all<BF16, E2M1, true> : quantize_all<FP32, E2M1, true>;
  if (job.rule.element == E4M3) {
    all = bf16 ? quantize_all<BF16, E4M3, false> : quantize_all<FP32, E4M3, false>;
  }
  all(job, threads);
}

// ---- Dequantize ---------------------------------------------------------------------------------

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
  i32x8 code = widen_bytes(codes);
  i32x8 index = code & 0x7f;
  f32x8 normal = (f32x8)((index << 20) + (120 << 23));
  f32x8 subnormal = __builtin_convertvector(index, f32x8) * 0.001953125f;
  f32x8 value = index < 8 ? subnormal : normal;
  value = index == 0x7f ? (f32x8)splat(0x7fc00000) : value;
  return (f32x8)((i32x8)value | (code & 0x80) << 24);
}

// The value of every scale byte.
struct ScaleTable {
  alignas(32) float value[256];
  explicit ScaleTable(int kind) {
    for (int byte = 0; byte < 256; byte += 8) {
      uint8_t bytes[8];
      for (int i = 0; i < 8; i++) bytes[i] = uint8_t(byte + i);
      i32x8 power = widen_bytes(bytes) << 23;
      if (byte == 0) power[0] = 0x400000;
      if (byte == 248) power[7] = 0x7fc00000;
      store(value + byte, kind == NVFP4 ? decode_e4m3(bytes) : (f32x8)power);
    }
  }
};

template <int ELEMENT, int DTYPE>
inline void decode_unit(const uint8_t* codes, float scale, float outer, void* out) {
  for (int half = 0; half < UNIT; half += 8) {
    f32x8 v = ELEMENT == E2M1 ? decode_e2m1(codes + half / 2) : decode_e4m3(codes + half);
    v = (v * scale) * outer;
    if (DTYPE == BF16) {
      store((uint16_t*)out + half, narrow(to_bf16(v)));
    } else {
      store((float*)out + half, v);
    }
  }
}

struct Decode {
  const uint8_t* codes;
  const void* scales;
  int scale, block_columns;
  int64_t rows, columns;
  float outer;
  void* out;
};

template <int ELEMENT, int DTYPE>
void dequantize_all(const Decode& job, int threads) {
  constexpr int size = DTYPE == BF16 ? 2 : 4;
  const ScaleTable table(job.scale);
  const bool wide_scale = job.scale == FP32_POWER || job.scale == FP32_FREE;
  const int units_a_block = job.block_columns / UNIT;
  const int64_t blocks = (job.columns + job.block_columns - 1) / job.block_columns;
  if (job.rows * job.columns < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < job.rows; r++) {
    const uint8_t* codes = job.codes + r * job.columns * BITS<ELEMENT> / 8;
    char* out = (char*)job.out + r * job.columns * size;
    for (int64_t start = 0, unit = 0; start < job.columns; start += UNIT, unit++) {
      const int64_t block = r * blocks + unit / units_a_block;
      const float scale = wide_scale ? ((const float*)job.scales)[block]
                                     : table.value[((const uint8_t*)job.scales)[block]];
      const uint8_t* source = codes + start * BITS<ELEMENT> / 8;
      if (start + UNIT <= job.columns) {
        decode_unit<ELEMENT, DTYPE>(source, scale, job.outer, out + start * size);
      } else {
        const size_t count = size_t(job.columns - start);
        uint8_t last[UNIT] = {};
        float values[UNIT];
        std::memcpy(last, source, count * BITS<ELEMENT> / 8);
        decode_unit<ELEMENT, DTYPE>(last, scale, job.outer, values);
        std::memcpy(out + start * size, values, count * size);
      }
    }
  }
}

}  // namespace

extern "C" {

// NVFP4's scalars of one tensor: encode and decode scale, the multiplier of a block's amax, and the
// decode scale's two parts (see `ScaleRule`). `largest` is the largest code times 448.
void global_scales(const float* amax, float largest, float inverse_code, float* out) {
  const float cap = 0x1p126f;
  float encode = std::min(largest / *amax, cap);
  if (*amax == 0.0f || encode == 0.0f) encode = 1.0f;
  const float decode = 1.0f / encode;
  const bool capped = encode == cap;
  const float scales[5] = {encode, decode, encode * inverse_code, capped ? encode : 1.0f,
                           capped ? 1.0f : decode};
  std::memcpy(out, scales, sizeof scales);
}

// Codes and plain block scales of x [rows, columns], in a format without a global scale. `random`
// holds Philox's two key words and the counter's last three, or is null for nearest rounding.
void quantize(const void* x, int dtype, int64_t rows, int64_t columns, int element, int scale,
              int up, int block_rows, int block_columns, const uint32_t* random, int64_t offset,
              uint8_t* codes, void* scales, int threads) {
  const ScaleRule rule = {scale, element, up, 1.0f, 1.0f, 1.0f};
  Job job = {x, rows, columns, block_rows, block_columns, rule, {}, offset, codes, scales};
  if (random) std::memcpy(&job.random, random, sizeof job.random);
  quantize_any(job, dtype, random, threads);
}

// Values code * scale * outer, `columns` a row, as BF16 or FP32.
void dequantize(const uint8_t* codes, const void* scales, int element, int scale,
                int block_columns, int64_t rows, int64_t columns, float outer, int dtype, void* out,
                int threads) {
  const Decode job = {codes, scales, scale, block_columns, rows, columns, outer, out};
  auto all = dtype == BF16
                 ? (element == E2M1 ? dequantize_all<E2M1, BF16> : dequantize_all<E4M3, BF16>)
                 : (element == E2M1 ? dequantize_all<E2M1, FP32> : dequantize_all<E4M3, FP32>);
  all(job, threads);
}

// The largest magnitude of n elements, passing over NaN, and how many are NaN or infinite.
void amax_and_nonfinite(const void* x, int dtype, int64_t n, float* amax, int64_t* nonfinite,
                        int threads) {
  constexpr int64_t part = 1 << 16;  // taken one at a time, as a thread may come late
  Stats total = {0, 0};
  if (n < 4 * SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t start = 0; start < n; start += part) {
    Stats mine = stats_of(x, dtype, start, std::min(part, n - start));
#pragma omp critical
    merge(total, mine);
  }
  std::memcpy(amax, &total.amax, 4);
  *nonfinite = total.nonfinite;
}

// The same to NVFP4, from `amax`, or x's own where that is null; `decode` receives S_dec. For
// `largest` and `inverse_code` see `global_scales`.
void quantize_nvfp4(const void* x, int dtype, int64_t rows, int64_t columns, int block_rows,
                    int block_columns, const float* amax, float largest, float inverse_code,
                    const uint32_t* random, int64_t offset, uint8_t* codes, void* scales,
                    float* decode, int threads) {
  float own, s[5];
  int64_t nonfinite;
  if (!amax) amax_and_nonfinite(x, dtype, rows * columns, &own, &nonfinite, threads);
  global_scales(amax ? amax : &own, largest, inverse_code, s);
  *decode = s[1];
  const ScaleRule rule = {NVFP4, E2M1, 0, s[3], s[4], s[2]};
  Job job = {x, rows, columns, block_rows, block_columns, rule, {}, offset, codes, scales};
  if (random) std::memcpy(&job.random, random, sizeof job.random);
  quantize_any(job, dtype, random, threads);
}
}
