// The C interface of libqinfer_cpu.so. No C++ types, no torch types: pointers and sizes.
//
// A change of any struct or signature here raises QINFER_ABI_VERSION, here and in native.py.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define QINFER_API __declspec(dllexport)
#else
#define QINFER_API __attribute__((visibility("default")))
#endif

#define QINFER_ABI_VERSION 8

#ifdef __cplusplus
extern "C" {
#endif

enum qinfer_status { QINFER_OK = 0, QINFER_BAD_ARGUMENT = 1, QINFER_NO_THREADS = 2 };
enum qinfer_dtype { QINFER_FLOAT32 = 0, QINFER_BFLOAT16 = 1, QINFER_FLOAT16 = 2 };

// A quantized weight [out, in] as the kernels read it; row-major, dense, owned by the caller.
typedef struct qinfer_weight {
  const void* codes;           // 8 bits: int8 [out, in]. 4 bits: uint8 [out, ceil(in / 2)], the low
                               // nibble is the even column, a nibble is code + 8
  const float* scales;         // [out, groups]
  const float* zeros;          // [out, groups], shifted like the codes; NULL = all 0
  const float* offsets;        // [out, groups] or NULL; excludes zeros, see qinfer_dequantize
  const int32_t* group_index;  // [in], the group of each column; NULL = column / group_size
  int64_t out_features;
  int64_t in_features;
  int64_t num_groups;
  int64_t group_size;
  int32_t bits;  // 4 or 8
} qinfer_weight;

QINFER_API int32_t qinfer_abi_version(void);

// Name of the instruction set in use: the best that this machine has of "avx512", "avx2" and
// "portable", unless qinfer_use_isa chose another.
QINFER_API const char* qinfer_isa(void);

// Uses another instruction set from now on, so that tests can compare them. QINFER_BAD_ARGUMENT if
// it was not compiled in or this machine lacks it. Not while other calls run.
QINFER_API int32_t qinfer_use_isa(const char* name);

// Writes rows [row_begin, row_end) of the dense weight to `out` [row_end - row_begin, in]:
// (code - zero) * scale or, with offsets, (code + 2^(bits - 1)) * scale + offset, in float32 and then
// rounded to `dtype` (to nearest, ties to even). Uses up to `threads` threads. Returns a
// qinfer_status; nothing is written unless it is QINFER_OK.
QINFER_API int32_t qinfer_dequantize(const qinfer_weight* weight, int64_t row_begin,
                                     int64_t row_end, int32_t dtype, void* out, int32_t threads);

#ifdef __cplusplus
}
#endif
