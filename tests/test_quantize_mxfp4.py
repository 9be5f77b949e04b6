"""MXFP4 quantisers, cache writer and gather: byte for byte what the recipe says, and not a byte elsewhere."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from inputs import INT_MAX, INT_MIN, empty_mxfp4_pool, fp4_case, mxfp4_parts, poison_bytes, to_device
from test_quantize import hostile_gathers, storage_of, strided

import torch_mqa_ops as mqa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
LAYOUTS = [(size, False) for size in BLOCK_SIZES] + [(128, True)]
INF, NAN = float("inf"), float("nan")
FILL = -777


def awkward_rows(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, dim] whose groups meet every branch of the recipe."""
    gen = torch.Generator().manual_seed(dim)
    magnitudes = reference.E2M1[:8].float()
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2
    grid = torch.cat([magnitudes, ties, ties.nextafter(torch.tensor(INF)), ties.nextafter(torch.tensor(0.0))])
    grid = torch.cat([grid, -grid])  # 58
    grid = torch.cat([grid, grid[: -len(grid) % 31]]).view(-1, 31)
    groups = []
    for amax in (6.0, 5.9, 6.1, 4.1, 3.1):  # scale 1, up to it, just above it, and two that stay within it
        scale = 2.0 if amax > 6 else 1.0
        groups.append(torch.cat([torch.full((len(grid), 1), amax), (grid * scale).clamp(-amax, amax)], 1))
    six = torch.tensor(6.0) * torch.exp2(torch.arange(-10.0, 10))  # amax at a power of two of scale, and beside it
    beside = torch.cat([six, six.nextafter(torch.tensor(INF)), six.nextafter(torch.tensor(0.0))])
    groups.append(beside[:, None] * (torch.rand(len(beside), 32, generator=gen) - 0.5))
    groups[-1][:, 9] = beside
    normal = torch.randn(40, 32, generator=gen)
    groups += [normal, normal * torch.exp2(torch.randint(-30, 30, (40, 1), generator=gen).float())]

    special = torch.randn(17, 32, generator=gen)
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
    special[10, 31] = NAN
    special[11] = NAN
    special[12, [0, 9]] = torch.tensor([-NAN, INF])
    special[13] = torch.finfo(dtype).tiny
    special[14, ::2] = torch.finfo(dtype).smallest_normal / 8  # subnormal
    special[15] = INF
    special[16, [3, 4]] = torch.tensor([-INF, 2.0**125 if dtype == torch.float32 else 2.0**15])
    groups = torch.cat([*groups, special]).to(dtype)
    groups = groups[torch.randperm(len(groups), generator=gen)]
    return groups[: len(groups) // 16 * 16].view(-1, dim)


def pool_of_bytes(blocks: int, block_size: int, head_dim: int, device: str) -> torch.Tensor:
    """A strided pool of distinguishable bytes, so that any write is seen."""
    pool = empty_mxfp4_pool(blocks, block_size, head_dim)
    storage = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())
    storage.copy_(torch.arange(storage.numel()) * 131 % 251)
    return to_device({"pool": pool}, device)["pool"]


# Query


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_query_bytes(device: str, head_dim: int, dtype: torch.dtype) -> None:
    rows = awkward_rows(head_dim, dtype)
    rows = rows[: len(rows) // 8 * 8]
    packed, scales = reference.quantize_mxfp4(rows)
    for shape in ((-1, 8, head_dim), (2, -1, 4, head_dim)):
        q = rows.view(shape)
        q_fp4, q_sf = mqa.quantize_q_mxfp4(strided(q, device, inner=2))
        assert (q_fp4.dtype, q_sf.dtype) == (torch.uint8, torch.int32)
        assert q_fp4.shape == (*q.shape[:-1], head_dim // 2) and q_sf.shape == q.shape[:-1]
        assert q_fp4.is_contiguous() and q_sf.is_contiguous()
        assert torch.equal(q_fp4.cpu().view(-1, head_dim // 2), packed)
        assert torch.equal(q_sf.cpu().flatten(), reference.scale_words(scales))


def test_recipe_in_numbers(device: str) -> None:
    """Worked by hand: ties go towards zero, whatever the parity of the code; zeros have no sign."""
    row = torch.zeros(64)
    row[:20] = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0.26, 5.1, -6, -0.0, NAN]
    )
    row[32] = 6.0001
    q_fp4, q_sf = mqa.quantize_q_mxfp4(row.view(1, 1, 64).to(device))
    nibbles = [int(x) for byte in q_fp4.flatten().tolist() for x in (byte & 15, byte >> 4)]
    assert nibbles[:20] == [7, 0, 1, 2, 3, 4, 5, 6, 0, 9, 10, 11, 12, 13, 14, 1, 7, 15, 0, 0]
    assert nibbles[32] == 5  # 3.00005 of 2
    assert q_sf.view(torch.uint8).flatten().tolist() == [127, 128, 127, 127]


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_of_any_alignment_and_rank(device: str, dtype: torch.dtype) -> None:
    """Bases aligned to one element only; no leading dimension, three of them, an empty one."""
    values = torch.randn(7 + 3 * 2 * 4 * 8 * 64).to(dtype)
    for offset in range(8):
        for shape in ((8, 64), (4, 8, 64), (3, 2, 4, 8, 64), (0, 8, 64)):
            flat = values.to(device)[offset:][: torch.Size(shape).numel()].view(shape)
            q_fp4, q_sf = mqa.quantize_q_mxfp4(flat)
            if flat.numel() and offset in (0, 3):
                packed, scales = reference.quantize_mxfp4(flat[..., :2, :])
                assert torch.equal(q_fp4[..., :2, :].cpu().reshape(-1, 32), packed)
                assert torch.equal(q_sf[..., :2].cpu().flatten(), reference.scale_words(scales))
            aligned = mqa.quantize_q_mxfp4(flat.clone())
            assert torch.equal(q_fp4, aligned[0]) and torch.equal(q_sf, aligned[1])


def test_query_with_shared_leading_dimensions(device: str) -> None:
    """Strides of 0, and dimensions that are not in order of their strides."""
    q = torch.randn(4, 3, 8, 64).to(device)
    for view in (q.transpose(0, 1), q[:1].expand(5, -1, -1, -1), q[::3], q[:, 1:2]):
        q_fp4, q_sf = mqa.quantize_q_mxfp4(view)
        packed, scales = reference.quantize_mxfp4(view.reshape(-1, 64))
        assert torch.equal(q_fp4.cpu().view(-1, 32), packed)
        assert torch.equal(q_sf.cpu().flatten(), reference.scale_words(scales))


@pytest.mark.parametrize("packed_dtype", [torch.uint8, torch.float4_e2m1fn_x2])
def test_query_into_given_buffers(device: str, packed_dtype: torch.dtype) -> None:
    q = torch.randn(6, 8, 64).to(device, torch.bfloat16)
    packed, scales = reference.quantize_mxfp4(q.view(-1, 64))
    storage = poison_bytes(8 * 9 * 32, device).view(8, 9, 32)
    words = torch.full((8, 11), FILL, dtype=torch.int32, device=device)
    torch.ops.mqa.quantize_q_mxfp4.out(q, q_fp4=storage[1:7, 1:].view(packed_dtype), q_sf=words[1:7, 2:10])
    assert torch.equal(storage[1:7, 1:].cpu().reshape(-1, 32), packed)
    assert torch.equal(words[1:7, 2:10].cpu().flatten(), reference.scale_words(scales))
    words[1:7, 2:10] = FILL
    assert (words == FILL).all()
    storage[1:7, 1:] = poison_bytes(32, device)
    assert torch.equal(storage.flatten(), poison_bytes(8 * 9 * 32, device))


# Cache writer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cache_bytes(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """Every byte of the storage, written and not written, gaps between the blocks included."""
    k = awkward_rows(head_dim, dtype)
    block_size, interleaved = LAYOUTS[HEAD_DIMS.index(head_dim) * 3 + DTYPES.index(dtype)]
    blocks = len(k) // block_size + 3
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[: len(k)]
    slots[::7] = torch.tensor([-1, -block_size, -(2**63), blocks * block_size, 2**40, 2**63 - 1])[
        torch.arange(len(slots[::7])) % 6
    ]
    expected = pool_of_bytes(blocks, block_size, head_dim, "cpu")
    pool = pool_of_bytes(blocks, block_size, head_dim, device)
    reference.write_k_cache_mxfp4(k, slots, expected, interleaved)
    result = mqa.quantize_k_cache_mxfp4(
        strided(k, device, inner=1), slots.to(device), pool, is_kv_sf_interleaved=interleaved
    )
    assert result is None
    assert torch.equal(storage_of(pool), storage_of(expected))


@pytest.mark.parametrize(("block_size", "interleaved"), LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cache_of_every_layout(device: str, head_dim: int, block_size: int, interleaved: bool) -> None:
    gen = torch.Generator().manual_seed(block_size)
    k = torch.randn(60, head_dim, generator=gen).to(torch.bfloat16)
    slots = torch.randperm(5 * block_size, generator=gen)[:60]
    expected = pool_of_bytes(5, block_size, head_dim, "cpu")
    pool = pool_of_bytes(5, block_size, head_dim, device)
    reference.write_k_cache_mxfp4(k, slots, expected, interleaved)
    mqa.quantize_k_cache_mxfp4(k.to(device), slots.to(device), pool, is_kv_sf_interleaved=interleaved)
    assert torch.equal(storage_of(pool), storage_of(expected))


def test_strided_keys(device: str) -> None:
    """A column slice of a wider projection, one key for all, one key, no key."""
    wide = torch.randn(9, 300).to(device, torch.bfloat16)
    for k in (wide[:, 17:145], wide[:1, 3:131].expand(9, -1), wide[:1, :128], wide[:0, :128]):
        slots = torch.arange(20, 20 + len(k), device=device)
        expected, pool = pool_of_bytes(2, 16, 128, "cpu"), pool_of_bytes(2, 16, 128, device)
        reference.write_k_cache_mxfp4(k, slots, expected, False)
        mqa.quantize_k_cache_mxfp4(k, slots, pool)
        assert torch.equal(storage_of(pool), storage_of(expected))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens,slots", [(2, 1), (4000, 16), (4000, 2000), (20_000, 10_000)])
def test_tokens_of_one_slot(device: str, tokens: int, slots: int, head_dim: int) -> None:
    """Of several tokens with one slot any wins, but whole: value bytes and scales are the same token's."""
    # Token i's values spell out i in signs, its scales are 2^(i % 200 - 100) in every group.
    index = torch.arange(tokens)
    signs = 1 - 2.0 * (index[:, None] >> (torch.arange(head_dim) % 16) & 1)
    k = (signs * 6 * torch.exp2((index % 20).float())[:, None]).to(device)
    mapping = (index % slots).to(device)
    for _ in range(20):
        pool = empty_mxfp4_pool(-(-slots // 16), 16, head_dim, device=device)
        mqa.quantize_k_cache_mxfp4(k, mapping, pool)
        values, scales = mxfp4_parts(pool)
        values = values.reshape(-1, head_dim // 2)[:slots].cpu()
        scales = scales.reshape(-1, head_dim // 32)[:slots].cpu()
        negative = torch.stack([values >> 3 & 1, values >> 7], -1).flatten(1).long()
        winner = (negative[:, :16] << torch.arange(16)).sum(1)
        assert ((winner < tokens) & (winner % slots == torch.arange(slots))).all()
        assert torch.equal(negative, index[winner][:, None] >> (torch.arange(head_dim) % 16) & 1)
        assert ((values & 0x77) == 0x77).all()
        assert (scales.long() == (127 + winner % 20)[:, None]).all()


# Gather


@pytest.mark.parametrize("name", hostile_gathers())
def test_gather(device: str, name: str) -> None:
    """Contents of cu_seq_lens and of the table are never trusted."""
    starts = hostile_gathers()[name]
    for head_dim, block_size, table_width in ((128, 64, None), (64, 16, 3), (64, 256, 1)):
        case = fp4_case(head_dim=head_dim, block_size=block_size, table_width=table_width, device=device)
        cu_seq_lens = torch.tensor([INT_MAX, *starts, INT_MIN], dtype=torch.int32, device=device)[1:-1]
        arguments = case["kv_fused"], case["block_tables"], cu_seq_lens, 600
        expected, expected_words = reference.gather_k_cache_mxfp4(*arguments, False)
        k, k_sf = mqa.gather_k_cache_mxfp4(*arguments)
        assert (k.dtype, k_sf.dtype) == (torch.uint8, torch.int32)
        assert k.shape == (600, head_dim // 2) and k.is_contiguous()
        assert torch.equal(k.cpu(), expected)
        assert torch.equal(k_sf.cpu(), expected_words)


@pytest.mark.parametrize(("block_size", "interleaved"), LAYOUTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gather_shapes(device: str, head_dim: int, block_size: int, interleaved: bool) -> None:
    case = fp4_case(5, 1, 8, head_dim, block_size, [70, 0, 33, 1, 257], interleaved=interleaved, device=device)
    cu_seq_lens = torch.tensor([0, 70, 70, 103, 104, 361], dtype=torch.int32)
    arguments = case["kv_fused"], case["block_tables"], cu_seq_lens.to(device), 370
    expected, expected_words = reference.gather_k_cache_mxfp4(*arguments, interleaved)
    k, k_sf = mqa.gather_k_cache_mxfp4(*arguments, is_kv_sf_interleaved=interleaved)
    assert torch.equal(k.cpu(), expected) and expected[:361].any(1).all()
    assert torch.equal(k_sf.cpu(), expected_words) and not k_sf[361:].any()


@pytest.mark.parametrize("packed_dtype", [torch.uint8, torch.float4_e2m1fn_x2])
def test_gather_into_given_buffers(device: str, packed_dtype: torch.dtype) -> None:
    """Rows that no request covers and absent pages are written too."""
    case = fp4_case(device=device)
    case["block_tables"][0, 0] = -1
    cu_seq_lens = torch.tensor([3, 70, 70, 90], dtype=torch.int32, device=device)
    arguments = case["kv_fused"], case["block_tables"], cu_seq_lens, 100
    expected, expected_words = reference.gather_k_cache_mxfp4(*arguments, False)
    storage = poison_bytes(102 * 80, device).view(102, 80)
    words = torch.full((102,), FILL, dtype=torch.int32, device=device)
    torch.ops.mqa.gather_k_cache_mxfp4.out(*arguments, k=storage[1:101, 8:72].view(packed_dtype), k_sf=words[1:101])
    assert torch.equal(storage[1:101, 8:72].cpu(), expected)
    assert torch.equal(words[1:101].cpu(), expected_words)
    assert (words[[0, 101]] == FILL).all()
    storage[1:101, 8:72] = poison_bytes(64, device)
    assert torch.equal(storage.flatten(), poison_bytes(102 * 80, device))


def test_gather_of_nothing(device: str) -> None:
    case = fp4_case(device=device)
    cu_seq_lens = torch.zeros(4, dtype=torch.int32, device=device)
    k, k_sf = mqa.gather_k_cache_mxfp4(case["kv_fused"], case["block_tables"], cu_seq_lens, 0)
    assert k.shape == (0, 64) and k_sf.shape == (0,)
    k, k_sf = mqa.gather_k_cache_mxfp4(case["kv_fused"], case["block_tables"][:0], cu_seq_lens[:1], 5)
    assert not k.any() and k_sf.tolist() == [0] * 5


# Together


@pytest.mark.parametrize("interleaved", [False, True])
def test_round_trip(device: str, interleaved: bool) -> None:
    """Written and gathered, a key is off by no more than half the step at its size, which its group's scale sets."""
    k = torch.randn(170, 128, generator=torch.Generator().manual_seed(0))
    pool = empty_mxfp4_pool(5, 128, 128, device=device)
    table = torch.tensor([[3, 0]], dtype=torch.int32, device=device)
    token = torch.arange(170)
    slots = table.cpu()[0, token // 128].long() * 128 + token % 128
    mqa.quantize_k_cache_mxfp4(k.to(device), slots.to(device), pool, is_kv_sf_interleaved=interleaved)
    cu_seq_lens = torch.tensor([0, 170], dtype=torch.int32, device=device)
    codes, words = mqa.gather_k_cache_mxfp4(pool, table, cu_seq_lens, 170, is_kv_sf_interleaved=interleaved)
    packed, scales = reference.quantize_mxfp4(k)
    assert torch.equal(codes.cpu(), packed) and torch.equal(words.cpu(), reference.scale_words(scales))
    scale = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    size = k.abs() / scale
    half_step = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0)) * scale
    assert ((reference.decode_mxfp4(packed, scales) - k).abs() <= half_step).all()


def test_bytes_of_a_block() -> None:
    for block_size, head_dim in itertools.product(BLOCK_SIZES, HEAD_DIMS):
        assert mqa.index_cache_block_bytes("fp4", block_size, head_dim) == block_size * (head_dim // 2 + head_dim // 32)
