// Sums of products of columns from bf16 pairs; see gram.h for the layout of the rows.
//
// The tokens come in chunks of kChunk pairs from the first. An element's sum over a chunk begins
// at zero, takes the pairs of tokens in ascending order (vdpbf16ps: float32 sums, denormals count
// as zero), and is then added to `sums`: the shorter the sums, the less is lost to rounding.
#include <immintrin.h>

#include "gram.h"
#include "kernels.h"

namespace qinfer {
namespace QINFER_ISA {
namespace {

constexpr int64_t kPanel = QINFER_GRAM_PANEL;
constexpr int64_t kLine = 2 * kPanel;  // bf16 elements of a panel and a pair of tokens
constexpr int64_t kChunk = 256;
constexpr int kRows = 8;    // of a tile of sums in registers
constexpr int kPanels = 3;  // its columns
constexpr int64_t kPackPanels = 4;  // whose columns are read together: whole cache lines of a row

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of 16 lanes the first `count`.
inline __mmask16 first_lanes(int64_t count) {
  return count >= kPanel ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

// A chunk's products of kRows columns of the left with Panels panels of the right.
struct Tile {
  const uint16_t* left;   // the first pair of its first column
  const uint16_t* right;  // the first pair of its first panel
  int64_t right_panel;    // elements from one panel to the next
  int64_t pairs;
  float* sums;
  int64_t stride;
  int64_t rows;     // that exist; up to kRows
  int64_t columns;  // that exist
};

template <int Panels>
void add_tile(const Tile& tile) {
  __m512 totals[kRows][Panels];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) {
      totals[r][p] = _mm512_setzero_ps();
      // Read when the products are done. Of rows and columns that do not exist it is harmless.
      __builtin_prefetch(tile.sums + r * tile.stride + p * kPanel, 1);
    }
  }
  const uint16_t* left = tile.left;
  const uint16_t* right = tile.right;
  for (int64_t pair = 0; pair < tile.pairs; ++pair, left += kLine, right += kLine) {
    __m512bh columns[Panels];
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) {
      columns[p] = (__m512bh)_mm512_load_si512(right + p * tile.right_panel);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      __builtin_memcpy(&both, left + 2 * r, sizeof both);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 3
      for (int p = 0; p < Panels; ++p) {
        totals[r][p] = _mm512_dpbf16_ps(totals[r][p], columns[p], row);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows) break;
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) {
      float* sums = tile.sums + r * tile.stride + p * kPanel;
      const __mmask16 lanes = first_lanes(tile.columns - p * kPanel);
      _mm512_mask_storeu_ps(sums, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, sums), totals[r][p]));
    }
  }
}

void add_tile_of(int64_t panels, const Tile& tile) {
  switch (panels) {
    case 1: return add_tile<1>(tile);
    case 2: return add_tile<2>(tile);
    default: return add_tile<kPanels>(tile);
  }
}

// The products with panels [panel, panel_end), at most kPanels, over pairs [pair, pair + pairs).
void add_block(const qinfer_gram& gram, int64_t row_begin, int64_t row_end, int64_t panel,
               int64_t panel_end, int64_t pair, int64_t pairs) {
  const int64_t panel_size = ceil_div(gram.tokens, 2) * kLine;
  for (int64_t row = row_begin; row < row_end; row += kRows) {
    const int64_t first = gram.upper ? larger(panel, row / kPanel) : panel;
    if (first >= panel_end) break;
    Tile tile;
    tile.left = gram.left + row / kPanel * panel_size + pair * kLine + row % kPanel * 2;
    tile.right = gram.right + first * panel_size + pair * kLine;
    tile.right_panel = panel_size;
    tile.pairs = pairs;
    tile.sums = gram.sums + row * gram.stride + first * kPanel;
    tile.stride = gram.stride;
    tile.rows = row_end - row;
    tile.columns = gram.right_columns - first * kPanel;
    add_tile_of(panel_end - first, tile);
  }
}

}  // namespace

void add_gram(const qinfer_gram& gram, int64_t row_begin, int64_t row_end) {
  const int64_t pairs = ceil_div(gram.tokens, 2);
  const int64_t panels = ceil_div(gram.right_columns, kPanel);
  for (int64_t panel = gram.upper ? row_begin / kPanel : 0; panel < panels; panel += kPanels) {
    const int64_t panel_end = smaller(panel + kPanels, panels);
    for (int64_t pair = 0; pair < pairs; pair += kChunk) {
      add_block(gram, row_begin, row_end, panel, panel_end, pair, smaller(kChunk, pairs - pair));
    }
  }
}

void pack_pairs(const float* x, int64_t tokens, int64_t columns, int64_t stride, uint16_t* packed) {
  // Lanes 0-15 hold a token's columns and 16-31 the next one's; interleaved.
  alignas(64) uint16_t order[kLine];
  for (int i = 0; i < kLine; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * kPanel);
  const __m512i interleaved = _mm512_load_si512(order);
  const int64_t pairs = ceil_div(tokens, 2), panels = ceil_div(columns, kPanel);
  for (int64_t begin = 0; begin < panels; begin += kPackPanels) {
    const int64_t end = smaller(begin + kPackPanels, panels);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const float* row = x + 2 * pair * stride;
      for (int64_t panel = begin; panel < end; ++panel) {
        const __mmask16 lanes = first_lanes(columns - panel * kPanel);
        const __mmask16 next = 2 * pair + 1 < tokens ? lanes : 0;
        const __m512 low = _mm512_maskz_loadu_ps(lanes, row + panel * kPanel);
        const __m512 high = _mm512_maskz_loadu_ps(next, row + stride + panel * kPanel);
        const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_store_si512(packed + (panel * pairs + pair) * kLine,
                           _mm512_permutexvar_epi16(interleaved, rounded));
      }
    }
  }
}

}  // namespace QINFER_ISA
}  // namespace qinfer
