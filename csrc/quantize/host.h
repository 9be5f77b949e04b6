// Argument checks, allocation and parameters of the quantisers and cache writers; compiled into the CPU and the CUDA
// library. The op templates at the foot join them to a library's kernels.
#pragma once

#include <tuple>

#include "common/stable.h"
#include "quantize/params.h"

namespace mqa::quantize {

QuantizeQParams check_quantize_q(const Tensor& q, const OptionalTensor& weights, bool pow2_scale,
                                 std::optional<double> softmax_scale);
void check_quantize_q_out(QuantizeQParams& params, const Tensor& q, const OptionalTensor& weights, const Tensor& q_fp8,
                          const Tensor& weights_f32);
std::tuple<Tensor, Tensor> allocate_quantize_q(QuantizeQParams& params, const Tensor& q);

QuantizeKParams check_quantize_k(const Tensor& k, const Tensor& slot_mapping, const Tensor& kv_fused, bool pow2_scale);

GatherKParams check_gather_k(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                             int64_t total_tokens);
void check_gather_k_out(GatherKParams& params, const Tensor& kv_fused, const Tensor& block_tables,
                        const Tensor& cu_seq_lens, const Tensor& k, const Tensor& k_scale);
std::tuple<Tensor, Tensor> allocate_gather_k(GatherKParams& params, const Tensor& kv_fused);

// A library's kernels; `anchor` is a tensor on the device to run on.
using RunQuantizeQ = void (*)(const QuantizeQParams& params, const Tensor& anchor);
using RunQuantizeK = void (*)(const QuantizeKParams& params, const Tensor& anchor);
using RunGatherK = void (*)(const GatherKParams& params, const Tensor& anchor);

template <RunQuantizeQ run>
std::tuple<Tensor, Tensor> quantize_q_fp8(const Tensor& q, OptionalTensor weights, bool pow2_scale,
                                          std::optional<double> softmax_scale) {
  QuantizeQParams params = check_quantize_q(q, weights, pow2_scale, softmax_scale);
  auto results = allocate_quantize_q(params, q);
  run(params, q);
  return results;
}

template <RunQuantizeQ run>
void quantize_q_fp8_out(const Tensor& q, OptionalTensor weights, bool pow2_scale, std::optional<double> softmax_scale,
                        Tensor q_fp8, Tensor weights_f32) {
  QuantizeQParams params = check_quantize_q(q, weights, pow2_scale, softmax_scale);
  check_quantize_q_out(params, q, weights, q_fp8, weights_f32);
  run(params, q);
}

template <RunQuantizeK run>
void quantize_k_cache_fp8(const Tensor& k, const Tensor& slot_mapping, Tensor kv_fused, bool pow2_scale) {
  run(check_quantize_k(k, slot_mapping, kv_fused, pow2_scale), k);
}

template <RunGatherK run>
std::tuple<Tensor, Tensor> gather_k_cache_fp8(const Tensor& kv_fused, const Tensor& block_tables,
                                              const Tensor& cu_seq_lens, int64_t total_tokens) {
  GatherKParams params = check_gather_k(kv_fused, block_tables, cu_seq_lens, total_tokens);
  auto results = allocate_gather_k(params, kv_fused);
  run(params, kv_fused);
  return results;
}

template <RunGatherK run>
void gather_k_cache_fp8_out(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                            int64_t total_tokens, Tensor k, Tensor k_scale) {
  GatherKParams params = check_gather_k(kv_fused, block_tables, cu_seq_lens, total_tokens);
  check_gather_k_out(params, kv_fused, block_tables, cu_seq_lens, k, k_scale);
  run(params, kv_fused);
}

}  // namespace mqa::quantize
