// The size of attention's scratch; the same for every instruction set.
#define QINFER_ISA portable
#include "attention_plan.h"

extern "C" int64_t qinfer_attention_scratch(int32_t threads, int64_t max_context,
                                            int32_t num_heads, int32_t num_kv_heads,
                                            int32_t head_dim) {
  using namespace qinfer::portable;
  const int64_t group = num_heads / num_kv_heads;
  const int64_t num_spans = (max_context + kSpan - 1) / kSpan + 1;
  return 16 + threads * round_up(workspace_floats(group, num_kv_heads, head_dim), 16) +
         (threads - 1) * region_floats(group, num_kv_heads, head_dim, num_spans);
}
