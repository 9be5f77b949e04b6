"""Quantisers, cache writer and gather: byte for byte what the recipes say, and not a byte elsewhere."""

from __future__ import annotations

import itertools
import struct

import pytest
import reference
import torch
from inputs import INT_MAX, INT_MIN, empty_pool, kv_parts, paged_case, poison_bytes, to_device

import torch_mqa_ops as mqa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
INF, NAN = float("inf"), float("nan")
FILL = -777.0


def awkward_rows(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, dim] that meet every branch of the recipe."""
    gen = torch.Generator().manual_seed(dim)
    magnitudes = reference.E4M3[:0x7F].float()
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2
    grid = torch.cat([magnitudes, ties, ties.nextafter(torch.tensor(INF)), ties.nextafter(torch.tensor(0.0))])
    grid = torch.cat([grid, -grid])
    grid = torch.cat([grid, grid[: -len(grid) % (dim - 1)]]).view(-1, dim - 1)
    rows = []
    for amax in (448.0, 447.0, 449.0, 7.0, 3.5):  # scale 1, just not 1, and powers of two
        rows.append(torch.cat([torch.full((len(grid), 1), amax), grid * min(1.0, amax / 448)], 1))
    normal = torch.randn(40, dim, generator=gen)
    exponents = torch.randint(-30, 30, (40, 1), generator=gen)
    rows += [normal, normal * torch.exp2(exponents.float())]

    special = torch.randn(16, dim, generator=gen)
    special[0] = 0
    special[1] = -0.0
    special[2] = 1e-30
    special[3] = -1e-30
    special[4] = 1e-4  # the floor of amax, and around it
    special[5] = 0.99e-4
    special[6] = torch.finfo(dtype).max
    special[7, 3] = -torch.finfo(dtype).max
    special[8, 1] = INF
    special[9, [1, 2]] = torch.tensor([INF, -INF])
    special[10, dim - 1] = NAN
    special[11] = NAN
    special[12, [0, 9]] = torch.tensor([-NAN, INF])
    special[13] = torch.finfo(dtype).tiny
    special[14, ::2] = torch.finfo(dtype).smallest_normal / 8  # subnormal
    special[15] = INF
    return torch.cat([*rows, special]).to(dtype)


def strided(x: torch.Tensor, device: str, inner: int) -> torch.Tensor:
    """x as a view with its last `inner` dimensions contiguous, odd offset and strides, NaN in the gaps."""
    strides, step = [], 1
    for index in reversed(range(x.dim())):
        if index < x.dim() - inner:
            step += 3 - step % 2  # odd
        strides.insert(0, step)
        step *= x.shape[index]
    storage = torch.full((step + 7,), NAN, dtype=x.dtype, device=device)
    view = storage.as_strided(x.shape, strides, 1)
    view.copy_(x)
    return view


def codes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def assert_same_floats(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise, any NaN being as good as another."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype == torch.float32 and actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    real = ~expected.isnan()
    assert torch.equal(actual[real].view(torch.int32), expected[real].view(torch.int32))


def poisoned_pool(blocks: int, block_size: int, head_dim: int, device: str) -> torch.Tensor:
    """A strided pool of distinguishable bytes, so that any write is seen."""
    pool = empty_pool(blocks, block_size, head_dim)
    storage = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())
    storage.copy_(torch.arange(storage.numel()) * 131 % 251)
    return to_device({"pool": pool}, device)["pool"]


def storage_of(pool: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage()).cpu()


# Query


@pytest.mark.parametrize("pow2_scale", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_query_bytes(device: str, head_dim: int, dtype: torch.dtype, pow2_scale: bool) -> None:
    rows = awkward_rows(head_dim, dtype)
    rows = rows[: len(rows) // 8 * 8]
    for shape in ((-1, 8, head_dim), (2, -1, 4, head_dim)):
        q = rows.view(shape)
        expected, folded = reference.quantize_q_fp8(q, None, pow2_scale, None)
        result, weights = mqa.quantize_q_fp8(strided(q, device, inner=2), pow2_scale=pow2_scale)
        assert result.dtype == torch.float8_e4m3fn and result.is_contiguous() and weights.is_contiguous()
        assert torch.equal(codes(result), expected)
        assert_same_floats(weights, folded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softmax_scale", [None, 128**-0.5, 0.1, -3.0])
def test_query_scale_is_folded_into_the_weights(device: str, dtype: torch.dtype, softmax_scale: float | None) -> None:
    """(weights * q_scale) * softmax_scale, in that order, in float32."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(3, 5, 64, 128, generator=gen).to(torch.bfloat16)
    weights = torch.randn(3, 5, 64, generator=gen).to(dtype)
    weights[0, 0, :4] = torch.tensor([0.0, -0.0, INF, NAN], dtype=dtype)
    for pow2_scale in (True, False):
        expected, folded = reference.quantize_q_fp8(q, weights, pow2_scale, softmax_scale)
        result, result_weights = mqa.quantize_q_fp8(
            strided(q, device, inner=2),
            strided(weights, device, inner=1),
            pow2_scale=pow2_scale,
            softmax_scale=softmax_scale,
        )
        assert torch.equal(codes(result), expected)
        assert_same_floats(result_weights, folded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_of_any_alignment_and_rank(device: str, dtype: torch.dtype) -> None:
    """Bases aligned to one element only; no leading dimension, three of them, an empty one."""
    values = torch.randn(7 + 3 * 2 * 4 * 8 * 32).to(dtype)
    for offset in range(8):
        for shape in ((8, 32), (4, 8, 32), (3, 2, 4, 8, 32), (0, 8, 32)):
            flat = values.to(device)[offset:][: torch.Size(shape).numel()]
            expected, folded = reference.quantize_q_fp8(flat.view(shape), None, True, None)
            result, weights = mqa.quantize_q_fp8(flat.view(shape))
            assert torch.equal(codes(result), expected)
            assert_same_floats(weights, folded)


def test_query_with_shared_leading_dimensions(device: str) -> None:
    """Strides of 0, and dimensions that are not in order of their strides."""
    q = torch.randn(4, 3, 8, 32).to(device)
    for view in (q.transpose(0, 1), q[:1].expand(5, -1, -1, -1), q[::3], q[:, 1:2]):
        expected, folded = reference.quantize_q_fp8(view, None, True, None)
        result, weights = mqa.quantize_q_fp8(view)
        assert torch.equal(codes(result), expected)
        assert_same_floats(weights, folded)


def test_query_into_given_buffers(device: str) -> None:
    q = torch.randn(6, 8, 64).to(device, torch.bfloat16)
    gates = torch.randn(6, 8).to(device)
    expected, folded = reference.quantize_q_fp8(q, gates, False, 0.5)
    storage = poison_bytes(8 * 9 * 64, device).view(8, 9, 64)
    q_fp8 = storage[1:7, 1:].view(torch.float8_e4m3fn)
    weights = torch.full((8, 11), FILL, device=device)
    torch.ops.mqa.quantize_q_fp8.out(
        q, gates, pow2_scale=False, softmax_scale=0.5, q_fp8=q_fp8, weights_f32=weights[1:7, 2:10]
    )
    assert torch.equal(codes(q_fp8), expected)
    assert_same_floats(weights[1:7, 2:10].clone(), folded)
    weights[1:7, 2:10] = FILL
    assert (weights == FILL).all()
    storage[1:7, 1:] = poison_bytes(64, device)
    assert torch.equal(storage.flatten(), poison_bytes(8 * 9 * 64, device))


# Cache writer


@pytest.mark.parametrize("pow2_scale", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cache_bytes(device: str, head_dim: int, dtype: torch.dtype, pow2_scale: bool) -> None:
    """B55: every byte of the storage, written and not written, gaps between the blocks included."""
    k = awkward_rows(head_dim, dtype)
    block_size = BLOCK_SIZES[HEAD_DIMS.index(head_dim) + DTYPES.index(dtype)]
    blocks = len(k) // block_size + 3
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[: len(k)]
    slots[::7] = torch.tensor([-1, -block_size, -(2**62), blocks * block_size, 2**40, 2**62])[
        torch.arange(len(slots[::7])) % 6
    ]
    expected = poisoned_pool(blocks, block_size, head_dim, "cpu")
    pool = poisoned_pool(blocks, block_size, head_dim, device)
    reference.write_k_cache_fp8(k, slots, expected, pow2_scale)
    result = mqa.quantize_k_cache_fp8(strided(k, device, inner=1), slots.to(device), pool, pow2_scale=pow2_scale)
    assert result is None
    assert torch.equal(storage_of(pool), storage_of(expected))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_cache_of_every_block_size(device: str, block_size: int) -> None:
    gen = torch.Generator().manual_seed(block_size)
    k = torch.randn(100, 128, generator=gen).to(torch.bfloat16)
    slots = torch.randperm(5 * block_size, generator=gen)[:100]
    k = k[: len(slots)]
    expected = poisoned_pool(5, block_size, 128, "cpu")
    pool = poisoned_pool(5, block_size, 128, device)
    reference.write_k_cache_fp8(k, slots, expected, True)
    mqa.quantize_k_cache_fp8(k.to(device), slots.to(device), pool)
    assert torch.equal(storage_of(pool), storage_of(expected))


def test_keys_of_any_alignment(device: str) -> None:
    for dtype, offset in itertools.product(DTYPES, range(8)):
        k = torch.randn(offset + 5 * 32).to(device, dtype)[offset:].view(5, 32)
        expected, pool = poisoned_pool(1, 16, 32, "cpu"), poisoned_pool(1, 16, 32, device)
        slots = torch.tensor([3, 1, 15, 0, 7])
        reference.write_k_cache_fp8(k, slots, expected, True)
        mqa.quantize_k_cache_fp8(k, slots.to(device), pool)
        assert torch.equal(storage_of(pool), storage_of(expected))


def test_strided_keys(device: str) -> None:
    """A column slice of a wider projection, one key for all, no key."""
    wide = torch.randn(9, 300).to(device, torch.bfloat16)
    for k in (wide[:, 17:145], wide[:1, 3:131].expand(9, -1), wide[:0, :128]):
        slots = torch.arange(20, 20 + len(k), device=device)
        expected, pool = poisoned_pool(2, 16, 128, "cpu"), poisoned_pool(2, 16, 128, device)
        reference.write_k_cache_fp8(k, slots, expected, True)
        mqa.quantize_k_cache_fp8(k, slots, pool)
        assert torch.equal(storage_of(pool), storage_of(expected))


def test_golden_block_is_written(device: str) -> None:
    """B06: token t has value code t and scale t + 0.5; values first, at 128 t, scales at 64 * 128 + 4 t."""
    token = torch.arange(64.0)
    scale = token + 0.5
    k = (reference.E4M3[:64].float() * scale)[:, None].repeat(1, 128)
    k[:, 0] = 448 * scale  # makes amax / 448 exactly the scale
    block = bytearray()
    for t in range(64):
        block += bytes([0x7E] + [t] * 127)
    for t in range(64):
        block += struct.pack("<f", t + 0.5)
    pool = torch.zeros(2, 64, 1, 132, dtype=torch.uint8, device=device)
    mqa.quantize_k_cache_fp8(k.to(device), torch.arange(64, 128, device=device), pool, pow2_scale=False)
    assert not pool[0].any()
    assert bytes(pool[1].flatten().tolist()) == bytes(block)


@pytest.mark.parametrize("tokens,slots", [(2, 1), (4000, 16), (4000, 2000), (20_000, 10_000)])
def test_tokens_of_one_slot(device: str, tokens: int, slots: int) -> None:
    """Of several tokens with one slot any wins, but whole: value bytes and scale are the same token's.

    Two threads that take half of the tokens each meet in every slot when there are half as many.
    """
    # Token i is +-(1 + i), so its scale names it; all codes are +-448, with signs that spell out i.
    index = torch.arange(tokens)
    signs = 1 - 2.0 * (index[:, None] >> (torch.arange(128) % 16) & 1)
    k = (signs * (1 + index)[:, None]).to(device)
    mapping = (index % slots).to(device)
    for _ in range(20):
        pool = empty_pool(-(-slots // 16), 16, 128, device=device)
        mqa.quantize_k_cache_fp8(k, mapping, pool, pow2_scale=False)
        values, scales = kv_parts(pool)
        values, scales = values.reshape(-1, 128)[:slots].cpu(), scales.reshape(-1)[:slots].cpu()
        winner = (scales * 448).round().long() - 1
        assert ((winner >= 0) & (winner < tokens) & (winner % slots == torch.arange(slots))).all()
        assert torch.equal(scales, (1 + winner).float() / 448)
        assert torch.equal(values, torch.where(signs[winner] > 0, 0x7E, 0xFE).to(torch.uint8))


# Gather


def hostile_gathers() -> dict[str, list[int]]:
    """cu_seq_lens of three requests."""
    return {
        "plain": [0, 70, 370, 500],
        "empty request": [0, 70, 70, 400],
        "late start, early end": [5, 70, 200, 300],
        "overlapping": [0, 300, 100, 400],
        "backwards": [400, 300, 100, 0],
        "negative": [-50, 20, -7, 300],
        "extreme": [INT_MIN, INT_MAX, INT_MIN, INT_MAX],
        "to the end of int32": [0, 3, 200, INT_MAX],
        "far before": [INT_MIN, 0, 100, 250],
        "none": [INT_MAX] * 4,
    }


@pytest.mark.parametrize("name", hostile_gathers())
def test_gather(device: str, name: str) -> None:
    """Contents of cu_seq_lens and of the table are never trusted."""
    starts = hostile_gathers()[name]
    for head_dim, block_size, table_width in ((128, 64, None), (32, 16, 3), (64, 256, 1)):
        case = paged_case(head_dim=head_dim, block_size=block_size, table_width=table_width, device=device)
        cu_seq_lens = torch.tensor([INT_MAX, *starts, INT_MIN], dtype=torch.int32, device=device)[1:-1]
        expected, expected_scales = reference.gather_k_cache_fp8(
            case["kv_fused"], case["block_tables"], cu_seq_lens, 600
        )
        k, k_scale = mqa.gather_k_cache_fp8(case["kv_fused"], case["block_tables"], cu_seq_lens, 600)
        assert k.dtype == torch.float8_e4m3fn and k.shape == (600, head_dim) and k.is_contiguous()
        assert torch.equal(codes(k), expected)
        assert_same_floats(k_scale, expected_scales)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gather_shapes(device: str, head_dim: int, block_size: int) -> None:
    case = paged_case(5, 1, 8, head_dim, block_size, [70, 0, 33, 1, 257], device=device)
    cu_seq_lens = torch.tensor([0, 70, 70, 103, 104, 361], dtype=torch.int32)
    arguments = case["kv_fused"], case["block_tables"], cu_seq_lens.to(device), 370
    expected, expected_scales = reference.gather_k_cache_fp8(*arguments)
    k, k_scale = mqa.gather_k_cache_fp8(*arguments)
    assert torch.equal(codes(k), expected) and expected[:361].any(1).all()
    assert_same_floats(k_scale, expected_scales)


def test_gather_of_absent_pages(device: str) -> None:
    case = paged_case(lengths=[300, 70, 200], device=device)
    blocks = case["kv_fused"].shape[0]
    pages = [-1, blocks, INT_MIN, INT_MAX]
    case["block_tables"][0, 1:5] = torch.tensor(pages, dtype=torch.int32)
    cu_seq_lens = torch.tensor([0, 300, 370, 570], dtype=torch.int32, device=device)
    arguments = case["kv_fused"], case["block_tables"], cu_seq_lens, 570
    expected, expected_scales = reference.gather_k_cache_fp8(*arguments)
    k, k_scale = mqa.gather_k_cache_fp8(*arguments)
    assert torch.equal(codes(k), expected) and not expected[64:300].any()
    assert_same_floats(k_scale, expected_scales)


def test_gather_of_nothing(device: str) -> None:
    case = paged_case(device=device)
    cu_seq_lens = torch.zeros(4, dtype=torch.int32, device=device)
    k, k_scale = mqa.gather_k_cache_fp8(case["kv_fused"], case["block_tables"], cu_seq_lens, 0)
    assert k.shape == (0, 128) and k_scale.shape == (0,)
    nobody = case["block_tables"][:0], cu_seq_lens[:1]
    k, k_scale = mqa.gather_k_cache_fp8(case["kv_fused"], *nobody, 5)
    assert not codes(k).any() and k_scale.tolist() == [0] * 5


def test_gather_into_given_buffers(device: str) -> None:
    """Rows that no request covers are written too."""
    case = paged_case(device=device)
    cu_seq_lens = torch.tensor([3, 70, 70, 90], dtype=torch.int32, device=device)
    arguments = case["kv_fused"], case["block_tables"], cu_seq_lens, 100
    expected, expected_scales = reference.gather_k_cache_fp8(*arguments)
    storage = poison_bytes(102 * 144, device).view(102, 144)
    k = storage[1:101, 8:136].view(torch.float8_e4m3fn)
    k_scale = torch.full((102,), FILL, device=device)
    torch.ops.mqa.gather_k_cache_fp8.out(*arguments, k=k, k_scale=k_scale[1:101])
    assert torch.equal(codes(k), expected)
    assert_same_floats(k_scale[1:101], expected_scales)
    assert (k_scale[[0, 101]] == FILL).all()
    storage[1:101, 8:136] = poison_bytes(128, device)
    assert torch.equal(storage.flatten(), poison_bytes(102 * 144, device))


# Together


@pytest.mark.parametrize("pow2_scale", [True, False])
def test_round_trip(device: str, pow2_scale: bool) -> None:
    """Written and gathered, keys are as precise as e4m3; scores are near those of the originals."""
    gen = torch.Generator().manual_seed(0)
    case = paged_case(next_n=2, device=device)
    lengths = case["seq_lens"].tolist()
    starts = torch.tensor([0, 70, 370, 1370], dtype=torch.int32)
    k = torch.randn(1370, 128, generator=gen)
    pages = torch.randperm(case["kv_fused"].shape[0], generator=gen).to(torch.int32)
    slots, used = [], 0
    for b, length in enumerate(lengths):
        columns = -(-length // 64)
        case["block_tables"][b, :columns] = pages[used : used + columns]
        used += columns
        token = torch.arange(length)
        slots.append(case["block_tables"][b].cpu()[token // 64].long() * 64 + token % 64)
    mqa.quantize_k_cache_fp8(k.to(device), torch.cat(slots).to(device), case["kv_fused"], pow2_scale=pow2_scale)

    codes_, scales = mqa.gather_k_cache_fp8(case["kv_fused"], case["block_tables"], starts.to(device), 1370)
    expected, expected_scales = reference.quantize_fp8(k, pow2_scale)
    assert torch.equal(codes(codes_), expected)
    assert_same_floats(scales, expected_scales)
    back = reference.decode_e4m3(codes_).cpu() * scales.cpu().double()[:, None]
    assert ((back - k).abs() <= 2.0**-4 * k.abs() + scales.cpu()[:, None] * 2.0**-10).all()

    q = torch.randn(3, 2, 64, 128, generator=gen)
    gates = torch.randn(3, 2, 64, generator=gen)
    case["q"], folded = mqa.quantize_q_fp8(q.to(device), gates.to(device), pow2_scale=pow2_scale)
    case["weights"] = folded.view(6, 64)
    result = mqa.fp8_paged_mqa_logits(**case).cpu()
    reference.assert_logits(result.to(device), reference.paged_mqa_logits(**case))
    for b, length in enumerate(lengths):
        keys = k[starts[b] : starts[b] + length]
        for t in range(2):
            exact = (torch.relu(q[b, t] @ keys.T) * gates[b, t][:, None]).sum(0)[: length - 1 + t]
            assert reference.calc_diff(result[2 * b + t, : length - 1 + t], exact) < 1e-3


def test_bytes_of_a_block() -> None:
    """B56."""
    for block_size, head_dim in itertools.product(BLOCK_SIZES, HEAD_DIMS):
        assert mqa.index_cache_block_bytes("fp8", block_size, head_dim) == block_size * (head_dim + 4)
    assert mqa.index_cache_block_bytes("fp4", 64, 128) == 64 * 68
    assert mqa.index_cache_block_bytes("fp4", 32, 64) == 32 * 34
