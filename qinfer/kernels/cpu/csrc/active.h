// The instruction set in use; see library.cpp.
#pragma once

#include "kernels.h"

namespace qinfer {

const Kernels* active();

}  // namespace qinfer
