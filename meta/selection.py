"""Fake kernels of the selection ops: the rules of csrc/selection/host.cpp and the shapes it allocates."""

import torch

from ._checks import (
    FLOATS,
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
_TOPK = "topk_indices"


def _check_per_row(name, tensor, logits) -> None:
    check_device(_TOPK, name, tensor, "logits", logits)
    check_dtype(_TOPK, name, tensor.dtype, torch.int32)
    check_shape(_TOPK, name, tensor, "[rows]", [logits.size(0)])


def _check_topk(logits, lengths, k, starts, block_tables, block_size) -> None:
    op = _TOPK
    check_rank(op, "logits", logits, 2, "[rows, width]")
    check_dtype(op, "logits", logits.dtype, *FLOATS)
    check_range(op, "logits must have width", logits.size(1), 0, _INT32_MAX)
    check_inner_contiguous(op, "logits", logits)
    _check_per_row("lengths", lengths, logits)
    check_range(op, "k must be", k, 1, 4096)
    if starts is not None:
        _check_per_row("starts", starts, logits)
    require(
        op,
        (block_tables is None) == (block_size is None),
        lambda: f"block_size must be given with block_tables and not without, got {block_size}",
    )
    if block_tables is None:
        return
    check_device(op, "block_tables", block_tables, "logits", logits)
    check_rank(op, "block_tables", block_tables, 2, "[tables, W]")
    check_dtype(op, "block_tables", block_tables.dtype, torch.int32)
    rows, tables = logits.size(0), block_tables.size(0)

    from torch.fx.experimental.symbolic_shapes import guard_or_false

    require(
        op,
        rows == 0 if guard_or_false(tables == 0) else rows % tables == 0,
        lambda: f"block_tables must have a number of rows of which that of logits, {rows}, is a multiple, got {tables}",
    )
    check_inner_contiguous(op, "block_tables", block_tables)
    check_range(op, "block_size must be", block_size, 1, _INT32_MAX)


@torch.library.register_fake("mqa::topk_indices")
def _(logits, lengths, k, *, starts=None, block_tables=None, block_size=None):
    _check_topk(logits, lengths, k, starts, block_tables, block_size)
    return logits.new_empty((logits.size(0), k), dtype=torch.int32)


@torch.library.register_fake("mqa::topk_indices.out")
def _(logits, lengths, k, *, starts=None, block_tables=None, block_size=None, out):
    op = _TOPK
    _check_topk(logits, lengths, k, starts, block_tables, block_size)
    check_device(op, "out", out, "logits", logits)
    check_dtype(op, "out", out.dtype, torch.int32)
    check_shape(op, "out", out, "[rows, k]", [logits.size(0), k])
    check_inner_contiguous(op, "out", out)
    check_no_internal_overlap(op, "out", out)
