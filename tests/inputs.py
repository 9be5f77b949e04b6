"""Hostile inputs: everything an op may not rely on is wrong by default.

Pages are shuffled, one is shared by two requests, every token has its own scale, every tensor is a strided
view with an offset, and whatever no live position needs is poison: NaN bytes in the pool and around q and
weights, page ids far outside the pool, absurd lengths in the gaps between the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DEFAULT_LENGTHS = (70, 300, 1000)
NAN_BYTES = (0x7F, 0xFF)  # the two NaN codes of e4m3; four in a row are a float32 NaN as well


def paged_case(
    batch: int = 3,
    next_n: int = 1,
    heads: int = 64,
    head_dim: int = 128,
    block_size: int = 64,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
    lengths_2d: bool = False,
    max_seq_len: int | None = None,
    weights_dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    table_width: int | None = None,
    q_shift: int = 0,
) -> dict:
    """Arguments of fp8_paged_mqa_logits, by name.

    lengths: one int per request, or one row of next_n ints per request (2-D lengths). lengths_2d with one int
    per request draws the slots' own lengths at random, the request's int being the largest of them.
    q_shift: bytes by which q's base and outer strides miss their 16-byte alignment.
    """
    gen = torch.Generator(device).manual_seed(seed)
    host_gen = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = [DEFAULT_LENGTHS[b % len(DEFAULT_LENGTHS)] for b in range(batch)]
    batch = len(lengths)
    if batch and isinstance(lengths[0], Sequence):
        rows, lengths_2d = [list(row) for row in lengths], True
    elif lengths_2d:
        rows = [_slot_lengths(length, next_n, host_gen) for length in lengths]
    else:
        rows = [[length] for length in lengths]
    if max_seq_len is None:
        max_seq_len = max([0, *(max(row) for row in rows)]) + 29
    if table_width is None:
        longest = max([0, *(min(max(row), max_seq_len) for row in rows)])
        table_width = -(-longest // block_size) + 2
    # With 1-D lengths the newest slot sees all tokens: the largest entry is the request's extent either way.
    live = [min(max(0, *row), max_seq_len, table_width * block_size) for row in rows]
    block_tables, page_tokens = _page_table(live, block_size, table_width, gen)
    return {
        "q": _query(batch, next_n, heads, head_dim, q_shift, gen),
        "kv_fused": _pool(page_tokens, block_size, head_dim, gen),
        "weights": _weights(batch * next_n, heads, weights_dtype, gen),
        "block_tables": block_tables,
        "seq_lens": _lengths(rows, lengths_2d, next_n, device),
        "max_seq_len": max_seq_len,
    }


def fp4_case(
    batch: int = 3,
    next_n: int = 1,
    heads: int = 64,
    head_dim: int = 128,
    block_size: int = 64,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    interleaved: bool = False,
    **options,
) -> dict:
    """Arguments of fp4_paged_mqa_logits, by name: those of paged_case with q and the pool in MXFP4.

    Every group has its own scale, so that one read from a neighbour is wrong by a factor; the scales of dead tokens,
    and the two that q has too many at D 64, are NaN.
    """
    case = paged_case(batch, next_n, heads, head_dim, block_size, lengths, **options)
    device, gen = case["q"].device, torch.Generator(case["q"].device).manual_seed(options.get("seed", 0) + 1)
    live = ~kv_parts(case["kv_fused"])[1].isnan()  # [blocks, S]
    pool = empty_mxfp4_pool(len(live), block_size, head_dim, device=device)
    values, scales = mxfp4_parts(pool)
    scales.fill_(255)
    if interleaved:  # a view in which token t stands where the layout puts its scales
        scales = scales.view(len(live), 32, 4, -1).transpose(1, 2)
        live_scales = live.view(len(live), 4, 32)
    else:
        live_scales = live
    tokens = int(live.sum())
    values[live] = torch.randint(0, 256, (tokens, head_dim // 2), dtype=torch.uint8, device=device, generator=gen)
    random_scales = torch.randint(124, 131, (tokens, head_dim // 32), dtype=torch.uint8, device=device, generator=gen)
    scales[live_scales] = random_scales

    batch = len(case["q"])
    shift = options.get("q_shift", 0)
    slot = heads * head_dim // 2 + shift
    request = (next_n + 1) * slot + shift
    storage = poison_bytes(slot + (batch + 1) * request, device)
    q = storage.as_strided((batch, next_n, heads, head_dim // 2), (request, slot, head_dim // 2, 1), slot)
    q.copy_(torch.randint(0, 256, q.shape, dtype=torch.uint8, device=device, generator=gen))
    q_scales = torch.randint(124, 131, (batch, next_n, heads, 4), dtype=torch.uint8, device=device, generator=gen)
    q_scales[..., head_dim // 32 :] = 255
    q_sf = torch.full((batch + 1, next_n + 1, heads + 3), -1, dtype=torch.int32, device=device)
    q_sf = q_sf[1:, :-1, 1 : heads + 1]
    q_sf.copy_(q_scales.view(torch.int32).squeeze(-1))
    order = ("q", "q_sf", "kv_fused", "weights", "block_tables", "seq_lens", "max_seq_len")
    case |= {"q": q, "q_sf": q_sf, "kv_fused": pool}
    return {name: case[name] for name in order} | {"is_kv_sf_interleaved": interleaved}


def contiguous_twin(case: dict) -> dict:
    """The same values in freshly allocated contiguous tensors."""
    return {
        k: v.clone(memory_format=torch.contiguous_format) if isinstance(v, torch.Tensor) else v for k, v in case.items()
    }


def to_device(case: dict, device: str | torch.device) -> dict:
    """The same storages, poison and strides included, copied to a device."""
    return {k: _move(v, device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}


def kv_parts(kv_fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writable views of a pool: value bytes [blocks, S, D] and float32 scales [blocks, S]."""
    blocks, block_size, _, token_bytes = kv_fused.shape
    dim, stride, base = token_bytes - 4, kv_fused.stride(0), kv_fused.storage_offset()
    values = kv_fused.as_strided((blocks, block_size, dim), (stride, dim, 1), base)
    scales = kv_fused.as_strided((blocks, block_size, 4), (stride, 4, 1), base + block_size * dim)
    return values, scales.view(torch.float32).squeeze(-1)


def mxfp4_parts(kv_fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writable views of an MXFP4 pool: packed values [blocks, S, D/2] and scale bytes [blocks, S, D/32]."""
    blocks, block_size, _, token_bytes = kv_fused.shape
    groups, stride, base = token_bytes // 17, kv_fused.stride(0), kv_fused.storage_offset()
    values = kv_fused.as_strided((blocks, block_size, 16 * groups), (stride, 16 * groups, 1), base)
    scales = kv_fused.as_strided(
        (blocks, block_size, groups), (stride, groups, 1), base + block_size * 16 * groups
    )  # fmt: skip
    return values, scales


def empty_pool(
    blocks: int, block_size: int, head_dim: int, *, gap: int = 48, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A pool [blocks, S, 1, D+4] of NaN bytes, an offset view whose blocks lie `gap` bytes apart."""
    return _empty_pool(blocks, block_size, head_dim + 4, gap, device)


def empty_mxfp4_pool(
    blocks: int, block_size: int, head_dim: int, *, gap: int = 48, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The same for [blocks, S, 1, D/2 + D/32]."""
    return _empty_pool(blocks, block_size, head_dim // 2 + head_dim // 32, gap, device)


def poison_bytes(count: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """NaN bytes of both signs; any aligned float32, float16 or bfloat16 read from them is NaN too."""
    words = torch.tensor([[NAN_BYTES[0]] * 4, [NAN_BYTES[1]] * 4], dtype=torch.uint8, device=device).flatten()
    return words.repeat(-(-count // 8))[:count]


def _empty_pool(blocks: int, block_size: int, token_bytes: int, gap: int, device: str | torch.device) -> torch.Tensor:
    stride, offset = block_size * token_bytes + gap, 32
    storage = poison_bytes(offset + max(1, blocks) * stride, device)
    return storage.as_strided((blocks, block_size, 1, token_bytes), (stride, token_bytes, token_bytes, 1), offset)


def _move(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    moved = storage.to(device, copy=True).view(tensor.dtype)
    return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _slot_lengths(longest: int, next_n: int, gen: torch.Generator) -> list[int]:
    slots = torch.randint(0, max(1, longest + 1), (next_n,), generator=gen).tolist()
    slots[int(torch.randint(0, next_n, (1,), generator=gen))] = longest
    return slots


def _lengths(rows: list[list[int]], two_d: bool, next_n: int, device: str | torch.device) -> torch.Tensor:
    if not two_d:
        storage = torch.full((2 * len(rows) + 3,), INT_MAX, dtype=torch.int32, device=device)
        view = storage[1 : 1 + 2 * len(rows) : 2]
        view.copy_(torch.tensor([row[0] for row in rows], dtype=torch.int32))
        return view
    storage = torch.full((next_n + 1, 2 * len(rows) + 3), INT_MAX, dtype=torch.int32, device=device)
    view = storage[1:, 1 : 1 + 2 * len(rows) : 2].t()  # neither stride is 1
    view.copy_(torch.tensor(rows, dtype=torch.int32).view(len(rows), next_n))
    return view


def _page_table(
    live: list[int], block_size: int, width: int, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table [B, W], and how many tokens of each physical page are live for someone."""
    device = gen.device
    live_tokens = torch.tensor(live, dtype=torch.int64, device=device)
    columns = -(-live_tokens // block_size)
    needed = sum(-(-tokens // block_size) for tokens in live)
    blocks = needed + 5
    storage = torch.full((len(live) + 1, width + 5), 2**30, dtype=torch.int32, device=device)
    table = storage[1:, 2 : 2 + width]
    dead = torch.tensor([-1, blocks, 2**30, INT_MAX, INT_MIN], dtype=torch.int32, device=device)
    table.copy_(dead[torch.randint(0, len(dead), table.shape, device=device, generator=gen)])

    in_use = torch.arange(width, device=device) < columns[:, None]
    pages = torch.randperm(blocks, device=device, generator=gen).to(torch.int32)
    table[in_use] = pages[:needed]
    busy = [b for b, tokens in enumerate(live) if tokens > 0]
    if len(busy) > 1:  # at another column than its first owner has it, where there is one
        first, second = busy[0], busy[-1]
        table[second, -(-live[second] // block_size) - 1] = table[first, 0]

    before = torch.arange(width, device=device) * block_size
    tokens_in_page = (live_tokens[:, None] - before).clamp(0, block_size)
    page_tokens = torch.zeros(blocks, dtype=torch.int64, device=device)
    page_tokens.scatter_reduce_(0, table[in_use].long(), tokens_in_page[in_use], "amax")
    return table, page_tokens


def _pool(page_tokens: torch.Tensor, block_size: int, head_dim: int, gen: torch.Generator) -> torch.Tensor:
    blocks = page_tokens.numel()
    pool = empty_pool(blocks, block_size, head_dim, device=gen.device)
    values, scales = kv_parts(pool)
    live = torch.arange(block_size, device=gen.device) < page_tokens[:, None]
    # Magnitudes reach from subnormals to hundreds and each token's scale undoes its own: a scale read from a
    # neighbour is wrong by a factor, and no few tokens dominate a whole-tensor metric.
    tokens = int(page_tokens.sum())
    exponent = torch.randint(-6, 6, (tokens, 1), device=gen.device, generator=gen).float()
    keys = torch.randn(tokens, head_dim, device=gen.device, generator=gen) * torch.exp2(exponent)
    values[live] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
    jitter = torch.rand(tokens, device=gen.device, generator=gen) + 0.5
    scales[live] = torch.exp2(-exponent.squeeze(1)) * jitter
    return pool


def _query(batch: int, next_n: int, heads: int, head_dim: int, shift: int, gen: torch.Generator) -> torch.Tensor:
    slot = heads * head_dim + shift
    request = (next_n + 1) * slot + shift  # a NaN slot follows the last real one of every request
    offset = heads * head_dim + shift
    storage = poison_bytes(offset + (batch + 1) * request, gen.device).view(torch.float8_e4m3fn)
    q = storage.as_strided((batch, next_n, heads, head_dim), (request, slot, head_dim, 1), offset)
    exponent = torch.randint(-3, 4, (batch, next_n, heads, 1), device=gen.device, generator=gen).float()
    values = torch.randn(q.shape, device=gen.device, generator=gen) * torch.exp2(exponent)
    q.copy_(values.to(torch.float8_e4m3fn))
    return q


def _weights(rows: int, heads: int, dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    storage = torch.full((rows + 2, heads + 3), float("nan"), dtype=dtype, device=gen.device)
    weights = storage[1:-1, 1 : 1 + heads]
    weights.copy_(torch.randn(rows, heads, device=gen.device, generator=gen))
    return weights


def topk_case(
    rows: int,
    width: int,
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    values: torch.Tensor | None = None,
) -> dict:
    """Logits, lengths and starts of topk_indices, by name.

    Columns outside a row's part hold 1e4 and NaN in turns; so do the gaps between rows. values: float32
    ``[rows, width]``, normal if not given.
    """
    gen = torch.Generator(device).manual_seed(seed)
    storage = torch.full((rows + 2, width + 7), 1e4, dtype=dtype, device=device)
    storage[:, ::2] = float("nan")
    logits = storage[1:-1, 3 : 3 + width]
    if values is None:
        values = torch.randn(rows, width, device=device, generator=gen)
    first = torch.tensor([0] * rows if starts is None else starts, device=device).clamp(0, width)
    end = torch.minimum(first + torch.tensor(lengths, device=device).clamp(min=0), torch.tensor(width))
    column = torch.arange(width, device=device)
    inside = (column >= first[:, None]) & (column < end[:, None])
    logits.copy_(torch.where(inside, values.to(dtype), logits))
    case = {"logits": logits, "lengths": _every_other(lengths, device), "starts": None}
    if starts is not None:
        case["starts"] = _every_other(starts, device)
    return case


def _every_other(numbers: Sequence[int], device: str | torch.device) -> torch.Tensor:
    storage = torch.full((2 * len(numbers) + 3,), INT_MAX, dtype=torch.int32, device=device)
    view = storage[1 : 1 + 2 * len(numbers) : 2]
    view.copy_(torch.tensor(numbers, dtype=torch.int32))
    return view


def slot_table(case: dict, tables: int, block_size: int, *, width: int | None = None) -> dict:
    """A block table for a topk_case with ids that are negative, too large for an int32 slot, or anything between."""
    device = case["logits"].device
    gen = torch.Generator(device).manual_seed(tables)
    width = case["logits"].shape[1] // block_size if width is None else width
    storage = torch.full((tables + 1, width + 5), 2**20, dtype=torch.int32, device=device)
    table = storage[1:, 2 : 2 + width]
    table.copy_(torch.randint(0, 2**16, table.shape, device=device, generator=gen))
    dead = torch.tensor([-1, INT_MIN, INT_MAX, 2**27 + 3], dtype=torch.int32, device=device)
    table[:, ::5] = dead[torch.randint(0, 4, table[:, ::5].shape, device=device, generator=gen)]
    return {"block_tables": table, "block_size": block_size}
