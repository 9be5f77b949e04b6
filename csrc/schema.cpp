// Every operator of torch.ops.mqa: the table of contents. Kernels are registered at the foot of the files that hold
// them.
//
// Each op has a functional overload, whose results are fresh and alias no input, and `.out`, which writes only the
// tensors marked (a!), (b!) and returns nothing; cache writers have one overload that writes their cache. A published
// schema never changes: a new overload is added.
#include "common/stable.h"

// output_dtype None is the op's own default, float32 for fp8 and bfloat16 for fp4: a ScalarType default would be stored
// as an int, which AOTInductor packages then refuse to load.
STABLE_TORCH_LIBRARY(mqa, m) {
  // paged_logits
  m.def(
      "fp8_paged_mqa_logits(Tensor q, Tensor kv_fused, Tensor weights, Tensor block_tables, Tensor seq_lens, "
      "SymInt max_seq_len, *, ScalarType? output_dtype=None, Tensor? schedule_meta=None, bool clean_logits=False) "
      "-> Tensor");
  m.def(
      "fp8_paged_mqa_logits.out(Tensor q, Tensor kv_fused, Tensor weights, Tensor block_tables, Tensor seq_lens, "
      "SymInt max_seq_len, *, ScalarType? output_dtype=None, Tensor? schedule_meta=None, bool clean_logits=False, "
      "Tensor(a!) out) -> ()");
  m.def(
      "fp4_paged_mqa_logits(Tensor q, Tensor q_sf, Tensor kv_fused, Tensor weights, Tensor block_tables, "
      "Tensor seq_lens, SymInt max_seq_len, *, int sf_vec_size=32, ScalarType? output_dtype=None, "
      "bool is_kv_sf_interleaved=False, Tensor? schedule_meta=None, bool clean_logits=False) -> Tensor");
  m.def(
      "fp4_paged_mqa_logits.out(Tensor q, Tensor q_sf, Tensor kv_fused, Tensor weights, Tensor block_tables, "
      "Tensor seq_lens, SymInt max_seq_len, *, int sf_vec_size=32, ScalarType? output_dtype=None, "
      "bool is_kv_sf_interleaved=False, Tensor? schedule_meta=None, bool clean_logits=False, Tensor(a!) out) -> ()");
  m.def("paged_mqa_logits_schedule(Tensor seq_lens, SymInt num_workers) -> Tensor");
  m.def("paged_mqa_logits_schedule.out(Tensor seq_lens, SymInt num_workers, *, Tensor(a!) out) -> ()");

  // selection
  m.def(
      "topk_indices(Tensor logits, Tensor lengths, int k, *, Tensor? starts=None, Tensor? block_tables=None, "
      "int? block_size=None) -> Tensor");
  m.def(
      "topk_indices.out(Tensor logits, Tensor lengths, int k, *, Tensor? starts=None, Tensor? block_tables=None, "
      "int? block_size=None, Tensor(a!) out) -> ()");

  // quantize
  m.def(
      "quantize_q_fp8(Tensor q, Tensor? weights=None, *, bool pow2_scale=True, float? softmax_scale=None) "
      "-> (Tensor q_fp8, Tensor weights_f32)");
  m.def(
      "quantize_q_fp8.out(Tensor q, Tensor? weights=None, *, bool pow2_scale=True, float? softmax_scale=None, "
      "Tensor(a!) q_fp8, Tensor(b!) weights_f32) -> ()");
  m.def("quantize_q_mxfp4(Tensor q) -> (Tensor q_fp4, Tensor q_sf)");
  m.def("quantize_q_mxfp4.out(Tensor q, *, Tensor(a!) q_fp4, Tensor(b!) q_sf) -> ()");
  m.def("quantize_k_cache_fp8(Tensor k, Tensor slot_mapping, Tensor(a!) kv_fused, *, bool pow2_scale=True) -> ()");
  m.def(
      "quantize_k_cache_mxfp4(Tensor k, Tensor slot_mapping, Tensor(a!) kv_fused, *, "
      "bool is_kv_sf_interleaved=False) -> ()");
  m.def(
      "gather_k_cache_fp8(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt total_tokens) "
      "-> (Tensor k, Tensor k_scale)");
  m.def(
      "gather_k_cache_fp8.out(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt total_tokens, *, "
      "Tensor(a!) k, Tensor(b!) k_scale) -> ()");
  m.def(
      "gather_k_cache_mxfp4(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt total_tokens, *, "
      "bool is_kv_sf_interleaved=False) -> (Tensor k, Tensor k_sf)");
  m.def(
      "gather_k_cache_mxfp4.out(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt total_tokens, *, "
      "bool is_kv_sf_interleaved=False, Tensor(a!) k, Tensor(b!) k_sf) -> ()");
}
