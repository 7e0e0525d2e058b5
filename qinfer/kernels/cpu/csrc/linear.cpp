// Linear layers; see linear.h for the layout of the weights.
//
// The order of the sums, the same whatever the unit of work (linear_units.h):
//   int8 rows:  total = sum over groups of scale * (sum over 32 columns of x_scale * integer sum)
//               The integer sum is one of centered codes where the weight is symmetric. Else it is
//               one of unsigned codes, and to the total comes, per group,
//               (offset or -zero * scale) * (sum over 32 columns of x_scale * sum of activations)
//   float rows: total = sum over steps of 32 columns of (sum of x * w), w dequantized in float32;
//               what the additions of the steps round off is kept and added at the end
#include "linear.h"

#include "kernels.h"
#include "linear_units.h"
#include "rows.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

static_assert(QINFER_ROW_BLOCK % kRows == 0, "tokens that are computed together lie together");

constexpr int kStep = QINFER_ACTIVATION_GROUP;  // columns that share an activation scale
// Few rows that are moved together take so much of the L1 cache at most.
constexpr int64_t kFewBytes = 20 << 10;
// Weights are asked for so far ahead that they arrive in time. For one token the hardware does it
// better alone.
constexpr int64_t kPrefetchBytes = 2048;
template <int Bits>
constexpr int64_t kStepBytes = kStep * kLanes * Bits / 8;  // of a tile

// --- the scales of a group -----------------------------------------------------------------------

inline Floats load_scales(const qinfer_tiled_weight& w, const void* scales, int64_t entry) {
  return w.scale_dtype == QINFER_FLOAT16 ? load_half(static_cast<const uint16_t*>(scales) + entry)
                                         : load(static_cast<const float*>(scales) + entry);
}

// What an unsigned code of 0 stands for. (float16 scales times zero points are exact.)
inline Floats load_addend(const qinfer_tiled_weight& w, int64_t entry, Floats scale) {
  if (w.offsets != nullptr) return load_scales(w, w.offsets, entry);
  return mul(sub(fill(0.0f), to_float(load_short(w.zeros + entry))), scale);
}

// --- int8 activations ----------------------------------------------------------------------------

// What centers the codes of one step: half their range times the sum of the activations.
template <int Bits, bool Affine>
inline Ints correction(int32_t center) {
  if constexpr (Affine) return fill_int(0);
  return shift_left<Bits - 4>(fill_int(center));
}

// A group seen from one of its rows on: every array of it has four bytes per row.
inline const qinfer_int8_group* from_row(const qinfer_int8_group* group, int64_t row) {
  return reinterpret_cast<const qinfer_int8_group*>(reinterpret_cast<const char*>(group) + 4 * row);
}

// The same with room for Rows rows only, so that a few rows stay in the L1 cache.
template <int Rows>
struct FewRows {
  int8_t codes[8][Rows][4];
  float scales[Rows];
  float sums[Rows];
  int32_t centers[Rows];
};

// Weights that are asked for while others are at work: `bytes` more with each step. Soon, they go to
// the first level of cache, else to the second, for the first holds what is at work.
template <bool Soon>
struct Ahead {
  const uint8_t* next;
  int64_t bytes;

  // Always inlined, because GCC drops calls of a function that does nothing but prefetch.
  __attribute__((always_inline)) void advance() {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, Soon ? 3 : 2);
    next += bytes;
  }
};

// partial[r] += x_scale * integer sum, for the kStep columns of one step of a tile. Group is
// qinfer_int8_group or FewRows. (The loops over rows are unrolled so that all sums stay in registers.)
template <int Bits, int Rows, bool Affine, typename Group>
inline void int8_step(const uint8_t* tile, const Group& x, Floats (&partial)[Rows]) {
  constexpr int kParts = 8 / Bits;            // quads of columns per 64 bytes of a tile
  constexpr int kLoads = kStep / 4 / kParts;  // 64-byte loads per step
  Dot<Bits> dots[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    dots[r].start(correction<Bits, Affine>(x.centers[r]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLoads; ++i) {
    Codes codes[kParts];
    load_codes(tile + i * 64, codes);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        dots[r].add(codes[part], Dot<Bits>::broadcast(x.codes[i * kParts + part][r]));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    const Ints sum = dots[r].finish(correction<Bits, Affine>(x.centers[r]));
    partial[r] = fma(to_float(sum), fill(x.scales[r]), partial[r]);
  }
}

// Rows tokens from `token` on, whose groups are `x`, times one tile.
template <int Bits, int Rows, bool Affine, typename Group, bool Soon>
inline void int8_tile(const qinfer_linear& op, const Group* x, int64_t token, int64_t tile,
                      Ahead<Soon> ahead) {
  const qinfer_tiled_weight& w = op.weight;
  const int64_t steps = w.in_features / kStep, group_steps = w.group_size / kStep;
  const int64_t groups = ceil_div(steps, group_steps);
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + tile * steps * kStepBytes<Bits>;
  int64_t entry = tile * groups * kLanes;  // of the group's scales

  // The lines to be written lie far apart; asked for now, they are here when the sums are.
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    __builtin_prefetch(op.out + (token + r) * op.out_stride + tile * kLanes, 1);
  }
  Floats total[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) total[r] = fill(0.0f);
  for (int64_t begin = 0; begin < steps; begin += group_steps, entry += kLanes) {
    Floats partial[Rows];
    float sums[Rows] = {};
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) partial[r] = fill(0.0f);
    const int64_t end = smaller(steps, begin + group_steps);
    for (int64_t step = begin; step < end; ++step, data += kStepBytes<Bits>) {
      ahead.advance();
      int8_step<Bits, Rows, Affine>(data, x[step], partial);
      if (!Affine) continue;
      for (int r = 0; r < Rows; ++r) sums[r] += x[step].sums[r];
    }
    const Floats scale = load_scales(w, w.scales, entry);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) total[r] = fma(partial[r], scale, total[r]);
    if (!Affine) continue;
    const Floats addend = load_addend(w, entry, scale);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) total[r] = fma(addend, fill(sums[r]), total[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) write(op, token + r, tile, total[r]);
}

// Tokens [begin, begin + Rows), all of one row block, times one tile.
template <int Bits, int Rows, bool Affine>
void int8_block(const qinfer_linear& op, int64_t begin, int64_t tile, Ahead<false> ahead) {
  const int64_t steps = op.weight.in_features / kStep;
  const qinfer_int8_group* block = op.int8_rows->groups + begin / QINFER_ROW_BLOCK * steps;
  int8_tile<Bits, Rows, Affine>(op, from_row(block, begin % QINFER_ROW_BLOCK), begin, tile,
                              ahead);
}

using Int8Block = void (*)(const qinfer_linear& op, int64_t begin, int64_t tile,
                           Ahead<false> ahead);

template <int Bits, bool Affine, int Rows = kRows>
inline Int8Block int8_block_for(int64_t rows) {
  if constexpr (Rows == 1) {
    return int8_block<Bits, 1, Affine>;
  } else {
    return rows >= Rows ? int8_block<Bits, Rows, Affine>
                        : int8_block_for<Bits, Affine, Rows - 1>(rows);
  }
}

// Each pass over a tile takes kRows tokens and asks for its part of the tile that follows: a tile
// that were asked for in the first pass alone would come at the memory's pace while later passes,
// which find it in the cache, leave the memory idle.
template <int Bits, bool Affine>
void int8_unit(const qinfer_linear& op, int64_t begin, int64_t end, int64_t tile, int64_t) {
  const int64_t steps = op.weight.in_features / kStep;
  const uint8_t* next =
      static_cast<const uint8_t*>(op.weight.data) + (tile + 1) * steps * kStepBytes<Bits>;
  const int64_t lines = ceil_div(kStepBytes<Bits> / 64, ceil_div(end - begin, kRows));
  const uint8_t* stop = next + steps * kStepBytes<Bits>;
  for (int64_t token = begin; token < end; token += kRows, next += steps * lines * 64) {
    const Ahead<false> ahead{next, next < stop ? lines * 64 : 0};
    int8_block_for<Bits, Affine>(end - token)(op, token, tile, ahead);
  }
}

// All tokens of a step that has few, times tiles [begin, end). Their groups would leave most of
// each cache line unused, so they are moved together first.
template <int Bits, int Rows, bool Affine>
void int8_few(const qinfer_linear& op, int64_t begin, int64_t end) {
  alignas(64) FewRows<Rows> x[kFewBytes / sizeof(FewRows<Rows>)];
  for (int64_t step = 0; step < op.weight.in_features / kStep; ++step) {
    const qinfer_int8_group& group = op.int8_rows->groups[step];
    for (int i = 0; i < 8; ++i) __builtin_memcpy(x[step].codes[i], group.codes[i], 4 * Rows);
    __builtin_memcpy(x[step].scales, group.scales, sizeof x[step].scales);
    __builtin_memcpy(x[step].sums, group.sums, sizeof x[step].sums);
    __builtin_memcpy(x[step].centers, group.centers, sizeof x[step].centers);
  }
  const uint8_t* data = static_cast<const uint8_t*>(op.weight.data) + kPrefetchBytes;
  const int64_t tile_bytes = op.weight.in_features / kStep * kStepBytes<Bits>;
  for (int64_t tile = begin; tile < end; ++tile) {
    const Ahead<true> ahead{data + tile * tile_bytes, Rows > 1 ? kStepBytes<Bits> : 0};
    int8_tile<Bits, Rows, Affine>(op, x, 0, tile, ahead);
  }
}

using Int8Few = void (*)(const qinfer_linear& op, int64_t begin, int64_t end);

// NULL where the rows are too many or too long.
template <int Bits, bool Affine>
Int8Few int8_few_for(int64_t rows, int64_t columns) {
  constexpr Int8Few kFunctions[] = {nullptr, int8_few<Bits, 1, Affine>,
                                    int8_few<Bits, 2, Affine>, int8_few<Bits, 3, Affine>,
                                    int8_few<Bits, 4, Affine>};
  const bool fits = rows <= 4 && columns / kStep * rows * int64_t{sizeof(FewRows<1>)} <= kFewBytes;
  return fits ? kFunctions[rows] : nullptr;
}

// --- float activations ---------------------------------------------------------------------------

// The weights of kStep columns of a tile as float32, [column][lane].
struct alignas(64) Panel {
  float weights[kStep * kLanes];
};

// An unsigned code's weight; the arithmetic is that of QuantizedWeight.dequantize.
template <bool Offset>
inline Floats weight_of(Ints code, Floats scale, Floats base) {
  if constexpr (Offset) return add(mul(to_float(code), scale), base);
  return mul(sub(to_float(code), base), scale);
}

template <int Bits, bool Offset>
void dequantize(const qinfer_tiled_weight& w, int64_t tile, int64_t step, float* out) {
  constexpr int kParts = 8 / Bits;
  constexpr int kLoads = kStep / 4 / kParts;
  const int64_t groups = ceil_div(w.in_features, w.group_size);
  const int64_t entry = (tile * groups + step * kStep / w.group_size) * kLanes;
  const Floats scale = load_scales(w, w.scales, entry);
  const Floats base = Offset    ? load_scales(w, w.offsets, entry)
                      : w.zeros ? to_float(load_short(w.zeros + entry))
                                : fill(1 << (Bits - 1));
  const int64_t steps = w.in_features / kStep;
  const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + (tile * steps + step) * kLoads * 64;
  for (int i = 0; i < kLoads; ++i, bytes += 64) {
    __builtin_prefetch(bytes + kPrefetchBytes);
    Codes codes[kParts];
    load_codes(bytes, codes);
    for (int part = 0; part < kParts; ++part, out += 4 * kLanes) {
      store(out, weight_of<Offset>(column<0>(codes[part]), scale, base));
      store(out + kLanes, weight_of<Offset>(column<1>(codes[part]), scale, base));
      store(out + 2 * kLanes, weight_of<Offset>(column<2>(codes[part]), scale, base));
      store(out + 3 * kLanes, weight_of<Offset>(column<3>(codes[part]), scale, base));
    }
  }
}

inline void load_pair(const float* p, Floats (&columns)[2]) {
  columns[0] = load(p);
  columns[1] = load(p + kLanes);
}

// One step of a dense tile.
template <typename Element>
inline const Element* dense_step(const qinfer_tiled_weight& w, int64_t tile, int64_t step) {
  return static_cast<const Element*>(w.data) + (tile * w.in_features + step * kStep) * kLanes;
}

void widen(const qinfer_tiled_weight& w, int64_t tile, int64_t step, float* out) {
  const uint16_t* bits = dense_step<uint16_t>(w, tile, step);
  for (int i = 0; i < kStep * kLanes; i += 2 * kLanes) {
    Floats columns[2];
    load_pair(bits + i, columns);
    store(out + i, columns[0]);
    store(out + i + kLanes, columns[1]);
  }
}

// Makes the panel of one step of a tile.
using Unpack = void (*)(const qinfer_tiled_weight& w, int64_t tile, int64_t step, float* out);

// NULL for float32 weights, which are read in place.
inline Unpack unpack_for(const qinfer_tiled_weight& w) {
  const bool offsets = w.offsets != nullptr;
  switch (w.kind) {
    case QINFER_W4: return offsets ? dequantize<4, true> : dequantize<4, false>;
    case QINFER_W8: return offsets ? dequantize<8, true> : dequantize<8, false>;
    case QINFER_WBF16: return widen;
    default: return nullptr;
  }
}

// 16 sums of steps, with what their additions rounded off (TwoSum: Knuth, TAOCP 2, section 4.2.2).
// One outlier early in a row would else cost every later addition a digit.
struct alignas(64) Sum {
  float sum[kLanes];
  float lost[kLanes];

  void clear() {
    store(sum, fill(0.0f));
    store(lost, fill(0.0f));
  }
  void take(Floats step) {
    const Floats old = load(sum);
    const Floats now = add(old, step);
    const Floats taken = sub(now, old);
    const Floats error = add(sub(old, sub(now, taken)), sub(step, taken));
    store(sum, now);
    store(lost, add(load(lost), error));
  }
  Floats total() const { return add(load(sum), load(lost)); }
};

using Sums = Sum[kFloatTiles];  // of one token

// sums[r][t] += x[r] * panels[t] for kStep columns; `stride` lies between the rows of x.
template <int Rows, int Tiles, typename Element>
void add_step(const Element* const* panels, const float* x, int64_t stride, Sums* sums) {
  Floats total[Rows][Tiles];
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tiles; ++t) total[r][t] = fill(0.0f);
  }
#pragma GCC unroll 2
  for (int column = 0; column < kStep; column += 2) {
    Floats weights[Tiles][2];
    for (int t = 0; t < Tiles; ++t) load_pair(panels[t] + column * kLanes, weights[t]);
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < Rows; ++r) {
        const Floats value = fill(x[r * stride + column + i]);
        for (int t = 0; t < Tiles; ++t) total[r][t] = fma(value, weights[t][i], total[r][t]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tiles; ++t) sums[r][t].take(total[r][t]);
  }
}

template <typename Element>
using AddStep = void (*)(const Element* const* panels, const float* x, int64_t stride, Sums* sums);

template <typename Element, int Tiles, int Rows = kRows>
inline AddStep<Element> add_step_for(int64_t rows) {
  if constexpr (Rows == 1) {
    return add_step<1, Tiles, Element>;
  } else {
    return rows >= Rows ? add_step<Rows, Tiles, Element>
                        : add_step_for<Element, Tiles, Rows - 1>(rows);
  }
}

// kStep columns of `rows` rows of x in the order of the tiles, zeros after the last.
inline void gather(const qinfer_linear& op, int64_t token, int64_t rows, int64_t first,
                   float* out) {
  const int64_t count = smaller(kStep, op.float_columns - first);
  for (int64_t r = 0; r < rows; ++r, out += kStep) {
    const float* x = op.float_rows + (token + r) * op.float_stride;
    for (int64_t i = 0; i < kStep; ++i) {
      const int64_t from = i >= count ? 0 : op.permutation ? op.permutation[first + i] : first + i;
      out[i] = i < count ? x[from] : 0.0f;
    }
  }
}

// One step of a unit: tokens [begin, end) times the panels.
template <typename Element>
void float_step(const qinfer_linear& op, int64_t begin, int64_t end, int64_t step,
                const Element* const* panels, int64_t tiles, Sums* sums) {
  const int64_t first = step * kStep;
  const bool in_place = op.permutation == nullptr && first + kStep <= op.float_columns;
  float gathered[kRows * kStep];
  for (int64_t token = begin; token < end; token += kRows, sums += kRows) {
    const int64_t rows = smaller(kRows, end - token);
    const float* x = gathered;
    if (in_place) {
      x = op.float_rows + token * op.float_stride + first;
    } else {
      gather(op, token, rows, first, gathered);
    }
    const AddStep<Element> function = tiles == kFloatTiles
                                          ? add_step_for<Element, kFloatTiles>(rows)
                                          : add_step_for<Element, 1>(rows);
    function(panels, x, in_place ? op.float_stride : kStep, sums);
  }
}

void float_unit(const qinfer_linear& op, int64_t begin, int64_t end, int64_t tile, int64_t tiles) {
  const qinfer_tiled_weight& w = op.weight;
  Sums sums[kMaxBlock];
  for (int64_t r = 0; r < end - begin; ++r) {
    for (Sum& sum : sums[r]) sum.clear();
  }
  // Unpacked once for all tokens; bf16 not where there are so few that each step is read once anyway.
  const bool in_place = w.kind == QINFER_WBF16 && end - begin <= kRows;
  const Unpack unpack = unpack_for(w);
  Panel rooms[kFloatTiles];
  for (int64_t step = 0; step < w.in_features / kStep; ++step) {
    const float* panels[kFloatTiles];
    const uint16_t* bits[kFloatTiles];
    for (int64_t t = 0; t < tiles; ++t) {
      if (in_place) {
        bits[t] = dense_step<uint16_t>(w, tile + t, step);
      } else if (unpack != nullptr) {
        unpack(w, tile + t, step, rooms[t].weights);
        panels[t] = rooms[t].weights;
      } else {
        panels[t] = dense_step<float>(w, tile + t, step);
      }
    }
    if (in_place) {
      float_step(op, begin, end, step, bits, tiles, sums);
    } else {
      float_step(op, begin, end, step, panels, tiles, sums);
    }
  }
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t t = 0; t < tiles; ++t) {
      write(op, token, tile + t, sums[token - begin][t].total());
    }
  }
}

// --- the split over blocks and threads -----------------------------------------------------------

// The functions for one kind of weight.
struct Int8Functions {
  Unit unit;
  Int8Few (*few_for)(int64_t rows, int64_t columns);
};

template <int Bits>
Int8Functions int8_functions(bool affine) {
  if (affine) return {int8_unit<Bits, true>, int8_few_for<Bits, true>};
  return {int8_unit<Bits, false>, int8_few_for<Bits, false>};
}

Int8Functions int8_functions(const qinfer_tiled_weight& w) {
  const bool affine = w.zeros != nullptr || w.offsets != nullptr;
  return w.kind == QINFER_W4 ? int8_functions<4>(affine) : int8_functions<8>(affine);
}

}  // namespace

void linear(const void* args, int32_t thread, int32_t threads) {
  const qinfer_linear& op = *static_cast<const qinfer_linear*>(args);
  const int64_t tokens = *op.num_tokens;
  if (tokens <= 0) return;
  const int64_t columns = op.weight.in_features;
  if (op.int8_rows == nullptr) {
    const int64_t block = block_tokens(tokens, columns * int64_t{sizeof(float)});
    for_units(op, block, kFloatTiles, float_unit, thread, threads);
    return;
  }
  const Int8Functions functions = int8_functions(op.weight);
  if (const Int8Few few = functions.few_for(tokens, columns)) {
    const int64_t tiles = ceil_div(op.weight.out_features, kLanes);
    few(op, tiles * thread / threads, tiles * (thread + 1) / threads);
    return;
  }
  int64_t block = block_tokens(tokens, columns);
  // All threads read all of the weights then. They are few bytes for what is computed with them;
  // those of float linears are not.
  if (by_rows(tokens, threads)) {
    block = smaller(block, ceil_div(tokens, QINFER_ROW_BLOCK) / threads * QINFER_ROW_BLOCK);
  }
  for_units(op, block, 1, functions.unit, thread, threads);
}

}  // namespace QINFER_ISA
}  // namespace qinfer
