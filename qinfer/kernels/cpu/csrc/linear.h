// Linear layers over weights in tiles of 16 rows.
//
// Weight layout: output rows in tiles of 16 (the last one padded with zeros), input columns padded
// with zero codes to a multiple of 32. Within a tile:
//   4 bits: per 8 columns 64 bytes; byte 4 * row + i holds column i in its low and column 4 + i in
//           its high nibble, as unsigned codes (code + 8).
//   8 bits: per 4 columns 64 bytes; byte 4 * row + i holds column i, as unsigned codes (code + 128).
//   bf16: per 2 columns 64 bytes; element 2 * row + i is column i.
//   fp32: per column 16 elements, one per row.
// Scales, and zeros or offsets, per tile and group: [tiles, groups, 16]. An unsigned code stands for
//   (code - zero) * scale, or code * scale + offset
#pragma once

#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

enum qinfer_weight_kind { QINFER_W4 = 0, QINFER_W8 = 1, QINFER_WBF16 = 2, QINFER_WFP32 = 3 };

typedef struct qinfer_tiled_weight {
  const void* data;         // tiles, 64-byte aligned
  const void* scales;       // [tiles, groups, 16]; not read for bf16 and fp32, as the next two
  const int16_t* zeros;     // [tiles, groups, 16], unsigned; NULL = symmetric (8 or 128) or offsets
  const void* offsets;      // [tiles, groups, 16] or NULL; excludes zeros
  int64_t out_features;
  int64_t in_features;      // padded to a multiple of 32
  int64_t group_size;       // a multiple of 32 (channel: in_features)
  int32_t kind;             // qinfer_weight_kind
  int32_t scale_dtype;      // of scales and offsets: QINFER_FLOAT16 or QINFER_FLOAT32 (qinfer_dtype)
} qinfer_tiled_weight;

// out[t, n] = sum_k x[t, k] W[n, k] + bias[n] + residual[t, n], float32.
// Exactly one of `int8_rows` (W4, W8) and `float_rows` (all kinds; the exact mode) is given.
// QINFER_OP_LINEAR_BF16 rounds `float_rows` to bf16; its weight is of that kind (linear_bf16.cpp).
typedef struct qinfer_linear {
  qinfer_tiled_weight weight;
  const qinfer_int8_rows* int8_rows;  // [tokens, in_features padded]
  const float* float_rows;            // [tokens, float_stride]
  int64_t float_stride;
  int64_t float_columns;              // columns of `float_rows`; up to in_features come zeros
  const int32_t* permutation;         // [float_columns] or NULL: column k of the tiles is column
                                      // permutation[k] of `float_rows` (int8_rows are in order)
  const float* bias;                  // [out_features] or NULL
  const float* residual;              // [tokens, out_stride] or NULL; may be `out`
  float* out;                         // [tokens, out_stride]
  int64_t out_stride;
  const int64_t* num_tokens;
} qinfer_linear;

// Repacks weights into tiles; called once at load, on the calling thread. `codes` is int8
// [out, in] (signed: unsigned minus 2^(bits-1)), row-major; `permutation` is int32 [in] or NULL:
// column k of the tiles is column permutation[k] of `codes`.
QINFER_API int32_t qinfer_tile_codes(const int8_t* codes, int64_t out_features, int64_t in_features,
                                     const int32_t* permutation, int32_t bits, void* tiles);
// The same for dense weights: source dtype and tile kind are QINFER_WBF16 or QINFER_WFP32.
QINFER_API int32_t qinfer_tile_dense(const void* weight, int64_t out_features, int64_t in_features,
                                     int32_t kind, void* tiles);

#ifdef __cplusplus
}
#endif
