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

// The nearest e2m1 codes of values / 2^(scale - 127), ties towards zero; never minus zero, and 0 for NaN. The
// conversion instruction, where there is one, has ties to even.
__device__ __forceinline__ uint2 mxfp4_codes(const float (&values)[kLaneElements], uint32_t scale) {
  // A code's exponent and mantissa bits are those that a float32 has at 2^-126 times the value, denormal ones included.
  // The quotient is exact where it is a normal number, and elsewhere its code is 0; rounding it up to what a denormal
  // holds keeps it on its side of every tie.
  constexpr int kShift = 22;
  const float factor = scale < 254 ? __uint_as_float((254 - scale) << 23) : 0x1p-127f;
  uint32_t magnitudes[kLaneElements];
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    magnitudes[i] = __float_as_uint(__fmul_ru(fabsf(values[i] * factor), 0x1p-126f));
    seen |= magnitudes[i];
  }
  if (seen >= 8u << kShift) {  // infinity or NaN
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (magnitudes[i] >= 8u << kShift) magnitudes[i] = magnitudes[i] > 0x7f800000u ? 0 : 7u << kShift;
    }
  }
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      // The code goes to bits 28 to 30, the sign above it, and all four in front of the codes that are there.
      constexpr uint32_t kBelowTie = (1u << (kShift - 1)) - 1;
      const uint32_t code = (magnitudes[8 * w + i] + kBelowTie) << (28 - kShift);
      word = __funnelshift_l((code & 0x70000000u) | (__float_as_uint(values[8 * w + i]) & 0x80000000u), word, 4);
    }
    const uint32_t signs = ((word & 0x77777777u) + 0x77777777u) & 0x88888888u;  // where the code is not 0
    words[w] = word & (signs | 0x77777777u);
  }
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
