// Activations to int8: the formula of program.h, written once for every op that quantizes.
//
// Plain loops over a constant number of columns, which compilers turn into whole vectors.
#pragma once

#include "program.h"

namespace qinfer {
namespace QINFER_ISA {

constexpr int64_t kGroup = QINFER_ACTIVATION_GROUP;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// 1.5 * 2^23: between 2^23 and 2^24 floats are the integers, so adding it to a small number rounds
// that to an integer (ties to even), which then stands in the low bits.
constexpr float kToInteger = 12582912.0f;
constexpr uint32_t kToIntegerBits = 0x4b400000u;

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNanBits = 0x7fc00000u;

// One group: kGroup values to codes and scale; returns the sum of the codes.
inline int32_t quantize_group(const float* __restrict x, int8_t* __restrict codes,
                              float* __restrict scale) {
  // Without their signs, floats order as their bits do, with infinity and then NaN at the end.
  int32_t amax_bits = 0;
  for (int64_t i = 0; i < kGroup; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  }
  const bool finite = amax_bits < static_cast<int32_t>(kInfinityBits);
  const float step = finite ? float_of(static_cast<uint32_t>(amax_bits)) / 127.0f
                            : float_of(kNanBits);
  int32_t total = 0;
  *scale = step;
  if (step > 0.0f) {
    for (int64_t i = 0; i < kGroup; ++i) {
      int32_t code = static_cast<int32_t>(bits_of(x[i] / step + kToInteger) - kToIntegerBits);
      code = code > 127 ? 127 : code;  // only where the scale is so small that it lost digits
      code = code < -127 ? -127 : code;
      codes[i] = static_cast<int8_t>(code);
      total += code;
    }
  } else {
    for (int64_t i = 0; i < kGroup; ++i) codes[i] = 0;
  }
  return total;
}

// Columns [begin, begin + count) of a row; `begin` starts a group. `x` has room for whole groups:
// what the last one lacks is set to zero here.
inline void quantize_columns(float* x, int64_t begin, int64_t count, int64_t row,
                             const qinfer_int8_rows& out) {
  const int64_t num_groups = (count + kGroup - 1) / kGroup;
  for (int64_t i = count; i < num_groups * kGroup; ++i) x[i] = 0.0f;
  const int64_t block = row / QINFER_ROW_BLOCK, r = row % QINFER_ROW_BLOCK;
  qinfer_int8_group* groups = out.groups + (block * out.columns + begin) / kGroup;
  for (int64_t g = 0; g < num_groups; ++g) {
    int8_t codes[kGroup];
    const int32_t sum = quantize_group(x + g * kGroup, codes, groups[g].scales + r);
    groups[g].sums[r] = groups[g].scales[r] * static_cast<float>(sum);
    groups[g].centers[r] = -8 * sum;
    for (int64_t i = 0; i < kGroup / 4; ++i) {
      __builtin_memcpy(groups[g].codes[i][r], codes + 4 * i, 4);
    }
  }
}

}  // namespace QINFER_ISA
}  // namespace qinfer
