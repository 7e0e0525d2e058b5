// Choosing tokens from rows of logits.
#pragma once

#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

// One token to choose. The row is first edited, then temperature, top-k, top-p and min-p leave some
// of its tokens, each working on what the one before left; of these one is drawn.
typedef struct qinfer_draw {
  const float* logits;         // [size], finite
  const int64_t* edited;       // [num_edits], tokens whose logits are replaced, each once; below size
  const float* values;         // [num_edits], by these: finite or -infinity
  const uint32_t* allowed;     // a bit per token, [ceil(size / 32)], or NULL: all
  int64_t num_edits;
  double number;               // in [0, 1): where in the cumulative distribution to draw
  double top_p;                // 1 = all. Equal logits are kept or dropped together, here and below
  int64_t top_k;               // 0 = all
  float temperature;           // 0 = the most likely token, the lowest id of equals
  float log_min_p;             // natural logarithm of min-p; -infinity = all
} qinfer_draw;

// out[d] = the token that draws[d] chooses, or -1 if it leaves none. A draw's result depends on
// nothing else: neither on other draws, nor on threads, nor on the instruction set.
typedef struct qinfer_sample {
  const qinfer_draw* draws;
  int64_t* out;
  float* scratch;              // [workers, QINFER_SAMPLE_SCRATCH(size)]
  int64_t size;
  int64_t workers;             // threads that take part at most
  const int64_t* num_draws;
} qinfer_sample;

#define QINFER_SAMPLE_CHUNK 64
#define QINFER_SAMPLE_CHUNKS(size) (((size) + QINFER_SAMPLE_CHUNK - 1) / QINFER_SAMPLE_CHUNK)
// Keys and weights of all chunks, and the chunks' largest keys (padded to whole cache lines).
#define QINFER_SAMPLE_SCRATCH(size) \
  (QINFER_SAMPLE_CHUNKS(size) * 2 * QINFER_SAMPLE_CHUNK + (QINFER_SAMPLE_CHUNKS(size) + 15) / 16 * 16)

#ifdef __cplusplus
}
#endif
