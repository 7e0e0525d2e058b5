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

// sum += unsigned times signed bytes, by fours. As assembly: for the intrinsic GCC copies every sum
// from register to register, which costs a third of the speed.
inline void dot(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

inline __m512i load_ints(const void* p) { return _mm512_loadu_si512(p); }

class Int8Span {
 public:
  static constexpr int64_t kRowsTogether = 3;  // 3 rows x 2 bytes x 4 vectors fill the registers

  Int8Span(Arena& arena, const Rows& rows)
      : rows_(rows),
        quads_((rows.head_dim + 3) / 4),
        blocks_((rows.head_dim + 63) / 64) {
    q_ = arena.take<int32_t>(rows.count() * quads_ * 2);
    q_scales_ = arena.take<float>(rows.count());
    q_starts_ = arena.take<int32_t>(rows.count() * 2);
    keys_ = arena.take<int32_t>(kSpan * quads_);
    values_ = arena.take<int8_t>(kSpan * blocks_ * 64);
    key_scales_ = arena.take<float>(kSpan);
    value_scales_ = arena.take<float>(kSpan);
    scores_ = arena.take<float>(kRowsTogether * kSpan);
    weights_ = arena.take<int32_t>(kRowsTogether * kSpan);
    for (int64_t r = 0; r < rows.count(); ++r) quantize_query(r);
  }

  void load_keys(const Keys& keys, Prefetch& ahead) {
    const int64_t first = keys.begin / kKeyBlock * kKeyBlock;
    for (int64_t key = first; key < keys.end; key += 16) load_key_columns(keys, key, ahead);
    for (int64_t block = 0; block < blocks_; ++block) load_values(keys, block);
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

  // The same for a key that may not be there.
  __m512i element_or_zero(const Keys& keys, const void* elements, int64_t key,
                          int64_t begin) const {
    if (key < keys.begin || key >= keys.end) return _mm512_setzero_si512();
    return element(elements, keys.element(key), begin);
  }

  // `count` <= 16 columns of a query, zero beyond them.
  static Floats query_columns(const float* x, int64_t count) {
    if (count >= 16) return load(x);
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), x);
  }

  void quantize_query(int64_t r) {
    const float* x = rows_.row(r);
    __m512i most = _mm512_setzero_si512();  // as bits, so that infinity and NaN are above all
    for (int64_t i = 0; i < rows_.head_dim; i += 16) {
      const __m512i bits = as_ints(query_columns(x + i, rows_.head_dim - i));
      most = _mm512_max_epu32(most, _mm512_and_si512(bits, splat_int(0x7fffffff)));
    }
    const uint32_t amax_bits = _mm512_reduce_max_epu32(most);
    const float amax = float_of(amax_bits);
    const bool finite = amax_bits < kInfinityBits;
    const float inverse = finite && amax > kSmallest ? kQueryCodes / amax : 0.0f;
    q_scales_[r] = finite ? amax / kQueryCodes * rows_.scale : float_of(kNanBits);
    int8_t* to = reinterpret_cast<int8_t*>(q_ + r * quads_ * 2);
    __m512i high_sums = _mm512_setzero_si512();
    __m512i low_sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < 4 * quads_; i += 16) {
      const Floats scaled = mul(query_columns(x + i, rows_.head_dim - i), splat(inverse));
      // Where the query is not finite its scale says so; the codes are 0.
      const __m512i code = inverse > 0.0f ? _mm512_cvtps_epi32(scaled) : _mm512_setzero_si512();
      // code = 128 high + low, -64 <= low < 64
      const __m512i high = _mm512_srai_epi32(add_int(code, splat_int(64)), 7);
      const __m512i low = _mm512_sub_epi32(code, _mm512_slli_epi32(high, 7));
      high_sums = add_int(high_sums, high);
      low_sums = add_int(low_sums, low);
      // Four high bytes, then their low bytes.
      const __m128i highs = _mm512_cvtepi32_epi8(high), lows = _mm512_cvtepi32_epi8(low);
      const __m256i bytes = _mm256_set_m128i(_mm_unpackhi_epi32(highs, lows),
                                             _mm_unpacklo_epi32(highs, lows));
      const int64_t rest = at_most(4 * quads_ - i, 16);
      _mm256_mask_storeu_epi32(to + 2 * i, static_cast<__mmask8>((1u << rest / 2) - 1), bytes);
    }
    q_starts_[2 * r] = -128 * _mm512_reduce_add_epi32(high_sums);
    q_starts_[2 * r + 1] = -128 * _mm512_reduce_add_epi32(low_sums);
  }

  // 16 keys from `first` on: vector i of their block holds bytes 4 i ... 4 i + 3 of every key.
  QINFER_NOINLINE void load_key_columns(const Keys& keys, int64_t first, Prefetch& ahead) {
    int32_t* block = keys_ + first / kKeyBlock * kKeyBlock * quads_ + first % kKeyBlock;
    for (int64_t j = at_least(first, keys.begin); j < at_most(first + 16, keys.end); ++j) {
      ahead.advance(1);
      key_scales_[j] = scale_at(keys.pages->k_scales, keys.element(j));
      value_scales_[j] = scale_at(keys.pages->v_scales, keys.element(j));
    }
    const bool all = first >= keys.begin && first + 16 <= keys.end;
    for (int64_t begin = 0; begin < rows_.head_dim; begin += 64) {
      int32_t* to = block + begin / 4 * kKeyBlock;
      __m512i in[16];
      if (all && begin + 64 <= rows_.head_dim) {
        const int8_t* from = static_cast<const int8_t*>(keys.pages->k) + begin;
        QINFER_UNROLL
        for (int i = 0; i < 16; ++i) {
          in[i] = load_ints(from + keys.element(first + i) * rows_.head_dim);
        }
        store_columns(in, 16, to);
      } else {
        for (int i = 0; i < 16; ++i) {
          in[i] = element_or_zero(keys, keys.pages->k, first + i, begin);
        }
        store_columns(in, at_most(quads_ - begin / 4, 16), to);
      }
    }
  }

  // 16 keys to `count` columns. Inlined, so that the vectors stay in registers.
  __attribute__((always_inline)) static void store_columns(const __m512i* in, int64_t count,
                                                           int32_t* to) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i unsigned_bytes[16];
    __m512i out[16];
    QINFER_UNROLL
    for (int i = 0; i < 16; ++i) unsigned_bytes[i] = _mm512_xor_si512(in[i], offset);
    transpose(unsigned_bytes, out);
    QINFER_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (i < count) _mm512_storeu_si512(to + i * kKeyBlock, out[i]);
    }
  }

  // 64 columns of the values by fours: each dword of a vector holds one column of the four. Vector
  // i has in its 128-bit lane l the columns 16 l + 4 i ... 16 l + 4 i + 3.
  QINFER_NOINLINE void load_values(const Keys& keys, int64_t block) {
    int8_t* to = values_ + block * kSpan * 64;
    for (int64_t first = keys.begin / 4 * 4; first < keys.end; first += 4) {
      __m512i in[4];
      QINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        in[i] = element_or_zero(keys, keys.pages->v, first + i, block * 64);
      }
      const __m512i low01 = _mm512_unpacklo_epi8(in[0], in[1]);
      const __m512i high01 = _mm512_unpackhi_epi8(in[0], in[1]);
      const __m512i low23 = _mm512_unpacklo_epi8(in[2], in[3]);
      const __m512i high23 = _mm512_unpackhi_epi8(in[2], in[3]);
      _mm512_storeu_si512(to + first * 64, _mm512_unpacklo_epi16(low01, low23));
      _mm512_storeu_si512(to + first * 64 + 64, _mm512_unpackhi_epi16(low01, low23));
      _mm512_storeu_si512(to + first * 64 + 128, _mm512_unpacklo_epi16(high01, high23));
      _mm512_storeu_si512(to + first * 64 + 192, _mm512_unpackhi_epi16(high01, high23));
    }
  }

  template <int kRows>
  void attend_rows(const Keys& keys, int64_t begin, float* parts) {
    const int64_t stride = state_stride(rows_.head_dim);
    for (int64_t key = keys.begin / kKeyBlock * kKeyBlock; key < keys.end; key += kKeyBlock) {
      score_block<kRows>(begin, key);
    }
    float factors[kRows];
    QINFER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Visible seen = visible(keys, rows_.token(begin + r));
      factors[r] = softmax(keys, seen, scores_ + r * kSpan, weights_ + r * kSpan,
                           parts + r * stride);
    }
    for (int64_t block = 0; block < blocks_; ++block) {
      mix_block<kRows>(keys, block, factors, parts + kStateHead + block * 64, stride);
    }
  }

  // Scores of kRows rows against the 64 keys from `key` on.
  template <int kRows>
  QINFER_NOINLINE void score_block(int64_t begin, int64_t key) {
    __m512i sums[kRows][2][4];
    QINFER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      QINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const __m512i start = _mm512_set1_epi32(q_starts_[2 * (begin + r) + half]);
        QINFER_UNROLL
        for (int v = 0; v < 4; ++v) sums[r][half][v] = start;
      }
    }
    const int32_t* columns = keys_ + key * quads_;
    const int32_t* q = q_ + begin * quads_ * 2;
    for (int64_t i = 0; i < quads_; ++i) {
      __m512i column[4];
      QINFER_UNROLL
      for (int v = 0; v < 4; ++v) column[v] = load_ints(columns + i * kKeyBlock + v * 16);
      QINFER_UNROLL
      for (int r = 0; r < kRows; ++r) {
        QINFER_UNROLL
        for (int half = 0; half < 2; ++half) {
          const __m512i bytes = _mm512_set1_epi32(q[(r * quads_ + i) * 2 + half]);
          QINFER_UNROLL
          for (int v = 0; v < 4; ++v) {
            dot(sums[r][half][v], column[v], bytes);
          }
        }
      }
    }
    QINFER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Floats scale = splat(q_scales_[begin + r]);
      QINFER_UNROLL
      for (int v = 0; v < 4; ++v) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[r][0][v], 7), sums[r][1][v]);
        const Floats key_scale = mul(load(key_scales_ + key + v * 16), scale);
        store(scores_ + r * kSpan + key + v * 16, mul(_mm512_cvtepi32_ps(sum), key_scale));
      }
    }
  }

  // Writes the weights as bytes, maximum and sum to `part`; returns the factor of a weight's code.
  QINFER_NOINLINE float softmax(const Keys& keys, Visible seen, float* scores, int32_t* bytes,
                                float* part) {
    const int64_t start = keys.begin / 16 * 16;
    part[0] = most_of(scores, start, keys.end, seen);
    const Floats top = splat(part[0]);
    Floats sums = splat(0.0f);
    __m512i most = _mm512_setzero_si512();  // as bits, so that NaN is above all
    for (int64_t j = start; j < keys.end; j += 16) {
      Floats weight = exponential(sub(load(scores + j), top));
      Floats scaled = mul(weight, load(value_scales_ + j));
      if (j < seen.begin || j + 16 > seen.end) {
        weight = inside(weight, seen.begin - j, seen.end - j, splat(0.0f));
        scaled = inside(scaled, seen.begin - j, seen.end - j, splat(0.0f));
      }
      sums = add(sums, weight);
      most = _mm512_max_epu32(most, as_ints(scaled));
      store(scores + j, scaled);
    }
    part[1] = sum_of(sums);
    const float amax = float_of(_mm512_reduce_max_epu32(most) & 0x7fffffffu);
    const float inverse = amax > kSmallest ? kWeightCodes / amax : 0.0f;  // 0 for NaN
    for (int64_t j = start; j < keys.end; j += 16) {
      split(mul(load(scores + j), splat(inverse)), bytes + j);
    }
    return amax / kWeightCodes;
  }

  static float most_of(const float* scores, int64_t begin, int64_t end, Visible seen) {
    const Floats nothing = splat(-__builtin_inff());
    Floats most = nothing;
    for (int64_t j = begin; j < end; j += 16) {
      const Floats score = load(scores + j);
      most = max(most, j < seen.begin || j + 16 > seen.end
                           ? inside(score, seen.begin - j, seen.end - j, nothing)
                           : score);
    }
    return max_of(most);
  }

  // Codes of 16 weights: of each four the high bytes, then the low bytes, then 8 bytes not used.
  static void split(Floats x, int32_t* to) {
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 2, 6, 10, 14, 2, 6, 10, 14));
    _mm512_storeu_si512(to, _mm512_shuffle_epi8(_mm512_cvtps_epi32(x), order));
  }

  // 64 columns of the mixed values of kRows rows.
  template <int kRows>
  QINFER_NOINLINE void mix_block(const Keys& keys, int64_t block, const float* factors, float* out,
                 int64_t stride) {
    __m512i sums[kRows][2][4];
    QINFER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      QINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        QINFER_UNROLL
        for (int v = 0; v < 4; ++v) sums[r][half][v] = _mm512_setzero_si512();
      }
    }
    const int8_t* values = values_ + block * kSpan * 64;
    for (int64_t j = keys.begin / 4 * 4; j < keys.end; j += 4) {
      __m512i column[4];
      QINFER_UNROLL
      for (int v = 0; v < 4; ++v) column[v] = load_ints(values + j * 64 + v * 64);
      QINFER_UNROLL
      for (int r = 0; r < kRows; ++r) {
        QINFER_UNROLL
        for (int half = 0; half < 2; ++half) {
          const __m512i bytes = _mm512_set1_epi32(weights_[r * kSpan + j + half]);
          QINFER_UNROLL
          for (int v = 0; v < 4; ++v) {
            dot(sums[r][half][v], bytes, column[v]);
          }
        }
      }
    }
    QINFER_UNROLL
    for (int r = 0; r < kRows; ++r) store_mixed(sums[r], factors[r], out + r * stride);
  }

  __attribute__((always_inline)) static void store_mixed(const __m512i sums[2][4], float factor,
                                                         float* out) {
    Floats x[4];
    QINFER_UNROLL
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
  int32_t* weights_;      // [kRowsTogether][kSpan / 4][4]: high bytes, low bytes, not used
};

}  // namespace QINFER_ISA
}  // namespace qinfer

#endif
