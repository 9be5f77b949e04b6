#include "selection/host.h"

#include "common/check.h"

namespace mqa::selection {
namespace {

constexpr const char* kTopk = "topk_indices";

// One int32 per row.
void check_per_row(const char* name, const Tensor& tensor, const Tensor& logits) {
  check_device(kTopk, name, tensor, "logits", logits);
  check_dtype(kTopk, name, tensor, {ScalarType::Int});
  check_shape(kTopk, name, tensor, "[rows]", {logits.size(0)});
}

}  // namespace

TopkParams check_topk(const TopkArguments& in) {
  const char* op = kTopk;
  TopkParams p{};
  check_rank(op, "logits", in.logits, 2, "[rows, width]");
  check_dtype(op, "logits", in.logits, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  p.rows = in.logits.size(0);
  p.width = in.logits.size(1);
  // Positions are int32.
  check_range(op, "logits must have width", p.width, 0, INT32_MAX);
  check_inner_contiguous(op, "logits", in.logits);
  p.logits = in.logits.const_data_ptr();
  p.type = float_type(in.logits.scalar_type());
  p.row_stride = in.logits.stride(0);

  check_per_row("lengths", in.lengths, in.logits);
  p.lengths = in.lengths.const_data_ptr<int32_t>();
  p.lengths_stride = in.lengths.stride(0);

  check_range(op, "k must be", in.k, 1, kMaxK);
  p.k = in.k;

  if (in.starts.has_value()) {
    check_per_row("starts", *in.starts, in.logits);
    p.starts = in.starts->const_data_ptr<int32_t>();
    p.starts_stride = in.starts->stride(0);
  }

  if (in.block_tables.has_value() != in.block_size.has_value()) {
    refuse(op, "block_size must be given with block_tables and not without, got ",
           in.block_size.has_value() ? std::to_string(*in.block_size) : "None");
  }
  if (in.block_tables.has_value()) {
    const Tensor& table = *in.block_tables;
    check_device(op, "block_tables", table, "logits", in.logits);
    check_rank(op, "block_tables", table, 2, "[tables, W]");
    check_dtype(op, "block_tables", table, {ScalarType::Int});
    const int64_t tables = table.size(0);
    if (tables == 0 ? p.rows != 0 : p.rows % tables != 0) {
      refuse(op, "block_tables must have a number of rows of which that of logits, ", p.rows, ", is a multiple, got ",
             tables);
    }
    check_inner_contiguous(op, "block_tables", table);
    check_range(op, "block_size must be", *in.block_size, 1, INT32_MAX);
    p.block_tables = table.const_data_ptr<int32_t>();
    p.table_width = table.size(1);
    p.table_stride = table.stride(0);
    p.rows_per_table = tables == 0 ? 1 : p.rows / tables;
    p.block_size = static_cast<uint32_t>(*in.block_size);
  }
  return p;
}

void check_topk_out(TopkParams& p, const TopkArguments& in, const Tensor& out) {
  const char* op = kTopk;
  check_device(op, "out", out, "logits", in.logits);
  check_dtype(op, "out", out, {ScalarType::Int});
  check_shape(op, "out", out, "[rows, k]", {p.rows, p.k});
  check_inner_contiguous(op, "out", out);
  check_no_internal_overlap(op, "out", out);
  check_disjoint(op, "out", out, "logits", in.logits);
  check_disjoint(op, "out", out, "lengths", in.lengths);
  if (in.starts.has_value()) check_disjoint(op, "out", out, "starts", *in.starts);
  if (in.block_tables.has_value()) check_disjoint(op, "out", out, "block_tables", *in.block_tables);
  p.out = out.mutable_data_ptr<int32_t>();
  p.out_stride = out.stride(0);
}

Tensor allocate_topk(TopkParams& p, const Tensor& logits) {
  const Tensor out = torch::stable::new_empty(logits, {p.rows, p.k}, ScalarType::Int);
  p.out = out.mutable_data_ptr<int32_t>();
  p.out_stride = out.stride(0);
  return out;
}

}  // namespace mqa::selection
