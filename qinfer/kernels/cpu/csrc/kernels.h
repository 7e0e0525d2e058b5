// The kernels of one instruction set. Every op file is compiled once per set, with QINFER_ISA as
// its namespace, and hands out its entry points through `kernels`.
//
// Op files must not include the C++ standard library: an inline function of it compiled for AVX512
// could be the copy that the linker keeps for everyone.
#pragma once

#include <stdint.h>

#include "qinfer_cpu.h"

namespace qinfer {

// Writes rows [row_begin, row_end) to `out`, which points at row_begin.
using DequantizeRows = void (*)(const qinfer_weight& weight, int64_t row_begin, int64_t row_end,
                                int32_t dtype, void* out);

struct Kernels {
  const char* isa;
  DequantizeRows dequantize_rows;
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace qinfer
