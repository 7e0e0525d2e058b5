/* Peaks of one core that the kernels are measured against: arithmetic on registers only, and
   reading memory. Compiled by peaks.py for the machine at hand. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* Ten independent sums, more than the latency of any of these instructions hides. */
#define REPEAT(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9)

#define WRITTEN                                                                             \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9"

#define RUN(op) \
  for (int64_t i = 0; i < rounds; ++i) __asm__ volatile(REPEAT(op) ::: WRITTEN)

/* Multiplications and additions per call. */
double peak_fma(int64_t rounds) {
#if defined(__AVX512F__)
#define FMA(i) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #i "\n"
  RUN(FMA);
  return 2.0 * 16 * 10 * (double)rounds;
#else
#define FMA(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
  RUN(FMA);
  return 2.0 * 8 * 10 * (double)rounds;
#endif
}

/* 8-bit dot products; on AVX2 a multiply-add of 16-bit pairs, its widest exact one. */
double peak_int8(int64_t rounds) {
#if defined(__AVX512VNNI__)
#define DOT(i) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #i "\n"
  RUN(DOT);
  return 2.0 * 64 * 10 * (double)rounds;
#else
#define DOT(i) "vpmaddwd %%ymm14, %%ymm15, %%ymm" #i "\n"
  RUN(DOT);
  return 2.0 * 16 * 10 * (double)rounds;
#endif
}

/* Products of bf16 pairs; where there are none, FMA. */
double peak_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
#define DOT_BF16(i) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #i "\n"
  RUN(DOT_BF16);
  return 2.0 * 32 * 10 * (double)rounds;
#else
  return peak_fma(rounds);
#endif
}

/* Reads `size` bytes, a multiple of 256 aligned to 64, and returns a sum so that it must. */
int64_t read_all(const void* data, int64_t size) {
  const int64_t* words = (const int64_t*)data;
  typedef int64_t Vector __attribute__((vector_size(64)));
  Vector a = {0}, b = {0}, c = {0}, d = {0};
  for (int64_t i = 0; i < size / 8; i += 32) {
    a += *(const Vector*)(words + i);
    b += *(const Vector*)(words + i + 8);
    c += *(const Vector*)(words + i + 16);
    d += *(const Vector*)(words + i + 24);
  }
  a += b + c + d;
  return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}
