// The size of attention's scratch; the same for every instruction set.
#define QINFER_ISA portable
#include "attention_plan.h"

extern "C" int64_t qinfer_attention_scratch(int32_t threads, int64_t max_context,
                                            int32_t num_heads, int32_t num_kv_heads,
                                            int32_t head_dim) {
  using namespace qinfer::portable;
  if (threads < 1 || threads > QINFER_MAX_THREADS || max_context < 0 || max_context > INT32_MAX ||
      num_kv_heads < 1 || num_heads < 1 || num_heads > QINFER_MAX_HEADS ||
      num_heads % num_kv_heads != 0 || head_dim < 1 || head_dim > QINFER_MAX_HEAD_DIM) {
    return -1;
  }
  const int64_t group = num_heads / num_kv_heads;
  const int64_t num_spans = (max_context + kSpan - 1) / kSpan + 1;
  return 16 + threads * round_up(workspace_floats(group, num_kv_heads, head_dim), 16) +
         (threads - 1) * region_floats(group, num_kv_heads, head_dim, num_spans);
}
