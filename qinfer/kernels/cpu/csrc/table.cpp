// The entry points of one instruction set, by kind of op.
#include "kernels.h"

#define QINFER_STRING_(x) #x
#define QINFER_STRING(x) QINFER_STRING_(x)

namespace qinfer {
namespace QINFER_ISA {

const Kernels kernels = {
    QINFER_STRING(QINFER_ISA),
    dequantize_rows,
    {nullptr, linear, embed, norm, silu_mul, quantize, gather, rope_store, attention, merge,
     argmax, sample, faults},
};

}  // namespace QINFER_ISA
}  // namespace qinfer
