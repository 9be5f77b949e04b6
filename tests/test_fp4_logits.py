"""fp4_paged_mqa_logits: numbers from MXFP4 bytes, scales of every size, and independence of everything around a row.

What does not depend on the format (streams, threads, memory, offsets past 32 bits) is in test_paged_logits.py: the code
is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference
import torch
from inputs import INT_MAX, INT_MIN, contiguous_twin, fp4_case, mxfp4_parts, to_device

import torch_mqa_ops as mqa

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUNDARIES = (0, 1, 2, 3, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 512, 1024, 1025)
FILL = -777.0
SIX = 0x77  # two codes of 6


def score(case: dict, **options) -> torch.Tensor:
    """The op's result in an `out` of odd offset and row stride, with spare rows and columns around."""
    rows, width = case["weights"].shape[0], case["max_seq_len"]
    padded = -(-width // 256) * 256
    options = {"output_dtype": torch.float32} | options
    dtype = options["output_dtype"]
    buffer = torch.full((rows + 3, padded + 13), FILL, dtype=dtype, device=case["q"].device)
    out = buffer[1 : rows + 2, 3 : padded + 8]
    result = mqa.fp4_paged_mqa_logits(**case, **options, out=out)
    assert result.shape == (rows, width) and result.dtype == dtype
    untouched = torch.ones_like(buffer, dtype=torch.bool)
    untouched[1 : rows + 1, 3 : padded + 3] = False
    assert (buffer[untouched] == buffer[0, 0]).all() and buffer[0, 0] == torch.tensor(FILL, dtype=dtype)
    return result


def check(case: dict, **options) -> torch.Tensor:
    result = score(case, **options)
    reference.assert_logits(result, reference.fp4_paged_mqa_logits(**case), clean=options.get("clean_logits", False))
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().unsqueeze(-1).view(torch.uint8), b.contiguous().unsqueeze(-1).view(torch.uint8))


def probe(
    k_codes: torch.Tensor,
    k_scales: torch.Tensor,
    q_codes: torch.Tensor,
    q_scales: torch.Tensor,
    weights: torch.Tensor,
    device: str,
) -> dict:
    """One request and slot with these bytes: k [L, D/2] and [L, D/32], q [H, D/2] and [H, D/32], weights [H]."""
    length, heads, head_dim = len(k_codes), len(q_codes), 2 * k_codes.shape[1]
    case = fp4_case(heads=heads, head_dim=head_dim, lengths=[-(-length // 64) * 64])
    values, scales = mxfp4_parts(case["kv_fused"])
    token = torch.arange(length)
    page, row = case["block_tables"][0, token // 64].long(), token % 64
    values[page, row] = k_codes
    scales[page, row] = k_scales
    case["q"].copy_(q_codes.view(case["q"].shape))
    words = torch.full((heads, 4), 255, dtype=torch.uint8)
    words[:, : head_dim // 32] = q_scales
    case["q_sf"].copy_(words.view(torch.int32).view(1, 1, heads))
    case["weights"].copy_(weights)
    case["seq_lens"].fill_(length)
    case["max_seq_len"] = length
    return to_device(case, device)


def full(shape: tuple[int, ...], value: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


# Numbers


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_shapes(device: str, heads: int, head_dim: int, block_size: int) -> None:
    """All supported shapes: every number of slots on a GPU, on the CPU a different one for each shape."""
    turn = HEADS.index(heads) * 10 + HEAD_DIMS.index(head_dim) * 5 + BLOCK_SIZES.index(block_size)
    for next_n in range(1, 17) if device == "cuda" else [1 + 7 * turn % 16]:
        case = fp4_case(
            next_n=next_n,
            heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            lengths=[70, 300, 1000] if heads * next_n <= 512 else [70, 3, 300],
            interleaved=block_size == 128 and next_n % 2 == 0,
            lengths_2d=turn % 2 == 1,
            weights_dtype=DTYPES[turn // 3 % 3],
            device=device,
            seed=turn,
        )
        check(case, output_dtype=DTYPES[(turn + next_n) % 3], clean_logits=turn % 4 < 2)


@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", DTYPES)
def test_dtypes(device: str, output_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    check(fp4_case(next_n=2, weights_dtype=weights_dtype, device=device), output_dtype=output_dtype)


def test_default_result_is_bfloat16(device: str) -> None:
    case = fp4_case(device=device)
    result = mqa.fp4_paged_mqa_logits(**case, clean_logits=True)
    assert result.dtype == torch.bfloat16 and result.stride(0) == mqa.padded_seq_len(case["max_seq_len"])
    assert same_bits(result, score(case, output_dtype=torch.bfloat16, clean_logits=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_interleaved_scales(device: str, head_dim: int) -> None:
    """The same tokens in both layouts give the same bits."""
    for next_n in (1, 4):
        cases = [
            fp4_case(next_n=next_n, head_dim=head_dim, block_size=128, interleaved=flag, device=device)
            for flag in (False, True)
        ]
        plain, interleaved = (score(case, clean_logits=True) for case in cases)
        assert same_bits(plain, interleaved)
        swapped = cases[0] | {"is_kv_sf_interleaved": True}
        assert not same_bits(score(swapped, clean_logits=True), plain)


def test_names_that_torch_has_for_the_bytes(device: str) -> None:
    case = fp4_case(next_n=2, device=device)
    plain = score(case, clean_logits=True)
    assert same_bits(score(case | {"q": case["q"].view(torch.float4_e2m1fn_x2)}, clean_logits=True), plain)
    scale_bytes = case["q_sf"].unsqueeze(-1).view(torch.uint8)
    for named in (scale_bytes, scale_bytes.view(torch.float8_e8m0fnu)):
        assert same_bits(score(case | {"q_sf": named}, clean_logits=True), plain)
    unaligned = torch.zeros(scale_bytes.numel() + 1, dtype=torch.uint8, device=device)[1:].view(scale_bytes.shape)
    for bad in (unaligned, scale_bytes[..., :3], scale_bytes.mT.contiguous().mT):
        with pytest.raises(RuntimeError, match=r"^fp4_paged_mqa_logits: q_sf of bytes must be \[B, n, H, 4\]"):
            score(case | {"q_sf": bad})


def test_from_public_functions_alone(device: str) -> None:
    """Keys and queries through the quantisers: near the scores of the unquantised ones."""
    gen = torch.Generator().manual_seed(0)
    keys, q, weights = (torch.randn(shape, generator=gen) for shape in ((300, 128), (1, 1, 64, 128), (1, 64)))
    cache = torch.zeros(8, 64, 1, 68, dtype=torch.uint8, device=device)
    table = torch.tensor([[6, 2, 4, 0, 7]], dtype=torch.int32, device=device)
    token = torch.arange(300)
    slots = table.cpu()[0, token // 64].long() * 64 + token % 64
    mqa.quantize_k_cache_mxfp4(keys.to(device), slots.to(device), cache)
    q_fp4, q_sf = mqa.quantize_q_mxfp4(q.to(device))
    lens = torch.tensor([300], dtype=torch.int32, device=device)
    logits = mqa.fp4_paged_mqa_logits(
        q_fp4, q_sf, cache, weights.to(device), table, lens, 300, output_dtype=torch.float32
    )  # fmt: skip
    exact = (weights.double().T * torch.relu(q[0, 0].double() @ keys.double().T)).sum(0)
    assert 1e-4 < reference.calc_diff(logits[0].cpu(), exact) < 0.02


# Scales


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_scale_code(device: str, head_dim: int) -> None:
    """Codes 0 to 254 of K are 2^-127 to 2^127, exactly, and 255 is NaN; q's scale and the weights make up for it."""
    codes = torch.arange(256, dtype=torch.uint8)
    groups = head_dim // 32
    gen = torch.Generator().manual_seed(1)
    k_codes = torch.randint(0, 256, (256, head_dim // 2), dtype=torch.uint8, generator=gen)
    q_codes = torch.randint(0, 256, (8, head_dim // 2), dtype=torch.uint8, generator=gen)
    for q_code in (0, 1, 100, 127, 200, 254):
        for exponent in (-126, -60, 0, 60, 126):
            case = probe(
                k_codes,
                codes[:, None].expand(256, groups),
                q_codes,
                full((8, groups), q_code),
                torch.randn(8, generator=gen) * 2.0**exponent,
                device,
            )
            result = check(case)
            assert result[0, 255].isnan() and not result[0, :255].isnan().any()


def test_scale_codes_of_q(device: str) -> None:
    """Each head its own code, over the whole range; weights undo them."""
    heads = 128
    codes = (torch.arange(heads) * 2).to(torch.uint8)
    weights = torch.exp2(-(codes.double() - 127)).float() * torch.linspace(0.5, 2, heads)
    gen = torch.Generator().manual_seed(2)
    k_codes = torch.randint(0, 256, (70, 64), dtype=torch.uint8, generator=gen)
    q_codes = torch.randint(0, 256, (heads, 64), dtype=torch.uint8, generator=gen)
    check(probe(k_codes, full((70, 4), 127), q_codes, codes[:, None].expand(heads, 4), weights, device))


@pytest.mark.parametrize("which", ["k", "q"])
def test_groups_far_apart(device: str, which: str) -> None:
    """Exact down to 2^-9 of the row's largest group (CPU: 2^-126), then an error of no more than 2^-11 of its scale.

    Only the smaller group meets anything but zeros, so that its error is not hidden by the other's size.
    """
    distances = torch.tensor([0, 1, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 20, 21, 22, 23, 24, 30, 60, 126, 127, 200, 254])
    tokens = len(distances)
    scales = full((tokens, 4), 254)
    scales[:, 1] = 254 - distances
    codes = full((tokens, 64), SIX)
    codes[:, 16:32] = 0x31  # 0.5 and 1.5: the codes that need the most bits
    other = full((tokens, 64), 0)
    other[:, 16:32] = SIX
    ones = full((tokens, 4), 2)
    weights = torch.full((8,), 2.0**-4)
    for i in range(tokens):
        far, near = (codes[i : i + 1], scales[i : i + 1]), (other[i : i + 1], ones[i : i + 1])
        k, q = (far, near) if which == "k" else (near, far)
        case = probe(*k, *(x.expand(8, -1) for x in q), weights, device)
        truth = reference.fp4_paged_mqa_logits(**case).logits.item()
        result = score(case).item()
        # A score keeps 11 bits.
        exact_down_to, bits = (126, 20) if device == "cpu" else (9, 10)
        rounded = 16 * 6 * 2.0**-125 * 8 * weights[0].item() * 2.0**127 * 2.0**-11  # elements, other operand, heads
        assert abs(result - truth) <= 2.0**-bits * truth + (0 if distances[i] <= exact_down_to else rounded)


def test_groups_of_zeros_have_no_say(device: str) -> None:
    """However large their scales are: a row is taken relative to the largest scale that scales something."""
    gen = torch.Generator().manual_seed(3)
    k_codes = torch.randint(0, 256, (70, 64), dtype=torch.uint8, generator=gen)
    q_codes = torch.randint(0, 256, (8, 64), dtype=torch.uint8, generator=gen)
    k_scales, q_scales = full((70, 4), 100), full((8, 4), 90)
    k_codes[:, 32:48], q_codes[:, 48:] = 0x80, 0x08  # zeros of both signs
    k_scales[:, 2], q_scales[:, 3] = 254, 254
    k_codes[7] = 0
    q_codes[5], q_scales[5] = 0x88, 254
    weights = torch.randn(8, generator=gen)
    weights[5] = 1e38
    case = probe(k_codes, k_scales, q_codes, q_scales, weights, device)
    result = check(case)
    assert result[0, 7] == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nan_scales(device: str, head_dim: int) -> None:
    """In a token that token's scores, in a head that row; over zeros too. D 64 has no third group."""
    case = fp4_case(next_n=2, head_dim=head_dim, lengths=[70, 300, 40], device=device)
    values, scales = mxfp4_parts(case["kv_fused"])
    page = case["block_tables"][1, 2].long()
    scales[page, 5, head_dim // 32 - 1] = 255
    values[page, 5] = 0
    case["q_sf"].view(torch.uint8)[0, 1, 12 : 12 + head_dim // 32] = 255
    result = check(case, clean_logits=True)
    nan = torch.zeros(result.shape, dtype=torch.bool, device=device)
    nan[2:4, 133] = True
    nan[1, :70] = True
    assert torch.equal(result.isnan(), nan)


def test_nothing_overflows_on_the_way(device: str) -> None:
    """Scales and weights whose products pass float32's range, up or down, have finite scores."""
    gen = torch.Generator().manual_seed(4)
    k_codes = torch.randint(0, 256, (70, 64), dtype=torch.uint8, generator=gen)
    q_codes = torch.randint(0, 256, (8, 64), dtype=torch.uint8, generator=gen)
    signs = torch.randn(8, generator=gen).sign()
    for k_code, q_code, weight in (
        (254, 254, 1e-38),
        (254, 130, 2.0**-130),
        (0, 0, 3e38),
        (3, 254, 1.0),
        (254, 3, 3e38),
    ):
        case = probe(k_codes, full((70, 4), k_code), q_codes, full((8, 4), q_code), weight * signs, device)
        truth = reference.fp4_paged_mqa_logits(**case).logits
        result = check(case)
        assert torch.equal(result.isinf(), truth.float().isinf())


def test_weights_that_are_not_finite(device: str) -> None:
    case = fp4_case(heads=8, lengths=[70, 70, 70], device=device)
    case["weights"][0, 3] = float("inf")
    case["weights"][1, 2] = float("nan")
    case["weights"][2] = 0
    check(case, clean_logits=True)


# Lengths, pages, strides: once each, for the loads are this format's own


@pytest.mark.parametrize("next_n", [1, 2, 5, 16])
def test_boundary_lengths(device: str, next_n: int) -> None:
    case = fp4_case(next_n=next_n, heads=16, lengths=BOUNDARIES, device=device)
    check(case)
    check(case, clean_logits=True)


@pytest.mark.parametrize("block_size", [16, 128])
def test_absurd_lengths(device: str, block_size: int) -> None:
    lengths = [-1, INT_MIN, 300, INT_MAX, 5000, 3, INT_MIN + 1, 301]
    for interleaved in {False, block_size == 128}:
        case = fp4_case(
            next_n=2, heads=8, block_size=block_size, lengths=lengths, max_seq_len=300, table_width=3,
            interleaved=interleaved, device=device,
        )  # fmt: skip
        check(case, clean_logits=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_absent_pages(device: str, interleaved: bool) -> None:
    case = fp4_case(next_n=2, block_size=128, lengths=[300, 1000, 1000], interleaved=interleaved, device=device)
    blocks = len(case["kv_fused"])
    case["block_tables"][0, 0] = -1
    case["block_tables"][1, :4] = torch.tensor([INT_MIN, blocks, INT_MAX, 2**30], dtype=torch.int32)
    result = check(case, clean_logits=True)
    assert (result[0, :128] == -torch.inf).all() and (result[2, :512] == -torch.inf).all()


def test_dead_bytes_never_matter(device: str) -> None:
    case = fp4_case(next_n=2, lengths=[70, 300, 1000], device=device)
    before = score(case, clean_logits=True)
    values, scales = mxfp4_parts(case["kv_fused"])
    page = case["block_tables"][1, 4].long()  # 300 = 4 * 64 + 44
    for byte in (0, 0x55, 0xFF):
        values[page, 44:] = byte
        scales[page, 44:] = byte
        assert same_bits(score(case, clean_logits=True), before)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unaligned_query(device: str, head_dim: int, shift: int) -> None:
    check(fp4_case(next_n=3, heads=16, head_dim=head_dim, q_shift=shift, device=device))


def test_results_of_the_contiguous_twin(device: str) -> None:
    case = fp4_case(next_n=3, device=device)
    assert same_bits(score(case, clean_logits=True), score(contiguous_twin(case), clean_logits=True))


# The same bits whatever is around


def test_rows_know_nothing_of_each_other(device: str) -> None:
    """Alone, with a schedule of any kind, again."""
    case = fp4_case(next_n=2, lengths=[70, 1000, 3, 300], device=device)
    expected = score(case, clean_logits=True)
    assert same_bits(score(case, clean_logits=True), expected)
    nonsense = torch.tensor([[2, 2**30], [-1, INT_MIN], [0, 3], [9, 9]], dtype=torch.int32, device=device)
    for schedule in (mqa.compute_paged_mqa_logits_schedule(case["seq_lens"]), nonsense):
        assert same_bits(score(case, schedule_meta=schedule, clean_logits=True), expected)
    for b in range(4):
        alone = {
            name: t[b : b + 1] if name in ("q", "q_sf", "block_tables", "seq_lens") else t for name, t in case.items()
        }
        alone["weights"] = case["weights"][2 * b : 2 * b + 2]
        assert same_bits(score(alone, clean_logits=True), expected[2 * b : 2 * b + 2])


@pytest.mark.cuda
def test_replay_follows_changes() -> None:
    case = fp4_case(next_n=2, lengths=[1000, 1000, 1000], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mqa.fp4_paged_mqa_logits(**case, clean_logits=True)
    for lengths in ([1000, 1000, 1000], [0, 70, 999], [64, 1, 0]):
        case["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        result.fill_(FILL)
        graph.replay()
        assert same_bits(result, mqa.fp4_paged_mqa_logits(**case, clean_logits=True))


# The suite itself


def swap_two_scales(case: dict) -> None:
    scales = mxfp4_parts(case["kv_fused"])[1][case["block_tables"][2, 3].long()]
    scales[[5, 6]] = scales[[6, 5]]


def swap_two_groups(case: dict) -> None:
    scales = mxfp4_parts(case["kv_fused"])[1]
    scales[..., [0, 1]] = scales[..., [1, 0]]


def high_nibble_first(case: dict) -> None:
    values = mxfp4_parts(case["kv_fused"])[0]
    values.copy_(values >> 4 | values << 4)


def scales_of_the_next_head(case: dict) -> None:
    case["q_sf"].copy_(case["q_sf"].roll(1, -1))


def one_token_more(case: dict) -> None:
    case["seq_lens"][1] += 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mutate", [swap_two_scales, swap_two_groups, high_nibble_first, scales_of_the_next_head, one_token_more]
)
def test_suite_detects_mutations(mutate: Callable, dtype: torch.dtype) -> None:
    """What a broken implementation would return is refused by the comparison that all tests use."""
    case = fp4_case()
    truth = reference.fp4_paged_mqa_logits(**case)
    reference.assert_logits(truth.logits.to(dtype), truth, clean=True)
    mutated = to_device(case, "cpu")
    mutate(mutated)
    wrong = reference.fp4_paged_mqa_logits(**mutated).logits
    with pytest.raises(AssertionError):
        reference.assert_logits(wrong.to(dtype), truth, clean=True)
