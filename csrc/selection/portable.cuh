// Selection on every GPU: a block takes a row, finds the k-th largest key digit by digit, and then the positions.
#pragma once

#include "device/warp.cuh"
#include "selection/params.h"

namespace mqa::selection {

using device::kWarpThreads;
constexpr int kThreads = 1024, kWarps = kThreads / kWarpThreads;

template <FloatType kType>
__device__ __forceinline__ uint32_t load_key(const void* row, int64_t column) {
  if constexpr (kType == FloatType::kFloat32) return order_key(static_cast<const uint32_t*>(row)[column]);
  const uint16_t bits = static_cast<const uint16_t*>(row)[column];
  return order_key(kType == FloatType::kBFloat16 ? order_bits_of_bfloat16(bits) : order_bits_of_float16(bits));
}

template <FloatType kType>
struct PortableTopk {
  struct Shared {
    int counts[kBins];
    int warp_sums[2][kWarps];
    uint32_t bin;
    int wanted;
    int32_t positions[kMaxK];
  };

  const TopkParams& p;
  Shared& shared;
  int thread, lane, warp;
  const void* row_logits;
  unsigned length;

  __device__ PortableTopk(const TopkParams& params, Shared& memory)
      : p(params),
        shared(memory),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % kWarpThreads),
        warp(thread / kWarpThreads) {}

  // The sum over the warps in front of this one. All threads call, with what their warp has; `slot` names the place in
  // shared memory, not to be used again before the block has been synchronised.
  __device__ int sum_before(int of_warp, int slot, int& total) const {
    if (lane == 0) shared.warp_sums[slot][warp] = of_warp;
    __syncthreads();
    const int sum = shared.warp_sums[slot][lane];
    total = __reduce_add_sync(~0u, sum);
    return __reduce_add_sync(~0u, lane < warp ? sum : 0);
  }

  // How often each value of a digit occurs among the keys with (key & mask) == value.
  __device__ void count_digit(Digit digit, uint32_t mask, uint32_t value) const {
    for (int bin = thread; bin < kBins; bin += kThreads) shared.counts[bin] = 0;
    __syncthreads();
    const uint32_t bin_mask = (1u << digit.bits) - 1;
#pragma unroll 4
    for (unsigned column = thread; column < length; column += kThreads) {
      const uint32_t key = load_key<kType>(row_logits, column);
      if ((key & mask) == value) atomicAdd(&shared.counts[key >> digit.shift & bin_mask], 1);
    }
    __syncthreads();
  }

  // The bin in which the `wanted`-th of the counted keys lies, from the top, and the how many-th of it it is.
  __device__ void find_bin(int bins, uint32_t& bin, int& wanted) const {
    constexpr int kThreadBins = kBins / kThreads;
    const int top = bins - 1 - thread * kThreadBins;  // the thread's bins go down from here
    int counts[kThreadBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) sum += counts[i] = top - i >= 0 ? shared.counts[top - i] : 0;
    const int inclusive = device::sum_up_to(sum, lane);
    int total;
    int before = sum_before(__shfl_sync(~0u, inclusive, kWarpThreads - 1), 0, total) + inclusive - sum;
    if (before < wanted && wanted <= before + sum) {
      int i = 0;
      for (; before + counts[i] < wanted; ++i) before += counts[i];
      shared.bin = static_cast<uint32_t>(top - i);
      shared.wanted = wanted - before;
    }
    __syncthreads();
    bin = shared.bin;
    wanted = shared.wanted;
  }

  // Positions of the k largest of more than k, in order, to shared memory: all keys above `threshold`, and the first
  // `ties` of those equal to it. A warp takes a part of the row.
  __device__ void collect(uint32_t threshold, int ties) const {
    const unsigned part = (length + kThreads - 1) / kThreads * kWarpThreads;
    const unsigned first = min(warp * part, length), end = min(first + part, length);
    int above = 0, equal = 0;
#pragma unroll 4
    for (unsigned column = first + lane; column < end; column += kWarpThreads) {
      const uint32_t key = load_key<kType>(row_logits, column);
      above += key > threshold;
      equal += key == threshold;
    }
    int total;
    int equal_before = sum_before(__reduce_add_sync(~0u, equal), 0, total);
    int at = sum_before(__reduce_add_sync(~0u, above), 1, total) + min(equal_before, ties);
    const unsigned lower_lanes = (1u << lane) - 1;
    for (unsigned column = first; column < end; column += kWarpThreads) {
      const bool inside = column + lane < end;
      const uint32_t key = inside ? load_key<kType>(row_logits, column + lane) : kNanKey;
      const unsigned equals = __ballot_sync(~0u, inside && key == threshold);
      const bool chosen =
          inside && (key > threshold || (key == threshold && equal_before + __popc(equals & lower_lanes) < ties));
      const unsigned all_chosen = __ballot_sync(~0u, chosen);
      const int index = at + __popc(all_chosen & lower_lanes);
      // Of a row that changes meanwhile there may be more.
      if (chosen && index < p.k) shared.positions[index] = static_cast<int32_t>(column + lane);
      at += __popc(all_chosen);
      equal_before += __popc(equals);
    }
    __syncthreads();
  }

  // `count` positions become the row's result.
  __device__ void store(int64_t row, int count) const {
    int32_t* out = p.out + row * p.out_stride;
    const int32_t* table = p.table(row);
    int written = 0;
    for (int first = 0; first < count; first += kThreads) {
      const int i = first + thread;
      const int32_t result = i < count ? p.result(table, static_cast<uint32_t>(shared.positions[i])) : -1;
      const unsigned kept = __ballot_sync(~0u, result >= 0);
      int total;
      const int before = sum_before(__popc(kept), 0, total);
      if (result >= 0) out[written + before + __popc(kept & ((1u << lane) - 1))] = result;
      written += total;
      __syncthreads();  // the sums have been read
    }
    for (int i = written + thread; i < p.k; i += kThreads) out[i] = -1;
  }

  __device__ void select(int64_t row) {
    const Span span = p.span(row);
    constexpr int kBytes = kType == FloatType::kFloat32 ? 4 : 2;
    row_logits = static_cast<const uint8_t*>(p.logits) + (row * p.row_stride + span.start) * kBytes;
    length = static_cast<unsigned>(span.length);
    const int k = static_cast<int>(p.k);
    if (span.length <= k) {
      const int count = static_cast<int>(span.length);
      for (int i = thread; i < count; i += kThreads) shared.positions[i] = i;
      __syncthreads();
      return store(row, count);
    }
    uint32_t mask = 0, value = 0;
    int wanted = k;
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
      count_digit(digit(i), mask, value);
      uint32_t bin;
      find_bin(1 << digit(i).bits, bin, wanted);
      mask |= ((1u << digit(i).bits) - 1) << digit(i).shift;
      value |= bin << digit(i).shift;
    }
    collect(value, wanted);
    store(row, k);
  }
};

template <FloatType kType>
__global__ void __launch_bounds__(kThreads) portable_topk_kernel(const __grid_constant__ TopkParams p) {
  __shared__ typename PortableTopk<kType>::Shared shared;
  PortableTopk<kType> topk(p, shared);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    topk.select(row);
    __syncthreads();  // shared memory is free again
  }
}

}  // namespace mqa::selection
