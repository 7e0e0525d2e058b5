// Repacks weights into the tiles of linear.h, once, when a model is loaded.
#include <algorithm>
#include <cstring>
#include <vector>

#include "linear.h"

namespace qinfer {
namespace {

constexpr int64_t kTileRows = 16;

int64_t padded(int64_t columns) {
  return (columns + QINFER_ACTIVATION_GROUP - 1) / QINFER_ACTIVATION_GROUP *
         QINFER_ACTIVATION_GROUP;
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

void copy_row(const int8_t* row, int64_t columns, const int32_t* permutation, int8_t* out) {
  if (permutation == nullptr) {
    std::memcpy(out, row, columns);
    return;
  }
  for (int64_t k = 0; k < columns; ++k) out[k] = row[permutation[k]];
}

// One tile of `width` columns from 16 rows that lie `width` apart.
void tile_rows(const int8_t* rows, int64_t width, int32_t bits, uint32_t* out) {
  const int64_t columns = bits == 4 ? 8 : 4;  // per 64 bytes of a tile
  for (int64_t k = 0; k < width; k += columns) {
    for (int64_t row = 0; row < kTileRows; ++row) {
      const int8_t* codes = rows + row * width + k;
      *out++ = bits == 4 ? pack4(codes) : pack8(codes);
    }
  }
}

// Blocks of 32 columns: rows often lie a power of two apart, so that columns of 16 of them would
// drive each other out of the cache.
template <typename Element>
void tile_dense(const Element* weight, int64_t out_features, int64_t in_features, Element* tiles) {
  constexpr int64_t kColumns = QINFER_ACTIVATION_GROUP;
  for (int64_t first = 0; first < out_features; first += kTileRows) {
    const int64_t rows = std::min(kTileRows, out_features - first);
    for (int64_t begin = 0; begin < in_features; begin += kColumns, tiles += kTileRows * kColumns) {
      const int64_t columns = std::min(kColumns, in_features - begin);
      Element block[kTileRows][kColumns];
      if (rows < kTileRows || columns < kColumns) std::memset(block, 0, sizeof block);
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(block[row], weight + (first + row) * in_features + begin,
                    columns * sizeof(Element));
      }
      for (int64_t k = 0; k < kColumns; ++k) {
        for (int64_t row = 0; row < kTileRows; ++row) tiles[k * kTileRows + row] = block[row][k];
      }
    }
  }
}

}  // namespace
}  // namespace qinfer

extern "C" int32_t qinfer_tile_codes(const int8_t* codes, int64_t out_features,
                                     int64_t in_features, const int32_t* permutation, int32_t bits,
                                     void* tiles) {
  using namespace qinfer;
  if (codes == nullptr || tiles == nullptr || out_features < 0 || in_features < 0 ||
      (bits != 4 && bits != 8)) {
    return QINFER_BAD_ARGUMENT;
  }
  const int64_t width = padded(in_features);
  std::vector<int8_t> rows(kTileRows * width);
  uint32_t* out = static_cast<uint32_t*>(tiles);
  for (int64_t first = 0; first < out_features; first += kTileRows) {
    const int64_t count = std::min(kTileRows, out_features - first);
    if (count < kTileRows) std::fill(rows.begin(), rows.end(), int8_t{0});
    for (int64_t row = 0; row < count; ++row) {
      copy_row(codes + (first + row) * in_features, in_features, permutation,
               rows.data() + row * width);
    }
    tile_rows(rows.data(), width, bits, out);
    out += kTileRows * width * bits / 32;
  }
  return QINFER_OK;
}

extern "C" int32_t qinfer_tile_dense(const void* weight, int64_t out_features, int64_t in_features,
                                     int32_t kind, void* tiles) {
  if (weight == nullptr || tiles == nullptr || out_features < 0 || in_features < 0) {
    return QINFER_BAD_ARGUMENT;
  }
  if (kind == QINFER_WBF16) {
    qinfer::tile_dense(static_cast<const uint16_t*>(weight), out_features, in_features,
                       static_cast<uint16_t*>(tiles));
  } else if (kind == QINFER_WFP32) {
    qinfer::tile_dense(static_cast<const float*>(weight), out_features, in_features,
                       static_cast<float*>(tiles));
  } else {
    return QINFER_BAD_ARGUMENT;
  }
  return QINFER_OK;
}
