// The Hopper kernel: its warps and their roles.
#pragma once

#include "paged_logits/hopper_fp8.cuh"
#include "paged_logits/hopper_mxfp4.cuh"

namespace mqa::paged_logits {

// Kernel: HopperFp8 or HopperMxfp4.
template <typename Kernel, int kGroups, int kBlocks>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, kBlocks)
    hopper_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ CUtensorMap keys,
                         const __grid_constant__ CUtensorMap queries, const __grid_constant__ HopperPlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const Kernel kernel(p, keys, queries, plan, shared);

  if (Kernel::kFp8 && threadIdx.x == 0) {
    device::prefetch_map(&keys);
    if (plan.query_boxes) device::prefetch_map(&queries);
  }
  kernel.init_barriers();
  kernel.prefetch_small_inputs();
  device::allow_next_kernel();
  __syncthreads();

  constexpr int kConsumerWarps = kGroups * kGroupThreads / kWarpThreads;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
  if (warp < kConsumerWarps) {
    // These see nothing, and so write nothing, before the helpers do.
    device::raise_registers<HopperTeam<kGroups, kBlocks>::kConsumerRegisters>();
    if (p.out_type == FloatType::kFloat32) {
      kernel.template consume<4>(warp / 4);
    } else {
      kernel.template consume<2>(warp / 4);
    }
  } else {
    device::lower_registers<HopperTeam<kGroups, kBlocks>::kHelperRegisters>();
    if (warp == kConsumerWarps + kProducer) return kernel.produce();
    device::wait_for_previous_kernel();
    if (warp == kConsumerWarps + kFiller) {
      if (p.clean) fill_dead_columns<Kernel::kTileTokens>(p, blockIdx.x, gridDim.x);
    } else {
      kernel.load(warp - kConsumerWarps - kQueryLoader);
    }
  }
#else
  __trap();  // launch() in hopper_launch.h lets only sm_90a code through
#endif
}

}  // namespace mqa::paged_logits
