"""Which keys a query attends to, from their scores."""

import torch

from ._arguments import need_int, need_tensor, wrote

_topk_indices = torch.ops.mqa.topk_indices.default
_topk_indices_out = torch.ops.mqa.topk_indices.out


def topk_indices(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    block_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of the ``k`` largest scores of each row.

    Row r takes part with the columns from ``starts[r]`` on, ``lengths[r]`` of them; nothing else of it is read.

    *Which* positions: those that come first when larger scores precede smaller ones, equal scores (-0 equals 0) stand
    by position, and NaN come after ``-inf``. ``-inf`` and NaN are taken when nothing better is left. *In what order*:
    ascending. So a row's result is one list of numbers, the same on CPU and CUDA and in every run, whatever the other
    rows hold. All tensors are on one device, CPU or CUDA.

    Args:
        logits: float32, bfloat16 or float16 ``[rows, width]``, width up to 2^31 - 1, any row stride, the last dimension
            contiguous.
        lengths: int32 ``[rows]``, any stride. Clamped to ``[0, width - starts[r]]``.
        k: 1 to 4096.
        starts: int32 ``[rows]``, any stride, in columns, clamped to ``[0, width]``. Positions count from here. None: 0.
        block_tables: int32 ``[tables, W]``, any row stride, the last dimension contiguous; rows is a multiple of
            tables, and row r of logits belongs to row ``i = r // (rows / tables)``. With it the result is slots of a
            paged cache instead of positions p: ``block_tables[i, p // block_size] * block_size + p % block_size``, in
            the order of p.
        block_size: tokens per block, at least 1; with ``block_tables`` only.
        out: int32 ``[rows, k]``, any row stride, the last dimension contiguous; rows may not overlap each other or an
            input.

    Returns:
        int32 ``[rows, k]``, ``out`` itself where it was given. A row with fewer than k columns in it, or with dropped
        ones, ends in -1. Of slots, those are dropped after the selection whose page id is negative, whose column is
        outside the table, or which do not fit int32. Page ids are not compared with any pool: none is given.

    No contents of any tensor can make the kernel read or write outside its tensors or fail to end.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above (the text names it, the rule and the value), or requires grad in
            grad mode: there is no backward.

    Example:
        >>> logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 9.0], [0.5, 0.0, 7.0, 8.0, 9.0]])
        >>> lengths = torch.tensor([4, 2], dtype=torch.int32)  # the 9s are past the end
        >>> torch_mqa_ops.topk_indices(logits, lengths, 2).tolist()
        [[1, 2], [0, 1]]
        >>> torch_mqa_ops.topk_indices(logits, lengths, 3).tolist()
        [[1, 2, 3], [0, 1, -1]]
        >>> table = torch.tensor([[7, 3], [5, -1]], dtype=torch.int32)
        >>> torch_mqa_ops.topk_indices(logits, lengths, 3, block_tables=table, block_size=2).tolist()
        [[15, 6, 7], [10, 11, -1]]
    """
    need_tensor("topk_indices", "logits", logits)
    need_tensor("topk_indices", "lengths", lengths)
    need_int("topk_indices", "k", k)
    need_tensor("topk_indices", "starts", starts, optional=True)
    need_tensor("topk_indices", "block_tables", block_tables, optional=True)
    if block_size is not None:
        need_int("topk_indices", "block_size", block_size)
    if out is None:
        return _topk_indices(logits, lengths, k, starts=starts, block_tables=block_tables, block_size=block_size)
    need_tensor("topk_indices", "out", out)
    _topk_indices_out(logits, lengths, k, starts=starts, block_tables=block_tables, block_size=block_size, out=out)
    wrote(out)
    return out
