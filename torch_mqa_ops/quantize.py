"""Quantisers and cache movers around the logits."""

import torch

from ._arguments import need_bool, need_float, need_int, need_tensor, need_variant, wrote

_quantize_q_fp8 = torch.ops.mqa.quantize_q_fp8.default
_quantize_k_cache_fp8 = torch.ops.mqa.quantize_k_cache_fp8.default
_gather_k_cache_fp8 = torch.ops.mqa.gather_k_cache_fp8.default
_quantize_q_mxfp4 = torch.ops.mqa.quantize_q_mxfp4.default
_quantize_k_cache_mxfp4 = torch.ops.mqa.quantize_k_cache_mxfp4.default
_gather_k_cache_mxfp4 = torch.ops.mqa.gather_k_cache_mxfp4.default


def index_cache_block_bytes(variant: str, block_size: int, head_dim: int) -> int:
    """Bytes of one block of an index cache: the smallest block stride its pool can have.

    "fp8" takes ``head_dim + 4`` bytes a token (values, one float32 scale), "fp4" ``head_dim / 2 + head_dim / 32``
    (packed values, one scale byte for 32 of them): 8448 and 4352 for blocks of 64 tokens of 128.

    Args:
        variant: "fp8" or "fp4".
        block_size: tokens per block: 16, 32, 64, 128 or 256.
        head_dim: 32 (fp8 only), 64 or 128.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument is not one of those above.

    Example:
        >>> torch_mqa_ops.index_cache_block_bytes("fp8", 64, 128)
        8448
    """
    need_variant("index_cache_block_bytes", "variant", variant)
    need_int("index_cache_block_bytes", "block_size", block_size)
    need_int("index_cache_block_bytes", "head_dim", head_dim)
    if block_size not in (16, 32, 64, 128, 256):
        raise RuntimeError(f"index_cache_block_bytes: block_size must be 16, 32, 64, 128 or 256, got {block_size}")
    head_dims = (32, 64, 128) if variant == "fp8" else (64, 128)
    if head_dim not in head_dims:
        allowed = " or ".join(str(size) for size in head_dims)
        raise RuntimeError(f"index_cache_block_bytes: head_dim must be {allowed} for {variant}, got {head_dim}")
    return block_size * (head_dim + 4 if variant == "fp8" else head_dim // 2 + head_dim // 32)


def quantize_q_fp8(
    q: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    pow2_scale: bool = True,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises queries to e4m3 with one scale per (token, head), folded into the head weights.

    For each row of D elements: ``scale = max(amax, 1e-4) / 448`` in float32, with ``pow2_scale`` rounded up to a power
    of two; ``q_fp8 = e4m3(q / scale)``, nearest, ties to even, saturating; ``weights_f32 = weights * scale *
    softmax_scale``, in that order in float32, None meaning 1. The recipe of DeepSeek's indexer and its serving engines.

    Args:
        q: float32, bfloat16 or float16 ``[..., H, D]`` with up to 8 leading dimensions of any strides; the last two are
            contiguous. D is 32, 64 or 128.
        weights: float32, bfloat16 or float16 ``[..., H]``, the sizes of q without D, on q's device, with leading
            dimensions of any strides; the last is contiguous. None: all 1.
        pow2_scale: round scales up to powers of two (so that dividing by them is exact).
        softmax_scale: a further factor of the weights. None: 1.

    Returns:
        ``(q_fp8, weights_f32)``: float8_e4m3fn ``[..., H, D]`` and float32 ``[..., H]``, contiguous.

    NaN elements do not count in amax and stay NaN (0x7F); infinite elements saturate to 448, and the scale of their row
    is the largest finite one (2^127 with ``pow2_scale``). Weights are not checked: NaN and infinities go through.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above, or requires grad in grad mode: there is no backward.

    Example:
        >>> q, gates = torch.randn(2, 1, 64, 128), torch.rand(2, 1, 64)
        >>> q_fp8, w = torch_mqa_ops.quantize_q_fp8(q, gates, softmax_scale=128**-0.5)
        >>> q_fp8.dtype, w.shape
        (torch.float8_e4m3fn, torch.Size([2, 1, 64]))
    """
    need_tensor("quantize_q_fp8", "q", q)
    need_tensor("quantize_q_fp8", "weights", weights, optional=True)
    need_bool("quantize_q_fp8", "pow2_scale", pow2_scale)
    if softmax_scale is not None:
        need_float("quantize_q_fp8", "softmax_scale", softmax_scale)
    return _quantize_q_fp8(q, weights, pow2_scale=pow2_scale, softmax_scale=softmax_scale)


def quantize_k_cache_fp8(
    k: torch.Tensor, slot_mapping: torch.Tensor, kv_fused: torch.Tensor, *, pow2_scale: bool = True
) -> None:
    """Quantises keys to e4m3 with one scale per token and writes them to their slots of a paged cache.

    Slot s is token ``s % S`` of block ``s // S``: its D values go to byte ``s % S * D`` of the block, its float32 scale
    to byte ``S * D + 4 * (s % S)``. The recipe is that of :func:`quantize_q_fp8`. No other byte of the cache changes.
    All tensors are on one device, CPU or CUDA.

    Args:
        k: float32, bfloat16 or float16 ``[tokens, D]``, D 32, 64 or 128, any row stride, the last dimension contiguous.
        slot_mapping: int64 ``[tokens]``, contiguous. A negative slot, or one past the pool, skips its token. Of several
            tokens with one slot any one wins, whole.
        kv_fused: uint8 ``[blocks, S, 1, D + 4]``, as in :func:`fp8_paged_mqa_logits`. Written; blocks may overlap
            neither each other nor ``k`` nor ``slot_mapping``.
        pow2_scale: round scales up to powers of two.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above, or requires grad in grad mode: there is no backward.

    Example:
        >>> cache = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
        >>> slots = torch.tensor([5, 64, -1])  # the third is skipped
        >>> torch_mqa_ops.quantize_k_cache_fp8(torch.randn(3, 128), slots, cache)
        >>> cache[1].flatten()[:128].view(torch.float8_e4m3fn).float().abs().max() > 200  # block 1, token 0
        tensor(True)
    """
    need_tensor("quantize_k_cache_fp8", "k", k)
    need_tensor("quantize_k_cache_fp8", "slot_mapping", slot_mapping)
    need_tensor("quantize_k_cache_fp8", "kv_fused", kv_fused)
    need_bool("quantize_k_cache_fp8", "pow2_scale", pow2_scale)
    _quantize_k_cache_fp8(k, slot_mapping, kv_fused, pow2_scale=pow2_scale)
    wrote(kv_fused)


def gather_k_cache_fp8(
    kv_fused: torch.Tensor, block_tables: torch.Tensor, cu_seq_lens: torch.Tensor, total_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collects the keys of several requests from a paged cache into one contiguous run, for prefill.

    Token i of request r goes to row ``cu_seq_lens[r] + i``, for rows below ``cu_seq_lens[r + 1]``. All tensors are on
    one device, CPU or CUDA.

    Args:
        kv_fused: uint8 ``[blocks, S, 1, D + 4]``, as in :func:`fp8_paged_mqa_logits`.
        block_tables: int32 ``[B, W]``, any row stride, the last dimension contiguous: token i of request r is token
            ``i % S`` of block ``block_tables[r, i // S]``.
        cu_seq_lens: int32 ``[B + 1]``, contiguous: the row where each request starts, and where the last one ends. Rows
            outside the result are left out.
        total_tokens: rows of the result, 0 to 2^31 - 1.

    Returns:
        ``(k, k_scale)``: float8_e4m3fn ``[total_tokens, D]`` and float32 ``[total_tokens]``, contiguous; a key is about
        ``k * k_scale``. Rows that no request
        covers, pages outside the pool and tokens past the table give zero bytes and scale 0. Where ``cu_seq_lens``
        makes requests overlap, the lowest of them has the row.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above.

    Example:
        >>> cache = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
        >>> torch_mqa_ops.quantize_k_cache_fp8(torch.ones(64, 128), torch.arange(64), cache)
        >>> k, scale = torch_mqa_ops.gather_k_cache_fp8(
        ...     cache, torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32), 64)
        >>> (k.float() * scale[:, None]).unique()
        tensor([1.])
    """
    need_tensor("gather_k_cache_fp8", "kv_fused", kv_fused)
    need_tensor("gather_k_cache_fp8", "block_tables", block_tables)
    need_tensor("gather_k_cache_fp8", "cu_seq_lens", cu_seq_lens)
    need_int("gather_k_cache_fp8", "total_tokens", total_tokens)
    return _gather_k_cache_fp8(kv_fused, block_tables, cu_seq_lens, total_tokens)


def quantize_q_mxfp4(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises queries to MXFP4: e2m1 values with a power-of-two scale for every 32 of them.

    For each group of 32 elements of a row, in float32: ``scale`` is ``max(amax, 1e-4) / 6`` rounded up to a power of
    two; a code is the e2m1 value nearest to ``x / scale``, ties towards zero, saturating at 6, and never minus zero.
    The recipe of DeepGEMM's tests and of the engines that write MXFP4 index caches. A group whose amax is at least 1e-4
    comes back with an error of at most a quarter of a step at its size: ``scale / 4`` below 2 scales, ``scale / 2``
    below 4, ``scale`` above.

    Args:
        q: float32, bfloat16 or float16 ``[..., H, D]`` with up to 8 leading dimensions of any strides; the last two are
            contiguous. D is 64 or 128.

    Returns:
        ``(q_fp4, q_sf)``, contiguous: uint8 ``[..., H, D/2]``, byte j holding element 2j in its low and 2j + 1 in its
        high nibble (e2m1 codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, bit 3 the sign); int32 ``[..., H]``, whose
        byte g, counted from the least significant, is the UE8M0 scale of elements 32g to 32g + 31: 2^(byte - 127). With
        D 64 bytes 2 and 3 are 127 and scale nothing.

    NaN elements do not count in amax and become 0; infinite elements saturate to 6, and the scale of their group is the
    largest finite one, 2^127 (254).

    Raises:
        TypeError: ``q`` is not a tensor.
        RuntimeError: ``q`` breaks a rule above, or requires grad in grad mode: there is no backward.

    Example:
        >>> q = torch.zeros(1, 1, 64)
        >>> q[0, 0, :3] = torch.tensor([6.0, -1.0, 0.5])
        >>> q_fp4, q_sf = torch_mqa_ops.quantize_q_mxfp4(q)
        >>> q_fp4[0, 0, :2].tolist(), q_sf.view(torch.uint8).tolist()  # 7 | 10 << 4, 1; scales 1, 2^-15, -, -
        ([167, 1], [[127, 112, 127, 127]])
    """
    need_tensor("quantize_q_mxfp4", "q", q)
    return _quantize_q_mxfp4(q)


def quantize_k_cache_mxfp4(
    k: torch.Tensor, slot_mapping: torch.Tensor, kv_fused: torch.Tensor, *, is_kv_sf_interleaved: bool = False
) -> None:
    """Quantises keys to MXFP4 and writes them to their slots of a paged cache: half the bytes of FP8.

    Slot s is token ``t = s % S`` of block ``s // S``: its D/2 bytes of values go to byte ``t * D/2`` of the block, its
    D/32 scale bytes to byte ``S * D/2 + t * D/32``. The recipe is that of :func:`quantize_q_mxfp4`. No other byte of
    the cache changes. All tensors are on one device, CPU or CUDA.

    Args:
        k: float32, bfloat16 or float16 ``[tokens, D]``, D 64 or 128, any row stride, the last dimension contiguous.
        slot_mapping: int64 ``[tokens]``, contiguous. A negative slot, or one past the pool, skips its token. Of several
            tokens with one slot any one wins, whole.
        kv_fused: uint8 ``[blocks, S, 1, D/2 + D/32]``, S 16, 32, 64, 128 or 256. A block is a run of bytes: the values
            of its tokens, then their scales; the 4-D shape states sizes only. The last three dimensions are contiguous;
            the block stride may be any multiple of 16 bytes, and the base address too. Written; blocks may overlap
            neither each other nor ``k`` nor ``slot_mapping``.
        is_kv_sf_interleaved: with S = 128, token t's scale bytes stand in the place of token
            ``4 * (t % 32) + t // 32``, as Blackwell's matrix unit wants them.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above, or requires grad in grad mode: there is no backward.

    Example:
        >>> cache = torch.zeros(8, 64, 1, 68, dtype=torch.uint8)
        >>> slots = torch.tensor([5, 64, -1])  # the third is skipped
        >>> torch_mqa_ops.quantize_k_cache_mxfp4(torch.full((3, 128), 6.0), slots, cache)
        >>> cache[1].flatten()[:2].tolist(), cache[1].flatten()[4096:4100].tolist()  # block 1, token 0: 6 is code 7
        ([119, 119], [127, 127, 127, 127])
    """
    need_tensor("quantize_k_cache_mxfp4", "k", k)
    need_tensor("quantize_k_cache_mxfp4", "slot_mapping", slot_mapping)
    need_tensor("quantize_k_cache_mxfp4", "kv_fused", kv_fused)
    need_bool("quantize_k_cache_mxfp4", "is_kv_sf_interleaved", is_kv_sf_interleaved)
    _quantize_k_cache_mxfp4(k, slot_mapping, kv_fused, is_kv_sf_interleaved=is_kv_sf_interleaved)
    wrote(kv_fused)


def gather_k_cache_mxfp4(
    kv_fused: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    total_tokens: int,
    *,
    is_kv_sf_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collects the keys of several requests from a paged MXFP4 cache into one contiguous run, for prefill.

    Token i of request r goes to row ``cu_seq_lens[r] + i``, for rows below ``cu_seq_lens[r + 1]``. All tensors are on
    one device, CPU or CUDA.

    Args:
        kv_fused: uint8 ``[blocks, S, 1, D/2 + D/32]``, as in :func:`quantize_k_cache_mxfp4`.
        block_tables: int32 ``[B, W]``, any row stride, the last dimension contiguous: token i of request r is token
            ``i % S`` of block ``block_tables[r, i // S]``.
        cu_seq_lens: int32 ``[B + 1]``, contiguous: the row where each request starts, and where the last one ends. Rows
            outside the result are left out.
        total_tokens: rows of the result, 0 to 2^31 - 1.
        is_kv_sf_interleaved: how the cache's scales lie, as in :func:`quantize_k_cache_mxfp4`.

    Returns:
        ``(k, k_sf)``, contiguous: uint8 ``[total_tokens, D/2]`` and int32 ``[total_tokens]``, values and scales as in
        :func:`quantize_q_mxfp4`. Rows that no request covers, pages outside the pool and tokens past the table give
        zero bytes and scales 0. Where ``cu_seq_lens`` makes requests overlap, the lowest of them has the row.

    Raises:
        TypeError: an argument has the wrong Python type.
        RuntimeError: an argument breaks a rule above.

    Example:
        >>> cache = torch.zeros(8, 64, 1, 68, dtype=torch.uint8)
        >>> torch_mqa_ops.quantize_k_cache_mxfp4(torch.ones(64, 128), torch.arange(64), cache)
        >>> k, k_sf = torch_mqa_ops.gather_k_cache_mxfp4(
        ...     cache, torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32), 64)
        >>> k.unique().tolist(), k_sf.view(torch.uint8).unique().tolist()  # 1 is 4 (code 6) times 2^-2
        ([102], [125])
    """
    need_tensor("gather_k_cache_mxfp4", "kv_fused", kv_fused)
    need_tensor("gather_k_cache_mxfp4", "block_tables", block_tables)
    need_tensor("gather_k_cache_mxfp4", "cu_seq_lens", cu_seq_lens)
    need_int("gather_k_cache_mxfp4", "total_tokens", total_tokens)
    need_bool("gather_k_cache_mxfp4", "is_kv_sf_interleaved", is_kv_sf_interleaved)
    return _gather_k_cache_mxfp4(
        kv_fused, block_tables, cu_seq_lens, total_tokens, is_kv_sf_interleaved=is_kv_sf_interleaved
    )
