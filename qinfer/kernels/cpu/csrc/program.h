// A program: the ops of one step of the model, recorded once and run by one call.
//
// Every op is a function of (arguments, thread, number of threads). All threads of the team call
// it; it takes its own share of the work, cut so that no result depends on the number of threads.
// Between two ops the team meets at a barrier. Sizes that change from step to step (tokens,
// sequence lengths) are read through pointers, so a program is recorded once.
#pragma once

#include <stdint.h>

#include "qinfer_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

enum qinfer_op_kind {
  QINFER_OP_LINEAR = 1,       // linear.h: qinfer_linear
  QINFER_OP_EMBED = 2,        // ops.h: qinfer_embed
  QINFER_OP_NORM = 3,         // ops.h: qinfer_norm
  QINFER_OP_SILU_MUL = 4,     // ops.h: qinfer_silu_mul
  QINFER_OP_QUANTIZE = 5,     // ops.h: qinfer_quantize
  QINFER_OP_GATHER = 6,       // ops.h: qinfer_gather
  QINFER_OP_ROPE_STORE = 7,   // attention.h: qinfer_rope_store
  QINFER_OP_ATTENTION = 8,    // attention.h: qinfer_attention, partial results of KV spans
  QINFER_OP_MERGE = 9,        // attention.h: the same struct; merges the spans in ascending order
  QINFER_OP_ARGMAX = 10,      // ops.h: qinfer_argmax
  QINFER_OP_SAMPLE = 11,      // sample.h: qinfer_sample
  QINFER_OP_FAULTS = 12,      // ops.h: qinfer_faults
  QINFER_OP_LINEAR_BF16 = 13, // linear.h: the same struct; see qinfer_has_op
  QINFER_OP_KINDS = 14
};

typedef struct qinfer_op {
  int32_t kind;      // qinfer_op_kind
  int32_t reserved;  // 0
  const void* args;  // the struct of that kind, alive as long as the program
} qinfer_op;

// Runs `num_ops` ops one after the other on a team of `threads` persistent threads (the caller is
// one of them). The team is made at the first call, kept, and made anew when `threads` changes or
// in the child of a fork; it sleeps while idle and spins only inside a program. One program at a
// time: concurrent callers wait. Returns a qinfer_status; unless it is QINFER_OK nothing has run.
#define QINFER_MAX_THREADS 1024
QINFER_API int32_t qinfer_run(const qinfer_op* ops, int64_t num_ops, int32_t threads);

// Whether the instruction set in use has an op, 1 or 0: QINFER_OP_LINEAR_BF16 needs AVX512-BF16.
QINFER_API int32_t qinfer_has_op(int32_t kind);

// Activations quantized to int8 per token in groups of QINFER_ACTIVATION_GROUP columns. The one
// formula, in float32 and with true divisions, for every op that quantizes:
//   amax  = the largest |x| of the group
//   scale = amax / 127                           NaN if any x of the group is NaN or infinite
//   code  = clamp(half_even(x / scale), +-127)   0 if the scale is 0 or NaN
//   sum   = scale * the sum of the group's codes
// so x ~ code * scale, and a row that is not finite stays visibly broken. The last group of a row
// is padded with zeros. int8.h is this formula in C++.
//
// The layout is that in which the linear op reads: rows in blocks of QINFER_ROW_BLOCK (the last
// one has room for all of them) and, within a block, one qinfer_int8_group per group of columns.
#define QINFER_ACTIVATION_GROUP 32
#define QINFER_ROW_BLOCK 8
typedef struct qinfer_int8_group {
  int8_t codes[8][QINFER_ROW_BLOCK][4];  // [column / 4][row][column % 4]
  float scales[QINFER_ROW_BLOCK];
  float sums[QINFER_ROW_BLOCK];
  int32_t centers[QINFER_ROW_BLOCK];  // -8 times the sum of the codes: what symmetric weights take
                                      // from an integer product
} qinfer_int8_group;
typedef struct qinfer_int8_rows {
  qinfer_int8_group* groups;  // [rows / 8, columns / 32], aligned to 64 bytes
  int64_t columns;            // padded to whole groups
} qinfer_int8_rows;

#ifdef __cplusplus
}
#endif
