// Transposes for the column copies of CPU tensors: the random Hadamard transform and packed codes.
//
// Every function equals the torch reference in `quant/` to the byte; `cpu.py` calls them.
//
// Legend: T tokens, K columns.

#include "cpu_vectors.h"

namespace {

// ---- Random Hadamard transform, transposed ------------------------------------------------------

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
#pragma GCC unroll 32
  for (int t = 0; t < SIZE; t++) v[t] = load<f32x8>(x + t * TILE) * signs[t];
#pragma GCC unroll 5
  for (int stride = 1; stride < SIZE; stride *= 2) {
#pragma GCC unroll 16
    for (int pair = 0; pair < SIZE / 2; pair++) {
      const int low = (pair / stride) * 2 * stride + pair % stride;
      const f32x8 a = v[low], b = v[low + stride];
      v[low] = a + b;
      v[low + stride] = a - b;
    }
  }
  const float scale = SIZE == 16 ? 0.25f : 0.17677669529663689f;
#pragma GCC unroll 2
  for (int group = 0; group < SIZE; group += 16) {
    i32x8 pairs[8];
#pragma GCC unroll 8
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
  constexpr int row_bytes = TILE * (DTYPE == BF16 ? 2 : 4);
  std::memset(out, 0, sizeof out);
  for (int64_t t = 0; t < padded_T; t += TILE) {
    const int tokens = int(std::min<int64_t>(TILE, padded_T - t));
    const int present = int(std::clamp<int64_t>(T - t, 0, TILE));
    for (int r = 0; r < present; r++) {
      // Rows lie too far apart for the hardware to look ahead.
      prefetch<row_bytes, false>(x, ((t + TILE + r) * K + k) * (row_bytes / TILE));
      prefetch<2 * TILE, true>(y, ((k + r) * padded_T + t) * 2);
      load_row<DTYPE>(x, (t + r) * K + k, columns, TILE, tile + r * TILE);
    }
    std::fill(tile + present * TILE, tile + TILE * TILE, 0.0f);
    merge(of_x, stats_of(tile, FP32, 0, TILE * TILE));
    for (int column = 0; column < columns; column += 8) {
      for (int group = 0; group < tokens; group += SIZE) {
        hadamard_tile<SIZE>(tile + group * TILE + column, signs, out + column * TILE + group);
      }
    }
    if (tokens < TILE) {
      for (int column = 0; column < columns; column++) {
        std::fill(out + column * TILE + tokens, out + (column + 1) * TILE, uint16_t(0));
      }
    }
    merge(of_y, stats_bf16(out, TILE * TILE));
    for (int column = 0; column < columns; column++) {
      uint16_t* target = y + (k + column) * padded_T + t;
      std::memcpy(target, out + column * TILE, sizeof(uint16_t) * tokens);
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

// ---- Packed codes -------------------------------------------------------------------------------

// Two rows of packed codes meet in one byte of the transpose, twice: their even and odd columns.
void transpose_tile(const uint8_t* in, int64_t in_bytes, int pairs, int bytes, uint8_t* out,
                    int64_t out_bytes) {
  uint8_t tile[2 * TILE][TILE / 2];
  for (int p = 0; p < pairs; p++) {
    const uint8_t* upper = in + 2 * p * in_bytes;
    const uint8_t* lower = upper + in_bytes;
    for (int j = 0; j < bytes; j++) {
      tile[2 * j][p] = uint8_t((upper[j] & 15) | lower[j] << 4);
      tile[2 * j + 1][p] = uint8_t(upper[j] >> 4 | (lower[j] & 0xf0));
    }
  }
  for (int k = 0; k < 2 * bytes; k++) std::memcpy(out + k * out_bytes, tile[k], pairs);
}

}  // namespace

extern "C" {

// Packed 4-bit codes [rows, columns] to [columns, rows]; both even.
void transpose_codes(const uint8_t* codes, int64_t rows, int64_t columns, uint8_t* out,
                     int threads) {
  const int64_t in_bytes = columns / 2, out_bytes = rows / 2;
  if (rows * columns < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t j = 0; j < in_bytes; j += TILE) {
    const int bytes = int(std::min<int64_t>(TILE, in_bytes - j));
    for (int64_t p = 0; p < out_bytes; p += TILE / 2) {
      const int pairs = int(std::min<int64_t>(TILE / 2, out_bytes - p));
      transpose_tile(codes + 2 * p * in_bytes + j, in_bytes, pairs, bytes,
                     out + 2 * j * out_bytes + p, out_bytes);
    }
  }
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
