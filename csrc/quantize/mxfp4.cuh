// The MXFP4 recipe: a power of two per group of 32 elements, values e2m1.
#pragma once

#include "quantize/row_parts.cuh"

namespace mqa::quantize {

constexpr int kGroupLanes = kGroup / kLaneElements;

// The UE8M0 code of max(amax, 1e-4) / 6 up to a power of two, amax over the lane's group. An infinite amax takes the
// largest finite scale.
__device__ __forceinline__ uint32_t mxfp4_scale(const float (&values)[kLaneElements]) {
  const float amax = amax_of(values, kGroupLanes);
  return isinf(amax) ? 254 : exponent_above(__fdiv_rn(amax, 6.f));
}

// The nearest e2m1 code, ties towards zero; never minus zero, and 0 for NaN. As a sum of comparisons: the conversion
// instruction, where there is one, has ties to even.
__device__ __forceinline__ uint32_t e2m1_from_float(float value) {
  const float magnitude = fabsf(value);
  const uint32_t code = (magnitude > 0.25f) + (magnitude > 0.75f) + (magnitude > 1.25f) + (magnitude > 1.75f) +
                        (magnitude > 2.5f) + (magnitude > 3.5f) + (magnitude > 5.f);
  return code != 0 && value < 0.f ? code | 8 : code;
}

__device__ __forceinline__ uint2 mxfp4_codes(const float (&values)[kLaneElements], uint32_t scale) {
  // Multiplying by 2^(127 - scale) in two steps, neither of which leaves the normal numbers for any scale, is exact
  // where the code is not 0.
  const float half = __uint_as_float((127 + (127 - static_cast<int>(scale)) / 2) << 23);
  const float rest =
      __uint_as_float((127 + (127 - static_cast<int>(scale)) - (127 - static_cast<int>(scale)) / 2) << 23);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) words[i / 8] |= e2m1_from_float(values[i] * half * rest) << (4 * (i % 8));
  return {words[0], words[1]};
}

// The scale codes of a row, in every lane of it. All lanes of the warp call.
template <int kHeadDim>
__device__ __forceinline__ uint32_t mxfp4_scales(uint32_t scale) {
  constexpr int kRowLanes = kHeadDim / kLaneElements;
  const int row_lane = static_cast<int>(threadIdx.x) % kRowLanes;
  uint32_t scales = scale << (8 * (row_lane / kGroupLanes));
#pragma unroll
  for (int offset = kGroupLanes; offset < kRowLanes; offset *= 2) scales |= __shfl_xor_sync(~0u, scales, offset);
  return kHeadDim < 128 ? scales | kNoScales : scales;
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) quantize_q_mxfp4_kernel(const QuantizeQMxfp4Params p) {
  const RowPart<kHeadDim> part;
  const bool exists = part.row < p.q.count;
  float values[kLaneElements] = {};
  if (exists) load_part(values, p.q, part.row, part.first);
  const uint32_t scale = mxfp4_scale(values);
  const uint32_t scales = mxfp4_scales<kHeadDim>(scale);
  if (!exists) return;
  device::store_any(p.q_fp4 + p.q_fp4_offsets(part.row) + part.first / 2, mxfp4_codes(values, scale));
  if (part.first == 0) p.q_sf[p.q_sf_offsets(part.row)] = scales;
}

}  // namespace mqa::quantize
