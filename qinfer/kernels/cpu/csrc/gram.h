// Sums over tokens of products of columns, `sums[i, j] += sum_t left[t, i] * right[t, j]`, from
// values rounded to bf16, where the machine multiplies pairs of them (vdpbf16ps).
//
// Packed rows: columns in panels of 16 (the last one padded with zeros), tokens in pairs (the last
// one too), as bf16 [panels][pairs][16 columns][2 tokens]. One form serves both sides.
#pragma once

#include <stdint.h>

#include "qinfer_cpu.h"

#define QINFER_GRAM_PANEL 16

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qinfer_gram {
  const uint16_t* left;   // packed, 64-byte aligned
  const uint16_t* right;  // the same; `left` itself for the products of columns with each other
  float* sums;            // [left_columns, stride]
  int64_t tokens;
  int64_t left_columns;
  int64_t right_columns;
  int64_t stride;  // at least right_columns
  int32_t upper;   // 1: only sums[i, j] with i <= j are wanted, and of those below the diagonal some
                   // are written; 0: all
  int32_t reserved;
} qinfer_gram;

// Whether the instruction set in use and the machine have the next two: 1 or 0.
QINFER_API int32_t qinfer_has_gram(void);

// Rounds `x` [tokens, columns] (rows `stride` apart) to bf16, to nearest, ties to even; denormals
// become zero. `packed` is 64-byte aligned. Returns a qinfer_status, as the next.
QINFER_API int32_t qinfer_pack_pairs(const float* x, int64_t tokens, int64_t columns,
                                     int64_t stride, uint16_t* packed);

// Adds to rows [row_begin, row_end) of the sums; row_begin is a multiple of QINFER_GRAM_PANEL. The
// order in which products are added to an element does not depend on the rows of a call.
QINFER_API int32_t qinfer_add_gram(const qinfer_gram* gram, int64_t row_begin, int64_t row_end);

#ifdef __cplusplus
}
#endif
