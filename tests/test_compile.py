"""torch.compile: one graph for all sizes, the same bits as eager, mutations kept, no copies of the cache."""

from __future__ import annotations

from collections.abc import Callable

import inputs
import op_cases
import pytest
import torch
from op_cases import same_bits, step, step_case
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_mqa_ops as mqa

STEPS = [(batch, *width) for batch in (2, 3, 5, 17) for width in ((300, 23), (700, 51))]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def assert_step_equal(function: Callable, case: dict) -> None:
    eager_case = inputs.to_device(case, case["q"].device)
    compiled, eager = function(**case), step(**eager_case)
    assert all(same_bits(a, b) for a, b in zip(compiled, eager, strict=True))
    assert [t.stride() for t in compiled] == [t.stride() for t in eager]
    for pool in ("kv_fused", "kv_mxfp4"):  # gaps included
        assert torch.equal(*(op_cases.storage_bytes(c[pool]) for c in (case, eager_case)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_all_sizes(backend, device):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, max_seq_len, table_width) in enumerate(STEPS):
        assert_step_equal(compiled, step_case(batch, max_seq_len, table_width, device, seed))
    assert counter.frame_count == 1


def test_batch_marked_dynamic_is_not_specialised(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 17):
        case = step_case(batch, 300, 23, device)
        case["total_tokens"] = 900
        for tensor in op_cases.tensors(case).values():
            torch._dynamo.mark_dynamic(tensor, 0)  # raises at trace time if something fixes the size
        assert_step_equal(compiled, case)
    assert counter.frame_count == 1


def test_unbacked_batch(device):
    """Sizes known only at run time: no fake may branch on them."""
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (5, 3):
        case = step_case(batch, 300, 23, device)
        for tensor in op_cases.tensors(case).values():
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        assert_step_equal(compiled, case)


@pytest.mark.parametrize("unbacked", [False, True])
def test_helpers_trace(unbacked):
    def sizes(tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[0]
        columns = mqa.padded_seq_len(length) + mqa.min_block_table_width(length, 64)
        return tokens.new_zeros(columns + mqa.index_cache_block_bytes("fp8", 64, 128))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sizes, fullgraph=True, dynamic=True, backend=counter)
    for length in (2, 255, 256, 8000):
        tokens = torch.zeros(length)
        if unbacked:
            torch._dynamo.decorators.mark_unbacked(tokens, 0)
        assert compiled(tokens).shape == sizes(tokens).shape
    assert counter.frame_count == 1


def symbolic(t: torch.Tensor, mode: torch._subclasses.FakeTensorMode, name: str) -> torch.Tensor:
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (t.dim() - 1))
    return mode.from_tensor(t, symbolic_context=context, source=torch._dynamo.source.ConstantSource(name))


def test_fakes_keep_sizes_symbolic():
    """Straight through the fakes, without Dynamo: the batch stays a symbol and no guard pins it."""
    env = ShapeEnv()
    case = inputs.paged_case(next_n=2, heads=8, head_dim=32, block_size=16, lengths=(5, 70, 300, 9, 1))
    with torch._subclasses.FakeTensorMode(shape_env=env) as mode:
        fakes = {k: symbolic(v, mode, k) if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        logits = mqa.fp8_paged_mqa_logits(**fakes)
        assert isinstance(logits.shape[0], torch.SymInt)
        assert logits.shape[1] == case["max_seq_len"]
        schedule = mqa.compute_paged_mqa_logits_schedule(fakes["seq_lens"])
        assert schedule.shape == (33, 2)
    assert not env.replacements.get(logits.shape[0].node.expr, logits.shape[0].node.expr).is_number


@pytest.mark.parametrize("value", ["cpu", torch.device("cpu", 0)])
def test_device_of_the_schedule_traces(value):
    lengths = torch.tensor([1000, 300], dtype=torch.int32)
    compiled = torch.compile(mqa.compute_paged_mqa_logits_schedule, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(lengths, value), mqa.compute_paged_mqa_logits_schedule(lengths))


# ---- mutation


def compile_and_compare(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    expected = function(*args)
    result = torch.compile(function, fullgraph=True)(*args)
    assert same_bits(result, expected)


def test_out_made_in_the_graph_is_read_after_the_write(device):
    case = op_cases.arguments("fp8_paged_mqa_logits", device)

    def doubled(q: torch.Tensor) -> torch.Tensor:
        out = torch.full((6, mqa.padded_seq_len(case["max_seq_len"])), 1.0, device=device)
        before = out[:, : case["max_seq_len"]] + 0
        mqa.fp8_paged_mqa_logits(**case | {"q": q, "out": out})
        # Doubling is exact: a product would meet the subtraction in one rounding once a compiler fuses them.
        return (out + out)[:, : case["max_seq_len"]] - before

    compile_and_compare(doubled, case["q"])


def test_schedule_written_into_a_buffer_feeds_the_logits(device):
    case = op_cases.arguments("fp8_paged_mqa_logits", device)
    workers = mqa.compute_paged_mqa_logits_schedule(case["seq_lens"]).shape[0]

    def score(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.zeros(workers, 2, dtype=torch.int32, device=device)
        mqa.compute_paged_mqa_logits_schedule(lengths, out=buffer)
        logits = mqa.fp8_paged_mqa_logits(**case | {"seq_lens": lengths, "schedule_meta": buffer})
        return logits, buffer

    logits, buffer = torch.compile(score, fullgraph=True)(case["seq_lens"])
    assert torch.equal(buffer, mqa.compute_paged_mqa_logits_schedule(case["seq_lens"]))
    assert same_bits(logits, mqa.fp8_paged_mqa_logits(**case))


def test_out_given_by_the_caller(device):
    """Larger than need be. Dynamo takes contiguous tensors only for an argument named out."""
    case = op_cases.arguments("fp8_paged_mqa_logits", device)
    out = torch.full((9, 600), float(op_cases.POISON), device=device)

    @torch.compile(fullgraph=True)
    def score(buffer: torch.Tensor) -> torch.Tensor:
        return mqa.fp8_paged_mqa_logits(**case, out=buffer) + 0

    expected = mqa.fp8_paged_mqa_logits(**case)
    assert same_bits(score(out), expected)
    assert same_bits(out[:6, : case["max_seq_len"]], expected)
    assert (out[6:] == op_cases.POISON).all() and (out[:, 512:] == op_cases.POISON).all()


def test_an_input_cloned_from_out(device):
    """pytorch#198031: a compiler that drops the clone hands the op one storage twice: right, or refused."""
    case = op_cases.arguments("fp8_paged_mqa_logits", device)
    buffer = torch.randn(6, 512, device=device)

    def score(out: torch.Tensor) -> torch.Tensor:
        weights = out[:, :8].clone()
        mqa.fp8_paged_mqa_logits(**case | {"weights": weights, "out": out})
        return out[:, : case["max_seq_len"]] + 0

    expected = score(buffer.clone())
    try:
        result = torch.compile(score, fullgraph=True)(buffer.clone())
    except RuntimeError as error:
        assert "out must not overlap weights" in str(error)
    else:
        assert same_bits(result, expected)


def post_grad_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """Filled with every graph as Inductor has it after functionalisation is undone."""
    from torch._inductor import compile_fx

    graphs: list[torch.fx.Graph] = []
    original = compile_fx._recursive_post_grad_passes

    def keep(gm: torch.fx.GraphModule, *args, **kwargs) -> None:
        original(gm, *args, **kwargs)
        graphs.append(gm.graph)

    monkeypatch.setattr(compile_fx, "_recursive_post_grad_passes", keep)
    return graphs


def test_view_of_the_cache_is_written_without_a_copy(device, monkeypatch):
    graphs = post_grad_graphs(monkeypatch)
    args = op_cases.arguments("quantize_k_cache_fp8", device)
    layers, blocks = 3, args["kv_fused"].shape[0]
    cache = torch.zeros(layers, blocks, 16, 1, 36, dtype=torch.uint8, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device).view(1, blocks)
    cu_seq_lens = torch.tensor([0, 64], dtype=torch.int32, device=device)

    def append(pool: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in range(layers):
            mqa.quantize_k_cache_fp8(k + layer, args["slot_mapping"], pool[layer])
        return mqa.gather_k_cache_fp8(pool[1], table, cu_seq_lens, 64)

    expected_cache = cache.clone()
    expected = append(expected_cache, args["k"])
    with torch._inductor.utils.fresh_inductor_cache():
        result = torch.compile(append, fullgraph=True)(cache, args["k"])
    assert torch.equal(cache, expected_cache)
    assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))

    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    writer = op_cases.overload_of("quantize_k_cache_fp8.default")
    assert sum(node.target is writer for node in nodes) == layers, "the writers are called directly"
    copies = (torch.ops.aten.clone.default, torch.ops.aten.copy.default, torch.ops.aten.copy_.default)
    for node in nodes:
        if node.target in copies and not (len(node.args) > 1 and node.args[0] is node.args[1]):
            # (Inductor drops copies of a tensor to itself.)
            assert node.meta["val"].numel() < blocks * 16 * 36, node.format_node()


def test_strides_reach_the_op(device, monkeypatch):
    """Inductor must hand slices over as they are: no hidden copy, the strides that the caller wrote."""
    case = op_cases.arguments("fp8_paged_mqa_logits", device)
    pool = torch.zeros(2 * case["kv_fused"].shape[0], 16, 1, 36, dtype=torch.uint8, device=device)
    pool[::2] = case["kv_fused"]
    table = torch.zeros(6, case["block_tables"].shape[1] + 9, dtype=torch.int32, device=device)
    table[::2, 4:-5] = case["block_tables"]
    lengths = torch.zeros(3, 2, dtype=torch.int32, device=device)
    lengths[:, 1] = case["seq_lens"]

    def score(pool: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        views = {"kv_fused": pool[::2], "block_tables": table[::2, 4:-5], "seq_lens": lengths[:, 1]}
        return mqa.fp8_paged_mqa_logits(**case | views)

    compiled = torch.compile(score, fullgraph=True)
    expected = mqa.fp8_paged_mqa_logits(**case)
    assert same_bits(compiled(pool, table, lengths), expected)

    packet, seen = torch.ops.mqa.fp8_paged_mqa_logits, []

    def spy(*args, **kwargs):
        seen.append([a.stride() for a in args if isinstance(a, torch.Tensor)])
        return original(*args, **kwargs)

    original = packet.default
    monkeypatch.setattr(packet, "default", spy)  # generated code looks the overload up at every call
    assert same_bits(compiled(pool, table, lengths), expected)
    views = (case["q"], pool[::2], case["weights"], table[::2, 4:-5], lengths[:, 1])
    assert seen == [[t.stride() for t in views]]


# ---- CUDA graphs made by Inductor


@pytest.mark.cuda
def test_reduce_overhead_is_captured(monkeypatch):
    from torch._inductor import cudagraph_trees

    case = op_cases.arguments("fp8_paged_mqa_logits", "cuda")
    # Captured graphs copy moving inputs to fixed addresses; contiguous ones keep this test about our op.
    moving = {name: case.pop(name).contiguous() for name in ("q", "weights", "block_tables", "seq_lens")}
    moving["gates"] = torch.rand(3, 2, 8, device="cuda")

    def score(q, weights, block_tables, seq_lens, gates):
        q_fp8, q_weights = mqa.quantize_q_fp8(q.float(), gates)
        schedule = mqa.compute_paged_mqa_logits_schedule(seq_lens)
        return mqa.fp8_paged_mqa_logits(
            q=q_fp8,
            weights=weights * q_weights.flatten(0, 1),
            block_tables=block_tables,
            seq_lens=seq_lens,
            **case | {"schedule_meta": schedule},
        )

    packet, capturing = torch.ops.mqa.fp8_paged_mqa_logits, []
    original = packet.default

    def spy(*args, **kwargs):
        capturing.append(torch.cuda.is_current_stream_capturing())
        return original(*args, **kwargs)

    compiled = torch.compile(score, fullgraph=True, mode="reduce-overhead")
    compiled(**moving)
    monkeypatch.setattr(packet, "default", spy)  # generated code looks the overload up at every call
    for lengths in ((5, 70, 300), (300, 5, 70), (0, 1, 16), (17, 300, 300), (329, 0, 33)):
        moving["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        moving["weights"] = torch.randn_like(moving["weights"])
        moving["block_tables"] = moving["block_tables"].roll(1, 0).clone()
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(**moving).clone()
        assert same_bits(result, score(**moving))
    # At most one warm-up outside capture, and the capture itself; replays never come back to Python.
    assert capturing.count(True) == 1 and len(capturing) <= 2, capturing
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and sum(len(roots) for roots in manager.roots.values()) == 1
