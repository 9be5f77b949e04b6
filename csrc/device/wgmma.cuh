// wgmma, the matrix instruction of sm_90a: four warps multiply 64 rows of A by N columns of B, both e4m3 with K
// contiguous in swizzled shared memory (A may be in registers), K = 32 per instruction, into registers. Warp w of the
// four has the 16 rows from 16 w on. With g = lane / 4 and c = lane % 4, a lane's d[4 j + i] is row g + 8 (i / 2) of
// these and column 8 j + 2 c + i % 2.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"

namespace mqa::device {

// A matrix in shared memory whose rows are kRowBytes (32, 64 or 128) long and swizzled as the copy engine does: 16-byte
// chunks within a row change places by the row's number. It is aligned to eight rows; `step` of 32 bytes along K.
struct MatrixDescriptor {
  uint32_t low;  // the high word is a constant

  __device__ explicit MatrixDescriptor(uint32_t start) : low(start >> 4 | 1u << 16) {}

  template <int kRowBytes>
  __device__ __forceinline__ uint64_t at(int step) const {
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
    constexpr uint64_t kEightRows = 8 * kRowBytes / 16;
    return uint64_t{low + 2 * step} | kEightRows << 32 | kSwizzle << 62;
  }
};

// Where the swizzle of kRowBytes-long rows puts byte `offset` of a matrix.
template <int kRowBytes>
__host__ __device__ constexpr int swizzle(int offset) {
  return offset ^ (offset >> 7 & (kRowBytes / 16 - 1)) << 4;
}

// Orders this warp's accesses to accumulators and operands before the matrix instructions that follow.
__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Newer` of the committed groups are still under way.
template <int Newer>
__device__ __forceinline__ void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Newer) : "memory");
}

// A group of four warps gives registers back to the block's pool, or waits for more of them.
template <int Count>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// Keeps the compiler from moving accesses to accumulators or operands across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Operands d[i] on, each with constraint K, and their names in the instruction.
#define MQA_OPERANDS_4(K, i) K(d[i]), K(d[i + 1]), K(d[i + 2]), K(d[i + 3])
#define MQA_OPERANDS_8(K, i) MQA_OPERANDS_4(K, i), MQA_OPERANDS_4(K, i + 4)
#define MQA_OPERANDS_16(K, i) MQA_OPERANDS_8(K, i), MQA_OPERANDS_8(K, i + 8)
#define MQA_OPERANDS_32(K, i) MQA_OPERANDS_16(K, i), MQA_OPERANDS_16(K, i + 16)
#define MQA_OPERANDS_48(K, i) MQA_OPERANDS_32(K, i), MQA_OPERANDS_16(K, i + 32)
#define MQA_OPERANDS_64(K, i) MQA_OPERANDS_32(K, i), MQA_OPERANDS_32(K, i + 32)
#define MQA_OPERANDS_96(K, i) MQA_OPERANDS_64(K, i), MQA_OPERANDS_32(K, i + 64)
#define MQA_OPERANDS_128(K, i) MQA_OPERANDS_64(K, i), MQA_OPERANDS_64(K, i + 64)
#define MQA_NAMES_4 "%0, %1, %2, %3"
#define MQA_NAMES_8 MQA_NAMES_4 ", %4, %5, %6, %7"
#define MQA_NAMES_16 MQA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MQA_NAMES_32 MQA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MQA_NAMES_48 MQA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MQA_NAMES_64 MQA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MQA_NAMES_96                                                                   \
  MQA_NAMES_64                                                                         \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MQA_NAMES_128                                                                              \
  MQA_NAMES_96                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d (+)= A B in COUNT registers of sums.
#define MQA_MULTIPLY(N, SUMS, COUNT, K, A, B, ADD, ...)                                                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD                                                          \
               ", 0;\n"                                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32." SUMS ".e4m3.e4m3 {" MQA_NAMES_##COUNT "}, " A ", %" B   \
                                                                                                   ", add, 1, 1;\n}" \
               : MQA_OPERANDS_##COUNT(K, 0)                                                                          \
               : __VA_ARGS__, "l"(b), "r"(static_cast<int>(add)))

// For the first 4 * kColumns / 8 accumulators.
#define MQA_MULTIPLY_FLOATS(N, COUNT, A, B, ADD) MQA_MULTIPLY(N, "f32", COUNT, "+f", "%" A, B, ADD, "l"(a))
template <int kColumns, int kCount>
__device__ __forceinline__ void multiply(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
  static_assert(kColumns / 2 <= kCount, "too few accumulators");
  if constexpr (kColumns == 8) {
    MQA_MULTIPLY_FLOATS(8, 4, "4", "5", "6");
  } else if constexpr (kColumns == 16) {
    MQA_MULTIPLY_FLOATS(16, 8, "8", "9", "10");
  } else if constexpr (kColumns == 32) {
    MQA_MULTIPLY_FLOATS(32, 16, "16", "17", "18");
  } else if constexpr (kColumns == 64) {
    MQA_MULTIPLY_FLOATS(64, 32, "32", "33", "34");
  } else if constexpr (kColumns == 128) {
    MQA_MULTIPLY_FLOATS(128, 64, "64", "65", "66");
  } else if constexpr (kColumns == 192) {
    MQA_MULTIPLY_FLOATS(192, 96, "96", "97", "98");
  } else if constexpr (kColumns == 256) {
    MQA_MULTIPLY_FLOATS(256, 128, "128", "129", "130");
  } else {
    static_assert(kColumns == 8, "no such instruction here");
  }
}

// The same with A in registers and sums in halves, of which a register has two columns' (2 c and 2 c + 1): d[2 j + i]
// is of row g + 8 i and columns 8 j + 2 c. Of A a lane has rows g and g + 8, each first columns 4 c to 4 c + 3 (a[0]
// and a[1]), then those 16 further (a[2] and a[3]).
#define MQA_MULTIPLY_HALVES(N, COUNT, A, B, ADD) \
  MQA_MULTIPLY(N, "f16", COUNT, "+r", "{" A "}", B, ADD, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
template <int kColumns>
__device__ __forceinline__ void multiply_halves(uint32_t (&d)[kColumns / 4], const uint32_t (&a)[4], uint64_t b,
                                                bool add) {
  if constexpr (kColumns == 16) {
    MQA_MULTIPLY_HALVES(16, 4, "%4, %5, %6, %7", "8", "9");
  } else if constexpr (kColumns == 32) {
    MQA_MULTIPLY_HALVES(32, 8, "%8, %9, %10, %11", "12", "13");
  } else if constexpr (kColumns == 64) {
    MQA_MULTIPLY_HALVES(64, 16, "%16, %17, %18, %19", "20", "21");
  } else if constexpr (kColumns == 128) {
    MQA_MULTIPLY_HALVES(128, 32, "%32, %33, %34, %35", "36", "37");
  } else if constexpr (kColumns == 192) {
    MQA_MULTIPLY_HALVES(192, 48, "%48, %49, %50, %51", "52", "53");
  } else if constexpr (kColumns == 256) {
    MQA_MULTIPLY_HALVES(256, 64, "%64, %65, %66, %67", "68", "69");
  } else {
    static_assert(kColumns == 16, "no such instruction here");
  }
}

#undef MQA_MULTIPLY
#undef MQA_MULTIPLY_FLOATS
#undef MQA_MULTIPLY_HALVES
#undef MQA_OPERANDS_4
#undef MQA_NAMES_4
#undef MQA_OPERANDS_8
#undef MQA_NAMES_8
#undef MQA_OPERANDS_16
#undef MQA_NAMES_16
#undef MQA_OPERANDS_32
#undef MQA_NAMES_32
#undef MQA_OPERANDS_48
#undef MQA_NAMES_48
#undef MQA_OPERANDS_64
#undef MQA_NAMES_64
#undef MQA_OPERANDS_96
#undef MQA_NAMES_96
#undef MQA_OPERANDS_128
#undef MQA_NAMES_128

}  // namespace mqa::device
