// The small ops between products. All activations are float32, row-major.
#pragma once

#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

// out[t] = table[token_ids[t]]; the table is bf16 or float32 (qinfer_dtype). Ids are not checked.
typedef struct qinfer_embed {
  const void* table;          // [vocab, hidden], or this in the tiles of linear.h
  const int64_t* token_ids;   // [tokens]
  float* out;                 // [tokens, hidden]
  int64_t hidden;
  int32_t dtype;
  int32_t tiled;              // 1: the table lies in tiles; else 0
  const int64_t* num_tokens;
} qinfer_embed;

// RMSNorm (arXiv 1910.07467) of each row: x / sqrt(mean(x^2) + eps) * weight; written as float32
// (`out`) and/or quantized (`int8_rows`); at least one of them is given.
typedef struct qinfer_norm {
  const float* x;             // [tokens, size]
  const float* weight;        // [size]
  float* out;                 // [tokens, size] or NULL
  const qinfer_int8_rows* int8_rows;  // or NULL
  const int32_t* permutation; // [size] or NULL: quantized column k is column permutation[k]
  int64_t size;
  float eps;
  int32_t reserved;
  const int64_t* num_tokens;
  int64_t* bad_layers;        // [tokens] or NULL: `layer` is noted where the sum of squares is not
  int64_t layer;              // finite and nothing (-1) was noted before
} qinfer_norm;

// silu(x[:, :size]) * x[:, size:], float32 and/or quantized as above.
typedef struct qinfer_silu_mul {
  const float* x;             // [tokens, 2 * size]
  float* out;                 // [tokens, size] or NULL
  const qinfer_int8_rows* int8_rows;
  const int32_t* permutation;
  int64_t size;
  const int64_t* num_tokens;
} qinfer_silu_mul;

// Quantizes rows.
typedef struct qinfer_quantize {
  const float* x;             // [tokens, size]
  const qinfer_int8_rows* int8_rows;
  const int32_t* permutation;
  int64_t size;
  const int64_t* num_tokens;
} qinfer_quantize;

// out[r] = x[rows[r]]: the rows whose logits are wanted.
typedef struct qinfer_gather {
  const float* x;             // [tokens, size]
  const int64_t* rows;        // [num_rows]
  float* out;                 // [num_rows, size]
  int64_t size;
  const int64_t* num_rows;
} qinfer_gather;

// out[r] = the lowest index of the largest of a row's values, or -1 if one of them is not finite.
typedef struct qinfer_argmax {
  const float* x;             // [rows, size]
  int64_t* out;               // [rows]
  int64_t size;               // at least 1
  const int64_t* num_rows;
} qinfer_argmax;

// out[r] = where the numbers of a wanted row broke down first: what was noted of its token, else
// what was noted of the row, else `num_layers` if `best` is -1, else -1. Then forgets the notes.
typedef struct qinfer_faults {
  const int64_t* best;        // [num_rows], from qinfer_argmax
  const int64_t* rows;        // [num_rows], the token of each row
  int64_t* token_notes;       // [num_tokens], the bad_layers of norms over tokens
  int64_t* row_notes;         // [num_rows], the bad_layers of the norm over rows
  int64_t* out;               // [num_rows]
  int64_t num_layers;
  const int64_t* num_rows;
  const int64_t* num_tokens;
} qinfer_faults;

#ifdef __cplusplus
}
#endif
