// Attention over one span of INT8 pages in integers (AVX512-VNNI).
//
// A query is a 15-bit integer times one scale per (token, head), split into two signed bytes; a
// softmax weight times its value's scale is a 16-bit integer times one scale per (row, span), split
// into two unsigned bytes. Products of bytes then run on vpdpbusd at two instructions per 64, half
// of what float32 needs, and their sums are exact, so the order of summation cannot matter. What is
// lost is 2^-15 of a vector's largest element: as little as float32 sums lose.
//
// vpdpbusd multiplies unsigned by signed bytes. Keys are made unsigned by adding 128, and sums
// start at -128 times the sum of the query's bytes.
#pragma once

#include "attention_span.h"

#if defined(__AVX512VNNI__)

namespace qinfer {
namespace QINFER_ISA {

constexpr int64_t kKeyBlock = 64;            // keys in four vectors of 16 lanes
constexpr float kQueryCodes = 127.0f * 128;  // largest code of a query
constexpr float kWeightCodes = 65535.0f;     // and of a weight

// Below this a largest element counts as zero: its inverse would overflow.
constexpr float kSmallest = 1e-30f;

inline __m512i load_ints(const void* p) { return _mm512_loadu_si512(p); }

class Int8Span {
 public:
  static constexpr int64_t kRowsTogether = 3;  // 3 rows x 2 bytes x 4 vectors fill the registers

  Int8Span(Arena& arena, const Rows& rows)
      : rows_(rows),
        quads_((rows.head_dim + 3) / 4),
        blocks_((rows.head_dim + 63) / 64) {
    q_ = arena.take<int32_t>(rows.count * quads_ * 2);
    q_scales_ = arena.take<float>(rows.count);
    q_starts_ = arena.take<int32_t>(rows.count * 2);
    keys_ = arena.take<int32_t>(kSpan * quads_);
    values_ = arena.take<int8_t>(kSpan * blocks_ * 64);
    key_scales_ = arena.take<float>(kSpan);
    value_scales_ = arena.take<float>(kSpan);
    scores_ = arena.take<float>(kRowsTogether * kSpan);
    weights_ = arena.take<uint8_t>(kRowsTogether * 2 * kSpan);
    for (int64_t r = 0; r < rows.count; ++r) quantize_query(r);
  }

  void load_keys(const Keys& keys) {
    const qinfer_pages& pages = *keys.pages;
    for (int64_t j = 0; j < kSpan; ++j) {
      const bool held = j >= keys.begin && j < keys.end;
      key_scales_[j] = held ? scale_at(pages.k_scales, keys.index[j]) : 0.0f;
      value_scales_[j] = held ? scale_at(pages.v_scales, keys.index[j]) : 0.0f;
    }
    const int64_t first = keys.begin / kKeyBlock * kKeyBlock;
    for (int64_t key = first; key < keys.end; key += 16) load_key_columns(keys, key);
    for (int64_t key = keys.begin / 4 * 4; key < keys.end; key += 4) load_value_quad(keys, key);
  }

  // Results [maximum, sum, ..., mixed] of rows [begin, begin + count).
  void attend(const Keys& keys, int64_t begin, int64_t count, float* parts) {
    if (count == 3) {
      attend_rows<3>(keys, begin, parts);
    } else if (count == 2) {
      attend_rows<2>(keys, begin, parts);
    } else {
      attend_rows<1>(keys, begin, parts);
    }
  }

 private:
  static float scale_at(const uint16_t* scales, int64_t index) {
    return float_of(static_cast<uint32_t>(scales[index]) << 16);
  }

  // Bytes [begin, begin + 64) of a key or value, zero beyond its end.
  __m512i element(const void* elements, int64_t index, int64_t begin) const {
    const int64_t rest = rows_.head_dim - begin;
    const int8_t* from = static_cast<const int8_t*>(elements) + index * rows_.head_dim + begin;
    if (rest >= 64) return load_ints(from);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << rest) - 1, from);
  }

  void quantize_query(int64_t r) {
    const float* x = rows_.row(r);
    int32_t amax_bits = 0;
    for (int64_t i = 0; i < rows_.head_dim; ++i) {
      const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
      amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
    }
    const float amax = float_of(static_cast<uint32_t>(amax_bits));
    const bool finite = amax_bits < static_cast<int32_t>(kInfinityBits);
    const float inverse = finite && amax > kSmallest ? kQueryCodes / amax : 0.0f;
    q_scales_[r] = finite ? amax / kQueryCodes * rows_.scale : float_of(kNanBits);
    int8_t* to = reinterpret_cast<int8_t*>(q_ + r * quads_ * 2);
    int32_t sums[2] = {};
    for (int64_t i = 0; i < 4 * quads_; ++i) {
      const float scaled = inverse > 0.0f && i < rows_.head_dim ? x[i] * inverse : 0.0f;
      const int32_t code = static_cast<int32_t>(bits_of(scaled + kToInteger) - kToIntegerBits);
      const int32_t high = (code + 64) >> 7;  // code = 128 high + low, -64 <= low < 64
      const int32_t low = code - 128 * high;
      to[i / 4 * 8 + i % 4] = static_cast<int8_t>(high);
      to[i / 4 * 8 + 4 + i % 4] = static_cast<int8_t>(low);
      sums[0] += high;
      sums[1] += low;
    }
    q_starts_[2 * r] = -128 * sums[0];
    q_starts_[2 * r + 1] = -128 * sums[1];
  }

  // 16 keys from `first` on: vector i of their block holds bytes 4 i ... 4 i + 3 of every key.
  void load_key_columns(const Keys& keys, int64_t first) {
    int32_t* block = keys_ + first / kKeyBlock * kKeyBlock * quads_ + first % kKeyBlock;
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
    const bool all = first >= keys.begin && first + 16 <= keys.end;
    for (int64_t begin = 0; begin < rows_.head_dim; begin += 64) {
      __m512i in[16];
      __m512i out[16];
      for (int64_t j = 0; j < 16; ++j) {
        const int64_t key = first + j;
        in[j] = all || (key >= keys.begin && key < keys.end)
                    ? element(keys.pages->k, keys.index[key], begin)
                    : _mm512_setzero_si512();
        in[j] = _mm512_xor_si512(in[j], offset);
      }
      transpose(in, out);
      const int64_t quads = at_most(quads_ - begin / 4, 16);
      for (int64_t i = 0; i < quads; ++i) {
        _mm512_storeu_si512(block + (begin / 4 + i) * kKeyBlock, out[i]);
      }
    }
  }

  // 4 values: each dword of a vector holds one column of the four. Within 64 columns vector i has
  // in its 128-bit lane l the columns 16 l + 4 i ... 16 l + 4 i + 3.
  void load_value_quad(const Keys& keys, int64_t first) {
    for (int64_t block = 0; block < blocks_; ++block) {
      __m512i in[4];
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t key = first + j;
        in[j] = key >= keys.begin && key < keys.end
                    ? element(keys.pages->v, keys.index[key], block * 64)
                    : _mm512_setzero_si512();
      }
      const __m512i low01 = _mm512_unpacklo_epi8(in[0], in[1]);
      const __m512i high01 = _mm512_unpackhi_epi8(in[0], in[1]);
      const __m512i low23 = _mm512_unpacklo_epi8(in[2], in[3]);
      const __m512i high23 = _mm512_unpackhi_epi8(in[2], in[3]);
      int8_t* to = values_ + (block * kSpan + first) * 64;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low01, low23));
      _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low01, low23));
      _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(high01, high23));
      _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(high01, high23));
    }
  }

  template <int kRows>
  void attend_rows(const Keys& keys, int64_t begin, float* parts) {
    const int64_t stride = state_stride(rows_.head_dim);
    for (int64_t key = keys.begin / kKeyBlock * kKeyBlock; key < keys.end; key += kKeyBlock) {
      score_block<kRows>(begin, key);
    }
    float factors[kRows];
    for (int r = 0; r < kRows; ++r) {
      const Visible seen = visible(keys, rows_, begin + r);
      factors[r] = softmax(keys, seen, scores_ + r * kSpan, weights_ + r * 2 * kSpan,
                           parts + r * stride);
    }
    for (int64_t block = 0; block < blocks_; ++block) {
      mix_block<kRows>(keys, block, factors, parts + kStateHead + block * 64, stride);
    }
  }

  // Scores of kRows rows against the 64 keys from `key` on.
  template <int kRows>
  void score_block(int64_t begin, int64_t key) {
    __m512i sums[kRows][2][4];
    for (int r = 0; r < kRows; ++r) {
      for (int half = 0; half < 2; ++half) {
        const __m512i start = _mm512_set1_epi32(q_starts_[2 * (begin + r) + half]);
        for (int v = 0; v < 4; ++v) sums[r][half][v] = start;
      }
    }
    const int32_t* columns = keys_ + key * quads_;
    const int32_t* q = q_ + begin * quads_ * 2;
    for (int64_t i = 0; i < quads_; ++i) {
      __m512i column[4];
      for (int v = 0; v < 4; ++v) column[v] = load_ints(columns + i * kKeyBlock + v * 16);
      for (int r = 0; r < kRows; ++r) {
        for (int half = 0; half < 2; ++half) {
          const __m512i bytes = _mm512_set1_epi32(q[(r * quads_ + i) * 2 + half]);
          for (int v = 0; v < 4; ++v) {
            sums[r][half][v] = _mm512_dpbusd_epi32(sums[r][half][v], column[v], bytes);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats scale = splat(q_scales_[begin + r]);
      for (int v = 0; v < 4; ++v) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[r][0][v], 7), sums[r][1][v]);
        const Floats key_scale = mul(load(key_scales_ + key + v * 16), scale);
        store(scores_ + r * kSpan + key + v * 16, mul(_mm512_cvtepi32_ps(sum), key_scale));
      }
    }
  }

  // Writes the weights as high and low bytes, maximum and sum to `part`; returns the factor of a
  // weight's code.
  float softmax(const Keys& keys, Visible seen, float* scores, uint8_t* bytes, float* part) {
    const int64_t start = keys.begin / 16 * 16;
    const Floats nothing = splat(-__builtin_inff());
    Floats tops = nothing;
    for (int64_t j = start; j < keys.end; j += 16) {
      tops = max(tops, inside(load(scores + j), seen.begin - j, seen.end - j, nothing));
    }
    part[0] = max_of(tops);
    const Floats base = splat(part[0]);
    Floats sums = splat(0.0f);
    __m512i most = _mm512_setzero_si512();  // as bits, so that NaN is above all
    for (int64_t j = start; j < keys.end; j += 16) {
      const __mmask16 mask = lanes(seen.begin - j, seen.end - j);
      const Floats weight = exponential(sub(load(scores + j), base));
      const Floats scaled = _mm512_maskz_mul_ps(mask, weight, load(value_scales_ + j));
      sums = _mm512_mask_add_ps(sums, mask, sums, weight);
      most = _mm512_max_epi32(most, _mm512_and_si512(as_ints(scaled), splat_int(0x7fffffff)));
      store(scores + j, scaled);
    }
    part[1] = sum_of(sums);
    const float amax = float_of(static_cast<uint32_t>(_mm512_reduce_max_epi32(most)));
    const float inverse = amax > kSmallest ? kWeightCodes / amax : 0.0f;  // 0 for NaN
    split(keys, scores, inverse, bytes);
    return amax / kWeightCodes;
  }

  void split(const Keys& keys, const float* scaled, float inverse, uint8_t* bytes) {
    const Floats factor = splat(inverse);
    for (int64_t j = keys.begin / 16 * 16; j < keys.end; j += 16) {
      const __m512i code = _mm512_cvtps_epi32(mul(load(scaled + j), factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + j),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(code, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + kSpan + j), _mm512_cvtepi32_epi8(code));
    }
  }

  static __mmask16 lanes(int64_t begin, int64_t end) {
    const uint32_t upto_end = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
    const uint32_t upto_begin = begin >= 16 ? 0xffffu : begin <= 0 ? 0u : (1u << begin) - 1;
    return static_cast<__mmask16>(upto_end & ~upto_begin);
  }

  // 64 columns of the mixed values of kRows rows.
  template <int kRows>
  void mix_block(const Keys& keys, int64_t block, const float* factors, float* out,
                 int64_t stride) {
    __m512i sums[kRows][2][4];
    for (int r = 0; r < kRows; ++r) {
      for (int half = 0; half < 2; ++half) {
        for (int v = 0; v < 4; ++v) sums[r][half][v] = _mm512_setzero_si512();
      }
    }
    const int8_t* values = values_ + block * kSpan * 64;
    for (int64_t j = keys.begin / 4 * 4; j < keys.end; j += 4) {
      __m512i column[4];
      for (int v = 0; v < 4; ++v) column[v] = load_ints(values + j * 64 + v * 64);
      for (int r = 0; r < kRows; ++r) {
        for (int half = 0; half < 2; ++half) {
          int32_t quad;
          __builtin_memcpy(&quad, weights_ + (r * 2 + half) * kSpan + j, 4);
          const __m512i bytes = _mm512_set1_epi32(quad);
          for (int v = 0; v < 4; ++v) {
            sums[r][half][v] = _mm512_dpbusd_epi32(sums[r][half][v], bytes, column[v]);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) store_mixed(sums[r], factors[r], out + r * stride);
  }

  static void store_mixed(const __m512i sums[2][4], float factor, float* out) {
    Floats x[4];
    for (int v = 0; v < 4; ++v) {
      const Floats sum = fma(_mm512_cvtepi32_ps(sums[0][v]), splat(256.0f),
                             _mm512_cvtepi32_ps(sums[1][v]));
      x[v] = mul(sum, splat(factor));
    }
    // Lane l of vector i to vector l, lane i.
    const Floats a = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
    const Floats b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    const Floats c = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const Floats d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    store(out, _mm512_shuffle_f32x4(a, b, 0x88));
    store(out + 16, _mm512_shuffle_f32x4(a, b, 0xdd));
    store(out + 32, _mm512_shuffle_f32x4(c, d, 0x88));
    store(out + 48, _mm512_shuffle_f32x4(c, d, 0xdd));
  }

  const Rows& rows_;
  const int64_t quads_;   // groups of four columns
  const int64_t blocks_;  // groups of 64 columns
  int32_t* q_;            // [rows][quads][2], high and low bytes of four columns
  float* q_scales_;
  int32_t* q_starts_;     // [rows][2]
  int32_t* keys_;         // [kSpan / 64][quads][64]
  int8_t* values_;        // [blocks][kSpan / 4][64 columns][4]
  float* key_scales_;
  float* value_scales_;
  float* scores_;         // [kRowsTogether][kSpan]
  uint8_t* weights_;      // [kRowsTogether][2][kSpan]
};

}  // namespace QINFER_ISA
}  // namespace qinfer

#endif
