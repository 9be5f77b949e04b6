// Launches of the selection on CUDA.
#include <algorithm>

#include "device/launch.h"
#include "selection/host.h"
#include "selection/portable.cuh"

namespace mqa::selection {
namespace {

template <FloatType kType>
void launch_portable(const TopkParams& p, int device) {
  constexpr auto kernel = portable_topk_kernel<kType>;
  constexpr int64_t kMultiprocessorBlocks = 2;  // that fit
  const int64_t most = kMultiprocessorBlocks * device::kernel_facts<kernel>(device).multiprocessors;
  device::launch_overlapping(kernel, static_cast<int>(std::min(p.rows, most)), kThreads, 0, device, false, p);
}

void run_topk(const TopkParams& p, const Tensor& anchor) {
  if (p.rows == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  switch (p.type) {
    case FloatType::kBFloat16: return launch_portable<FloatType::kBFloat16>(p, device);
    case FloatType::kFloat16: return launch_portable<FloatType::kFloat16>(p, device);
    default: return launch_portable<FloatType::kFloat32>(p, device);
  }
}

}  // namespace
}  // namespace mqa::selection

STABLE_TORCH_LIBRARY_IMPL(mqa, CUDA, m) {
  using namespace mqa::selection;
  m.impl("topk_indices", TORCH_BOX(&topk_indices<run_topk>));
  m.impl("topk_indices.out", TORCH_BOX(&topk_indices_out<run_topk>));
}
