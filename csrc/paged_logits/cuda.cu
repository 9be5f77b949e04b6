// Which kernel serves a paged-logits call on CUDA, and its launch.
#include <algorithm>

#include "device/launch.h"
#include "paged_logits/hopper.h"
#include "paged_logits/host.h"
#include "paged_logits/portable.cuh"
#include "paged_logits/schedule.h"

namespace mqa::paged_logits {
namespace {

// The portable kernel serves every shape on every architecture from sm_80 on.
template <CacheFormat kFormat, int kHeadDim>
void launch_portable(const LogitsParams& p, int device) {
  constexpr auto kernel = portable_logits_kernel<kFormat, kHeadDim>;
  const device::KernelFacts& facts = device::kernel_facts<kernel>(device);
  const bool e4m3_operands = kFormat == CacheFormat::kFp8 && (facts.ptx_version == 89 || facts.ptx_version >= 120);
  const PortablePlan plan =
      portable_plan(p.next_n, p.heads, p.head_dim, kFormat, PortableStage<kFormat, kHeadDim>::kBytes,
                    e4m3_operands ? 1 : 2, facts.dynamic_shared_limit);
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
  if (p.format == CacheFormat::kMxfp4) {
    if (launch_hopper_mxfp4(p, anchor, device)) return;
    switch (p.head_dim) {
      case 64: return launch_portable<CacheFormat::kMxfp4, 64>(p, device);
      default: return launch_portable<CacheFormat::kMxfp4, 128>(p, device);
    }
  }
  if (launch_hopper_fp8(p, anchor, device)) return;
  switch (p.head_dim) {
    case 32: return launch_portable<CacheFormat::kFp8, 32>(p, device);
    case 64: return launch_portable<CacheFormat::kFp8, 64>(p, device);
    default: return launch_portable<CacheFormat::kFp8, 128>(p, device);
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
  m.impl("fp4_paged_mqa_logits", TORCH_BOX(&fp4_paged_mqa_logits<run_logits>));
  m.impl("fp4_paged_mqa_logits.out", TORCH_BOX(&fp4_paged_mqa_logits_out<run_logits>));
  m.impl("paged_mqa_logits_schedule", TORCH_BOX(&paged_mqa_logits_schedule<run_schedule>));
  m.impl("paged_mqa_logits_schedule.out", TORCH_BOX(&paged_mqa_logits_schedule_out<run_schedule>));
}
