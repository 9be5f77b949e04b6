// Which kernel serves a paged-logits call on CUDA, and its launch.
#include <algorithm>

#include "device/launch.h"
#include "paged_logits/hopper.h"
#include "paged_logits/host.h"
#include "paged_logits/portable_fp8.cuh"
#include "paged_logits/schedule.h"

namespace mqa::paged_logits {
namespace {

// The portable kernel serves every shape on every architecture from sm_80 on.
template <int kHeadDim>
void launch_portable(const LogitsParams& p, int device) {
  constexpr auto kernel = portable_fp8_logits_kernel<kHeadDim>;
  const device::KernelFacts& facts = device::kernel_facts<kernel>(device);
  const int operand_bytes = facts.ptx_version == 89 || facts.ptx_version >= 120 ? 1 : 2;
  const PortablePlan plan = portable_plan(p.next_n, p.heads, p.head_dim, PortableStage<kHeadDim>::kBytes, operand_bytes,
                                          facts.dynamic_shared_limit);
  // One block per multiprocessor: a block's warps fill its registers.
  const int64_t blocks =
      p.schedule == nullptr ? facts.multiprocessors : std::min<int64_t>(p.workers, facts.multiprocessors);
  kernel<<<static_cast<unsigned>(blocks), plan.warps * kWarpThreads, plan.shared_bytes,
           device::current_stream(device)>>>(p, plan);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void run_logits(const LogitsParams& p, const Tensor& anchor) {
  if (p.batch == 0 || p.max_seq_len == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (launch_hopper(p, anchor, device)) return;
  switch (p.head_dim) {
    case 32: return launch_portable<32>(p, device);
    case 64: return launch_portable<64>(p, device);
    default: return launch_portable<128>(p, device);
  }
}

void run_schedule(const ScheduleParams& p, const Tensor& anchor) {
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  launch_schedule(p, device);
}

}  // namespace
}  // namespace mqa::paged_logits

STABLE_TORCH_LIBRARY_IMPL(mqa, CUDA, m) {
  using namespace mqa::paged_logits;
  m.impl("fp8_paged_mqa_logits", TORCH_BOX(&fp8_paged_mqa_logits<run_logits>));
  m.impl("fp8_paged_mqa_logits.out", TORCH_BOX(&fp8_paged_mqa_logits_out<run_logits>));
  m.impl("paged_mqa_logits_schedule", TORCH_BOX(&paged_mqa_logits_schedule<run_schedule>));
  m.impl("paged_mqa_logits_schedule.out", TORCH_BOX(&paged_mqa_logits_schedule_out<run_schedule>));
}
