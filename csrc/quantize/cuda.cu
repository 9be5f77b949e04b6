// Launches of the quantisers and cache movers on CUDA.
#include <atomic>
#include <random>

#include "device/launch.h"
#include "quantize/cache.cuh"
#include "quantize/host.h"

namespace mqa::quantize {
namespace {

int blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  STD_TORCH_CHECK(blocks <= INT32_MAX, "torch_mqa_ops: too many rows for one launch: ", items);
  return static_cast<int>(blocks);
}

int blocks_for_rows(const Rows& rows) { return blocks_for(rows.count * (rows.head_dim / kLaneElements), kThreads); }

// On the current stream of the device that is made current here.
template <auto kernel, typename Params>
void launch(const Params& p, int blocks, const Tensor& anchor) {
  if (blocks == 0) return;
  const int device = anchor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  device::launch(kernel, {blocks, kThreads}, device, p);
}

void run_quantize_q_fp8(const QuantizeQFp8Params& p, const Tensor& anchor) {
  const int blocks = blocks_for_rows(p.q);
  switch (p.q.head_dim) {
    case 32: return launch<quantize_q_fp8_kernel<32>>(p, blocks, anchor);
    case 64: return launch<quantize_q_fp8_kernel<64>>(p, blocks, anchor);
    default: return launch<quantize_q_fp8_kernel<128>>(p, blocks, anchor);
  }
}

void run_quantize_q_mxfp4(const QuantizeQMxfp4Params& p, const Tensor& anchor) {
  const int blocks = blocks_for_rows(p.q);
  switch (p.q.head_dim) {
    case 64: return launch<quantize_q_mxfp4_kernel<64>>(p, blocks, anchor);
    default: return launch<quantize_q_mxfp4_kernel<128>>(p, blocks, anchor);
  }
}

template <CacheFormat kFormat, int kHeadDim>
void quantize_k(QuantizeKParams p, const Tensor& anchor) {
  static std::atomic<uint32_t> next_nonce{std::random_device{}()};
  p.nonce = next_nonce++;
  launch<quantize_k_cache_kernel<kFormat, kHeadDim>>(p, blocks_for_rows(p.k), anchor);
}

void run_quantize_k_fp8(const QuantizeKParams& p, const Tensor& anchor) {
  switch (p.k.head_dim) {
    case 32: return quantize_k<CacheFormat::kFp8, 32>(p, anchor);
    case 64: return quantize_k<CacheFormat::kFp8, 64>(p, anchor);
    default: return quantize_k<CacheFormat::kFp8, 128>(p, anchor);
  }
}

void run_quantize_k_mxfp4(const QuantizeKParams& p, const Tensor& anchor) {
  switch (p.k.head_dim) {
    case 64: return quantize_k<CacheFormat::kMxfp4, 64>(p, anchor);
    default: return quantize_k<CacheFormat::kMxfp4, 128>(p, anchor);
  }
}

void run_gather_k(const GatherKParams& p, const Tensor& anchor) {
  launch<gather_k_cache_kernel>(p, blocks_for(p.total_tokens, kGatherRows), anchor);
}

}  // namespace
}  // namespace mqa::quantize

STABLE_TORCH_LIBRARY_IMPL(mqa, CUDA, m) {
  using namespace mqa::quantize;
  m.impl("quantize_q_fp8", TORCH_BOX(&quantize_q_fp8<run_quantize_q_fp8>));
  m.impl("quantize_q_fp8.out", TORCH_BOX(&quantize_q_fp8_out<run_quantize_q_fp8>));
  m.impl("quantize_q_mxfp4", TORCH_BOX(&quantize_q_mxfp4<run_quantize_q_mxfp4>));
  m.impl("quantize_q_mxfp4.out", TORCH_BOX(&quantize_q_mxfp4_out<run_quantize_q_mxfp4>));
  m.impl("quantize_k_cache_fp8", TORCH_BOX(&quantize_k_cache_fp8<run_quantize_k_fp8>));
  m.impl("quantize_k_cache_mxfp4", TORCH_BOX(&quantize_k_cache_mxfp4<run_quantize_k_mxfp4>));
  m.impl("gather_k_cache_fp8", TORCH_BOX(&gather_k_cache_fp8<run_gather_k>));
  m.impl("gather_k_cache_fp8.out", TORCH_BOX(&gather_k_cache_fp8_out<run_gather_k>));
  m.impl("gather_k_cache_mxfp4", TORCH_BOX(&gather_k_cache_mxfp4<run_gather_k>));
  m.impl("gather_k_cache_mxfp4.out", TORCH_BOX(&gather_k_cache_mxfp4_out<run_gather_k>));
}
