// The entry points of one instruction set, by kind of op.
#include "kernels.h"

#define QINFER_STRING_(x) #x
#define QINFER_STRING(x) QINFER_STRING_(x)

// Products of bf16 pairs are compiled for AVX512 only.
#if defined(QINFER_BF16)
#define QINFER_IF_BF16(function) function
#else
#define QINFER_IF_BF16(function) nullptr
#endif

namespace qinfer {
namespace QINFER_ISA {

const Kernels kernels = {
    QINFER_STRING(QINFER_ISA),
    dequantize_rows,
    QINFER_IF_BF16(pack_pairs),
    QINFER_IF_BF16(add_gram),
    {nullptr, linear, embed, norm, silu_mul, quantize, gather, rope_store, attention, merge,
     argmax, sample, faults, QINFER_IF_BF16(linear_bf16)},
};

}  // namespace QINFER_ISA
}  // namespace qinfer
