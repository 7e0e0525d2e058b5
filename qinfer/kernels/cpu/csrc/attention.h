// Rotation, KV quantization and attention over the paged cache.
#pragma once

#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

enum qinfer_kv_kind { QINFER_KV_FP32 = 0, QINFER_KV_FP16 = 1, QINFER_KV_BF16 = 2,
                      QINFER_KV_FP8_E4M3 = 3, QINFER_KV_INT8 = 4 };

// One layer's pages: elements [blocks, block_size, kv_heads, head_dim], scales bf16
// [blocks, block_size, kv_heads] for FP8 and INT8, else NULL.
typedef struct qinfer_pages {
  void* k;
  void* v;
  uint16_t* k_scales;
  uint16_t* v_scales;
  int32_t kind;        // qinfer_kv_kind
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;
} qinfer_pages;

// For every token: the optional per-head RMSNorm of q and k (Qwen3), rotation of q (in place) and
// k, quantization of k and v by the written formula (scale = bf16_up(amax / 127 or 448), codes from
// the stored scale), and their write to the token's slot. Where k or v of a head is not finite, k is
// stored as NaN and v as 0. k and v in `qkv` are left as they were.
typedef struct qinfer_rope_store {
  float* qkv;                 // [tokens, (heads + 2 * kv_heads) * head_dim]: q, k, v
  const float* cos;           // [positions, head_dim / 2]
  const float* sin;
  const int64_t* positions;   // [tokens]
  const int64_t* slots;       // [tokens], block * block_size + offset
  const float* q_norm;        // [head_dim] or NULL
  const float* k_norm;
  qinfer_pages pages;
  int32_t num_heads;
  float eps;
  const int64_t* num_tokens;
} qinfer_rope_store;

// Causal attention. KV is cut at absolute multiples of QINFER_KV_SPAN positions; each span gives
// every query head a partial result (maximum, sum, mixed values), and these are joined in ascending
// order by one function. Whether a span's result waits in scratch for QINFER_OP_MERGE or is joined
// at once depends on the threads; the bits do not. Positions from a sequence's length on are never
// read, so what a page's unused slots hold does not matter.
//
// QINFER_OP_ATTENTION and then QINFER_OP_MERGE run with the same struct and the same threads.
#define QINFER_KV_SPAN 256
typedef struct qinfer_attention {
  const float* qkv;            // [tokens, (heads + 2 * kv_heads) * head_dim]; q is read
  float* out;                  // [tokens, heads * head_dim]
  float* scratch;              // see qinfer_attention_scratch
  const qinfer_int8_rows* int8_rows;  // where MERGE also writes `out` quantized; or NULL
  const int32_t* permutation;  // or NULL: quantized column k is column permutation[k]
  const int64_t* block_tables; // [sequences, table_width]
  const int64_t* seq_lens;     // [sequences]
  const int64_t* query_starts; // [sequences + 1]
  const int64_t* num_sequences;
  const int64_t* table_width;
  qinfer_pages pages;
  int32_t num_heads;           // a multiple of the kv heads
  int32_t sliding_window;      // tokens that a query sees, itself included; 0 = all before it
  float scale;                 // of the scores, 1 / sqrt(head_dim)
  int32_t reserved;
} qinfer_attention;

#define QINFER_MAX_HEADS 65536
#define QINFER_MAX_HEAD_DIM 512  // and even

// Floats of scratch for runs on up to `threads` threads and sequences of up to `max_context`
// tokens. It does not depend on the batch. -1 if there are no such threads, tokens or heads.
QINFER_API int64_t qinfer_attention_scratch(int32_t threads, int64_t max_context, int32_t num_heads,
                                            int32_t num_kv_heads, int32_t head_dim);

#ifdef __cplusplus
}
#endif
