// The walk over all requests and their 256-token units, and where each worker starts in it.
//
// Safety rests on one fact. A worker i does the walk from start i up to start i + 1 in the order of positions; the
// first start is taken as the beginning and the last as the end whatever the schedule says. Any sequence of positions
// between those two crosses every unit at least once, so a stale, foreign or random schedule repeats work (writing the
// same bits again) and can neither leave a unit out nor fail to end.
#pragma once

#include <cstdint>

#include "device/warp.cuh"
#include "paged_logits/params.h"

namespace mqa::paged_logits {

using device::kWarpThreads;
constexpr int kMaxWarps = 32;

// An ordinary load, not one for constants: a kernel may be there while the one in front of it still writes the lengths.
__device__ __forceinline__ int load_length(const Lengths& lengths, int64_t request, int64_t slot) {
  return lengths.data[request * lengths.batch_stride + slot * lengths.slot_stride];
}

// One that leaves nothing in the L1 cache, for lengths that will be looked at again.
__device__ __forceinline__ int peek_length(const Lengths& lengths, int64_t request, int64_t slot) {
  int length;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
               : "=r"(length)
               : "l"(lengths.data + request * lengths.batch_stride + slot * lengths.slot_stride)
               : "memory");
  return length;
}

// The longest of a request's lengths, not below 0.
template <typename Load = decltype(load_length)>
__device__ __forceinline__ int64_t request_length(const Lengths& lengths, int64_t request, Load& load = load_length) {
  int longest = max(load(lengths, request, 0), 0);
#pragma unroll 1
  for (int64_t slot = 1; slot < lengths.slots; ++slot) longest = max(longest, load(lengths, request, slot));
  return longest;
}

__device__ __forceinline__ int64_t units_of(int64_t length) { return (length + kUnitTokens - 1) / kUnitTokens; }

struct ScanStorage {
  int64_t warp_units[kMaxWarps];
};

// Units in front of a thread's own, and of the whole block.
struct UnitScan {
  int64_t before, total;
};

// By whole blocks; blockDim.x is a multiple of 32.
__device__ inline UnitScan scan_units(int64_t own, ScanStorage& storage) {
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  const int warps = blockDim.x / kWarpThreads;
  int64_t inclusive = own;
  for (int offset = 1; offset < kWarpThreads; offset *= 2) {
    const int64_t below = __shfl_up_sync(~0u, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  __syncthreads();  // the storage may still be read from an earlier scan
  if (lane == kWarpThreads - 1) storage.warp_units[warp] = inclusive;
  __syncthreads();
  UnitScan scan{inclusive - own, 0};
  for (int i = 0; i < warps; ++i) {
    if (i < warp) scan.before += storage.warp_units[i];
    scan.total += storage.warp_units[i];
  }
  return scan;
}

// Calls emit(i, position) once in the block for each worker i of [first, last], worker number `workers` being the end.
// `units(request)` is called by whole blocks.
template <typename Units, typename Emit>
__device__ void worker_starts(int64_t batch, int64_t workers, int64_t first, int64_t last, const Units& units,
                              const Emit& emit, ScanStorage& storage) {
  // A thread has a run of neighbouring requests.
  const int64_t run = (batch + blockDim.x - 1) / blockDim.x;
  const int64_t first_request = min(batch, threadIdx.x * run);
  const int64_t last_request = min(batch, first_request + run);
  int64_t own = 0;
#pragma unroll 4
  for (int64_t request = first_request; request < last_request; ++request) own += units(request);
  const UnitScan scan = scan_units(own, storage);
  const Split split(scan.total, workers);
  int64_t before = scan.before;
  int64_t i = max(first, split.first_worker(before));
  for (int64_t request = first_request; request < last_request; ++request) {
    const int64_t after = before + units(request);
    for (; i <= last && split.start(i) < after; ++i) {
      emit(i, Position{static_cast<int>(request), static_cast<int>(split.start(i) - before)});
    }
    before = after;
  }
  for (i = max(first, split.first_worker(scan.total)) + threadIdx.x; i <= last; i += blockDim.x) {
    emit(i, Position{static_cast<int>(batch), 0});
  }
}

// Row i of a schedule as a position; contents may be anything.
__device__ __forceinline__ Position load_start(const int32_t* schedule, int64_t i, int64_t workers, int batch) {
  if (i == 0) return {0, 0};
  if (i == workers) return {batch, 0};
  const int request = schedule[2 * i];
  const int unit = schedule[2 * i + 1];
  if (request < 0) return {0, 0};
  if (request >= batch) return {batch, 0};
  return {request, min(max(unit, 0), kMaxUnits)};
}

}  // namespace mqa::paged_logits
