// Sixteen lanes, one per row of a weight tile, for each instruction set: what linear.cpp is
// written in. Also the exact dot product of four columns of codes with four int8 activations.
//
//   Floats, Ints       16 float32, 16 int32
//   Codes              4 columns x 16 rows of unsigned codes, in the order of the tiles
//   load_pair          two columns of 16 rows of a bf16 tile
//   Dot<bits>          the running dot product of a group of 32 columns, exact in integers
//   kRows, kFloatTiles      tokens and tiles whose sums are kept in registers together
#pragma once

#include <stdint.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int kLanes = 16;

inline int32_t load_quad(const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  return quad;
}

#if defined(__AVX512VNNI__)

constexpr int kRows = 8;
constexpr int kFloatTiles = 2;

using Floats = __m512;
using Ints = __m512i;
using Codes = __m512i;

inline Floats fill(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Two columns of 16 rows, which lie in pairs.
inline void load_pair(const uint16_t* p, Floats (&columns)[2]) {
  const __m512i bits = _mm512_loadu_si512(p);
  columns[0] = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  columns[1] = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
}

inline Ints fill_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_short(const int16_t* p) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <int Bits>
inline Ints shift_left(Ints x) { return _mm512_slli_epi32(x, Bits); }
inline Floats to_float(Ints x) { return _mm512_cvtepi32_ps(x); }

inline void load_codes(const uint8_t* p, Codes (&codes)[1]) { codes[0] = _mm512_loadu_si512(p); }
inline void load_codes(const uint8_t* p, Codes (&codes)[2]) {
  const __m512i both = _mm512_loadu_si512(p);
  const __m512i nibble = _mm512_set1_epi8(15);
  codes[0] = _mm512_and_si512(both, nibble);
  codes[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
}
// The codes of one of the four columns.
template <int Column>
inline Ints column(Codes codes) {
  return _mm512_and_si512(_mm512_srli_epi32(codes, 8 * Column), _mm512_set1_epi32(255));
}

template <int Bits>
struct Dot {
  using Quad = __m512i;
  static Quad broadcast(const int8_t* x) { return _mm512_set1_epi32(load_quad(x)); }

  void start(Ints correction) { sum = correction; }
  void add(Codes codes, Quad x) { sum = _mm512_dpbusd_epi32(sum, codes, x); }
  Ints finish(Ints) const { return sum; }

  Ints sum;
};

#elif defined(__AVX2__)

constexpr int kRows = 4;
constexpr int kFloatTiles = 1;

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
using Codes = Ints;

inline Floats fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline Floats add(Floats a, Floats b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Floats sub(Floats a, Floats b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Floats mul(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline __m128i load_eight(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline Floats load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_eight(p)), _mm256_cvtph_ps(load_eight(p + 8))};
}
inline void load_pair(const uint16_t* p, Floats (&columns)[2]) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i odd = _mm256_set1_epi32(-65536);
  columns[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  columns[1] = {_mm256_castsi256_ps(_mm256_and_si256(low, odd)),
                _mm256_castsi256_ps(_mm256_and_si256(high, odd))};
}

inline Ints fill_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints load_short(const int16_t* p) {
  return {_mm256_cvtepi16_epi32(load_eight(p)), _mm256_cvtepi16_epi32(load_eight(p + 8))};
}
template <int Bits>
inline Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.low, Bits), _mm256_slli_epi32(x.high, Bits)};
}
inline Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

inline __m256i load_32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline void load_codes(const uint8_t* p, Codes (&codes)[1]) {
  codes[0] = {load_32(p), load_32(p + 32)};
}
inline void load_codes(const uint8_t* p, Codes (&codes)[2]) {
  const __m256i low = load_32(p), high = load_32(p + 32);
  const __m256i nibble = _mm256_set1_epi8(15);
  codes[0] = {_mm256_and_si256(low, nibble), _mm256_and_si256(high, nibble)};
  codes[1] = {_mm256_and_si256(_mm256_srli_epi16(low, 4), nibble),
              _mm256_and_si256(_mm256_srli_epi16(high, 4), nibble)};
}
template <int Column>
inline Ints column(Codes codes) {
  const __m256i byte = _mm256_set1_epi32(255);
  return {_mm256_and_si256(_mm256_srli_epi32(codes.low, 8 * Column), byte),
          _mm256_and_si256(_mm256_srli_epi32(codes.high, 8 * Column), byte)};
}

template <int Bits>
struct Dot;

// vpmaddubsw adds pairs of products in int16: a group's 8 pairs reach 8 * 2 * 15 * 128 = 30720 at
// most, so the whole group may be summed in int16 without saturation.
template <>
struct Dot<4> {
  using Quad = __m256i;
  static Quad broadcast(const int8_t* x) { return _mm256_set1_epi32(load_quad(x)); }

  void start(Ints) { low = high = _mm256_setzero_si256(); }
  void add(Codes codes, Quad x) {
    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(codes.low, x));
    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(codes.high, x));
  }
  Ints finish(Ints correction) const {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(correction.low, _mm256_madd_epi16(low, ones)),
            _mm256_add_epi32(correction.high, _mm256_madd_epi16(high, ones))};
  }

  __m256i low, high;
};

// 8-bit codes would saturate there; even and odd columns are widened to int16 instead.
template <>
struct Dot<8> {
  struct Quad {
    __m256i even, odd;
  };
  static Quad broadcast(const int8_t* x) {
    const __m256i quad = _mm256_set1_epi32(load_quad(x));
    return {_mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8), _mm256_srai_epi16(quad, 8)};
  }

  void start(Ints correction) { sum = correction; }
  void add(Codes codes, Quad x) {
    sum.low = add_half(sum.low, codes.low, x);
    sum.high = add_half(sum.high, codes.high, x);
  }
  Ints finish(Ints) const { return sum; }

  static __m256i add_half(__m256i sum, __m256i codes, Quad x) {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
    const __m256i odd = _mm256_srli_epi16(codes, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, x.odd));
  }

  Ints sum;
};

#else  // portable: loops over the lanes, for the compiler to vectorize

constexpr int kRows = 4;
constexpr int kFloatTiles = 1;

template <typename T>
struct Lanes {
  T lane[kLanes];
};
using Floats = Lanes<float>;
using Ints = Lanes<int32_t>;
struct Codes {
  uint8_t byte[4 * kLanes];
};

template <typename T, typename Body>
inline Lanes<T> each_lane(const Body& body) {
  Lanes<T> out;
  for (int i = 0; i < kLanes; ++i) out.lane[i] = body(i);
  return out;
}

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
// A float16 moved up into a float32's exponent and mantissa is 2^112 too small; the product
// repairs that exactly, subnormals included.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  if ((half & 0x7c00u) == 0x7c00u) return from_bits(sign | 0x7f800000u | magnitude);
  return from_bits(sign | magnitude) * 0x1p112f;
}

inline Floats fill(float x) {
  return each_lane<float>([=](int) { return x; });
}
inline Floats load(const float* p) {
  return each_lane<float>([=](int i) { return p[i]; });
}
inline void store(float* p, const Floats& x) {
  for (int i = 0; i < kLanes; ++i) p[i] = x.lane[i];
}
inline Floats add(const Floats& a, const Floats& b) {
  return each_lane<float>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Floats sub(const Floats& a, const Floats& b) {
  return each_lane<float>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each_lane<float>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each_lane<float>([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline Floats load_half(const uint16_t* p) {
  return each_lane<float>([=](int i) { return half_to_float(p[i]); });
}
inline void load_pair(const uint16_t* p, Floats (&columns)[2]) {
  for (int i = 0; i < 2; ++i) {
    columns[i] = each_lane<float>(
        [=](int row) { return from_bits(static_cast<uint32_t>(p[2 * row + i]) << 16); });
  }
}

inline Ints fill_int(int32_t x) {
  return each_lane<int32_t>([=](int) { return x; });
}
inline Ints load_short(const int16_t* p) {
  return each_lane<int32_t>([=](int i) { return int32_t{p[i]}; });
}
template <int Bits>
inline Ints shift_left(const Ints& x) {
  return each_lane<int32_t>([&](int i) { return x.lane[i] * (1 << Bits); });
}
inline Floats to_float(const Ints& x) {
  return each_lane<float>([&](int i) { return static_cast<float>(x.lane[i]); });
}

inline void load_codes(const uint8_t* p, Codes (&codes)[1]) {
  __builtin_memcpy(codes[0].byte, p, sizeof codes[0].byte);
}
inline void load_codes(const uint8_t* p, Codes (&codes)[2]) {
  for (int i = 0; i < 4 * kLanes; ++i) {
    codes[0].byte[i] = p[i] & 15;
    codes[1].byte[i] = p[i] >> 4;
  }
}
template <int Column>
inline Ints column(const Codes& codes) {
  return each_lane<int32_t>([&](int i) { return int32_t{codes.byte[4 * i + Column]}; });
}

template <int Bits>
struct Dot {
  using Quad = const int8_t*;
  static Quad broadcast(const int8_t* x) { return x; }

  void start(const Ints& correction) { sum = correction; }
  void add(const Codes& codes, Quad x) {
    for (int i = 0; i < kLanes; ++i) {
      const uint8_t* row = codes.byte + 4 * i;
      sum.lane[i] += row[0] * x[0] + row[1] * x[1] + row[2] * x[2] + row[3] * x[3];
    }
  }
  Ints finish(const Ints&) const { return sum; }

  Ints sum;
};

#endif

}  // namespace
}  // namespace QINFER_ISA
}  // namespace qinfer
