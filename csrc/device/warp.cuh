// What a warp does together.
#pragma once

namespace mqa::device {

constexpr int kWarpThreads = 32;

// The sum of the values of this lane and those below it. All lanes call.
__device__ __forceinline__ int sum_up_to(int value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpThreads; step *= 2) {
    const int lower = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

}  // namespace mqa::device
