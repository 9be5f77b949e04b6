"""Bad arguments: refused before anything is written, in the same words on CPU, CUDA, fake and meta."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import op_cases
import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_mqa_ops as mqa

# ---- one call, four ways


def outcome(overload: str, args: dict) -> str | None:
    """The text of the refusal, None if the call is accepted. Any other exception is a failure of the test."""
    try:
        op_cases.overload_of(overload)(**args)
    except RuntimeError as error:
        return str(error)
    return None


def fake_outcome(overload: str, args: dict) -> str | None:
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        return outcome(overload, fakes)


def meta_outcome(overload: str, args: dict) -> str | None:
    return outcome(
        overload,
        {
            k: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
            if isinstance(v, torch.Tensor)
            else v
            for k, v in args.items()
        },
    )


# ---- the table

Change = Callable[[dict], dict]


@dataclass(frozen=True)
class Bad:
    """A valid call of `overload`, changed in one way that breaks one rule about `argument`."""

    overload: str
    argument: str
    got: str  # what the message must quote after "got"
    change: Change
    rule: str = ""  # and before it
    by_address: bool = False  # fakes have no addresses, so only real tensors can be refused
    mixes_devices: bool = False

    @property
    def op(self) -> str:
        return self.overload.split(".")[0]


def replace(**values) -> Change:
    return lambda args: values


def edit(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda args: {name: function(args[name])}


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: torch.zeros(t.shape, dtype=dtype, device=t.device)


def like(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: torch.zeros(shape, dtype=t.dtype, device=t.device)


def gaps_inside(t: torch.Tensor) -> torch.Tensor:
    """The same shape with every other element of a row."""
    return like(*t.shape[:-1], 2 * t.shape[-1])(t)[..., ::2]


def swapped(t: torch.Tensor) -> torch.Tensor:
    """The same shape with the last two dimensions' strides exchanged."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def schedule(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda args: {"schedule_meta": make(args["seq_lens"])}


def pool(blocks: int, block_size: int, head_dim: int, *, gap: int = 48, shift: int = 0) -> Change:
    return pool_of(blocks, block_size, head_dim + 4, gap=gap, shift=shift)


def pool_of(blocks: int, block_size: int, row: int, *, gap: int = 48, shift: int = 0) -> Change:
    """A pool whose tokens take `row` bytes."""

    def change(args: dict) -> dict:
        block_bytes = block_size * row
        device = args["kv_fused"].device
        storage = torch.zeros(32 + shift + blocks * (block_bytes + gap), dtype=torch.uint8, device=device)
        return {
            "kv_fused": storage.as_strided((blocks, block_size, 1, row), (block_bytes + gap, row, row, 1), 16 + shift)
        }

    return change


def elsewhere(name: str) -> Change:
    def change(args: dict) -> dict:
        old = args[name] if args[name] is not None else like(5, 2)(args["seq_lens"])
        return {name: old.to("cpu" if old.is_cuda else "meta")}

    return change


def share(written: str, name: str) -> Change:
    """Both arguments, with the shapes they have, become views that begin at the same byte."""

    def change(args: dict) -> dict:
        views, buffer = {}, torch.zeros(1 << 17, dtype=torch.uint8, device=args[written].device)
        for key in (written, name):
            old = args[key] if args[key] is not None else like(5, 2)(args["seq_lens"])
            views[key] = buffer[: old.numel() * old.element_size()].view(old.dtype).view(old.shape)
        return views

    return change


def logits_table() -> list[Bad]:
    d, o = "fp8_paged_mqa_logits.default", "fp8_paged_mqa_logits.out"

    # The valid call: B 3, n 2, H 8, D 32, S 16, 24 pages, max_seq_len 329, float32.
    def q_of(*shape: int) -> Change:
        return edit("q", like(*shape))

    cases = [
        Bad(d, "q", "[6, 8, 32]", q_of(6, 8, 32)),
        Bad(d, "q", "[]", q_of()),
        Bad(d, "q", "[1, 3, 2, 8, 32]", q_of(1, 3, 2, 8, 32)),
        *(
            Bad(d, "q", str(dtype).removeprefix("torch."), edit("q", to(dtype)))
            for dtype in (torch.float8_e5m2, torch.uint8, torch.bfloat16, torch.float32)
        ),
        *(Bad(d, "q", str(n), q_of(3, n, 8, 32)) for n in (0, 17)),
        *(Bad(d, "q", str(heads), q_of(3, 2, heads, 32)) for heads in (0, 1, 4, 12, 48, 96, 256)),
        *(Bad(d, "q", str(dim), q_of(3, 2, 8, dim)) for dim in (0, 16, 96, 100, 256)),
        Bad(d, "q", r"[512, 256, 1, 8]", edit("q", swapped)),
        Bad(d, "q", r"64, 2]", edit("q", gaps_inside)),
        Bad(d, "kv_fused", "[24, 576]", edit("kv_fused", like(24, 576))),
        Bad(d, "kv_fused", "int8", edit("kv_fused", to(torch.int8))),
        Bad(d, "kv_fused", "float8_e4m3fn", edit("kv_fused", to(torch.float8_e4m3fn))),
        *(Bad(d, "kv_fused", str(size), pool(24, size, 32, gap=-size * 36 % 16)) for size in (0, 1, 2, 8, 48, 512)),
        Bad(d, "kv_fused", "[24, 16, 2, 36]", edit("kv_fused", like(24, 16, 2, 36))),
        Bad(d, "kv_fused", "[24, 16, 1, 32]", edit("kv_fused", like(24, 16, 1, 32))),
        Bad(d, "kv_fused", "[24, 16, 1, 68]", edit("kv_fused", like(24, 16, 1, 68))),
        Bad(d, "kv_fused", "2]", edit("kv_fused", gaps_inside)),
        Bad(d, "kv_fused", "[1152, 72, 36, 1]", edit("kv_fused", lambda t: like(24, 32, 1, 36)(t)[:, ::2])),
        *(Bad(d, "kv_fused", str(16 * 36 + gap), pool(24, 16, 32, gap=gap)) for gap in (1, 4, 8)),
        *(Bad(d, "kv_fused", f"{shift}", pool(24, 16, 32, shift=shift), by_address=True) for shift in (1, 4, 8)),
        Bad(d, "weights", "[48]", edit("weights", like(48))),
        Bad(d, "weights", "[3, 2, 8]", edit("weights", like(3, 2, 8))),
        Bad(d, "weights", "[5, 8]", edit("weights", like(5, 8))),
        Bad(d, "weights", "[3, 8]", edit("weights", like(3, 8))),
        Bad(d, "weights", "[6, 7]", edit("weights", like(6, 7))),
        Bad(d, "weights", "float64", edit("weights", to(torch.float64))),
        Bad(d, "weights", "int32", edit("weights", to(torch.int32))),
        Bad(d, "weights", "2]", edit("weights", gaps_inside)),
        # Lengths and table exchanged, the order of an older interface.
        Bad(d, "block_tables", "[3]", lambda a: {"block_tables": a["seq_lens"], "seq_lens": a["block_tables"]}),
        Bad(d, "block_tables", "[3, 5, 1]", edit("block_tables", like(3, 5, 1))),
        Bad(d, "block_tables", "[2, 5]", edit("block_tables", like(2, 5))),
        Bad(d, "block_tables", "[6, 5]", edit("block_tables", like(6, 5))),
        Bad(d, "block_tables", "int64", edit("block_tables", to(torch.int64))),
        Bad(d, "block_tables", "uint32", edit("block_tables", to(torch.uint32))),
        Bad(d, "block_tables", "2]", edit("block_tables", gaps_inside)),
        Bad(d, "seq_lens", "[]", edit("seq_lens", like())),
        Bad(d, "seq_lens", "[2]", edit("seq_lens", like(2))),
        Bad(d, "seq_lens", "[6]", edit("seq_lens", like(6))),
        Bad(d, "seq_lens", "[3, 1]", edit("seq_lens", like(3, 1))),
        Bad(d, "seq_lens", "[2, 3]", edit("seq_lens", like(2, 3))),
        Bad(d, "seq_lens", "[3, 2, 1]", edit("seq_lens", like(3, 2, 1))),
        Bad(d, "seq_lens", "int64", edit("seq_lens", to(torch.int64))),
        Bad(d, "max_seq_len", "-1", replace(max_seq_len=-1)),
        Bad(d, "max_seq_len", str(-(2**40)), replace(max_seq_len=-(2**40))),
        *(
            Bad(d, "output_dtype", str(dtype).removeprefix("torch."), replace(output_dtype=dtype))
            for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn)
        ),
    ]
    cases += [
        Bad(d, "schedule_meta", "[10]", schedule(like(10))),
        Bad(d, "schedule_meta", "[1, 2]", schedule(like(1, 2))),
        Bad(d, "schedule_meta", "[0, 2]", schedule(like(0, 2))),
        Bad(d, "schedule_meta", "[5, 3]", schedule(like(5, 3))),
        Bad(d, "schedule_meta", "int64", schedule(lambda t: like(5, 2)(t).long())),
        Bad(d, "schedule_meta", "[4, 1]", schedule(lambda t: like(5, 4)(t)[:, :2])),
        Bad(d, "schedule_meta", "[1, 5]", schedule(lambda t: like(2, 5)(t).t())),
    ]

    def out(make: Callable[[torch.device], torch.Tensor]) -> Change:
        return lambda args: {"out": make(args["q"].device)}

    def floats(*shape: int) -> Callable[[torch.device], torch.Tensor]:
        return lambda dev: torch.full(shape, -777.0, device=dev)

    cases += [
        Bad(o, "out", "bfloat16", out(lambda dev: torch.zeros(6, 512, dtype=torch.bfloat16, device=dev))),
        Bad(o, "out", "float32", replace(output_dtype=torch.bfloat16)),
        Bad(o, "out", "[5, 512]", out(floats(5, 512))),
        Bad(o, "out", "[6, 511]", out(floats(6, 511))),
        Bad(o, "out", "[6, 329]", out(floats(6, 329))),
        Bad(o, "out", "[3072]", out(floats(3072))),
        Bad(o, "out", "[3, 2, 512]", out(floats(3, 2, 512))),
        Bad(o, "out", "[1024, 2]", out(lambda dev: floats(6, 1024)(dev)[:, ::2])),
        Bad(o, "out", "[1, 6]", out(lambda dev: floats(512, 6)(dev).t())),
        Bad(o, "out", "[0, 1]", out(lambda dev: floats(1, 512)(dev).expand(6, 512))),
        Bad(o, "out", "[256, 1]", out(lambda dev: floats(8, 512)(dev).as_strided((6, 512), (256, 1)))),
        Bad(o, "out", "[511, 1]", out(lambda dev: floats(8, 512)(dev).as_strided((6, 512), (511, 1)))),
    ]

    cases += [
        Bad(o, "out", "shared", share("out", name), f"not overlap {name}", by_address=True)
        for name in ("q", "kv_fused", "weights", "block_tables", "seq_lens", "schedule_meta")
    ]
    cases += [
        Bad(d, name, "", elsewhere(name), mixes_devices=True)
        for name in ("kv_fused", "weights", "block_tables", "seq_lens", "schedule_meta")
    ]
    cases += [Bad(o, "out", "", elsewhere("out"), mixes_devices=True)]
    return cases


def fp4_logits_table() -> list[Bad]:
    """What differs from FP8, and each tensor once: the rest of the rules is the same code."""
    d, o = "fp4_paged_mqa_logits.default", "fp4_paged_mqa_logits.out"
    # The valid call: B 3, n 2, H 8, D 64, S 16, max_seq_len 329, bfloat16.

    def q_of(*shape: int) -> Change:
        return edit("q", like(*shape))

    return [
        Bad(d, "q", "[6, 8, 32]", q_of(6, 8, 32), "[B, n, H, D/2]"),
        *(
            Bad(d, "q", str(dtype).removeprefix("torch."), edit("q", to(dtype)), "uint8 or float4_e2m1fn_x2")
            for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16)
        ),
        *(Bad(d, "q", str(n), q_of(3, n, 8, 32)) for n in (0, 17)),
        *(Bad(d, "q", str(heads), q_of(3, 2, heads, 32)) for heads in (0, 4, 48, 256)),
        *(Bad(d, "q", str(half), q_of(3, 2, 8, half), "D/2 of 32 or 64") for half in (0, 16, 48, 128)),
        Bad(d, "q", "[512, 256, 1, 8]", edit("q", swapped)),
        Bad(d, "q", "64, 2]", edit("q", gaps_inside)),
        Bad(d, "q_sf", "[3, 2, 7]", edit("q_sf", like(3, 2, 7))),
        Bad(d, "q_sf", "[6, 8]", edit("q_sf", like(6, 8))),
        Bad(d, "q_sf", "uint8", edit("q_sf", to(torch.uint8))),
        Bad(d, "q_sf", "2]", edit("q_sf", gaps_inside)),
        Bad(d, "q_sf", "", elsewhere("q_sf"), mixes_devices=True),
        Bad(d, "sf_vec_size", "16", replace(sf_vec_size=16), "of 32"),
        Bad(d, "kv_fused", "[24, 544]", edit("kv_fused", like(24, 544)), "[blocks, S, 1, D/2 + D/32]"),
        Bad(d, "kv_fused", "int8", edit("kv_fused", to(torch.int8))),
        *(Bad(d, "kv_fused", str(size), pool_of(24, size, 34, gap=-size * 34 % 16)) for size in (0, 8, 48, 512)),
        Bad(d, "kv_fused", "[24, 16, 1, 68]", edit("kv_fused", like(24, 16, 1, 68))),
        Bad(d, "kv_fused", "548", pool_of(24, 16, 34, gap=4)),
        Bad(d, "kv_fused", "4", pool_of(24, 16, 34, shift=4), by_address=True),
        Bad(d, "kv_fused", "", elsewhere("kv_fused"), mixes_devices=True),
        Bad(d, "is_kv_sf_interleaved", "True with S = 16", replace(is_kv_sf_interleaved=True)),
        Bad(d, "weights", "[5, 8]", edit("weights", like(5, 8))),
        Bad(d, "weights", "", elsewhere("weights"), mixes_devices=True),
        Bad(d, "block_tables", "[2, 5]", edit("block_tables", like(2, 5))),
        Bad(d, "block_tables", "", elsewhere("block_tables"), mixes_devices=True),
        Bad(d, "seq_lens", "[2]", edit("seq_lens", like(2))),
        Bad(d, "seq_lens", "", elsewhere("seq_lens"), mixes_devices=True),
        Bad(d, "max_seq_len", "-1", replace(max_seq_len=-1)),
        Bad(d, "output_dtype", "float64", replace(output_dtype=torch.float64)),
        Bad(d, "schedule_meta", "[1, 2]", schedule(like(1, 2))),
        Bad(d, "schedule_meta", "", elsewhere("schedule_meta"), mixes_devices=True),
        Bad(o, "out", "float32", edit("out", to(torch.float32))),
        Bad(o, "out", "bfloat16", replace(output_dtype=torch.float32)),
        Bad(o, "out", "[5, 512]", edit("out", like(5, 512))),
        Bad(o, "out", "", elsewhere("out"), mixes_devices=True),
        *(
            Bad(o, "out", "shared", share("out", name), f"not overlap {name}", by_address=True)
            for name in ("q", "q_sf", "kv_fused", "weights", "block_tables", "seq_lens", "schedule_meta")
        ),
    ]


def schedule_table() -> list[Bad]:
    d, o = "paged_mqa_logits_schedule.default", "paged_mqa_logits_schedule.out"

    def ints(*shape: int) -> Change:
        return lambda a: {"out": torch.full(shape, -777, dtype=torch.int32, device=a["seq_lens"].device)}

    return [
        Bad(d, "seq_lens", "[]", edit("seq_lens", like())),
        Bad(d, "seq_lens", "[3, 2, 1]", edit("seq_lens", like(3, 2, 1))),
        Bad(d, "seq_lens", "int64", edit("seq_lens", to(torch.int64))),
        Bad(d, "seq_lens", "float32", edit("seq_lens", to(torch.float32))),
        Bad(d, "num_workers", "0", replace(num_workers=0)),
        Bad(d, "num_workers", "-3", replace(num_workers=-3)),
        Bad(o, "out", "[4, 2]", ints(4, 2)),
        Bad(o, "out", "[6, 2]", ints(6, 2)),
        Bad(o, "out", "[5, 3]", ints(5, 3)),
        Bad(o, "out", "[10]", ints(10)),
        Bad(o, "out", "int64", edit("out", to(torch.int64))),
        Bad(o, "out", "[1, 5]", edit("out", swapped)),
        Bad(o, "out", "2]", edit("out", gaps_inside)),
        Bad(o, "out", "[0, 1]", edit("out", lambda t: like(1, 2)(t).expand(5, 2))),
        Bad(
            o, "out", "shared", lambda a: {"seq_lens": a["out"].flatten()[3:6]}, "not overlap seq_lens", by_address=True
        ),
        Bad(o, "out", "", elsewhere("out"), mixes_devices=True),
    ]


def quantize_q_table() -> list[Bad]:
    d, o = "quantize_q_fp8.default", "quantize_q_fp8.out"
    # The valid call: q bfloat16 [3, 2, 8, 32], weights float32 [3, 2, 8].
    return [
        Bad(d, "q", "[32]", edit("q", like(32))),
        Bad(d, "q", "[]", edit("q", like())),
        Bad(d, "q", "8, 32]", edit("q", like(*[1] * 12, 8, 32))),
        *(Bad(d, "q", str(dim), edit("q", like(3, 2, 8, dim))) for dim in (0, 16, 96, 256)),
        *(
            Bad(d, "q", str(dtype).removeprefix("torch."), edit("q", to(dtype)))
            for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn)
        ),
        Bad(d, "q", "[512, 256, 1, 8]", edit("q", swapped)),
        Bad(d, "q", "2]", edit("q", gaps_inside)),
        Bad(d, "weights", "[3, 2, 7]", edit("weights", like(3, 2, 7))),
        Bad(d, "weights", "[6, 8]", edit("weights", like(6, 8))),
        Bad(d, "weights", "[3, 2, 8, 1]", edit("weights", like(3, 2, 8, 1))),
        Bad(d, "weights", "float64", edit("weights", to(torch.float64))),
        Bad(d, "weights", "2]", edit("weights", gaps_inside)),
        Bad(d, "weights", "", elsewhere("weights"), mixes_devices=True),
        Bad(o, "q_fp8", "[3, 2, 8, 31]", edit("q_fp8", like(3, 2, 8, 31))),
        Bad(o, "q_fp8", "[6, 8, 32]", edit("q_fp8", like(6, 8, 32))),
        Bad(o, "q_fp8", "float8_e5m2", edit("q_fp8", to(torch.float8_e5m2))),
        Bad(o, "q_fp8", "uint8", edit("q_fp8", to(torch.uint8))),
        Bad(o, "q_fp8", "2]", edit("q_fp8", gaps_inside)),
        Bad(o, "q_fp8", "[0, 256, 32, 1]", edit("q_fp8", lambda t: like(1, 2, 8, 32)(t).expand(3, 2, 8, 32))),
        Bad(o, "q_fp8", "", elsewhere("q_fp8"), mixes_devices=True),
        Bad(o, "weights_f32", "[3, 2, 9]", edit("weights_f32", like(3, 2, 9))),
        Bad(o, "weights_f32", "bfloat16", edit("weights_f32", to(torch.bfloat16))),
        Bad(o, "weights_f32", "2]", edit("weights_f32", gaps_inside)),
        Bad(o, "weights_f32", "[0, 8, 1]", edit("weights_f32", lambda t: like(1, 2, 8)(t).expand(3, 2, 8))),
        Bad(o, "weights_f32", "", elsewhere("weights_f32"), mixes_devices=True),
        *(
            Bad(o, written, "shared", share(written, name), f"not overlap {name}", by_address=True)
            for written, name in (
                ("q_fp8", "q"),
                ("q_fp8", "weights"),
                ("weights_f32", "q"),
                ("weights_f32", "weights"),
                ("weights_f32", "q_fp8"),
            )
        ),
    ]


def quantize_k_table() -> list[Bad]:
    d = "quantize_k_cache_fp8.default"
    # The valid call: k bfloat16 [7, 32], 4 pages of 16 tokens.
    return [
        Bad(d, "k", "[224]", edit("k", like(224))),
        Bad(d, "k", "[7, 1, 32]", edit("k", like(7, 1, 32))),
        Bad(d, "kv_fused", "[4, 16, 1, 36]", edit("k", like(7, 64))),
        Bad(d, "k", "96", lambda a: pool(4, 16, 96)(a) | {"k": like(7, 96)(a["k"])}),
        *(
            Bad(d, "k", str(dtype).removeprefix("torch."), edit("k", to(dtype)))
            for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn)
        ),
        Bad(d, "k", "2]", edit("k", gaps_inside)),
        Bad(d, "slot_mapping", "[6]", edit("slot_mapping", like(6))),
        Bad(d, "slot_mapping", "[7, 1]", edit("slot_mapping", like(7, 1))),
        Bad(d, "slot_mapping", "int32", edit("slot_mapping", to(torch.int32))),
        Bad(d, "slot_mapping", "", elsewhere("slot_mapping"), mixes_devices=True),
        Bad(d, "kv_fused", "[4, 576]", edit("kv_fused", like(4, 576))),
        Bad(d, "kv_fused", "int8", edit("kv_fused", to(torch.int8))),
        *(Bad(d, "kv_fused", str(size), pool(4, size, 32, gap=-size * 36 % 16)) for size in (0, 8, 48, 512)),
        Bad(d, "kv_fused", "[4, 16, 2, 36]", edit("kv_fused", like(4, 16, 2, 36))),
        Bad(d, "kv_fused", "[4, 16, 1, 40]", edit("kv_fused", like(4, 16, 1, 40))),
        Bad(d, "kv_fused", "2]", edit("kv_fused", gaps_inside)),
        Bad(d, "kv_fused", "[1152, 72, 36, 1]", edit("kv_fused", lambda t: like(4, 32, 1, 36)(t)[:, ::2])),
        Bad(d, "kv_fused", "580", pool(4, 16, 32, gap=4)),
        Bad(d, "kv_fused", "4", pool(4, 16, 32, shift=4), by_address=True),
        Bad(d, "kv_fused", "[0, 36, 36, 1]", edit("kv_fused", lambda t: like(1, 16, 1, 36)(t).expand(4, 16, 1, 36))),
        Bad(d, "kv_fused", "", elsewhere("kv_fused"), mixes_devices=True),
        *(
            Bad(d, "kv_fused", "shared", share("kv_fused", name), f"not overlap {name}", by_address=True)
            for name in ("k", "slot_mapping")
        ),
    ]


def gather_table() -> list[Bad]:
    d, o = "gather_k_cache_fp8.default", "gather_k_cache_fp8.out"
    # The valid call: B 3, S 16, D 32, 380 tokens.
    return [
        Bad(d, "kv_fused", "[4, 576]", edit("kv_fused", like(4, 576))),
        Bad(d, "kv_fused", "int8", edit("kv_fused", to(torch.int8))),
        *(Bad(d, "kv_fused", str(size), pool(4, size, 32, gap=-size * 36 % 16)) for size in (0, 8, 48, 512)),
        Bad(d, "kv_fused", "[4, 16, 2, 36]", edit("kv_fused", like(4, 16, 2, 36))),
        *(Bad(d, "kv_fused", str(dim), pool(4, 16, dim - 4)) for dim in (4, 20, 100, 260)),
        Bad(d, "kv_fused", "2]", edit("kv_fused", gaps_inside)),
        Bad(d, "kv_fused", "580", pool(4, 16, 32, gap=4)),
        Bad(d, "kv_fused", "4", pool(4, 16, 32, shift=4), by_address=True),
        Bad(d, "block_tables", "[15]", edit("block_tables", like(15))),
        Bad(d, "block_tables", "int64", edit("block_tables", to(torch.int64))),
        Bad(d, "block_tables", "2]", edit("block_tables", gaps_inside)),
        Bad(d, "block_tables", "", elsewhere("block_tables"), mixes_devices=True),
        Bad(d, "cu_seq_lens", "[3]", edit("cu_seq_lens", like(3))),
        Bad(d, "cu_seq_lens", "[5]", edit("cu_seq_lens", like(5))),
        Bad(d, "cu_seq_lens", "[4, 1]", edit("cu_seq_lens", like(4, 1))),
        Bad(d, "cu_seq_lens", "int64", edit("cu_seq_lens", to(torch.int64))),
        Bad(d, "cu_seq_lens", "", elsewhere("cu_seq_lens"), mixes_devices=True),
        Bad(d, "total_tokens", "-1", replace(total_tokens=-1)),
        Bad(o, "k", "[379, 32]", edit("k", like(379, 32))),
        Bad(o, "k", "[380, 64]", edit("k", like(380, 64))),
        Bad(o, "k", "uint8", edit("k", to(torch.uint8))),
        Bad(o, "k", "2]", edit("k", gaps_inside)),
        Bad(o, "k", "[0, 1]", edit("k", lambda t: like(1, 32)(t).expand(380, 32))),
        Bad(o, "k", "", elsewhere("k"), mixes_devices=True),
        Bad(o, "k_scale", "[379]", edit("k_scale", like(379))),
        Bad(o, "k_scale", "[380, 1]", edit("k_scale", like(380, 1))),
        Bad(o, "k_scale", "float64", edit("k_scale", to(torch.float64))),
        Bad(o, "k_scale", "[0]", edit("k_scale", lambda t: like(1)(t).expand(380))),
        Bad(o, "k_scale", "", elsewhere("k_scale"), mixes_devices=True),
        *(
            Bad(o, written, "shared", share(written, name), f"not overlap {name}", by_address=True)
            for written in ("k", "k_scale")
            for name in ("kv_fused", "block_tables", "cu_seq_lens")
        ),
        Bad(o, "k_scale", "shared", share("k_scale", "k"), "not overlap k", by_address=True),
    ]


def quantize_q_mxfp4_table() -> list[Bad]:
    d, o = "quantize_q_mxfp4.default", "quantize_q_mxfp4.out"
    # The valid call: q bfloat16 [3, 2, 8, 64].
    return [
        Bad(d, "q", "[64]", edit("q", like(64))),
        Bad(d, "q", "8, 64]", edit("q", like(*[1] * 12, 8, 64))),
        *(Bad(d, "q", str(dim), edit("q", like(3, 2, 8, dim))) for dim in (0, 32, 96, 256)),
        *(
            Bad(d, "q", str(dtype).removeprefix("torch."), edit("q", to(dtype)))
            for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn)
        ),
        Bad(d, "q", "[1024, 512, 1, 8]", edit("q", swapped)),
        Bad(d, "q", "2]", edit("q", gaps_inside)),
        Bad(o, "q_fp4", "[3, 2, 8, 64]", edit("q_fp4", like(3, 2, 8, 64))),
        Bad(o, "q_fp4", "[6, 8, 32]", edit("q_fp4", like(6, 8, 32))),
        Bad(o, "q_fp4", "int8", edit("q_fp4", to(torch.int8)), "uint8 or float4_e2m1fn_x2"),
        Bad(o, "q_fp4", "2]", edit("q_fp4", gaps_inside)),
        Bad(o, "q_fp4", "[0, 256, 32, 1]", edit("q_fp4", lambda t: like(1, 2, 8, 32)(t).expand(3, 2, 8, 32))),
        Bad(o, "q_fp4", "", elsewhere("q_fp4"), mixes_devices=True),
        Bad(o, "q_sf", "[3, 2, 9]", edit("q_sf", like(3, 2, 9))),
        Bad(o, "q_sf", "uint8", edit("q_sf", to(torch.uint8))),
        Bad(o, "q_sf", "2]", edit("q_sf", gaps_inside)),
        Bad(o, "q_sf", "[0, 8, 1]", edit("q_sf", lambda t: like(1, 2, 8)(t).expand(3, 2, 8))),
        Bad(o, "q_sf", "", elsewhere("q_sf"), mixes_devices=True),
        *(
            Bad(o, written, "shared", share(written, name), f"not overlap {name}", by_address=True)
            for written, name in (("q_fp4", "q"), ("q_sf", "q"), ("q_sf", "q_fp4"))
        ),
    ]


def quantize_k_mxfp4_table() -> list[Bad]:
    d = "quantize_k_cache_mxfp4.default"
    # The valid call: k bfloat16 [7, 64], 4 pages of 16 tokens of 34 bytes.
    return [
        Bad(d, "k", "[448]", edit("k", like(448))),
        Bad(d, "k", "[7, 1, 64]", edit("k", like(7, 1, 64))),
        Bad(d, "k", "32", edit("k", like(7, 32))),
        Bad(d, "k", "96", lambda a: pool_of(4, 16, 51)(a) | {"k": like(7, 96)(a["k"])}),
        Bad(d, "k", "float64", edit("k", to(torch.float64))),
        Bad(d, "k", "2]", edit("k", gaps_inside)),
        Bad(d, "slot_mapping", "[6]", edit("slot_mapping", like(6))),
        Bad(d, "slot_mapping", "int32", edit("slot_mapping", to(torch.int32))),
        Bad(d, "slot_mapping", "", elsewhere("slot_mapping"), mixes_devices=True),
        Bad(d, "kv_fused", "[4, 16, 1, 34]", edit("k", like(7, 128)), "= [4, 16, 1, 68]"),
        Bad(d, "kv_fused", "[4, 544]", edit("kv_fused", like(4, 544))),
        Bad(d, "kv_fused", "int8", edit("kv_fused", to(torch.int8))),
        *(Bad(d, "kv_fused", str(size), pool_of(4, size, 34, gap=-size * 34 % 16)) for size in (0, 8, 48, 512)),
        Bad(d, "kv_fused", "[4, 16, 2, 34]", edit("kv_fused", like(4, 16, 2, 34))),
        Bad(d, "kv_fused", "[4, 16, 1, 68]", edit("kv_fused", like(4, 16, 1, 68))),
        Bad(d, "kv_fused", "2]", edit("kv_fused", gaps_inside)),
        Bad(d, "kv_fused", "548", pool_of(4, 16, 34, gap=4)),
        Bad(d, "kv_fused", "4", pool_of(4, 16, 34, shift=4), by_address=True),
        Bad(d, "kv_fused", "[0, 34, 34, 1]", edit("kv_fused", lambda t: like(1, 16, 1, 34)(t).expand(4, 16, 1, 34))),
        Bad(d, "kv_fused", "", elsewhere("kv_fused"), mixes_devices=True),
        Bad(d, "is_kv_sf_interleaved", "True with S = 16", replace(is_kv_sf_interleaved=True)),
        *(
            Bad(d, "kv_fused", "shared", share("kv_fused", name), f"not overlap {name}", by_address=True)
            for name in ("k", "slot_mapping")
        ),
    ]


def gather_mxfp4_table() -> list[Bad]:
    d, o = "gather_k_cache_mxfp4.default", "gather_k_cache_mxfp4.out"
    # The valid call: B 3, 24 pages of 16 tokens of 34 bytes, 380 tokens.
    return [
        Bad(d, "kv_fused", "[24, 544]", edit("kv_fused", like(24, 544))),
        Bad(d, "kv_fused", "int8", edit("kv_fused", to(torch.int8))),
        *(Bad(d, "kv_fused", str(size), pool_of(4, size, 34, gap=-size * 34 % 16)) for size in (0, 8, 48, 512)),
        Bad(d, "kv_fused", "[24, 16, 2, 34]", edit("kv_fused", like(24, 16, 2, 34))),
        *(Bad(d, "kv_fused", str(row), pool_of(4, 16, row)) for row in (17, 36, 51, 136)),
        Bad(d, "kv_fused", "2]", edit("kv_fused", gaps_inside)),
        Bad(d, "kv_fused", "548", pool_of(4, 16, 34, gap=4)),
        Bad(d, "kv_fused", "4", pool_of(4, 16, 34, shift=4), by_address=True),
        Bad(d, "is_kv_sf_interleaved", "True with S = 16", replace(is_kv_sf_interleaved=True)),
        Bad(d, "block_tables", "[15]", edit("block_tables", like(15))),
        Bad(d, "block_tables", "int64", edit("block_tables", to(torch.int64))),
        Bad(d, "block_tables", "2]", edit("block_tables", gaps_inside)),
        Bad(d, "block_tables", "", elsewhere("block_tables"), mixes_devices=True),
        Bad(d, "cu_seq_lens", "[3]", edit("cu_seq_lens", like(3))),
        Bad(d, "cu_seq_lens", "int64", edit("cu_seq_lens", to(torch.int64))),
        Bad(d, "cu_seq_lens", "", elsewhere("cu_seq_lens"), mixes_devices=True),
        Bad(d, "total_tokens", "-1", replace(total_tokens=-1)),
        Bad(o, "k", "[379, 32]", edit("k", like(379, 32))),
        Bad(o, "k", "[380, 64]", edit("k", like(380, 64))),
        Bad(o, "k", "int8", edit("k", to(torch.int8)), "uint8 or float4_e2m1fn_x2"),
        Bad(o, "k", "2]", edit("k", gaps_inside)),
        Bad(o, "k", "[0, 1]", edit("k", lambda t: like(1, 32)(t).expand(380, 32))),
        Bad(o, "k", "", elsewhere("k"), mixes_devices=True),
        Bad(o, "k_sf", "[379]", edit("k_sf", like(379))),
        Bad(o, "k_sf", "float32", edit("k_sf", to(torch.float32))),
        Bad(o, "k_sf", "[0]", edit("k_sf", lambda t: like(1)(t).expand(380))),
        Bad(o, "k_sf", "", elsewhere("k_sf"), mixes_devices=True),
        *(
            Bad(o, written, "shared", share(written, name), f"not overlap {name}", by_address=True)
            for written in ("k", "k_sf")
            for name in ("kv_fused", "block_tables", "cu_seq_lens")
        ),
        Bad(o, "k_sf", "shared", share("k_sf", "k"), "not overlap k", by_address=True),
    ]


def topk_table() -> list[Bad]:
    d, o = "topk_indices.default", "topk_indices.out"
    # The valid call: 6 rows of 300, 24 of them, block_tables [3, 18], block_size 16.
    return [
        Bad(d, "logits", "[300]", edit("logits", like(300))),
        Bad(d, "logits", "[6, 300, 1]", edit("logits", like(6, 300, 1))),
        *(
            Bad(d, "logits", str(dtype).removeprefix("torch."), edit("logits", to(dtype)))
            for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn)
        ),
        Bad(d, "logits", str(2**31), edit("logits", lambda t: like(6, 1)(t).expand(6, 2**31))),
        Bad(d, "logits", "2]", edit("logits", gaps_inside)),
        *(
            Bad(d, name, got, lambda a, name=name, make=make: {name: make(a["lengths"])})
            for name in ("lengths", "starts")
            for got, make in (("[5]", like(5)), ("[6, 1]", like(6, 1)), ("int64", to(torch.int64)))
        ),
        Bad(d, "lengths", "", elsewhere("lengths"), mixes_devices=True),
        Bad(
            d,
            "starts",
            "",
            lambda a: {"starts": a["lengths"].to("cpu" if a["lengths"].is_cuda else "meta")},
            mixes_devices=True,
        ),
        *(Bad(d, "k", str(k), replace(k=k)) for k in (0, -1, 4097)),
        Bad(d, "block_size", "None", replace(block_size=None)),
        Bad(d, "block_size", "16", replace(block_tables=None), "with block_tables and not without"),
        *(Bad(d, "block_size", str(size), replace(block_size=size)) for size in (0, -16, 2**31)),
        Bad(d, "block_tables", "[18]", edit("block_tables", like(18))),
        *(Bad(d, "block_tables", str(n), edit("block_tables", like(n, 18)), "a multiple") for n in (0, 4, 12)),
        Bad(d, "block_tables", "int64", edit("block_tables", to(torch.int64))),
        Bad(d, "block_tables", "2]", edit("block_tables", gaps_inside)),
        Bad(d, "block_tables", "", elsewhere("block_tables"), mixes_devices=True),
        Bad(o, "out", "[6, 25]", edit("out", like(6, 25))),
        Bad(o, "out", "[7, 24]", edit("out", like(7, 24))),
        Bad(o, "out", "int64", edit("out", to(torch.int64))),
        Bad(o, "out", "2]", edit("out", gaps_inside)),
        Bad(o, "out", "[0, 1]", edit("out", lambda t: like(1, 24)(t).expand(6, 24))),
        Bad(o, "out", "", elsewhere("out"), mixes_devices=True),
        *(
            Bad(o, "out", "shared", share("out", name), f"not overlap {name}", by_address=True)
            for name in ("logits", "lengths", "block_tables")
        ),
        Bad(o, "out", "shared", lambda a: {"starts": a["out"][0, :6]}, "not overlap starts", by_address=True),
    ]


TABLE = [
    *logits_table(),
    *fp4_logits_table(),
    *schedule_table(),
    *quantize_q_table(),
    *quantize_k_table(),
    *gather_table(),
    *quantize_q_mxfp4_table(),
    *quantize_k_mxfp4_table(),
    *gather_mxfp4_table(),
    *topk_table(),
]


def ids(bad: Bad) -> str:
    return f"{bad.overload}-{bad.argument}"


def broken(bad: Bad, device: str) -> dict:
    args = op_cases.overload_arguments(bad.overload, device)
    return args | bad.change(args)


def storages(args: dict) -> dict[str, torch.Tensor]:
    return {k: op_cases.storage_bytes(t) for k, t in op_cases.tensors(args).items() if not t.is_meta}


@pytest.mark.parametrize("overload", op_cases.OVERLOADS)
def test_the_unchanged_call_is_accepted(overload, device):
    args = op_cases.overload_arguments(overload, device)
    for call in (outcome, fake_outcome, meta_outcome):
        assert call(overload, args) is None


@pytest.mark.parametrize("bad", TABLE, ids=ids)
def test_refusal(bad, device):
    args = broken(bad, device)
    before = storages(args)
    text = outcome(bad.overload, args)
    assert text is not None, "accepted"
    assert re.match(rf"{bad.op}: {bad.argument} must \S", text), text
    rule, _, got = text.rpartition(", got ")
    assert rule and bad.rule in rule and bad.got in got, text
    assert not re.search(r"\n|/(?!\d)", text), "no source position, no stack: " + text  # D/2 is none
    for name, old in before.items():
        assert torch.equal(op_cases.storage_bytes(args[name]), old), f"{name} was written"
    if not bad.by_address:
        assert fake_outcome(bad.overload, args) == text
    if not bad.by_address and not bad.mixes_devices:
        assert meta_outcome(bad.overload, args) == text


def test_every_tensor_argument_is_in_the_table():
    covered = {(bad.op, bad.argument) for bad in TABLE}
    for overload in op_cases.OVERLOADS:
        op = overload.split(".")[0]
        for argument in op_cases.overload_of(overload)._schema.arguments:
            if "Tensor" in str(argument.type):
                assert (op, argument.name) in covered


# ---- the two sets of rules are one

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def mutate_tensor(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A fresh tensor that differs from `t` in shape, dtype or strides, often harmlessly."""
    shape = list(t.shape)
    kind = rng.choice(("size", "size", "rank", "dtype", "gaps", "pitch", "swap", "expand", "one", "copy"))
    dim = rng.randrange(len(shape)) if shape else 0
    if kind == "dtype":
        return to(rng.choice(DTYPES))(t)
    if kind == "rank" or not shape:
        return like(*rng.choice((shape[1:], [1, *shape], [*shape, 1], [t.numel()], [])))(t)
    if kind == "size":
        shape[dim] = max(0, shape[dim] + rng.choice((-1, 1, 2, 16)))
        return like(*shape)(t)
    if kind == "one":
        shape[dim] = 1
        return like(*shape)(t)
    if kind == "gaps":
        return gaps_inside(t)
    if kind == "pitch" and len(shape) > 1:
        wide = list(shape)
        wide[dim] += rng.choice((1, 4, 16))
        return like(*wide)(t).narrow(dim, 0, shape[dim])
    if kind == "swap" and len(shape) > 1:
        other = rng.randrange(len(shape))
        return like(*t.transpose(dim, other).shape)(t).transpose(dim, other)
    if kind == "expand":
        shape[dim] = 1
        return like(*shape)(t).expand(t.shape)
    return t.clone(memory_format=torch.contiguous_format)


def mutate(args: dict, rng: random.Random) -> dict:
    name = rng.choice(sorted(args))
    value = args[name]
    if isinstance(value, torch.Tensor):
        changed = mutate_tensor(value, rng)
    elif name == "schedule_meta":
        changed = mutate_tensor(like(5, 2)(args["seq_lens"]), rng)
    elif isinstance(value, bool):
        changed = not value
    elif isinstance(value, int):
        changed = value + rng.choice((-value - 1, -value, -1, 1, 300))
    elif isinstance(value, torch.dtype):
        changed = rng.choice(DTYPES)
    else:
        changed = None
    return args | {name: changed}


@pytest.mark.parametrize("overload", op_cases.OVERLOADS)
def test_real_refuses_exactly_what_fake_refuses(overload, device):
    rng = random.Random(overload)
    valid = op_cases.overload_arguments(overload, device)
    accepted, refused = 0, set()
    for trial in range(150):
        args = mutate(valid, rng)
        if trial % 3 == 0:
            args = mutate(args, rng)
        text = outcome(overload, args)
        assert fake_outcome(overload, args) == text
        assert meta_outcome(overload, args) == text
        accepted += text is None
        refused.add(text)
    assert accepted >= 10 and len(refused) >= 8, "the mutations have become one-sided"


@pytest.mark.parametrize("overload", op_cases.OVERLOADS)
def test_fakes_name_cuda_devices_without_a_gpu(overload):
    """One argument left on the CPU, as far as a machine without a GPU can show it."""
    real = op_cases.overload_arguments(overload)
    tensors = list(op_cases.tensors(real))
    for stray in tensors[1:]:
        with FakeTensorMode():
            fakes = {
                k: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cpu" if k == stray else "cuda:0")
                if isinstance(v, torch.Tensor)
                else v
                for k, v in real.items()
            }
            text = outcome(overload, fakes)
        op = overload.split(".")[0]
        assert text is not None, f"{stray} accepted on another device"
        assert re.fullmatch(rf"{op}: {stray} must be on cuda:0 like \w+, got cpu", text), text


# ---- the functions

FUNCTIONS = {
    "fp8_paged_mqa_logits": {
        "q": [[0.0]],
        "kv_fused": "pool",
        "weights": 1.0,
        "block_tables": [[0]],
        "seq_lens": [1, 2],
        "max_seq_len": (329.0, True, "329", None),
        "output_dtype": ("float32", float, None),
        "schedule_meta": [[0, 0]],
        "clean_logits": (1, "yes", None),
        "out": [0.0],
    },
    "fp4_paged_mqa_logits": {
        "q": [[0.0]],
        "q_sf": [[0]],
        "kv_fused": "pool",
        "weights": 1.0,
        "block_tables": [[0]],
        "seq_lens": [1, 2],
        "max_seq_len": (329.0, True, "329", None),
        "sf_vec_size": (32.0, True),
        "output_dtype": ("float32", float, None),
        "is_kv_sf_interleaved": (1, None),
        "schedule_meta": [[0, 0]],
        "clean_logits": (1, "yes", None),
        "out": [0.0],
    },
    "compute_paged_mqa_logits_schedule": {
        "seq_lens": ([1, 2], 3, None),
        "device": (1.5, [0]),
        "next_n": (1.0, True, "1", None),
        "variant": (8, None),
        "out": [[0, 0]],
    },
    "quantize_q_fp8": {
        "q": [[0.0]],
        "weights": [1.0],
        "pow2_scale": (1, None),
        "softmax_scale": ("0.25", True),
    },
    "quantize_k_cache_fp8": {
        "k": [[0.0]],
        "slot_mapping": [0, 1],
        "kv_fused": b"pool",
        "pow2_scale": (1, None),
    },
    "gather_k_cache_fp8": {
        "kv_fused": None,
        "block_tables": [[0]],
        "cu_seq_lens": [0, 1],
        "total_tokens": (380.0, True, None),
    },
    "quantize_q_mxfp4": {"q": [[0.0]]},
    "quantize_k_cache_mxfp4": {
        "k": [[0.0]],
        "slot_mapping": [0, 1],
        "kv_fused": b"pool",
        "is_kv_sf_interleaved": (1, None),
    },
    "gather_k_cache_mxfp4": {
        "kv_fused": None,
        "block_tables": [[0]],
        "cu_seq_lens": [0, 1],
        "total_tokens": (380.0, True, None),
        "is_kv_sf_interleaved": (0, "no"),
    },
    "topk_indices": {
        "logits": [[0.0]],
        "lengths": [1],
        "k": (24.0, True, None),
        "starts": [0],
        "block_tables": [[0]],
        "block_size": (16.0, True),
        "out": [0],
    },
}
VALID = {
    "fp8_paged_mqa_logits": "fp8_paged_mqa_logits",
    "fp4_paged_mqa_logits": "fp4_paged_mqa_logits",
    "compute_paged_mqa_logits_schedule": "paged_mqa_logits_schedule",
    "quantize_q_fp8": "quantize_q_fp8",
    "quantize_k_cache_fp8": "quantize_k_cache_fp8",
    "gather_k_cache_fp8": "gather_k_cache_fp8",
    "quantize_q_mxfp4": "quantize_q_mxfp4",
    "quantize_k_cache_mxfp4": "quantize_k_cache_mxfp4",
    "gather_k_cache_mxfp4": "gather_k_cache_mxfp4",
    "topk_indices": "topk_indices",
}
WRONG_TYPES = [
    (function, name, value)
    for function, by_name in FUNCTIONS.items()
    for name, values in by_name.items()
    for value in (values if isinstance(values, tuple) else (values,))
]


def function_arguments(function: str) -> dict:
    args = op_cases.arguments(VALID[function])
    args.pop("num_workers", None)
    return args


@pytest.mark.parametrize(("function", "name", "value"), WRONG_TYPES)
def test_wrong_type_is_a_type_error(function, name, value):
    with pytest.raises(TypeError, match=rf"^{function}: {name} must be an? .+, got {type(value).__name__}$"):
        getattr(mqa, function)(**function_arguments(function) | {name: value})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_take_no_unknown_argument(function):
    with pytest.raises(TypeError, match="skip_check"):
        getattr(mqa, function)(**function_arguments(function), skip_check=True)


@pytest.mark.parametrize(
    "bad",
    [
        bad
        for bad in TABLE
        if not bad.mixes_devices
        and bad.op in VALID
        and (bad.overload.endswith(".default") or bad.op in ("fp8_paged_mqa_logits", "topk_indices"))  # with out=
    ],
    ids=ids,
)
def test_functions_refuse_in_the_words_of_the_op(bad):
    args = broken(bad, "cpu")
    text = outcome(bad.overload, args)
    with pytest.raises(RuntimeError) as caught:
        getattr(mqa, bad.op)(**args)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("variant", "fp16"),
        ("variant", ""),
        ("variant", "FP8"),
        ("next_n", 0),
        ("next_n", -1),
    ],
)
def test_schedule_function_refuses_values(name, value):
    lengths = torch.ones(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"\b{name} must .*, got .*{re.escape(str(value))}"):
        mqa.compute_paged_mqa_logits_schedule(lengths, **{name: value})


@pytest.mark.parametrize("function", ["compute_paged_mqa_logits_schedule", "precompile_paged_mqa_logits"])
@pytest.mark.parametrize("value", ["bad", "", "cpu:7", torch.device("cpu:1"), -3, 2**70])
def test_devices_that_do_not_exist(function, value):
    args = {"seq_lens": torch.ones(3, dtype=torch.int32)} if function.startswith("compute") else {}
    shown = re.escape(repr(str(value)))
    with pytest.raises(RuntimeError, match=rf"^{function}: device must be a CPU or CUDA device, got {shown}$"):
        getattr(mqa, function)(**args, device=value)


@pytest.mark.parametrize("value", ["meta", "cuda:99", "mps"])
def test_precompile_wants_a_device_of_this_machine(value):
    rule = "device must be the CPU or one of [0-9]+ CUDA devices here"
    with pytest.raises(RuntimeError, match=rf"^precompile_paged_mqa_logits: {rule}, got '{value}'$"):
        mqa.precompile_paged_mqa_logits(value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_precompile_without_a_gpu():
    mqa.precompile_paged_mqa_logits()
    for value in ("cuda", "cuda:0"):
        with pytest.raises(RuntimeError, match=f"one of 0 CUDA devices here, got '{value}'"):
            mqa.precompile_paged_mqa_logits(value)


@pytest.mark.parametrize("value", ["cpu", "cpu:0", torch.device("cpu:0")])
def test_the_cpu_has_two_names(value):
    lengths = torch.tensor([1000, 300], dtype=torch.int32)
    expected = mqa.compute_paged_mqa_logits_schedule(lengths)
    assert torch.equal(mqa.compute_paged_mqa_logits_schedule(lengths, value), expected)
    mqa.precompile_paged_mqa_logits(value)


def test_schedule_function_wants_lengths_on_its_device():
    lengths = torch.ones(3, dtype=torch.int32)
    for value in ("cuda", "cuda:1", "meta"):
        text = f"^compute_paged_mqa_logits_schedule: seq_lens must be on {value}, got cpu$"
        with pytest.raises(RuntimeError, match=text):
            mqa.compute_paged_mqa_logits_schedule(lengths, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, torch's fake tensors must be on one")
def test_schedule_function_of_a_fake_device_that_is_not_here():
    with FakeTensorMode():
        lengths = torch.ones(3, dtype=torch.int32, device="cuda:99")
        with pytest.raises(RuntimeError, match=r"^compute_.*: seq_lens must be on a device of .*, got cuda:99$"):
            mqa.compute_paged_mqa_logits_schedule(lengths)
        assert torch.ops.mqa.paged_mqa_logits_schedule(lengths, 132).shape == (133, 2)


def test_schedule_function_options_change_nothing(device):
    lengths = torch.tensor([1000, 300, 0, 7], dtype=torch.int32, device=device)
    plain = mqa.compute_paged_mqa_logits_schedule(lengths)
    for options in ({"next_n": 4}, {"variant": "fp4"}, {"next_n": 4, "variant": "fp4"}, {"device": device}):
        assert torch.equal(mqa.compute_paged_mqa_logits_schedule(lengths, **options), plain)


# ---- helpers


def test_padded_seq_len():
    known = {0: 0, 1: 256, 255: 256, 256: 256, 257: 512, 8000: 8192, 2**31: 2**31, 2**40 + 1: 2**40 + 256}
    assert {n: mqa.padded_seq_len(n) for n in known} == known


def test_min_block_table_width():
    assert mqa.min_block_table_width(8000, 32) == 250
    assert [mqa.min_block_table_width(n, 64) for n in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]
    assert mqa.min_block_table_width(2**40 + 1, 256) == 2**32 + 1


@pytest.mark.parametrize(
    ("variant", "block_size", "head_dim", "expected"),
    [
        ("fp8", 64, 128, 8448),
        ("fp8", 32, 128, 4224),
        ("fp8", 128, 128, 16896),
        ("fp8", 256, 64, 17408),
        ("fp8", 16, 32, 576),
        ("fp4", 64, 128, 4352),
        ("fp4", 32, 128, 2176),
        ("fp4", 128, 128, 8704),
        ("fp4", 64, 64, 64 * 34),
    ],
)
def test_index_cache_block_bytes(variant, block_size, head_dim, expected):
    assert mqa.index_cache_block_bytes(variant, block_size, head_dim) == expected


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("padded_seq_len", (-1,), "max_seq_len"),
        ("min_block_table_width", (-1, 64), "seq_len"),
        ("min_block_table_width", (64, 0), "block_size"),
        ("min_block_table_width", (64, -64), "block_size"),
        ("index_cache_block_bytes", ("fp16", 64, 128), "variant"),
        ("index_cache_block_bytes", ("fp8", 48, 128), "block_size"),
        ("index_cache_block_bytes", ("fp8", 0, 128), "block_size"),
        ("index_cache_block_bytes", ("fp8", 64, 96), "head_dim"),
        ("index_cache_block_bytes", ("fp4", 64, 32), "head_dim"),
    ],
)
def test_helpers_refuse_values(function, arguments, name):
    bad = {"variant": 0, "block_size": 1, "head_dim": 2}[name] if len(arguments) == 3 else None
    value = arguments[bad] if bad is not None else min(arguments)
    with pytest.raises(RuntimeError, match=rf"{function}: {name} must .*, got .*{re.escape(str(value))}"):
        getattr(mqa, function)(*arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("padded_seq_len", (1.0,), "max_seq_len"),
        ("padded_seq_len", (True,), "max_seq_len"),
        ("padded_seq_len", ("256",), "max_seq_len"),
        ("padded_seq_len", (None,), "max_seq_len"),
        ("min_block_table_width", (64.0, 64), "seq_len"),
        ("min_block_table_width", (True, 64), "seq_len"),
        ("min_block_table_width", (64, 64.0), "block_size"),
        ("min_block_table_width", (64, False), "block_size"),
        ("index_cache_block_bytes", (8, 64, 128), "variant"),
        ("index_cache_block_bytes", ("fp8", 64.0, 128), "block_size"),
        ("index_cache_block_bytes", ("fp8", 64, "128"), "head_dim"),
    ],
)
def test_helpers_refuse_types(function, arguments, name):
    with pytest.raises(TypeError, match=rf"^{function}: {name} must be an? .+, got \w+$"):
        getattr(mqa, function)(*arguments)


def test_precompile_accepts(device):
    for arguments in (
        {},
        {"variants": ("fp8",)},
        {"variants": ["fp4"]},
        {"variants": ()},
        {"output_dtypes": (torch.float32, torch.bfloat16, torch.float16)},
        {"batch_sizes": [1, 64]},
    ):
        assert mqa.precompile_paged_mqa_logits(device, **arguments) is None
    assert mqa.precompile_paged_mqa_logits(torch.device(device)) is None


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("variants", ("fp8", "fp16"), "fp16"),
        ("output_dtypes", (torch.float64,), "float64"),
        ("output_dtypes", (torch.float32, torch.int32), "int32"),
        ("batch_sizes", (-1,), "-1"),
    ],
)
def test_precompile_refuses_values(name, value, shown):
    with pytest.raises(RuntimeError, match=rf"precompile_paged_mqa_logits: {name} must .*, got .*{shown}"):
        mqa.precompile_paged_mqa_logits("cpu", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", 1.5),
        ("variants", "fp8"),
        ("variants", (8,)),
        ("variants", None),
        ("output_dtypes", torch.float32),
        ("output_dtypes", ("float32",)),
        ("batch_sizes", 4),
        ("batch_sizes", (1.0,)),
        ("batch_sizes", (True,)),
    ],
)
def test_precompile_refuses_types(name, value):
    with pytest.raises(TypeError, match=rf"^precompile_paged_mqa_logits: {name} must be an? .+, got [\w ]+$"):
        mqa.precompile_paged_mqa_logits(**{"device": "cpu", name: value})
