// The small ops between products.
//
// A row's bits depend neither on other rows nor on threads nor on its place: each value follows
// from its own column by single operations that IEEE 754 defines (no contraction into FMA, so
// vectors and remainders agree), and a sum over a row always runs through the same kLanes partial
// sums. Even the instruction sets agree to the bit.
#include "ops.h"

#include "int8.h"
#include "kernels.h"
#include "numbers.h"
#include "rows.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int64_t kChunk = 512;  // columns at a time: a few KiB on the stack, inside the L1 cache
constexpr int64_t kLanes = 32;   // partial sums of a row

inline int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

// What one thread does: some rows, and of these some columns.
struct Share {
  int64_t row_begin;
  int64_t row_end;
  int64_t column_begin;
  int64_t column_end;
};

// Many rows, and those that threads share equally, are cut between blocks of rows, in which they are
// stored quantized; of few rows every thread takes some groups of columns, so that none is idle.
inline Share share(int64_t rows, int64_t columns, int32_t thread, int32_t threads) {
  const int64_t blocks = (rows + QINFER_ROW_BLOCK - 1) / QINFER_ROW_BLOCK;
  if (blocks >= 4 * threads || by_rows(rows, threads)) {
    return {blocks * thread / threads * QINFER_ROW_BLOCK,
            at_most(blocks * (thread + 1) / threads * QINFER_ROW_BLOCK, rows), 0, columns};
  }
  const int64_t groups = (columns + kGroup - 1) / kGroup;
  return {0, rows, at_most(groups * thread / threads * kGroup, columns),
          at_most(groups * (thread + 1) / threads * kGroup, columns)};
}

inline float sum_of_squares(const float* x, int64_t size) {
  float sums[kLanes] = {};
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  }
  for (int64_t i = whole; i < size; ++i) sums[i - whole] += x[i] * x[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

typedef float Four __attribute__((vector_size(16)));

// Columns [begin, begin + count) of a row, or of its permutation by way of `buffer`.
inline const float* columns(const float* row, const int32_t* permutation, int64_t begin,
                            int64_t count, float* buffer) {
  if (permutation == nullptr) return row + begin;
  const int32_t* from = permutation + begin;
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {  // loads and stores are the limit: two indices at once, one store
    uint64_t pairs[2];
    __builtin_memcpy(pairs, from + i, sizeof pairs);
    const Four four = {row[static_cast<uint32_t>(pairs[0])], row[pairs[0] >> 32],
                       row[static_cast<uint32_t>(pairs[1])], row[pairs[1] >> 32]};
    __builtin_memcpy(buffer + i, &four, sizeof four);
  }
  for (; i < count; ++i) buffer[i] = row[from[i]];
  return buffer;
}

// Where an op puts its rows.
struct Output {
  float* out;
  const qinfer_int8_rows* int8_rows;
  const int32_t* permutation;  // of the quantized columns
  int64_t size;
};

// Writes a thread's columns of one row. `values(permutation, begin, count, to)` computes them.
template <typename Values>
inline void write_row(const Output& output, int64_t row, const Share& part, const Values& values) {
  for (int64_t begin = part.column_begin; begin < part.column_end; begin += kChunk) {
    const int64_t count = at_most(kChunk, part.column_end - begin);
    if (output.out != nullptr) values(nullptr, begin, count, output.out + row * output.size + begin);
    if (output.int8_rows == nullptr) continue;
    alignas(64) float buffer[kChunk];
    values(output.permutation, begin, count, buffer);
    quantize_columns(buffer, begin, count, row, *output.int8_rows);
  }
}

inline void copy(const float* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

inline void widen(const uint16_t* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
}

inline bool finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

inline int64_t argmax_row(const float* x, int64_t size) {
  int32_t best = INT32_MIN;
  int64_t best_begin = 0;
  int32_t lowest = INT32_MAX;
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t count = at_most(kChunk, size - begin);
    int32_t most = INT32_MIN;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t key = order(x[begin + i]);
      most = key > most ? key : most;
      lowest = key < lowest ? key : lowest;
    }
    if (most > best) {
      best = most;
      best_begin = begin;
    }
  }
  if (best >= kOrderOfInfinity || lowest <= kOrderOfMinusInfinity) return -1;
  int64_t index = best_begin;
  while (order(x[index]) != best) ++index;
  return index;
}

inline float float_at(const float* x) { return *x; }
inline float float_at(const uint16_t* x) { return float_of(static_cast<uint32_t>(*x) << 16); }

// Columns [begin, begin + count) of a row of a table in tiles of 16 rows, whose columns lie in runs
// of `run` (linear.h).
template <typename Element, int64_t run>
inline void pick(const void* table, int64_t row, int64_t hidden, int64_t begin, int64_t count,
                 float* __restrict to) {
  constexpr int64_t kTileRows = 16;
  const int64_t width = (hidden + kGroup - 1) / kGroup * kGroup;
  const Element* from = static_cast<const Element*>(table) +
                        (row / kTileRows * width + begin) * kTileRows + row % kTileRows * run;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = float_at(from + i / run * run * kTileRows + i % run);
  }
}

}  // namespace

void embed(const void* args, int32_t thread, int32_t threads) {
  const qinfer_embed& op = *static_cast<const qinfer_embed*>(args);
  const Share part = share(*op.num_tokens, op.hidden, thread, threads);
  const int64_t count = part.column_end - part.column_begin;
  for (int64_t row = part.row_begin; row < part.row_end; ++row) {
    const int64_t from = op.token_ids[row] * op.hidden + part.column_begin;
    float* to = op.out + row * op.hidden + part.column_begin;
    if (op.tiled != 0) {
      const auto get = op.dtype == QINFER_BFLOAT16 ? pick<uint16_t, 2> : pick<float, 1>;
      get(op.table, op.token_ids[row], op.hidden, part.column_begin, count, to);
    } else if (op.dtype == QINFER_BFLOAT16) {
      widen(static_cast<const uint16_t*>(op.table) + from, count, to);
    } else {
      copy(static_cast<const float*>(op.table) + from, count, to);
    }
  }
}

void norm(const void* args, int32_t thread, int32_t threads) {
  const qinfer_norm& op = *static_cast<const qinfer_norm*>(args);
  const Share part = share(*op.num_tokens, op.size, thread, threads);
  const Output output{op.out, op.int8_rows, op.permutation, op.size};
  const bool first = part.column_begin == 0 && part.column_end > 0;  // one thread of each row
  for (int64_t row = part.row_begin; row < part.row_end; ++row) {
    const float* x = op.x + row * op.size;
    const float mean = sum_of_squares(x, op.size) / static_cast<float>(op.size);
    if (op.bad_layers != nullptr && first && !finite(mean) && op.bad_layers[row] < 0) {
      op.bad_layers[row] = op.layer;
    }
    const float factor = 1.0f / __builtin_sqrtf(mean + op.eps);
    write_row(output, row, part, [&](const int32_t* permutation, int64_t begin, int64_t count,
                                     float* __restrict to) {
      alignas(64) float buffers[2][kChunk];
      const float* values = columns(x, permutation, begin, count, buffers[0]);
      const float* weights = columns(op.weight, permutation, begin, count, buffers[1]);
      for (int64_t i = 0; i < count; ++i) to[i] = values[i] * factor * weights[i];
    });
  }
}

void silu_mul(const void* args, int32_t thread, int32_t threads) {
  const qinfer_silu_mul& op = *static_cast<const qinfer_silu_mul*>(args);
  const Share part = share(*op.num_tokens, op.size, thread, threads);
  const Output output{op.out, op.int8_rows, op.permutation, op.size};
  for (int64_t row = part.row_begin; row < part.row_end; ++row) {
    const float* x = op.x + row * 2 * op.size;
    write_row(output, row, part, [&](const int32_t* permutation, int64_t begin, int64_t count,
                                     float* __restrict to) {
      alignas(64) float buffers[2][kChunk];
      const float* gate = columns(x, permutation, begin, count, buffers[0]);
      const float* up = columns(x + op.size, permutation, begin, count, buffers[1]);
      // Two loops: in one, gcc would divide once for each way through `exponential`.
      for (int64_t i = 0; i < count; ++i) to[i] = 1.0f + exponential(-gate[i]);
      for (int64_t i = 0; i < count; ++i) to[i] = gate[i] / to[i] * up[i];
    });
  }
}

void quantize(const void* args, int32_t thread, int32_t threads) {
  const qinfer_quantize& op = *static_cast<const qinfer_quantize*>(args);
  const Share part = share(*op.num_tokens, op.size, thread, threads);
  const Output output{nullptr, op.int8_rows, op.permutation, op.size};
  for (int64_t row = part.row_begin; row < part.row_end; ++row) {
    const float* x = op.x + row * op.size;
    write_row(output, row, part,
              [&](const int32_t* permutation, int64_t begin, int64_t count, float* to) {
                const float* values = columns(x, permutation, begin, count, to);
                if (values != to) copy(values, count, to);
              });
  }
}

void gather(const void* args, int32_t thread, int32_t threads) {
  const qinfer_gather& op = *static_cast<const qinfer_gather*>(args);
  const Share part = share(*op.num_rows, op.size, thread, threads);
  for (int64_t row = part.row_begin; row < part.row_end; ++row) {
    copy(op.x + op.rows[row] * op.size + part.column_begin, part.column_end - part.column_begin,
         op.out + row * op.size + part.column_begin);
  }
}

void argmax(const void* args, int32_t thread, int32_t threads) {
  const qinfer_argmax& op = *static_cast<const qinfer_argmax*>(args);
  const int64_t rows = *op.num_rows;
  for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; ++row) {
    op.out[row] = argmax_row(op.x + row * op.size, op.size);
  }
}

void faults(const void* args, int32_t thread, int32_t) {
  if (thread != 0) return;
  const qinfer_faults& op = *static_cast<const qinfer_faults*>(args);
  for (int64_t row = 0; row < *op.num_rows; ++row) {
    const int64_t early = op.token_notes[op.rows[row]], late = op.row_notes[row];
    const int64_t last = op.best[row] < 0 ? op.num_layers : -1;
    op.out[row] = early >= 0 ? early : late >= 0 ? late : last;
  }
  for (int64_t row = 0; row < *op.num_rows; ++row) op.row_notes[row] = -1;
  for (int64_t token = 0; token < *op.num_tokens; ++token) op.token_notes[token] = -1;
}

}  // namespace QINFER_ISA
}  // namespace qinfer
