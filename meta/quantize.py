"""Fake kernels of the quantisers and cache movers: the rules of csrc/quantize/host.cpp and the shapes it allocates."""

import torch

from ._checks import (
    FLOATS,
    check_cache,
    check_choice,
    check_device,
    check_dtype,
    check_inner_contiguous,
    check_no_internal_overlap,
    check_range,
    check_rank,
    check_shape,
    require,
)

_INT32_MAX = 2**31 - 1
_MAX_LEADING_DIMS = 8
_HEAD_DIMS = {"fp8": (32, 64, 128), "mxfp4": (64, 128)}


def _check_rows(op: str, name: str, tensor: torch.Tensor, format: str, inner: int) -> None:
    check_dtype(op, name, tensor.dtype, *FLOATS)
    check_choice(op, f"{name} must have D", tensor.size(-1), *_HEAD_DIMS[format])
    check_inner_contiguous(op, name, tensor, inner)


def _check_queries(op: str, q: torch.Tensor, format: str) -> None:
    require(
        op,
        2 <= q.dim() <= 2 + _MAX_LEADING_DIMS,
        lambda: f"q must have shape [..., H, D] with up to {_MAX_LEADING_DIMS} leading dimensions, got {list(q.shape)}",
    )
    _check_rows(op, "q", q, format, 2)


def _check_written(op, name, tensor, shape, sizes, dtypes, inner, reference_name, reference) -> None:
    check_device(op, name, tensor, reference_name, reference)
    check_dtype(op, name, tensor.dtype, *dtypes)
    check_shape(op, name, tensor, shape, sizes)
    check_inner_contiguous(op, name, tensor, inner)
    check_no_internal_overlap(op, name, tensor)


def _check_quantize_q_fp8(q, weights) -> None:
    op = "quantize_q_fp8"
    _check_queries(op, q, "fp8")
    if weights is not None:
        check_device(op, "weights", weights, "q", q)
        check_dtype(op, "weights", weights.dtype, *FLOATS)
        check_shape(op, "weights", weights, "[..., H]", list(q.shape[:-1]))
        check_inner_contiguous(op, "weights", weights)


@torch.library.register_fake("mqa::quantize_q_fp8")
def _(q, weights=None, *, pow2_scale=True, softmax_scale=None):
    _check_quantize_q_fp8(q, weights)
    return (
        q.new_empty(q.shape, dtype=torch.float8_e4m3fn),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
    )


@torch.library.register_fake("mqa::quantize_q_fp8.out")
def _(q, weights=None, *, pow2_scale=True, softmax_scale=None, q_fp8, weights_f32):
    op = "quantize_q_fp8"
    _check_quantize_q_fp8(q, weights)
    _check_written(op, "q_fp8", q_fp8, "[..., H, D]", list(q.shape), [torch.float8_e4m3fn], 2, "q", q)
    _check_written(op, "weights_f32", weights_f32, "[..., H]", list(q.shape[:-1]), [torch.float32], 1, "q", q)


@torch.library.register_fake("mqa::quantize_q_mxfp4")
def _(q):
    _check_queries("quantize_q_mxfp4", q, "mxfp4")
    return (
        q.new_empty((*q.shape[:-1], q.size(-1) // 2), dtype=torch.uint8),
        q.new_empty(q.shape[:-1], dtype=torch.int32),
    )


@torch.library.register_fake("mqa::quantize_q_mxfp4.out")
def _(q, *, q_fp4, q_sf):
    op = "quantize_q_mxfp4"
    _check_queries(op, q, "mxfp4")
    packed = [*q.shape[:-1], q.size(-1) // 2]
    _check_written(
        op, "q_fp4", q_fp4, "[..., H, D/2]", packed, [torch.uint8, torch.float4_e2m1fn_x2], 2, "q", q
    )  # fmt: skip
    _check_written(op, "q_sf", q_sf, "[..., H]", list(q.shape[:-1]), [torch.int32], 1, "q", q)


def _check_quantize_k(op: str, format: str, k, slot_mapping, kv_fused, interleaved_scales: bool = False) -> None:
    check_rank(op, "k", k, 2, "[tokens, D]")
    _check_rows(op, "k", k, format, 1)
    check_range(op, "k must have tokens", k.size(0), 0, _INT32_MAX)
    check_device(op, "slot_mapping", slot_mapping, "k", k)
    check_dtype(op, "slot_mapping", slot_mapping.dtype, torch.int64)
    check_shape(op, "slot_mapping", slot_mapping, "[tokens]", [k.size(0)])
    check_inner_contiguous(op, "slot_mapping", slot_mapping)
    check_device(op, "kv_fused", kv_fused, "k", k)
    check_cache(op, "kv_fused", kv_fused, format, k.size(1), interleaved_scales)
    check_no_internal_overlap(op, "kv_fused", kv_fused)


@torch.library.register_fake("mqa::quantize_k_cache_fp8")
def _(k, slot_mapping, kv_fused, *, pow2_scale=True):
    _check_quantize_k("quantize_k_cache_fp8", "fp8", k, slot_mapping, kv_fused)


@torch.library.register_fake("mqa::quantize_k_cache_mxfp4")
def _(k, slot_mapping, kv_fused, *, is_kv_sf_interleaved=False):
    _check_quantize_k("quantize_k_cache_mxfp4", "mxfp4", k, slot_mapping, kv_fused, is_kv_sf_interleaved)


def _check_gather_k(
    op: str, format: str, kv_fused, block_tables, cu_seq_lens, total_tokens, interleaved_scales: bool = False
) -> None:
    if format == "fp8":
        check_rank(op, "kv_fused", kv_fused, 4, "[blocks, S, 1, D + 4]")
        check_choice(op, "kv_fused must have D + 4", kv_fused.size(3), 36, 68, 132)
        head_dim = kv_fused.size(3) - 4
    else:
        check_rank(op, "kv_fused", kv_fused, 4, "[blocks, S, 1, D/2 + D/32]")
        check_choice(op, "kv_fused must have D/2 + D/32", kv_fused.size(3), 34, 68)
        head_dim = kv_fused.size(3) // 17 * 32
    check_cache(op, "kv_fused", kv_fused, format, head_dim, interleaved_scales)
    check_device(op, "block_tables", block_tables, "kv_fused", kv_fused)
    check_rank(op, "block_tables", block_tables, 2, "[B, W]")
    check_dtype(op, "block_tables", block_tables.dtype, torch.int32)
    check_inner_contiguous(op, "block_tables", block_tables)
    check_device(op, "cu_seq_lens", cu_seq_lens, "kv_fused", kv_fused)
    check_dtype(op, "cu_seq_lens", cu_seq_lens.dtype, torch.int32)
    check_shape(op, "cu_seq_lens", cu_seq_lens, "[B + 1]", [block_tables.size(0) + 1])
    check_inner_contiguous(op, "cu_seq_lens", cu_seq_lens)
    check_range(op, "total_tokens must be", total_tokens, 0, _INT32_MAX)


def _check_gather_k_out(op: str, shape: str, kv_fused, total_tokens, value_bytes, k, k_dtypes, name, scale, dtype):
    check_device(op, "k", k, "kv_fused", kv_fused)
    check_dtype(op, "k", k.dtype, *k_dtypes)
    check_shape(op, "k", k, shape, [total_tokens, value_bytes])
    check_inner_contiguous(op, "k", k)
    check_no_internal_overlap(op, "k", k)
    check_device(op, name, scale, "kv_fused", kv_fused)
    check_dtype(op, name, scale.dtype, dtype)
    check_shape(op, name, scale, "[total_tokens]", [total_tokens])
    check_inner_contiguous(op, name, scale)


@torch.library.register_fake("mqa::gather_k_cache_fp8")
def _(kv_fused, block_tables, cu_seq_lens, total_tokens):
    _check_gather_k("gather_k_cache_fp8", "fp8", kv_fused, block_tables, cu_seq_lens, total_tokens)
    return (
        kv_fused.new_empty((total_tokens, kv_fused.size(3) - 4), dtype=torch.float8_e4m3fn),
        kv_fused.new_empty((total_tokens,), dtype=torch.float32),
    )


@torch.library.register_fake("mqa::gather_k_cache_fp8.out")
def _(kv_fused, block_tables, cu_seq_lens, total_tokens, *, k, k_scale):
    op = "gather_k_cache_fp8"
    _check_gather_k(op, "fp8", kv_fused, block_tables, cu_seq_lens, total_tokens)
    _check_gather_k_out(
        op, "[total_tokens, D]", kv_fused, total_tokens, kv_fused.size(3) - 4,
        k, [torch.float8_e4m3fn], "k_scale", k_scale, torch.float32,
    )  # fmt: skip


@torch.library.register_fake("mqa::gather_k_cache_mxfp4")
def _(kv_fused, block_tables, cu_seq_lens, total_tokens, *, is_kv_sf_interleaved=False):
    op = "gather_k_cache_mxfp4"
    _check_gather_k(op, "mxfp4", kv_fused, block_tables, cu_seq_lens, total_tokens, is_kv_sf_interleaved)
    return (
        kv_fused.new_empty((total_tokens, kv_fused.size(3) // 17 * 16), dtype=torch.uint8),
        kv_fused.new_empty((total_tokens,), dtype=torch.int32),
    )


@torch.library.register_fake("mqa::gather_k_cache_mxfp4.out")
def _(kv_fused, block_tables, cu_seq_lens, total_tokens, *, is_kv_sf_interleaved=False, k, k_sf):
    op = "gather_k_cache_mxfp4"
    _check_gather_k(op, "mxfp4", kv_fused, block_tables, cu_seq_lens, total_tokens, is_kv_sf_interleaved)
    _check_gather_k_out(
        op, "[total_tokens, D/2]", kv_fused, total_tokens, kv_fused.size(3) // 17 * 16,
        k, [torch.uint8, torch.float4_e2m1fn_x2], "k_sf", k_sf, torch.int32,
    )  # fmt: skip
