// Rotation of queries and keys, and the write of keys and values to their pages.
//
// A query head of a token, or a key head with its values, is one unit of work and depends on nothing
// else, so any split over threads gives the same bits. No contraction into FMA: the codes equal those of the torch reference.
#include "attention.h"
#include "int8.h"
#include "kernels.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int64_t kMaxHeadDim = QINFER_MAX_HEAD_DIM;
constexpr float kInt8Max = 127.0f;
constexpr float kFp8Max = 448.0f;
constexpr uint16_t kBf16Nan = 0x7fc0;

inline float cut(float x, float limit) {
  x = x < -limit ? -limit : x;
  return x > limit ? limit : x;
}

// RMSNorm (arXiv 1910.07467) over a head, by fixed partial sums.
void normalize(const float* __restrict weight, float eps, int64_t size, float* __restrict x) {
  constexpr int64_t kLanes = 16;
  float sums[kLanes] = {};
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  }
  for (int64_t i = whole; i < size; ++i) sums[i - whole] += x[i] * x[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  const float factor = 1.0f / __builtin_sqrtf(sums[0] / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) x[i] = x[i] * factor * weight[i];
}

// Rotates the pairs (i, i + half) (RoPE, arXiv 2104.09864).
void rotate(const float* __restrict cos, const float* __restrict sin, int64_t half,
            float* __restrict first, float* __restrict second) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = first[i];
    const float b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

// The bits of the largest magnitude. Without their signs, floats order as their bits do, with
// infinity and then NaN at the end.
int32_t largest_bits(const float* __restrict x, int64_t size) {
  int32_t amax_bits = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  }
  return amax_bits;
}

// Whether a vector stays finite in its pages; fp16 rounds to infinity from 65520 on.
bool storable(const float* x, int64_t size, int32_t kind) {
  const uint32_t limit = kind == QINFER_KV_FP16 ? bits_of(65520.0f) : kInfinityBits;
  return largest_bits(x, size) < static_cast<int32_t>(limit);
}

// The smallest bfloat16 not below amax / max_code; NaN where the vector is not finite.
uint16_t scale_of(const float* __restrict x, int64_t size, float max_code) {
  const int32_t amax_bits = largest_bits(x, size);
  if (amax_bits >= static_cast<int32_t>(kInfinityBits)) return kBf16Nan;
  const float step = float_of(static_cast<uint32_t>(amax_bits)) / max_code;
  return static_cast<uint16_t>((bits_of(step) + 0xffffu) >> 16);
}

void int8_codes(const float* __restrict x, float scale, int64_t size, int8_t* __restrict codes) {
  for (int64_t i = 0; i < size; ++i) {
    const float code = cut(x[i] / scale, kInt8Max);
    codes[i] = static_cast<int8_t>(bits_of(code + kToInteger) - kToIntegerBits);
  }
}

// float8_e4m3 (arXiv 2209.05433) of |x| <= 448: 3 bits of mantissa, the smallest normal is 2^-6.
inline uint8_t e4m3(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t odd = (magnitude >> 20) & 1u;
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + odd) >> 20;
  // 2^14 has the step 2^-9 of the subnormals, so adding it rounds to them.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t code = magnitude < bits_of(0.015625f) ? subnormal : normal;
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80u));
}

void fp8_codes(const float* __restrict x, float scale, int64_t size, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < size; ++i) codes[i] = e4m3(cut(x[i] / scale, kFp8Max));
}

inline uint16_t bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > kInfinityBits ? kBf16Nan : rounded);
}

inline uint16_t fp16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // 2^-1 has the step 2^-24 of the subnormals.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t half = magnitude < bits_of(6.103515625e-5f) ? subnormal : normal;
  half = half > 0x7c00u ? 0x7c00u : half;
  half = magnitude > kInfinityBits ? 0x7e00u : half;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
#endif
}

// Writes one vector to element `index` of the pages.
void store(const float* __restrict x, const qinfer_pages& pages, void* elements, uint16_t* scales,
           int64_t index) {
  const int64_t size = pages.head_dim;
  const int64_t begin = index * size;
  if (pages.kind == QINFER_KV_FP32) {
    float* to = static_cast<float*>(elements) + begin;
    for (int64_t i = 0; i < size; ++i) to[i] = x[i];
    return;
  }
  if (pages.kind == QINFER_KV_FP16 || pages.kind == QINFER_KV_BF16) {
    uint16_t* to = static_cast<uint16_t*>(elements) + begin;
    if (pages.kind == QINFER_KV_FP16) {
      for (int64_t i = 0; i < size; ++i) to[i] = fp16(x[i]);
    } else {
      for (int64_t i = 0; i < size; ++i) to[i] = bf16(x[i]);
    }
    return;
  }
  uint8_t* codes = static_cast<uint8_t*>(elements) + begin;
  const bool int8 = pages.kind == QINFER_KV_INT8;
  const uint16_t stored = scale_of(x, size, int8 ? kInt8Max : kFp8Max);
  const float scale = float_of(static_cast<uint32_t>(stored) << 16);
  scales[index] = stored;
  if (!(scale > 0.0f)) {
    for (int64_t i = 0; i < size; ++i) codes[i] = 0;
  } else if (int8) {
    int8_codes(x, scale, size, reinterpret_cast<int8_t*>(codes));
  } else {
    fp8_codes(x, scale, size, codes);
  }
}

// One unit of one token: first the query heads, then those of k, each with the values of its head.
//
// Where a key or its values are not finite, the key is stored as NaN and the values as 0: who sees
// them gets NaN by way of the score, and a query that does not see them yet gets weight 0 times 0,
// where a NaN value would reach it.
void head_of_token(const qinfer_rope_store& op, int64_t token, int64_t head) {
  const qinfer_pages& pages = op.pages;
  const int64_t size = pages.head_dim;
  const int64_t half = size / 2;
  const int64_t heads = op.num_heads + 2 * int64_t{pages.num_kv_heads};
  const float* cos = op.cos + op.positions[token] * half;
  const float* sin = op.sin + op.positions[token] * half;
  float* x = op.qkv + (token * heads + head) * size;
  if (head < op.num_heads) {
    if (op.q_norm != nullptr) normalize(op.q_norm, op.eps, size, x);
    rotate(cos, sin, half, x, x + half);
    return;
  }
  const int64_t index = op.slots[token] * pages.num_kv_heads + head - op.num_heads;
  const float* value = x + pages.num_kv_heads * size;
  alignas(64) float key[kMaxHeadDim];
  for (int64_t i = 0; i < size; ++i) key[i] = x[i];
  if (op.k_norm != nullptr) normalize(op.k_norm, op.eps, size, key);
  rotate(cos, sin, half, key, key + half);
  if (storable(key, size, pages.kind) && storable(value, size, pages.kind)) {
    store(key, pages, pages.k, pages.k_scales, index);
    store(value, pages, pages.v, pages.v_scales, index);
    return;
  }
  for (int64_t i = 0; i < size; ++i) key[i] = __builtin_nanf("");
  store(key, pages, pages.k, pages.k_scales, index);
  for (int64_t i = 0; i < size; ++i) key[i] = 0.0f;
  store(key, pages, pages.v, pages.v_scales, index);
}

}  // namespace

void rope_store(const void* args, int32_t thread, int32_t threads) {
  const qinfer_rope_store& op = *static_cast<const qinfer_rope_store*>(args);
  const int64_t heads = op.num_heads + int64_t{op.pages.num_kv_heads};
  const int64_t units = *op.num_tokens * heads;
  const int64_t end = units * (thread + 1) / threads;
  for (int64_t unit = units * thread / threads; unit < end; ++unit) {
    head_of_token(op, unit / heads, unit % heads);
  }
}

}  // namespace QINFER_ISA
}  // namespace qinfer
