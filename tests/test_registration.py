"""What the dispatcher, fake tensors, autograd, vmap and import see of every operator."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import expecttest
import inputs
import op_cases
import pytest
import torch
from op_cases import OUT_OPS, OVERLOADS
from torch._subclasses import FakeTensorMode

import torch_mqa_ops as mqa

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(mqa.__file__).resolve().parent

OPCHECK_UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# Overloads with a float8 argument: test_schema multiplies it by a number, which torch has no kernel for.
# The tests of mutation and aliasing below check the same by hand, for every overload.
FLOAT8_ARGUMENTS = (
    "fp8_paged_mqa_logits.default",
    "fp8_paged_mqa_logits.out",
    "quantize_q_fp8.out",
    "gather_k_cache_fp8.out",
)


def registered() -> set[str]:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mqa::"))
    return {name.removeprefix("mqa::") + ("" if "." in name else ".default") for name in names}


# ---- schemas


def test_every_registered_op_is_covered_here():
    assert registered() == set(OVERLOADS)


def test_schema_snapshot():
    texts = sorted(str(op_cases.overload_of(name)._schema) for name in OVERLOADS)
    actual = "\n".join(textwrap.fill(text, 100, subsequent_indent="    ") for text in texts)
    expecttest.assert_expected_inline(
        actual,
        """\
mqa::fp4_paged_mqa_logits(Tensor q, Tensor q_sf, Tensor kv_fused, Tensor weights, Tensor
    block_tables, Tensor seq_lens, SymInt max_seq_len, *, int sf_vec_size=32, ScalarType?
    output_dtype=None, bool is_kv_sf_interleaved=False, Tensor? schedule_meta=None, bool
    clean_logits=False) -> Tensor
mqa::fp4_paged_mqa_logits.out(Tensor q, Tensor q_sf, Tensor kv_fused, Tensor weights, Tensor
    block_tables, Tensor seq_lens, SymInt max_seq_len, *, int sf_vec_size=32, ScalarType?
    output_dtype=None, bool is_kv_sf_interleaved=False, Tensor? schedule_meta=None, bool
    clean_logits=False, Tensor(a!) out) -> ()
mqa::fp8_paged_mqa_logits(Tensor q, Tensor kv_fused, Tensor weights, Tensor block_tables, Tensor
    seq_lens, SymInt max_seq_len, *, ScalarType? output_dtype=None, Tensor? schedule_meta=None, bool
    clean_logits=False) -> Tensor
mqa::fp8_paged_mqa_logits.out(Tensor q, Tensor kv_fused, Tensor weights, Tensor block_tables, Tensor
    seq_lens, SymInt max_seq_len, *, ScalarType? output_dtype=None, Tensor? schedule_meta=None, bool
    clean_logits=False, Tensor(a!) out) -> ()
mqa::gather_k_cache_fp8(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt
    total_tokens) -> (Tensor k, Tensor k_scale)
mqa::gather_k_cache_fp8.out(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt
    total_tokens, *, Tensor(a!) k, Tensor(b!) k_scale) -> ()
mqa::gather_k_cache_mxfp4(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt
    total_tokens, *, bool is_kv_sf_interleaved=False) -> (Tensor k, Tensor k_sf)
mqa::gather_k_cache_mxfp4.out(Tensor kv_fused, Tensor block_tables, Tensor cu_seq_lens, SymInt
    total_tokens, *, bool is_kv_sf_interleaved=False, Tensor(a!) k, Tensor(b!) k_sf) -> ()
mqa::paged_mqa_logits_schedule(Tensor seq_lens, SymInt num_workers) -> Tensor
mqa::paged_mqa_logits_schedule.out(Tensor seq_lens, SymInt num_workers, *, Tensor(a!) out) -> ()
mqa::quantize_k_cache_fp8(Tensor k, Tensor slot_mapping, Tensor(a!) kv_fused, *, bool
    pow2_scale=True) -> ()
mqa::quantize_k_cache_mxfp4(Tensor k, Tensor slot_mapping, Tensor(a!) kv_fused, *, bool
    is_kv_sf_interleaved=False) -> ()
mqa::quantize_q_fp8(Tensor q, Tensor? weights=None, *, bool pow2_scale=True, float?
    softmax_scale=None) -> (Tensor q_fp8, Tensor weights_f32)
mqa::quantize_q_fp8.out(Tensor q, Tensor? weights=None, *, bool pow2_scale=True, float?
    softmax_scale=None, Tensor(a!) q_fp8, Tensor(b!) weights_f32) -> ()
mqa::quantize_q_mxfp4(Tensor q) -> (Tensor q_fp4, Tensor q_sf)
mqa::quantize_q_mxfp4.out(Tensor q, *, Tensor(a!) q_fp4, Tensor(b!) q_sf) -> ()
mqa::topk_indices(Tensor logits, Tensor lengths, int k, *, Tensor? starts=None, Tensor?
    block_tables=None, int? block_size=None) -> Tensor
mqa::topk_indices.out(Tensor logits, Tensor lengths, int k, *, Tensor? starts=None, Tensor?
    block_tables=None, int? block_size=None, Tensor(a!) out) -> ()""",
    )


@pytest.mark.parametrize("name", OVERLOADS)
def test_schema_marks_exactly_what_it_writes(name):
    schema = op_cases.overload_of(name)._schema
    writes = {
        "fp8_paged_mqa_logits.out": ["out"],
        "fp4_paged_mqa_logits.out": ["out"],
        "paged_mqa_logits_schedule.out": ["out"],
        "quantize_q_fp8.out": ["q_fp8", "weights_f32"],
        "quantize_k_cache_fp8.default": ["kv_fused"],
        "gather_k_cache_fp8.out": ["k", "k_scale"],
        "quantize_q_mxfp4.out": ["q_fp4", "q_sf"],
        "quantize_k_cache_mxfp4.default": ["kv_fused"],
        "gather_k_cache_mxfp4.out": ["k", "k_sf"],
        "topk_indices.out": ["out"],
    }.get(name, [])
    marked = [arg for arg in schema.arguments if arg.alias_info is not None]
    assert [arg.name for arg in marked] == writes
    letters = [re.findall(r"Tensor\((\w)!\) " + arg.name + r"\b", str(schema)) for arg in marked]
    assert all(len(found) == 1 for found in letters), str(schema)
    assert len({found[0] for found in letters}) == len(letters), "two arguments share a letter"
    assert all(ret.alias_info is None for ret in schema.returns)
    if writes:
        assert len(schema.returns) == 0
    if name.endswith(".out"):
        assert all(arg.kwarg_only for arg in marked)


@pytest.mark.parametrize("op", OUT_OPS)
def test_out_overload_extends_the_functional_one(op):
    functional, out = (op_cases.overload_of(f"{op}.{kind}")._schema for kind in ("default", "out"))
    extra = len(functional.returns)
    shared = [
        [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in schema.arguments] for schema in (functional, out)
    ]
    assert shared[1][:-extra] == shared[0]
    names = [ret.name for ret in functional.returns]
    assert [a.name for a in out.arguments[-extra:]] == (["out"] if extra == 1 else names)


@pytest.mark.parametrize("name", OVERLOADS)
def test_no_string_argument(name):
    # Strings leak in stable-ABI binaries built with headers older than 2.14 (pytorch#191340).
    schema = op_cases.overload_of(name)._schema
    assert not [arg.name for arg in schema.arguments if "str" in str(arg.type)]


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("fp8_paged_mqa_logits", "max_seq_len"),
        ("fp4_paged_mqa_logits", "max_seq_len"),
        ("paged_mqa_logits_schedule", "num_workers"),
        ("gather_k_cache_fp8", "total_tokens"),
        ("gather_k_cache_mxfp4", "total_tokens"),
    ],
)
def test_sizes_are_symbolic(op, argument):
    schema = op_cases.overload_of(f"{op}.default")._schema
    assert f"SymInt {argument}" in str(schema)


# ---- opcheck, mutation, aliasing


@pytest.mark.parametrize("name", OVERLOADS)
def test_opcheck(name, device):
    utils = [u for u in OPCHECK_UTILS if not (u == "test_schema" and name in FLOAT8_ARGUMENTS)]
    overload = op_cases.overload_of(name)
    args, kwargs = op_cases.bind(overload, op_cases.overload_arguments(name, device))
    torch.library.opcheck(overload, args, kwargs, test_utils=utils)


def call(name: str, args: dict) -> tuple[torch.Tensor, ...]:
    results = op_cases.overload_of(name)(**args)
    if isinstance(results, torch.Tensor):
        return (results,)
    return tuple(results or ())


@pytest.mark.parametrize("name", OVERLOADS)
def test_inputs_unchanged(name, device):
    args = op_cases.overload_arguments(name, device)
    schema = op_cases.overload_of(name)._schema
    read_only = {arg.name for arg in schema.arguments if arg.alias_info is None}
    before = {key: op_cases.storage_bytes(t) for key, t in op_cases.tensors(args).items() if key in read_only}
    assert before
    call(name, args)
    for key, old in before.items():
        assert torch.equal(op_cases.storage_bytes(args[key]), old), key


@pytest.mark.parametrize("op", OUT_OPS)
def test_results_alias_no_input(op, device):
    args = op_cases.arguments(op, device)
    results = call(f"{op}.default", args)
    inputs_at = {t.untyped_storage().data_ptr() for t in op_cases.tensors(args).values()}
    results_at = [t.untyped_storage().data_ptr() for t in results]
    assert not inputs_at & set(results_at)
    assert len(set(results_at)) == len(results)
    again = call(f"{op}.default", args)
    assert not set(results_at) & {t.untyped_storage().data_ptr() for t in again}, "results must be fresh"


@pytest.mark.parametrize("op", OUT_OPS)
def test_out_is_written_as_the_functional_result(op, device):
    args = op_cases.arguments(op, device)
    outs = op_cases.buffers(op, args)
    assert op_cases.overload_of(f"{op}.out")(**args, **outs) is None
    for expected, out in zip(call(f"{op}.default", args), outs.values(), strict=True):
        written = out[tuple(slice(0, size) for size in expected.shape)]
        assert op_cases.same_bits(written, expected)


@pytest.mark.parametrize("op", ["quantize_k_cache_fp8", "quantize_k_cache_mxfp4"])
def test_cache_writer_writes_its_cache(op, device):
    args = op_cases.arguments(op, device)
    before = op_cases.storage_bytes(args["kv_fused"])
    assert op_cases.overload_of(f"{op}.default")(**args) is None
    assert not torch.equal(op_cases.storage_bytes(args["kv_fused"]), before)


# ---- real and fake


def layout(tensor: torch.Tensor, with_device: bool = True) -> tuple:
    described = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset())
    return (*described, tensor.device) if with_device else described


def on_meta(args: dict) -> dict:
    return {
        key: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
        if isinstance(v, torch.Tensor)
        else v
        for key, v in args.items()
    }


def under_fake(function, args: dict) -> tuple[torch.Tensor, ...]:
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        results = function(**fakes)
    return (results,) if isinstance(results, torch.Tensor) else tuple(results or ())


def assert_layouts_agree(function, args: dict, meta: bool = True) -> None:
    results = function(**args)
    real = (results,) if isinstance(results, torch.Tensor) else tuple(results or ())
    fake = under_fake(function, args)
    assert [layout(t) for t in fake] == [layout(t) for t in real]
    if meta:
        results = function(**on_meta(args))
        on = (results,) if isinstance(results, torch.Tensor) else tuple(results or ())
        assert {t.device.type for t in on} <= {"meta"}
        # A meta view of a caller's buffer starts where that buffer does, and on_meta drops offsets.
        assert [layout(t, False)[:3] for t in on] == [layout(t, False)[:3] for t in real]


LOGITS_GRID = list(
    itertools.product((0, 1, 3), (1, 4), (0, 1, 255, 256, 1000, 1024), (False, True), (None, "exact", "larger"))
)  # with every dtype and with a schedule or none in turn


def test_logits_layout_grid(device):
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16])
    schedules = itertools.cycle([None, torch.zeros(5, 2, dtype=torch.int32, device=device)])
    for batch, next_n, max_seq_len, two_d, out in LOGITS_GRID:
        dtype, schedule = next(dtypes), next(schedules)
        case = inputs.paged_case(
            next_n=next_n,
            heads=8,
            head_dim=32,
            block_size=16,
            lengths=[3] * batch,
            lengths_2d=two_d,
            max_seq_len=max_seq_len,
            device=device,
        )
        rows, columns = batch * next_n, mqa.padded_seq_len(max_seq_len)
        if out == "exact":
            case["out"] = torch.empty(rows, columns, dtype=dtype, device=device)
        elif out == "larger":
            case["out"] = torch.empty(rows + 3, columns + 40, dtype=dtype, device=device)[1:, 8:]
        args = case | {"output_dtype": dtype, "schedule_meta": schedule}
        assert_layouts_agree(mqa.fp8_paged_mqa_logits, args)
        result = mqa.fp8_paged_mqa_logits(**case, output_dtype=dtype)
        assert result.shape == (rows, max_seq_len) and result.dtype == dtype
        if out is not None:
            assert result.data_ptr() == case["out"].data_ptr() or result.numel() == 0
            assert result.untyped_storage().data_ptr() == case["out"].untyped_storage().data_ptr()
            assert result.stride(0) == case["out"].stride(0)
        elif result.numel():
            assert result.stride() == (columns, 1) and result.storage_offset() == 0


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("two_d", [False, True])
def test_schedule_layout(batch, two_d, device):
    lengths = torch.ones((batch, 2) if two_d else batch, dtype=torch.int32, device=device)
    # The function asks the device for its worker count, which a meta tensor has not got.
    assert_layouts_agree(mqa.compute_paged_mqa_logits_schedule, {"seq_lens": lengths}, meta=False)
    workers = mqa.compute_paged_mqa_logits_schedule(lengths).shape[0] - 1
    if lengths.is_cuda:
        assert workers == torch.cuda.get_device_properties(lengths.device).multi_processor_count
    else:
        assert workers == 32
    out = torch.empty(workers + 1, 2, dtype=torch.int32, device=device)
    assert_layouts_agree(mqa.compute_paged_mqa_logits_schedule, {"seq_lens": lengths, "out": out}, meta=False)
    assert mqa.compute_paged_mqa_logits_schedule(lengths, out=out).data_ptr() == out.data_ptr()
    args = {"seq_lens": lengths, "num_workers": 7}
    assert_layouts_agree(op_cases.overload_of("paged_mqa_logits_schedule.default"), args)


@pytest.mark.parametrize("leading", [(0,), (1,), (5,), (), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("with_weights", [False, True])
def test_quantize_q_layout(leading, with_weights, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = torch.ones(*leading, 8, 64, dtype=dtype, device=device)
        weights = torch.ones(*leading, 8, dtype=dtype, device=device) if with_weights else None
        assert_layouts_agree(mqa.quantize_q_fp8, {"q": q, "weights": weights})
        if len(leading) == 2:  # results are contiguous whatever q's outer strides are
            swapped = q.transpose(0, 1)
            args = {"q": swapped, "weights": None if weights is None else weights.transpose(0, 1)}
            assert_layouts_agree(mqa.quantize_q_fp8, args)
            q_fp8, weights_f32 = mqa.quantize_q_fp8(**args)
            assert q_fp8.is_contiguous() and weights_f32.is_contiguous()


@pytest.mark.parametrize("leading", [(0,), (1,), (5,), (), (2, 3), (2, 0, 3)])
def test_quantize_q_mxfp4_layout(leading, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = torch.ones(*leading, 8, 64, dtype=dtype, device=device)
        assert_layouts_agree(mqa.quantize_q_mxfp4, {"q": q})
        q_fp4, q_sf = mqa.quantize_q_mxfp4(q)
        assert (q_fp4.shape, q_fp4.dtype) == ((*leading, 8, 32), torch.uint8)
        assert (q_sf.shape, q_sf.dtype) == ((*leading, 8), torch.int32)
        if len(leading) == 2:  # results are contiguous whatever q's outer strides are
            assert_layouts_agree(mqa.quantize_q_mxfp4, {"q": q.transpose(0, 1)})


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_cache_writer_and_gather_layouts(tokens, device):
    kv_fused = inputs.empty_pool(4, 32, 64, device=device)
    k = torch.ones(tokens, 64, device=device)
    slots = torch.arange(tokens, dtype=torch.int64, device=device)
    assert_layouts_agree(mqa.quantize_k_cache_fp8, {"k": k, "slot_mapping": slots, "kv_fused": kv_fused})
    for batch in (0, 1, 3):
        args = {
            "kv_fused": kv_fused,
            "block_tables": torch.zeros(batch, 5, dtype=torch.int32, device=device),
            "cu_seq_lens": torch.zeros(batch + 1, dtype=torch.int32, device=device),
            "total_tokens": tokens,
        }
        assert_layouts_agree(mqa.gather_k_cache_fp8, args)
        k_back, scales = mqa.gather_k_cache_fp8(**args)
        assert (k_back.shape, k_back.dtype) == ((tokens, 64), torch.float8_e4m3fn)
        assert (scales.shape, scales.dtype) == ((tokens,), torch.float32)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_mxfp4_cache_writer_and_gather_layouts(tokens, device):
    kv_fused = inputs.empty_mxfp4_pool(4, 32, 64, device=device)
    k = torch.ones(tokens, 64, device=device)
    slots = torch.arange(tokens, dtype=torch.int64, device=device)
    assert_layouts_agree(mqa.quantize_k_cache_mxfp4, {"k": k, "slot_mapping": slots, "kv_fused": kv_fused})
    for batch in (0, 1, 3):
        args = {
            "kv_fused": kv_fused,
            "block_tables": torch.zeros(batch, 5, dtype=torch.int32, device=device),
            "cu_seq_lens": torch.zeros(batch + 1, dtype=torch.int32, device=device),
            "total_tokens": tokens,
        }
        assert_layouts_agree(mqa.gather_k_cache_mxfp4, args)
        k_back, scales = mqa.gather_k_cache_mxfp4(**args)
        assert (k_back.shape, k_back.dtype) == ((tokens, 32), torch.uint8)
        assert (scales.shape, scales.dtype) == ((tokens,), torch.int32)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_topk_layout(rows, device):
    for width in (0, 1, 300):
        logits = torch.zeros(rows, width, device=device)
        lengths = torch.full((rows,), 300, dtype=torch.int32, device=device)
        for k in (1, 7, 4096):
            assert_layouts_agree(mqa.topk_indices, {"logits": logits, "lengths": lengths, "k": k})
            chosen = mqa.topk_indices(logits, lengths, k)
            assert (chosen.shape, chosen.dtype, chosen.is_contiguous()) == ((rows, k), torch.int32, True)
            out = torch.empty(rows, k + 3, dtype=torch.int32, device=device)[:, :k]
            assert mqa.topk_indices(logits, lengths, k, out=out) is out


@pytest.mark.parametrize("name", OVERLOADS)
def test_every_overload_has_a_fake_that_agrees(name, device):
    args = op_cases.overload_arguments(name, device)
    assert_layouts_agree(op_cases.overload_of(name), args)


def test_fakes_write_nothing():
    # A fake of a mutating overload must be pure bookkeeping: meta tensors have no bytes.
    for name in OVERLOADS:
        args = on_meta(op_cases.overload_arguments(name))
        results = call(name, args)
        assert all(t.is_meta for t in results)


# ---- autograd and vmap

DIFFERENTIABLE = {
    "fp8_paged_mqa_logits": ("q", "weights"),
    "fp4_paged_mqa_logits": ("weights",),
    "quantize_q_fp8": ("q", "weights"),
    "quantize_k_cache_fp8": ("k",),
    "quantize_q_mxfp4": ("q",),
    "quantize_k_cache_mxfp4": ("k",),
    "topk_indices": ("logits",),
}


@pytest.mark.parametrize(("op", "argument"), [(op, a) for op, names in DIFFERENTIABLE.items() for a in names])
def test_requires_grad_is_refused_in_grad_mode_only(op, argument, device):
    args = op_cases.arguments(op, device)
    args[argument] = args[argument].detach().requires_grad_()
    function = getattr(mqa, op)
    with pytest.raises(RuntimeError, match=rf"^{op}: {argument} must not require grad.*, got requires_grad=True$"):
        function(**args)
    with torch.no_grad():
        results = function(**args)
    with torch.inference_mode():
        function(**args)
    results = (results,) if isinstance(results, torch.Tensor) else results or ()
    assert not any(t.requires_grad for t in results)
    function(**args | {argument: args[argument].detach()})


def test_out_that_requires_grad_is_refused_in_grad_mode_only(device):
    args = op_cases.arguments("fp8_paged_mqa_logits", device)
    args["out"] = torch.empty(6, 512, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^fp8_paged_mqa_logits: out must not require grad"):
        mqa.fp8_paged_mqa_logits(**args)
    with torch.no_grad():
        mqa.fp8_paged_mqa_logits(**args)


# The functions that write a caller's tensor, and its name.
WRITERS = {
    "fp8_paged_mqa_logits": "out",
    "fp4_paged_mqa_logits": "out",
    "compute_paged_mqa_logits_schedule": "out",
    "quantize_k_cache_fp8": "kv_fused",
    "quantize_k_cache_mxfp4": "kv_fused",
}


def writer_arguments(function: str, device: str) -> dict:
    op = function.removeprefix("compute_")
    args = op_cases.arguments(op, device)
    if op.endswith("_paged_mqa_logits"):
        args |= op_cases.buffers(op, args)
    elif op == "paged_mqa_logits_schedule":
        args = {"seq_lens": args["seq_lens"], "out": mqa.compute_paged_mqa_logits_schedule(args["seq_lens"])}
    return args


@pytest.mark.parametrize(("function", "written"), WRITERS.items())
def test_writes_bump_the_version(function, written, device):
    args = writer_arguments(function, device)
    before = {name: t._version for name, t in op_cases.tensors(args).items()}
    getattr(mqa, function)(**args)
    after = {name: t._version for name, t in op_cases.tensors(args).items()}
    assert after == before | {written: before[written] + 1}
    with torch.inference_mode():  # such tensors count no versions
        getattr(mqa, function)(**args | {written: args[written].clone()})


@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_sees_an_overwritten_tensor(compiled, device):
    args = op_cases.arguments("fp8_paged_mqa_logits", device)
    out = torch.ones(6, 512, device=device)
    score = mqa.fp8_paged_mqa_logits
    if compiled:
        score = torch.compile(score, fullgraph=True, backend="aot_eager")
    factor = torch.ones(6, 512, device=device, requires_grad=True)
    loss = (factor * out).sum()  # whose gradient is out
    score(**args, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_vmap_loops_correctly_or_refuses(device):
    args = op_cases.arguments("fp8_paged_mqa_logits", device)
    weights = torch.stack([args["weights"], -args["weights"], args["weights"] * 3])

    def score(w: torch.Tensor) -> torch.Tensor:
        return op_cases.overload_of("fp8_paged_mqa_logits.default")(**args | {"weights": w})

    expected = torch.stack([score(w) for w in weights])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a loop is slow
        try:
            result = torch.func.vmap(score)(weights)
        except RuntimeError as error:
            assert re.search("vmap|[Bb]atching", str(error)), error
        else:
            assert op_cases.same_bits(result, expected)


def test_vmap_refuses_the_out_overload(device):
    args = op_cases.overload_arguments("fp8_paged_mqa_logits.out", device)
    weights = torch.stack([args["weights"]] * 2)
    overload = op_cases.overload_of("fp8_paged_mqa_logits.out")
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=r"vmap|[Bb]atching"):
        warnings.simplefilter("ignore")
        torch.func.vmap(lambda w: overload(**args | {"weights": w}))(weights)


# ---- import


def run_python(code: str, root: Path = PACKAGE.parent, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": str(root)} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


HAVE_ALL_OPS = f"""
import torch_mqa_ops, torch
for name in {OVERLOADS!r}:
    op, kind = name.split(".")
    getattr(getattr(torch.ops.mqa, op), kind)
lengths = torch.tensor([1000, 300, 0], dtype=torch.int32)
print(torch.ops.mqa.paged_mqa_logits_schedule(lengths, 4).tolist())
"""
EXPECTED_SCHEDULE = "[[0, 0], [0, 2], [1, 0], [1, 1], [3, 0]]"


def test_import_needs_neither_gpu_nor_numpy_nor_triton():
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('numpy', 'triton'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    check = "assert not {'numpy', 'triton'} & set(sys.modules)\n"
    assert EXPECTED_SCHEDULE in run_python(block + HAVE_ALL_OPS + check, CUDA_VISIBLE_DEVICES="")


def test_import_touches_no_gpu_and_no_compiler():
    code = (
        HAVE_ALL_OPS
        + "import sys\n"
        + (
            "assert not torch.cuda.is_initialized()\n"
            "assert not {'torch._inductor.compile_fx', 'torch.utils.cpp_extension'} & set(sys.modules)\n"
        )
    )
    assert EXPECTED_SCHEDULE in run_python(code, PATH="")


def test_reload_and_second_load_are_harmless():
    code = (
        HAVE_ALL_OPS
        + (
            "import importlib\n"
            "importlib.reload(torch_mqa_ops)\n"
            "for path in list(torch.ops.loaded_libraries):\n"
            "    if 'torch_mqa_ops' in path: torch.ops.load_library(path)\n"
        )
        + HAVE_ALL_OPS
    )
    assert run_python(code).count(EXPECTED_SCHEDULE) == 2


def second_copy(root: Path) -> Path:
    copied = root / "torch_mqa_ops"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    fakes = Path(sys.modules["torch_mqa_ops.meta"].__file__).parent
    shutil.copytree(fakes, copied / "meta", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return root


def test_import_from_a_second_install_path(tmp_path):
    out = run_python(HAVE_ALL_OPS + "print(torch_mqa_ops.__file__)\n", root=second_copy(tmp_path))
    assert EXPECTED_SCHEDULE in out and str(tmp_path) in out


def test_two_copies_in_one_process_are_an_import_error(tmp_path):
    """Not an abort: torch ends the process when one namespace is defined twice."""
    code = "import torch_mqa_ops, sys\n" + (
        "for name in [n for n in sys.modules if n.startswith('torch_mqa_ops')]: del sys.modules[name]\n"
        f"sys.path.insert(0, {str(second_copy(tmp_path))!r})\n"
        "try: import torch_mqa_ops\n"
        "except ImportError as error: print(error)\n"
    )
    assert "another copy of torch_mqa_ops" in run_python(code)


# ---- layout of the sources

CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
needs_sources = pytest.mark.skipif(not CSRC.is_dir(), reason="no source tree beside the tests")


def sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in CSRC.rglob(pattern))


def includes(path: Path) -> set[str]:
    """Everything `path` includes, through our own headers as well."""
    found, todo = set(), [path]
    while todo:
        current = todo.pop()
        for name in INCLUDE.findall(current.read_text()):
            if name in found:
                continue
            found.add(name)
            for candidate in (CSRC / name, current.parent / name):
                if candidate.is_file():
                    todo.append(candidate)
                    break
    return found


@needs_sources
def test_only_stable_h_includes_torch():
    direct = {
        path.relative_to(CSRC).as_posix()
        for path in sources("*.h", "*.cpp", "*.cu", "*.cuh")
        if any(re.match("torch/|ATen/|c10/", name) for name in INCLUDE.findall(path.read_text()))
    }
    assert direct == {"common/stable.h"}


@needs_sources
def test_kernels_never_see_torch():
    kernels = sources("*.cuh", "*_config.h", "params.h")
    assert kernels
    for path in kernels:
        seen = [name for name in includes(path) if name.startswith(("torch/", "ATen/", "c10/"))]
        assert not seen, f"{path.relative_to(ROOT)} sees {seen}"


@needs_sources
def test_host_files_contain_no_device_code():
    hosts = sources("host.cpp", "host.h", "check.cpp", "check.h")
    assert hosts
    for path in hosts:
        text = path.read_text()
        assert not re.search(r"\basm\b|<<<|__global__|__device__", text), path
        assert not [name for name in includes(path) if name.endswith(".cuh")], path


@needs_sources
def test_schemas_stand_in_one_file():
    holders = [path.name for path in sources("*.cpp", "*.cu", "*.h") if "m.def(" in path.read_text()]
    assert holders == ["schema.cpp"]


def test_meta_imports_no_public_module():
    folder = Path(sys.modules["torch_mqa_ops.meta"].__file__).parent
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                bad = [a.name for a in node.names if a.name.split(".")[0] == "torch_mqa_ops"]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                own = module.startswith("torch_mqa_ops.meta")
                bad = [module] if node.level > 1 or (module.startswith("torch_mqa_ops") and not own) else []
            else:
                continue
            assert not bad, f"{path.name} imports {bad}"
