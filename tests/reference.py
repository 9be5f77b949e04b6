"""The truth, slow and obvious, from the formulas and byte layouts alone: nothing here calls the library.

Scores are float64 and decode e4m3 by a table made from the format's definition. Quantisers are exact: IEEE
float32 in numpy, then a search for the nearest of the 127 finite magnitudes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

UNIT = 256  # tokens per unit of the work schedule


def e4m3_value(code: int) -> float:
    """Bias 7, no infinity, 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


E4M3 = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)
MAGNITUDES = E4M3[:0x7F].numpy()  # 0 to 448, ascending: a magnitude's index is its code


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return E4M3.to(codes.device)[codes.view(torch.uint8).long()]


# Codes of e2m1: bit 3 is the sign.
E2M1 = torch.tensor([s * m for s in (1.0, -1.0) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], dtype=torch.float64)


def decode_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed codes [..., D/2], the even element in the low nibble, and UE8M0 scales [..., D/32], 255 being NaN."""
    codes = codes.view(torch.uint8).long()
    values = E2M1.to(codes.device)[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
    factors = torch.exp2(scales.double() - 127).masked_fill(scales == 255, float("nan"))
    return values * factors.repeat_interleave(32, -1)


# Paged logits


@dataclass
class Truth:
    """All [rows, max_seq_len]."""

    logits: torch.Tensor  # float64, -inf past the row's limit and where the page is absent
    live: torch.Tensor  # bool, columns below the row's limit
    noise: torch.Tensor  # float64, root of the sum of squares of the terms that make the score


def row_limits(
    seq_lens: torch.Tensor, next_n: int, max_seq_len: int, table_width: int, block_size: int
) -> list[list[int]]:
    """Per request, per slot, how many columns are defined."""
    limits = []
    for entry in seq_lens.tolist():
        slots = entry if isinstance(entry, list) else [entry - next_n + t + 1 for t in range(next_n)]
        limits.append([min(max(0, length), max_seq_len, table_width * block_size) for length in slots])
    return limits


def paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
) -> Truth:
    block_size, dim = kv_fused.shape[1], q.shape[3]

    def keys_of(block_bytes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = block_bytes[:, : block_size * dim].reshape(-1, dim)
        scales = block_bytes[:, block_size * dim :].contiguous().view(torch.float32).flatten()
        return decode_e4m3(codes), scales.double()

    return _score(decode_e4m3(q), kv_fused, weights, block_tables, seq_lens, max_seq_len, keys_of)


def fp4_paged_mqa_logits(
    q: torch.Tensor,
    q_sf: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    is_kv_sf_interleaved: bool,
) -> Truth:
    block_size, dim = kv_fused.shape[1], 2 * q.shape[3]

    def keys_of(block_bytes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = block_bytes[:, : block_size * dim // 2].reshape(-1, dim // 2)
        scales = block_bytes[:, block_size * dim // 2 :].reshape(-1, block_size, dim // 32)
        if is_kv_sf_interleaved:
            scales = scales[:, [4 * (t % 32) + t // 32 for t in range(block_size)]]
        keys = decode_mxfp4(codes, scales.reshape(-1, dim // 32))
        return keys, torch.ones(len(keys), dtype=torch.float64, device=keys.device)

    scales = q_sf.contiguous().unsqueeze(-1).view(torch.uint8)[..., : dim // 32]
    return _score(decode_mxfp4(q, scales), kv_fused, weights, block_tables, seq_lens, max_seq_len, keys_of)


def _score(
    queries: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    keys_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Truth:
    """The formula; queries are float64 [B, n, H, D], `keys_of` gives those of blocks' bytes, and their scales."""
    batch, next_n, heads, _ = queries.shape
    blocks, block_size = kv_fused.shape[:2]
    limits = row_limits(seq_lens, next_n, max_seq_len, block_tables.shape[1], block_size)
    gates = weights.double().view(batch, next_n, heads) if batch else None
    logits = torch.full((batch, next_n, max_seq_len), float("-inf"), dtype=torch.float64, device=queries.device)
    live = torch.zeros(logits.shape, dtype=torch.bool, device=queries.device)
    noise = torch.zeros_like(logits)
    for b in range(batch):
        tokens = max(limits[b])
        pages = block_tables[b, : -(-tokens // block_size)].long()
        absent = ((pages < 0) | (pages >= blocks)).repeat_interleave(block_size)[:tokens]
        keys, scales = keys_of(kv_fused[pages.where((pages >= 0) & (pages < blocks), 0)].flatten(1))
        keys, scales = keys[:tokens], scales[:tokens]
        for t in range(next_n):
            gate = gates[b, t][:, None]
            score = (gate * torch.relu(queries[b, t] @ keys.T)).sum(0) * scales
            spread = (gate.square() * (queries[b, t].square() @ keys.T.square())).sum(0).sqrt() * scales.abs()
            end = limits[b][t]
            logits[b, t, :end] = torch.where(absent, float("-inf"), score)[:end]
            noise[b, t, :end] = spread[:end]
            live[b, t, :end] = True
    return Truth(logits.flatten(0, 1), live.flatten(0, 1), noise.flatten(0, 1))


# Rounding errors of a sum are independent, so they scale with the root of the sum of squares of its terms
# (`noise`), not with the sum of their magnitudes, which would allow errors as large as the scores themselves.
# cpu: float32 throughout, 2^-24 per rounding; 2^-21 is the worst that the plain formula shows.
# cuda: fp8 tensor cores align the 32 products of a step to the largest and cut off what is below about 13 bits; all
# errors have one sign then. 2^-9 is the worst seen on an H200 (the portable kernel, with half operands: 2^-16).
ROUNDING = {"cpu": 2.0**-18, "cuda": 2.0**-8}
MAX_DIFF = {torch.float32: 5e-6, torch.bfloat16: 3e-5, torch.float16: 3e-5}


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2), 0 when the denominator is 0."""
    x, y = x.double(), y.double()
    denominator = (x * x + y * y).sum().item()
    # (x - y)^2 / denominator is the same number without the cancellation.
    return ((x - y).square().sum().item() / denominator) if denominator else 0.0


def assert_logits(actual: torch.Tensor, truth: Truth, *, clean: bool = False) -> None:
    """NaN and infinities in their places first, then every score, then all of them together.

    clean: the columns past each row's limit are compared too.
    """
    assert actual.shape == truth.logits.shape, f"shape {tuple(actual.shape)}, not {tuple(truth.logits.shape)}"
    expected, noise, live = (x.to(actual.device) for x in (truth.logits, truth.noise, truth.live))
    cells = torch.ones_like(live) if clean else live
    rounded = expected.to(actual.dtype)  # the output type may overflow
    for name, special in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = cells & (special(actual) != special(rounded))
        assert not wrong.any(), f"{name} misplaced at (row, column) {wrong.nonzero()[:4].tolist()}"

    cells = cells & rounded.isfinite()
    if not cells.any():
        return
    info = torch.finfo(actual.dtype)
    half_ulp = 0.505 * info.eps * expected.abs() + 0.5 * info.smallest_normal * info.eps
    allowed = ROUNDING[actual.device.type] * noise + half_ulp
    excess = torch.where(cells, (actual.double() - expected).abs() - allowed, 0.0)
    worst = int(excess.argmax())
    assert excess.flatten()[worst] <= 0, (
        f"score {actual.flatten()[worst].item()} at (row, column) {divmod(worst, actual.shape[1])}, "
        f"not {expected.flatten()[worst].item()}; allowed error {allowed.flatten()[worst].item()}; "
        f"{int((excess > 0).sum())} of {int(cells.sum())} scores are wrong"
    )
    diff = calc_diff(actual[cells], expected[cells])
    assert diff < MAX_DIFF[actual.dtype], f"calc_diff {diff}"


# Schedule


def schedule(lengths: list, workers: int) -> list[list[int]]:
    """Where each worker starts, (request, offset in units); the first `total % workers` get one more unit."""
    longest = [max(entry) if isinstance(entry, list) else entry for entry in lengths]
    units = [-(-max(0, length) // UNIT) for length in longest]
    ends = list(itertools.accumulate(units))
    share, extra = divmod(ends[-1] if ends else 0, workers)
    rows = []
    for worker in range(workers + 1):
        start = worker * share + min(worker, extra)
        request = bisect.bisect_right(ends, start)
        before = ends[request - 1] if request else 0
        rows.append([request, start - before if request < len(units) else 0])
    return rows


# Quantisers


def fp8_scale(x: np.ndarray, pow2_scale: bool) -> np.ndarray:
    """Scale of the last dimension, max(amax, 1e-4) / 448; NaN is ignored, infinity gives the largest one."""
    amax = np.where(np.isnan(x), np.float32(0), np.abs(x)).max(-1)
    infinite = np.isinf(amax)
    scale = np.maximum(np.where(infinite, np.float32(0), amax), np.float32(1e-4)) / np.float32(448)
    assert scale.dtype == np.float32
    if pow2_scale:
        mantissa, exponent = np.frexp(scale)  # mantissa in [0.5, 1)
        scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.where(infinite, np.float32(2.0**127 if pow2_scale else np.finfo(np.float32).max), scale)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest magnitude, ties to the even code, saturating; NaN is 0x7F."""
    magnitude = np.abs(x.astype(np.float64))
    middles = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    below = np.searchsorted(middles, magnitude, side="left")  # a tie counts as below
    tie = np.isin(magnitude, middles)
    code = np.where(tie & (below % 2 == 1), below + 1, below)
    return np.where(np.isnan(x), 0x7F, code | np.signbit(x) << 7).astype(np.uint8)


def quantize_fp8(x: torch.Tensor, pow2_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, x's shape) and float32 scales (one per last dimension), on the CPU."""
    values = x.detach().cpu().float().numpy()
    scale = fp8_scale(values, pow2_scale)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        codes = encode_e4m3(values / scale[..., None])
    return torch.from_numpy(codes), torch.from_numpy(scale)


def quantize_q_fp8(
    q: torch.Tensor, weights: torch.Tensor | None, pow2_scale: bool, softmax_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantize_fp8(q, pow2_scale)
    gate = np.float32(1) if weights is None else weights.cpu().float().numpy()
    folded = gate * scale.numpy() * np.float32(1 if softmax_scale is None else softmax_scale)
    return codes, torch.from_numpy(folded)


def write_k_cache_fp8(k: torch.Tensor, slot_mapping: torch.Tensor, kv_fused: torch.Tensor, pow2_scale: bool) -> None:
    """Into a CPU pool, token by token; of two tokens with one slot the later wins."""
    blocks, block_size, _, token_bytes = kv_fused.shape
    dim = token_bytes - 4
    codes, scales = quantize_fp8(k, pow2_scale)
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * block_size:
            continue
        row = slot % block_size
        block = kv_fused[slot // block_size].view(-1)
        block[row * dim : (row + 1) * dim] = codes[token]
        start = block_size * dim + 4 * row
        block[start : start + 4] = scales[token : token + 1].view(torch.uint8)


def gather_k_cache_fp8(
    kv_fused: torch.Tensor, block_tables: torch.Tensor, cu_seq_lens: torch.Tensor, total_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8 [total_tokens, D]) and scales, on the CPU; zero where no request or no page is."""
    blocks, block_size, _, token_bytes = kv_fused.shape
    dim = token_bytes - 4
    pool, table, starts = kv_fused.cpu(), block_tables.tolist(), cu_seq_lens.tolist()
    codes = torch.zeros(total_tokens, dim, dtype=torch.uint8)
    scales = torch.zeros(total_tokens)
    for i in range(total_tokens):
        owner = next((r for r in range(len(table)) if starts[r] <= i < starts[r + 1]), None)
        if owner is None:
            continue
        column, row = divmod(i - starts[owner], block_size)
        page = table[owner][column] if column < len(table[owner]) else -1
        if not 0 <= page < blocks:
            continue
        block = pool[page].reshape(-1)
        codes[i] = block[row * dim : (row + 1) * dim]
        start = block_size * dim + 4 * row
        scales[i] = block[start : start + 4].clone().view(torch.float32)[0]
    return codes, scales


# MXFP4: exact in Python's integers and fractions where float32 is not asked for


def mxfp4_scale_code(group: np.ndarray) -> int:
    """UE8M0 code of a float32 group: max(amax, 1e-4) / 6 in float32, up to a power of two; the largest if infinite."""
    amax = max([np.float32(0), *(abs(x) for x in group if not np.isnan(x))])
    if np.isinf(amax):
        return 254
    quotient = Fraction(float(max(amax, np.float32(1e-4)) / np.float32(6)))
    exponent = -127
    while Fraction(2) ** exponent < quotient:
        exponent += 1
    return 127 + exponent


def e2m1_code(x: float, scale_code: int) -> int:
    """Nearest magnitude to x / 2^(scale_code - 127), the lower of two as near; no negative zero; NaN is 0."""
    if np.isnan(x):
        return 0
    magnitudes = [Fraction(int(2 * m), 2) for m in E2M1[:8].tolist()]
    y = Fraction(6) if np.isinf(x) else min(Fraction(abs(float(x))) / Fraction(2) ** (scale_code - 127), Fraction(6))
    code = min(range(8), key=lambda c: (abs(magnitudes[c] - y), c))
    return code | 8 if code and x < 0 else code


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes uint8 [rows, D/2] and scale codes uint8 [rows, D/32], on the CPU."""
    rows = x.detach().cpu().float().numpy().reshape(-1, x.shape[-1] // 32, 32)
    scales = [[mxfp4_scale_code(group) for group in row] for row in rows]
    codes = [
        [e2m1_code(value, scale) for group, scale in zip(row, row_scales, strict=True) for value in group]
        for row, row_scales in zip(rows, scales, strict=True)
    ]
    nibbles = torch.tensor(codes, dtype=torch.uint8).view(len(rows), x.shape[-1])
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed, torch.tensor(scales, dtype=torch.uint8).view(len(rows), x.shape[-1] // 32)


def scale_words(scales: torch.Tensor) -> torch.Tensor:
    """Scale codes [rows, D/32] as int32 [rows]; of D 64 bytes 2 and 3 are 127."""
    padded = torch.full((len(scales), 4), 127, dtype=torch.uint8)
    padded[:, : scales.shape[1]] = scales
    return padded.view(torch.int32).squeeze(1)


def mxfp4_places(token: int, block_size: int, dim: int, interleaved: bool) -> tuple[slice, slice]:
    """Where in a block a token's packed values and its scales are."""
    values = slice(token * dim // 2, (token + 1) * dim // 2)
    place = 4 * (token % 32) + token // 32 if interleaved else token
    start = block_size * dim // 2 + place * dim // 32
    return values, slice(start, start + dim // 32)


def write_k_cache_mxfp4(k: torch.Tensor, slot_mapping: torch.Tensor, kv_fused: torch.Tensor, interleaved: bool) -> None:
    """Into a CPU pool, token by token; of two tokens with one slot the later wins."""
    blocks, block_size = kv_fused.shape[:2]
    packed, scales = quantize_mxfp4(k)
    for token, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * block_size:
            continue
        block = kv_fused[slot // block_size].view(-1)
        values_at, scales_at = mxfp4_places(slot % block_size, block_size, k.shape[1], interleaved)
        block[values_at] = packed[token]
        block[scales_at] = scales[token]


def gather_k_cache_mxfp4(
    kv_fused: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    total_tokens: int,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes uint8 [total_tokens, D/2] and int32 scale words, on the CPU; zero where no request or no page is."""
    blocks, block_size, _, token_bytes = kv_fused.shape
    dim = token_bytes * 32 // 17
    pool, table, starts = kv_fused.cpu(), block_tables.tolist(), cu_seq_lens.tolist()
    codes = torch.zeros(total_tokens, dim // 2, dtype=torch.uint8)
    words = torch.zeros(total_tokens, dtype=torch.int32)
    for i in range(total_tokens):
        owner = next((r for r in range(len(table)) if starts[r] <= i < starts[r + 1]), None)
        if owner is None:
            continue
        column, row = divmod(i - starts[owner], block_size)
        page = table[owner][column] if column < len(table[owner]) else -1
        if not 0 <= page < blocks:
            continue
        block = pool[page].reshape(-1)
        values_at, scales_at = mxfp4_places(row, block_size, dim, interleaved)
        codes[i] = block[values_at]
        words[i] = scale_words(block[scales_at][None])[0]
    return codes, words


# Selection


def topk_indices(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    block_size: int | None = None,
) -> torch.Tensor:
    """By a stable sort of every row: NaN last, larger values first, equal ones as they stand."""
    rows, width = logits.shape
    result = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        start = 0 if starts is None else min(max(0, int(starts[row])), width)
        length = min(max(0, int(lengths[row])), width - start)
        part = logits[row, start : start + length].cpu().double()
        nan = part.isnan().nonzero().flatten()
        rest = (~part.isnan()).nonzero().flatten()
        order = torch.cat([rest[torch.sort(part[rest], descending=True, stable=True).indices], nan])
        positions = sorted(order[:k].tolist())
        if block_tables is not None:
            table = block_tables[row * len(block_tables) // rows].tolist()
            columns = [(p // block_size, p % block_size) for p in positions]
            slots = [table[c] * block_size + at for c, at in columns if c < len(table) and table[c] >= 0]
            positions = [slot for slot in slots if slot < 2**31]
        result[row, : len(positions)] = torch.tensor(positions, dtype=torch.int32)
    return result
