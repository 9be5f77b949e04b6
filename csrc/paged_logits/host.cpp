#include "paged_logits/host.h"

#include <algorithm>

#include "common/check.h"

namespace mqa::paged_logits {
namespace {

int64_t padded_seq_len(int64_t max_seq_len) { return (max_seq_len + kUnitTokens - 1) / kUnitTokens * kUnitTokens; }

Lengths lengths_of(const Tensor& seq_lens) {
  const bool per_slot = seq_lens.dim() == 2;
  return {seq_lens.const_data_ptr<int32_t>(), seq_lens.size(0), per_slot ? seq_lens.size(1) : 1, seq_lens.stride(0),
          per_slot ? seq_lens.stride(1) : 0};
}

constexpr const char* kSchedule = "paged_mqa_logits_schedule";

const char* logits_op(CacheFormat format) {
  return format == CacheFormat::kFp8 ? "fp8_paged_mqa_logits" : "fp4_paged_mqa_logits";
}

// q and its scales.
void check_queries(LogitsParams& p, const LogitsTensors& in, int64_t sf_vec_size) {
  const char* op = logits_op(p.format);
  const bool fp8 = p.format == CacheFormat::kFp8;
  const Tensor& q = in.q;
  check_rank(op, "q", q, 4, fp8 ? "[B, n, H, D]" : "[B, n, H, D/2]");
  if (fp8) {
    check_dtype(op, "q", q, {ScalarType::Float8_e4m3fn});
  } else {
    check_dtype(op, "q", q, {ScalarType::Byte, ScalarType::Float4_e2m1fn_x2});
  }
  p.batch = q.size(0);
  p.next_n = q.size(1);
  p.heads = q.size(2);
  p.head_dim = fp8 ? q.size(3) : 2 * q.size(3);
  check_range(op, "q must have n (query slots per request, drafts + 1)", p.next_n, 1, 16);
  check_choice(op, "q must have H", p.heads, {8, 16, 32, 64, 128});
  if (fp8) {
    check_choice(op, "q must have D", p.head_dim, {32, 64, 128});
  } else {
    check_choice(op, "q must have D/2", q.size(3), {32, 64});
  }
  check_inner_contiguous(op, "q", q, 2);
  p.q = static_cast<const uint8_t*>(q.const_data_ptr());
  p.q_batch_stride = q.stride(0);
  p.q_slot_stride = q.stride(1);
  if (fp8) return;

  const Tensor& q_sf = *in.q_sf;
  check_device(op, "q_sf", q_sf, "q", q);
  check_dtype(op, "q_sf", q_sf, {ScalarType::Int});
  check_shape(op, "q_sf", q_sf, "[B, n, H]", {p.batch, p.next_n, p.heads});
  check_inner_contiguous(op, "q_sf", q_sf);
  check_choice(op, "sf_vec_size must be", sf_vec_size, {32});
  p.q_scales = static_cast<const uint32_t*>(q_sf.const_data_ptr());
  p.q_scales_batch_stride = q_sf.stride(0);
  p.q_scales_slot_stride = q_sf.stride(1);
}

}  // namespace

LogitsParams check_logits(CacheFormat format, const LogitsTensors& in, int64_t max_seq_len, int64_t sf_vec_size,
                          ScalarType output_dtype, bool interleaved_scales, bool clean_logits) {
  const char* op = logits_op(format);
  LogitsParams p{};
  p.format = format;
  check_queries(p, in, sf_vec_size);

  check_device(op, "kv_fused", in.kv_fused, "q", in.q);
  p.cache = check_cache(op, "kv_fused", in.kv_fused, format, p.head_dim, interleaved_scales);

  check_device(op, "weights", in.weights, "q", in.q);
  check_dtype(op, "weights", in.weights, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check_shape(op, "weights", in.weights, "[B*n, H]", {p.batch * p.next_n, p.heads});
  check_inner_contiguous(op, "weights", in.weights);

  check_device(op, "block_tables", in.block_tables, "q", in.q);
  check_rank(op, "block_tables", in.block_tables, 2, "[B, W]");
  check_dtype(op, "block_tables", in.block_tables, {ScalarType::Int});
  p.table_width = in.block_tables.size(1);
  check_shape(op, "block_tables", in.block_tables, "[B, W]", {p.batch, p.table_width});
  check_inner_contiguous(op, "block_tables", in.block_tables);

  check_device(op, "seq_lens", in.seq_lens, "q", in.q);
  check_dtype(op, "seq_lens", in.seq_lens, {ScalarType::Int});
  p.lengths_per_slot = in.seq_lens.dim() == 2;
  if (p.lengths_per_slot) {
    check_shape(op, "seq_lens", in.seq_lens, "[B, n]", {p.batch, p.next_n});
  } else {
    check_shape(op, "seq_lens", in.seq_lens, "[B]", {p.batch});
  }

  // Lengths are int32, so no position past this one can be live.
  check_range(op, "max_seq_len must be", max_seq_len, 0, INT32_MAX);
  p.max_seq_len = max_seq_len;
  check_dtype(op, "output_dtype", output_dtype, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});

  if (in.schedule_meta.has_value()) {
    const Tensor& schedule = *in.schedule_meta;
    check_device(op, "schedule_meta", schedule, "q", in.q);
    check_dtype(op, "schedule_meta", schedule, {ScalarType::Int});
    if (schedule.dim() != 2 || schedule.size(0) < 2 || schedule.size(1) != 2) {
      refuse(op, "schedule_meta must have shape [R >= 2, 2], got ", list_text(schedule.sizes()));
    }
    check_inner_contiguous(op, "schedule_meta", schedule, 2);
  }

  p.capacity = std::min(max_seq_len, p.table_width * p.cache.block_size);
  p.weights = in.weights.const_data_ptr();
  p.weights_type = float_type(in.weights.scalar_type());
  p.weights_stride = in.weights.stride(0);
  p.block_tables = in.block_tables.const_data_ptr<int32_t>();
  p.table_stride = in.block_tables.stride(0);
  p.lengths = lengths_of(in.seq_lens);
  p.schedule = in.schedule_meta.has_value() ? in.schedule_meta->const_data_ptr<int32_t>() : nullptr;
  p.workers = in.schedule_meta.has_value() ? in.schedule_meta->size(0) - 1 : 0;
  p.out_type = float_type(output_dtype);
  p.clean = clean_logits;
  return p;
}

void check_logits_out(LogitsParams& p, const LogitsTensors& in, ScalarType output_dtype, const Tensor& out) {
  const char* op = logits_op(p.format);
  const int64_t rows = p.batch * p.next_n;
  const int64_t columns = padded_seq_len(p.max_seq_len);
  check_device(op, "out", out, "q", in.q);
  check_dtype(op, "out", out, {output_dtype});
  if (out.dim() != 2 || out.size(0) < rows || out.size(1) < columns) {
    refuse(op, "out must have shape [>= B*n, >= padded_seq_len(max_seq_len)] = [>= ", rows, ", >= ", columns, "], got ",
           list_text(out.sizes()));
  }
  check_inner_contiguous(op, "out", out);
  check_no_internal_overlap(op, "out", out);
  check_disjoint(op, "out", out, "q", in.q);
  if (in.q_sf != nullptr) check_disjoint(op, "out", out, "q_sf", *in.q_sf);
  check_disjoint(op, "out", out, "kv_fused", in.kv_fused);
  check_disjoint(op, "out", out, "weights", in.weights);
  check_disjoint(op, "out", out, "block_tables", in.block_tables);
  check_disjoint(op, "out", out, "seq_lens", in.seq_lens);
  if (in.schedule_meta.has_value()) check_disjoint(op, "out", out, "schedule_meta", *in.schedule_meta);
  p.out = out.mutable_data_ptr();
  p.out_stride = out.stride(0);
}

Tensor allocate_logits(LogitsParams& p, const Tensor& q, ScalarType output_dtype) {
  const Tensor buffer = torch::stable::new_empty(q, {p.batch * p.next_n, padded_seq_len(p.max_seq_len)}, output_dtype);
  p.out = buffer.mutable_data_ptr();
  p.out_stride = buffer.stride(0);
  return buffer;
}

ScheduleParams check_schedule(const Tensor& seq_lens, int64_t num_workers) {
  const char* op = kSchedule;
  check_dtype(op, "seq_lens", seq_lens, {ScalarType::Int});
  if (seq_lens.dim() != 1 && seq_lens.dim() != 2) {
    refuse(op, "seq_lens must have shape [B] or [B, n], got ", list_text(seq_lens.sizes()));
  }
  check_range(op, "num_workers must be", num_workers, 1, INT32_MAX);
  return {lengths_of(seq_lens), num_workers, nullptr};
}

void check_schedule_out(ScheduleParams& p, const Tensor& seq_lens, const Tensor& out) {
  const char* op = kSchedule;
  check_device(op, "out", out, "seq_lens", seq_lens);
  check_dtype(op, "out", out, {ScalarType::Int});
  check_shape(op, "out", out, "[num_workers + 1, 2]", {p.workers + 1, 2});
  check_inner_contiguous(op, "out", out, 2);
  check_disjoint(op, "out", out, "seq_lens", seq_lens);
  p.out = out.mutable_data_ptr<int32_t>();
}

Tensor allocate_schedule(ScheduleParams& p, const Tensor& seq_lens) {
  const Tensor out = torch::stable::new_empty(seq_lens, {p.workers + 1, 2}, ScalarType::Int);
  p.out = out.mutable_data_ptr<int32_t>();
  return out;
}

}  // namespace mqa::paged_logits
