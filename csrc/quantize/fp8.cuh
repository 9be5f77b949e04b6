// FP8 quantisers and cache movers: memory-bound, so every lane moves 8 elements of a row at a time (8 bytes of codes)
// and D / 8 neighbouring lanes share a row.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/float_types.cuh"
#include "quantize/params.h"

namespace mqa::quantize {

constexpr int kThreads = 256;
constexpr int kLaneElements = 8;

// 8 elements from `index` on, as float32.
__device__ __forceinline__ void load_row_part(float (&values)[kLaneElements], const void* data, FloatType type,
                                              int64_t index) {
  if (type == FloatType::kFloat32) {
    const auto* address = static_cast<const float*>(data) + index;
    const float4 low = device::load_any<float4>(address);
    const float4 high = device::load_any<float4>(address + 4);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    return;
  }
  const uint4 words = device::load_any<uint4>(static_cast<const uint16_t*>(data) + index);
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162_raw bfloats{static_cast<uint16_t>(pairs[i]), static_cast<uint16_t>(pairs[i] >> 16)};
    const __half2_raw halves{static_cast<uint16_t>(pairs[i]), static_cast<uint16_t>(pairs[i] >> 16)};
    const float2 two = type == FloatType::kBFloat16 ? __bfloat1622float2(bfloats) : __half22float2(halves);
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

// max(amax, 1e-4) / 448, optionally up to a power of two, over the row that `row_lanes` neighbouring lanes hold. NaN
// does not count; an infinite amax takes the largest finite scale of its kind.
__device__ __forceinline__ float fp8_scale(const float (&values)[kLaneElements], int row_lanes, bool pow2_scale) {
  float amax = 1e-4f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) amax = fmaxf(amax, fabsf(values[i]));
  for (int offset = row_lanes / 2; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
  if (isinf(amax)) return pow2_scale ? 0x1p127f : FLT_MAX;
  const float scale = __fdiv_rn(amax, 448.f);
  if (!pow2_scale) return scale;
  // The smallest scale is normal: adding all mantissa bits carries into the exponent unless they are all zero.
  return __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
}

__device__ __forceinline__ uint2 fp8_codes(const float (&values)[kLaneElements], float scale, bool pow2_scale) {
  // The reciprocal of a power of two is exact, and multiplying by it rounds as dividing does.
  const float factor = pow2_scale ? __frcp_rn(scale) : 0.f;
  const auto quotient = [&](int i) { return pow2_scale ? values[i] * factor : __fdiv_rn(values[i], scale); };
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    words[i / 4] |= device::e4m3x2_from_floats(quotient(i), quotient(i + 1)) << (8 * (i % 4));
  }
  return {words[0], words[1]};
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels; all threads of a warp stay to the end, since rows are reduced by shuffles
// ---------------------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) quantize_q_fp8_kernel(const QuantizeQParams p) {
  const int row_lanes = static_cast<int>(p.head_dim) / kLaneElements;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = thread / row_lanes;  // (token, head)
  const int part = static_cast<int>(thread % row_lanes) * kLaneElements;
  const int64_t rows = p.tokens * p.heads;
  const bool exists = row < rows;
  // A 64-bit division costs as much as all the rest.
  const int64_t token = !exists ? 0 : rows <= UINT32_MAX ? uint32_t(row) / uint32_t(p.heads) : row / p.heads;
  const int64_t head = exists ? row - token * p.heads : 0;

  float values[kLaneElements] = {};
  if (exists) load_row_part(values, p.q, p.q_type, p.q_offsets(token) + head * p.head_dim + part);
  const float scale = fp8_scale(values, row_lanes, p.pow2_scale);
  if (!exists) return;
  device::store_any(p.q_fp8 + p.q_fp8_offsets(token) + head * p.head_dim + part,
                    fp8_codes(values, scale, p.pow2_scale));
  if (part == 0) {
    const float weight =
        p.weights == nullptr ? 1.f : device::load_float(p.weights, p.weights_type, p.weights_offsets(token) + head);
    p.weights_f32[p.weights_f32_offsets(token) + head] = __fmul_rn(__fmul_rn(weight, scale), p.softmax_scale);
  }
}

// First of the two steps by which tokens that share a slot settle which of them holds it: see claim_tag.
__global__ void __launch_bounds__(kThreads) claim_slots_kernel(const QuantizeKParams p) {
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.tokens) return;
  const int64_t slot = p.slots[token];
  if (!slot_exists(p.cache, slot)) return;
  *reinterpret_cast<volatile uint32_t*>(p.written + slot_scale(p.cache, p.head_dim, slot)) = claim_tag(token);
}

__global__ void __launch_bounds__(kThreads) quantize_k_cache_fp8_kernel(const QuantizeKParams p) {
  const int row_lanes = static_cast<int>(p.head_dim) / kLaneElements;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t token = thread / row_lanes;
  const int part = static_cast<int>(thread % row_lanes) * kLaneElements;
  const int64_t slot = token < p.tokens ? p.slots[token] : -1;
  bool writes = slot_exists(p.cache, slot);
  uint8_t* scale_address = writes ? p.written + slot_scale(p.cache, p.head_dim, slot) : nullptr;
  // A single token has no rival, and no claim was made for it.
  if (writes && p.tokens > 1) writes = *reinterpret_cast<volatile uint32_t*>(scale_address) == claim_tag(token);

  float values[kLaneElements] = {};
  if (writes) load_row_part(values, p.k, p.k_type, token * p.k_stride + part);
  // The shuffles in here also keep the scale from replacing the tag before every lane of the row has read it.
  const float scale = fp8_scale(values, row_lanes, p.pow2_scale);
  if (!writes) return;
  *reinterpret_cast<uint2*>(p.written + slot_values(p.cache, p.head_dim, slot) + part) =
      fp8_codes(values, scale, p.pow2_scale);
  if (part == 0) *reinterpret_cast<volatile float*>(scale_address) = scale;
}

constexpr int kGatherRows = 64;  // rows of the result per block

__global__ void __launch_bounds__(kThreads) gather_k_cache_fp8_kernel(const GatherKParams p) {
  __shared__ int owners[kGatherRows];  // the lowest request that covers a row; B where none does
  const int64_t first_row = int64_t{blockIdx.x} * kGatherRows;
  for (int i = threadIdx.x; i < kGatherRows; i += kThreads) owners[i] = static_cast<int>(p.batch);
  __syncthreads();
  for (int64_t request = threadIdx.x; request < p.batch; request += kThreads) {
    const int64_t first = max(int64_t{p.cu_seq_lens[request]} - first_row, int64_t{0});
    const int64_t last = min(int64_t{p.cu_seq_lens[request + 1]} - first_row, int64_t{kGatherRows});
    for (int64_t i = first; i < last; ++i) atomicMin(&owners[i], static_cast<int>(request));
  }
  __syncthreads();

  const int row_lanes = static_cast<int>(p.head_dim) / kLaneElements;
  for (int item = threadIdx.x; item < kGatherRows * row_lanes; item += kThreads) {
    const int64_t row = first_row + item / row_lanes;
    const int part = item % row_lanes * kLaneElements;
    if (row >= p.total_tokens) break;
    const int64_t owner = owners[item / row_lanes];
    int64_t page = -1;
    int64_t token = 0;
    if (owner < p.batch) {
      token = row - p.cu_seq_lens[owner];
      const int64_t column = token >> p.cache.block_shift;
      if (column < p.table_width) page = p.block_tables[owner * p.table_stride + column];
    }
    uint2 codes{0, 0};
    float scale = 0.f;
    if (page >= 0 && page < p.cache.num_blocks) {
      const int64_t slot = page * p.cache.block_size + (token & (p.cache.block_size - 1));
      codes = *reinterpret_cast<const uint2*>(p.cache.data + slot_values(p.cache, p.head_dim, slot) + part);
      if (part == 0) scale = *reinterpret_cast<const float*>(p.cache.data + slot_scale(p.cache, p.head_dim, slot));
    }
    device::store_any(p.k + row * p.k_stride + part, codes);
    if (part == 0) p.k_scale[row] = scale;
  }
}

}  // namespace mqa::quantize
