// How threads share the rows of a step, the same in all ops.
#pragma once

#include "program.h"

namespace qinfer {
namespace QINFER_ISA {

// Whether each thread takes rows of its own, in whole blocks, rather than columns of all rows. What a
// thread has written is then in its own cache when the next op reads it. Virtual processors need
// not share a cache: to fetch a line from another one's then takes several times as long.
//
// Not where the shares would be unequal, or so small that each pass over the weights serves few rows.
inline bool by_rows(int64_t rows, int32_t threads) {
  const int64_t blocks = (rows + QINFER_ROW_BLOCK - 1) / QINFER_ROW_BLOCK;
  return blocks >= 2 * threads && blocks % threads == 0;
}

}  // namespace QINFER_ISA
}  // namespace qinfer
