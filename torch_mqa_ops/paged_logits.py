"""MQA logits from paged caches: how well each key of a request answers a query, as the indexer sees it."""

from collections.abc import Iterable

import torch

from ._arguments import need_bool, need_device, need_dtype, need_int, need_iterable, need_tensor, need_variant, wrote

# The overloads themselves: looking them up through torch.ops costs half a microsecond a call.
_fp8_logits = torch.ops.mqa.fp8_paged_mqa_logits.default
_fp8_logits_out = torch.ops.mqa.fp8_paged_mqa_logits.out
_fp4_logits = torch.ops.mqa.fp4_paged_mqa_logits.default
_fp4_logits_out = torch.ops.mqa.fp4_paged_mqa_logits.out
_schedule = torch.ops.mqa.paged_mqa_logits_schedule.default
_schedule_out = torch.ops.mqa.paged_mqa_logits_schedule.out

_PADDING = 256  # columns; also the tokens of a unit of the schedule
_CPU_WORKERS = 32
_OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def padded_seq_len(max_seq_len: int) -> int:
    """Columns that ``out`` of the paged-logits functions must have, and the row stride of a fresh result.

    ``max_seq_len`` rounded up to 256, whatever the dtype: 8000 gives 8192, 256 gives 256, 0 gives 0.

    Raises:
        TypeError: ``max_seq_len`` is not an int.
        RuntimeError: it is negative.
    """
    need_int("padded_seq_len", "max_seq_len", max_seq_len)
    if max_seq_len < 0:
        raise RuntimeError(f"padded_seq_len: max_seq_len must not be negative, got {max_seq_len}")
    return (max_seq_len + _PADDING - 1) // _PADDING * _PADDING


def min_block_table_width(seq_len: int, block_size: int) -> int:
    """Columns a block table needs for ``seq_len`` tokens in blocks of ``block_size``: 8000 in blocks of 64 need 125.

    Raises:
        TypeError: an argument is not an int.
        RuntimeError: ``seq_len`` is negative or ``block_size`` is not positive.
    """
    need_int("min_block_table_width", "seq_len", seq_len)
    need_int("min_block_table_width", "block_size", block_size)
    if seq_len < 0:
        raise RuntimeError(f"min_block_table_width: seq_len must not be negative, got {seq_len}")
    if block_size <= 0:
        raise RuntimeError(f"min_block_table_width: block_size must be positive, got {block_size}")
    return (seq_len + block_size - 1) // block_size


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
    clean_logits: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores every cached key of each request under the request's newest ``n`` queries.

    With ``row = b * n + t`` for query slot t of request b, and position p of the request's context::

        logits[row, p] = scale(p) * sum over h of weights[row, h] * max(0, sum over d of q[b, t, h, d] * k[p, d])

    the score of the DeepSeek-V3.2 lightning indexer. ``k[p]`` and ``scale(p)`` are token ``p % S`` of block
    ``block_tables[b, p // S]``.

    All tensors are on one device, CPU or CUDA.

    Args:
        q: float8_e4m3fn ``[B, n, H, D]``, the last two dimensions contiguous. H is 8, 16, 32, 64 or 128, D is 32, 64 or
            128, n (1 + draft tokens) is 1 to 16. q has no scale of its own: fold it into ``weights``, as
            :func:`quantize_q_fp8` does.
        kv_fused: uint8 ``[blocks, S, 1, D + 4]``, S 16, 32, 64, 128 or 256. A block is a run of bytes: S * D e4m3
            values, token after token, then S float32 scales. The 4-D shape states sizes only: it is *not* one (D +
            4)-byte row per token. The last three dimensions are contiguous; the block stride may be any multiple of 16
            bytes, and the base address too.
        weights: float32, bfloat16 or float16 ``[B * n, H]``, any row stride, the last dimension contiguous.
        block_tables: int32 ``[B, W]``, any row stride, the last dimension contiguous. Ids that no live position needs
            are never looked at.
        seq_lens: int32 ``[B]`` or ``[B, n]``, any strides, in tokens of the cache. With ``[B]``, row (b, t) is live in
            the columns below ``seq_lens[b] - n + t + 1``: the newest slot sees all. With ``[B, n]`` each slot has its
            own length ``seq_lens[b, t]``. Either limit is then clamped to ``[0, min(max_seq_len, W * S)]``.
        max_seq_len: columns of the result, 0 to 2^31 - 1.
        output_dtype: float32, bfloat16 or float16. Scores are float32 until they are stored; float16 overflows to inf.
        schedule_meta: int32 ``[R >= 2, 2]``, contiguous, from :func:`compute_paged_mqa_logits_schedule`; without it the
            kernel splits the work itself. It changes no bit of the result, whatever it holds: a stale one costs time.
        clean_logits: write ``-inf`` to every column that is not live, rows of length 0 included.
        out: a buffer of ``output_dtype`` with at least ``B * n`` rows and ``padded_seq_len(max_seq_len)`` columns, unit
            column stride, rows that do not overlap; it may not overlap an input.

    Returns:
        ``[B * n, max_seq_len]``: ``out`` itself where it has that shape, else a view of it, or of a fresh buffer with
        row stride ``padded_seq_len(max_seq_len)``.

    Unspecified without ``clean_logits``: columns that are not live. Rows of ``out`` past ``B * n`` and columns past the
    padded width are never written; columns from ``max_seq_len`` to the padded width may be.

    A live position whose page id is negative or not below ``blocks`` scores ``-inf``. NaN in a live q, k, scale or
    weight makes the score NaN. No contents of any tensor can make the kernel read or write outside its tensors or fail
    to end. The same inputs give the same bits, whatever the batch around a row, the schedule, ``out``,
    ``clean_logits``, graph or eager.

    As with any torch op, nothing else may write the inputs, or read or write ``out``, while the kernel runs (from
    another stream, say): what a concurrent writer touches has unspecified values.

    Sums are float32, but where the Hopper kernel serves (see the README) the products of q and K are added up by the
    fp8 matrix unit, which keeps about 13 bits: the relative error of all scores together is near 1e-4 there, and below
    1e-6 elsewhere.

    On the CPU the products are torch's float32 matmul, so ``torch.set_float32_matmul_precision`` applies to them.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above (the text names it, the rule and the value), or requires grad in
            grad mode: there is no backward.

    Example:
        >>> q = torch.randn(2, 1, 64, 128).to(torch.float8_e4m3fn)             # 2 requests, 1 query each
        >>> cache = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)              # 8 blocks of 64 tokens
        >>> k = torch.randn(300, 128)
        >>> torch_mqa_ops.quantize_k_cache_fp8(k, torch.arange(300), cache)    # fills blocks 0 to 4
        >>> table = torch.tensor([[0, 1, 2, 3, 4], [4, 3, -1, -1, -1]], dtype=torch.int32)
        >>> lens = torch.tensor([300, 40], dtype=torch.int32)
        >>> w = torch.ones(2, 64)
        >>> logits = torch_mqa_ops.fp8_paged_mqa_logits(q, cache, w, table, lens, 300, clean_logits=True)
        >>> logits.shape, logits.stride(), logits[1, 39:41].isinf().tolist()
        (torch.Size([2, 300]), (512, 1), [False, True])
    """
    need_tensor("fp8_paged_mqa_logits", "q", q)
    need_tensor("fp8_paged_mqa_logits", "kv_fused", kv_fused)
    need_tensor("fp8_paged_mqa_logits", "weights", weights)
    need_tensor("fp8_paged_mqa_logits", "block_tables", block_tables)
    need_tensor("fp8_paged_mqa_logits", "seq_lens", seq_lens)
    need_int("fp8_paged_mqa_logits", "max_seq_len", max_seq_len)
    need_dtype("fp8_paged_mqa_logits", "output_dtype", output_dtype)
    need_tensor("fp8_paged_mqa_logits", "schedule_meta", schedule_meta, optional=True)
    need_bool("fp8_paged_mqa_logits", "clean_logits", clean_logits)
    # The op's default goes unsaid, so that exported programs hold no dtype: AOTInductor before torch 2.13 garbles them.
    dtype = None if output_dtype is torch.float32 else output_dtype
    if out is None:
        return _fp8_logits(
            q, kv_fused, weights, block_tables, seq_lens, max_seq_len,
            output_dtype=dtype, schedule_meta=schedule_meta, clean_logits=clean_logits,
        )  # fmt: skip
    need_tensor("fp8_paged_mqa_logits", "out", out)
    _fp8_logits_out(
        q, kv_fused, weights, block_tables, seq_lens, max_seq_len,
        output_dtype=dtype, schedule_meta=schedule_meta, clean_logits=clean_logits, out=out,
    )  # fmt: skip
    wrote(out)
    return _written_part(out, q, max_seq_len)


def fp4_paged_mqa_logits(
    q: torch.Tensor,
    q_sf: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    sf_vec_size: int = 32,
    output_dtype: torch.dtype = torch.bfloat16,
    is_kv_sf_interleaved: bool = False,
    schedule_meta: torch.Tensor | None = None,
    clean_logits: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores every cached key of each request, from an MXFP4 cache: half the bytes of :func:`fp8_paged_mqa_logits`.

    With ``row = b * n + t`` for query slot t of request b, and position p of the request's context::

        logits[row, p] = sum over h of weights[row, h] * max(0, sum over d of q[b, t, h, d] * k[p, d])

    where q and k are the values that their e2m1 codes and UE8M0 scales stand for. ``k[p]`` is token ``p % S`` of block
    ``block_tables[b, p // S]``. All tensors are on one device, CPU or CUDA.

    Args:
        q: uint8 (or float4_e2m1fn_x2) ``[B, n, H, D/2]``, the last two dimensions contiguous: byte j of a row is
            element 2j (low nibble) and 2j + 1, as :func:`quantize_q_mxfp4` gives. H is 8, 16, 32, 64 or 128, D is 64 or
            128, n (1 + draft tokens) is 1 to 16.
        q_sf: int32 ``[B, n, H]``, the last dimension contiguous: byte g, counted from the least significant, scales
            elements 32g to 32g + 31 by 2^(byte - 127), 255 being NaN. With D 64 bytes 2 and 3 are ignored. The bytes
            themselves are taken too: float8_e8m0fnu or uint8 ``[B, n, H, 4]``, the last two dimensions contiguous, the
            others starting at multiples of 4 bytes.
        kv_fused: uint8 ``[blocks, S, 1, D/2 + D/32]``, S 16, 32, 64, 128 or 256. A block is a run of bytes: the packed
            values of its S tokens, D/2 bytes each, then their scales, D/32 bytes each. The 4-D shape states sizes only.
            The last three dimensions are contiguous; the block stride may be any multiple of 16 bytes, and the base
            address too.
        weights: float32, bfloat16 or float16 ``[B * n, H]``, any row stride, the last dimension contiguous.
        block_tables: int32 ``[B, W]``, any row stride, the last dimension contiguous. Ids that no live position needs
            are never looked at.
        seq_lens: int32 ``[B]`` or ``[B, n]``, any strides, as in :func:`fp8_paged_mqa_logits`.
        max_seq_len: columns of the result, 0 to 2^31 - 1.
        sf_vec_size: elements per scale: 32.
        output_dtype: float32, bfloat16 or float16. Scores are float32 until they are stored; float16 overflows to inf.
        is_kv_sf_interleaved: with S = 128, token t's scale bytes stand in the place of token
            ``4 * (t % 32) + t // 32``.
        schedule_meta: int32 ``[R >= 2, 2]``, contiguous, as in :func:`fp8_paged_mqa_logits`.
        clean_logits: write ``-inf`` to every column that is not live, rows of length 0 included.
        out: a buffer of ``output_dtype`` with at least ``B * n`` rows and ``padded_seq_len(max_seq_len)`` columns, unit
            column stride, rows that do not overlap; it may not overlap an input.

    Returns:
        ``[B * n, max_seq_len]``, as :func:`fp8_paged_mqa_logits` does. What it says about unspecified columns, page
        ids, untrusted contents, equal bits and concurrent writers holds here too.

    Every scale code has its exact value, 2^-127 for 0 included, and nothing overflows on the way to a finite score: a
    row's elements are taken relative to the largest scale among its groups that are not zero. Groups whose scale is
    within 2^9 of it (in the portable kernel 2^22, on the CPU 2^126) are exact; in smaller ones an element is off by no
    more than 2^-11 (portable 2^-22) of that largest scale. The Hopper kernel keeps 11 bits of each head's product: a
    relative error of 3e-4 to 5e-4 on normal data, against 1e-7 of the others. Weights below 2^-126 of the row's
    largest product of weight and scale lose precision in the same way. NaN scales or weights make their scores NaN.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above (the text names it, the rule and the value), or requires grad in
            grad mode: there is no backward.

    Example:
        >>> cache = torch.zeros(8, 64, 1, 68, dtype=torch.uint8)                # 8 blocks of 64 tokens
        >>> torch_mqa_ops.quantize_k_cache_mxfp4(torch.randn(300, 128), torch.arange(300), cache)
        >>> q, q_sf = torch_mqa_ops.quantize_q_mxfp4(torch.randn(2, 1, 64, 128))  # 2 requests, 1 query each
        >>> table = torch.tensor([[0, 1, 2, 3, 4], [4, 3, -1, -1, -1]], dtype=torch.int32)
        >>> lens = torch.tensor([300, 40], dtype=torch.int32)
        >>> w = torch.ones(2, 64)
        >>> logits = torch_mqa_ops.fp4_paged_mqa_logits(q, q_sf, cache, w, table, lens, 300, clean_logits=True)
        >>> logits.shape, logits.dtype, logits[1, 39:41].isinf().tolist()
        (torch.Size([2, 300]), torch.bfloat16, [False, True])
    """
    need_tensor("fp4_paged_mqa_logits", "q", q)
    need_tensor("fp4_paged_mqa_logits", "q_sf", q_sf)
    need_tensor("fp4_paged_mqa_logits", "kv_fused", kv_fused)
    need_tensor("fp4_paged_mqa_logits", "weights", weights)
    need_tensor("fp4_paged_mqa_logits", "block_tables", block_tables)
    need_tensor("fp4_paged_mqa_logits", "seq_lens", seq_lens)
    need_int("fp4_paged_mqa_logits", "max_seq_len", max_seq_len)
    need_int("fp4_paged_mqa_logits", "sf_vec_size", sf_vec_size)
    need_dtype("fp4_paged_mqa_logits", "output_dtype", output_dtype)
    need_bool("fp4_paged_mqa_logits", "is_kv_sf_interleaved", is_kv_sf_interleaved)
    need_tensor("fp4_paged_mqa_logits", "schedule_meta", schedule_meta, optional=True)
    need_bool("fp4_paged_mqa_logits", "clean_logits", clean_logits)
    if q_sf.dtype in (torch.float8_e8m0fnu, torch.uint8) and q_sf.dim() == 4:
        q_sf = _scale_words("fp4_paged_mqa_logits", q_sf)
    dtype = None if output_dtype is torch.bfloat16 else output_dtype  # as in fp8_paged_mqa_logits
    if out is None:
        return _fp4_logits(
            q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len,
            sf_vec_size=sf_vec_size, output_dtype=dtype, is_kv_sf_interleaved=is_kv_sf_interleaved,
            schedule_meta=schedule_meta, clean_logits=clean_logits,
        )  # fmt: skip
    need_tensor("fp4_paged_mqa_logits", "out", out)
    _fp4_logits_out(
        q, q_sf, kv_fused, weights, block_tables, seq_lens, max_seq_len,
        sf_vec_size=sf_vec_size, output_dtype=dtype, is_kv_sf_interleaved=is_kv_sf_interleaved,
        schedule_meta=schedule_meta, clean_logits=clean_logits, out=out,
    )  # fmt: skip
    wrote(out)
    return _written_part(out, q, max_seq_len)


def _written_part(out: torch.Tensor, q: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    rows = q.shape[0] * q.shape[1]
    if not torch.compiler.is_compiling() and out.shape == (rows, max_seq_len):
        return out  # a slice costs 3 us
    return out[:rows, :max_seq_len]


def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: torch.device | str | int | None = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """How a paged-logits call may split its work: where in the walk over all requests each worker starts.

    Handing the schedule to the logits saves each layer's call the split; it never changes a result, and contents that
    no longer fit cost time only. On Hopper only batches of more than 1024 requests have a use for it: smaller ones are
    split more finely inside the kernel, in no more time. Recompute it into the same buffer (``out``) inside or before a
    captured graph.

    Args:
        seq_lens: int32 ``[B]`` or ``[B, n]`` (a request then counts its longest slot), any strides, in tokens; negative
            ones count as 0.
        device: where the logits will run; ``seq_lens`` must be there already. Default: its device. It sets the number
            of workers: the multiprocessors of a CUDA device, which must be of this machine even if ``seq_lens`` is a
            fake tensor; 32 on the CPU.
        next_n: query slots per request, 1 to 16; checked, changes nothing.
        variant: "fp8" or "fp4"; checked, changes nothing.
        out: int32 ``[workers + 1, 2]``, contiguous, on the same device, to write to; it may not overlap ``seq_lens``.

    Returns:
        int32 ``[workers + 1, 2]`` (``out`` if given): row i is (request, unit of 256 tokens in it) where worker i
        starts; the last row is (B, 0). Units are dealt out evenly, the first workers getting one more. The algorithm is
        that of FlashInfer's ``compute_paged_mqa_logits_schedule``.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above.

    Example:
        >>> lens = torch.tensor([1000, 300, 0], dtype=torch.int32)
        >>> torch_mqa_ops.compute_paged_mqa_logits_schedule(lens)[:7].tolist()   # 4 + 2 units for 32 workers
        [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [3, 0]]
    """
    need_tensor("compute_paged_mqa_logits_schedule", "seq_lens", seq_lens)
    need_int("compute_paged_mqa_logits_schedule", "next_n", next_n)
    need_variant("compute_paged_mqa_logits_schedule", "variant", variant)
    if not 1 <= next_n <= 16:
        raise RuntimeError(f"compute_paged_mqa_logits_schedule: next_n must be from 1 to 16, got {next_n}")
    if device is not None:
        wanted = need_device("compute_paged_mqa_logits_schedule", "device", device)
        have = seq_lens.device
        if wanted.type != have.type or (have.type != "cpu" and wanted.index not in (None, have.index)):
            raise RuntimeError(f"compute_paged_mqa_logits_schedule: seq_lens must be on {wanted}, got {have}")
    workers = _num_workers(seq_lens.device)
    if out is None:
        return _schedule(seq_lens, workers)
    need_tensor("compute_paged_mqa_logits_schedule", "out", out)
    _schedule_out(seq_lens, workers, out=out)
    wrote(out)
    return out


def precompile_paged_mqa_logits(
    device: torch.device | str | int | None = None,
    variants: Iterable[str] = ("fp8", "fp4"),
    output_dtypes: Iterable[torch.dtype] | None = None,
    batch_sizes: Iterable[int] | None = None,
) -> None:
    """Loads the kernels of the named variants into a device's context, so that no later call does.

    There is nothing to compile. CUDA loads a kernel when it is first used; this uses each once, on tiny inputs, outside
    any measured or captured region. First use under capture works too. On the CPU only the arguments are checked.

    Args:
        device: a CUDA device of this machine or the CPU; default the current CUDA device, or the CPU where there is
            none.
        variants: out of "fp8" and "fp4".
        output_dtypes: out of float32, bfloat16 and float16; one kernel serves them all.
        batch_sizes: non-negative ints; one kernel serves them all.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: a variant, dtype, size or device is not one of those above.

    Example:
        >>> torch_mqa_ops.precompile_paged_mqa_logits(variants=("fp8",))
    """
    function = "precompile_paged_mqa_logits"
    variants = need_iterable(function, "variants", variants, str)
    for variant in variants:
        need_variant(function, "variants", variant)
    for dtype in need_iterable(function, "output_dtypes", () if output_dtypes is None else output_dtypes, torch.dtype):
        if dtype not in _OUTPUT_DTYPES:
            raise RuntimeError(f"{function}: output_dtypes must be float32, bfloat16 or float16, got {dtype}")
    for size in need_iterable(function, "batch_sizes", () if batch_sizes is None else batch_sizes, int):
        if size < 0:
            raise RuntimeError(f"{function}: batch_sizes must not be negative, got {size}")
    gpus = torch.cuda.device_count()
    wanted = need_device(function, "device", ("cuda" if gpus else "cpu") if device is None else device)
    if wanted.type != "cpu" and not (wanted.type == "cuda" and 0 <= (wanted.index or 0) < gpus):
        raise RuntimeError(
            f"{function}: device must be the CPU or one of {gpus} CUDA devices here, got {str(device)!r}"
        )
    if wanted.type == "cpu":
        return
    lens = torch.zeros(1, dtype=torch.int32, device=wanted)
    table = torch.zeros(1, 1, dtype=torch.int32, device=wanted)
    _schedule(lens, _num_workers(lens.device))

    def score(variant: str, blocks: int, next_n: int, heads: int, head_dim: int) -> None:
        row, token_bytes = (head_dim, head_dim + 4) if variant == "fp8" else (head_dim // 2, head_dim // 32 * 17)
        q = torch.zeros(1, next_n, heads, row, dtype=torch.uint8, device=wanted)
        cache = torch.zeros(blocks, 16, 1, token_bytes, dtype=torch.uint8, device=wanted)
        weights = torch.zeros(next_n, heads, device=wanted)
        if variant == "fp8":
            _fp8_logits(q.view(torch.float8_e4m3fn), cache, weights, table, lens, 1)
        else:
            q_sf = torch.zeros(1, next_n, heads, dtype=torch.int32, device=wanted)
            _fp4_logits(q, q_sf, cache, weights, table, lens, 1)

    # Kernels differ by D; Hopper's by H and n too. A pool without blocks takes the one that serves wherever another may
    # not.
    for variant in variants:
        for head_dim in (32, 64, 128) if variant == "fp8" else (64, 128):
            for next_n in (1, 2, 3, 4, 5):
                for heads in (8, 16, 32, 64, 128):
                    score(variant, 1, next_n, heads, head_dim)
            score(variant, 0, 1, 128, head_dim)


def _scale_words(function: str, q_sf: torch.Tensor) -> torch.Tensor:
    """Scale bytes ``[B, n, H, 4]`` as the int32 words that the op takes: a view."""
    starts = (*q_sf.stride()[:-1], q_sf.storage_offset())
    if q_sf.shape[3] != 4 or q_sf.stride(3) != 1 or any(start % 4 != 0 for start in starts):
        raise RuntimeError(
            f"{function}: q_sf of bytes must be [B, n, H, 4] with four neighbouring bytes at multiples of 4, got "
            f"{list(q_sf.shape)} with strides {list(q_sf.stride())}, offset {q_sf.storage_offset()}"
        )
    return q_sf.view(torch.uint8).view(torch.int32).squeeze(3)


def _num_workers(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_WORKERS
    try:
        return torch.cuda.get_device_properties(device).multi_processor_count
    except (AssertionError, RuntimeError):  # a fake tensor's device need not exist
        raise RuntimeError(
            "compute_paged_mqa_logits_schedule: seq_lens must be on a device of this machine, whose multiprocessors "
            f"are the workers (torch.ops.mqa.paged_mqa_logits_schedule takes their number), got {device}"
        ) from None
