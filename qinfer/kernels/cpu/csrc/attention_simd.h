// Vectors of floats for attention: one thin set of functions per instruction set.
//
// kWidth lanes; a result's lane depends on that lane of the operands alone (reductions apart,
// whose order is fixed), so a value's bits do not depend on where in a vector it stands.
#pragma once

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "int8.h"

// For the innermost functions: inlined into one, they compete for its registers.
#define QINFER_NOINLINE __attribute__((noinline))

// Before loops over accumulators, which stay in registers only if unrolled completely and early.
#define QINFER_UNROLL _Pragma("GCC unroll 16")

namespace qinfer {
namespace QINFER_ISA {

#if defined(__AVX512F__)

using Floats = __m512;
using Ints = __m512i;
constexpr int64_t kWidth = 16;

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one is NaN
inline float max_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add_int(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints and_int(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints or_int(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int kBits>
inline Ints shift_left(Ints x) { return _mm512_slli_epi32(x, kBits); }
inline Ints from_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats from_s8(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Ints from_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats from_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// x in lanes [begin, end), `other` elsewhere; the limits may lie outside the vector.
inline Floats inside(Floats x, int64_t begin, int64_t end, Floats other) {
  const Ints lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 mask =
      _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(static_cast<int32_t>(begin))) &
      _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(static_cast<int32_t>(end)));
  return _mm512_mask_blend_ps(mask, other, x);
}

// Columns of 16 rows of 16 dwords: out[i] lane j = rows[j] lane i.
inline void transpose(const Ints* rows, Ints* out) {
  Ints a[16];
  Ints b[16];
  QINFER_UNROLL
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  QINFER_UNROLL
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  QINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  QINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    out[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    out[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
  }
}

#elif defined(__AVX2__)

using Floats = __m256;
using Ints = __m256i;
constexpr int64_t kWidth = 8;

inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
inline Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
inline Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints add_int(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints and_int(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints or_int(Ints a, Ints b) { return _mm256_or_si256(a, b); }
template <int kBits>
inline Ints shift_left(Ints x) { return _mm256_slli_epi32(x, kBits); }
inline Ints from_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Floats from_s8(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Ints from_u16(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats from_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats inside(Floats x, int64_t begin, int64_t end, Floats other) {
  const Ints lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const Ints mask =
      _mm256_andnot_si256(_mm256_cmpgt_epi32(splat_int(static_cast<int32_t>(begin)), lane),
                          _mm256_cmpgt_epi32(splat_int(static_cast<int32_t>(end)), lane));
  return _mm256_blendv_ps(other, x, as_floats(mask));
}

inline void transpose(const Ints* rows, Ints* out) {
  Ints a[8];
  Ints b[8];
  QINFER_UNROLL
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  QINFER_UNROLL
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  QINFER_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

#else

constexpr int64_t kWidth = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Ints __attribute__((vector_size(16)));  // unsigned, so that sums may wrap around
typedef int32_t Lanes __attribute__((vector_size(16)));

template <typename Vector>
inline Vector load_bytes(const void* p) {
  Vector x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline Floats load(const float* p) { return load_bytes<Floats>(p); }
inline void store(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof x); }
inline Floats splat(float x) { return Floats{x, x, x, x}; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Ints as_ints(Floats x) { return load_bytes<Ints>(&x); }
inline Floats as_floats(Ints x) { return load_bytes<Floats>(&x); }
inline Ints splat_int(int32_t x) {
  const uint32_t bits = static_cast<uint32_t>(x);
  return Ints{bits, bits, bits, bits};
}
inline Ints add_int(Ints a, Ints b) { return a + b; }
inline Ints and_int(Ints a, Ints b) { return a & b; }
inline Ints or_int(Ints a, Ints b) { return a | b; }
template <int kBits>
inline Ints shift_left(Ints x) { return x << kBits; }
inline Ints from_u8(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline Floats from_s8(const int8_t* p) {
  return Floats{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                static_cast<float>(p[3])};
}
inline Ints from_u16(const uint16_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
// Exponent and mantissa in the places of a float's, 2^112 too small; infinity and NaN apart.
inline Floats from_fp16(const uint16_t* p) {
  const Ints bits = from_u16(p);
  const Ints magnitude = (bits & 0x7fffu) << 13;
  const Floats finite = as_floats(magnitude) * float_of(239u << 23);
  const Ints special = magnitude | kInfinityBits;
  const Ints value = magnitude >= (0x7c00u << 13) ? special : as_ints(finite);
  return as_floats(value | (bits & 0x8000u) << 16);
}
inline Floats inside(Floats x, int64_t begin, int64_t end, Floats other) {
  const Lanes lane = {0, 1, 2, 3};
  return (lane >= static_cast<int32_t>(begin)) & (lane < static_cast<int32_t>(end)) ? x : other;
}
inline void transpose(const Ints* rows, Ints* out) {
  for (int i = 0; i < 4; ++i) out[i] = Ints{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
}

#endif

#if !defined(__AVX512F__)
inline float max_of(Floats x) {
  float most = x[0];
  for (int64_t i = 1; i < kWidth; ++i) most = most > x[i] ? most : x[i];
  return most;
}
inline float sum_of(Floats x) {
  float sums[kWidth];
  store(sums, x);
  for (int64_t width = kWidth / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}
#endif

inline Floats from_bf16(const uint16_t* p) { return as_floats(shift_left<16>(from_u16(p))); }

// float8_e4m3: exponent and mantissa in the places of a float's, 2^120 too small.
inline Floats from_fp8(const uint8_t* p) {
  const Ints bits = from_u8(p);
  const Ints magnitude = shift_left<20>(and_int(bits, splat_int(0x7f)));
  const Ints sign = shift_left<24>(and_int(bits, splat_int(0x80)));
  return mul(as_floats(or_int(magnitude, sign)), splat(float_of(247u << 23)));
}

// e^x for x <= 0 to about one unit in the last place; NaN stays NaN.
#if defined(__AVX512F__)

// x log2(e) = n + f; 2^f by Cephes' polynomial.
inline Floats exponential(Floats x) {
  const Floats n = _mm512_roundscale_ps(mul(x, splat(1.44269504f)), 8);
  Floats f = _mm512_fmsub_ps(x, splat(1.44269504f), n);
  f = fma(x, splat(1.925963033e-8f), f);
  Floats p = splat(1.535336188319500e-4f);
  p = fma(p, f, splat(1.339887440266574e-3f));
  p = fma(p, f, splat(9.618437357674640e-3f));
  p = fma(p, f, splat(5.550332471162809e-2f));
  p = fma(p, f, splat(2.402264791363012e-1f));
  p = fma(p, f, splat(6.931472028550421e-1f));
  p = fma(p, f, splat(1.0f));
  return _mm512_scalef_ps(p, n);
}

#else

// x = n ln 2 + r; e^r by Cephes' polynomial. Below -87 the result is some number of about 1e-38,
// which is nothing beside the 1 of the maximum.
inline Floats exponential(Floats x) {
  x = max(splat(-87.0f), x);
  const Floats shifted = fma(x, splat(1.44269504f), splat(kToInteger));
  const Floats n = sub(shifted, splat(kToInteger));
  const Floats r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), splat(1.0f));
  // 2^n; the bits of kToInteger shift out. A product, because adding to the exponent of a NaN could
  // make a number of it.
  const Ints power = add_int(shift_left<23>(as_ints(shifted)), splat_int(127 << 23));
  return mul(p, as_floats(power));
}

#endif

}  // namespace QINFER_ISA
}  // namespace qinfer
