// Keys into and out of a paged cache.
#pragma once

#include "device/acquire_release.cuh"
#include "quantize/fp8.cuh"
#include "quantize/mxfp4.cuh"

namespace mqa::quantize {

// Whether a token may write its slot. It may not where another one's claim stands: that one is about to write, and when
// it has, its values replace whatever claim stands by then. Where none stands, any tokens that wrote here before are
// done.
template <CacheFormat kFormat>
__device__ __forceinline__ bool claim_slot(const QuantizeKParams& p, int64_t token, int64_t slot, uint8_t* target) {
  const uint64_t found = device::exchange_acquire(target, claim_tag(kFormat, token, p.nonce));
  const int64_t rival = static_cast<uint32_t>(found);
  const bool is_claim = found == claim_tag(kFormat, rival, p.nonce) && rival < p.k.count && rival != token;
  return !(is_claim && p.slots[rival] == slot);
}

// The first lane of a row claims its slot and releases it by writing the row's first eight bytes after all others. A
// single token has no rival, and no claim is made for it.
template <CacheFormat kFormat, int kHeadDim>
__global__ void __launch_bounds__(kThreads) quantize_k_cache_kernel(const QuantizeKParams p) {
  const RowPart<kHeadDim> part;
  const bool is_token = part.row < p.k.count;
  const int64_t slot = is_token ? p.slots[part.row] : -1;
  float values[kLaneElements] = {};
  if (is_token) load_part(values, p.k, part.row, part.first);  // not waiting for the slot
  bool writes = slot_exists(p.cache, slot);
  uint8_t* target = writes ? p.written + slot_values(p.cache, slot) : nullptr;
  uint8_t* scale_target = writes ? p.written + slot_scales(p.cache, slot) : nullptr;
  const bool is_first = part.first == 0;
  if (is_first && writes && p.k.count > 1) writes = claim_slot<kFormat>(p, part.row, slot, target);
  const auto settle = [&] {
    writes = __shfl_sync(~0u, writes, 0, part.kRowLanes);
    __syncwarp();  // what the first lane acquired, all have
  };
  uint64_t front;  // the first lane's first eight bytes
  if constexpr (kFormat == CacheFormat::kFp8) {
    const float scale = fp8_scale(values, part.kRowLanes, p.pow2_scale);
    const uint4 codes = fp8_codes(values, scale, p.pow2_scale);
    settle();
    front = static_cast<uint64_t>(codes.y) << 32 | codes.x;
    if (writes) {
      if (is_first) {
        *reinterpret_cast<uint2*>(target + sizeof(front)) = {codes.z, codes.w};
        *reinterpret_cast<float*>(scale_target) = scale;
      } else {
        *reinterpret_cast<uint4*>(target + part.first) = codes;
      }
    }
  } else {
    const uint32_t scale = mxfp4_scale(values);
    const uint32_t scales = mxfp4_scales<kHeadDim>(scale);
    const uint2 codes = mxfp4_codes(values, scale);
    settle();
    front = static_cast<uint64_t>(codes.y) << 32 | codes.x;
    if (writes) {
      if (!is_first) {
        *reinterpret_cast<uint2*>(target + part.first / 2) = codes;
      } else if constexpr (kHeadDim == 128) {
        *reinterpret_cast<uint32_t*>(scale_target) = scales;
      } else {
        *reinterpret_cast<uint16_t*>(scale_target) = static_cast<uint16_t>(scales);
      }
    }
  }
  __syncwarp();  // the row's other bytes are written
  if (is_first && writes) device::store_release(target, front);
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
