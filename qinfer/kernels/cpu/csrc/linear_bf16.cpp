// Linear layers over bf16 weights with activations rounded to bf16, where the machine multiplies
// pairs of them (vdpbf16ps). See linear.h for the layout of the weights.
//
// The rounding is to nearest, ties to even, and denormals count as zero, in the activations and in
// vdpbf16ps, which adds the products of a pair of columns to a float32 sum. Each output element is
// one such sum over the pairs of columns in ascending order.
#include "kernels.h"
#include "linear_units.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int kTiles = 2;               // whose sums are kept in registers together
constexpr int64_t kChunkColumns = 256;  // of which weights and activations stay in the L1 cache
constexpr int64_t kPairLanes = 2 * kLanes;
constexpr int64_t kAhead = 1024;  // elements

struct alignas(64) Totals {
  float sums[kRows][kTiles][kLanes];
};

// Columns [first, first + count) of a row, rounded; zeros after its last.
inline void round_row(const float* x, int64_t columns, int64_t first, int64_t count,
                      uint16_t* out) {
  for (int64_t i = 0; i < count; i += kPairLanes) {
    const int64_t left = columns - first - i;
    const uint64_t there = left >= kPairLanes ? ~uint64_t{0} : left <= 0 ? 0 : (uint64_t{1} << left) - 1;
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there), x + first + i);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there >> kLanes),
                                              x + first + i + kLanes);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(out + i, &rounded, sizeof rounded);
  }
}

// totals[r][t] += x[r] * tiles[t] for `pairs` pairs of columns.
template <int Rows, int Tiles>
void add_chunk(const uint16_t* const* tiles, const uint16_t* x, int64_t pairs, Totals& totals) {
  __m512 sums[Rows][Tiles];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < Tiles; ++t) sums[r][t] = _mm512_load_ps(totals.sums[r][t]);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512bh weights[Tiles];
#pragma GCC unroll 2
    for (int t = 0; t < Tiles; ++t) {
      const uint16_t* from = tiles[t] + pair * kPairLanes;
      if (Rows > 1) __builtin_prefetch(from + kAhead);
      __builtin_memcpy(&weights[t], from, sizeof weights[t]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      int32_t both;
      __builtin_memcpy(&both, x + r * kChunkColumns + 2 * pair, sizeof both);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 2
      for (int t = 0; t < Tiles; ++t) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], weights[t], value);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < Tiles; ++t) _mm512_store_ps(totals.sums[r][t], sums[r][t]);
  }
}

using AddChunk = void (*)(const uint16_t* const* tiles, const uint16_t* x, int64_t pairs,
                          Totals& totals);

template <int Tiles, int Rows = kRows>
inline AddChunk add_chunk_for(int64_t rows) {
  if constexpr (Rows == 1) {
    return add_chunk<1, Tiles>;
  } else {
    return rows >= Rows ? add_chunk<Rows, Tiles> : add_chunk_for<Tiles, Rows - 1>(rows);
  }
}

void unit(const qinfer_linear& op, int64_t begin, int64_t end, int64_t tile, int64_t num_tiles) {
  const int64_t columns = op.weight.in_features;
  const uint16_t* weights = static_cast<const uint16_t*>(op.weight.data);
  Totals totals[kMaxBlock / kRows];
  __builtin_memset(totals, 0, ceil_div(end - begin, kRows) * sizeof(Totals));
  alignas(64) uint16_t x[kRows * kChunkColumns];
  for (int64_t first = 0; first < columns; first += kChunkColumns) {
    const int64_t count = smaller(kChunkColumns, columns - first);
    const uint16_t* tiles[kTiles];
    for (int64_t t = 0; t < num_tiles; ++t) {
      tiles[t] = weights + ((tile + t) * columns + first) * kLanes;
    }
    for (int64_t token = begin; token < end; token += kRows) {
      const int64_t rows = smaller(kRows, end - token);
      for (int64_t r = 0; r < rows; ++r) {
        round_row(op.float_rows + (token + r) * op.float_stride, op.float_columns, first, count,
                  x + r * kChunkColumns);
      }
      const AddChunk add = num_tiles == kTiles ? add_chunk_for<kTiles>(rows) : add_chunk_for<1>(rows);
      add(tiles, x, count / 2, totals[(token - begin) / kRows]);
    }
  }
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = token - begin;
    for (int64_t t = 0; t < num_tiles; ++t) {
      write(op, token, tile + t, load(totals[row / kRows].sums[row % kRows][t]));
    }
  }
}

}  // namespace

void linear_bf16(const void* args, int32_t thread, int32_t threads) {
  const qinfer_linear& op = *static_cast<const qinfer_linear*>(args);
  if (*op.num_tokens <= 0) return;
  const int64_t block = block_tokens(*op.num_tokens, op.weight.in_features * int64_t{sizeof(float)});
  for_units(op, block, kTiles, unit, thread, threads);
}

}  // namespace QINFER_ISA
}  // namespace qinfer
