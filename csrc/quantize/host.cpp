#include "quantize/host.h"

#include "common/check.h"

namespace mqa::quantize {
namespace {

constexpr const char* kQuantizeQ = "quantize_q_fp8";
constexpr const char* kQuantizeK = "quantize_k_cache_fp8";
constexpr const char* kGatherK = "gather_k_cache_fp8";

// Offsets over all but the last `inner` dimensions, neighbouring dimensions merged where their strides allow.
TokenOffsets token_offsets(const Tensor& tensor, int64_t inner) {
  TokenOffsets offsets{0, {}, {}};
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

}  // namespace

QuantizeQParams check_quantize_q(const Tensor& q, const OptionalTensor& weights, bool pow2_scale,
                                 std::optional<double> softmax_scale) {
  const char* op = kQuantizeQ;
  QuantizeQParams p{};
  if (q.dim() < 2 || q.dim() > 2 + kMaxLeadingDims) {
    refuse(op, "q must have shape [..., H, D] with up to ", kMaxLeadingDims, " leading dimensions, got ",
           list_text(q.sizes()));
  }
  check_dtype(op, "q", q, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  p.heads = q.size(q.dim() - 2);
  p.head_dim = q.size(q.dim() - 1);
  check_choice(op, "q must have D", p.head_dim, {32, 64, 128});
  check_inner_contiguous(op, "q", q, 2);
  p.tokens = 1;
  for (int64_t dim = 0; dim < q.dim() - 2; ++dim) p.tokens *= q.size(dim);

  if (weights.has_value()) {
    check_device(op, "weights", *weights, "q", q);
    check_dtype(op, "weights", *weights, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
    check_shape_like(op, "weights", *weights, "[..., H]", shape_like(q, 1, {}));
    check_inner_contiguous(op, "weights", *weights);
    p.weights = weights->const_data_ptr();
    p.weights_type = float_type(weights->scalar_type());
    p.weights_offsets = token_offsets(*weights, 1);
  }
  p.q = q.const_data_ptr();
  p.q_type = float_type(q.scalar_type());
  p.q_offsets = token_offsets(q, 2);
  p.pow2_scale = pow2_scale;
  p.softmax_scale = static_cast<float>(softmax_scale.value_or(1.0));
  return p;
}

void check_quantize_q_out(QuantizeQParams& p, const Tensor& q, const OptionalTensor& weights, const Tensor& q_fp8,
                          const Tensor& weights_f32) {
  const char* op = kQuantizeQ;
  check_device(op, "q_fp8", q_fp8, "q", q);
  check_dtype(op, "q_fp8", q_fp8, {ScalarType::Float8_e4m3fn});
  check_shape_like(op, "q_fp8", q_fp8, "[..., H, D]", shape_like(q, 0, {}));
  check_inner_contiguous(op, "q_fp8", q_fp8, 2);
  check_no_internal_overlap(op, "q_fp8", q_fp8);
  check_device(op, "weights_f32", weights_f32, "q", q);
  check_dtype(op, "weights_f32", weights_f32, {ScalarType::Float});
  check_shape_like(op, "weights_f32", weights_f32, "[..., H]", shape_like(q, 1, {}));
  check_inner_contiguous(op, "weights_f32", weights_f32);
  check_no_internal_overlap(op, "weights_f32", weights_f32);
  check_disjoint(op, "q_fp8", q_fp8, "q", q);
  check_disjoint(op, "weights_f32", weights_f32, "q", q);
  if (weights.has_value()) {
    check_disjoint(op, "q_fp8", q_fp8, "weights", *weights);
    check_disjoint(op, "weights_f32", weights_f32, "weights", *weights);
  }
  check_disjoint(op, "weights_f32", weights_f32, "q_fp8", q_fp8);
  p.q_fp8 = static_cast<uint8_t*>(q_fp8.mutable_data_ptr());
  p.q_fp8_offsets = token_offsets(q_fp8, 2);
  p.weights_f32 = weights_f32.mutable_data_ptr<float>();
  p.weights_f32_offsets = token_offsets(weights_f32, 1);
}

std::tuple<Tensor, Tensor> allocate_quantize_q(QuantizeQParams& p, const Tensor& q) {
  const Tensor q_fp8 = torch::stable::new_empty(q, shape_like(q, 0, {}), ScalarType::Float8_e4m3fn);
  const Tensor weights_f32 = torch::stable::new_empty(q, shape_like(q, 1, {}), ScalarType::Float);
  p.q_fp8 = static_cast<uint8_t*>(q_fp8.mutable_data_ptr());
  p.q_fp8_offsets = token_offsets(q_fp8, 2);
  p.weights_f32 = weights_f32.mutable_data_ptr<float>();
  p.weights_f32_offsets = token_offsets(weights_f32, 1);
  return {q_fp8, weights_f32};
}

QuantizeKParams check_quantize_k(const Tensor& k, const Tensor& slot_mapping, const Tensor& kv_fused, bool pow2_scale) {
  const char* op = kQuantizeK;
  QuantizeKParams p{};
  check_rank(op, "k", k, 2, "[tokens, D]");
  check_dtype(op, "k", k, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  p.tokens = k.size(0);
  p.head_dim = k.size(1);
  // Claim tags number tokens with 31 bits.
  check_range(op, "k must have tokens", p.tokens, 0, INT32_MAX);
  check_choice(op, "k must have D", p.head_dim, {32, 64, 128});
  check_inner_contiguous(op, "k", k);

  check_device(op, "slot_mapping", slot_mapping, "k", k);
  check_dtype(op, "slot_mapping", slot_mapping, {ScalarType::Long});
  check_shape(op, "slot_mapping", slot_mapping, "[tokens]", {p.tokens});
  check_inner_contiguous(op, "slot_mapping", slot_mapping);

  check_device(op, "kv_fused", kv_fused, "k", k);
  p.cache = check_fp8_cache(op, "kv_fused", kv_fused, p.head_dim);
  check_no_internal_overlap(op, "kv_fused", kv_fused);
  check_disjoint(op, "kv_fused", kv_fused, "k", k);
  check_disjoint(op, "kv_fused", kv_fused, "slot_mapping", slot_mapping);

  p.k = k.const_data_ptr();
  p.k_type = float_type(k.scalar_type());
  p.k_stride = k.stride(0);
  p.slots = slot_mapping.const_data_ptr<int64_t>();
  p.written = kv_fused.mutable_data_ptr<uint8_t>();
  p.pow2_scale = pow2_scale;
  return p;
}

GatherKParams check_gather_k(const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                             int64_t total_tokens) {
  const char* op = kGatherK;
  GatherKParams p{};
  check_rank(op, "kv_fused", kv_fused, 4, "[blocks, S, 1, D + 4]");
  check_choice(op, "kv_fused must have D + 4", kv_fused.size(3), {36, 68, 132});
  p.head_dim = kv_fused.size(3) - 4;
  p.cache = check_fp8_cache(op, "kv_fused", kv_fused, p.head_dim);

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

void check_gather_k_out(GatherKParams& p, const Tensor& kv_fused, const Tensor& block_tables, const Tensor& cu_seq_lens,
                        const Tensor& k, const Tensor& k_scale) {
  const char* op = kGatherK;
  check_device(op, "k", k, "kv_fused", kv_fused);
  check_dtype(op, "k", k, {ScalarType::Float8_e4m3fn});
  check_shape(op, "k", k, "[total_tokens, D]", {p.total_tokens, p.head_dim});
  check_inner_contiguous(op, "k", k);
  check_no_internal_overlap(op, "k", k);
  check_device(op, "k_scale", k_scale, "kv_fused", kv_fused);
  check_dtype(op, "k_scale", k_scale, {ScalarType::Float});
  check_shape(op, "k_scale", k_scale, "[total_tokens]", {p.total_tokens});
  check_inner_contiguous(op, "k_scale", k_scale);
  const Tensor* outputs[] = {&k, &k_scale};
  const char* names[] = {"k", "k_scale"};
  for (int i = 0; i < 2; ++i) {
    check_disjoint(op, names[i], *outputs[i], "kv_fused", kv_fused);
    check_disjoint(op, names[i], *outputs[i], "block_tables", block_tables);
    check_disjoint(op, names[i], *outputs[i], "cu_seq_lens", cu_seq_lens);
  }
  check_disjoint(op, "k_scale", k_scale, "k", k);
  p.k = static_cast<uint8_t*>(k.mutable_data_ptr());
  p.k_stride = k.stride(0);
  p.k_scale = k_scale.mutable_data_ptr<float>();
}

std::tuple<Tensor, Tensor> allocate_gather_k(GatherKParams& p, const Tensor& kv_fused) {
  const Tensor k = torch::stable::new_empty(kv_fused, {p.total_tokens, p.head_dim}, ScalarType::Float8_e4m3fn);
  const Tensor k_scale = torch::stable::new_empty(kv_fused, {p.total_tokens}, ScalarType::Float);
  p.k = static_cast<uint8_t*>(k.mutable_data_ptr());
  p.k_stride = k.stride(0);
  p.k_scale = k_scale.mutable_data_ptr<float>();
  return {k, k_scale};
}

}  // namespace mqa::quantize
