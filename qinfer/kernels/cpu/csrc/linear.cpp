#include "kernels.h"

namespace qinfer {
namespace QINFER_ISA {
void linear(const void*, int32_t, int32_t) {}
}  // namespace QINFER_ISA
}  // namespace qinfer
