// The schedule as a tensor.
#include "paged_logits/schedule.h"

#include <algorithm>

#include "device/launch.h"
#include "paged_logits/schedule.cuh"

namespace mqa::paged_logits {
namespace {

__global__ void schedule_kernel(const ScheduleParams p) {
  __shared__ ScanStorage storage;
  worker_starts(
      p.lengths.batch, p.workers, 0, p.workers,
      [&](int64_t request) { return units_of(request_length(p.lengths, request)); },
      [&](int64_t i, Position start) {
        p.out[2 * i] = start.request;
        p.out[2 * i + 1] = start.unit;
      },
      storage);
}

}  // namespace

void launch_schedule(const ScheduleParams& p, int device) {
  const int64_t warps = std::clamp<int64_t>((p.lengths.batch + kWarpThreads - 1) / kWarpThreads, 1, kMaxWarps);
  schedule_kernel<<<1, static_cast<unsigned>(warps * kWarpThreads), 0, device::current_stream(device)>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace mqa::paged_logits
