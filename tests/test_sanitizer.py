"""A small selection that drives every kernel into its corners: what compute-sanitizer runs (see CONTRIBUTING.md)."""

import pytest
import reference
import torch
from inputs import fp4_case, paged_case, slot_table, to_device, topk_case

import torch_mqa_ops

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(("heads", "next_n"), [(8, 1), (64, 2), (128, 5)])
@pytest.mark.parametrize("schedule", ["none", "own", "garbage"])
def test_logits(head_dim: int, heads: int, next_n: int, schedule: str) -> None:
    """Absent and foreign pages, a slot count that needs several passes, cleaning, and schedules of every kind."""
    case = paged_case(
        next_n=next_n, heads=heads, head_dim=head_dim, block_size=16, lengths=[70, 0, 300], lengths_2d=next_n == 2,
        device="cuda",
    )  # fmt: skip
    case["block_tables"][0, 1] = -7
    case["block_tables"][2, 3] = 2**30
    meta = {
        "none": None,
        "own": torch_mqa_ops.compute_paged_mqa_logits_schedule(case["seq_lens"]),
        "garbage": torch.tensor(
            [[5, 5], [2, 2**31 - 1], [-1, -(2**31)], [1, 0], [2, 1], [0, 0]], dtype=torch.int32, device="cuda"
        ),
    }[schedule]
    logits = torch_mqa_ops.fp8_paged_mqa_logits(**case, schedule_meta=meta, clean_logits=True)
    reference.assert_logits(logits, reference.paged_mqa_logits(**case), clean=True)


@pytest.mark.parametrize(("heads", "next_n"), [(8, 1), (64, 4), (64, 5)])
def test_rings_go_round(heads: int, next_n: int) -> None:
    """More tiles and more requests to a block than it has stages of anything."""
    case = paged_case(
        next_n=next_n, heads=heads, head_dim=32, block_size=256, lengths=[30] * 60 + [130_000], device="cuda"
    )
    logits = torch_mqa_ops.fp8_paged_mqa_logits(**case, clean_logits=True)
    reference.assert_logits(logits, reference.paged_mqa_logits(**case), clean=True)


@pytest.mark.parametrize(("heads", "next_n"), [(8, 1), (64, 5)])
def test_fp4_rings_go_round(heads: int, next_n: int) -> None:
    case = fp4_case(
        next_n=next_n, heads=heads, head_dim=64, block_size=256, lengths=[30] * 60 + [130_000], device="cuda"
    )
    logits = torch_mqa_ops.fp4_paged_mqa_logits(**case, output_dtype=torch.float32, clean_logits=True)
    reference.assert_logits(logits, reference.fp4_paged_mqa_logits(**case), clean=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "next_n"), [(8, 1), (64, 2), (128, 5)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fp4_logits(head_dim: int, heads: int, next_n: int, interleaved: bool) -> None:
    case = fp4_case(
        next_n=next_n, heads=heads, head_dim=head_dim, block_size=128 if interleaved else 16, lengths=[70, 0, 300],
        interleaved=interleaved, device="cuda",
    )  # fmt: skip
    case["block_tables"][0, 0] = -7
    case["block_tables"][2, 1] = 2**30
    logits = torch_mqa_ops.fp4_paged_mqa_logits(**case, output_dtype=torch.float32, clean_logits=True)
    reference.assert_logits(logits, reference.fp4_paged_mqa_logits(**case), clean=True)


def test_quantisers() -> None:
    """Shared, negative and far slots; tables and offsets that point anywhere."""
    torch.manual_seed(0)
    cache = torch.full((5, 16, 1, 132), 0x7F, dtype=torch.uint8, device="cuda")
    slots = torch.randint(-3, 100, (700,), device="cuda")
    torch_mqa_ops.quantize_k_cache_fp8(torch.randn(700, 128, device="cuda"), slots, cache)
    q, weights = torch_mqa_ops.quantize_q_fp8(torch.randn(3, 2, 7, 64, device="cuda", dtype=torch.bfloat16))
    assert q.float().isfinite().all() and weights.isfinite().all()
    tables = torch.randint(-2, 8, (3, 2), dtype=torch.int32, device="cuda")
    offsets = torch.tensor([-5, 40, 20, 2**31 - 1], dtype=torch.int32, device="cuda")
    k, scale = torch_mqa_ops.gather_k_cache_fp8(cache, tables, offsets, 130)
    assert k.shape == (130, 128) and scale.shape == (130,)


def test_mxfp4_quantisers() -> None:
    torch.manual_seed(0)
    for block_size, interleaved in ((16, False), (128, True)):
        cache = torch.full((5, block_size, 1, 68), 0x7F, dtype=torch.uint8, device="cuda")
        slots = torch.randint(-3, 100, (700,), device="cuda")
        keys = torch.randn(700, 128, device="cuda")
        torch_mqa_ops.quantize_k_cache_mxfp4(keys, slots, cache, is_kv_sf_interleaved=interleaved)
        tables = torch.randint(-2, 8, (3, 2), dtype=torch.int32, device="cuda")
        offsets = torch.tensor([-5, 40, 20, 2**31 - 1], dtype=torch.int32, device="cuda")
        k, k_sf = torch_mqa_ops.gather_k_cache_mxfp4(cache, tables, offsets, 130, is_kv_sf_interleaved=interleaved)
        assert k.shape == (130, 64) and k_sf.shape == (130,)
    q_fp4, q_sf = torch_mqa_ops.quantize_q_mxfp4(torch.randn(3, 2, 7, 64, device="cuda", dtype=torch.bfloat16))
    assert q_fp4.shape == (3, 2, 7, 32) and q_sf.shape == (3, 2, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk(dtype: torch.dtype) -> None:
    lengths = [0, 5, 64, 5000, 2**31 - 1, -3]
    case = topk_case(6, 5000, lengths, [0, 4999, 17, 0, 3, -5], dtype=dtype, device="cuda")
    for k in (1, 512, 4096):
        for options in ({}, slot_table(case, tables=2, block_size=64)):
            chosen = torch_mqa_ops.topk_indices(**case, **options, k=k).cpu()
            assert torch.equal(chosen, reference.topk_indices(**to_device(case | options, "cpu"), k=k))
