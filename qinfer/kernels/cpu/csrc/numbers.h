// Floats by their bits: their order as integers, and e^x.
//
// Single operations that IEEE 754 defines, so instruction sets agree to the bit.
#pragma once

#include "int8.h"

namespace qinfer {
namespace QINFER_ISA {

// Values in the order of the numbers: -0 equals +0, NaN is above all (below all if negative).
inline int32_t order(float value) {
  const int32_t bits = static_cast<int32_t>(bits_of(value + 0.0f));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The value that `order` maps to `key`.
inline float value_of(int32_t key) {
  return float_of(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
}

constexpr int32_t kOrderOfInfinity = 0x7f800000;
constexpr int32_t kOrderOfMinusInfinity = ~kOrderOfInfinity;

// e^x to about one unit in the last place (the polynomial of Cephes' expf); at least e^-87, and
// infinity from 88.4 on; NaN stays NaN.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504f + kToInteger;  // x = n ln 2 + r
  const float n = shifted - kToInteger;
  const float r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * float_of((bits_of(shifted) - kToIntegerBits + 127u) << 23);
}

}  // namespace QINFER_ISA
}  // namespace qinfer
