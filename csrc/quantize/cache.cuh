// Keys into and out of a paged cache.
#pragma once

#include "device/mbarrier.cuh"
#include "quantize/fp8.cuh"
#include "quantize/mxfp4.cuh"

namespace mqa::quantize {

// First of the two steps by which tokens that share a slot settle which of them holds it: see claim_tag. The second may
// begin meanwhile.
template <CacheFormat kFormat>
__global__ void __launch_bounds__(kThreads) claim_slots_kernel(const QuantizeKParams p) {
  device::allow_next_kernel();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.k.count) return;
  const int64_t slot = p.slots[token];
  if (!slot_exists(p.cache, slot)) return;
  *reinterpret_cast<volatile uint64_t*>(p.written + slot_values(p.cache, slot)) = claim_tag(kFormat, token);
}

// The second step. A single token has no rival, and no claim is made for it.
template <CacheFormat kFormat, int kHeadDim>
__global__ void __launch_bounds__(kThreads) quantize_k_cache_kernel(const QuantizeKParams p) {
  const RowPart<kHeadDim> part;
  const int64_t slot = part.row < p.k.count ? p.slots[part.row] : -1;
  bool writes = slot_exists(p.cache, slot);
  float values[kLaneElements] = {};
  if (writes) load_part(values, p.k, part.row, part.first);
  uint8_t* target = writes ? p.written + slot_values(p.cache, slot) : nullptr;
  uint8_t* scale_target = writes ? p.written + slot_scales(p.cache, slot) : nullptr;
  const auto settle = [&] {
    device::wait_for_previous_kernel();
    if (writes && p.k.count > 1) {
      writes = *reinterpret_cast<volatile uint64_t*>(target) == claim_tag(kFormat, part.row);
    }
    __syncwarp();  // every lane of the row has read the tag
  };
  if constexpr (kFormat == CacheFormat::kFp8) {
    const float scale = fp8_scale(values, part.kRowLanes, p.pow2_scale);
    const uint4 codes = fp8_codes(values, scale, p.pow2_scale);
    settle();
    if (!writes) return;
    *reinterpret_cast<uint4*>(target + part.first) = codes;
    if (part.first == 0) *reinterpret_cast<float*>(scale_target) = scale;
  } else {
    const uint32_t scale = mxfp4_scale(values);
    const uint32_t scales = mxfp4_scales<kHeadDim>(scale);
    const uint2 codes = mxfp4_codes(values, scale);
    settle();
    if (!writes) return;
    *reinterpret_cast<uint2*>(target + part.first / 2) = codes;
    if (part.first > 0) return;
    if constexpr (kHeadDim == 128) {
      *reinterpret_cast<uint32_t*>(scale_target) = scales;
    } else {
      *reinterpret_cast<uint16_t*>(scale_target) = static_cast<uint16_t>(scales);
    }
  }
}

constexpr int kGatherRows = 64;  // rows of the result per block

__global__ void __launch_bounds__(kThreads) gather_k_cache_kernel(const GatherKParams p) {
  __shared__ int owners[kGatherRows];     // the lowest request that covers a row; B where none does
  __shared__ int64_t slots[kGatherRows];  // the row's token in the pool; -1 where there is none
  const int64_t first_row = int64_t{blockIdx.x} * kGatherRows;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kGatherRows) owners[thread] = static_cast<int>(p.batch);
  __syncthreads();
  // A warp looks at 32 requests at a time, then at each that has rows here, a lane per row.
  constexpr int kWarp = 32;
  const int lane = thread % kWarp;
  for (int64_t base = thread - lane; base < p.batch; base += kThreads) {
    int64_t first = 0, last = 0;
    if (base + lane < p.batch) {
      first = max(int64_t{p.cu_seq_lens[base + lane]} - first_row, int64_t{0});
      last = min(int64_t{p.cu_seq_lens[base + lane + 1]} - first_row, int64_t{kGatherRows});
    }
    for (unsigned found = __ballot_sync(~0u, first < last); found != 0; found &= found - 1) {
      const int i = __ffs(found) - 1;
      const int end = __shfl_sync(~0u, static_cast<int>(last), i);
      for (int row = __shfl_sync(~0u, static_cast<int>(first), i) + lane; row < end; row += kWarp) {
        atomicMin(&owners[row], static_cast<int>(base) + i);
      }
    }
  }
  __syncthreads();
  if (thread < kGatherRows) {
    const int64_t owner = owners[thread];
    int64_t slot = -1;
    if (owner < p.batch) {
      const int64_t token = first_row + thread - p.cu_seq_lens[owner];
      const int64_t column = token >> p.cache.block_shift;
      const int64_t page = column < p.table_width ? p.block_tables[owner * p.table_stride + column] : -1;
      if (page >= 0 && page < p.cache.num_blocks) {
        slot = page << p.cache.block_shift | (token & (p.cache.block_size - 1));
      }
    }
    slots[thread] = slot;
  }
  __syncthreads();
  // Loaded before the values and stored after them: nothing waits for it in between.
  uint32_t scale = 0;
  if (thread < kGatherRows && slots[thread] >= 0) {
    const uint8_t* source = p.cache.data + slot_scales(p.cache, slots[thread]);
    scale = p.cache.scale_bytes == 4 ? *reinterpret_cast<const uint32_t*>(source)
                                     : *reinterpret_cast<const uint16_t*>(source) | kNoScales;
  }
  const int row_vectors = p.cache.value_bytes / 16;  // a power of two
  const int row_shift = __ffs(row_vectors) - 1;
#pragma unroll 4
  for (int item = thread; item < kGatherRows * row_vectors; item += kThreads) {
    const int row = item >> row_shift;
    const int at = (item & (row_vectors - 1)) * 16;
    if (first_row + row >= p.total_tokens) break;
    uint4 values{0, 0, 0, 0};
    if (slots[row] >= 0) {
      values = *reinterpret_cast<const uint4*>(p.cache.data + slot_values(p.cache, slots[row]) + at);
    }
    device::store_any(p.k + (first_row + row) * p.k_stride + at, values);
  }
  if (thread < kGatherRows && first_row + thread < p.total_tokens) p.k_scale[first_row + thread] = scale;
}

}  // namespace mqa::quantize
