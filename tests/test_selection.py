"""topk_indices: which positions, in what order, from any values, lengths and tables. A full sort is the truth."""

from __future__ import annotations

from collections.abc import Callable

import inputs
import op_cases
import pytest
import reference
import torch

import torch_mqa_ops as mqa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_chosen(case: dict, **options) -> torch.Tensor:
    """Into poisoned rows with gaps between them; again, to the bit."""
    case = case | options
    expected = reference.topk_indices(**inputs.to_device(case, "cpu"))
    rows, k = expected.shape
    storage = torch.full((rows + 2, k + 3), op_cases.POISON, dtype=torch.int32, device=case["logits"].device)
    before = storage.clone()
    out = storage[1:-1, 1 : 1 + k]
    assert mqa.topk_indices(**case, out=out) is out
    assert torch.equal(out.cpu(), expected)
    before[1:-1, 1 : 1 + k] = out
    assert torch.equal(storage, before), "written outside"
    assert torch.equal(mqa.topk_indices(**case), out)
    return out


# ---- lengths, k, dtypes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 512, 2048, 4096])
def test_lengths_around_k(k, dtype, device):
    lengths = [0, 1, k - 1, k, k + 1, 2 * k, 3 * k + 77, 5000, 5001, inputs.INT_MAX, -1, inputs.INT_MIN]
    assert_chosen(inputs.topk_case(len(lengths), 5000, lengths, dtype=dtype, device=device, seed=k), k=k)


@pytest.mark.parametrize("width", [0, 1, 2, 7, 64, 255, 257])
def test_narrow(width, device):
    lengths = [0, 1, width // 2, width, width + 1]
    for k in (1, 3, 300):
        assert_chosen(inputs.topk_case(5, width, lengths, device=device, seed=width), k=k)


@pytest.mark.parametrize("k", [512, 2048])
def test_long_row_among_short_ones(k, device):
    lengths = [100] * 30 + [500_000] + [100] * 33
    assert_chosen(inputs.topk_case(64, 500_000, lengths, device=device), k=k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide(dtype, device):
    width = 1 << 24
    logits = torch.empty(1, width, dtype=dtype, device=device).normal_(generator=torch.Generator(device).manual_seed(3))
    lengths = torch.tensor([width], dtype=torch.int32, device=device)
    chosen = mqa.topk_indices(logits, lengths, 2048)[0].cpu()
    ranked = torch.sort(logits[0].float().cpu(), descending=True, stable=True).indices[:2048]
    assert torch.equal(chosen.long(), ranked.sort().values)


def test_many_rows(device):
    gen = torch.Generator().manual_seed(5)
    lengths = torch.randint(-2, 90, (32768,), generator=gen).tolist()
    case = inputs.topk_case(32768, 80, lengths, device=device, seed=5)
    chosen = mqa.topk_indices(**case, k=16).cpu()
    some = torch.randint(0, 32768, (400,), generator=gen).tolist()
    few = {name: value[some] for name, value in case.items() if value is not None}
    assert torch.equal(chosen[some], reference.topk_indices(**inputs.to_device(few, "cpu"), k=16))


def test_no_rows(device):
    logits, lengths = torch.empty(0, 40, device=device), torch.empty(0, dtype=torch.int32, device=device)
    table = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert mqa.topk_indices(logits, lengths, 7).shape == (0, 7)
    assert mqa.topk_indices(logits, lengths, 7, block_tables=table, block_size=16).shape == (0, 7)


# ---- values

N = 9000


def scattered(value: float, background: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(background.shape, generator=gen) < 0.01, torch.tensor(value), background)


VALUES: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "normal": lambda gen: torch.randn(N, generator=gen),
    "eighths": lambda gen: (torch.randn(N, generator=gen) * 8).round() / 8,
    "two values": lambda gen: (torch.rand(N, generator=gen) < 0.5).float(),
    "all equal": lambda gen: torch.full((N,), 3.25),
    "all zero, signs mixed": lambda gen: torch.randn(N, generator=gen) * 0.0,
    "ascending": lambda gen: torch.arange(N).float(),
    "descending": lambda gen: -torch.arange(N).float(),
    "narrow": lambda gen: 1 + 1e-6 * torch.randn(N, generator=gen),
    "offset": lambda gen: 100 + 30 * torch.randn(N, generator=gen).relu(),
    "top squeezed": lambda gen: torch.randn(N, generator=gen).clamp(max=1.2) + 1e-6 * torch.rand(N, generator=gen),
    "period of 16": lambda gen: torch.arange(N).float() % 16,
    "only one apart": lambda gen: torch.full((N,), 1.0).index_fill(0, torch.tensor([N - 1]), 1 + 2.0**-23),
    "last ones best": lambda gen: torch.cat([torch.zeros(N - 600), torch.ones(600)]),
    "mostly -inf": lambda gen: torch.where(torch.arange(N) % 97 == 5, torch.randn(N, generator=gen), -torch.inf),
    "all -inf": lambda gen: torch.full((N,), -torch.inf),
    "all NaN": lambda gen: torch.full((N,), torch.nan),
    "NaN and -inf": lambda gen: scattered(-torch.inf, torch.full((N,), torch.nan), gen),
    "+inf among": lambda gen: scattered(torch.inf, torch.randn(N, generator=gen), gen),
    "NaN among": lambda gen: scattered(torch.nan, torch.randn(N, generator=gen), gen),
    "denormal": lambda gen: torch.randint(-5, 6, (N,), generator=gen) * 2.0**-149,
    "huge": lambda gen: torch.randn(N, generator=gen) * 3e38,
    "any bits": lambda gen: torch.randint(-(2**31), 2**31, (N,), generator=gen, dtype=torch.int64).int().view(
        torch.float32
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_values(values, dtype, device):
    made = VALUES[values](torch.Generator().manual_seed(11))
    case = inputs.topk_case(3, N, [N, N - 1, 4000], dtype=dtype, device=device, values=made.expand(3, N).to(device))
    for k in (1, 512, 2048, 4096):
        assert_chosen(case, k=k)


def test_negative_nan_is_nan(device):
    logits = torch.tensor([[0xFFC00000, 0xFF800000, 0x7FC00001, 0xFF800001, 0xFF7FFFFF]], device=device)
    logits = logits.to(torch.int64).to(torch.int32).view(torch.float32)
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    expected = {1: [4], 2: [1, 4], 3: [0, 1, 4], 4: [0, 1, 2, 4], 5: [0, 1, 2, 3, 4]}
    for k, positions in expected.items():
        assert mqa.topk_indices(logits, lengths, k).tolist() == [positions]


@pytest.mark.parametrize("k", [1, 100, 600, 2048])
def test_which(k, device):
    """The set, whatever its order: no value left out is above one taken, and ties go to the lower index."""
    case = inputs.topk_case(4, N, [N] * 4, device=device, values=torch.randn(4, N).mul(20).round().to(device))
    chosen = mqa.topk_indices(**case, k=k)
    for row in range(4):
        taken = torch.zeros(N, dtype=torch.bool, device=device)
        taken[chosen[row].long()] = True
        assert taken.sum() == k
        values = case["logits"][row]
        least = values[taken].min()
        assert (values[~taken] <= least).all()
        ties = (values == least).nonzero().flatten()
        assert taken[ties].int().diff().le(0).all()


@pytest.mark.parametrize("lengths", [[N, 3000, 40, 0], [50, 50, 50, 50]])
def test_in_what_order(lengths, device):
    chosen = mqa.topk_indices(**inputs.topk_case(4, N, lengths, device=device), k=64).cpu()
    for row, length in zip(chosen, lengths, strict=True):
        count = min(length, 64)
        assert (row[:count].diff() > 0).all()
        assert (row[count:] == -1).all()


@pytest.mark.parametrize("rows", [1, 5, 20, 70])
@pytest.mark.parametrize("width", [41_000, 150_000, 600_000])
def test_rows_that_many_blocks_share(width, rows, device):
    """From one block to sixteen for a row, its part kept in registers or read again, with few candidates and many."""
    if rows * width > 3_000_000 and device == "cpu":
        pytest.skip("tells nothing new about the CPU")
    gen = torch.Generator().manual_seed(rows)
    kinds = [VALUES[kind](gen) for kind in ("normal", "two values", "narrow", "NaN among", "all equal", "ascending")]
    values = torch.stack([kinds[row % 6].repeat(width // N + 1)[:width] for row in range(rows)])
    lengths = [(width, width // 3, 2049, 20_479, 20_480)[row % 5] for row in range(rows)]
    starts = [row % 7 for row in range(rows)]
    case = inputs.topk_case(rows, width, lengths, starts, device=device, values=values.to(device))
    for k in (1, 2048):
        assert_chosen(case, k=k)
    assert_chosen(case, k=2048, **inputs.slot_table(case, tables=1, block_size=64))


# ---- rows for themselves


def test_a_row_does_not_depend_on_its_neighbours(device):
    gen = torch.Generator().manual_seed(6)
    lengths = [70_000, 3, 4097, 20_000, 0, 70_000, 2048, 2049]
    values = torch.stack(
        [VALUES[name](gen).repeat(8)[:70_000] for name in ("normal", "eighths", "narrow", "ascending")]
    )
    case = inputs.topk_case(8, 70_000, lengths, device=device, values=values.repeat(2, 1).to(device))
    together = mqa.topk_indices(**case, k=2048)
    for row in range(8):
        alone = {name: value[row : row + 1] for name, value in case.items() if value is not None}
        assert torch.equal(mqa.topk_indices(**alone, k=2048)[0], together[row])


def test_one_row_for_all(device):
    """Rows may share memory: only what is written may not."""
    logits = torch.randn(1, 3000, device=device).expand(5, 3000)
    lengths = torch.tensor([3000, 10, 0, 2999, 1000], dtype=torch.int32, device=device)
    assert_chosen({"logits": logits, "lengths": lengths}, k=100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_starts(dtype, device):
    starts = [0, 1, 17, 4999, 5000, 5001, -5, inputs.INT_MAX, inputs.INT_MIN, 2500]
    for lengths in ([5000] * 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [700] * 10, [inputs.INT_MAX] * 10):
        case = inputs.topk_case(10, 5000, lengths, starts, dtype=dtype, device=device, seed=lengths[1])
        for k in (1, 64, 2048):
            assert_chosen(case, k=k)


# ---- slots


@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
@pytest.mark.parametrize("tables", [1, 2, 6])
def test_slots(tables, block_size, device):
    lengths = [0, 5, 64, 300, 1000, 2000]
    case = inputs.topk_case(6, 2000, lengths, device=device, seed=block_size)
    for width in (0, 1, 1000 // block_size, 2000 // block_size + 1):  # positions past the table are dropped
        for k in (16, 512, 4096):
            assert_chosen(case, k=k, **inputs.slot_table(case, tables, block_size, width=width))


def test_slots_count_from_the_start(device):
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0, 6.0]], device=device)
    ints = {"dtype": torch.int32, "device": device}
    options = {"starts": torch.tensor([2], **ints), "block_tables": torch.tensor([[5, 3]], **ints), "block_size": 2}
    chosen = mqa.topk_indices(logits, torch.tensor([3], **ints), 4, **options)
    assert chosen.tolist() == [[10, 11, 6, -1]]


def test_slots_at_the_end_of_int32(device):
    ints = {"dtype": torch.int32, "device": device}
    table = torch.tensor([[2**27 - 1, 2**27, 2**31 - 1, -(2**31)]], **ints)
    logits, lengths = torch.zeros(1, 64, device=device), torch.tensor([64], **ints)
    chosen = mqa.topk_indices(logits, lengths, 64, block_tables=table, block_size=16)
    assert chosen.tolist() == [[2**31 - 16 + i for i in range(16)] + [-1] * 48]


# ---- on the logits they are made for


def test_after_logits(device):
    """Rows of a batch with draft tokens, straight from the logits' padded buffer, which holds stale scores."""
    case = inputs.paged_case(next_n=2, heads=8, head_dim=64, lengths=[5, 900, 3000], device=device)
    out = torch.full((6, mqa.padded_seq_len(case["max_seq_len"])), 1e30, device=device)
    logits = mqa.fp8_paged_mqa_logits(**case, out=out)
    ends = (case["seq_lens"][:, None] + torch.tensor([-1, 0], device=device)).flatten().to(torch.int32)
    table = case["block_tables"].clamp(-1, len(case["kv_fused"]) - 1)
    assert_chosen({"logits": logits, "lengths": ends}, k=512)
    assert_chosen({"logits": logits, "lengths": ends}, k=512, block_tables=table, block_size=64)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_cpu(dtype):
    values = torch.randn(16, 40_000, generator=torch.Generator().manual_seed(8)).mul(30).round()
    case = inputs.topk_case(16, 40_000, [40_000, 100, 0, 39_999] * 4, dtype=dtype, values=values)
    for k in (7, 512, 2048, 4096):
        expected = mqa.topk_indices(**case, k=k)
        assert torch.equal(mqa.topk_indices(**inputs.to_device(case, "cuda"), k=k).cpu(), expected)
