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
// the stored scale; non-finite: scale NaN), and their write to the token's slot.
typedef struct qinfer_rope_store {
  float* qkv;                 // [tokens, (heads + 2 * kv_heads) * head_dim]: q, k, v
  const float* cos;           // [positions, head_dim / 2]
  const float* sin;
  const int64_t* positions;   // [tokens]
  const int64_t* slots;       // [tokens]
  const float* q_norm;        // [head_dim] or NULL
  const float* k_norm;
  qinfer_pages pages;
  int32_t num_heads;
  float eps;
  const int64_t* num_tokens;
} qinfer_rope_store;

// Causal attention. KV is cut at absolute multiples of QINFER_KV_SPAN positions; each span gives a
// partial result (maximum, sum, mixed values) of each query head, and QINFER_OP_MERGE joins them in
// ascending order, whatever the threads.
#define QINFER_KV_SPAN 256
typedef struct qinfer_attention {
  const float* qkv;            // [tokens, (heads + 2 * kv_heads) * head_dim]; q is read
  float* out;                  // [tokens, heads * head_dim]
  float* partial;              // scratch, see qinfer_attention_scratch
  const qinfer_int8_rows* int8_rows;  // where MERGE also writes `out` quantized; or NULL
  const int32_t* permutation;         // of the quantized columns, or NULL
  const int64_t* block_tables; // [sequences, table_width]
  const int64_t* seq_lens;     // [sequences]
  const int64_t* query_starts; // [sequences + 1]
  const int64_t* num_sequences;
  const int64_t* table_width;
  const int64_t* num_tokens;
  qinfer_pages pages;
  int32_t num_heads;
  int32_t sliding_window;      // 0 = none
  float scale;                 // of the scores, 1 / sqrt(head_dim)
  int32_t reserved;
} qinfer_attention;

// Floats of scratch that steps of up to `max_tokens` tokens and `max_spans` spans per sequence need.
QINFER_API int64_t qinfer_attention_scratch(int64_t max_tokens, int64_t max_spans, int32_t num_heads,
                                            int32_t head_dim);

#ifdef __cplusplus
}
#endif
