// Packed codes and scales to a dense tile. Plain loops that compilers vectorize; the arithmetic is
// that of QuantizedWeight.dequantize, to the bit.
#include "kernels.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int64_t kChunk = 512;  // columns unpacked at a time; even, and small beside the L1 cache

struct BFloat16 {
  uint16_t bits;
};

inline void store(float value, float* out) { *out = value; }

// Round to nearest, ties to even; a NaN stays one.
inline void store(float value, BFloat16* out) {
  uint32_t word;
  __builtin_memcpy(&word, &value, sizeof word);
  const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// Columns [begin, begin + count) of a 4-bit row, `begin` even, to signed codes.
inline void unpack4(const uint8_t* row, int64_t begin, int64_t count, int8_t* codes) {
  const uint8_t* bytes = row + begin / 2;
  for (int64_t i = 0; i < count / 2; ++i) {
    codes[2 * i] = static_cast<int8_t>((bytes[i] & 15) - 8);
    codes[2 * i + 1] = static_cast<int8_t>((bytes[i] >> 4) - 8);
  }
  if (count % 2 != 0) {
    codes[count - 1] = static_cast<int8_t>((bytes[count / 2] & 15) - 8);
  }
}

// The scales of a row, and its zeros or offsets.
struct Row {
  const float* scales;
  const float* zeros;
  const float* offsets;
  float center;  // what offsets count codes from: -2^(bits - 1)
};

template <typename Out>
inline void scale_span(const int8_t* __restrict codes, int64_t count, float zero, float scale,
                       Out* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    store((static_cast<float>(codes[i]) - zero) * scale, out + i);
  }
}

template <typename Out>
inline void scale_span(const int8_t* __restrict codes, int64_t count, float zero, float scale,
                       float offset, Out* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    store((static_cast<float>(codes[i]) - zero) * scale + offset, out + i);
  }
}

// One chunk of a row whose groups are runs of group_size columns.
template <typename Out>
void scale_runs(const qinfer_weight& w, const Row& row, const int8_t* codes, int64_t begin,
                int64_t count, Out* out) {
  int64_t column = begin;
  while (column < begin + count) {
    const int64_t group = column / w.group_size;
    int64_t stop = (group + 1) * w.group_size;
    if (stop > begin + count) stop = begin + count;
    const int8_t* from = codes + (column - begin);
    Out* to = out + (column - begin);
    if (row.offsets != nullptr) {
      scale_span(from, stop - column, row.center, row.scales[group], row.offsets[group], to);
    } else {
      scale_span(from, stop - column, row.zeros ? row.zeros[group] : 0.0f, row.scales[group], to);
    }
    column = stop;
  }
}

// One chunk of a row whose columns name their groups.
template <typename Out>
void scale_scattered(const int32_t* __restrict groups, const Row& row,
                     const int8_t* __restrict codes, int64_t count, Out* __restrict out) {
  const float* __restrict scales = row.scales;
  const float* __restrict zeros = row.zeros;
  const float* __restrict offsets = row.offsets;
  if (offsets != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t group = groups[i];
      const float code = static_cast<float>(codes[i]) - row.center;
      store(code * scales[group] + offsets[group], out + i);
    }
    return;
  }
  if (zeros == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      store(static_cast<float>(codes[i]) * scales[groups[i]], out + i);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t group = groups[i];
    store((static_cast<float>(codes[i]) - zeros[group]) * scales[group], out + i);
  }
}

template <typename Out>
void dequantize_row(const qinfer_weight& w, int64_t row, Out* out) {
  const int64_t first = row * w.num_groups;
  const Row groups{w.scales + first, w.zeros ? w.zeros + first : nullptr,
                   w.offsets ? w.offsets + first : nullptr, w.bits == 4 ? -8.0f : -128.0f};
  const int64_t row_bytes = w.bits == 4 ? (w.in_features + 1) / 2 : w.in_features;
  const uint8_t* packed = static_cast<const uint8_t*>(w.codes) + row * row_bytes;
  int8_t unpacked[kChunk];
  for (int64_t begin = 0; begin < w.in_features; begin += kChunk) {
    const int64_t left = w.in_features - begin;
    const int64_t count = left < kChunk ? left : kChunk;
    const int8_t* codes = reinterpret_cast<const int8_t*>(packed) + begin;
    if (w.bits == 4) {
      unpack4(packed, begin, count, unpacked);
      codes = unpacked;
    }
    if (w.group_index == nullptr) {
      scale_runs(w, groups, codes, begin, count, out + begin);
    } else {
      scale_scattered(w.group_index + begin, groups, codes, count, out + begin);
    }
  }
}

template <typename Out>
void dequantize_to(const qinfer_weight& w, int64_t row_begin, int64_t row_end, Out* out) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    dequantize_row(w, row, out + (row - row_begin) * w.in_features);
  }
}

}  // namespace

void dequantize_rows(const qinfer_weight& weight, int64_t row_begin, int64_t row_end,
                     int32_t dtype, void* out) {
  if (dtype == QINFER_BFLOAT16) {
    dequantize_to(weight, row_begin, row_end, static_cast<BFloat16*>(out));
  } else {
    dequantize_to(weight, row_begin, row_end, static_cast<float*>(out));
  }
}

}  // namespace QINFER_ISA
}  // namespace qinfer
