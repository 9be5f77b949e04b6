"""A sparse-attention decode loop over real text, with its index keys in a paged FP8 or MXFP4 cache.

What a serving engine does with this library, to be read from top to bottom:

1. prefill: a prompt's index keys go into shuffled pages through ``quantize_k_cache_fp8`` (``_mxfp4``);
2. a decode step, in each layer: ``quantize_q_fp8`` and ``fp8_paged_mqa_logits`` (``quantize_q_mxfp4`` and
   ``fp4_paged_mqa_logits``) score all positions so far, ``topk_indices`` selects the slots of ``TOP_K`` of them,
   attention reads only those;
3. continuous batching: a finished request returns its pages, and a waiting one takes its row;
4. speculation: the second pass feeds two bytes per request and step (``next_n`` 2), the second one a draft;
5. the step is one ``torch.compile(fullgraph=True)`` graph; on a GPU it is captured and replayed.

The decoder is not trained. Its weights are seeded random projections laid out as an induction head: a key encodes the
bytes before its position, a query the bytes up to now, so the indexer finds the places where the text went through the
same context, and attention reads which byte followed there. Every step is fed the true text, not the guess; how often
the guess was right is reported.

``make demo`` runs it, or ``python examples/decode_loop.py [--text FILE] [--steps N] [--device cuda]``. It prints a
table, saves a picture, and exits with 0 only if its checks hold. ``--cache mxfp4`` shows both formats side by side.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torch_mqa_ops as mqa

SEED = 2024
BATCH = 4  # requests decoded together
BLOCK_SIZE = 64  # tokens per page
MAX_CONTEXT = 4096  # tokens of the longest request
TOP_K = 64  # positions that attention may read
LAYERS = 3
INDEX_HEADS, INDEX_DIM = 64, 128
SOFTMAX_SCALE = INDEX_DIM**-0.5 * INDEX_HEADS**-0.5
HEADS, HEAD_DIM = 4, 128
SHARPNESS = 3.0  # of the attention's softmax; training would have found it
ORDERS = (1, 2, 3, 4, 6, 8)  # a context is its last 1, 2, ... bytes
CODE = 64  # numbers that encode one of these
CONTEXT = len(ORDERS) * CODE
WINDOW = max(ORDERS) + 1  # bytes that give a position its context and the one before
MEASURE_EVERY = 4  # steps from one comparison with the exact scorer to the next

# ------------------------------------------------------------------------------------------- the index cache's format


def score_fp8(q: Tensor, weights: Tensor, cache: Tensor, *where: Tensor | int, schedule_meta: Tensor) -> Tensor:
    q_fp8, weights = mqa.quantize_q_fp8(q, weights, softmax_scale=SOFTMAX_SCALE)
    return mqa.fp8_paged_mqa_logits(q_fp8, cache, weights.flatten(0, 1), *where, schedule_meta=schedule_meta)


def score_mxfp4(q: Tensor, weights: Tensor, cache: Tensor, *where: Tensor | int, schedule_meta: Tensor) -> Tensor:
    q_fp4, q_sf = mqa.quantize_q_mxfp4(q)
    return mqa.fp4_paged_mqa_logits(
        q_fp4, q_sf, cache, weights.flatten(0, 1) * SOFTMAX_SCALE, *where,
        output_dtype=torch.float32, schedule_meta=schedule_meta,
    )  # fmt: skip


class IndexFormat(NamedTuple):
    name: str
    variant: str  # as the library's helpers call it
    write: Callable[[Tensor, Tensor, Tensor], None]  # keys to their slots of a layer's cache
    score: Callable[..., Tensor]
    recall_floor: float  # share of the exact top-k that is to be found


FORMATS = {
    "fp8": IndexFormat("FP8", "fp8", mqa.quantize_k_cache_fp8, score_fp8, 0.9),
    "mxfp4": IndexFormat("MXFP4", "fp4", mqa.quantize_k_cache_mxfp4, score_mxfp4, 0.85),
}

# ------------------------------------------------------------------------------------------------- the decoder


class LayerCache(NamedTuple):
    """The pages of one layer. ``exact_k`` only serves to measure how well the quantised index keys do."""

    index: Tensor  # uint8 [pages, BLOCK_SIZE, 1, bytes of a token]: the library's layout, keys and scales
    kv: Tensor  # bfloat16 [pages * BLOCK_SIZE, HEAD_DIM + 2 * CODE]: a key and a value for all heads
    exact_k: Tensor  # float32 [pages * BLOCK_SIZE, INDEX_DIM]


class StepResult(NamedTuple):
    guess: Tensor  # [B, n] the next byte
    guess_ahead: Tensor  # [B, n] the byte after that, the draft of a speculative step
    # Per layer, for the measurements:
    scores: list[Tensor]  # [B * n, MAX_CONTEXT], unspecified past a row's length
    selected: list[Tensor]  # [B * n, TOP_K] slots, -1 where a row has fewer
    index_q: list[Tensor]  # [B * n, INDEX_HEADS, INDEX_DIM], not quantised
    index_weights: list[Tensor]  # [B * n, INDEX_HEADS]


def sign_codes(number: Tensor, multipliers: Tensor) -> Tensor:
    """A vector of +-1 for every number: equal for equal ones, nearly orthogonal for different ones."""
    return ((number[..., None] * multipliers >> 31) & 1).float() * 2 - 1


class Layer(nn.Module):
    """Indexer and attention. Queries and keys share a random basis, so that their products measure how alike
    they are; every query head weighs the orders of ORDERS in its own way."""

    def __init__(self, generator: torch.Generator, index_format: IndexFormat) -> None:
        super().__init__()
        self.index_format = index_format
        width = CONTEXT + CODE
        for name, heads, dim, scale in (
            ("index", INDEX_HEADS, INDEX_DIM, 1.0),
            ("attention", HEADS, HEAD_DIM, SHARPNESS * HEAD_DIM**-0.5),
        ):
            basis = torch.randn(width, dim, generator=generator) * width**-0.5
            gain = torch.rand(heads, width // CODE, generator=generator).repeat_interleave(CODE, dim=1) + 0.5
            self.register_buffer(f"{name}_k", basis)
            self.register_buffer(f"{name}_q", (gain[:, :, None] * basis * scale).permute(1, 0, 2).flatten(1))
        self.register_buffer("index_gate", torch.randn(CONTEXT, INDEX_HEADS, generator=generator) * CONTEXT**-0.5)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the residual stream: what to look for, what to be found by, what to hand over when found."""
        context, previous, guess, _ = F.rms_norm(x, x.shape[-1:]).split((CONTEXT, CONTEXT, CODE, CODE), dim=-1)
        byte = context[:, :CODE]  # the code of the newest byte alone
        query = torch.cat((context, guess), dim=-1)  # "after this context, and what I think comes next"
        key = torch.cat((previous, byte), dim=-1)  # "after that context came this byte"
        return query, key, torch.cat((byte, guess), dim=-1)

    def append(self, cache: LayerCache, slots: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes rows to their slots; returns what went into ``cache.kv``, before rounding."""
        index_k = key @ self.index_k
        self.index_format.write(index_k, slots, cache.index)
        cache.exact_k[slots] = index_k
        kv = torch.cat((key @ self.attention_k, value), dim=-1)
        cache.kv[slots] = kv.to(cache.kv.dtype)
        return kv


class Decoder(nn.Module):
    """The residual stream is (context, context before, guess, guess ahead); attention adds to the guesses."""

    def __init__(self, generator: torch.Generator, index_format: IndexFormat) -> None:
        super().__init__()
        self.index_format = index_format
        self.layers = nn.ModuleList(Layer(generator, index_format) for _ in range(LAYERS))
        self.register_buffer("multipliers", torch.randint(2**30, (CODE,), generator=generator) * 2 + 1)
        self.register_buffer("byte_codes", sign_codes(torch.arange(256) + 1, self.multipliers))

    def embed(self, windows: Tensor) -> Tensor:
        """int64 [rows, WINDOW] bytes, the newest last -> rows of the residual stream."""
        codes = []
        for end in (WINDOW, WINDOW - 1):
            number = torch.zeros_like(windows[:, 0])
            for order in range(1, max(ORDERS) + 1):
                number = (number * 257 + windows[:, end - order] + 1) % (2**31 - 1)
                if order in ORDERS:
                    codes.append(sign_codes(number, self.multipliers))
        return torch.cat(codes + [torch.zeros_like(codes[0])] * 2, dim=-1)

    def prefill(self, windows: Tensor, slots: Tensor, caches: list[LayerCache]) -> None:
        """Fills the caches for a prompt. Its attention is dense: this program is about decoding."""
        x = self.embed(windows)
        for layer, cache in zip(self.layers, caches, strict=True):
            query, key, value = layer.read(x)
            kv = layer.append(cache, slots, key, value)
            if layer is self.layers[-1]:  # nothing reads what the last layer would add
                break
            k, v = kv.expand(HEADS, -1, -1).split((HEAD_DIM, 2 * CODE), dim=-1)
            q = (query @ layer.attention_q).view(-1, HEADS, HEAD_DIM).transpose(0, 1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
            x = x + F.pad(attended.mean(0) / LAYERS, (2 * CONTEXT, 0))

    def decode_step(
        self, windows: Tensor, slots: Tensor, block_tables: Tensor, seq_lens: Tensor, caches: list[LayerCache]
    ) -> StepResult:
        """Appends n bytes to each of B requests and guesses what follows each of them.

        windows int64 [B, n, WINDOW]; slots int64 [B * n], where the new keys go; block_tables int32 [B, W];
        seq_lens int32 [B], the new bytes included. A row without a request has length 0.
        """
        batch, n, _ = windows.shape
        schedule = mqa.compute_paged_mqa_logits_schedule(seq_lens, next_n=n)  # one for all layers
        # A row sees up to its own position.
        lengths = (seq_lens[:, None] - n + 1 + torch.arange(n, dtype=torch.int32, device=seq_lens.device)).flatten()
        x = self.embed(windows.flatten(0, 1))
        trace = []
        for layer, cache in zip(self.layers, caches, strict=True):
            query, key, value = layer.read(x)
            layer.append(cache, slots, key, value)

            index_q = (query @ layer.index_q).view(batch, n, INDEX_HEADS, INDEX_DIM)
            index_weights = F.softplus(query[:, :CONTEXT] @ layer.index_gate).view(batch, n, INDEX_HEADS)
            scores = self.index_format.score(
                index_q, index_weights, cache.index, block_tables, seq_lens, MAX_CONTEXT, schedule_meta=schedule
            )
            # Attention reads TOP_K rows of the cache, not all. Nothing past a row's length is looked at.
            selected = mqa.topk_indices(scores, lengths, TOP_K, block_tables=block_tables, block_size=BLOCK_SIZE)
            live = selected >= 0
            k, v = cache.kv[selected.clamp(min=0)].float().split((HEAD_DIM, 2 * CODE), dim=-1)
            likeness = (query @ layer.attention_q).view(-1, HEADS, HEAD_DIM) @ k.mT
            likeness = likeness.masked_fill(~live[:, None], torch.finfo(torch.float32).min)
            attended = likeness.softmax(dim=-1) @ v
            x = x + F.pad(attended.mean(1) / LAYERS, (2 * CONTEXT, 0))
            trace.append((scores, selected, index_q.flatten(0, 1), index_weights.flatten(0, 1)))

        guess, guess_ahead = x[:, 2 * CONTEXT :].view(batch, n, 2, CODE).unbind(2)
        closest = [(codes @ self.byte_codes.T).argmax(-1) for codes in (guess, guess_ahead)]
        return StepResult(*closest, *(list(parts) for parts in zip(*trace, strict=True)))


# ---------------------------------------------------------------------- pages, requests, the step as one graph


class PagePool:
    """All layers' caches and the list of free pages. Page 0 stays out of it: rows without a request write there."""

    def __init__(self, device: torch.device, index_format: IndexFormat) -> None:
        self.table_width = mqa.min_block_table_width(MAX_CONTEXT, BLOCK_SIZE)
        self.size = 3 * self.table_width  # less than BATCH of the longest requests
        block_bytes = mqa.index_cache_block_bytes(index_format.variant, BLOCK_SIZE, INDEX_DIM)
        index_shape = (1 + self.size, BLOCK_SIZE, 1, block_bytes // BLOCK_SIZE)
        slots = (1 + self.size) * BLOCK_SIZE
        self.caches = [
            LayerCache(
                torch.zeros(index_shape, dtype=torch.uint8, device=device),
                torch.zeros(slots, HEAD_DIM + 2 * CODE, dtype=torch.bfloat16, device=device),
                torch.zeros(slots, INDEX_DIM, device=device),
            )
            for _ in range(LAYERS)
        ]
        self.free = list(range(1, 1 + self.size))
        random.Random(SEED).shuffle(self.free)

    def take(self, request: Request) -> bool:
        """Gives a request all the pages it will need, if there are as many."""
        needed = mqa.min_block_table_width(len(request.text), BLOCK_SIZE)
        if needed > len(self.free):
            return False
        request.pages, self.free = self.free[:needed], self.free[needed:]
        return True


@dataclass
class Request:
    text: bytes
    prompt: int  # bytes of it that are there at the start
    wanted: int  # bytes to decode after them
    length: int = 0  # positions whose keys are in the cache for good
    draft: int = ord(" ")  # a guess at the byte after the next one
    pages: list[int] = field(default_factory=list)

    def slots(self, start: int, end: int) -> list[int]:
        return [self.pages[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]


def make_requests(text: bytes, steps: int) -> deque[Request]:
    """Two requests for each row, which together want `steps` bytes."""
    wanted = [steps * share // 100 for share in (30, 40, 55, 65)]
    wanted += [steps - n for n in wanted]
    shares = (25, 100, 15, 45, 60, 20, 80, 35)
    requests: deque[Request] = deque()
    for i, (share, n) in enumerate(zip(shares, wanted, strict=True)):
        prompt = (min(MAX_CONTEXT, len(text)) - n - 2) * share // 100
        start = (len(text) - prompt - n - 2) * i // len(shares)
        requests.append(Request(text[start : start + prompt + n + 2], prompt, n))
    return requests


class StepGraph:
    """A decode step of fixed shape: static input buffers; compiled; on a GPU captured once, then replayed."""

    def __init__(self, decoder: Decoder, pool: PagePool, next_n: int, compiled: bool) -> None:
        device = decoder.multipliers.device
        self.next_n = next_n
        self.inputs = {
            "windows": torch.zeros(BATCH, next_n, WINDOW, dtype=torch.int64, device=device),
            "slots": torch.zeros(BATCH * next_n, dtype=torch.int64, device=device),
            "block_tables": torch.full((BATCH, pool.table_width), -1, dtype=torch.int32, device=device),
            "seq_lens": torch.zeros(BATCH, dtype=torch.int32, device=device),
        }
        step = torch.compile(decoder.decode_step, fullgraph=True, dynamic=False) if compiled else decoder.decode_step
        self.run = lambda: step(**self.inputs, caches=pool.caches)
        self.run()  # compiles, with no request in any row; nothing may compile inside a capture
        self.graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if self.graph is not None:
            with torch.cuda.graph(self.graph):
                self.result = self.run()

    def __call__(self, inputs: dict[str, list]) -> StepResult:
        for name, values in inputs.items():
            self.inputs[name].copy_(torch.tensor(values))
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.result


# --------------------------------------------------------------------------------------------- the decode loop


@dataclass
class Report:
    """What one pass over the requests measured."""

    index_format: IndexFormat
    next_n: int
    steps: int = 0
    fed: int = 0  # bytes of the true text fed, drafts left out
    decoded: int = 0
    right: int = 0
    seconds: float = 0.0
    best: int = 0  # positions in the exact scorer's top-k
    found: int = 0  # those of them that were selected
    pages: int = 0  # handed out
    sample: tuple[bytes, Tensor, Tensor, Tensor] | None = None  # of one row: text so far, scores, exact ones, selected


def prefill(decoder: Decoder, pool: PagePool, request: Request) -> None:
    """Takes in the prompt but for its last byte, which the first decode step will feed."""
    request.length = request.prompt - 1
    device = decoder.multipliers.device
    padded = torch.tensor([0] * (WINDOW - 1) + list(request.text[: request.length]), device=device)
    slots = torch.tensor(request.slots(0, request.length), device=device)
    decoder.prefill(padded.unfold(0, WINDOW, 1), slots, pool.caches)


def next_inputs(rows: list[Request | None], n: int, table_width: int) -> dict[str, list]:
    """The next true byte of every request, and with n 2 its draft, as inputs of a step."""
    inputs: dict[str, list] = {"windows": [], "slots": [], "block_tables": [], "seq_lens": []}
    for request in rows:
        pages, length = (request.pages, request.length) if request else ([], -n)
        recent = [*request.text[length + 1 - WINDOW : length + 1], request.draft] if request else [0] * (WINDOW + 1)
        inputs["windows"].append([recent[t : t + WINDOW] for t in range(n)])
        inputs["slots"] += request.slots(length, length + n) if request else [0] * n
        inputs["block_tables"].append(pages + [-1] * (table_width - len(pages)))
        inputs["seq_lens"].append(length + n)
    return inputs


def decode(decoder: Decoder, pool: PagePool, step: StepGraph, requests: deque[Request]) -> Report:
    """Continuous batching until every request is served."""
    n = step.next_n
    report = Report(decoder.index_format, n)
    rows: list[Request | None] = [None] * BATCH
    total = sum(request.wanted for request in requests)
    while requests or any(rows):
        for row in range(BATCH):
            if rows[row] is None and requests and pool.take(requests[0]):
                rows[row] = requests.popleft()
                report.pages += len(rows[row].pages)
                prefill(decoder, pool, rows[row])
        if step.graph is not None:
            torch.cuda.synchronize()  # prefill is not to be counted below

        start = time.perf_counter()
        result = step(next_inputs(rows, n, pool.table_width))
        guess, guess_ahead = torch.stack((result.guess, result.guess_ahead)).tolist()  # waits for the device
        report.seconds += time.perf_counter() - start
        if report.steps % MEASURE_EVERY == 0:
            measure(pool, rows, result, report)

        for row, request in enumerate(rows):
            if request is None:
                continue
            # A draft holds if the text says the same. If not, its keys lie past the length, to be written over.
            accepted = 1 + (n == 2 and request.draft == request.text[request.length + 1])
            for t in range(accepted):
                report.right += guess[row][t] == request.text[request.length + 1 + t]
            request.draft = guess_ahead[row][accepted - 1]
            request.length += accepted
            report.decoded += accepted
            report.fed += 1
            if request.length - (request.prompt - 1) >= request.wanted:
                pool.free += request.pages
                rows[row] = None
        report.steps += 1
        show_progress(
            f"{report.index_format.name}, next_n {n}: step {report.steps}, {report.decoded} of {total} bytes",
            report.steps % 16 == 0,
        )
    check(len(set(pool.free)) == pool.size, "every page came back")
    return report


# -------------------------------------------------------------------------------------------- checks and output


def check(condition: bool, claim: str) -> None:
    if not condition:
        sys.exit(f"decode_loop: does not hold: {claim}")


def measure(pool: PagePool, rows: list[Request | None], result: StepResult, report: Report) -> None:
    """Compares a step's selection with the top-k of the same formula in float32, on q and k before quantisation."""
    n = report.next_n
    for row in range(BATCH * n):
        request = rows[row // n]
        if request is None:
            continue
        length = request.length + row % n + 1  # a row sees up to its own position
        slots = torch.tensor(request.slots(0, length), device=result.guess.device)
        for layer, cache in enumerate(pool.caches):
            products = (cache.exact_k[slots] @ result.index_q[layer][row].T).relu()
            exact = products @ result.index_weights[layer][row] * SOFTMAX_SCALE
            scores = result.scores[layer][row, :length]
            chosen = result.selected[layer][row]
            chosen = chosen[chosen >= 0]
            selected = (slots == chosen[:, None]).nonzero()[:, 1]  # positions
            check(bool(scores.isfinite().all()), "the scores are finite")
            check(len(selected) == len(chosen), "every selected slot holds a position within the request's length")
            check(len(selected.unique()) == min(TOP_K, length), f"{TOP_K} different positions are selected")
            # A tie with the last of the exact top-k counts as found: repetitive text has many.
            worst = exact.topk(min(TOP_K, length)).values[-1]
            report.best += len(selected)
            report.found += int((exact[selected] >= worst * (1 - 1e-6)).sum())
        if row % n == 0 and (report.sample is None or length >= len(report.sample[0])):
            report.sample = (request.text[:length], scores.cpu(), exact.cpu(), selected.cpu())


def show_progress(line: str, milestone: bool) -> None:
    """One updating line on a terminal; elsewhere, the milestones only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif milestone:
        print(line, file=sys.stderr, flush=True)


def print_table(reports: list[Report], pool: PagePool) -> None:
    def token_bytes(report: Report) -> int:
        return mqa.index_cache_block_bytes(report.index_format.variant, BLOCK_SIZE, INDEX_DIM) // BLOCK_SIZE

    lines = [
        ("index cache", lambda r: r.index_format.name),
        ("bytes fed per request and step (next_n)", lambda r: f"{r.next_n}"),
        ("decode steps", lambda r: f"{r.steps}"),
        ("tokens (bytes) decoded", lambda r: f"{r.decoded}"),
        ("tokens/s, compiling and prefill excluded", lambda r: f"{r.decoded / r.seconds:.1f}"),
        ("ms per step", lambda r: f"{1e3 * r.seconds / r.steps:.2f}"),
        (f"exact float32 top-{TOP_K} found", lambda r: f"{100 * r.found / r.best:.2f} %"),
        ("next byte guessed right", lambda r: f"{100 * r.right / r.decoded:.1f} %"),
        (
            "second-byte drafts that held",
            lambda r: f"{100 * (r.decoded - r.fed) / r.fed:.1f} %" if r.next_n == 2 else "-",
        ),
        (f"pages handed out (pool of {pool.size}, reused)", lambda r: f"{r.pages}"),
        ("index cache per token and layer", lambda r: f"{token_bytes(r)} B"),
        ("  the same keys in bfloat16", lambda _: f"{2 * INDEX_DIM} B"),
        ("  the same keys in float32", lambda _: f"{4 * INDEX_DIM} B"),
    ]
    for title, value in lines:
        print(f"{title:<42}" + "".join(f"{value(report):>12}" for report in reports))


def draw(text: bytes, scores: Tensor, exact: Tensor, selected: Tensor, name: str, path: Path) -> None:
    """Scores over positions with the selected ones marked; below, the text at the best of them."""

    def shown(piece: bytes) -> str:
        return "".join(chr(b) if 32 < b < 127 else "\u00b7" if b == 32 else "\u00b6" if b == 10 else "?" for b in piece)

    missed = sorted(set(exact.topk(len(selected)).indices.tolist()) - set(selected.tolist()))
    figure = Figure(figsize=(11, 9), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    upper.plot(scores, color="0.7", linewidth=0.6, label=f"score from the {name} cache")
    upper.plot(selected, scores[selected], "o", color="tab:blue", markersize=5, label=f"selected ({len(selected)})")
    if missed:
        upper.plot(missed, scores[missed], "x", color="tab:red", markersize=8,
                   label=f"in the exact float32 top-{len(selected)} but not selected ({len(missed)})")  # fmt: skip
    upper.set(xlabel="position in the request (bytes)", ylabel="index score")
    upper.set_title("Index scores of all positions in one decode step, last layer", pad=28)
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)

    best = selected[scores[selected].argsort(descending=True)][:12].tolist()
    lower.barh(range(len(best)), scores[best], color="tab:blue")
    labels = [f"{p:4} {shown(text[max(0, p - 24) : p]):>24} [{shown(text[p : p + 1])}]" for p in best]
    lower.set_yticks(range(len(best)), labels, family="monospace", fontsize=9)
    lower.invert_yaxis()
    lower.set(xlabel="index score")
    lower.set_title(f"The best of them: the text before each, [its byte]. The query's text:  {shown(text[-24:])}")
    figure.savefig(path, dpi=110)


def read_text(path: Path | None) -> bytes:
    """The given file, or this repository's documents and then its sources, 128 KiB of them."""
    if path is not None:
        return path.read_bytes()
    root = Path(__file__).resolve().parent.parent
    names = ("README.md", "CONTRIBUTING.md", "docs/*.md", "torch_mqa_ops/*.py", "csrc/**/*.c*", "examples/*.py")
    files = [file for name in names for file in sorted(root.glob(name))]
    return b"".join(file.read_bytes() for file in files)[: 128 * 1024]


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse-attention decoding of real text, its index keys quantised.")
    parser.add_argument("--text", type=Path, help="any file (default: this repository's documents and sources)")
    parser.add_argument("--steps", type=int, default=64, help="steps of the first pass, 4 to 1000 (default: 64)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where to decode (default: cuda where there is a GPU)")  # fmt: skip
    parser.add_argument("--cache", choices=tuple(FORMATS), default="fp8",
                        help="format of the index keys; mxfp4 beside fp8 (default: fp8)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("decode_loop.png"),
                        help="file to save the picture to (default: %(default)s)")  # fmt: skip
    parser.add_argument("--no-compile", action="store_true", help="run the step eagerly, to follow it in a debugger")
    arguments = parser.parse_args()
    try:
        text = read_text(arguments.text)
    except OSError as error:
        parser.error(f"--text must be a file that can be read, got {arguments.text}: {error.strerror}")
    if not 4 <= arguments.steps <= 1000:
        parser.error(f"--steps must be from 4 to 1000, got {arguments.steps}")
    if len(text) < 1024 + 4 * arguments.steps:
        parser.error(f"the text must have {1024 + 4 * arguments.steps} bytes or more, got {len(text)}")

    device = torch.device(arguments.device)
    reports = []
    with torch.no_grad():
        for index_format in [FORMATS["fp8"]] + [FORMATS["mxfp4"]] * (arguments.cache == "mxfp4"):
            decoder = Decoder(torch.Generator().manual_seed(SEED), index_format).to(device)
            pool = PagePool(device, index_format)
            for next_n in (1, 2):
                show_progress(f"{index_format.name}, next_n {next_n}: preparing the step", True)
                step = StepGraph(decoder, pool, next_n, compiled=not arguments.no_compile)
                reports.append(decode(decoder, pool, step, make_requests(text, arguments.steps)))
    show_progress("", False)

    how = ("eager" if arguments.no_compile else "compiled") + ", replayed as a CUDA graph" * (device.type == "cuda")
    print(f"{len(text)} bytes of text, {LAYERS} layers of an untrained decoder with {INDEX_HEADS} index heads of "
          f"{INDEX_DIM}; on {device}, {how}")  # fmt: skip
    print_table(reports, pool)
    draw(*reports[-1].sample, name=reports[-1].index_format.name, path=arguments.output)
    print(f"picture: {arguments.output}")
    for report in reports:
        floor = report.index_format.recall_floor
        check(report.found >= floor * report.best, f"{floor:.0%} of the exact top-{TOP_K} are found")


if __name__ == "__main__":
    main()
