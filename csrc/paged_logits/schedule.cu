// The schedule as a tensor.
#include "paged_logits/schedule.h"

#include <algorithm>

#include "device/launch.h"
#include "device/mbarrier.cuh"
#include "paged_logits/schedule.cuh"

namespace mqa::paged_logits {
namespace {

constexpr int kMaxThreads = kMaxWarps * kWarpThreads;

// The requests are cut into entries, at most one per thread. An entry is one request, or 32 or a multiple of them,
// which the lanes of a warp read together.
__global__ void __launch_bounds__(kMaxThreads) schedule_kernel(const ScheduleParams p) {
  __shared__ ScanStorage storage;
  __shared__ int64_t ends[kMaxThreads];  // units of an entry, then units up to its end
  device::wait_for_previous_kernel();
  device::allow_next_kernel();
  const int64_t batch = p.lengths.batch;
  const auto units = [&](int64_t request) { return units_of(request_length(p.lengths, request)); };
  const int64_t per_entry =
      batch <= blockDim.x ? 1 : (batch + kMaxThreads * kWarpThreads - 1) / (kMaxThreads * kWarpThreads) * kWarpThreads;
  const int entries = static_cast<int>((batch + per_entry - 1) / per_entry);
  if (per_entry == 1) {
    if (threadIdx.x < entries) ends[threadIdx.x] = units(threadIdx.x);
  } else {
    const int lane = threadIdx.x % kWarpThreads;
    for (int entry = threadIdx.x / kWarpThreads; entry < entries; entry += blockDim.x / kWarpThreads) {
      const int64_t last = min(batch, (entry + 1) * per_entry);
      int64_t sum = 0;
      for (int64_t first = entry * per_entry; first < last; first += kWarpThreads) {
        sum += __reduce_add_sync(~0u, first + lane < last ? static_cast<unsigned>(units(first + lane)) : 0u);
      }
      if (lane == 0) ends[entry] = sum;
    }
  }
  __syncthreads();
  const int64_t own = threadIdx.x < entries ? ends[threadIdx.x] : 0;
  const UnitScan scan = scan_units(own, storage);
  ends[threadIdx.x] = scan.before + own;
  __syncthreads();

  const Split split(scan.total, p.workers);
  for (int64_t i = threadIdx.x; i <= p.workers; i += blockDim.x) {
    const int64_t start = split.start(i);
    int entry = 0;  // the first that ends past the start, if there is one
    for (int last = entries; entry < last;) {
      const int middle = (entry + last) / 2;
      if (ends[middle] > start) {
        last = middle;
      } else {
        entry = middle + 1;
      }
    }
    int64_t request = batch, unit = 0;
    if (entry < entries) {
      request = entry * per_entry;
      unit = start - (entry > 0 ? ends[entry - 1] : 0);
      // Bounded by the entry, not by what the lengths say now: they may have changed.
      for (const int64_t last = min(batch, request + per_entry) - 1; request < last; ++request) {
        const int64_t count = units(request);
        if (unit < count) break;
        unit -= count;
      }
    }
    p.out[2 * i] = static_cast<int>(request);
    p.out[2 * i + 1] = static_cast<int>(unit);
  }
}

}  // namespace

void launch_schedule(const ScheduleParams& p, int device) {
  const device::KernelFacts& facts = device::kernel_facts<schedule_kernel>(device);
  const int64_t threads = std::clamp<int64_t>(std::max(p.lengths.batch, p.workers + 1), 1, kMaxThreads);
  // Code that was written for less than sm_90 does not wait for the kernel in front.
  const int warps = static_cast<int>((threads + kWarpThreads - 1) / kWarpThreads);
  device::launch(schedule_kernel, {1, warps * kWarpThreads, 0, facts.ptx_version >= 90}, device, p);
}

}  // namespace mqa::paged_logits
