"""Fake kernels of the quantisers and cache movers: the rules of csrc/quantize/host.cpp and the shapes it allocates."""

import torch

from ._checks import (
    FLOATS,
    check_choice,
    check_device,
    check_dtype,
    check_fp8_cache,
    check_inner_contiguous,
    check_no_internal_overlap,
    check_range,
    check_rank,
    check_shape,
    require,
)

_INT32_MAX = 2**31 - 1
_MAX_LEADING_DIMS = 8


def _check_quantize_q(q, weights) -> None:
    op = "quantize_q_fp8"
    require(
        op,
        2 <= q.dim() <= 2 + _MAX_LEADING_DIMS,
        lambda: f"q must have shape [..., H, D] with up to {_MAX_LEADING_DIMS} leading dimensions, got {list(q.shape)}",
    )
    check_dtype(op, "q", q.dtype, *FLOATS)
    check_choice(op, "q must have D", q.size(-1), 32, 64, 128)
    check_inner_contiguous(op, "q", q, 2)
    if weights is not None:
        check_device(op, "weights", weights, "q", q)
        check_dtype(op, "weights", weights.dtype, *FLOATS)
        check_shape(op, "weights", weights, "[..., H]", list(q.shape[:-1]))
        check_inner_contiguous(op, "weights", weights)


@torch.library.register_fake("mqa::quantize_q_fp8")
def _(q, weights=None, *, pow2_scale=True, softmax_scale=None):
    _check_quantize_q(q, weights)
    return (
        q.new_empty(q.shape, dtype=torch.float8_e4m3fn),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
    )


@torch.library.register_fake("mqa::quantize_q_fp8.out")
def _(q, weights=None, *, pow2_scale=True, softmax_scale=None, q_fp8, weights_f32):
    op = "quantize_q_fp8"
    _check_quantize_q(q, weights)
    check_device(op, "q_fp8", q_fp8, "q", q)
    check_dtype(op, "q_fp8", q_fp8.dtype, torch.float8_e4m3fn)
    check_shape(op, "q_fp8", q_fp8, "[..., H, D]", list(q.shape))
    check_inner_contiguous(op, "q_fp8", q_fp8, 2)
    check_no_internal_overlap(op, "q_fp8", q_fp8)
    check_device(op, "weights_f32", weights_f32, "q", q)
    check_dtype(op, "weights_f32", weights_f32.dtype, torch.float32)
    check_shape(op, "weights_f32", weights_f32, "[..., H]", list(q.shape[:-1]))
    check_inner_contiguous(op, "weights_f32", weights_f32)
    check_no_internal_overlap(op, "weights_f32", weights_f32)


@torch.library.register_fake("mqa::quantize_k_cache_fp8")
def _(k, slot_mapping, kv_fused, *, pow2_scale=True):
    op = "quantize_k_cache_fp8"
    check_rank(op, "k", k, 2, "[tokens, D]")
    check_dtype(op, "k", k.dtype, *FLOATS)
    check_range(op, "k must have tokens", k.size(0), 0, _INT32_MAX)
    check_choice(op, "k must have D", k.size(1), 32, 64, 128)
    check_inner_contiguous(op, "k", k)
    check_device(op, "slot_mapping", slot_mapping, "k", k)
    check_dtype(op, "slot_mapping", slot_mapping.dtype, torch.int64)
    check_shape(op, "slot_mapping", slot_mapping, "[tokens]", [k.size(0)])
    check_inner_contiguous(op, "slot_mapping", slot_mapping)
    check_device(op, "kv_fused", kv_fused, "k", k)
    check_fp8_cache(op, "kv_fused", kv_fused, k.size(1))
    check_no_internal_overlap(op, "kv_fused", kv_fused)


def _check_gather_k(kv_fused, block_tables, cu_seq_lens, total_tokens) -> None:
    op = "gather_k_cache_fp8"
    check_rank(op, "kv_fused", kv_fused, 4, "[blocks, S, 1, D + 4]")
    check_choice(op, "kv_fused must have D + 4", kv_fused.size(3), 36, 68, 132)
    check_fp8_cache(op, "kv_fused", kv_fused, kv_fused.size(3) - 4)
    check_device(op, "block_tables", block_tables, "kv_fused", kv_fused)
    check_rank(op, "block_tables", block_tables, 2, "[B, W]")
    check_dtype(op, "block_tables", block_tables.dtype, torch.int32)
    check_inner_contiguous(op, "block_tables", block_tables)
    check_device(op, "cu_seq_lens", cu_seq_lens, "kv_fused", kv_fused)
    check_dtype(op, "cu_seq_lens", cu_seq_lens.dtype, torch.int32)
    check_shape(op, "cu_seq_lens", cu_seq_lens, "[B + 1]", [block_tables.size(0) + 1])
    check_inner_contiguous(op, "cu_seq_lens", cu_seq_lens)
    check_range(op, "total_tokens must be", total_tokens, 0, _INT32_MAX)


@torch.library.register_fake("mqa::gather_k_cache_fp8")
def _(kv_fused, block_tables, cu_seq_lens, total_tokens):
    _check_gather_k(kv_fused, block_tables, cu_seq_lens, total_tokens)
    return (
        kv_fused.new_empty((total_tokens, kv_fused.size(3) - 4), dtype=torch.float8_e4m3fn),
        kv_fused.new_empty((total_tokens,), dtype=torch.float32),
    )


@torch.library.register_fake("mqa::gather_k_cache_fp8.out")
def _(kv_fused, block_tables, cu_seq_lens, total_tokens, *, k, k_scale):
    op = "gather_k_cache_fp8"
    _check_gather_k(kv_fused, block_tables, cu_seq_lens, total_tokens)
    check_device(op, "k", k, "kv_fused", kv_fused)
    check_dtype(op, "k", k.dtype, torch.float8_e4m3fn)
    check_shape(op, "k", k, "[total_tokens, D]", [total_tokens, kv_fused.size(3) - 4])
    check_inner_contiguous(op, "k", k)
    check_no_internal_overlap(op, "k", k)
    check_device(op, "k_scale", k_scale, "kv_fused", kv_fused)
    check_dtype(op, "k_scale", k_scale.dtype, torch.float32)
    check_shape(op, "k_scale", k_scale, "[total_tokens]", [total_tokens])
    check_inner_contiguous(op, "k_scale", k_scale)
