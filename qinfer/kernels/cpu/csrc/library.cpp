// The exported functions: check arguments, choose the instruction set, split rows over threads.
#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "active.h"

namespace qinfer {
namespace {

// Below this many weights a thread costs more to start than it saves.
constexpr int64_t kMinWeightsPerThread = 1 << 20;

// The instruction sets that were compiled in and that this machine has, best first.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
#if defined(QINFER_HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
    found.push_back(&avx512::kernels);
  }
#endif
#if defined(QINFER_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2::kernels);
#endif
  found.push_back(&portable::kernels);
  return found;
}

const Kernels*& chosen() {
  static const Kernels* kernels = usable_kernels().front();
  return kernels;
}

// Calls body(begin, end) for parts of [0, rows), each in a thread of its own; the last part, and
// any that the system has no thread for, in this one.
template <typename Body>
void split_rows(int64_t rows, int64_t parts, const Body& body) {
  std::vector<std::thread> team;
  const int64_t step = (rows + parts - 1) / parts;
  int64_t begin = 0;
  for (; begin + step < rows; begin += step) {
    try {
      team.emplace_back(body, begin, begin + step);
    } catch (const std::system_error&) {
      break;
    }
  }
  if (begin < rows) body(begin, rows);
  for (std::thread& member : team) member.join();
}

bool valid(const qinfer_weight& w) {
  const bool described = w.codes != nullptr && w.scales != nullptr && w.out_features >= 0 &&
                         w.in_features >= 0 && (w.bits == 4 || w.bits == 8);
  if (!described || w.group_index != nullptr) return described && w.num_groups > 0;
  return w.group_size > 0 && w.num_groups >= (w.in_features + w.group_size - 1) / w.group_size;
}

}  // namespace

const Kernels* active() { return chosen(); }

}  // namespace qinfer

extern "C" {

int32_t qinfer_abi_version(void) { return QINFER_ABI_VERSION; }

const char* qinfer_isa(void) { return qinfer::active()->isa; }

int32_t qinfer_use_isa(const char* name) {
  for (const qinfer::Kernels* kernels : qinfer::usable_kernels()) {
    if (name != nullptr && std::strcmp(kernels->isa, name) == 0) {
      qinfer::chosen() = kernels;
      return QINFER_OK;
    }
  }
  return QINFER_BAD_ARGUMENT;
}

int32_t qinfer_dequantize(const qinfer_weight* weight, int64_t row_begin, int64_t row_end,
                          int32_t dtype, void* out, int32_t threads) {
  if (weight == nullptr || out == nullptr || !qinfer::valid(*weight) || row_begin < 0 ||
      row_end < row_begin || row_end > weight->out_features ||
      (dtype != QINFER_FLOAT32 && dtype != QINFER_BFLOAT16)) {
    return QINFER_BAD_ARGUMENT;
  }
  const int64_t rows = row_end - row_begin;
  const int64_t row_bytes = weight->in_features * (dtype == QINFER_BFLOAT16 ? 2 : 4);
  const int64_t worth = rows * weight->in_features / qinfer::kMinWeightsPerThread;
  const int64_t parts = std::max<int64_t>(1, std::min({int64_t{threads}, worth, rows}));
  qinfer::split_rows(rows, parts, [&](int64_t begin, int64_t end) {
    qinfer::active()->dequantize_rows(*weight, row_begin + begin, row_begin + end, dtype,
                                      static_cast<char*>(out) + begin * row_bytes);
  });
  return QINFER_OK;
}

}  // extern "C"
