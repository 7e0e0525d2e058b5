// The kernels of one instruction set. Every op file is compiled once per set, with QINFER_ISA as
// its namespace; table.cpp gathers the entry points of a set in `kernels`.
//
// Op files must not include the C++ standard library: an inline function of it compiled for AVX512
// could be the copy that the linker keeps for everyone.
#pragma once

#include <stdint.h>

#include "gram.h"
#include "program.h"

namespace qinfer {

// Writes rows [row_begin, row_end) to `out`, which points at row_begin.
using DequantizeRows = void (*)(const qinfer_weight& weight, int64_t row_begin, int64_t row_end,
                                int32_t dtype, void* out);

// One thread's share of an op; see program.h.
using OpFunction = void (*)(const void* args, int32_t thread, int32_t threads);

// See gram.h.
using PackPairs = void (*)(const float* x, int64_t tokens, int64_t columns, int64_t stride,
                           uint16_t* packed);
using AddGram = void (*)(const qinfer_gram& gram, int64_t row_begin, int64_t row_end);

struct Kernels {
  const char* isa;
  DequantizeRows dequantize_rows;
  PackPairs pack_pairs;  // NULL where the set has no products of bf16 pairs, as the next
  AddGram add_gram;
  OpFunction ops[QINFER_OP_KINDS];  // NULL where the set has no such op
};

#define QINFER_DECLARE_ISA(name)                                                              \
  namespace name {                                                                            \
  extern const Kernels kernels;                                                               \
  void dequantize_rows(const qinfer_weight& weight, int64_t row_begin, int64_t row_end,       \
                       int32_t dtype, void* out);                                             \
  void pack_pairs(const float* x, int64_t tokens, int64_t columns, int64_t stride,            \
                  uint16_t* packed);                                                          \
  void add_gram(const qinfer_gram& gram, int64_t row_begin, int64_t row_end);                 \
  void linear(const void* args, int32_t thread, int32_t threads);                             \
  void linear_bf16(const void* args, int32_t thread, int32_t threads);                        \
  void embed(const void* args, int32_t thread, int32_t threads);                              \
  void norm(const void* args, int32_t thread, int32_t threads);                               \
  void silu_mul(const void* args, int32_t thread, int32_t threads);                           \
  void quantize(const void* args, int32_t thread, int32_t threads);                           \
  void gather(const void* args, int32_t thread, int32_t threads);                             \
  void rope_store(const void* args, int32_t thread, int32_t threads);                         \
  void attention(const void* args, int32_t thread, int32_t threads);                          \
  void merge(const void* args, int32_t thread, int32_t threads);                              \
  void argmax(const void* args, int32_t thread, int32_t threads);                             \
  void sample(const void* args, int32_t thread, int32_t threads);                             \
  void faults(const void* args, int32_t thread, int32_t threads);                             \
  }

QINFER_DECLARE_ISA(portable)
QINFER_DECLARE_ISA(avx2)
QINFER_DECLARE_ISA(avx512)

#undef QINFER_DECLARE_ISA

}  // namespace qinfer
