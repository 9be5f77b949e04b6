// Argument checks, allocation and parameters of the quantisers and cache movers; compiled into the CPU and the CUDA
// library. The op templates at the foot join them to a library's kernels.
#pragma once

#include <tuple>

#include "common/stable.h"
#include "quantize/params.h"

namespace mqa::quantize {

QuantizeQFp8Params check_quantize_q_fp8(const Tensor& q, const OptionalTensor& weights, bool pow2_scale,
                                        std::optional<double> softmax_scale);
void check_quantize_q_fp8_out(QuantizeQFp8Params& params, const Tensor& q, const OptionalTensor& weights,
                              const Tensor& q_fp8, const Tensor& weights_f32);
std::tuple<Tensor, Tensor> allocate_quantize_q_fp8(QuantizeQFp8Params& params, const Tensor& q);

QuantizeQMxfp4Params check_quantize_q_mxfp4(const Tensor& q);
void check_quantize_q_mxfp4_out(QuantizeQMxfp4Params& params, const Tensor& q, const Tensor& q_fp4, const Tensor& q_sf);
std::tuple<Tensor, Tensor> allocate_quantize_q_mxfp4(QuantizeQMxfp4Params& params, const Tensor& q);

QuantizeKParams check_quantize_k(CacheFormat format, const Tensor& k, const Tensor& slot_mapping,
                                 const Tensor& kv_fused, bool interleaved_scales);

GatherKParams check_gather_k(CacheFormat format, const Tensor& kv_fused, const Tensor& block_tables,
                             const Tensor& cu_seq_lens, int64_t total_tokens, bool interleaved_scales);
void check_gather_k_out(CacheFormat format, GatherKParams& params, const Tensor& kv_fused, const Tensor& block_tables,
                        const Tensor& cu_seq_lens, const Tensor& k, const Tensor& scale);
std::tuple<Tensor, Tensor> allocate_gather_k(CacheFormat format, GatherKParams& params, const Tensor& kv_fused);

// A library's kernels; `anchor` is a tensor on the device to run on.
using RunQuantizeQFp8 = void (*)(const QuantizeQFp8Params& params, const Tensor& anchor);
using RunQuantizeQMxfp4 = void (*)(const QuantizeQMxfp4Params& params, const Tensor& anchor);
using RunQuantizeK = void (*)(const QuantizeKParams& params, const Tensor& anchor);
using RunGatherK = void (*)(const GatherKParams& params, const Tensor& anchor);

template <RunQuantizeQFp8 run>
std::tuple<Tensor, Tensor> quantize_q_fp8(const Tensor& q, OptionalTensor weights, bool pow2_scale,
                                          std::optional<double> softmax_scale) {
  QuantizeQFp8Params params = check_quantize_q_fp8(q, weights, pow2_scale, softmax_scale);
  auto results = allocate_quantize_q_fp8(params, q);
  run(params, q);
  return results;
}

template <RunQuantizeQFp8 run>
void quantize_q_fp8_out(const Tensor& q, OptionalTensor weights, bool pow2_scale, std::optional<double> softmax_scale,
                        Tensor q_fp8, Tensor weights_f32) {
  QuantizeQFp8Params params = check_quantize_q_fp8(q, weights, pow2_scale, softmax_scale);
  check_quantize_q_fp8_out(params, q, weights, q_fp8, weights_f32);
  run(params, q);
}

template <RunQuantizeQMxfp4 run>
std::tuple<Tensor, Tensor> quantize_q_mxfp4(const Tensor& q) {
  QuantizeQMxfp4Params params = check_quantize_q_mxfp4(q);
  auto results = allocate_quantize_q_mxfp4(params, q);
  run(params, q);
  return results;
}

template <RunQuantizeQMxfp4 run>
void quantize_q_mxfp4_out(const Tensor& q, Tensor q_fp4, Tensor q_sf) {
  QuantizeQMxfp4Params params = check_quantize_q_mxfp4(q);
  check_quantize_q_mxfp4_out(params, q, q_fp4, q_sf);
  run(params, q);
}

template <RunQuantizeK run>
void quantize_k_cache_fp8(const Tensor& k, const Tensor& slot_mapping, Tensor kv_fused, bool pow2_scale) {
  QuantizeKParams params = check_quantize_k(CacheFormat::kFp8, k, slot_mapping, kv_fused, false);
  params.pow2_scale = pow2_scale;
  run(params, k);
}

template <RunQuantizeK run>
void quantize_k_cache_mxfp4(const Tensor& k, const Tensor& slot_mapping, Tensor kv_fused, bool is_kv_sf_interleaved) {
  run(check_quantize_k(CacheFormat::kMxfp4, k, slot_mapping, kv_fused, is_kv_sf_interleaved), k);
}

template <CacheFormat format, RunGatherK run>
std::tuple<Tensor, Tensor> gather_k(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                                    int64_t total_tokens, bool interleaved_scales) {
  GatherKParams params = check_gather_k(format, kv_fused, block_tables, cu_seq_lens, total_tokens, interleaved_scales);
  auto results = allocate_gather_k(format, params, kv_fused);
  run(params, kv_fused);
  return results;
}

template <CacheFormat format, RunGatherK run>
void gather_k_out(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens, int64_t total_tokens,
                  bool interleaved_scales, const Tensor& k, const Tensor& scale) {
  GatherKParams params = check_gather_k(format, kv_fused, block_tables, cu_seq_lens, total_tokens, interleaved_scales);
  check_gather_k_out(format, params, kv_fused, block_tables, cu_seq_lens, k, scale);
  run(params, kv_fused);
}

template <RunGatherK run>
std::tuple<Tensor, Tensor> gather_k_cache_fp8(const Tensor& kv_fused, const Tensor& block_tables,
                                              const Tensor& cu_seq_lens, int64_t total_tokens) {
  return gather_k<CacheFormat::kFp8, run>(kv_fused, block_tables, cu_seq_lens, total_tokens, false);
}

template <RunGatherK run>
void gather_k_cache_fp8_out(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                            int64_t total_tokens, Tensor k, Tensor k_scale) {
  gather_k_out<CacheFormat::kFp8, run>(kv_fused, block_tables, cu_seq_lens, total_tokens, false, k, k_scale);
}

template <RunGatherK run>
std::tuple<Tensor, Tensor> gather_k_cache_mxfp4(const Tensor& kv_fused, const Tensor& block_tables,
                                                const Tensor& cu_seq_lens, int64_t total_tokens,
                                                bool is_kv_sf_interleaved) {
  return gather_k<CacheFormat::kMxfp4, run>(kv_fused, block_tables, cu_seq_lens, total_tokens, is_kv_sf_interleaved);
}

template <RunGatherK run>
void gather_k_cache_mxfp4_out(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                              int64_t total_tokens, bool is_kv_sf_interleaved, Tensor k, Tensor k_sf) {
  gather_k_out<CacheFormat::kMxfp4, run>(kv_fused, block_tables, cu_seq_lens, total_tokens, is_kv_sf_interleaved, k,
                                         k_sf);
}

}  // namespace mqa::quantize
