// The exported functions: check arguments, choose the instruction set, split rows over threads.
#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "active.h"
#include "attention.h"
#include "gram.h"
#include "linear.h"
#include "ops.h"
#include "sample.h"

namespace qinfer {
namespace {

constexpr int64_t kAlignment = 64;  // of tiles and of quantized rows

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
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    found.push_back(&avx2::kernels);
  }
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

// Whether a pointer is there, and at a multiple of `bytes`.
bool given_at(const void* pointer, int64_t bytes) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <typename... Elements>
bool given(const Elements*... pointers) {
  return (... && given_at(pointers, alignof(Elements)));
}

// The same of pointers that may be NULL.
template <typename... Elements>
bool optional(const Elements*... pointers) {
  return (... && (pointers == nullptr || given(pointers)));
}

int64_t element_bytes(int32_t dtype) { return dtype == QINFER_BFLOAT16 ? 2 : 4; }

bool valid(const qinfer_weight& w) {
  const bool described = w.codes != nullptr && w.scales != nullptr && w.out_features >= 0 &&
                         w.in_features >= 0 && (w.bits == 4 || w.bits == 8);
  if (!described || !optional(w.scales, w.zeros, w.offsets, w.group_index)) return false;
  if (w.zeros != nullptr && w.offsets != nullptr) return false;
  if (w.group_index != nullptr) return w.num_groups > 0;
  return w.group_size > 0 &&
         (w.in_features == 0 || w.num_groups > (w.in_features - 1) / w.group_size);
}

bool holds(const qinfer_int8_rows* rows, int64_t size) {
  return given(rows) && given_at(rows->groups, kAlignment) && rows->columns >= size &&
         rows->columns % QINFER_ACTIVATION_GROUP == 0;
}

// The outputs of an op that writes rows of `size` as float32, quantized, or both.
bool written(const float* out, const qinfer_int8_rows* int8_rows, const int32_t* permutation,
             int64_t size) {
  return size > 0 && (out != nullptr || int8_rows != nullptr) && optional(out, permutation) &&
         (int8_rows == nullptr || holds(int8_rows, size));
}

bool valid(const qinfer_embed& op) {
  return (op.dtype == QINFER_FLOAT32 || op.dtype == QINFER_BFLOAT16) &&
         given_at(op.table, element_bytes(op.dtype)) &&
         given(op.token_ids, op.out, op.num_tokens) && op.hidden > 0 &&
         (op.tiled == 0 || op.tiled == 1);
}

bool valid(const qinfer_norm& op) {
  return given(op.x, op.weight, op.num_tokens) && optional(op.bad_layers) &&
         written(op.out, op.int8_rows, op.permutation, op.size);
}

bool valid(const qinfer_silu_mul& op) {
  return given(op.x, op.num_tokens) && written(op.out, op.int8_rows, op.permutation, op.size);
}

bool valid(const qinfer_quantize& op) {
  return given(op.x, op.num_tokens) && written(nullptr, op.int8_rows, op.permutation, op.size);
}

bool valid(const qinfer_gather& op) {
  return given(op.x, op.rows, op.out, op.num_rows) && op.size > 0;
}

bool valid(const qinfer_argmax& op) {
  return given(op.x, op.out, op.num_rows) && op.size > 0;
}

bool valid(const qinfer_tiled_weight& w) {
  const bool sized = given_at(w.data, kAlignment) && w.out_features > 0 && w.in_features > 0 &&
                     w.in_features % QINFER_ACTIVATION_GROUP == 0;
  if (w.kind == QINFER_WBF16 || w.kind == QINFER_WFP32) return sized;
  const int64_t scale_bytes = w.scale_dtype == QINFER_FLOAT16 ? 2 : 4;
  return sized && (w.kind == QINFER_W4 || w.kind == QINFER_W8) &&
         (w.scale_dtype == QINFER_FLOAT16 || w.scale_dtype == QINFER_FLOAT32) &&
         given_at(w.scales, scale_bytes) && optional(w.zeros) &&
         (w.offsets == nullptr || given_at(w.offsets, scale_bytes)) &&
         (w.zeros == nullptr || w.offsets == nullptr) && w.group_size > 0 &&
         w.group_size % QINFER_ACTIVATION_GROUP == 0;
}

bool valid(const qinfer_linear& op) {
  if (!valid(op.weight) || !given(op.out, op.num_tokens) ||
      op.out_stride < op.weight.out_features || !optional(op.permutation, op.bias, op.residual) ||
      (op.int8_rows != nullptr) == (op.float_rows != nullptr)) {
    return false;
  }
  if (op.int8_rows != nullptr) {
    return holds(op.int8_rows, op.weight.in_features) &&
           (op.weight.kind == QINFER_W4 || op.weight.kind == QINFER_W8) &&
           op.int8_rows->columns == op.weight.in_features;
  }
  return given(op.float_rows) && op.float_columns > 0 && op.float_columns <= op.weight.in_features &&
         op.float_stride >= op.float_columns;
}

// The op on bf16 pairs.
bool valid_bf16(const qinfer_linear& op) {
  return valid(op) && op.float_rows != nullptr && op.weight.kind == QINFER_WBF16 &&
         op.permutation == nullptr;
}

bool valid(const qinfer_pages& pages) {
  const bool coded = pages.kind == QINFER_KV_FP8_E4M3 || pages.kind == QINFER_KV_INT8;
  const bool half = pages.kind == QINFER_KV_FP16 || pages.kind == QINFER_KV_BF16;
  if (!coded && !half && pages.kind != QINFER_KV_FP32) return false;
  const int64_t bytes = coded ? 1 : half ? 2 : 4;
  return given_at(pages.k, bytes) && given_at(pages.v, bytes) && pages.block_size > 0 &&
         (!coded || given(pages.k_scales, pages.v_scales)) && pages.num_kv_heads > 0 &&
         pages.num_kv_heads <= QINFER_MAX_HEADS && pages.head_dim > 0 &&
         pages.head_dim % 2 == 0 && pages.head_dim <= QINFER_MAX_HEAD_DIM;
}

bool valid(const qinfer_rope_store& op) {
  return valid(op.pages) && optional(op.q_norm, op.k_norm) &&
         given(op.qkv, op.cos, op.sin, op.positions, op.slots, op.num_tokens) &&
         op.num_heads > 0 && op.num_heads <= QINFER_MAX_HEADS;
}

bool valid(const qinfer_attention& op) {
  return valid(op.pages) && op.sliding_window >= 0 &&
         given(op.qkv, op.scratch, op.block_tables, op.seq_lens, op.query_starts) &&
         given(op.out, op.num_sequences, op.table_width) && op.num_heads > 0 &&
         op.num_heads <= QINFER_MAX_HEADS && op.num_heads % op.pages.num_kv_heads == 0 &&
         written(op.out, op.int8_rows, op.permutation, int64_t{op.num_heads} * op.pages.head_dim);
}

bool valid(const qinfer_faults& op) {
  return given(op.best, op.rows, op.token_notes, op.row_notes, op.out, op.num_rows, op.num_tokens);
}

// The draws are read when the op runs: what they point at is checked where they are made.
bool valid(const qinfer_sample& op) {
  return given(op.draws, op.out, op.scratch, op.num_draws) && op.size > 0 && op.workers > 0;
}

template <typename Args>
bool valid_as(const qinfer_op& op) {
  return valid(*static_cast<const Args*>(op.args));
}

bool valid(const qinfer_gram& gram) {
  return given_at(gram.left, kAlignment) && given_at(gram.right, kAlignment) && given(gram.sums) &&
         gram.tokens >= 0 && gram.left_columns > 0 && gram.right_columns > 0 &&
         gram.stride >= gram.right_columns && (gram.upper == 0 || gram.upper == 1) &&
         (gram.upper == 0 || gram.left_columns == gram.right_columns);
}

// Whether the machine multiplies pairs of bf16, which its instruction set does not say.
bool has_bf16() {
#if defined(QINFER_HAS_AVX512)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// native.py and program.py describe these structs to ctypes; their tests name the same sizes.
static_assert(sizeof(qinfer_op) == 16 && sizeof(qinfer_int8_rows) == 16, "see program.py");
static_assert(sizeof(qinfer_embed) == 48 && sizeof(qinfer_norm) == 80, "see program.py");
static_assert(sizeof(qinfer_silu_mul) == 48 && sizeof(qinfer_quantize) == 40, "see program.py");
static_assert(sizeof(qinfer_gather) == 40 && sizeof(qinfer_argmax) == 32, "see program.py");
static_assert(sizeof(qinfer_tiled_weight) == 64 && sizeof(qinfer_linear) == 144, "see tiled.py");
static_assert(sizeof(qinfer_faults) == 64, "see faults.py");
static_assert(sizeof(qinfer_gram) == 64, "see gram.py");
static_assert(sizeof(qinfer_draw) == 72 && sizeof(qinfer_sample) == 48, "see sampling.py");

}  // namespace

const Kernels* active() { return chosen(); }

bool has_op(int32_t kind) {
  if (kind <= 0 || kind >= QINFER_OP_KINDS || active()->ops[kind] == nullptr) return false;
  return kind != QINFER_OP_LINEAR_BF16 || has_bf16();
}

bool valid_op(const qinfer_op& op) {
  if (op.args == nullptr || !has_op(op.kind)) return false;
  switch (op.kind) {
    case QINFER_OP_LINEAR: return valid_as<qinfer_linear>(op);
    case QINFER_OP_LINEAR_BF16: return valid_bf16(*static_cast<const qinfer_linear*>(op.args));
    case QINFER_OP_ROPE_STORE: return valid_as<qinfer_rope_store>(op);
    case QINFER_OP_ATTENTION:
    case QINFER_OP_MERGE: return valid_as<qinfer_attention>(op);
    case QINFER_OP_EMBED: return valid_as<qinfer_embed>(op);
    case QINFER_OP_NORM: return valid_as<qinfer_norm>(op);
    case QINFER_OP_SILU_MUL: return valid_as<qinfer_silu_mul>(op);
    case QINFER_OP_QUANTIZE: return valid_as<qinfer_quantize>(op);
    case QINFER_OP_GATHER: return valid_as<qinfer_gather>(op);
    case QINFER_OP_ARGMAX: return valid_as<qinfer_argmax>(op);
    case QINFER_OP_SAMPLE: return valid_as<qinfer_sample>(op);
    case QINFER_OP_FAULTS: return valid_as<qinfer_faults>(op);
    default: return false;
  }
}

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

int32_t qinfer_has_op(int32_t kind) { return qinfer::has_op(kind) ? 1 : 0; }

int32_t qinfer_dequantize(const qinfer_weight* weight, int64_t row_begin, int64_t row_end,
                          int32_t dtype, void* out, int32_t threads) {
  if (!qinfer::given(weight) || !qinfer::valid(*weight) || row_begin < 0 ||
      row_end < row_begin || row_end > weight->out_features ||
      (dtype != QINFER_FLOAT32 && dtype != QINFER_BFLOAT16) ||
      !qinfer::given_at(out, qinfer::element_bytes(dtype))) {
    return QINFER_BAD_ARGUMENT;
  }
  const int64_t rows = row_end - row_begin;
  const int64_t row_bytes = weight->in_features * qinfer::element_bytes(dtype);
  const int64_t worth = rows * weight->in_features / qinfer::kMinWeightsPerThread;
  const int64_t parts = std::max<int64_t>(1, std::min({int64_t{threads}, worth, rows}));
  qinfer::split_rows(rows, parts, [&](int64_t begin, int64_t end) {
    qinfer::active()->dequantize_rows(*weight, row_begin + begin, row_begin + end, dtype,
                                      static_cast<char*>(out) + begin * row_bytes);
  });
  return QINFER_OK;
}

int32_t qinfer_has_gram(void) {
  return qinfer::active()->add_gram != nullptr && qinfer::has_bf16() ? 1 : 0;
}

int32_t qinfer_pack_pairs(const float* x, int64_t tokens, int64_t columns, int64_t stride,
                          uint16_t* packed) {
  if (qinfer_has_gram() == 0 || !qinfer::given(x) || tokens < 0 || columns <= 0 ||
      stride < columns || !qinfer::given_at(packed, qinfer::kAlignment)) {
    return QINFER_BAD_ARGUMENT;
  }
  qinfer::active()->pack_pairs(x, tokens, columns, stride, packed);
  return QINFER_OK;
}

int32_t qinfer_add_gram(const qinfer_gram* gram, int64_t row_begin, int64_t row_end) {
  if (qinfer_has_gram() == 0 || !qinfer::given(gram) || !qinfer::valid(*gram) || row_begin < 0 ||
      row_begin % QINFER_GRAM_PANEL != 0 || row_end < row_begin || row_end > gram->left_columns) {
    return QINFER_BAD_ARGUMENT;
  }
  qinfer::active()->add_gram(*gram, row_begin, row_end);
  return QINFER_OK;
}

}  // extern "C"
