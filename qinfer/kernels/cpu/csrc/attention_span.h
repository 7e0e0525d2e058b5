// What the kernels of one span share: the rows and keys of an item, and the state of a row.
#pragma once

#include "attention_plan.h"
#include "attention_simd.h"

namespace qinfer {
namespace QINFER_ISA {

// The query rows of an item: row r is query head r % group of token r / group.
struct Rows {
  const float* q;         // of row 0
  int64_t token_stride;   // floats from one token to the next
  int64_t group;
  int64_t count;
  int64_t head_dim;
  float scale;

  const float* row(int64_t r) const { return q + r / group * token_stride + r % group * head_dim; }
};

// The keys of a span that an item sees; positions count from the start of the span.
struct Keys {
  const qinfer_pages* pages;
  int64_t kv_head;
  int64_t begin;          // keys [begin, end) hold a token that some row sees
  int64_t end;
  int64_t first_visible;  // of row 0; may be negative
  int64_t end_visible;    // of row 0; each further token sees one more key, and one less behind
  int64_t window;         // 0 = none
  int64_t index[kSpan];   // slot of each key, where [begin, end) holds it
};

// Keys [begin, end) of a span that a row sees.
struct Visible {
  int64_t begin;
  int64_t end;
};

inline Visible visible(const Keys& keys, const Rows& rows, int64_t r) {
  const int64_t token = r / rows.group;
  const int64_t begin = keys.window > 0 ? keys.first_visible + token : 0;
  return {at_least(begin, 0), at_most(keys.end_visible + token, kSpan)};
}

// Joins the result of a span, `part`, into the state of its row, in ascending order of spans.
inline void join(const float* part, int64_t head_dim, float* state) {
  if (part[1] == 0.0f) return;  // saw no key
  const int64_t size = kStateHead + head_dim;
  if (state[1] == 0.0f) {
    for (int64_t i = 0; i < size; i += kWidth) store(state + i, load(part + i));
    return;
  }
  const float top = part[0] > state[0] ? part[0] : state[0];
  alignas(64) float decay[kWidth] = {};
  decay[0] = state[0] - top;
  decay[1] = part[0] - top;
  store(decay, exponential(load(decay)));
  state[0] = top;
  state[1] = state[1] * decay[0] + part[1] * decay[1];
  const Floats old_decay = splat(decay[0]);
  const Floats new_decay = splat(decay[1]);
  for (int64_t i = kStateHead; i < size; i += kWidth) {
    store(state + i, fma(load(part + i), new_decay, mul(load(state + i), old_decay)));
  }
}

// Hands out parts of a thread's workspace.
class Arena {
 public:
  explicit Arena(float* base) : next_(base) {}

  template <typename T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64) / 4;
    return taken;
  }

 private:
  float* next_;
};

}  // namespace QINFER_ISA
}  // namespace qinfer
