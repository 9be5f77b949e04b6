#include "quantize/host.h"

#include "common/check.h"

namespace mqa::quantize {
namespace {

// Offsets over all but the last `inner` dimensions, neighbouring dimensions merged where their strides allow.
RowOffsets row_offsets(const Tensor& tensor, int64_t inner) {
  RowOffsets offsets{0, {}, {}};
  for (int64_t dim = 0; dim < tensor.dim() - inner; ++dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (size == 1) continue;
    if (offsets.dims > 0 && offsets.strides[offsets.dims - 1] == size * stride) {
      offsets.sizes[offsets.dims - 1] *= size;
      offsets.strides[offsets.dims - 1] = stride;
    } else {
      offsets.sizes[offsets.dims] = size;
      offsets.strides[offsets.dims++] = stride;
    }
  }
  if (offsets.dims == 0) offsets = {1, {1}, {0}};
  return offsets;
}

// The shape of q without its last `count` sizes, with `tail` in their place.
std::vector<int64_t> shape_like(const Tensor& q, int64_t count, std::initializer_list<int64_t> tail) {
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim < q.dim() - count; ++dim) shape.push_back(q.size(dim));
  shape.insert(shape.end(), tail);
  return shape;
}

void check_shape_like(const char* op, const char* name, const Tensor& tensor, const char* shape,
                      const std::vector<int64_t>& sizes) {
  bool equal = tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t dim = 0; equal && dim < sizes.size(); ++dim) equal = tensor.size(dim) == sizes[dim];
  if (!equal)
    refuse(op, name, " must have shape ", shape, " = ", list_text(sizes), ", got ", list_text(tensor.sizes()));
}

// Rows of a tensor [..., D] whose last `inner` dimensions are contiguous.
Rows check_rows(const char* op, const char* name, const Tensor& tensor, CacheFormat format, int inner) {
  check_dtype(op, name, tensor, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  Rows rows{};
  rows.head_dim = tensor.size(tensor.dim() - 1);
  const std::string what = std::string(name) + " must have D";
  if (format == CacheFormat::kFp8) {
    check_choice(op, what.c_str(), rows.head_dim, {32, 64, 128});
  } else {
    check_choice(op, what.c_str(), rows.head_dim, {64, 128});
  }
  check_inner_contiguous(op, name, tensor, inner);
  rows.count = 1;
  for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) rows.count *= tensor.size(dim);
  rows.data = tensor.const_data_ptr();
  rows.type = float_type(tensor.scalar_type());
  rows.offsets = row_offsets(tensor, 1);
  return rows;
}

Rows check_queries(const char* op, const Tensor& q, CacheFormat format) {
  if (q.dim() < 2 || q.dim() > 2 + kMaxLeadingDims) {
    refuse(op, "q must have shape [..., H, D] with up to ", kMaxLeadingDims, " leading dimensions, got ",
           list_text(q.sizes()));
  }
  return check_rows(op, "q", q, format, 2);
}

// A tensor to be written, whose last `inner` dimensions are contiguous.
void check_written(const char* op, const char* name, const Tensor& tensor, const char* shape,
                   const std::vector<int64_t>& sizes, std::initializer_list<ScalarType> dtypes, int inner,
                   const char* reference_name, const Tensor& reference) {
  check_device(op, name, tensor, reference_name, reference);
  check_dtype(op, name, tensor, dtypes);
  check_shape_like(op, name, tensor, shape, sizes);
  check_inner_contiguous(op, name, tensor, inner);
  check_no_internal_overlap(op, name, tensor);
}

// What the ops of a cache format are called, and what a gather gives.
struct Names {
  const char *quantize_k, *gather_k;
  const char *k_shape, *scale;
  ScalarType k_type, scale_type;
};
const Names& names_of(CacheFormat format) {
  static constexpr Names kFp8{"quantize_k_cache_fp8",    "gather_k_cache_fp8", "[total_tokens, D]", "k_scale",
                              ScalarType::Float8_e4m3fn, ScalarType::Float};
  static constexpr Names kMxfp4{"quantize_k_cache_mxfp4", "gather_k_cache_mxfp4", "[total_tokens, D/2]", "k_sf",
                                ScalarType::Byte,         ScalarType::Int};
  return format == CacheFormat::kFp8 ? kFp8 : kMxfp4;
}

void set_quantize_q_fp8_out(QuantizeQFp8Params& p, const Tensor& q_fp8, const Tensor& weights_f32) {
  p.q_fp8 = static_cast<uint8_t*>(q_fp8.mutable_data_ptr());
  p.q_fp8_offsets = row_offsets(q_fp8, 1);
  p.weights_f32 = weights_f32.mutable_data_ptr<float>();
  p.weights_f32_offsets = row_offsets(weights_f32, 0);
}

void set_quantize_q_mxfp4_out(QuantizeQMxfp4Params& p, const Tensor& q_fp4, const Tensor& q_sf) {
  p.q_fp4 = static_cast<uint8_t*>(q_fp4.mutable_data_ptr());
  p.q_fp4_offsets = row_offsets(q_fp4, 1);
  p.q_sf = static_cast<uint32_t*>(q_sf.mutable_data_ptr());
  p.q_sf_offsets = row_offsets(q_sf, 0);
}

void set_gather_k_out(GatherKParams& p, const Tensor& k, const Tensor& scale) {
  p.k = static_cast<uint8_t*>(k.mutable_data_ptr());
  p.k_stride = k.stride(0);
  p.k_scale = static_cast<uint32_t*>(scale.mutable_data_ptr());
}

constexpr const char* kQuantizeQFp8 = "quantize_q_fp8";
constexpr const char* kQuantizeQMxfp4 = "quantize_q_mxfp4";

}  // namespace

QuantizeQFp8Params check_quantize_q_fp8(const Tensor& q, const OptionalTensor& weights, bool pow2_scale,
                                        std::optional<double> softmax_scale) {
  const char* op = kQuantizeQFp8;
  QuantizeQFp8Params p{};
  p.q = check_queries(op, q, CacheFormat::kFp8);
  if (weights.has_value()) {
    check_device(op, "weights", *weights, "q", q);
    check_dtype(op, "weights", *weights, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
    check_shape_like(op, "weights", *weights, "[..., H]", shape_like(q, 1, {}));
    check_inner_contiguous(op, "weights", *weights);
    p.weights = weights->const_data_ptr();
    p.weights_type = float_type(weights->scalar_type());
    p.weights_offsets = row_offsets(*weights, 0);
  }
  p.pow2_scale = pow2_scale;
  p.softmax_scale = static_cast<float>(softmax_scale.value_or(1.0));
  return p;
}

void check_quantize_q_fp8_out(QuantizeQFp8Params& p, const Tensor& q, const OptionalTensor& weights,
                              const Tensor& q_fp8, const Tensor& weights_f32) {
  const char* op = kQuantizeQFp8;
  check_written(op, "q_fp8", q_fp8, "[..., H, D]", shape_like(q, 0, {}), {ScalarType::Float8_e4m3fn}, 2, "q", q);
  check_written(op, "weights_f32", weights_f32, "[..., H]", shape_like(q, 1, {}), {ScalarType::Float}, 1, "q", q);
  check_disjoint(op, "q_fp8", q_fp8, "q", q);
  check_disjoint(op, "weights_f32", weights_f32, "q", q);
  if (weights.has_value()) {
    check_disjoint(op, "q_fp8", q_fp8, "weights", *weights);
    check_disjoint(op, "weights_f32", weights_f32, "weights", *weights);
  }
  check_disjoint(op, "weights_f32", weights_f32, "q_fp8", q_fp8);
  set_quantize_q_fp8_out(p, q_fp8, weights_f32);
}

std::tuple<Tensor, Tensor> allocate_quantize_q_fp8(QuantizeQFp8Params& p, const Tensor& q) {
  const Tensor q_fp8 = torch::stable::new_empty(q, shape_like(q, 0, {}), ScalarType::Float8_e4m3fn);
  const Tensor weights_f32 = torch::stable::new_empty(q, shape_like(q, 1, {}), ScalarType::Float);
  set_quantize_q_fp8_out(p, q_fp8, weights_f32);
  return {q_fp8, weights_f32};
}

QuantizeQMxfp4Params check_quantize_q_mxfp4(const Tensor& q) {
  QuantizeQMxfp4Params p{};
  p.q = check_queries(kQuantizeQMxfp4, q, CacheFormat::kMxfp4);
  return p;
}

void check_quantize_q_mxfp4_out(QuantizeQMxfp4Params& p, const Tensor& q, const Tensor& q_fp4, const Tensor& q_sf) {
  const char* op = kQuantizeQMxfp4;
  check_written(op, "q_fp4", q_fp4, "[..., H, D/2]", shape_like(q, 1, {p.q.head_dim / 2}),
                {ScalarType::Byte, ScalarType::Float4_e2m1fn_x2}, 2, "q", q);
  check_written(op, "q_sf", q_sf, "[..., H]", shape_like(q, 1, {}), {ScalarType::Int}, 1, "q", q);
  check_disjoint(op, "q_fp4", q_fp4, "q", q);
  check_disjoint(op, "q_sf", q_sf, "q", q);
  check_disjoint(op, "q_sf", q_sf, "q_fp4", q_fp4);
  set_quantize_q_mxfp4_out(p, q_fp4, q_sf);
}

std::tuple<Tensor, Tensor> allocate_quantize_q_mxfp4(QuantizeQMxfp4Params& p, const Tensor& q) {
  const Tensor q_fp4 = torch::stable::new_empty(q, shape_like(q, 1, {p.q.head_dim / 2}), ScalarType::Byte);
  const Tensor q_sf = torch::stable::new_empty(q, shape_like(q, 1, {}), ScalarType::Int);
  set_quantize_q_mxfp4_out(p, q_fp4, q_sf);
  return {q_fp4, q_sf};
}

QuantizeKParams check_quantize_k(CacheFormat format, const Tensor& k, const Tensor& slot_mapping,
                                 const Tensor& kv_fused, bool interleaved_scales) {
  const char* op = names_of(format).quantize_k;
  QuantizeKParams p{};
  check_rank(op, "k", k, 2, "[tokens, D]");
  p.k = check_rows(op, "k", k, format, 1);
  check_range(op, "k must have tokens", p.k.count, 0, INT32_MAX);

  check_device(op, "slot_mapping", slot_mapping, "k", k);
  check_dtype(op, "slot_mapping", slot_mapping, {ScalarType::Long});
  check_shape(op, "slot_mapping", slot_mapping, "[tokens]", {p.k.count});
  check_inner_contiguous(op, "slot_mapping", slot_mapping);

  check_device(op, "kv_fused", kv_fused, "k", k);
  p.cache = check_cache(op, "kv_fused", kv_fused, format, p.k.head_dim, interleaved_scales);
  check_no_internal_overlap(op, "kv_fused", kv_fused);
  check_disjoint(op, "kv_fused", kv_fused, "k", k);
  check_disjoint(op, "kv_fused", kv_fused, "slot_mapping", slot_mapping);

  p.slots = slot_mapping.const_data_ptr<int64_t>();
  p.written = kv_fused.mutable_data_ptr<uint8_t>();
  return p;
}

GatherKParams check_gather_k(CacheFormat format, const Tensor& kv_fused, const Tensor& block_tables,
                             const Tensor& cu_seq_lens, int64_t total_tokens, bool interleaved_scales) {
  const char* op = names_of(format).gather_k;
  GatherKParams p{};
  if (format == CacheFormat::kFp8) {
    check_rank(op, "kv_fused", kv_fused, 4, "[blocks, S, 1, D + 4]");
    check_choice(op, "kv_fused must have D + 4", kv_fused.size(3), {36, 68, 132});
  } else {
    check_rank(op, "kv_fused", kv_fused, 4, "[blocks, S, 1, D/2 + D/32]");
    check_choice(op, "kv_fused must have D/2 + D/32", kv_fused.size(3), {34, 68});
  }
  const int64_t head_dim = format == CacheFormat::kFp8 ? kv_fused.size(3) - 4 : kv_fused.size(3) / 17 * 32;
  p.cache = check_cache(op, "kv_fused", kv_fused, format, head_dim, interleaved_scales);

  check_device(op, "block_tables", block_tables, "kv_fused", kv_fused);
  check_rank(op, "block_tables", block_tables, 2, "[B, W]");
  check_dtype(op, "block_tables", block_tables, {ScalarType::Int});
  check_inner_contiguous(op, "block_tables", block_tables);
  p.batch = block_tables.size(0);
  p.table_width = block_tables.size(1);

  check_device(op, "cu_seq_lens", cu_seq_lens, "kv_fused", kv_fused);
  check_dtype(op, "cu_seq_lens", cu_seq_lens, {ScalarType::Int});
  check_shape(op, "cu_seq_lens", cu_seq_lens, "[B + 1]", {p.batch + 1});
  check_inner_contiguous(op, "cu_seq_lens", cu_seq_lens);

  check_range(op, "total_tokens must be", total_tokens, 0, INT32_MAX);
  p.total_tokens = total_tokens;
  p.block_tables = block_tables.const_data_ptr<int32_t>();
  p.table_stride = block_tables.stride(0);
  p.cu_seq_lens = cu_seq_lens.const_data_ptr<int32_t>();
  return p;
}

void check_gather_k_out(CacheFormat format, GatherKParams& p, const Tensor& kv_fused, const Tensor& block_tables,
                        const Tensor& cu_seq_lens, const Tensor& k, const Tensor& scale) {
  const Names& names = names_of(format);
  const char* op = names.gather_k;
  check_device(op, "k", k, "kv_fused", kv_fused);
  if (format == CacheFormat::kFp8) {
    check_dtype(op, "k", k, {names.k_type});
  } else {
    check_dtype(op, "k", k, {names.k_type, ScalarType::Float4_e2m1fn_x2});
  }
  check_shape(op, "k", k, names.k_shape, {p.total_tokens, p.cache.value_bytes});
  check_inner_contiguous(op, "k", k);
  check_no_internal_overlap(op, "k", k);
  check_device(op, names.scale, scale, "kv_fused", kv_fused);
  check_dtype(op, names.scale, scale, {names.scale_type});
  check_shape(op, names.scale, scale, "[total_tokens]", {p.total_tokens});
  check_inner_contiguous(op, names.scale, scale);
  const Tensor* outputs[] = {&k, &scale};
  const char* output_names[] = {"k", names.scale};
  for (int i = 0; i < 2; ++i) {
    check_disjoint(op, output_names[i], *outputs[i], "kv_fused", kv_fused);
    check_disjoint(op, output_names[i], *outputs[i], "block_tables", block_tables);
    check_disjoint(op, output_names[i], *outputs[i], "cu_seq_lens", cu_seq_lens);
  }
  check_disjoint(op, names.scale, scale, "k", k);
  set_gather_k_out(p, k, scale);
}

std::tuple<Tensor, Tensor> allocate_gather_k(CacheFormat format, GatherKParams& p, const Tensor& kv_fused) {
  const Names& names = names_of(format);
  const Tensor k = torch::stable::new_empty(kv_fused, {p.total_tokens, p.cache.value_bytes}, names.k_type);
  const Tensor scale = torch::stable::new_empty(kv_fused, {p.total_tokens}, names.scale_type);
  set_gather_k_out(p, k, scale);
  return {k, scale};
}

}  // namespace mqa::quantize
