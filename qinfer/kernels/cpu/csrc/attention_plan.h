// How attention is cut into work and where its scratch lies. No arithmetic on values here.
//
// A tile is a few consecutive query tokens of one sequence with all their heads. The keys of a
// tile come in spans at absolute multiples of kSpan; span x kv head is a unit of work. The units of
// all tiles, tile by tile, span by span (the heads of a span are neighbours in memory), form a line
// that is cut into one stretch per thread, of about equal cost. A tile inside a stretch is finished
// there. Of a tile that is cut, the first thread leaves the joined results of its units in slot 0
// of a region of scratch, the others leave each span's results in the slot of that span, and merge
// joins the slots in ascending order: what one thread alone would have done.
#pragma once

#include "attention.h"

namespace qinfer {
namespace QINFER_ISA {

constexpr int64_t kSpan = QINFER_KV_SPAN;
constexpr int64_t kTileRows = 48;   // query rows that share a span's conversion
constexpr int64_t kRowBlock = 6;    // rows whose scores are in the cache together
constexpr int64_t kStateHead = 16;  // floats before a row's mixed values: maximum, sum, padding
constexpr int64_t kKeyCost = 6;     // converting a key costs as much as this many rows of it
constexpr int64_t kTileKeys = 40;   // beginning and finishing a tile costs as much as so many keys

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t at_least(int64_t value, int64_t limit) { return value > limit ? value : limit; }
constexpr int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

// The state of a row: [maximum, sum, ..., mixed values]; empty while the sum is 0.
constexpr int64_t state_stride(int64_t head_dim) { return kStateHead + round_up(head_dim, 64); }
constexpr int64_t tile_tokens(int64_t group) { return at_least(kTileRows / group, 1); }
constexpr int64_t tile_rows(int64_t group) { return tile_tokens(group) * group; }

// One thread's buffers: states and queries of a tile, one span of keys and values, scores and
// results of a block of rows. Sized for float32; the integer kernel needs less.
constexpr int64_t workspace_floats(int64_t group, int64_t num_kv_heads, int64_t head_dim) {
  const int64_t dim = round_up(head_dim, 64);
  return num_kv_heads * tile_rows(group) * (state_stride(head_dim) + dim + 16) + 2 * kSpan * dim +
         16 * dim + 4 * kSpan + kRowBlock * (2 * kSpan + state_stride(head_dim)) + 16 * 16;
}

constexpr int64_t region_floats(int64_t group, int64_t num_kv_heads, int64_t head_dim,
                                int64_t num_spans) {
  return num_spans * num_kv_heads * tile_rows(group) * state_stride(head_dim);
}

struct Tile {
  int64_t index;           // among all tiles of the step
  int64_t sequence;
  int64_t first_token;     // of the step
  int64_t num_tokens;
  int64_t first_position;  // of the first token
  int64_t key_begin;       // positions that any of its tokens sees
  int64_t key_end;
  int64_t first_span;
  int64_t end_span;
  int64_t key_cost;        // of a key of one head
};

// A place on the line of units.
struct Cut {
  Tile tile;      // index = number of tiles: the end
  int64_t span;
  int64_t kv_head;
  bool inside;    // the cut divides a tile
};

class Plan {
 public:
  Plan(const qinfer_attention& op, int32_t threads)
      : op_(op), threads_(threads), group_(op.num_heads / op.pages.num_kv_heads) {
    for_tiles([this](const Tile& tile) {
      total_ += cost(tile);
      num_spans_ = at_least(num_spans_, tile.end_span - tile.first_span);
      return true;
    });
  }

  int64_t group() const { return group_; }

  // Calls visit(tile) for every tile until it returns false.
  template <typename Visit>
  void for_tiles(const Visit& visit) const {
    int64_t index = 0;
    for (int64_t sequence = 0; sequence < *op_.num_sequences; ++sequence) {
      const int64_t end = op_.query_starts[sequence + 1];
      for (int64_t token = op_.query_starts[sequence]; token < end; token += tile_tokens(group_)) {
        if (!visit(tile_at(index++, sequence, token, end))) return;
      }
    }
  }

  // Where the stretch of `thread` begins; for thread = threads, the end.
  Cut cut(int32_t thread) const {
    const int64_t target = total_ * thread / threads_;
    int64_t start = 0;
    Cut found{};
    for_tiles([&](const Tile& tile) {
      found = Cut{tile, tile.first_span, 0, false};
      if (target >= start + cost(tile)) {
        start += cost(tile);
        ++found.tile.index;  // the end, unless another tile follows
        return true;
      }
      const int64_t within = at_least(target - start - span_cost(tile, kTileKeys), 0);
      const int64_t key = tile.key_begin + within / span_cost(tile, 1);
      found.span = key / kSpan;
      const int64_t begin = at_least(found.span * kSpan, tile.key_begin);
      const int64_t end = at_most((found.span + 1) * kSpan, tile.key_end);
      const int64_t rest = within - span_cost(tile, begin - tile.key_begin);
      found.kv_head = rest / (tile.key_cost * (end - begin));
      found.inside = found.span > tile.first_span || found.kv_head > 0;
      return false;
    });
    return found;
  }

  // The region of the tile that `cut`, where `thread` begins, divides: the lowest such thread.
  int32_t region(const Cut& cut, int32_t thread) const {
    while (thread > 1) {
      const Cut earlier = this->cut(thread - 1);
      if (!earlier.inside || earlier.tile.index != cut.tile.index) break;
      --thread;
    }
    return thread - 1;
  }

  float* workspace(int32_t thread) const {
    const int64_t floats =
        workspace_floats(group_, op_.pages.num_kv_heads, op_.pages.head_dim);
    return aligned() + thread * round_up(floats, 16);
  }

  // States of the rows of a divided tile.
  float* slot(int32_t region, int64_t slot) const {
    const int64_t floats =
        region_floats(group_, op_.pages.num_kv_heads, op_.pages.head_dim, 1);
    return workspace(threads_) + (region * num_spans_ + slot) * floats;
  }

 private:
  int64_t span_cost(const Tile& tile, int64_t keys) const {
    return keys * tile.key_cost * op_.pages.num_kv_heads;
  }
  int64_t cost(const Tile& tile) const {
    return span_cost(tile, tile.key_end - tile.key_begin + kTileKeys);
  }

  float* aligned() const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(op_.scratch);
    return reinterpret_cast<float*>((address + 63) & ~uintptr_t{63});
  }

  Tile tile_at(int64_t index, int64_t sequence, int64_t token, int64_t end) const {
    Tile tile{};
    tile.index = index;
    tile.sequence = sequence;
    tile.first_token = token;
    tile.num_tokens = at_most(tile_tokens(group_), end - token);
    tile.first_position = op_.seq_lens[sequence] - (end - token);
    if (op_.sliding_window > 0) {
      tile.key_begin = at_least(tile.first_position - op_.sliding_window + 1, 0);
    }
    tile.key_end = tile.first_position + tile.num_tokens;
    tile.first_span = tile.key_begin / kSpan;
    tile.end_span = (tile.key_end + kSpan - 1) / kSpan;
    tile.key_cost = tile.num_tokens * group_ + kKeyCost;
    return tile;
  }

  const qinfer_attention& op_;
  const int32_t threads_;
  const int64_t group_;
  int64_t total_ = 0;
  int64_t num_spans_ = 0;
};

}  // namespace QINFER_ISA
}  // namespace qinfer
