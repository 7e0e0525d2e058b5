// What the kernels of one span share: the rows and keys of a tile, and the state of a row.
#pragma once

#include "attention_plan.h"
#include "attention_simd.h"

namespace qinfer {
namespace QINFER_ISA {

// The query rows of a tile, kv head by kv head; those of a kv head are token by token the query
// heads that share it.
struct Rows {
  const float* q;         // of the first token
  int64_t token_stride;   // floats from one token to the next
  int64_t group;          // query heads per kv head
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;

  int64_t per_head() const { return num_tokens * group; }
  int64_t count() const { return num_kv_heads * per_head(); }
  int64_t token(int64_t r) const { return r % per_head() / group; }
  const float* row(int64_t r) const {
    const int64_t head = r / per_head() * group + r % group;
    return q + token(r) * token_stride + head * head_dim;
  }
};

// The keys of a span that a tile sees; positions count from the start of the span.
struct Keys {
  const qinfer_pages* pages;
  int64_t begin;          // keys [begin, end) are seen by some row
  int64_t end;
  int64_t first_visible;  // to the first token; may be negative
  int64_t end_visible;    // to the first token; each further token sees one more, one less behind
  int64_t window;         // 0 = none
  int64_t kv_head;        // in turn
  int64_t index[kSpan];   // of the element of kv head 0

  int64_t element(int64_t j) const { return index[j] + kv_head; }
};

// Keys [begin, end) of a span that a row sees.
struct Visible {
  int64_t begin;
  int64_t end;
};

inline Visible visible(const Keys& keys, int64_t token) {
  const int64_t begin = keys.window > 0 ? keys.first_visible + token : 0;
  return {at_least(begin, 0), at_most(keys.end_visible + token, kSpan)};
}

// Asks for the keys and values of the next span, element by element in the order of the memory,
// while this span is at work. The machine does not foresee them: blocks are scattered, and what is
// read of a block at a time, one head's, lies in pieces.
class Prefetch {
 public:
  Prefetch(const Keys* next, int64_t num_kv_heads, int64_t bytes)
      : next_(next), token_(next == nullptr ? 0 : next->begin), heads_(num_kv_heads),
        bytes_(bytes) {}

  // The next `count` elements, as far as there are any.
  void advance(int64_t count) {
    if (next_ == nullptr) return;
    for (; count > 0 && token_ < next_->end; --count) {
      ask(*next_->pages, next_->index[token_]);
      if (++head_ == heads_) {
        head_ = 0;
        ++token_;
      }
    }
  }

 private:
  // Into the second level of cache (locality 2): the first is full of what is at work. Always
  // inlined, because GCC drops calls of a function that does nothing but prefetch.
  __attribute__((always_inline)) void ask(const qinfer_pages& pages, int64_t index) const {
    for (int64_t i = 0; i < bytes_; i += 64) {
      __builtin_prefetch(static_cast<const char*>(pages.k) + (index + head_) * bytes_ + i, 0, 2);
      __builtin_prefetch(static_cast<const char*>(pages.v) + (index + head_) * bytes_ + i, 0, 2);
    }
    if (head_ != 0 || pages.k_scales == nullptr) return;
    __builtin_prefetch(pages.k_scales + index, 0, 2);
    __builtin_prefetch(pages.v_scales + index, 0, 2);
  }

  const Keys* next_;
  int64_t token_;
  int64_t head_ = 0;
  const int64_t heads_;
  const int64_t bytes_;  // of an element
};

// Joins the results of a span into the states of `count` <= kRowBlock rows, in ascending order of
// spans.
inline void join(const float* parts, int64_t count, int64_t head_dim, float* states) {
  const int64_t stride = state_stride(head_dim);
  const int64_t size = kStateHead + head_dim;
  alignas(64) float decays[round_up(2 * kRowBlock, kWidth)] = {};
  for (int64_t r = 0; r < count; ++r) {
    const float part = parts[r * stride];
    const float state = states[r * stride];
    const float top = part > state ? part : state;
    decays[2 * r] = state - top;
    decays[2 * r + 1] = part - top;
  }
  for (int64_t i = 0; i < 2 * count; i += kWidth) store(decays + i, exponential(load(decays + i)));
  for (int64_t r = 0; r < count; ++r) {
    const float* part = parts + r * stride;
    float* state = states + r * stride;
    if (part[1] == 0.0f) continue;  // saw no key
    if (state[1] == 0.0f) {
      for (int64_t i = 0; i < size; i += kWidth) store(state + i, load(part + i));
      continue;
    }
    state[0] = part[0] > state[0] ? part[0] : state[0];
    state[1] = state[1] * decays[2 * r] + part[1] * decays[2 * r + 1];
    const Floats old_decay = splat(decays[2 * r]);
    const Floats new_decay = splat(decays[2 * r + 1]);
    for (int64_t i = kStateHead; i < size; i += kWidth) {
      store(state + i, fma(load(part + i), new_decay, mul(load(state + i), old_decay)));
    }
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
