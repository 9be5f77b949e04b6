"""fp8_paged_mqa_logits and its schedule: numbers, specials, and independence of everything around a row.

Every call that `score` makes writes into a poisoned `out` inside a larger buffer, whose rest must survive.
B numbers are those of a list of faults known from other implementations.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference
import torch
from inputs import INT_MAX, INT_MIN, contiguous_twin, kv_parts, paged_case, to_device

import torch_mqa_ops as mqa

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUNDARIES = (0, 1, 2, 3, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 512, 640, 1024, 1025)
FILL = -777.0
ROOT = Path(__file__).parent.parent


def score(case: dict, **options) -> torch.Tensor:
    """The op's result in an `out` of odd offset and row stride, with spare rows and columns around."""
    rows, width = case["weights"].shape[0], case["max_seq_len"]
    padded = -(-width // 256) * 256
    dtype = options.get("output_dtype", torch.float32)
    buffer = torch.full((rows + 3, padded + 13), FILL, dtype=dtype, device=case["q"].device)
    out = buffer[1 : rows + 2, 3 : padded + 8]
    result = mqa.fp8_paged_mqa_logits(**case, **options, out=out)
    assert result.shape == (rows, width) and result.dtype == dtype
    assert result.numel() == 0 or (result.data_ptr(), result.stride(0)) == (out.data_ptr(), out.stride(0))
    untouched = torch.ones_like(buffer, dtype=torch.bool)
    untouched[1 : rows + 1, 3 : padded + 3] = False
    assert (buffer[untouched] == buffer[0, 0]).all() and buffer[0, 0] == torch.tensor(FILL, dtype=dtype)
    return result


def check(case: dict, **options) -> torch.Tensor:
    result = score(case, **options)
    reference.assert_logits(result, reference.paged_mqa_logits(**case), clean=options.get("clean_logits", False))
    return result


def live_cells(case: dict) -> torch.Tensor:
    batch, next_n = case["q"].shape[:2]
    table_width, block_size = case["block_tables"].shape[1], case["kv_fused"].shape[1]
    limits = reference.row_limits(case["seq_lens"], next_n, case["max_seq_len"], table_width, block_size)
    ends = torch.tensor(limits, dtype=torch.int64).reshape(batch * next_n, 1)
    return (torch.arange(case["max_seq_len"]) < ends).to(case["q"].device)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same_bits(a: torch.Tensor, b: torch.Tensor, cells: torch.Tensor) -> bool:
    return torch.equal(bits(a)[cells], bits(b)[cells])


def requests(case: dict, which: list[int]) -> dict:
    """The batch made of these requests of the case."""
    batch, next_n, heads = case["q"].shape[:3]
    weights = case["weights"].view(batch, next_n, heads)[which].flatten(0, 1)
    q = case["q"].view(torch.uint8)[which].view(torch.float8_e4m3fn)
    picked = {name: case[name][which] for name in ("block_tables", "seq_lens")}
    return {**case, **picked, "q": q, "weights": weights}


def probe(
    q: torch.Tensor,
    k: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    device: str,
    block_size: int = 64,
) -> dict:
    """One request with these values: q [n, H, D], k [L, D], scales [L], weights [n, H]; pages in reverse."""
    length = k.shape[0]
    pages = -(-length // block_size)
    case = paged_case(1, *q.shape, block_size, [pages * block_size])
    values, pool_scales = kv_parts(case["kv_fused"])
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)
    case["block_tables"][0, :pages] = table
    token = torch.arange(length)
    page, row = table[token // block_size].long(), token % block_size
    values[page, row] = k.to(torch.float8_e4m3fn).view(torch.uint8)
    pool_scales[page, row] = scales
    case["q"].copy_(q.to(torch.float8_e4m3fn)[None])
    case["weights"].copy_(weights)
    case["seq_lens"].fill_(length)
    case["max_seq_len"] = length
    return to_device(case, device)


def in_subprocess(function: Callable, *arguments: object, limit: int = 180) -> str:
    """What a function of this file prints in a process of its own, which must end within the limit."""
    call = f"{function.__name__}(*{arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"from {function.__module__} import {function.__name__}; {call}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Numbers


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_shapes(device: str, heads: int, head_dim: int, block_size: int) -> None:
    """B04, B05, B09, B23, B25, B26, B42, B43, B54: all supported shapes, on inputs where these would show.

    Every number of slots on a GPU, on the CPU a different one for each shape.
    """
    turn = HEADS.index(heads) * 15 + HEAD_DIMS.index(head_dim) * 5 + BLOCK_SIZES.index(block_size)
    for next_n in range(1, 17) if device == "cuda" else [1 + 7 * turn % 16]:
        case = paged_case(
            next_n=next_n,
            heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            lengths=[70, 300, 1000] if heads * next_n <= 512 else [70, 3, 300],
            lengths_2d=turn % 2 == 1,
            weights_dtype=DTYPES[turn // 3 % 3],
            device=device,
            seed=turn,
        )
        check(case, output_dtype=DTYPES[(turn + next_n) % 3], clean_logits=turn % 4 < 2)


@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", DTYPES)
def test_dtypes(device: str, output_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    case = paged_case(next_n=2, weights_dtype=weights_dtype, device=device)
    check(case, output_dtype=output_dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("next_n", [1, 2, 3, 5])
def test_cuda_agrees_with_cpu(next_n: int) -> None:
    case = paged_case(next_n=next_n, lengths_2d=next_n == 3)
    on_cpu = score(case, clean_logits=True)
    truth = reference.paged_mqa_logits(**case)
    truth.logits = on_cpu.double()
    reference.assert_logits(score(to_device(case, "cuda"), clean_logits=True), truth, clean=True)


@pytest.mark.cuda
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_large_batches_and_contexts(next_n: int) -> None:
    """More work than one round of workers, and requests that several workers share."""
    gen = torch.Generator().manual_seed(next_n)
    lengths = torch.randint(0, 2049, (300,), generator=gen).tolist()
    for batch in (lengths, [131_072, 65_537, 1]):
        check(paged_case(next_n=next_n, lengths=batch, device="cuda", seed=next_n), clean_logits=True)


@pytest.mark.parametrize("batch", [33, 1025, 1500])
def test_many_requests(batch: int, device: str) -> None:
    """Many for each worker, most of them short, some empty; kernels split batches over 1,024 by a schedule."""
    gen = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 200, (batch,), generator=gen) * (torch.rand(batch, generator=gen) > 0.2)
    case = paged_case(heads=8, head_dim=32, lengths=lengths.tolist(), device=device)
    expected = check(case, clean_logits=True)
    garbage = torch.randint(-3, batch + 3, (133, 2), dtype=torch.int32, generator=gen).to(device)
    for schedule in (mqa.compute_paged_mqa_logits_schedule(case["seq_lens"]), garbage, garbage[:2]):
        result = score(case, clean_logits=True, schedule_meta=schedule)
        assert same_bits(result, expected, torch.ones_like(result, dtype=torch.bool))


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_unaligned_query(device: str, shift: int) -> None:
    check(paged_case(next_n=2, q_shift=shift, device=device))


def test_results_of_the_contiguous_twin(device: str) -> None:
    """B07, B08, B18: strides change no bit."""
    case = paged_case(next_n=2, device=device)
    expected, live = score(case), live_cells(case)
    assert same_bits(score(contiguous_twin(case)), expected, live)
    every_second_row = case["block_tables"].repeat_interleave(2, 0)[::2]
    assert same_bits(score({**case, "block_tables": every_second_row}), expected, live)
    first_half_of_blocks = torch.cat([case["kv_fused"]] * 2, 1)[:, :64]
    every_second_block = case["kv_fused"].repeat_interleave(2, 0)[::2]
    for pool in (first_half_of_blocks, every_second_block):
        assert pool.stride(0) == 2 * pool[0].numel()
        assert same_bits(score({**case, "kv_fused": pool}), expected, live)


def test_strides_of_zero(device: str) -> None:
    """One query, table, length and row of weights for all requests."""
    one = requests(paged_case(next_n=2, lengths=[300], device=device), [0])
    expected, live = score(one), live_cells(one)
    shared = {
        "q": one["q"].expand(3, -1, -1, -1),
        "block_tables": one["block_tables"].expand(3, -1),
        "seq_lens": one["seq_lens"].expand(3),
        "weights": one["weights"][:1].expand(6, -1),
    }
    one["weights"][1] = one["weights"][0]
    expected = score(one)
    assert same_bits(score({**one, **shared}), expected.repeat(3, 1), live.repeat(3, 1))


def test_strides_of_single_entries_do_not_matter(device: str) -> None:
    case = requests(paged_case(heads=8, head_dim=32, lengths=[60], table_width=1, device=device), [0])
    strides = {"q": (7, 3, 32, 1), "block_tables": (1, 5), "seq_lens": (9,), "weights": (3, 1)}
    odd = dict(case)
    for name, stride in strides.items():
        odd[name] = case[name].as_strided(case[name].shape, stride, case[name].storage_offset())
    assert same_bits(score(odd), score(case), live_cells(case))


# Lengths, limits and the output's columns


@pytest.mark.parametrize("next_n", [1, 2, 3, 5, 16])
def test_boundary_lengths(device: str, next_n: int) -> None:
    """Around every tile and unit; among them rows of length 0 and requests shorter than next_n."""
    case = paged_case(next_n=next_n, heads=16, lengths=BOUNDARIES, device=device)
    check(case)
    check(case, clean_logits=True)


@pytest.mark.parametrize("next_n", [1, 2, 3, 5])
def test_slots_with_their_own_lengths(device: str, next_n: int) -> None:
    lengths = [[BOUNDARIES[(3 * b + 7 * t) % len(BOUNDARIES)] for t in range(next_n)] for b in range(9)]
    check(paged_case(next_n=next_n, heads=32, lengths=lengths, device=device), clean_logits=True)


def test_uneven_slots(device: str) -> None:
    """B20: the newest slot need not be the longest."""
    for lengths in ([[50, 90, 90, 99]], [[300, 1, 0, 257]], [[0, 0, 0, 0], [0, 700, 0, 1]]):
        check(paged_case(next_n=4, lengths=lengths, device=device), clean_logits=True)


def test_lengths_per_slot_equal_the_formula(device: str) -> None:
    """B28."""
    case = paged_case(next_n=3, lengths=[2, 300, 1000], device=device)
    per_slot = case["seq_lens"][:, None] - 3 + torch.arange(1, 4, dtype=torch.int32, device=device)
    explicit = {**case, "seq_lens": per_slot}
    cells = torch.ones_like(live_cells(case))
    assert same_bits(score(case, clean_logits=True), score(explicit, clean_logits=True), cells)


def test_newest_slot_sees_most(device: str) -> None:
    """B20: row t of 4 ends at 97 + t; scores grow with the position, so that is where its best one lies."""
    k = torch.zeros(100, 32)
    k[:, 0] = 1
    q, weights = torch.ones(4, 8, 32), torch.ones(4, 8)
    case = probe(q, k, torch.arange(1.0, 101.0), weights, device)
    case["max_seq_len"] = 128
    result = check(case, clean_logits=True)
    assert result.argmax(1).tolist() == [96, 97, 98, 99]


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("table_width", [1, 3, 12])
def test_absurd_lengths(device: str, next_n: int, table_width: int) -> None:
    """B11, B13: negative, past the table, past the output, and where 32-bit arithmetic wraps."""
    lengths = [-1, INT_MIN, 300, INT_MAX, 5000, 3, INT_MIN + 1, INT_MAX - 1, 301, -(2**30), 2**30]
    slots = [[lengths[(b + 4 * t) % len(lengths)] for t in range(next_n)] for b in range(len(lengths))]
    for rows in (lengths, slots):
        case = paged_case(next_n=next_n, heads=8, lengths=rows, max_seq_len=300, table_width=table_width, device=device)
        check(case, clean_logits=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_seq_len", [0, 1, 63, 65, 255, 257, 1000, 4097])
def test_output_widths(device: str, max_seq_len: int, dtype: torch.dtype) -> None:
    """B12: the last tile is cut, and only the padding of the result's own rows may be written."""
    case = paged_case(next_n=2, heads=16, lengths=[70, 0, 1000], max_seq_len=max_seq_len, device=device)
    check(case, output_dtype=dtype)
    check(case, output_dtype=dtype, clean_logits=True)


def test_own_result(device: str) -> None:
    """The result that the op allocates has padded rows, and the bits of `out`."""
    case = paged_case(next_n=2, lengths=[70, 300, 1000], device=device)
    for dtype, clean in itertools.product(DTYPES, (False, True)):
        options = {"output_dtype": dtype, "clean_logits": clean}
        result = mqa.fp8_paged_mqa_logits(**case, **options)
        assert result.shape == (6, 1029) and result.stride() == (1280, 1) and result.storage_offset() == 0
        cells = live_cells(case) | clean
        assert same_bits(result, score(case, **options), cells)


def test_empty_batch(device: str) -> None:
    """B19."""
    case = paged_case(batch=0, max_seq_len=300, device=device)
    assert score(case).shape == (0, 300)
    assert mqa.fp8_paged_mqa_logits(**case).shape == (0, 300)
    stale = mqa.compute_paged_mqa_logits_schedule(paged_case(device=device)["seq_lens"])
    assert score(case, schedule_meta=stale, clean_logits=True).shape == (0, 300)


@pytest.mark.parametrize("batch", [1, 31, 32, 33, 64])
def test_all_lengths_zero(device: str, batch: int) -> None:
    """B15."""
    case = paged_case(lengths=[0] * batch, heads=8, max_seq_len=300, device=device)
    schedule = mqa.compute_paged_mqa_logits_schedule(case["seq_lens"])
    score(case, schedule_meta=schedule)
    assert torch.isneginf(score(case, schedule_meta=schedule, clean_logits=True)).all()


def test_buffers_for_more_rows(device: str) -> None:
    """B24: a buffer for 16 rows serves 6, the others stay."""
    case = paged_case(batch=6, device=device)
    out = torch.full((16, 1280), FILL, device=device)
    result = mqa.fp8_paged_mqa_logits(**case, out=out)
    reference.assert_logits(result, reference.paged_mqa_logits(**case))
    assert (out[6:] == FILL).all()


def test_rejected_layouts(device: str) -> None:
    """B08, B13, B24: refused, not copied, and not written to."""
    case = paged_case(batch=4, lengths=[70] * 4, max_seq_len=256, device=device)
    every_second = case["block_tables"].repeat_interleave(2, 1)[:, ::2]
    with pytest.raises(RuntimeError, match="block_tables"):
        mqa.fp8_paged_mqa_logits(**{**case, "block_tables": every_second})
    memory = torch.full((4 * 512,), FILL, device=device)
    overlapping = (memory[:512].expand(4, 512), memory.as_strided((4, 512), (256, 1)))
    small = (memory.view(8, 256)[:3], memory.view(16, 128))
    for out in (*overlapping, *small):
        with pytest.raises(RuntimeError, match="out"):
            mqa.fp8_paged_mqa_logits(**case, out=out)
    assert (memory == FILL).all()


# Contents


def test_absent_pages(device: str) -> None:
    """B10: a live position whose page is not in the pool scores -inf, in every mode."""
    case = paged_case(next_n=2, device=device)
    blocks = case["kv_fused"].shape[0]
    for column, page in ((0, -1), (3, blocks), (5, 2**30), (8, INT_MAX), (11, INT_MIN), (15, -blocks)):
        case["block_tables"][2, column] = page
    case["block_tables"][0] = -1
    for clean in (False, True):
        result = check(case, clean_logits=clean)
        assert torch.isneginf(result[0, :69]).all() and torch.isneginf(result[5, 15 * 64 : 1000]).all()


def test_dead_bytes_never_matter(device: str) -> None:
    """B43, B44: NaN in everything that no live position needs, or zeros: the same bits."""
    case = paged_case(next_n=2, device=device)
    quiet = to_device(case, device)
    values, scales = kv_parts(quiet["kv_fused"])
    source_values, source_scales = kv_parts(case["kv_fused"])
    values.zero_(), scales.zero_()
    for b, length in enumerate(case["seq_lens"].tolist()):
        token = torch.arange(length, device=device)
        page, row = case["block_tables"][b, token // 64].long(), token % 64
        values[page, row], scales[page, row] = source_values[page, row], source_scales[page, row]
    assert same_bits(score(quiet), score(case), live_cells(case))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", ["q", "k", "scale", "weight"])
def test_live_nan(device: str, place: str, code: int) -> None:
    """The rectifier propagates NaN: exactly the scores that read it are NaN, and no other changes a bit."""
    case = paged_case(next_n=2, device=device)
    clear = score(case)
    values, scales = kv_parts(case["kv_fused"])
    page = int(case["block_tables"][0, 0])  # shared with the last request
    if place == "q":
        case["q"].view(torch.uint8)[1, 0, 37, 101] = code
    elif place == "k":
        values[page, 5, 77] = code
    elif place == "scale":
        scales[page, 5] = float("nan")
    else:
        case["weights"][3, 63] = float("nan")
    result = check(case)
    nan, live = result.isnan(), live_cells(case)
    touched = nan & live
    assert touched.any() and same_bits(result, clear, live & ~touched)
    if place in ("q", "weight"):  # slot 0 of request 1, or its slot 1: the whole row
        row = 2 if place == "q" else 3
        assert touched[row].sum() == live[row].sum() == touched.sum()
    else:  # one token, two slots, two requests
        assert touched.sum() == 4


def test_infinite_weights_and_scales(device: str) -> None:
    """IEEE: inf * 0 and inf - inf are NaN. Small integers, so that every product and its sign are exact."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (4, 8, 32), generator=gen).float()
    k = torch.randint(-2, 3, (200, 32), generator=gen).float()
    scales = torch.ones(200)
    scales[10:50:4] = float("inf")
    scales[11:50:4] = float("-inf")
    scales[12:50:4] = 0
    weights = torch.randint(-2, 3, (4, 8), generator=gen).float()
    weights[1, 3] = float("inf")
    weights[2, 3] = float("-inf")
    weights[3, 3], weights[3, 4] = float("inf"), float("-inf")
    result = check(probe(q, k, scales, weights, device))
    assert result.isnan().any() and result.isposinf().any() and result.isneginf().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_rounding(device: str, dtype: torch.dtype) -> None:
    """B50: the float32 score, here the scale, rounded to nearest even; past the type's range it is inf."""
    scales = [1e5, -1e5, 65504, 65519.996, 65520, -65520, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14, 1e-30]
    scales += [1 + i * 2.0**-12 for i in range(9)] + [257 + i / 16 for i in range(33)] + [1 / 3, 0, -0.0]
    scales += [3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
    one_hot = torch.zeros(1, 8, 32)
    one_hot[0, 3, 7] = 1
    weights = torch.ones(1, 8)
    scales = torch.tensor(scales)
    case = probe(one_hot, one_hot[0, 3].expand(len(scales), 32), scales, weights, device)
    result = score(case, output_dtype=dtype).cpu()
    expected = scales[None].to(dtype)
    nan = scales.isnan()[None]
    assert result[nan].isnan().all() and torch.equal(result[~nan], expected[~nan])


@pytest.mark.parametrize("zero", ["q", "kv_fused", "weights"])
def test_zeros(device: str, zero: str) -> None:
    case = paged_case(next_n=2, device=device)
    case[zero].view(torch.uint8).zero_() if zero == "q" else case[zero].zero_()
    result, live = check(case), live_cells(case)
    assert (result[live] == 0).all()


def test_large_data(device: str) -> None:
    case = paged_case(next_n=2, device=device)
    kv_parts(case["kv_fused"])[1].mul_(1000)
    case["weights"].mul_(1000)
    check(case)


def test_rectifier_comes_before_the_sum(device: str) -> None:
    """B45."""
    q = torch.zeros(2, 8, 32)
    q[:, 0, 0], q[:, 1, 0] = 1, -1
    weights = torch.zeros(2, 8)
    weights[0, :2] = 1
    weights[1, 0] = -1
    k = torch.zeros(2, 32)
    k[:, 0] = 1
    case = probe(q, k, torch.ones(2), weights, device)
    assert check(case)[:, 0].tolist() == [1, -1]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_token_within_its_block(device: str, block_size: int) -> None:
    """B05: position i scores (1 + i % 16)(1 + i / 64), so that a wrong value and a wrong scale both show."""
    length, dim = 3 * block_size - 5, 128
    row = torch.arange(length) % block_size
    k = torch.nn.functional.one_hot(row % dim, dim).float()
    q = torch.zeros(1, 8, dim)
    q[0, 5] = 1 + torch.arange(dim) % 16
    case = probe(q, k, 1 + row / 64, torch.ones(1, 8), device, block_size)
    assert torch.equal(score(case)[0].cpu(), (1 + row % dim % 16) * (1 + row / 64))


def test_golden_block(device: str) -> None:
    """B06: a block's bytes spelled out: all values, token by token, then all scales."""
    block = bytearray()
    for token in range(64):
        block += bytes([token]) * 128
    for token in range(64):
        block += struct.pack("<f", token + 0.5)
    pool = torch.tensor(list(block), dtype=torch.uint8, device=device).view(1, 64, 1, 132)
    q = torch.zeros(1, 1, 8, 128)
    q[0, 0, 0, 0] = 1
    result = mqa.fp8_paged_mqa_logits(
        q.to(torch.float8_e4m3fn).to(device),
        pool,
        torch.ones(1, 8, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.tensor([64], dtype=torch.int32, device=device),
        64,
    )
    expected = [reference.e4m3_value(token) * (token + 0.5) for token in range(64)]
    assert result.tolist() == [expected]


# Repeatability: same inputs, same bits


def test_repeated_calls(device: str) -> None:
    """B41: no synchronisation between launches of different shapes, every result kept."""
    cases = [paged_case(batch=1 + n, next_n=n, heads=32, device=device) for n in (1, 2, 3, 4, 6)]
    rounds = 200 if device == "cuda" else 4
    results = [[mqa.fp8_paged_mqa_logits(**case) for case in cases] for _ in range(rounds)]
    for case, *same in zip(cases, *results, strict=True):
        live = live_cells(case)
        first = bits(same[0])[live]
        assert all(torch.equal(bits(result)[live], first) for result in same[1:])


def test_batch_around_a_row(device: str) -> None:
    """B35: alone, in another order, many times over, or beside requests of length 0 with nonsense tables."""
    case = paged_case(batch=5, next_n=2, lengths=[70, 300, 1000, 1, 257], device=device)
    expected, live = score(case), live_cells(case)
    for which in ([0], [1], [2], [3], [4], [4, 3, 2, 1, 0], [2] * 3 + [0, 1] * 9):
        rows = [2 * b + t for b in which for t in range(2)]
        assert same_bits(score(requests(case, which)), expected[rows], live[rows]), which
    idle = requests(case, [0, 1, 2, 0, 1, 2, 3, 4])
    idle["seq_lens"][3:] = 0
    idle["block_tables"][3:] = 2**30
    assert same_bits(score(idle)[:6], expected[:6], live[:6])


def test_number_of_threads() -> None:
    """On the CPU one thread gives the bits of many, for one unit of work as for several."""
    cases = [paged_case(next_n=2, lengths=lengths) for lengths in ([70], [300], [70, 300, 1000])]
    expected = [score(case) for case in cases]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for case, result in zip(cases, expected, strict=True):
                assert same_bits(score(case), result, live_cells(case)), count
    finally:
        torch.set_num_threads(threads)


def test_slots_around_a_row(device: str) -> None:
    case = paged_case(next_n=4, heads=32, device=device)
    expected, live = score(case), live_cells(case)
    case["q"].view(torch.uint8)[:, 1::2] = 0x7F
    case["weights"].view(3, 4, 32)[:, 1::2] = float("nan")
    assert same_bits(score(case)[::2], expected[::2], live[::2])


def test_output_around_a_row(device: str) -> None:
    """B33: max_seq_len, clean_logits, the table's width."""
    case = paged_case(next_n=2, device=device)
    expected, live = score(case), live_cells(case)
    assert same_bits(score(case, clean_logits=True), expected, live)
    width = live.shape[1]
    for max_seq_len in (262144, 4096, 1000, 777, 513, 256, 1):
        common = min(width, max_seq_len)
        cut = score({**case, "max_seq_len": max_seq_len})[:, :common]
        assert same_bits(cut, expected[:, :common], live[:, :common]), max_seq_len
    for columns in (16, 11, 1):
        live[:, columns * 64 :] = False
        assert same_bits(score({**case, "block_tables": case["block_tables"][:, :columns]}), expected, live)


def schedules(seq_lens: torch.Tensor, workers: int) -> Iterator[tuple[str, torch.Tensor]]:
    lengths, batch = seq_lens.tolist(), seq_lens.shape[0]
    right = reference.schedule(lengths, workers)
    yield "right", right
    longer = [length + 1 for length in lengths]
    for other in ([1] * batch, [0] * batch, [100_000] * batch, lengths[::-1], longer, [256], []):
        yield f"of lengths {other}", reference.schedule(other, workers)
    yield "of another batch", reference.schedule([1000] * (batch + 7), workers)
    for count in (1, 2, 66, 78, 131, 132, 133, 1000):
        yield f"for {count} workers", reference.schedule(lengths, count)
    yield "backwards", right[::-1]
    yield "offsets past the request", [[request, 2**30] for request, _ in right]
    yield "negative offsets", [[request, -1 - offset] for request, offset in right]
    for value in (0, -1, batch, batch + 1, 2**30, INT_MAX, INT_MIN):
        yield f"all {value}", [[value, value]] * (workers + 1)
    yield "nobody works", [[batch, 0]] * (workers + 1)
    yield "everybody works", [[0, 0], [batch, 0]] * workers
    gen = torch.Generator().manual_seed(0)
    absurd = torch.tensor([INT_MIN, -1, 0, 1, 2, batch, 5, INT_MAX])
    for round_ in range(4):
        choice = torch.randint(0, len(absurd), (workers + 1, 2), generator=gen)
        yield f"random {round_}", absurd[choice].tolist()
    yield "two rows of nonsense", [[INT_MAX, INT_MIN], [INT_MIN, INT_MAX]]


def check_schedules(device: str) -> None:
    workers = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 32
    for heads, next_n, lengths in ((64, 1, None), (64, 3, [0, 70, 0, 1000, 257]), (8, 1, [20_000, 1])):
        case = paged_case(next_n=next_n, heads=heads, lengths=lengths, device=device)
        expected, live = score(case), live_cells(case)
        for name, rows in schedules(case["seq_lens"], workers):
            schedule_meta = torch.tensor(rows, dtype=torch.int32, device=device)
            result = score(case, schedule_meta=schedule_meta)
            assert same_bits(result, expected, live), f"schedule: {name}"
            assert schedule_meta.tolist() == [list(row) for row in rows]
            print(name, flush=True)
    for built, used in (([257], [256]), ([256], [257]), ([512, 1], [1, 512])):
        case = paged_case(lengths=used, device=device)
        stale = mqa.compute_paged_mqa_logits_schedule(torch.tensor(built, dtype=torch.int32, device=device))
        assert same_bits(score(case, schedule_meta=stale), score(case), live_cells(case)), (built, used)


def test_any_schedule(device: str) -> None:
    """B14, B19, B21, B22: stale, foreign, of other worker counts, nonsense: not a bit, no hang."""
    if device == "cpu":
        check_schedules(device)
    else:
        in_subprocess(check_schedules, device)


def test_inputs_stay(device: str) -> None:
    """B62."""
    case = paged_case(next_n=2, device=device)
    before = contiguous_twin(case)
    score(case, clean_logits=True, schedule_meta=mqa.compute_paged_mqa_logits_schedule(case["seq_lens"]))
    for name, tensor in contiguous_twin(case).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


# Streams, threads, devices, memory


def test_two_threads(device: str) -> None:
    cases = [paged_case(batch=4, next_n=n, device=device) for n in (1, 2)]
    expected = [score(case) for case in cases]

    def work(index: int) -> bool:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            return all(same_bits(score(cases[index]), expected[index], live_cells(cases[index])) for _ in range(5))

    if device == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, (0, 1)))


@pytest.mark.cuda
def test_current_stream() -> None:
    """B72: inputs are produced late on the stream that is current, and the result is read there at once."""
    case = paged_case(next_n=2, device="cuda")
    expected, live = score(case), live_cells(case)
    names = [name for name, value in case.items() if isinstance(value, torch.Tensor)]
    late = to_device(case, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = []
        for _ in range(200):
            late["seq_lens"].zero_()
            late["weights"].fill_(float("nan"))
            torch.cuda._sleep(2_000_000)
            for name in names:
                late[name].copy_(case[name])
            schedule = mqa.compute_paged_mqa_logits_schedule(late["seq_lens"])
            result = mqa.fp8_paged_mqa_logits(**late, schedule_meta=schedule, clean_logits=True)
            results.append(result.clone())
        same = torch.stack([(bits(result) == bits(expected))[live].all() for result in results]).all()
    stream.synchronize()
    assert same.item()


@pytest.mark.cuda
def test_beside_a_busy_stream() -> None:
    """B41."""
    case = paged_case(batch=16, next_n=2, device="cuda")
    expected, live = score(case), live_cells(case)
    noise = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(100):
            noise @ noise
    results = [mqa.fp8_paged_mqa_logits(**case) for _ in range(200)]
    torch.cuda.synchronize()
    assert all(same_bits(result, expected, live) for result in results)


@pytest.mark.cuda
def test_second_gpu() -> None:
    """B71: the tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = paged_case(next_n=2, device="cuda:0")
    expected, live = score(case), live_cells(case)
    elsewhere = to_device(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    schedule = mqa.compute_paged_mqa_logits_schedule(elsewhere["seq_lens"])
    result = score(elsewhere, schedule_meta=schedule)
    assert result.device == schedule.device == torch.device("cuda:1")
    assert same_bits(result.to("cuda:0"), expected, live)


@pytest.mark.cuda
def test_nothing_allocated_with_out() -> None:
    """B30, B49: with `out` given no memory is taken, whatever max_seq_len does."""
    case = paged_case(lengths=[64] * 4, heads=8, max_seq_len=64, device="cuda")
    schedule = mqa.compute_paged_mqa_logits_schedule(case["seq_lens"])
    out = torch.empty(4, 64 * 512, device="cuda")
    counts = []
    for turn in range(500):
        if turn in (1, 499):
            torch.cuda.synchronize()
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
        case["max_seq_len"] = 64 * (turn + 1)
        mqa.fp8_paged_mqa_logits(**case, schedule_meta=schedule, out=out)
    assert counts[0] == counts[1]


def test_block_offsets_past_32_bits(device: str) -> None:
    """B01, B02: values and scales of blocks 2^31 and 2^32 bytes into the pool."""
    for stride, pages in ((1_002_240, [2142, 2143, 2199]), (1_435_968, [1495, 1496, 2991, 2992])):
        case = paged_case(lengths=[64] * len(pages), device=device)
        blocks = pages[-1] + 1
        # On the CPU only the memory that is written becomes real.
        storage = torch.empty(blocks * stride, dtype=torch.uint8, device=device)
        pool = storage.as_strided((blocks, 64, 1, 132), (stride, 132, 132, 1))
        values, scales = kv_parts(case["kv_fused"])
        used = case["block_tables"][:, 0].long()
        for target, source in zip(kv_parts(pool), (values[used], scales[used]), strict=True):
            target[pages] = source
        case["kv_fused"] = pool
        case["block_tables"][:, 0] = torch.tensor(pages, dtype=torch.int32, device=device)
        result = check(case)
        assert (result[:, :64] != 0).any(1).all()
        if device == "cuda":
            torch.cuda.empty_cache()


def test_row_offsets_past_32_bits(device: str) -> None:
    """B03: few rows of `out`, far apart."""
    case = paged_case(device=device)
    stride = 2**30
    storage = torch.empty(2 * stride + 1280, dtype=torch.bfloat16, device=device)
    out = storage.as_strided((3, 1280), (stride, 1))
    result = mqa.fp8_paged_mqa_logits(**case, output_dtype=torch.bfloat16, clean_logits=True, out=out)
    reference.assert_logits(result, reference.paged_mqa_logits(**case), clean=True)


@pytest.mark.cuda
def test_more_than_2_31_scores() -> None:
    """B03: the last rows of 16400 x 131072 float32 scores."""
    case = paged_case(heads=8, head_dim=32, lengths=[64] * 16400, device="cuda")
    case["max_seq_len"] = 131072
    result = mqa.fp8_paged_mqa_logits(**case, clean_logits=True)[-30:]
    truth = reference.paged_mqa_logits(**requests(case, list(range(16370, 16400))))
    reference.assert_logits(result, truth, clean=True)
    del result, truth
    torch.cuda.empty_cache()


def long_context(length: int = 65536) -> dict:
    """Four requests of random bytes, made without large temporaries."""
    gen = torch.Generator().manual_seed(0)
    blocks = 4 * length // 64
    pool = torch.randint(0, 0x70, (blocks, 64, 1, 132), dtype=torch.uint8, generator=gen)
    kv_parts(pool)[1].fill_(0.5)
    return {
        "q": torch.randn(4, 1, 64, 128, generator=gen).to(torch.float8_e4m3fn),
        "kv_fused": pool,
        "weights": torch.randn(4, 64, generator=gen),
        "block_tables": torch.randperm(blocks, generator=gen).to(torch.int32).view(4, -1),
        "seq_lens": torch.full((4,), length, dtype=torch.int32),
        "max_seq_len": length,
    }


def memory(field: str) -> int:
    """VmRSS, or VmHWM, its peak (rusage would give the parent's if that is higher), in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def print_extra_memory() -> None:
    case = long_context()
    mqa.fp8_paged_mqa_logits(**paged_case(lengths=[5000]))  # threads and workspaces of the first call
    resident = memory("VmRSS")
    result = mqa.fp8_paged_mqa_logits(**case)
    print(memory("VmHWM") - resident - result.untyped_storage().nbytes())


def test_cpu_memory_does_not_grow_with_the_context() -> None:
    """B48: less than 64 MiB beside the result for 4 x 65536 tokens and 64 heads."""
    assert int(in_subprocess(print_extra_memory)) < 64 * 2**20


def eager_logits(case: dict) -> torch.Tensor:
    """The formula in plain torch, gather and dequantisation included; n 1, full tables."""
    batch, length = case["q"].shape[0], case["max_seq_len"]
    blocks = case["kv_fused"][case["block_tables"].long()].view(batch, length // 64, 64 * 132)
    keys = blocks[..., : 64 * 128].reshape(batch, length, 128).view(torch.float8_e4m3fn).float()
    scales = blocks[..., 64 * 128 :].contiguous().view(torch.float32).view(batch, length)
    scores = torch.relu(case["q"][:, 0].float() @ keys.transpose(1, 2))
    return (case["weights"][:, None] @ scores)[:, 0] * scales


def test_cpu_beats_eager_torch() -> None:
    case = long_context()
    times: dict[Callable, list[float]] = {}
    for _ in range(5):  # in turn, so that both see the same load on the machine
        for function in (lambda: mqa.fp8_paged_mqa_logits(**case), lambda: eager_logits(case)):
            start = time.perf_counter()
            result = function()
            times.setdefault(function.__code__, []).append(time.perf_counter() - start)
    ours, eager = (sorted(t)[len(t) // 2] for t in times.values())
    assert ours < eager, f"{ours:.3f} s, eager torch {eager:.3f} s"
    assert reference.calc_diff(result, mqa.fp8_paged_mqa_logits(**case)) < 5e-6


# Schedule


def lens(values: list, device: str) -> torch.Tensor:
    """int32 lengths, one in two of a larger tensor."""
    spaced = torch.full((2 * len(values) + 1,), INT_MAX, dtype=torch.int32, device=device)[1::2]
    spaced.copy_(torch.tensor(values, dtype=torch.int32))
    return spaced


SCHEDULES = {
    "a": ([1000, 300, 0], 4, [[0, 0], [0, 2], [1, 0], [1, 1], [3, 0]]),
    "b256": ([256], 4, [[0, 0], [1, 0], [1, 0], [1, 0], [1, 0]]),
    "b257": ([257], 4, [[0, 0], [0, 1], [1, 0], [1, 0], [1, 0]]),
    "f0": ([0, 0], 4, [[2, 0]] * 5),
    "f": ([128, 0, 1024], 4, [[0, 0], [2, 1], [2, 2], [2, 3], [3, 0]]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_worked_schedules(device: str, name: str) -> None:
    lengths, workers, expected = SCHEDULES[name]
    assert reference.schedule(lengths, workers) == expected
    assert torch.ops.mqa.paged_mqa_logits_schedule(lens(lengths, device), workers).tolist() == expected


@pytest.mark.parametrize("batch", [0, 1, 7, 31, 32, 33, 63, 64, 65, 127, 128, 256, 1025, 4097, 12288, 32768])
def test_schedule(device: str, batch: int) -> None:
    """B16: any batch, any distribution, equal to the rule in Python integers."""
    gen = torch.Generator().manual_seed(batch)
    random = torch.randint(0, 2049, (batch,), generator=gen).tolist()
    distributions = {
        "random": random,
        "uniform": [777] * batch,
        "outlier": [1] * (batch // 2) + [500_000] * (batch > 0) + [1] * (batch - batch // 2 - 1),
        "two tiers": [131_072 if i % 2 else 128 for i in range(batch)],
        "zeros": [0] * batch,
        "half zeros": [n * (i % 2) for i, n in enumerate(random)],
        "negative": [(-1) ** i * n for i, n in enumerate(random)],
        "extreme": [(INT_MAX, INT_MIN, -1, 257)[i % 4] for i in range(batch)],
    }
    for (name, lengths), workers in itertools.product(distributions.items(), (1, 2, 32, 132, 1000)):
        result = torch.ops.mqa.paged_mqa_logits_schedule(lens(lengths, device), workers)
        assert result.dtype == torch.int32 and result.is_contiguous()
        assert result.tolist() == reference.schedule(lengths, workers), (name, workers)


def test_schedule_of_slot_lengths(device: str) -> None:
    """A request is as long as its longest slot."""
    seq_lens = paged_case(9, 4, lengths_2d=True, device=device)["seq_lens"]
    assert not seq_lens.is_contiguous()
    for workers in (3, 132):
        result = torch.ops.mqa.paged_mqa_logits_schedule(seq_lens, workers)
        assert result.tolist() == reference.schedule(seq_lens.tolist(), workers)


def test_schedule_function(device: str) -> None:
    """Workers come from the device; next_n and variant change nothing; `out` is filled and returned."""
    lengths = [1000, 300, 0, 5000]
    workers = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 32
    expected = reference.schedule(lengths, workers)
    seq_lens = lens(lengths, device)
    for options in ({}, {"next_n": 4}, {"variant": "fp4"}, {"device": device}):
        assert mqa.compute_paged_mqa_logits_schedule(seq_lens, **options).tolist() == expected
    out = torch.full((workers + 1, 2), -777, dtype=torch.int32, device=device)
    assert mqa.compute_paged_mqa_logits_schedule(seq_lens, out=out) is out
    assert out.tolist() == expected


@pytest.mark.cuda
def test_schedule_cost_has_no_cliff() -> None:
    """B17: from one batch size to twice as much, at most twice the time (and the noise of a short kernel)."""
    previous = None
    for batch in (2**i for i in range(16)):
        seq_lens = torch.randint(0, 2048, (batch,), dtype=torch.int32, device="cuda")
        out = mqa.compute_paged_mqa_logits_schedule(seq_lens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                mqa.compute_paged_mqa_logits_schedule(seq_lens, out=out)
        samples = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 20)
        elapsed = sorted(samples)[2]
        limit = 2 * previous + 0.005 if previous else 1.0
        assert elapsed < limit, f"batch {batch}: {elapsed} ms after {previous} ms"
        previous = elapsed


# Helpers


def test_helpers() -> None:
    assert [mqa.padded_seq_len(n) for n in (0, 1, 256, 257, 8000)] == [0, 256, 256, 512, 8192]
    assert [mqa.min_block_table_width(n, 32) for n in (0, 1, 32, 33, 8000)] == [0, 1, 1, 2, 250]
    with pytest.raises(RuntimeError):
        mqa.padded_seq_len(-1)


# The suite itself


def without_inner_rectifier(case: dict) -> torch.Tensor:
    """The formula with the rectifier after the sum over heads."""
    values, scales = kv_parts(case["kv_fused"])
    result = torch.full((case["weights"].shape[0], case["max_seq_len"]), float("-inf"))
    for b, length in enumerate(case["seq_lens"].tolist()):
        token = torch.arange(length)
        page, row = case["block_tables"][b, token // 64].long(), token % 64
        products = case["q"][b, 0].float() @ values[page, row].view(torch.float8_e4m3fn).float().T
        result[b, :length] = torch.relu(case["weights"][b] @ products) * scales[page, row]
    return result


def swap_two_scales(case: dict) -> None:
    scales = kv_parts(case["kv_fused"])[1][case["block_tables"][2, 3].long()]
    scales[[5, 6]] = scales[[6, 5]]


def first_scale_for_the_block(case: dict) -> None:
    scales = kv_parts(case["kv_fused"])[1]
    scales.copy_(scales[:, :1].expand_as(scales).clone())


def one_token_less(case: dict) -> None:
    case["seq_lens"][1] -= 1


def one_token_more(case: dict) -> None:
    case["seq_lens"][1] += 1


def first_token_of_the_block(case: dict) -> None:
    values = kv_parts(case["kv_fused"])[0]
    values.copy_(values[:, :1].expand_as(values).clone())


def one_page_wrong(case: dict) -> None:
    case["block_tables"][2, [4, 5]] = case["block_tables"][2, [5, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mutate",
    [
        swap_two_scales,
        first_scale_for_the_block,
        one_token_less,
        one_token_more,
        first_token_of_the_block,
        one_page_wrong,
        without_inner_rectifier,
    ],
)
def test_suite_detects_mutations(mutate: Callable, dtype: torch.dtype) -> None:
    """B53, B54: what a broken implementation would return is refused by the comparison that all tests use."""
    case = paged_case()
    truth = reference.paged_mqa_logits(**case)
    reference.assert_logits(truth.logits.to(dtype), truth, clean=True)
    if mutate is without_inner_rectifier:
        wrong = mutate(case)
    else:
        mutated = to_device(case, "cpu")
        mutate(mutated)
        wrong = reference.paged_mqa_logits(**mutated).logits
    with pytest.raises(AssertionError):
        reference.assert_logits(wrong.to(dtype), truth, clean=True)
