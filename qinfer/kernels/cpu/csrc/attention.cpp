// Causal attention over the paged cache: walks a thread's stretch of spans (attention_plan.h) with
// the kernel of the page type, and joins what threads left apart.
#include "attention.h"

#include "attention_float.h"
#include "attention_int8.h"
#include "kernels.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

int64_t token_stride(const qinfer_attention& op) {
  return (op.num_heads + 2 * int64_t{op.pages.num_kv_heads}) * op.pages.head_dim;
}

void clear(const Rows& rows, float* states) {
  for (int64_t r = 0; r < rows.count; ++r) states[r * state_stride(rows.head_dim) + 1] = 0.0f;
}

// Writes the finished rows [begin, end) of an item to `out`.
void finish(const qinfer_attention& op, const Tile& tile, int64_t kv_head, const float* states,
            int64_t begin, int64_t end) {
  const int64_t head_dim = op.pages.head_dim;
  const int64_t group = op.num_heads / op.pages.num_kv_heads;
  for (int64_t r = begin; r < end; ++r) {
    const float* state = states + r * state_stride(head_dim);
    const int64_t head = kv_head * group + r % group;
    float* out = op.out + ((tile.first_token + r / group) * op.num_heads + head) * head_dim;
    for (int64_t i = 0; i < head_dim; ++i) out[i] = state[kStateHead + i] / state[1];
  }
}

// The keys of span `span` that `tile` sees.
void find_keys(const qinfer_attention& op, const Tile& tile, int64_t kv_head, int64_t span,
               Keys* keys) {
  const int64_t start = span * kSpan;
  keys->pages = &op.pages;
  keys->kv_head = kv_head;
  keys->begin = at_least(tile.key_begin - start, 0);
  keys->end = at_most(tile.key_end - start, kSpan);
  keys->window = op.sliding_window;
  keys->first_visible = tile.first_position - op.sliding_window + 1 - start;
  keys->end_visible = tile.first_position + 1 - start;
  const int64_t* table = op.block_tables + tile.sequence * *op.table_width;
  const int64_t size = op.pages.block_size;
  int64_t block = (start + keys->begin) / size;
  int64_t offset = (start + keys->begin) % size;
  for (int64_t j = keys->begin; j < keys->end; ++j) {
    keys->index[j] = (table[block] * size + offset) * op.pages.num_kv_heads + kv_head;
    if (++offset == size) {
      offset = 0;
      ++block;
    }
  }
}

// Spans [begin, end) of an item. `states` points at the states of its rows; with `apart`, at those
// of span `begin`, and each further span has its own.
template <typename Span>
void attend_item(const qinfer_attention& op, const Tile& tile, int64_t kv_head, int64_t begin,
                 int64_t end, Arena arena, float* states, bool apart) {
  const int64_t head_dim = op.pages.head_dim;
  const int64_t group = op.num_heads / op.pages.num_kv_heads;
  const int64_t stride = state_stride(head_dim);
  const Rows rows{op.qkv + tile.first_token * token_stride(op) + kv_head * group * head_dim,
                  token_stride(op), group, tile.num_tokens * group, head_dim, op.scale};
  float* parts = arena.take<float>(Span::kRowsTogether * stride);
  Span kernel(arena, rows);
  clear(rows, states);
  for (int64_t span = begin; span < end; ++span) {
    Keys keys;
    find_keys(op, tile, kv_head, span, &keys);
    kernel.load_keys(keys);
    if (apart && span > begin) {
      states += tile_rows(group) * stride;
      clear(rows, states);
    }
    for (int64_t r = 0; r < rows.count; r += Span::kRowsTogether) {
      const int64_t count = at_most(Span::kRowsTogether, rows.count - r);
      kernel.attend(keys, r, count, parts);
      for (int64_t i = 0; i < count; ++i) {
        join(parts + i * stride, head_dim, states + (r + i) * stride);
      }
    }
  }
}

void attend(const qinfer_attention& op, const Tile& tile, int64_t kv_head, int64_t begin,
            int64_t end, Arena arena, float* states, bool apart) {
#if defined(__AVX512VNNI__)
  if (op.pages.kind == QINFER_KV_INT8) {
    return attend_item<Int8Span>(op, tile, kv_head, begin, end, arena, states, apart);
  }
#endif
  attend_item<FloatSpan>(op, tile, kv_head, begin, end, arena, states, apart);
}

bool same_item(const Cut& cut, const Tile& tile, int64_t kv_head) {
  return cut.tile.index == tile.index && cut.kv_head == kv_head;
}

}  // namespace

void attention(const void* args, int32_t thread, int32_t threads) {
  const qinfer_attention& op = *static_cast<const qinfer_attention*>(args);
  const Plan plan(op, threads);
  const Cut from = plan.cut(thread);
  const Cut to = plan.cut(thread + 1);
  Arena arena(plan.workspace(thread));
  const int64_t stride = state_stride(op.pages.head_dim);
  float* own = arena.take<float>(tile_rows(plan.group()) * stride);
  plan.for_tiles([&](const Tile& tile) {
    if (tile.index < from.tile.index) return true;
    for (int64_t kv_head = 0; kv_head < op.pages.num_kv_heads; ++kv_head) {
      if (tile.index == from.tile.index && kv_head < from.kv_head) continue;
      const bool starts = !(from.inside && same_item(from, tile, kv_head));
      const bool ends = !same_item(to, tile, kv_head);
      const int64_t begin = starts ? tile.first_span : from.span;
      const int64_t end = ends ? tile.end_span : to.span;
      if (tile.index > to.tile.index || (tile.index == to.tile.index && kv_head > to.kv_head) ||
          begin >= end) {
        return tile.index < to.tile.index;
      }
      if (starts && ends) {
        attend(op, tile, kv_head, begin, end, arena, own, false);
        finish(op, tile, kv_head, own, 0, tile.num_tokens * plan.group());
      } else if (starts) {
        attend(op, tile, kv_head, begin, end, arena, plan.slot(thread, 0), false);
      } else {
        float* slot = plan.slot(plan.region(from, thread), begin - tile.first_span);
        attend(op, tile, kv_head, begin, end, arena, slot, true);
      }
    }
    return tile.index < to.tile.index;
  });
}

namespace {

// Joins the slots of the item that the stretch of `thread` divides, for tokens [begin, end).
void join_item(const qinfer_attention& op, const Plan& plan, int32_t thread, int64_t begin,
               int64_t end) {
  const Cut cut = plan.cut(thread);
  if (!cut.inside || plan.region(cut, thread) != thread - 1) return;
  const Tile& tile = cut.tile;
  const int64_t first = at_least(begin - tile.first_token, 0) * plan.group();
  const int64_t last = at_most(end - tile.first_token, tile.num_tokens) * plan.group();
  const int64_t head_dim = op.pages.head_dim;
  float* states = plan.slot(thread - 1, 0);
  for (int64_t span = cut.span; span < tile.end_span; ++span) {
    const float* parts = plan.slot(thread - 1, span - tile.first_span);
    for (int64_t r = first; r < last; ++r) {
      join(parts + r * state_stride(head_dim), head_dim, states + r * state_stride(head_dim));
    }
  }
  finish(op, tile, cut.kv_head, states, first, last);
}

void quantize_token(const qinfer_attention& op, int64_t token) {
  constexpr int64_t kChunk = 512;
  const int64_t size = int64_t{op.num_heads} * op.pages.head_dim;
  const float* row = op.out + token * size;
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t count = at_most(kChunk, size - begin);
    alignas(64) float buffer[kChunk];
    for (int64_t i = 0; i < count; ++i) {
      buffer[i] = row[op.permutation == nullptr ? begin + i : op.permutation[begin + i]];
    }
    quantize_columns(buffer, begin, count, token, *op.int8_rows);
  }
}

}  // namespace

void merge(const void* args, int32_t thread, int32_t threads) {
  const qinfer_attention& op = *static_cast<const qinfer_attention*>(args);
  const int64_t num_tokens = op.query_starts[*op.num_sequences];
  const int64_t begin = num_tokens * thread / threads;
  const int64_t end = num_tokens * (thread + 1) / threads;
  const Plan plan(op, threads);
  for (int32_t other = 1; other < threads; ++other) join_item(op, plan, other, begin, end);
  if (op.int8_rows == nullptr) return;
  for (int64_t token = begin; token < end; ++token) quantize_token(op, token);
}

}  // namespace QINFER_ISA
}  // namespace qinfer
