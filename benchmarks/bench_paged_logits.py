"""Times the paged logits of both caches and the quantisers against what the card can do (README.md says how)."""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import common
import plot
import torch

import torch_mqa_ops as mqa

# --block-size and --head-dim set these; only with the usual ones is more timed than the rows.
USUAL = BLOCK, HEAD_DIM = 64, 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the codes 0 to 7; 8 to 15 are their negatives
CUDA_SHAPES = [(1, 131072), (4, 65536), (16, 32768), (64, 8192), (64, 32768), (128, 4096), (256, 32768)]
CPU_SHAPES = [(4, 4096), (1, 32768)]
CUDA_POOL_BYTES, CUDA_MAX_SETS = 200_704 * 8448, 40  # 1.7 GB
CPU_POOL_BLOCKS, CPU_MAX_SETS = 4096, 4
GATHER_TILES = [(32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)]  # (tokens per program, warps)
QUANTISED_TOKENS = 65_536
METHOD = (
    "graph replay: the calls on all input sets (disjoint blocks of one shuffled pool) back to back in one "
    "CUDA graph, repeated to about 3 ms, an output buffer per set; contenders alternate in one process; "
    "median of 15 replays. Random normal data quantised per token; lengths uniform in [0.7, 1.3] x mean, "
    "the same for every H and n of a shape. Useful bytes = tokens * (values + scales of one) + tokens * n * 4; "
    "flops = 2 * tokens * n * H * D."
)
CPU_METHOD = "wall clock, contenders alternate over the input sets, median of 15; data as on CUDA"


@dataclass
class Layout:
    """The lengths of one input set and where its blocks lie in the pool."""

    seq_lens: torch.Tensor  # int32 [B]
    block_tables: torch.Tensor  # int32 [B, W], 0 past a request's own blocks
    pages: torch.Tensor  # int32 [blocks], the table's live entries in order


@dataclass
class InputSet:
    layout: Layout
    q: torch.Tensor  # float8_e4m3fn [B, n, H, D]
    q_fp4: torch.Tensor  # the same in MXFP4: uint8 [B, n, H, D / 2], two codes a byte,
    q_sf: torch.Tensor  # and int32 [B, n, H], four scale codes
    weights: torch.Tensor  # float32 [B * n, H]
    out: torch.Tensor  # float32 [B * n, padded width]
    schedule: torch.Tensor  # made beforehand
    schedule_buffer: torch.Tensor  # made again by every call that includes the schedule


def token_bytes(cache: str) -> int:
    return {"fp8": HEAD_DIM, "mxfp4": HEAD_DIM // 2}[cache] + 4


def make_pool(num_blocks: int, device: torch.device) -> torch.Tensor:
    """uint8 [blocks, BLOCK, 1, D + 4] of random normal keys; quantised here, not by the library."""
    pool = torch.empty(num_blocks, BLOCK * token_bytes("fp8"), dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for part in pool.split(4096):
        k = torch.randn(len(part), BLOCK, HEAD_DIM, device=device, generator=generator)
        scale = k.abs().amax(-1) / 448
        values = (k / scale[..., None]).to(torch.float8_e4m3fn)
        part[:, : BLOCK * HEAD_DIM] = values.view(torch.uint8).flatten(1)
        part[:, BLOCK * HEAD_DIM :] = scale.view(torch.uint8)
    return pool.view(num_blocks, BLOCK, 1, -1)


def to_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, two a byte, and the scale code of every 32 elements; not by the library."""
    groups = x.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups * torch.exp2(-exponents)[..., None]
    levels = torch.tensor(E2M1, device=x.device)
    codes = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2) | (scaled < 0).long() << 3
    codes = codes.to(torch.uint8).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def from_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 values."""
    levels = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
    levels = torch.cat([levels, -levels])
    values = levels[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, 32)) * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


def make_mxfp4_pool(num_blocks: int, device: torch.device) -> torch.Tensor:
    """uint8 [blocks, BLOCK, 1, D / 2 + 4], the keys of make_pool."""
    pool = torch.empty(num_blocks, BLOCK * token_bytes("mxfp4"), dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for part in pool.split(4096):
        codes, scales = to_mxfp4(torch.randn(len(part), BLOCK, HEAD_DIM, device=device, generator=generator))
        part[:, : BLOCK * HEAD_DIM // 2] = codes.flatten(1)
        part[:, BLOCK * HEAD_DIM // 2 :] = scales.flatten(1)
    return pool.view(num_blocks, BLOCK, 1, -1)


def draw_layouts(batch: int, mean: int, num_blocks: int, max_sets: int, device: torch.device) -> list[Layout]:
    """As many sets on disjoint blocks of the shuffled pool as fit, at most max_sets."""
    generator = torch.Generator().manual_seed(batch * 1_000_003 + mean)
    order = torch.randperm(num_blocks, generator=generator).int()
    lengths, used = [], 0
    while len(lengths) < max_sets:
        drawn = torch.randint(int(0.7 * mean), int(1.3 * mean) + 1, (batch,), generator=generator).int()
        used += int(((drawn + BLOCK - 1) // BLOCK).sum())
        if used > num_blocks:
            break
        lengths.append(drawn)
    if not lengths:
        raise SystemExit(f"{batch} x {mean} tokens need more than the pool's {num_blocks} blocks")
    width = (max(int(drawn.max()) for drawn in lengths) + BLOCK - 1) // BLOCK
    layouts, first = [], 0
    for drawn in lengths:
        live = torch.arange(width) < ((drawn + BLOCK - 1) // BLOCK)[:, None]
        pages = order[first : first + int(live.sum())]
        first += len(pages)
        block_tables = torch.zeros(batch, width, dtype=torch.int32)
        block_tables[live] = pages
        layouts.append(Layout(drawn.to(device), block_tables.to(device), pages.to(device)))
    return layouts


def make_sets(layouts: list[Layout], heads: int, next_n: int, max_seq_len: int) -> list[InputSet]:
    device = layouts[0].seq_lens.device
    generator = torch.Generator(device).manual_seed(heads * 16 + next_n)
    width = mqa.padded_seq_len(max_seq_len)
    sets = []
    for layout in layouts:
        rows = len(layout.seq_lens) * next_n
        q = torch.randn(layout.seq_lens.shape[0], next_n, heads, HEAD_DIM, device=device, generator=generator)
        q_fp4, scales = to_mxfp4(q)
        q_sf = torch.full((*q.shape[:-1], 4), 127, dtype=torch.uint8, device=device)
        q_sf[..., : scales.shape[-1]] = scales
        q_sf = q_sf.view(torch.int32).squeeze(-1)
        weights = torch.randn(rows, heads, device=device, generator=generator)
        schedule = mqa.compute_paged_mqa_logits_schedule(layout.seq_lens, next_n=next_n)
        out = torch.empty(rows, width, device=device)
        q = q.to(torch.float8_e4m3fn)
        sets.append(InputSet(layout, q, q_fp4, q_sf, weights, out, schedule, torch.empty_like(schedule)))
    return sets


def row_limits(s: InputSet) -> torch.Tensor:
    """[B, n]: how many columns of row (b, t) are defined."""
    next_n = s.q.shape[1]
    return (s.layout.seq_lens[:, None] - next_n + 1 + torch.arange(next_n, device=s.q.device)).clamp_min(0)


def checked_requests(s: InputSet) -> set[int]:
    return {0, len(s.layout.seq_lens) - 1}


def checked_part(s: InputSet, logits: torch.Tensor) -> torch.Tensor:
    """Every defined logit of the checked requests, in one row."""
    limits, next_n = row_limits(s).tolist(), s.q.shape[1]
    rows = logits.unflatten(0, (-1, next_n))
    return torch.cat([rows[b, t, : limits[b][t]] for b in checked_requests(s) for t in range(next_n)])


def dequantised(s: InputSet, pool: torch.Tensor, pages: torch.Tensor, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float64: q, and the keys of these blocks [tokens, D]."""
    blocks = pool.flatten(1)[pages]
    if cache == "mxfp4":
        codes, scales = blocks.split([BLOCK * HEAD_DIM // 2, BLOCK * 4], 1)
        keys = from_mxfp4(codes.reshape(-1, HEAD_DIM // 2), scales.reshape(-1, 4))
        return from_mxfp4(s.q_fp4, s.q_sf.unsqueeze(-1).view(torch.uint8)), keys
    values, scales = blocks.split([BLOCK * HEAD_DIM, BLOCK * 4], 1)
    keys = values.contiguous().view(torch.float8_e4m3fn).float().double().view(-1, HEAD_DIM)
    return s.q.float().double(), keys * scales.contiguous().view(torch.float32).double().view(-1, 1)


def reference_part(s: InputSet, pool: torch.Tensor, cache: str) -> torch.Tensor:
    """The same logits by the formula, in float64."""
    limits, next_n = row_limits(s).tolist(), s.q.shape[1]
    parts = []
    for b in checked_requests(s):
        pages = s.layout.block_tables[b, : -(-int(s.layout.seq_lens[b]) // BLOCK)].long()
        q, k = dequantised(s, pool, pages, cache)
        for t in range(next_n):
            limit, weights = limits[b][t], s.weights[b * next_n + t].double()
            parts.append(weights @ (q[b, t] @ k[:limit].T).relu())
    return torch.cat(parts)


def check(name: str, call: Callable, sets: list[InputSet], reference: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Relative error on the checked part of the first set, and that part; every set must be fully written."""
    first = None
    for s in sets:
        # For calls given s.out, and for those that allocate: the block freed here is what they will get.
        s.out.fill_(torch.nan)
        torch.full_like(s.out, torch.nan)
        logits = call(s)
        limits = row_limits(s).flatten()
        columns = torch.arange(logits.shape[1], device=logits.device)
        unwritten = int((logits.isnan() & (columns < limits[:, None])).sum())
        if unwritten:
            raise RuntimeError(f"{name}: {unwritten} defined logits are NaN: not written, or wrong")
        if first is None:
            first = checked_part(s, logits)
    error = float((first.double() - reference).norm() / reference.norm())
    if not error < 1e-2:
        raise RuntimeError(f"{name}: relative error {error:.1e} against float64")
    return error, first


def our_contenders(pool: torch.Tensor, max_seq_len: int, cache: str = "fp8") -> dict[str, Callable]:
    def logits(s: InputSet, schedule: torch.Tensor | None = None) -> torch.Tensor:
        if cache == "mxfp4":
            return mqa.fp4_paged_mqa_logits(
                s.q_fp4,
                s.q_sf,
                pool,
                s.weights,
                s.layout.block_tables,
                s.layout.seq_lens,
                max_seq_len,
                output_dtype=torch.float32,
                schedule_meta=schedule,
                out=s.out,
            )
        return mqa.fp8_paged_mqa_logits(
            s.q,
            pool,
            s.weights,
            s.layout.block_tables,
            s.layout.seq_lens,
            max_seq_len,
            schedule_meta=schedule,
            out=s.out,
        )

    def schedule_and_logits(s: InputSet) -> torch.Tensor:
        next_n = s.q.shape[1]
        mqa.compute_paged_mqa_logits_schedule(s.layout.seq_lens, next_n=next_n, out=s.schedule_buffer)
        return logits(s, s.schedule_buffer)

    return {
        "ours": logits,
        "ours, schedule given": lambda s: logits(s, s.schedule),
        "ours, schedule + logits": schedule_and_logits,
    }


def deep_gemm_contenders(pool: torch.Tensor, sets: list[InputSet], max_seq_len: int) -> dict[str, Callable]:
    """DeepGEMM on the same inputs. On Hopper it takes next_n 1 and 2: more are folded into the batch."""
    import deep_gemm

    batch, next_n, heads, _ = sets[0].q.shape
    fold = 1
    if next_n > 2 and torch.cuda.get_device_capability()[0] == 9:
        fold = next_n // 2 if next_n % 2 == 0 else next_n
    prepared = {}
    for s in sets:
        q = s.q.view(batch * fold, next_n // fold, heads, HEAD_DIM)
        lens = row_limits(s).int().view(batch * fold, -1)
        tables = s.layout.block_tables.repeat_interleave(fold, 0)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, BLOCK, deep_gemm.get_num_sms())
        prepared[id(s)] = (q, lens, tables, schedule)

    def logits(s: InputSet, fresh_schedule: bool = False) -> torch.Tensor:
        q, lens, tables, schedule = prepared[id(s)]
        if fresh_schedule:
            schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, BLOCK, deep_gemm.get_num_sms())
        return deep_gemm.fp8_paged_mqa_logits(
            q, pool, s.weights, lens, tables, schedule, max_seq_len, clean_logits=False
        )

    return {"deep_gemm": logits, "deep_gemm, schedule + logits": lambda s: logits(s, True)}


def plain_gather(pool: torch.Tensor, layouts: list[Layout]) -> tuple[str, list[Callable]]:
    """The roof of a paged read: the same blocks, one float32 per token. Returns the fastest tile's calls."""
    from triton_kernels import gather_kernel

    value_words = pool.shape[-1] // 4 - 1
    words = pool.view(len(pool), -1).view(torch.int32)
    blocks = words[layouts[0].pages.long()]
    values = blocks[:, : BLOCK * value_words].reshape(-1, value_words)
    expected = (values.sum(1) + blocks[:, BLOCK * value_words :].flatten()).int().float()
    outs = [torch.empty(len(layout.pages) * BLOCK, device=pool.device) for layout in layouts]
    candidates = {}
    for tile, warps in GATHER_TILES:
        calls = [
            functools.partial(
                gather_kernel[(-(-len(out) // tile),)],
                words, layout.pages, out, len(out),
                BLOCK=BLOCK, WORDS=value_words, TILE=tile, num_warps=warps,
            )
            for layout, out in zip(layouts, outs, strict=True)
        ]  # fmt: skip
        outs[0].fill_(torch.nan)
        calls[0]()
        if not torch.equal(outs[0], expected):
            raise RuntimeError(f"the plain gather with tile {tile} does not read what it should")
        candidates[f"{tile} tokens {warps} warps"] = calls
    times = common.graph_times(candidates, target_ms=1.0, replays=5)
    best = min(times, key=lambda name: times[name]["us"])
    return best, candidates[best]


def base_row(batch: int, mean: int, sets: list[InputSet], cache: str) -> dict:
    next_n, heads = sets[0].q.shape[1:3]
    tokens = statistics.mean(int(s.layout.seq_lens.sum()) for s in sets)
    return {
        "batch": batch,
        "mean": mean,
        "next_n": next_n,
        "heads": heads,
        "sets": len(sets),
        "tokens": tokens,
        "useful_bytes": tokens * token_bytes(cache) + tokens * next_n * 4,
        "gather_bytes": tokens * (token_bytes(cache) + 4),
        "flops": 2 * tokens * next_n * heads * HEAD_DIM,
    }


def add_rates(row: dict) -> None:
    us = row["times"]["ours"]["us"]
    row["useful_gbs"] = row["useful_bytes"] / us / 1e3
    row["tflops"] = row["flops"] / us / 1e6


def cuda_row(
    pools: dict[str, torch.Tensor],
    cache: str,
    shape: tuple[int, int],
    sets: list[InputSet],
    max_seq_len: int,
    gather: list[Callable],
    peer: str | None,
) -> dict:
    row = base_row(*shape, sets, cache)
    reference = reference_part(sets[0], pools[cache], cache)
    ours = our_contenders(pools[cache], max_seq_len, cache)
    errors, results, contenders = {}, {}, dict(ours)
    for name, call in ours.items():
        errors[name], results[name] = check(name, call, sets, reference)
        if not torch.equal(results[name], results["ours"]):
            raise RuntimeError(f"{name}: a schedule changed the result")
    fp8_reference = reference
    if cache != "fp8":
        fp8_reference = reference_part(sets[0], pools["fp8"], "fp8")
        contenders["ours, fp8"] = our_contenders(pools["fp8"], max_seq_len)["ours"]
        errors["ours, fp8"] = check("ours, fp8", contenders["ours, fp8"], sets, fp8_reference)[0]
    if peer:
        try:
            theirs = deep_gemm_contenders(pools["fp8"], sets, max_seq_len)
            errors |= {name: check(name, call, sets, fp8_reference)[0] for name, call in theirs.items()}
            contenders |= theirs
        except RuntimeError as refusal:  # a shape it does not take, or a wrong result
            row["peer_failed"] = str(refusal).splitlines()[0]
    timed = {name: [functools.partial(call, s) for s in sets] for name, call in contenders.items()}
    row["times"] = common.graph_times({**timed, "plain gather": gather})
    row["errors"] = errors
    row["times_plain_gather"] = row["times"]["ours"]["us"] / row["times"]["plain gather"]["us"]
    add_rates(row)
    return row


def eager_torch(pool: torch.Tensor, s: InputSet) -> torch.Tensor:
    """The formula as one writes it in torch: gather, dequantise, multiply, rectify, weighted sum."""
    batch, next_n, heads, _ = s.q.shape
    blocks = pool.flatten(1)[s.layout.block_tables.long()]
    k = blocks[..., : BLOCK * HEAD_DIM].view(torch.float8_e4m3fn).float().view(batch, -1, HEAD_DIM)
    scale = blocks[..., BLOCK * HEAD_DIM :].view(torch.float32).reshape(batch, 1, -1)
    products = (s.q.float().flatten(1, 2) @ k.mT).relu().view(batch, next_n, heads, -1)
    logits = (s.weights.view(batch, next_n, 1, heads) @ products).squeeze(2) * scale
    return logits.flatten(0, 1)


def cpu_row(pool: torch.Tensor, shape: tuple[int, int], sets: list[InputSet], max_seq_len: int) -> dict:
    row = base_row(*shape, sets, "fp8")
    reference = reference_part(sets[0], pool, "fp8")
    calls = {
        "ours": our_contenders(pool, max_seq_len)["ours"],
        "eager torch": functools.partial(eager_torch, pool),
    }
    row["errors"] = {name: check(name, call, sets, reference)[0] for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(common.REPLAYS):
        for name, call in calls.items():
            start = time.perf_counter()
            call(sets[i % len(sets)])
            times[name].append((time.perf_counter() - start) * 1e6)
    row["times"] = {name: common.summary(values) for name, values in times.items()}
    add_rates(row)
    return row


def bench_quantisers(pool: torch.Tensor) -> list[dict]:
    """The quantisers and the gathers at 65,536 tokens, against a copy of as many bytes.

    Overwrites the pool. As many input sets as put 0.7 GB between two uses of the same one.
    """
    from triton_kernels import copy_kernel

    tokens, heads, requests, device = QUANTISED_TOKENS, 64, 16, pool.device

    def timed(op: str, num_bytes: int, calls: list[Callable]) -> dict:
        words = num_bytes // 8  # half of the bytes are read, half are written
        src = torch.randint(-(2**31), 2**31 - 1, (len(calls), words), dtype=torch.int32, device=device)
        dst = torch.empty_like(src)
        grid, tile = (-(-words // 4096),), 4096
        copies = [
            functools.partial(copy_kernel[grid], src[i], dst[i], words, TILE=tile, num_warps=4)
            for i in range(len(calls))
        ]
        times = common.graph_times({"ours": calls, "copy": copies})
        return {"op": op, "bytes": num_bytes, "sets": len(calls), "times": times}

    q = torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
    weights = torch.rand(tokens, heads, device=device) + 0.5
    rows = tokens * heads
    results = []
    for op, call, row_bytes in (
        ("quantize_q_fp8", functools.partial(mqa.quantize_q_fp8, q, weights), 2 * HEAD_DIM + 4 + HEAD_DIM + 4),
        ("quantize_q_mxfp4", functools.partial(mqa.quantize_q_mxfp4, q), 2 * HEAD_DIM + HEAD_DIM // 2 + 4),
    ):
        results.append(timed(op, rows * row_bytes, [call]))
        torch.cuda.empty_cache()
    del q, weights

    blocks = tokens // BLOCK
    cu_seq_lens = torch.arange(requests + 1, dtype=torch.int32, device=device) * (tokens // requests)
    for op_format in ("fp8", "mxfp4"):
        bytes_of_token = token_bytes(op_format)
        cache = pool.flatten()[: len(pool) * BLOCK * bytes_of_token].view(-1, BLOCK, 1, bytes_of_token)
        write = getattr(mqa, f"quantize_k_cache_{op_format}")
        read = getattr(mqa, f"gather_k_cache_{op_format}")
        order = torch.randperm(len(cache), device=device)
        num_sets = -(-700_000_000 // (tokens * 2 * HEAD_DIM))
        keys = torch.randn(num_sets, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
        slots = order[: num_sets * blocks, None] * BLOCK + torch.arange(BLOCK, device=device)
        slots = slots.view(num_sets, tokens)
        writes = [functools.partial(write, keys[i], slots[i], cache) for i in range(num_sets)]
        results.append(timed(f"quantize_k_cache_{op_format}", tokens * (2 * HEAD_DIM + 8 + bytes_of_token), writes))
        del keys, slots, writes
        num_sets = min(-(-700_000_000 // (tokens * bytes_of_token)), len(cache) // blocks)
        tables = order[: num_sets * blocks].int().view(num_sets, requests, -1)
        reads = [functools.partial(read, cache, tables[i], cu_seq_lens, tokens) for i in range(num_sets)]
        results.append(timed(f"gather_k_cache_{op_format}", tokens * 2 * bytes_of_token, reads))
        torch.cuda.empty_cache()
    return results


def bench_options(pool: torch.Tensor) -> list[dict]:
    """Result types, lengths per slot and clean_logits at H 32, against the plain call."""
    layouts = draw_layouts(64, 32768, len(pool), 2, pool.device)
    max_seq_len = max(int(layout.seq_lens.max()) for layout in layouts)
    rows = []
    for next_n in (1, 4):
        sets = make_sets(layouts, 32, next_n, max_seq_len)

        def calls(
            dtype: torch.dtype = torch.float32, lengths_per_slot: bool = False, clean: bool = False, sets: list = sets
        ) -> list[Callable]:
            return [
                functools.partial(
                    mqa.fp8_paged_mqa_logits,
                    s.q,
                    pool,
                    s.weights,
                    s.layout.block_tables,
                    row_limits(s).int() if lengths_per_slot else s.layout.seq_lens,
                    max_seq_len,
                    output_dtype=dtype,
                    clean_logits=clean,
                    out=torch.empty(s.out.shape, dtype=dtype, device=pool.device),
                )
                for s in sets
            ]

        times = common.graph_times(
            {
                "float32": calls(),
                "bfloat16": calls(torch.bfloat16),
                "float16": calls(torch.float16),
                "lengths per slot": calls(lengths_per_slot=True),
                "clean_logits": calls(clean=True),
            },
            target_ms=1.5,
        )
        dead = statistics.mean(int((max_seq_len - row_limits(s)).sum()) for s in sets) * 4
        rows.append({"batch": 64, "mean": 32768, "heads": 32, "next_n": next_n, "dead_bytes": dead, "times": times})
    return rows


def bench_batches(pool: torch.Tensor) -> list[dict]:
    """Batches from 1 to 32768 of equal requests, and one very uneven batch, at H 64; keys may be in L2."""
    device, heads, width = pool.device, 64, 512

    def inputs(lens: torch.Tensor, width: int) -> tuple:
        batch = len(lens)
        q = torch.randn(batch, 1, heads, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
        tables = torch.randint(0, len(pool), (batch, -(-width // BLOCK)), dtype=torch.int32, device=device)
        return q, pool, torch.randn(batch, heads, device=device), tables, lens, width

    def microseconds(call: Callable) -> float:
        return common.graph_times({"ours": [call] * 4}, target_ms=0.5, replays=5)["ours"]["us"]

    def logits_us(lens: torch.Tensor, width: int) -> float:
        out = torch.empty(len(lens), mqa.padded_seq_len(width), device=device)
        return microseconds(functools.partial(mqa.fp8_paged_mqa_logits, *inputs(lens, width), out=out))

    rows = []
    for length in (64, 512):
        for batch in (1, 2, 4, 8, 16, 32, 33, 64, 128, 129, 256, 512, 1024, 1025, 2048, 4096, 8192, 16384, 32768):
            lens = torch.full((batch,), length, dtype=torch.int32, device=device)
            schedule_us = microseconds(functools.partial(mqa.compute_paged_mqa_logits_schedule, lens))
            rows.append({"batch": batch, "length": length, "us": logits_us(lens, width), "schedule_us": schedule_us})
    uneven = torch.full((64,), 100, dtype=torch.int32, device=device)
    uneven[17] = 500_000
    for name, lens in (("500,000 among 63 x 100", uneven), ("500,000 alone", uneven[17:18])):
        rows.append({"batch": len(lens), "length": name, "us": logits_us(lens, 500_000), "schedule_us": None})
    return rows


def bench_host(pool: torch.Tensor, peer: str | None) -> dict[str, float]:
    """Host microseconds per eager call, on a problem whose kernel is shorter than the call."""
    [s] = make_sets(draw_layouts(4, 256, len(pool), 1, pool.device), 64, 1, 512)
    calls = {name: functools.partial(call, s) for name, call in our_contenders(pool, 512).items()}
    calls["ours, fresh result"] = lambda: mqa.fp8_paged_mqa_logits(
        s.q, pool, s.weights, s.layout.block_tables, s.layout.seq_lens, 512
    )
    if peer:
        calls |= {name: functools.partial(call, s) for name, call in deep_gemm_contenders(pool, [s], 512).items()}
    few = torch.zeros(16, device=pool.device)
    calls["torch add_ on 16 floats"] = lambda: few.add_(1)
    return common.host_us(calls)


def us(row: dict, name: str) -> str:
    return f"{row['times'][name]['us']:.2f}" if name in row["times"] else "-"


def print_cuda_rows(record: dict) -> None:
    header = ["shape", "n", "H", "us", "given", "+ sched", "gather us", "GB/s", "% roof", "x gather"]
    header += ["TFLOP/s", "error"]
    rows = [
        [
            f"{row['batch']} x {row['mean']}",
            str(row["next_n"]),
            str(row["heads"]),
            us(row, "ours"),
            us(row, "ours, schedule given"),
            us(row, "ours, schedule + logits"),
            us(row, "plain gather"),
            f"{row['useful_gbs']:.0f}",
            f"{100 * row['read_roof_share']:.1f}",
            f"{row['times_plain_gather']:.2f}",
            f"{row['tflops']:.0f}",
            f"{row['errors']['ours']:.1e}",
        ]
        for row in record["rows"]
    ]
    if record["cache"] != "fp8":
        header += ["fp8 us", "fp8/ours"]
        for line, row in zip(rows, record["rows"], strict=True):
            line += [us(row, "ours, fp8"), f"{row['times']['ours, fp8']['us'] / row['times']['ours']['us']:.2f}"]
    if record["peer"]:
        header += ["peer us", "+ sched", "peer/given", "peer error"]
        for line, row in zip(rows, record["rows"], strict=True):
            theirs = row["times"].get(record["peer"])
            ratio = f"{theirs['us'] / row['times']['ours, schedule given']['us']:.2f}" if theirs else "-"
            error = f"{row['errors'][record['peer']]:.1e}" if theirs else "-"
            line += [
                us(row, record["peer"]),
                us(row, f"{record['peer']}, schedule + logits"),
                ratio,
                error,
            ]
    print(common.format_table(header, rows))


def print_cuda_extras(record: dict) -> None:
    options = [
        [f"{r['batch']} x {r['mean']}", str(r["next_n"]), str(r["heads"]), f"{r['dead_bytes'] / 1e6:.1f}"]
        + [us(r, name) for name in r["times"]]
        for r in record["options"]
    ]
    print("\noptions, us:")
    print(common.format_table(["shape", "n", "H", "dead MB", *record["options"][0]["times"]], options))
    batches = [
        [
            str(r["batch"]),
            str(r["length"]),
            f"{r['us']:.2f}",
            f"{1e3 * r['us'] / r['batch']:.1f}",
            "-" if r["schedule_us"] is None else f"{r['schedule_us']:.2f}",
        ]
        for r in record["batches"]
    ]
    print("\nbatches of equal requests, and an uneven one, H 64:")
    print(common.format_table(["batch", "length", "us", "ns a request", "schedule us"], batches))
    quantisers = [
        [
            r["op"],
            us(r, "ours"),
            f"{r['bytes'] / r['times']['ours']['us'] / 1e3:.0f}",
            us(r, "copy"),
            f"{r['times']['copy']['us'] / r['times']['ours']['us']:.2f}",
        ]
        for r in record["quantisers"]
    ]
    print(f"\n{QUANTISED_TOKENS} tokens, D {HEAD_DIM} (q: 64 heads):")
    print(common.format_table(["op", "us", "GB/s", "copy us", "of its speed"], quantisers))
    print("\nhost time of one eager call:")
    host = [[name, f"{microseconds:.1f}"] for name, microseconds in record["host_us"].items()]
    print(common.format_table(["call", "us"], host))


def print_cpu_table(record: dict) -> None:
    header = ["shape", "n", "H", "us", "GB/s", "TFLOP/s", "error", "eager torch us", "eager/ours"]
    rows = [
        [
            f"{row['batch']} x {row['mean']}",
            str(row["next_n"]),
            str(row["heads"]),
            f"{row['times']['ours']['us']:.0f}",
            f"{row['useful_gbs']:.2f}",
            f"{row['tflops']:.3f}",
            f"{row['errors']['ours']:.1e}",
            f"{row['times']['eager torch']['us']:.0f}",
            f"{row['times']['eager torch']['us'] / row['times']['ours']['us']:.2f}",
        ]
        for row in record["rows"]
    ]
    print(common.format_table(header, rows))


def parse_arguments() -> argparse.Namespace:
    def shape(text: str) -> tuple[int, int]:
        batch, mean = text.split("x")
        return int(batch), int(mean)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--next-n", type=int, nargs="+", help="default: 1 2 3 4 (CPU: 1 2)")
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="BATCHxMEAN", help="for example 1x131072")
    parser.add_argument("--block-size", type=int, default=BLOCK, help="tokens per block")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--cache", choices=["fp8", "mxfp4"], default="fp8", help="mxfp4: against fp8 too (CUDA)")
    parser.add_argument("--peer", choices=["deep_gemm"], help="time this package beside ours (CUDA)")
    parser.add_argument("--output", type=pathlib.Path, default=common.RESULTS, metavar="DIR")
    return parser.parse_args()


def run_cuda(arguments: argparse.Namespace, record: dict) -> pathlib.Path:
    device = torch.device("cuda", torch.cuda.current_device())
    record["ceilings"] = ceilings = common.ceilings()
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in ceilings.items() if isinstance(rate, float))
    print(f"ceilings: {rates}", flush=True)
    torch.cuda.empty_cache()
    num_blocks = CUDA_POOL_BYTES // (BLOCK * token_bytes("fp8"))
    pools = {"fp8": make_pool(num_blocks, device)}
    if arguments.cache == "mxfp4":
        pools["mxfp4"] = make_mxfp4_pool(num_blocks, device)
    for shape in arguments.shapes or CUDA_SHAPES:
        layouts = draw_layouts(*shape, num_blocks, CUDA_MAX_SETS, device)
        max_seq_len = max(int(layout.seq_lens.max()) for layout in layouts)
        tile, gather = plain_gather(pools[arguments.cache], layouts)
        for heads in arguments.heads:
            for next_n in arguments.next_n or [1, 2, 3, 4]:
                sets = make_sets(layouts, heads, next_n, max_seq_len)
                row = cuda_row(pools, arguments.cache, shape, sets, max_seq_len, gather, arguments.peer)
                row["gather_tile"] = tile
                row["read_roof_share"] = row["useful_gbs"] / ceilings["read_gbs"]
                record["rows"].append(row)
                del sets
                torch.cuda.empty_cache()
                times = "; ".join(f"{name} {t['us']:.2f}" for name, t in row["times"].items())
                print(f"{shape[0]} x {shape[1]} n {next_n} H {heads}, us: {times}", flush=True)
    common.save(record, arguments.output)  # nothing below costs as much to measure again
    print()
    print_cuda_rows(record)
    if (BLOCK, HEAD_DIM) == USUAL and arguments.cache == "fp8":
        pool = pools["fp8"]
        record["host_us"] = bench_host(pool, arguments.peer)
        record["options"] = bench_options(pool)
        record["batches"] = bench_batches(pool)
        record["quantisers"] = bench_quantisers(pool)
        print_cuda_extras(record)
    return common.save(record, arguments.output)


def run_cpu(arguments: argparse.Namespace, record: dict) -> pathlib.Path:
    device = torch.device("cpu")
    pool = make_pool(CPU_POOL_BLOCKS, device)
    for shape in arguments.shapes or CPU_SHAPES:
        layouts = draw_layouts(*shape, len(pool), CPU_MAX_SETS, device)
        max_seq_len = max(int(layout.seq_lens.max()) for layout in layouts)
        for heads in arguments.heads:
            for next_n in arguments.next_n or [1, 2]:
                sets = make_sets(layouts, heads, next_n, max_seq_len)
                row = cpu_row(pool, shape, sets, max_seq_len)
                record["rows"].append(row)
                us = row["times"]["ours"]["us"]
                print(f"{shape[0]} x {shape[1]} n {next_n} H {heads}: {us:.0f} us", flush=True)
    print()
    print_cpu_table(record)
    return common.save(record, arguments.output)


def main() -> None:
    global BLOCK, HEAD_DIM
    arguments = parse_arguments()
    BLOCK, HEAD_DIM = arguments.block_size, arguments.head_dim
    name = (
        "paged_logits"
        + ("" if arguments.cache == "fp8" else f"_{arguments.cache}")
        + ("" if USUAL == (BLOCK, HEAD_DIM) else f"_s{BLOCK}_d{HEAD_DIM}")
    )
    on_gpu = torch.cuda.is_available()
    if arguments.cache == "mxfp4" and not (on_gpu and HEAD_DIM == 128):
        raise SystemExit("--cache mxfp4 needs a CUDA device and head dim 128")
    if arguments.peer:
        if not on_gpu:
            raise SystemExit("--peer needs a CUDA device")
        try:
            __import__(arguments.peer)
        except ImportError as error:
            raise SystemExit(f"--peer {arguments.peer}: {error}") from error
    record = {
        "bench": name,
        "block_size": BLOCK,
        "head_dim": HEAD_DIM,
        "cache": arguments.cache,
        **common.environment(torch.device("cuda" if on_gpu else "cpu")),
    }
    record |= {"method": METHOD if on_gpu else CPU_METHOD, "peer": arguments.peer, "rows": []}
    print(f"{record['card']}, torch {record['torch']}, commit {record['commit']}", flush=True)
    path = (run_cuda if on_gpu else run_cpu)(arguments, record)
    print(f"\n{path}")
    if on_gpu:
        print(plot.draw(path))


if __name__ == "__main__":
    main()
