// Argument checks, allocation and parameters of the paged-logits ops; compiled into the CPU and the CUDA library, which
// both reject the same arguments in the same words. The op templates at the foot join them to a library's kernels.
#pragma once

#include "common/stable.h"
#include "paged_logits/params.h"

namespace mqa::paged_logits {

LogitsParams check_fp8_logits(const Tensor& q, const Tensor& kv_fused, const Tensor& weights,
                              const Tensor& block_tables, const Tensor& seq_lens, int64_t max_seq_len,
                              ScalarType output_dtype, const OptionalTensor& schedule_meta, bool clean_logits);
void check_logits_out(LogitsParams& params, const Tensor& q, const Tensor& kv_fused, const Tensor& weights,
                      const Tensor& block_tables, const Tensor& seq_lens, ScalarType output_dtype,
                      const OptionalTensor& schedule_meta, const Tensor& out);
// The padded buffer of a functional call; the result is its first max_seq_len columns.
Tensor allocate_logits(LogitsParams& params, const Tensor& q, ScalarType output_dtype);

ScheduleParams check_schedule(const Tensor& seq_lens, int64_t num_workers);
void check_schedule_out(ScheduleParams& params, const Tensor& seq_lens, const Tensor& out);
Tensor allocate_schedule(ScheduleParams& params, const Tensor& seq_lens);

// A library's kernels; `anchor` is a tensor on the device to run on.
using RunLogits = void (*)(const LogitsParams& params, const Tensor& anchor);
using RunSchedule = void (*)(const ScheduleParams& params, const Tensor& anchor);

template <RunLogits run>
Tensor fp8_paged_mqa_logits(const Tensor& q, const Tensor& kv_fused, const Tensor& weights, const Tensor& block_tables,
                            const Tensor& seq_lens, int64_t max_seq_len, std::optional<ScalarType> output_dtype,
                            OptionalTensor schedule_meta, bool clean_logits) {
  const ScalarType dtype = output_dtype.value_or(ScalarType::Float);
  LogitsParams params =
      check_fp8_logits(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, dtype, schedule_meta, clean_logits);
  Tensor buffer = allocate_logits(params, q, dtype);
  run(params, q);
  return torch::stable::narrow(buffer, 1, 0, max_seq_len);
}

template <RunLogits run>
void fp8_paged_mqa_logits_out(const Tensor& q, const Tensor& kv_fused, const Tensor& weights,
                              const Tensor& block_tables, const Tensor& seq_lens, int64_t max_seq_len,
                              std::optional<ScalarType> output_dtype, OptionalTensor schedule_meta, bool clean_logits,
                              Tensor out) {
  const ScalarType dtype = output_dtype.value_or(ScalarType::Float);
  LogitsParams params =
      check_fp8_logits(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, dtype, schedule_meta, clean_logits);
  check_logits_out(params, q, kv_fused, weights, block_tables, seq_lens, dtype, schedule_meta, out);
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
