// What the exported functions share; see library.cpp.
#pragma once

#include "kernels.h"

namespace qinfer {

// The instruction set in use.
const Kernels* active();

// Whether the instruction set in use has an op of this kind.
bool has_op(int32_t kind);

// Whether an op has a known kind and its args can be read as that kind's struct describes: nothing
// missing, no impossible size. Kinds of ops.h only; the others are checked where they are made.
bool valid_op(const qinfer_op& op);

}  // namespace qinfer
