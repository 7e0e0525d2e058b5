// Sampling without sorting: every filter is a threshold on the logits.
//
// A threshold is found by bisection over the integers that order floats, counting (top-k) or
// adding up (top-p) what lies above. The row is cut into chunks whose largest values are known, so
// a step of the bisection reads only chunks that hold something above: near the top, few.
// Sums run in a fixed order, in float32 within a chunk and in float64 over chunks.
#include "sample.h"

#include "kernels.h"
#include "numbers.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int64_t kChunk = QINFER_SAMPLE_CHUNK;
constexpr int64_t kLanes = 16;  // partial sums within a chunk

typedef int32_t Keys __attribute__((vector_size(4 * kLanes)));
typedef float Weights __attribute__((vector_size(4 * kLanes)));

constexpr double kBelowOne = 1.0 - 0x1p-53;
constexpr int32_t kLowest = kOrderOfMinusInfinity + 1;  // of the tokens that can be drawn

// A row of logits: keys in the order of the values, and (where a filter asked) their weights.
struct Row {
  int32_t* keys;     // [chunks, kChunk]; minus infinity behind the end
  float* weights;    // [chunks, kChunk], e^((logit - largest) / temperature)
  int32_t* maxima;   // [chunks]
  int64_t chunks;
};

inline Row row_in(float* scratch, int64_t size) {
  Row row;
  row.chunks = QINFER_SAMPLE_CHUNKS(size);
  row.weights = scratch;
  row.keys = reinterpret_cast<int32_t*>(scratch + row.chunks * kChunk);
  row.maxima = row.keys + row.chunks * kChunk;
  return row;
}

// `keys` has room for whole words of bits.
inline void forbid(const uint32_t* allowed, int64_t size, int32_t* __restrict keys) {
  for (int64_t begin = 0; begin < size; begin += 32) {
    const uint32_t bits = allowed[begin / 32];
    for (int64_t i = 0; i < 32; ++i) {
      keys[begin + i] = ((bits >> i) & 1u) != 0 ? keys[begin + i] : kOrderOfMinusInfinity;
    }
  }
}

// Fills in keys and maxima; returns the largest key.
inline int32_t read_row(const qinfer_draw& draw, int64_t size, const Row& row) {
  const float* __restrict logits = draw.logits;
  int32_t* __restrict keys = row.keys;
  for (int64_t i = 0; i < size; ++i) keys[i] = order(logits[i]);
  for (int64_t i = 0; i < draw.num_edits; ++i) keys[draw.edited[i]] = order(draw.values[i]);
  if (draw.allowed != nullptr) forbid(draw.allowed, size, keys);
  for (int64_t i = size; i < row.chunks * kChunk; ++i) keys[i] = kOrderOfMinusInfinity;
  int32_t largest = INT32_MIN;
  for (int64_t c = 0; c < row.chunks; ++c) {
    const int32_t* __restrict chunk = keys + c * kChunk;
    int32_t most = INT32_MIN;
    for (int64_t i = 0; i < kChunk; ++i) most = chunk[i] > most ? chunk[i] : most;
    row.maxima[c] = most;
    largest = most > largest ? most : largest;
  }
  return largest;
}

inline int64_t first_of(const Row& row, int32_t key) {
  int64_t c = 0;
  while (row.maxima[c] != key) ++c;
  int64_t index = c * kChunk;
  while (row.keys[index] != key) ++index;
  return index;
}

inline int64_t count_in(const int32_t* __restrict keys, int64_t size, int32_t threshold) {
  Keys counts = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Keys some;
    __builtin_memcpy(&some, keys + i, sizeof some);
    counts -= some >= threshold;  // true is -1
  }
  int64_t count = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) count += counts[lane];
  for (; i < size; ++i) count += keys[i] >= threshold ? 1 : 0;
  return count;
}

inline int64_t count_above(const Row& row, int32_t threshold) {
  int64_t count = 0;
  for (int64_t c = 0; c < row.chunks; ++c) {
    if (row.maxima[c] < threshold) continue;
    count += count_in(row.keys + c * kChunk, kChunk, threshold);
  }
  return count;
}

inline float mass_in(const Row& row, int64_t c, int32_t threshold) {
  const int32_t* __restrict keys = row.keys + c * kChunk;
  const float* __restrict weights = row.weights + c * kChunk;
  Weights sums = {};
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    Keys key, weight;
    __builtin_memcpy(&key, keys + i, sizeof key);
    __builtin_memcpy(&weight, weights + i, sizeof weight);
    sums += reinterpret_cast<Weights>(weight & (key >= threshold));  // else +0
  }
  float lanes[kLanes];
  __builtin_memcpy(lanes, &sums, sizeof lanes);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

inline double mass_above(const Row& row, int32_t threshold) {
  double mass = 0.0;
  for (int64_t c = 0; c < row.chunks; ++c) {
    if (row.maxima[c] >= threshold) mass += mass_in(row, c, threshold);
  }
  return mass;
}

// The largest key in [low, high] that `enough` accepts; it accepts `low` and all below any other
// that it accepts.
template <typename Enough>
inline int32_t bisect(int32_t low, int32_t high, const Enough& enough) {
  int64_t from = low, to = high;
  while (from < to) {
    const int64_t middle = from + (to - from + 1) / 2;
    if (enough(static_cast<int32_t>(middle))) {
      from = middle;
    } else {
      to = middle - 1;
    }
  }
  return static_cast<int32_t>(from);
}

// The k-th largest key, or kLowest if there are fewer.
inline int32_t top_k_threshold(const Row& row, int64_t k, int32_t largest) {
  int32_t low = kLowest;
  if (k <= row.chunks) {  // each of the k largest maxima stands for a token, so it is not above
    low = bisect(low, largest, [&](int32_t key) {
      return count_in(row.maxima, row.chunks, key) >= k;
    });
  }
  return bisect(low, largest, [&](int32_t key) { return count_above(row, key) >= k; });
}

// The logits, relative to the largest and cooled.
struct Scale {
  float largest;
  float temperature;
  float operator()(int32_t key) const { return (value_of(key) - largest) / temperature; }
};

inline void weigh(const Row& row, const Scale& scale, int32_t threshold) {
  for (int64_t c = 0; c < row.chunks; ++c) {
    if (row.maxima[c] < threshold) continue;
    const int32_t* __restrict keys = row.keys + c * kChunk;
    float* __restrict weights = row.weights + c * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) weights[i] = exponential(scale(keys[i]));
  }
}

// The largest key above which the weights add up to `p` of those above `low`.
inline int32_t top_p_threshold(const Row& row, const Scale& scale, double p, int32_t low,
                               int32_t largest) {
  const double target = p * mass_above(row, low);
  const auto enough = [&](int32_t key) { return mass_above(row, key) >= target; };
  // From the top in growing steps, since the kept tokens are mostly few.
  int32_t high = largest;
  for (float depth = scale.temperature; depth < 1e30f; depth *= 2.0f) {
    const int32_t key = order(scale.largest - depth);
    if (key <= low) break;
    if (enough(key)) {
      low = key;
      break;
    }
    high = key - 1;
  }
  return bisect(low, high, enough);
}

inline int32_t min_p_threshold(const Scale& scale, float log_min_p, int32_t low, int32_t largest) {
  if (scale(low) >= log_min_p) return low;
  // `bisect` looks for the last of the accepted, here the last that is too unlikely.
  return 1 + bisect(low, largest, [&](int32_t key) { return scale(key) < log_min_p; });
}

// The token at which the cumulative weights above the threshold pass `number` of their sum.
inline int64_t pick(const Row& row, int32_t threshold, double number) {
  const double total = mass_above(row, threshold);
  // Below the total even if the product rounds up: there the last possible token sits.
  const double target = number * total < total ? number * total : total * kBelowOne;
  double passed = 0.0;
  int64_t last = -1;
  for (int64_t c = 0; c < row.chunks; ++c) {
    if (row.maxima[c] < threshold) continue;
    last = c;
    const double next = passed + mass_in(row, c, threshold);
    if (next > target) break;
    passed = next;
  }
  int64_t token = -1;
  for (int64_t i = last * kChunk; i < (last + 1) * kChunk; ++i) {
    if (row.keys[i] < threshold) continue;
    token = i;  // stays the last one if the parts of the chunk add up to less than its sum
    passed += row.weights[i];
    if (passed > target) break;
  }
  return token;
}

inline int64_t choose(const qinfer_draw& draw, int64_t size, const Row& row) {
  const int32_t largest = read_row(draw, size, row);
  if (largest < kLowest || largest > kOrderOfInfinity) return -1;
  if (!(draw.temperature > 0.0f)) return first_of(row, largest);
  const Scale scale{value_of(largest), draw.temperature};
  int32_t threshold = kLowest;
  if (draw.top_k > 0 && draw.top_k < size) threshold = top_k_threshold(row, draw.top_k, largest);
  weigh(row, scale, threshold);
  if (draw.top_p < 1.0) threshold = top_p_threshold(row, scale, draw.top_p, threshold, largest);
  threshold = min_p_threshold(scale, draw.log_min_p, threshold, largest);
  return pick(row, threshold, draw.number);
}

}  // namespace

void sample(const void* args, int32_t thread, int32_t threads) {
  const qinfer_sample& op = *static_cast<const qinfer_sample*>(args);
  const int64_t workers = threads < op.workers ? threads : op.workers;
  if (thread >= workers) return;
  const Row row = row_in(op.scratch + thread * QINFER_SAMPLE_SCRATCH(op.size), op.size);
  for (int64_t d = thread; d < *op.num_draws; d += workers) {
    op.out[d] = choose(op.draws[d], op.size, row);
  }
}

}  // namespace QINFER_ISA
}  // namespace qinfer
