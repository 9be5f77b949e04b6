"""Fake kernels of the paged-logits ops: the rules of csrc/paged_logits/host.cpp and the shapes it allocates."""

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
_SCHEDULE = "paged_mqa_logits_schedule"


def _padded(max_seq_len):
    return (max_seq_len + 255) // 256 * 256


def _check_logits(
    op, q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, sf_vec_size, output_dtype, interleaved_scales,
    schedule_meta,
) -> None:  # fmt: skip
    fp8 = q_sf is None
    check_rank(op, "q", q, 4, "[B, n, H, D]" if fp8 else "[B, n, H, D/2]")
    if fp8:
        check_dtype(op, "q", q.dtype, torch.float8_e4m3fn)
    else:
        check_dtype(op, "q", q.dtype, torch.uint8, torch.float4_e2m1fn_x2)
    batch, next_n, heads = q.shape[:3]
    head_dim = q.size(3) if fp8 else 2 * q.size(3)
    check_range(op, "q must have n (query slots per request, drafts + 1)", next_n, 1, 16)
    check_choice(op, "q must have H", heads, 8, 16, 32, 64, 128)
    if fp8:
        check_choice(op, "q must have D", head_dim, 32, 64, 128)
    else:
        check_choice(op, "q must have D/2", q.size(3), 32, 64)
    check_inner_contiguous(op, "q", q, 2)
    if not fp8:
        check_device(op, "q_sf", q_sf, "q", q)
        check_dtype(op, "q_sf", q_sf.dtype, torch.int32)
        check_shape(op, "q_sf", q_sf, "[B, n, H]", [batch, next_n, heads])
        check_inner_contiguous(op, "q_sf", q_sf)
        check_choice(op, "sf_vec_size must be", sf_vec_size, 32)

    check_device(op, "kv_fused", kv_fused, "q", q)
    check_cache(op, "kv_fused", kv_fused, "fp8" if fp8 else "mxfp4", head_dim, interleaved_scales)

    check_device(op, "weights", weights, "q", q)
    check_dtype(op, "weights", weights.dtype, *FLOATS)
    check_shape(op, "weights", weights, "[B*n, H]", [batch * next_n, heads])
    check_inner_contiguous(op, "weights", weights)

    check_device(op, "block_tables", block_tables, "q", q)
    check_rank(op, "block_tables", block_tables, 2, "[B, W]")
    check_dtype(op, "block_tables", block_tables.dtype, torch.int32)
    check_shape(op, "block_tables", block_tables, "[B, W]", [batch, block_tables.size(1)])
    check_inner_contiguous(op, "block_tables", block_tables)

    check_device(op, "seq_lens", seq_lens, "q", q)
    check_dtype(op, "seq_lens", seq_lens.dtype, torch.int32)
    if seq_lens.dim() == 2:
        check_shape(op, "seq_lens", seq_lens, "[B, n]", [batch, next_n])
    else:
        check_shape(op, "seq_lens", seq_lens, "[B]", [batch])

    check_range(op, "max_seq_len must be", max_seq_len, 0, _INT32_MAX)
    check_dtype(op, "output_dtype", output_dtype, *FLOATS)

    if schedule_meta is not None:
        check_device(op, "schedule_meta", schedule_meta, "q", q)
        check_dtype(op, "schedule_meta", schedule_meta.dtype, torch.int32)

        def text() -> str:
            return f"schedule_meta must have shape [R >= 2, 2], got {list(schedule_meta.shape)}"

        require(op, schedule_meta.dim() == 2, text)
        require(op, schedule_meta.size(0) >= 2, text)
        require(op, schedule_meta.size(1) == 2, text)
        check_inner_contiguous(op, "schedule_meta", schedule_meta, 2)


def _new_logits(q, max_seq_len, output_dtype):
    # torch gives a dimension of size 0 the stride of one of size 1.
    row_stride = torch.sym_max(_padded(max_seq_len), 1)
    return q.new_empty_strided((q.size(0) * q.size(1), max_seq_len), (row_stride, 1), dtype=output_dtype)


def _check_logits_out(op, q, max_seq_len, output_dtype, out) -> None:
    rows, columns = q.size(0) * q.size(1), _padded(max_seq_len)
    check_device(op, "out", out, "q", q)
    check_dtype(op, "out", out.dtype, output_dtype)

    def text() -> str:
        return (
            f"out must have shape [>= B*n, >= padded_seq_len(max_seq_len)] = [>= {rows}, >= {columns}], "
            f"got {list(out.shape)}"
        )

    require(op, out.dim() == 2, text)
    require(op, out.size(0) >= rows, text)
    require(op, out.size(1) >= columns, text)
    check_inner_contiguous(op, "out", out)
    check_no_internal_overlap(op, "out", out)


def _check_fp8_logits(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, dtype, schedule_meta) -> None:
    _check_logits(
        "fp8_paged_mqa_logits", q, None, kv_fused, weights, block_tables, seq_lens, max_seq_len, 32, dtype, False,
        schedule_meta,
    )  # fmt: skip


@torch.library.register_fake("mqa::fp8_paged_mqa_logits")
def _(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, *, output_dtype=None, schedule_meta=None,
      clean_logits=False):  # fmt: skip
    dtype = torch.float32 if output_dtype is None else output_dtype
    _check_fp8_logits(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, dtype, schedule_meta)
    return _new_logits(q, max_seq_len, dtype)


@torch.library.register_fake("mqa::fp8_paged_mqa_logits.out")
def _(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, *, output_dtype=None, schedule_meta=None,
      clean_logits=False, out):  # fmt: skip
    dtype = torch.float32 if output_dtype is None else output_dtype
    _check_fp8_logits(q, kv_fused, weights, block_tables, seq_lens, max_seq_len, dtype, schedule_meta)
    _check_logits_out("fp8_paged_mqa_logits", q, max_seq_len, dtype, out)


@torch.library.register_fake("mqa::fp4_paged_mqa_logits")
def _(q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, *, sf_vec_size=32, output_dtype=None,
      is_kv_sf_interleaved=False, schedule_meta=None, clean_logits=False):  # fmt: skip
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    _check_logits(
        "fp4_paged_mqa_logits", q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, sf_vec_size, dtype,
        is_kv_sf_interleaved, schedule_meta,
    )  # fmt: skip
    return _new_logits(q, max_seq_len, dtype)


@torch.library.register_fake("mqa::fp4_paged_mqa_logits.out")
def _(q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, *, sf_vec_size=32, output_dtype=None,
      is_kv_sf_interleaved=False, schedule_meta=None, clean_logits=False, out):  # fmt: skip
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    _check_logits(
        "fp4_paged_mqa_logits", q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len, sf_vec_size, dtype,
        is_kv_sf_interleaved, schedule_meta,
    )  # fmt: skip
    _check_logits_out("fp4_paged_mqa_logits", q, max_seq_len, dtype, out)


def _check_schedule(seq_lens, num_workers) -> None:
    op = _SCHEDULE
    check_dtype(op, "seq_lens", seq_lens.dtype, torch.int32)
    require(
        op,
        seq_lens.dim() in (1, 2),
        lambda: f"seq_lens must have shape [B] or [B, n], got {list(seq_lens.shape)}",
    )
    check_range(op, "num_workers must be", num_workers, 1, _INT32_MAX)


@torch.library.register_fake("mqa::paged_mqa_logits_schedule")
def _(seq_lens, num_workers):
    _check_schedule(seq_lens, num_workers)
    return seq_lens.new_empty((num_workers + 1, 2), dtype=torch.int32)


@torch.library.register_fake("mqa::paged_mqa_logits_schedule.out")
def _(seq_lens, num_workers, *, out):
    op = _SCHEDULE
    _check_schedule(seq_lens, num_workers)
    check_device(op, "out", out, "seq_lens", seq_lens)
    check_dtype(op, "out", out.dtype, torch.int32)
    check_shape(op, "out", out, "[num_workers + 1, 2]", [num_workers + 1, 2])
    check_inner_contiguous(op, "out", out, 2)
