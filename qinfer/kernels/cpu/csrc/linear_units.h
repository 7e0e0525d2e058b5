// The units of work of a linear op: blocks of tokens x a few tiles.
//
// Each output element is computed by the same operations in the same order whatever the unit, so
// no result depends on the number of tokens or threads.
#pragma once

#include "linear.h"
#include "linear_simd.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

// A thread's activations of one block of tokens stay in its L2 cache while the tiles pass by.
constexpr int64_t kBlockBytes = 384 << 10;
constexpr int64_t kMaxBlock = 128;
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What `write` does for a tile with rows beyond the last. Not inlined: it is rare and would be long.
__attribute__((noinline)) inline void write_part(const qinfer_linear& op, int64_t token,
                                                 int64_t first, Floats total) {
  float sums[kLanes];
  store(sums, total);
  for (int64_t i = 0; i < op.weight.out_features - first; ++i) {
    if (op.bias) sums[i] += op.bias[first + i];
    if (op.residual) sums[i] += op.residual[token * op.out_stride + first + i];
    op.out[token * op.out_stride + first + i] = sums[i];
  }
}

// Adds bias and residual to 16 sums of one token and writes those that exist.
inline void write(const qinfer_linear& op, int64_t token, int64_t tile, Floats total) {
  const int64_t first = tile * kLanes;
  if (first + kLanes > op.weight.out_features) return write_part(op, token, first, total);
  if (op.bias) total = add(total, load(op.bias + first));
  if (op.residual) total = add(total, load(op.residual + token * op.out_stride + first));
  store(op.out + token * op.out_stride + first, total);
}

using Unit = void (*)(const qinfer_linear& op, int64_t begin, int64_t end, int64_t tile,
                      int64_t tiles);

// Tokens per block, whose rows take `row_bytes` as they are multiplied: blocks of about equal size,
// whole multiples of kRows.
inline int64_t block_tokens(int64_t tokens, int64_t row_bytes) {
  int64_t most = smaller(kMaxBlock, kBlockBytes / row_bytes);
  most = most < kRows ? kRows : most / kRows * kRows;
  const int64_t blocks = ceil_div(tokens, most);
  return ceil_div(ceil_div(tokens, blocks), kRows) * kRows;
}

// Calls `unit` for one thread's share: blocks of `block` tokens and up to `unit_tiles` tiles. Units
// go token block by token block, so that a thread reads its part of the weights in order.
inline void for_units(const qinfer_linear& op, int64_t block, int64_t unit_tiles, Unit unit,
                      int32_t thread, int32_t threads) {
  const int64_t tokens = *op.num_tokens, tiles = ceil_div(op.weight.out_features, kLanes);
  const int64_t columns = ceil_div(tiles, unit_tiles);
  const int64_t units = columns * ceil_div(tokens, block);
  for (int64_t i = units * thread / threads; i < units * (thread + 1) / threads; ++i) {
    const int64_t begin = i / columns * block, tile = i % columns * unit_tiles;
    unit(op, begin, smaller(tokens, begin + block), tile, smaller(unit_tiles, tiles - tile));
  }
}

}  // namespace
}  // namespace QINFER_ISA
}  // namespace qinfer
