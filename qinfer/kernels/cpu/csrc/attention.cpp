// Causal attention over the paged cache: walks a thread's stretch of spans (attention_plan.h) with
// the kernel of the page type, and joins what threads left apart.
#include "attention.h"

#include "attention_float.h"
#include "attention_int8.h"
#include "kernels.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

void clear(float* states, int64_t count, int64_t stride) {
  for (int64_t r = 0; r < count; ++r) states[r * stride + 1] = 0.0f;
}

int64_t token_stride(const qinfer_attention& op) {
  return (op.num_heads + 2 * int64_t{op.pages.num_kv_heads}) * op.pages.head_dim;
}

// Writes the finished rows of tokens [begin, end) of a tile to `out`.
void finish(const qinfer_attention& op, const Tile& tile, const float* states, int64_t begin,
            int64_t end) {
  const int64_t head_dim = op.pages.head_dim;
  const int64_t group = op.num_heads / op.pages.num_kv_heads;
  for (int64_t kv_head = 0; kv_head < op.pages.num_kv_heads; ++kv_head) {
    for (int64_t i = begin * group; i < end * group; ++i) {
      const float* state =
          states + (kv_head * tile.num_tokens * group + i) * state_stride(head_dim);
      const int64_t head = kv_head * group + i % group;
      float* out = op.out + ((tile.first_token + i / group) * op.num_heads + head) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) out[d] = state[kStateHead + d] / state[1];
    }
  }
}

int64_t element_bytes(int32_t kind) {
  if (kind == QINFER_KV_FP32) return 4;
  return kind == QINFER_KV_FP16 || kind == QINFER_KV_BF16 ? 2 : 1;
}

// The keys of span `span` that `tile` sees.
void find_keys(const qinfer_attention& op, const Tile& tile, int64_t span, Keys* keys) {
  const int64_t start = span * kSpan;
  keys->pages = &op.pages;
  keys->begin = at_least(tile.key_begin - start, 0);
  keys->end = at_most(tile.key_end - start, kSpan);
  keys->window = op.sliding_window;
  keys->first_visible = tile.first_position - op.sliding_window + 1 - start;
  keys->end_visible = tile.first_position + 1 - start;
  const int64_t* table = op.block_tables + tile.sequence * *op.table_width;
  const int64_t size = op.pages.block_size;
  for (int64_t j = keys->begin; j < keys->end;) {
    const int64_t offset = (start + j) % size;
    const int64_t run = at_most(keys->end - j, size - offset);
    const int64_t first = table[(start + j) / size] * size + offset;
    for (int64_t i = 0; i < run; ++i) keys->index[j + i] = (first + i) * op.pages.num_kv_heads;
    j += run;
  }
}

// A thread's share of a tile: units from (span, kv head) to (span, kv head), the last not included.
struct Share {
  int64_t begin_span;
  int64_t begin_head;
  int64_t end_span;
  int64_t end_head;

  bool empty() const {
    return begin_span > end_span || (begin_span == end_span && begin_head >= end_head);
  }
};

// `states` points at the states of the tile's rows, of which each span has its own if `apart`.
// `next` is the tile that follows, if any.
template <typename Span>
void attend_tile(const qinfer_attention& op, const Tile& tile, const Tile* next, const Share& share,
                 Arena arena, float* states, bool apart) {
  const int64_t head_dim = op.pages.head_dim;
  const int64_t heads = op.pages.num_kv_heads;
  const int64_t group = op.num_heads / heads;
  const int64_t stride = state_stride(head_dim);
  const Rows rows{op.qkv + tile.first_token * token_stride(op), token_stride(op), group,
                  tile.num_tokens, heads, head_dim, op.scale};
  float* parts = arena.take<float>(Span::kRowsTogether * stride);
  Span kernel(arena, rows);
  Keys keys[2];
  find_keys(op, tile, share.begin_span, &keys[share.begin_span % 2]);
  const int64_t bytes = head_dim * element_bytes(op.pages.kind);
  Prefetch(&keys[share.begin_span % 2], heads, bytes).advance(kSpan * heads);
  const int64_t stop = at_most(share.end_span + 1, tile.end_span);
  for (int64_t span = share.begin_span; span < stop; ++span) {
    Keys& now = keys[span % 2];
    Keys& later = keys[(span + 1) % 2];
    const bool more = span + 1 < tile.end_span || next != nullptr;
    if (span + 1 < tile.end_span) {
      find_keys(op, tile, span + 1, &later);
    } else if (next != nullptr) {
      find_keys(op, *next, next->first_span, &later);
    }
    Prefetch ahead(more ? &later : nullptr, heads, bytes);
    const int64_t first = span == share.begin_span ? share.begin_head : 0;
    const int64_t last = span < share.end_span ? heads : share.end_head;
    for (int64_t kv_head = first; kv_head < last; ++kv_head) {
      now.kv_head = kv_head;
      kernel.load_keys(now, ahead);
      const int64_t end = (kv_head + 1) * rows.per_head();
      for (int64_t r = kv_head * rows.per_head(); r < end; r += Span::kRowsTogether) {
        const int64_t count = at_most(Span::kRowsTogether, end - r);
        if (apart || span == tile.first_span) clear(states + r * stride, count, stride);
        kernel.attend(now, r, count, parts);
        join(parts, count, head_dim, states + r * stride);
      }
    }
    if (apart) states += heads * tile_rows(group) * stride;
  }
}

void attend(const qinfer_attention& op, const Tile& tile, const Tile* next, const Share& share,
            Arena arena, float* states, bool apart) {
#if defined(__AVX512VNNI__)
  if (op.pages.kind == QINFER_KV_INT8) {
    return attend_tile<Int8Span>(op, tile, next, share, arena, states, apart);
  }
#endif
  attend_tile<FloatSpan>(op, tile, next, share, arena, states, apart);
}

}  // namespace

void attention(const void* args, int32_t thread, int32_t threads) {
  const qinfer_attention& op = *static_cast<const qinfer_attention*>(args);
  const Plan plan(op, threads);
  const Cut from = plan.cut(thread);
  const Cut to = plan.cut(thread + 1);
  Arena arena(plan.workspace(thread));
  float* own = arena.take<float>(plan.slot(0, 1) - plan.slot(0, 0));
  const auto work = [&](const Tile& tile, const Tile* next) {
    const bool starts = !(from.inside && from.tile.index == tile.index);
    const bool ends = to.tile.index != tile.index;
    const Share share{starts ? tile.first_span : from.span, starts ? 0 : from.kv_head,
                      ends ? tile.end_span : to.span, ends ? 0 : to.kv_head};
    if (share.empty()) return;
    if (starts && ends) {
      attend(op, tile, next, share, arena, own, false);
      finish(op, tile, own, 0, tile.num_tokens);
    } else if (starts) {
      attend(op, tile, next, share, arena, plan.slot(thread, 0), false);
    } else {
      const int32_t region = plan.region(from, thread);
      float* slot = plan.slot(region, share.begin_span - tile.first_span);
      attend(op, tile, next, share, arena, slot, true);
    }
  };
  Tile pending{};
  bool waits = false;  // a tile waits until its follower is known
  plan.for_tiles([&](const Tile& tile) {
    if (waits) work(pending, &tile);
    waits = tile.index >= from.tile.index && tile.index <= to.tile.index;
    pending = tile;
    return tile.index <= to.tile.index;
  });
  if (waits) work(pending, nullptr);
}

namespace {

// Joins the slots of the tile that the stretch of `thread` divides, for tokens [begin, end).
void join_tile(const qinfer_attention& op, const Plan& plan, int32_t thread, int64_t begin,
               int64_t end) {
  const Cut cut = plan.cut(thread);
  if (!cut.inside || plan.region(cut, thread) != thread - 1) return;
  const Tile& tile = cut.tile;
  const int64_t first = at_least(begin - tile.first_token, 0);
  const int64_t last = at_most(end - tile.first_token, tile.num_tokens);
  const int64_t stride = state_stride(op.pages.head_dim);
  float* states = plan.slot(thread - 1, 0);
  for (int64_t span = tile.first_span + 1; span < tile.end_span; ++span) {
    const float* parts = plan.slot(thread - 1, span - tile.first_span);
    for (int64_t kv_head = 0; kv_head < op.pages.num_kv_heads; ++kv_head) {
      if (span < cut.span || (span == cut.span && kv_head < cut.kv_head)) continue;
      const int64_t row = kv_head * tile.num_tokens;
      const int64_t stop = (row + last) * plan.group();
      for (int64_t r = (row + first) * plan.group(); r < stop; r += kRowBlock) {
        join(parts + r * stride, at_most(kRowBlock, stop - r), op.pages.head_dim,
             states + r * stride);
      }
    }
  }
  finish(op, tile, states, first, last);
}

void quantize_token(const qinfer_attention& op, int64_t token) {
  constexpr int64_t kChunk = 512;
  const int64_t size = int64_t{op.num_heads} * op.pages.head_dim;
  const float* row = op.out + token * size;
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t count = at_most(kChunk, size - begin);
    alignas(64) float buffer[kChunk];
    if (op.permutation == nullptr) {
      __builtin_memcpy(buffer, row + begin, 4 * static_cast<uint64_t>(count));
    } else {
      for (int64_t i = 0; i < count; ++i) buffer[i] = row[op.permutation[begin + i]];
    }
    quantize_columns(buffer, begin, count, token, *op.int8_rows);
  }
}

}  // namespace

void merge(const void* args, int32_t thread, int32_t threads) {
  const qinfer_attention& op = *static_cast<const qinfer_attention*>(args);
  const int64_t num_tokens = op.query_starts[at_least(*op.num_sequences, 0)];
  const int64_t begin = num_tokens * thread / threads;
  const int64_t end = num_tokens * (thread + 1) / threads;
  const Plan plan(op, threads);
  for (int32_t other = 1; other < threads; ++other) join_tile(op, plan, other, begin, end);
  if (op.int8_rows == nullptr) return;
  for (int64_t token = begin; token < end; ++token) quantize_token(op, token);
}

}  // namespace QINFER_ISA
}  // namespace qinfer
