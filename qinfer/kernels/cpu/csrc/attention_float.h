// Attention over one span in float32, for every type of page and every instruction set.
//
// Keys are converted once per item into blocks of columns, values into rows; both products then run
// through one kernel that multiplies a few rows with a few vectors of columns. An element is summed
// in one order whatever the shape of the call.
#pragma once

#include "attention_span.h"

namespace qinfer {
namespace QINFER_ISA {

constexpr int64_t kBlock = 4 * kWidth;  // columns of a product: four vectors

// c[r] = sum over k of a[r][k] * b[k], for kRows rows and kVectors vectors of columns.
template <int kRows, int kVectors>
QINFER_NOINLINE void product(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                    int64_t depth, float* c, int64_t c_stride) {
  Floats sums[kRows][kVectors];
  QINFER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    QINFER_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(0.0f);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats factors[kRows];
    QINFER_UNROLL
    for (int r = 0; r < kRows; ++r) factors[r] = splat(a[r * a_stride + k]);
    QINFER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const Floats column = load(b + k * b_stride + v * kWidth);
      QINFER_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r][v] = fma(factors[r], column, sums[r][v]);
    }
  }
  QINFER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    QINFER_UNROLL
    for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * kWidth, sums[r][v]);
  }
}

// Rows of four vectors that fit into 32 or 16 registers.
#if defined(__AVX512F__)
constexpr int kMostRows = 6;
#else
constexpr int kMostRows = 3;
#endif

template <int kVectors>
inline void product_rows(int64_t rows, const float* a, int64_t a_stride, const float* b,
                         int64_t b_stride, int64_t depth, float* c, int64_t c_stride) {
  for (; rows >= kMostRows; rows -= kMostRows) {
    product<kMostRows, kVectors>(a, a_stride, b, b_stride, depth, c, c_stride);
    a += kMostRows * a_stride;
    c += kMostRows * c_stride;
  }
  if (rows >= 3) {
    product<3, kVectors>(a, a_stride, b, b_stride, depth, c, c_stride);
    rows -= 3;
    a += 3 * a_stride;
    c += 3 * c_stride;
  }
  if (rows == 2) product<2, kVectors>(a, a_stride, b, b_stride, depth, c, c_stride);
  if (rows == 1) product<1, kVectors>(a, a_stride, b, b_stride, depth, c, c_stride);
}

// The same for `vectors` vectors of columns.
inline void product_wide(int64_t rows, int64_t vectors, const float* a, int64_t a_stride,
                         const float* b, int64_t b_stride, int64_t depth, float* c,
                         int64_t c_stride) {
  int64_t v = 0;
  for (; v + 4 <= vectors; v += 4) {
    product_rows<4>(rows, a, a_stride, b + v * kWidth, b_stride, depth, c + v * kWidth, c_stride);
  }
  for (; v < vectors; ++v) {
    product_rows<1>(rows, a, a_stride, b + v * kWidth, b_stride, depth, c + v * kWidth, c_stride);
  }
}

template <int kKind>
struct Element;
template <>
struct Element<QINFER_KV_FP32> {
  using Type = float;
  static Floats vector(const Type* p) { return load(p); }
};
template <>
struct Element<QINFER_KV_FP16> {
  using Type = uint16_t;
  static Floats vector(const Type* p) { return from_fp16(p); }
};
template <>
struct Element<QINFER_KV_BF16> {
  using Type = uint16_t;
  static Floats vector(const Type* p) { return from_bf16(p); }
};
template <>
struct Element<QINFER_KV_FP8_E4M3> {
  using Type = uint8_t;
  static Floats vector(const Type* p) { return from_fp8(p); }
};
template <>
struct Element<QINFER_KV_INT8> {
  using Type = int8_t;
  static Floats vector(const Type* p) { return from_s8(p); }
};

// One key or value as floats; `out` has room for whole vectors, which end in zeros.
template <int kKind>
inline void convert(const void* elements, const uint16_t* scales, int64_t index, int64_t size,
                    float* out) {
  using Type = typename Element<kKind>::Type;
  const Type* from = static_cast<const Type*>(elements) + index * size;
  const Floats factor =
      splat(scales == nullptr ? 1.0f : float_of(static_cast<uint32_t>(scales[index]) << 16));
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    store(out + i, mul(Element<kKind>::vector(from + i), factor));
  }
  if (i < size) {
    alignas(64) Type rest[kWidth] = {};
    for (int64_t k = i; k < size; ++k) rest[k - i] = from[k];
    store(out + i, inside(mul(Element<kKind>::vector(rest), factor), 0, size - i, splat(0.0f)));
  }
}

class FloatSpan {
 public:
  static constexpr int64_t kRowsTogether = kRowBlock;

  FloatSpan(Arena& arena, const Rows& rows)
      : rows_(rows), padded_(round_up(rows.head_dim, kWidth)) {
    q_ = arena.take<float>(rows.count() * rows.head_dim);
    keys_ = arena.take<float>(kSpan * padded_);
    values_ = arena.take<float>(kSpan * padded_);
    lines_ = arena.take<float>(kWidth * padded_);
    scores_ = arena.take<float>(kRowsTogether * kSpan);
    for (int64_t r = 0; r < rows.count(); ++r) {
      const float* from = rows.row(r);
      float* to = q_ + r * rows.head_dim;
      for (int64_t i = 0; i < rows.head_dim; ++i) to[i] = from[i] * rows.scale;
    }
  }

  void load_keys(const Keys& keys, Prefetch& ahead) {
    switch (keys.pages->kind) {
      case QINFER_KV_FP32: return load_kind<QINFER_KV_FP32>(keys, ahead);
      case QINFER_KV_FP16: return load_kind<QINFER_KV_FP16>(keys, ahead);
      case QINFER_KV_BF16: return load_kind<QINFER_KV_BF16>(keys, ahead);
      case QINFER_KV_FP8_E4M3: return load_kind<QINFER_KV_FP8_E4M3>(keys, ahead);
      default: return load_kind<QINFER_KV_INT8>(keys, ahead);
    }
  }

  // Results [maximum, sum, ..., mixed] of rows [begin, begin + count).
  void attend(const Keys& keys, int64_t begin, int64_t count, float* parts) {
    const int64_t stride = state_stride(rows_.head_dim);
    for (int64_t key = keys.begin / kBlock * kBlock; key < keys.end; key += kBlock) {
      product_rows<4>(count, q_ + begin * rows_.head_dim, rows_.head_dim, keys_ + key * padded_,
                      kBlock, rows_.head_dim, scores_ + key, kSpan);
    }
    for (int64_t r = 0; r < count; ++r) {
      softmax(keys, visible(keys, rows_.token(begin + r)), scores_ + r * kSpan, parts + r * stride);
    }
    product_wide(count, padded_ / kWidth, scores_ + keys.begin, kSpan,
                 values_ + keys.begin * padded_, padded_, keys.end - keys.begin,
                 parts + kStateHead, stride);
  }

 private:
  template <int kKind>
  void load_kind(const Keys& keys, Prefetch& ahead) {
    const qinfer_pages& pages = *keys.pages;
    for (int64_t key = keys.begin / kWidth * kWidth; key < keys.end; key += kWidth) {
      load_columns<kKind>(keys, key, ahead);
    }
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      convert<kKind>(pages.v, pages.v_scales, keys.element(j), rows_.head_dim,
                     values_ + j * padded_);
    }
  }

  // kWidth keys from `first` on as columns of their block.
  template <int kKind>
  QINFER_NOINLINE void load_columns(const Keys& keys, int64_t first, Prefetch& ahead) {
    const qinfer_pages& pages = *keys.pages;
    float* block = keys_ + first / kBlock * kBlock * padded_ + first % kBlock;
    for (int64_t j = 0; j < kWidth; ++j) {
      const int64_t key = first + j;
      float* row = lines_ + j * padded_;
      if (key >= keys.begin && key < keys.end) {
        ahead.advance(1);
        convert<kKind>(pages.k, pages.k_scales, keys.element(key), rows_.head_dim, row);
      } else {
        for (int64_t i = 0; i < padded_; ++i) row[i] = 0.0f;
      }
    }
    for (int64_t i = 0; i < padded_; i += kWidth) {
      Ints in[kWidth];
      Ints out[kWidth];
      for (int64_t j = 0; j < kWidth; ++j) in[j] = as_ints(load(lines_ + j * padded_ + i));
      transpose(in, out);
      const int64_t dims = at_most(rows_.head_dim - i, kWidth);
      for (int64_t j = 0; j < dims; ++j) store(block + (i + j) * kBlock, as_floats(out[j]));
    }
  }

  // Turns scores into weights, zero outside the visible keys; writes maximum and sum.
  QINFER_NOINLINE void softmax(const Keys& keys, Visible seen, float* scores, float* part) {
    const int64_t start = keys.begin / kWidth * kWidth;
    const Floats nothing = splat(-__builtin_inff());
    Floats tops = nothing;
    for (int64_t j = start; j < keys.end; j += kWidth) {
      tops = max(tops, inside(load(scores + j), seen.begin - j, seen.end - j, nothing));
    }
    const float top = max_of(tops);
    const Floats base = splat(top);
    Floats sums = splat(0.0f);
    for (int64_t j = start; j < keys.end; j += kWidth) {
      const Floats weight = inside(exponential(sub(load(scores + j), base)), seen.begin - j,
                                   seen.end - j, splat(0.0f));
      sums = add(sums, weight);
      store(scores + j, weight);
    }
    part[0] = top;
    part[1] = sum_of(sums);
  }

  const Rows& rows_;
  const int64_t padded_;
  float* q_;
  float* keys_;     // [kSpan / kBlock][head_dim, padded][kBlock]
  float* values_;   // [kSpan][padded]
  float* lines_;    // [kWidth][padded], keys on their way into columns
  float* scores_;   // [kRowsTogether][kSpan]
};

}  // namespace QINFER_ISA
}  // namespace qinfer
