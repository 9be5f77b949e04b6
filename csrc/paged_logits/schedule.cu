// The schedule as a tensor.
#include "paged_logits/schedule.h"

#include <algorithm>

#include "device/launch.h"
#include "device/mbarrier.cuh"
#include "paged_logits/schedule.cuh"

namespace mqa::paged_logits {
namespace {

constexpr int kMaxThreads = kMaxWarps * kWarpThreads;

__global__ void __launch_bounds__(kMaxThreads) schedule_kernel(const ScheduleParams p) {
  __shared__ ScanStorage storage;
  __shared__ int64_t ends[kMaxThreads];  // units up to the end of each request
  device::wait_for_previous_kernel();
  device::allow_next_kernel();
  const auto units = [&](int64_t request) { return units_of(request_length(p.lengths, request)); };
  const auto emit = [&](int64_t i, Position start) {
    p.out[2 * i] = start.request;
    p.out[2 * i + 1] = start.unit;
  };
  if (p.lengths.batch > blockDim.x)
    return worker_starts(p.lengths.batch, p.workers, 0, p.workers, units, emit, storage);

  // A thread has one request at most: a long one's many workers would be left to it alone.
  const UnitScan scan = scan_units(p.lengths.batch, units, storage);
  const int batch = static_cast<int>(p.lengths.batch);
  if (threadIdx.x < batch) ends[threadIdx.x] = scan.before + scan.own;
  __syncthreads();
  const Split split(scan.total, p.workers);
  for (int64_t i = threadIdx.x; i <= p.workers; i += blockDim.x) {
    const int64_t start = split.start(i);
    int first = 0, last = batch;  // the first request that ends past the start is among these
    while (first < last) {
      const int middle = (first + last) / 2;
      if (ends[middle] > start) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    emit(i, first == batch ? Position{batch, 0}
                           : Position{first, static_cast<int>(start - (first > 0 ? ends[first - 1] : 0))});
  }
}

}  // namespace

void launch_schedule(const ScheduleParams& p, int device) {
  const device::KernelFacts& facts = device::kernel_facts<schedule_kernel>(device);
  const int64_t threads = std::clamp<int64_t>(std::max(p.lengths.batch, p.workers + 1), 1, kMaxThreads);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>((threads + kWarpThreads - 1) / kWarpThreads * kWarpThreads));
  config.stream = device::current_stream(device);
  config.attrs = &overlap;
  config.numAttrs = facts.binary_version >= 90 ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, schedule_kernel, p));
}

}  // namespace mqa::paged_logits
