"""Valid arguments of every operator of torch.ops.mqa, for the tests that treat all of them alike.

`arguments(op, device)` gives the arguments of the functional overload by schema name, as strided views with
offsets; `buffers(op, args)` the tensors that the `.out` overload writes besides, poisoned.
"""

from __future__ import annotations

from collections.abc import Callable

import inputs
import torch

import torch_mqa_ops as mqa

POISON = -777


def _logits(device: str | torch.device) -> dict:
    case = inputs.paged_case(next_n=2, heads=8, head_dim=32, block_size=16, lengths=(5, 70, 300), device=device, seed=1)
    return case | {"output_dtype": torch.float32, "schedule_meta": None, "clean_logits": True}


def _fp4_logits(device: str | torch.device) -> dict:
    case = inputs.fp4_case(next_n=2, heads=8, head_dim=64, block_size=16, lengths=(5, 70, 300), device=device, seed=8)
    return case | {"sf_vec_size": 32, "output_dtype": torch.bfloat16, "schedule_meta": None, "clean_logits": True}


def _schedule(device: str | torch.device) -> dict:
    lengths = torch.tensor([1000, -1, 300, -1, 0, -1], dtype=torch.int32, device=device)
    return {"seq_lens": lengths[::2], "num_workers": 4}


def _quantize_q(device: str | torch.device) -> dict:
    gen = torch.Generator(device).manual_seed(2)
    q = torch.randn(3, 4, 8, 32, device=device, generator=gen).to(torch.bfloat16)[:, 1:3]
    weights = torch.randn(3, 2, 11, device=device, generator=gen)[..., 2:10]
    return {"q": q, "weights": weights, "pow2_scale": True, "softmax_scale": 0.25}


def _quantize_k(device: str | torch.device) -> dict:
    gen = torch.Generator(device).manual_seed(3)
    k = torch.randn(7, 48, device=device, generator=gen).to(torch.bfloat16)[:, 8:40]
    slots = torch.tensor([3, 17, -1, 0, 63, 64, 40], dtype=torch.int64, device=device)
    kv_fused = inputs.empty_pool(4, 16, 32, device=device)
    return {"k": k, "slot_mapping": slots, "kv_fused": kv_fused, "pow2_scale": True}


def _gather(device: str | torch.device) -> dict:
    case = inputs.paged_case(heads=8, head_dim=32, block_size=16, lengths=(5, 70, 300), device=device, seed=4)
    return {
        "kv_fused": case["kv_fused"],
        "block_tables": case["block_tables"],
        "cu_seq_lens": torch.tensor([9, 0, 5, 75, 375], dtype=torch.int32, device=device)[1:],
        "total_tokens": 380,
    }


def _quantize_q_mxfp4(device: str | torch.device) -> dict:
    gen = torch.Generator(device).manual_seed(5)
    return {"q": torch.randn(3, 4, 8, 64, device=device, generator=gen).to(torch.bfloat16)[:, 1:3]}


def _quantize_k_mxfp4(device: str | torch.device) -> dict:
    gen = torch.Generator(device).manual_seed(6)
    k = torch.randn(7, 80, device=device, generator=gen).to(torch.bfloat16)[:, 8:72]
    slots = torch.tensor([3, 17, -1, 0, 63, 64, 40], dtype=torch.int64, device=device)
    kv_fused = inputs.empty_mxfp4_pool(4, 16, 64, device=device)
    return {"k": k, "slot_mapping": slots, "kv_fused": kv_fused, "is_kv_sf_interleaved": False}


def _gather_mxfp4(device: str | torch.device) -> dict:
    gen = torch.Generator(device).manual_seed(7)
    kv_fused = inputs.empty_mxfp4_pool(24, 16, 64, device=device)
    kv_fused.copy_(torch.randint(0, 256, kv_fused.shape, dtype=torch.uint8, device=device, generator=gen))
    return _gather(device) | {"kv_fused": kv_fused, "is_kv_sf_interleaved": False}


def _topk(device: str | torch.device) -> dict:
    case = inputs.topk_case(rows=6, width=300, lengths=(300, 5, 0, 120, 301, 64), device=device, seed=9)
    return case | {"k": 24} | inputs.slot_table(case, tables=3, block_size=16)


def _logits_buffers(args: dict) -> dict:
    rows, columns = args["weights"].shape[0], mqa.padded_seq_len(args["max_seq_len"])
    device = args["q"].device
    out = torch.full((rows + 2, columns + 7), POISON, dtype=args["output_dtype"], device=device)
    return {"out": out[1:, 3:]}


def _schedule_buffers(args: dict) -> dict:
    device = args["seq_lens"].device
    out = torch.full((args["num_workers"] + 3, 2), POISON, dtype=torch.int32, device=device)
    return {"out": out[1 : args["num_workers"] + 2]}


def _quantize_q_buffers(args: dict) -> dict:
    q = args["q"]
    q_fp8 = inputs.poison_bytes(2 * q.numel(), q.device).view(torch.float8_e4m3fn)
    weights = torch.full((q.numel() // q.shape[-1],), POISON, dtype=torch.float32, device=q.device)
    return {
        "q_fp8": q_fp8.view(q.shape[0], 2 * q.shape[1], *q.shape[2:])[:, : q.shape[1]],
        "weights_f32": weights.view(q.shape[:-1]),
    }


def _gather_buffers(args: dict) -> dict:
    kv_fused, tokens = args["kv_fused"], args["total_tokens"]
    head_dim = kv_fused.shape[3] - 4
    k = inputs.poison_bytes(tokens * head_dim, kv_fused.device).view(torch.float8_e4m3fn)
    scales = torch.full((tokens,), POISON, dtype=torch.float32, device=kv_fused.device)
    return {"k": k.view(tokens, head_dim), "k_scale": scales}


def _quantize_q_mxfp4_buffers(args: dict) -> dict:
    q = args["q"]
    packed = torch.full((q.shape[0], 2 * q.shape[1], q.shape[2], q.shape[3] // 2), 0x88, dtype=torch.uint8)
    scales = torch.full(q.shape[:-1], POISON, dtype=torch.int32, device=q.device)
    return {"q_fp4": packed.to(q.device)[:, : q.shape[1]], "q_sf": scales}


def _gather_mxfp4_buffers(args: dict) -> dict:
    kv_fused, tokens = args["kv_fused"], args["total_tokens"]
    k = torch.full((tokens, kv_fused.shape[3] // 17 * 16), 0x88, dtype=torch.uint8, device=kv_fused.device)
    return {"k": k, "k_sf": torch.full((tokens,), POISON, dtype=torch.int32, device=kv_fused.device)}


def _topk_buffers(args: dict) -> dict:
    rows, k = len(args["logits"]), args["k"]
    return {"out": torch.full((rows + 2, k + 5), POISON, dtype=torch.int32, device=args["logits"].device)[1:-1, 2:-3]}


_ARGUMENTS: dict[str, Callable[[str | torch.device], dict]] = {
    "fp8_paged_mqa_logits": _logits,
    "fp4_paged_mqa_logits": _fp4_logits,
    "paged_mqa_logits_schedule": _schedule,
    "quantize_q_fp8": _quantize_q,
    "quantize_k_cache_fp8": _quantize_k,
    "gather_k_cache_fp8": _gather,
    "quantize_q_mxfp4": _quantize_q_mxfp4,
    "quantize_k_cache_mxfp4": _quantize_k_mxfp4,
    "gather_k_cache_mxfp4": _gather_mxfp4,
    "topk_indices": _topk,
}
_BUFFERS: dict[str, Callable[[dict], dict]] = {
    "fp8_paged_mqa_logits": _logits_buffers,
    "fp4_paged_mqa_logits": _logits_buffers,
    "paged_mqa_logits_schedule": _schedule_buffers,
    "quantize_q_fp8": _quantize_q_buffers,
    "gather_k_cache_fp8": _gather_buffers,
    "quantize_q_mxfp4": _quantize_q_mxfp4_buffers,
    "gather_k_cache_mxfp4": _gather_mxfp4_buffers,
    "topk_indices": _topk_buffers,
}

OPS = tuple(_ARGUMENTS)
OUT_OPS = tuple(_BUFFERS)
OVERLOADS = tuple(f"{op}.default" for op in OPS) + tuple(f"{op}.out" for op in OUT_OPS)


def arguments(op: str, device: str | torch.device = "cpu") -> dict:
    return _ARGUMENTS[op](device)


def buffers(op: str, args: dict) -> dict:
    return _BUFFERS[op](args)


def overload_arguments(overload: str, device: str | torch.device = "cpu") -> dict:
    op, kind = overload.split(".")
    args = arguments(op, device)
    return args | buffers(op, args) if kind == "out" else args


def overload_of(name: str) -> torch._ops.OpOverload:
    op, kind = name.split(".")
    return getattr(getattr(torch.ops.mqa, op), kind)


def bind(op: torch._ops.OpOverload, args: dict) -> tuple[tuple, dict]:
    """Arguments by name as the (args, kwargs) that the schema asks for."""
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    return tuple(args[name] for name in positional), {k: v for k, v in args.items() if k not in positional}


def tensors(args: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of the tensor's storage, those outside the view included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bytes, so that NaN equals itself and -0 differs from 0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def step(
    q: torch.Tensor,
    gates: torch.Tensor,
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_fused: torch.Tensor,
    kv_mxfp4: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_seq_len: int,
    total_tokens: int,
    output_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """One indexer step out of public functions, in both formats: quantise, append, schedule, score, gather, select.

    FP4 logits have that op's own dtype: before torch 2.13 AOTInductor garbles those that are spelt out.
    """
    q_fp8, weights = mqa.quantize_q_fp8(q, gates, softmax_scale=0.25)
    mqa.quantize_k_cache_fp8(k, slot_mapping, kv_fused)
    schedule = mqa.compute_paged_mqa_logits_schedule(seq_lens, next_n=q.shape[1])
    logits = mqa.fp8_paged_mqa_logits(
        q_fp8,
        kv_fused,
        weights.flatten(0, 1),
        block_tables,
        seq_lens,
        max_seq_len,
        output_dtype=output_dtype,
        schedule_meta=schedule,
        clean_logits=True,
    )
    k_back, k_scale = mqa.gather_k_cache_fp8(kv_fused, block_tables, cu_seq_lens, total_tokens)
    q_fp4, q_sf = mqa.quantize_q_mxfp4(q)
    mqa.quantize_k_cache_mxfp4(k, slot_mapping, kv_mxfp4)
    fp4_logits = mqa.fp4_paged_mqa_logits(
        q_fp4,
        q_sf,
        kv_mxfp4,
        gates.flatten(0, 1),
        block_tables,
        seq_lens,
        max_seq_len,
        schedule_meta=schedule,
        clean_logits=True,
    )
    k_fp4, k_sf = mqa.gather_k_cache_mxfp4(kv_mxfp4, block_tables, cu_seq_lens, total_tokens)
    lengths = seq_lens.repeat_interleave(q.shape[1], output_size=logits.shape[0])
    positions = mqa.topk_indices(logits, lengths, 32)
    slots = mqa.topk_indices(fp4_logits, lengths, 32, block_tables=block_tables, block_size=kv_mxfp4.shape[1])
    return logits, schedule, k_back, k_scale, fp4_logits, k_fp4, k_sf, positions, slots


def step_case(batch: int, max_seq_len: int, table_width: int, device: str, seed: int = 0) -> dict:
    # No two sizes, strides or offsets of the first call may be equal by chance: tracing takes them for one.
    lengths = [max_seq_len - 11 - 5 * (b % 3) for b in range(batch)]
    case = inputs.paged_case(
        next_n=4,
        heads=8,
        head_dim=64,
        block_size=16,
        lengths=lengths,
        max_seq_len=max_seq_len,
        table_width=table_width,
        device=device,
        seed=seed,
    )
    gen = torch.Generator(device).manual_seed(seed)
    tokens = 9 + batch
    cu_seq_lens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.full((batch, 7), inputs.INT_MAX, dtype=torch.int32, device=device)[:, 5]
    seq_lens.copy_(case["seq_lens"])
    kv_mxfp4 = inputs.empty_mxfp4_pool(len(case["kv_fused"]) + 3, 16, 64, device=device)
    kv_mxfp4.copy_(torch.randint(0, 255, kv_mxfp4.shape, dtype=torch.uint8, device=device, generator=gen))
    return {
        "q": torch.randn(batch, 4, 8, 64, device=device, generator=gen).bfloat16(),
        "gates": torch.randn(batch, 4, 8, device=device, generator=gen),
        "k": torch.randn(tokens, 64, device=device, generator=gen).bfloat16(),
        "slot_mapping": torch.arange(tokens, device=device) * 7 - 2,
        "kv_fused": case["kv_fused"],
        "kv_mxfp4": kv_mxfp4,
        "block_tables": case["block_tables"],
        "seq_lens": seq_lens,
        "cu_seq_lens": cu_seq_lens.to(device),
        "max_seq_len": max_seq_len,
        "total_tokens": sum(lengths) + 3,
    }
