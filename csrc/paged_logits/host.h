// Argument checks, allocation and parameters of the paged-logits ops; compiled into the CPU and the CUDA library, which
// both reject the same arguments in the same words. The op templates at the foot join them to a library's kernels.
#pragma once

#include "common/stable.h"
#include "paged_logits/params.h"

namespace mqa::paged_logits {

// The tensors of a logits call.
struct LogitsTensors {
  const Tensor& q;
  const Tensor* q_sf;  // nullptr for FP8
  const Tensor& kv_fused;
  const Tensor& weights;
  const Tensor& block_tables;
  const Tensor& seq_lens;
  const OptionalTensor& schedule_meta;
};

LogitsParams check_logits(CacheFormat format, const LogitsTensors& tensors, int64_t max_seq_len, int64_t sf_vec_size,
                          ScalarType output_dtype, bool interleaved_scales, bool clean_logits);
void check_logits_out(LogitsParams& params, const LogitsTensors& tensors, ScalarType output_dtype, const Tensor& out);
// The padded buffer of a functional call; the result is its first max_seq_len columns.
Tensor allocate_logits(LogitsParams& params, const Tensor& q, ScalarType output_dtype);

ScheduleParams check_schedule(const Tensor& seq_lens, int64_t num_workers);
void check_schedule_out(ScheduleParams& params, const Tensor& seq_lens, const Tensor& out);
Tensor allocate_schedule(ScheduleParams& params, const Tensor& seq_lens);

// A library's kernels; `anchor` is a tensor on the device to run on.
using RunLogits = void (*)(const LogitsParams& params, const Tensor& anchor);
using RunSchedule = void (*)(const ScheduleParams& params, const Tensor& anchor);

constexpr int64_t kScaleElements = 32;  // that a scale of FP4 serves

template <RunLogits run>
Tensor logits(LogitsParams params, const Tensor& q, ScalarType output_dtype) {
  Tensor buffer = allocate_logits(params, q, output_dtype);
  run(params, q);
  return torch::stable::narrow(buffer, 1, 0, params.max_seq_len);
}

template <RunLogits run>
Tensor fp8_paged_mqa_logits(const Tensor& q, const Tensor& kv_fused, const Tensor& weights, const Tensor& block_tables,
                            const Tensor& seq_lens, int64_t max_seq_len, std::optional<ScalarType> output_dtype,
                            OptionalTensor schedule_meta, bool clean_logits) {
  const ScalarType dtype = output_dtype.value_or(ScalarType::Float);
  const LogitsTensors tensors{q, nullptr, kv_fused, weights, block_tables, seq_lens, schedule_meta};
  return logits<run>(check_logits(CacheFormat::kFp8, tensors, max_seq_len, kScaleElements, dtype, false, clean_logits),
                     q, dtype);
}

template <RunLogits run>
void fp8_paged_mqa_logits_out(const Tensor& q, const Tensor& kv_fused, const Tensor& weights,
                              const Tensor& block_tables, const Tensor& seq_lens, int64_t max_seq_len,
                              std::optional<ScalarType> output_dtype, OptionalTensor schedule_meta, bool clean_logits,
                              Tensor out) {
  const ScalarType dtype = output_dtype.value_or(ScalarType::Float);
  const LogitsTensors tensors{q, nullptr, kv_fused, weights, block_tables, seq_lens, schedule_meta};
  LogitsParams params =
      check_logits(CacheFormat::kFp8, tensors, max_seq_len, kScaleElements, dtype, false, clean_logits);
  check_logits_out(params, tensors, dtype, out);
  run(params, q);
}

template <RunLogits run>
Tensor fp4_paged_mqa_logits(const Tensor& q, const Tensor& q_sf, const Tensor& kv_fused, const Tensor& weights,
                            const Tensor& block_tables, const Tensor& seq_lens, int64_t max_seq_len,
                            int64_t sf_vec_size, std::optional<ScalarType> output_dtype, bool is_kv_sf_interleaved,
                            OptionalTensor schedule_meta, bool clean_logits) {
  const ScalarType dtype = output_dtype.value_or(ScalarType::BFloat16);
  const LogitsTensors tensors{q, &q_sf, kv_fused, weights, block_tables, seq_lens, schedule_meta};
  return logits<run>(
      check_logits(CacheFormat::kMxfp4, tensors, max_seq_len, sf_vec_size, dtype, is_kv_sf_interleaved, clean_logits),
      q, dtype);
}

template <RunLogits run>
void fp4_paged_mqa_logits_out(const Tensor& q, const Tensor& q_sf, const Tensor& kv_fused, const Tensor& weights,
                              const Tensor& block_tables, const Tensor& seq_lens, int64_t max_seq_len,
                              int64_t sf_vec_size, std::optional<ScalarType> output_dtype, bool is_kv_sf_interleaved,
                              OptionalTensor schedule_meta, bool clean_logits, Tensor out) {
  const ScalarType dtype = output_dtype.value_or(ScalarType::BFloat16);
  const LogitsTensors tensors{q, &q_sf, kv_fused, weights, block_tables, seq_lens, schedule_meta};
  LogitsParams params =
      check_logits(CacheFormat::kMxfp4, tensors, max_seq_len, sf_vec_size, dtype, is_kv_sf_interleaved, clean_logits);
  check_logits_out(params, tensors, dtype, out);
  run(params, q);
}

template <RunSchedule run>
Tensor paged_mqa_logits_schedule(const Tensor& seq_lens, int64_t num_workers) {
  ScheduleParams params = check_schedule(seq_lens, num_workers);
  const Tensor out = allocate_schedule(params, seq_lens);
  run(params, seq_lens);
  return out;
}

template <RunSchedule run>
void paged_mqa_logits_schedule_out(const Tensor& seq_lens, int64_t num_workers, Tensor out) {
  ScheduleParams params = check_schedule(seq_lens, num_workers);
  check_schedule_out(params, seq_lens, out);
  run(params, seq_lens);
}

}  // namespace mqa::paged_logits
