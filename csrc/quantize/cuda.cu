// Launches of the quantisers and cache movers on CUDA.
#include "device/launch.h"
#include "quantize/fp8.cuh"
#include "quantize/host.h"

namespace mqa::quantize {
namespace {

unsigned blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  STD_TORCH_CHECK(blocks <= INT32_MAX, "torch_mqa_ops: too many rows for one launch: ", items);
  return static_cast<unsigned>(blocks);
}

void run_quantize_q(const QuantizeQParams& p, const Tensor& anchor) {
  if (p.tokens * p.heads == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const unsigned blocks = blocks_for(p.tokens * p.heads * (p.head_dim / kLaneElements), kThreads);
  quantize_q_fp8_kernel<<<blocks, kThreads, 0, device::current_stream(device)>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void run_quantize_k(const QuantizeKParams& p, const Tensor& anchor) {
  if (p.tokens == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = device::current_stream(device);
  if (p.tokens > 1) {
    claim_slots_kernel<<<blocks_for(p.tokens, kThreads), kThreads, 0, stream>>>(p);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const unsigned blocks = blocks_for(p.tokens * (p.head_dim / kLaneElements), kThreads);
  quantize_k_cache_fp8_kernel<<<blocks, kThreads, 0, stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void run_gather_k(const GatherKParams& p, const Tensor& anchor) {
  if (p.total_tokens == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const unsigned blocks = blocks_for(p.total_tokens, kGatherRows);
  gather_k_cache_fp8_kernel<<<blocks, kThreads, 0, device::current_stream(device)>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace mqa::quantize

STABLE_TORCH_LIBRARY_IMPL(mqa, CUDA, m) {
  using namespace mqa::quantize;
  m.impl("quantize_q_fp8", TORCH_BOX(&quantize_q_fp8<run_quantize_q>));
  m.impl("quantize_q_fp8.out", TORCH_BOX(&quantize_q_fp8_out<run_quantize_q>));
  m.impl("quantize_k_cache_fp8", TORCH_BOX(&quantize_k_cache_fp8<run_quantize_k>));
  m.impl("gather_k_cache_fp8", TORCH_BOX(&gather_k_cache_fp8<run_gather_k>));
  m.impl("gather_k_cache_fp8.out", TORCH_BOX(&gather_k_cache_fp8_out<run_gather_k>));
}
