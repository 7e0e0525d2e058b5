// Repacks weights into the tiles of linear.h, once, when a model is loaded.
#include <algorithm>
#include <cstring>

#include "linear.h"

namespace qinfer {
namespace {

constexpr int64_t kTileRows = 16;

// Whether a pointer is a multiple of `bytes`.
bool at(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

uint32_t quad(const int8_t* codes) {
  uint32_t bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  return bytes;
}

// Four columns of 4-bit codes in the low nibbles and four in the high ones. In two's complement,
// code + 8 is code ^ 8.
uint32_t pack4(const int8_t* codes) {
  constexpr uint32_t kSign = 0x08080808u, kNibbles = 0x0f0f0f0fu;
  return ((quad(codes) ^ kSign) & kNibbles) | (((quad(codes + 4) ^ kSign) & kNibbles) << 4);
}

uint32_t pack8(const int8_t* codes) { return quad(codes) ^ 0x80808080u; }

// Blocks of 32 columns of 16 rows, zeros where the weight has none: rows often lie a power of two
// apart, so that columns of 16 of them would drive each other out of the cache.
constexpr int64_t kColumns = QINFER_ACTIVATION_GROUP;

template <typename Element>
struct Block {
  Element rows[kTileRows][kColumns];

  // Column k of the tiles is column permutation[k] of the weight.
  void read(const Element* weight, int64_t num_rows, int64_t in_features, int64_t begin,
            const int32_t* permutation) {
    const int64_t columns = std::min(kColumns, in_features - begin);
    if (num_rows < kTileRows || columns < kColumns) std::memset(rows, 0, sizeof rows);
    for (int64_t row = 0; row < num_rows; ++row, weight += in_features) {
      if (permutation == nullptr) {
        std::memcpy(rows[row], weight + begin, columns * sizeof(Element));
        continue;
      }
      for (int64_t k = 0; k < columns; ++k) rows[row][k] = weight[permutation[begin + k]];
    }
  }
};

// Calls write(block, tiles) for all blocks in the order of the tiles, in which one takes
// `block_bytes`.
template <typename Element, typename Write>
void for_blocks(const Element* weight, int64_t out_features, int64_t in_features,
                const int32_t* permutation, int64_t block_bytes, void* tiles, const Write& write) {
  char* to = static_cast<char*>(tiles);
  for (int64_t first = 0; first < out_features; first += kTileRows) {
    const int64_t num_rows = std::min(kTileRows, out_features - first);
    for (int64_t begin = 0; begin < in_features; begin += kColumns, to += block_bytes) {
      Block<Element> block;
      block.read(weight + first * in_features, num_rows, in_features, begin, permutation);
      write(block, to);
    }
  }
}

void tile_codes(const int8_t* codes, int64_t out_features, int64_t in_features,
                const int32_t* permutation, int32_t bits, void* tiles) {
  const int64_t columns = bits == 4 ? 8 : 4;  // per 64 bytes of a tile
  for_blocks(codes, out_features, in_features, permutation, kTileRows * kColumns * bits / 8, tiles,
             [&](const Block<int8_t>& block, void* to) {
               uint32_t* words = static_cast<uint32_t*>(to);
               for (int64_t k = 0; k < kColumns; k += columns) {
                 for (const auto& row : block.rows) {
                   *words++ = bits == 4 ? pack4(row + k) : pack8(row + k);
                 }
               }
             });
}

// Columns lie in runs of `run`, within which each row has its elements together.
template <typename Element, int64_t run>
void tile_dense(const void* weight, int64_t out_features, int64_t in_features, void* tiles) {
  for_blocks(static_cast<const Element*>(weight), out_features, in_features, nullptr,
             kTileRows * kColumns * int64_t{sizeof(Element)}, tiles,
             [](const Block<Element>& block, void* to) {
               Element* elements = static_cast<Element*>(to);
               for (int64_t k = 0; k < kColumns; k += run) {
                 for (const auto& row : block.rows) {
                   for (int64_t i = 0; i < run; ++i) *elements++ = row[k + i];
                 }
               }
             });
}

}  // namespace
}  // namespace qinfer

extern "C" int32_t qinfer_tile_codes(const int8_t* codes, int64_t out_features,
                                     int64_t in_features, const int32_t* permutation, int32_t bits,
                                     void* tiles) {
  if (codes == nullptr || !qinfer::at(tiles, alignof(uint32_t)) || !qinfer::at(permutation, alignof(int32_t)) ||
      tiles == nullptr || out_features < 0 || in_features < 0 || (bits != 4 && bits != 8)) {
    return QINFER_BAD_ARGUMENT;
  }
  qinfer::tile_codes(codes, out_features, in_features, permutation, bits, tiles);
  return QINFER_OK;
}

extern "C" int32_t qinfer_tile_dense(const void* weight, int64_t out_features, int64_t in_features,
                                     int32_t kind, void* tiles) {
  const int64_t bytes = kind == QINFER_WBF16 ? 2 : 4;
  if (weight == nullptr || tiles == nullptr || !qinfer::at(weight, bytes) || !qinfer::at(tiles, bytes) ||
      out_features < 0 || in_features < 0 || (kind != QINFER_WBF16 && kind != QINFER_WFP32)) {
    return QINFER_BAD_ARGUMENT;
  }
  const auto tile = kind == QINFER_WBF16 ? qinfer::tile_dense<uint16_t, 2> : qinfer::tile_dense<float, 1>;
  tile(weight, out_features, in_features, tiles);
  return QINFER_OK;
}
