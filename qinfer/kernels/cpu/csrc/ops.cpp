#include "kernels.h"

namespace qinfer {
namespace QINFER_ISA {
void embed(const void*, int32_t, int32_t) {}
void norm(const void*, int32_t, int32_t) {}
void silu_mul(const void*, int32_t, int32_t) {}
void quantize(const void*, int32_t, int32_t) {}
void gather(const void*, int32_t, int32_t) {}
}  // namespace QINFER_ISA
}  // namespace qinfer
