// The FP8 recipe: a scale per row, values e4m3.
#pragma once

#include <cfloat>

#include "quantize/row_parts.cuh"

namespace mqa::quantize {

// max(amax, 1e-4) / 448, optionally up to a power of two. An infinite amax takes the largest finite scale of its kind.
__device__ __forceinline__ float fp8_scale(const float (&values)[kLaneElements], int row_lanes, bool pow2_scale) {
  const float amax = amax_of(values, row_lanes);
  if (isinf(amax)) return pow2_scale ? 0x1p127f : FLT_MAX;
  const float scale = __fdiv_rn(amax, 448.f);
  return pow2_scale ? __uint_as_float(exponent_above(scale) << 23) : scale;
}

__device__ __forceinline__ uint4 fp8_codes(const float (&values)[kLaneElements], float scale, bool pow2_scale) {
  // The reciprocal of a power of two is exact, and multiplying by it rounds as dividing does.
  const float factor = pow2_scale ? __frcp_rn(scale) : 0.f;
  const auto quotient = [&](int i) { return pow2_scale ? values[i] * factor : __fdiv_rn(values[i], scale); };
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    words[i / 4] |= device::e4m3x2_from_floats(quotient(i), quotient(i + 1)) << (8 * (i % 4));
  }
  return {words[0], words[1], words[2], words[3]};
}

// All threads of a warp stay until the row has been reduced by shuffles.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) quantize_q_fp8_kernel(const QuantizeQFp8Params p) {
  const RowPart<kHeadDim> part;
  const bool exists = part.row < p.q.count;
  float values[kLaneElements] = {};
  if (exists) load_part(values, p.q, part.row, part.first);
  const float scale = fp8_scale(values, part.kRowLanes, p.pow2_scale);
  if (!exists) return;
  device::store_any(p.q_fp8 + p.q_fp8_offsets(part.row) + part.first, fp8_codes(values, scale, p.pow2_scale));
  if (part.first == 0) {
    const float weight =
        p.weights == nullptr ? 1.f : device::load_float(p.weights, p.weights_type, p.weights_offsets(part.row));
    p.weights_f32[p.weights_f32_offsets(part.row)] = __fmul_rn(__fmul_rn(weight, scale), p.softmax_scale);
  }
}

}  // namespace mqa::quantize
