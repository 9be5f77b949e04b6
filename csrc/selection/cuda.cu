// Launches of the selection on CUDA.
#include <algorithm>

#include "device/launch.h"
#include "selection/cluster.cuh"
#include "selection/host.h"
#include "selection/portable.cuh"

namespace mqa::selection {
namespace {

template <FloatType kType>
void launch_portable(const TopkParams& p, int device) {
  constexpr auto kernel = portable_topk_kernel<kType>;
  constexpr int64_t kMultiprocessorBlocks = 2;  // that fit
  const int64_t most = kMultiprocessorBlocks * device::kernel_facts<kernel>(device).multiprocessors;
  device::launch(kernel, {static_cast<int>(std::min(p.rows, most)), kThreads}, device, p);
}

template <FloatType kType, bool kOneTile>
bool launch_cluster(const TopkParams& p, int device) {
  using Kernel = ClusterTopk<kType, kOneTile>;
  constexpr auto kernel = cluster_topk_kernel<kType, kOneTile>;
  constexpr int kSharedBytes = sizeof(typename Kernel::Shared);
  const int limit = std::min(device::cluster_limit<kernel>(device, Kernel::kThreads, kSharedBytes), kMostBlocks);
  // A row should fit into its blocks' registers, and the blocks of few rows should be all that the device holds at
  // once.
  constexpr int kLeast = 2048;  // elements worth a block
  const int64_t multiprocessors = device::kernel_facts<kernel>(device).multiprocessors;
  int blocks = 1;
  while (2 * blocks <= limit && 2 * blocks * kLeast <= p.width &&
         (p.width + Kernel::kVector - 1 > blocks * Kernel::kTile || 2 * blocks * p.rows <= multiprocessors)) {
    blocks *= 2;
  }
  if (limit == 0 || p.rows * blocks > INT32_MAX) return false;
  if constexpr (kOneTile) {
    if (p.width + Kernel::kVector - 1 > blocks * Kernel::kTile) return launch_cluster<kType, false>(p, device);
  }
  const int grid = static_cast<int>(p.rows) * blocks;
  device::launch(kernel, {grid, Kernel::kThreads, kSharedBytes, true, blocks}, device, p);
  return true;
}

// The portable kernel where the device has no clusters, or there are too many rows.
template <FloatType kType>
void launch_topk(const TopkParams& p, int device) {
  if (!launch_cluster<kType, true>(p, device)) launch_portable<kType>(p, device);
}

void run_topk(const TopkParams& p, const Tensor& anchor) {
  if (p.rows == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  switch (p.type) {
    case FloatType::kBFloat16: return launch_topk<FloatType::kBFloat16>(p, device);
    case FloatType::kFloat16: return launch_topk<FloatType::kFloat16>(p, device);
    default: return launch_topk<FloatType::kFloat32>(p, device);
  }
}

}  // namespace
}  // namespace mqa::selection

STABLE_TORCH_LIBRARY_IMPL(mqa, CUDA, m) {
  using namespace mqa::selection;
  m.impl("topk_indices", TORCH_BOX(&topk_indices<run_topk>));
  m.impl("topk_indices.out", TORCH_BOX(&topk_indices_out<run_topk>));
}
