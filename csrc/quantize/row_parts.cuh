// Rows as lanes see them: kLaneElements neighbouring elements each, so that D / 16 lanes share a row.
#pragma once

#include <cstdint>

#include "device/float_types.cuh"
#include "quantize/params.h"

namespace mqa::quantize {

constexpr int kThreads = 256;
constexpr int kLaneElements = 16;

// The part of a row that a thread has, threads being numbered over the whole grid.
template <int kHeadDim>
struct RowPart {
  static constexpr int kRowLanes = kHeadDim / kLaneElements;

  int64_t row;
  int first;  // element

  __device__ RowPart() {
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    row = thread / kRowLanes;
    first = static_cast<int>(threadIdx.x) % kRowLanes * kLaneElements;
  }
};

// The part's elements as float32.
__device__ __forceinline__ void load_part(float (&values)[kLaneElements], const Rows& rows, int64_t row, int first) {
  const int64_t index = rows.offsets(row) + first;
  if (rows.type == FloatType::kFloat32) {
    const auto* address = static_cast<const float*>(rows.data) + index;
#pragma unroll
    for (int i = 0; i < kLaneElements / 4; ++i) {
      const float4 four = device::load_any<float4>(address + 4 * i);
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
    return;
  }
  const auto* address = static_cast<const uint16_t*>(rows.data) + index;
  uint4 vectors[kLaneElements / 8];
#pragma unroll
  for (int i = 0; i < kLaneElements / 8; ++i) vectors[i] = device::load_any<uint4>(address + 8 * i);
#pragma unroll
  for (int i = 0; i < kLaneElements / 8; ++i) {
    const uint32_t pairs[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat162_raw bfloats{static_cast<uint16_t>(pairs[j]), static_cast<uint16_t>(pairs[j] >> 16)};
      const __half2_raw halves{static_cast<uint16_t>(pairs[j]), static_cast<uint16_t>(pairs[j] >> 16)};
      const float2 two = rows.type == FloatType::kBFloat16 ? __bfloat1622float2(bfloats) : __half22float2(halves);
      values[8 * i + 2 * j] = two.x;
      values[8 * i + 2 * j + 1] = two.y;
    }
  }
}

// max(amax, 1e-4) over the elements of `lanes` neighbouring lanes; NaN does not count. All lanes of the warp call.
__device__ __forceinline__ float amax_of(const float (&values)[kLaneElements], int lanes) {
  float amax = 1e-4f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) amax = fmaxf(amax, fabsf(values[i]));
  for (int offset = lanes / 2; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
  return amax;
}

// The biased exponent of x up to a power of two; x is normal. Adding all mantissa bits carries into the exponent unless
// they are all zero.
__device__ __forceinline__ uint32_t exponent_above(float x) { return (__float_as_uint(x) + 0x7fffffu) >> 23; }

}  // namespace mqa::quantize
