"""What benches share: where they ran, the card's ceilings, timing by graph replay, the table and the file."""

import datetime
import functools
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REPLAYS = 15
Calls = Sequence[Callable[[], object]]


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """MQA_COMMIT where it is set (a copy of the tree without its history), else git's, marked if dirty."""
    if given := os.environ.get("MQA_COMMIT"):
        return given
    head = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    status = ("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return head + ("-dirty" if _output_of(*status) else "")


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def environment(device: torch.device) -> dict:
    on_gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = _output_of(*query) if on_gpu else None
    return {
        "card": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "driver": driver.splitlines()[0] if driver else None,
        "threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
    }


def summary(microseconds: Sequence[float]) -> dict:
    measured = {"us": statistics.median(microseconds), "min": min(microseconds), "max": max(microseconds)}
    return {name: round(value, 3) for name, value in measured.items()}


def _capture(calls: Calls, passes: int) -> torch.cuda.CUDAGraph:
    """All calls back to back, `passes` times. (torch.cuda.graph adds a garbage collection to each.)"""
    graph = torch.cuda.CUDAGraph()
    kept: list[object] = [None] * len(calls)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        for _ in range(passes):
            for i, call in enumerate(calls):
                # The last pass's results stay alive, so that a call which allocates its own result gets
                # a buffer of its own per input set, like the calls that are given one.
                kept[i] = call()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _replay_event_pair(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    return start, end


def graph_times(contenders: dict[str, Calls], target_ms: float = 3.0, replays: int = REPLAYS) -> dict[str, dict]:
    """Microseconds per call of each contender: median, least and most over the replays.

    Each contender's calls (one per input set) are one CUDA graph, repeated to about `target_ms`. The
    contenders take turns, one replay each, so that heat and clock meet them alike.
    """
    graphs = {}
    for name, calls in contenders.items():
        calls[0]()  # loads the kernel: what it costs the first time is not the question here
        graph = _capture(calls, 1)
        graph.replay()
        start, end = _replay_event_pair(graph)
        end.synchronize()
        passes = max(1, round(target_ms / start.elapsed_time(end)))
        graphs[name] = (graph if passes == 1 else _capture(calls, passes), passes * len(calls))
    # The first round warms up.
    rounds = [{name: _replay_event_pair(graph) for name, (graph, _) in graphs.items()} for _ in range(replays + 1)]
    torch.cuda.synchronize()
    times = {}
    for name, (_, calls) in graphs.items():
        times[name] = summary([start.elapsed_time(end) * 1e3 / calls for start, end in (r[name] for r in rounds[1:])])
    return times


def _eager_us(call: Callable[[], object], calls: int = 4) -> float:
    """Median device time of one long eager call: several between two events, so that the launch hides."""
    times = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 / calls for start, end in times[3:])


def host_us(contenders: dict[str, Callable[[], object]], calls: int = 500) -> dict[str, float]:
    """Host time of one eager call of each: wall clock over many with no synchronisation.

    The contenders take turns, a series each; the median of 5, after one to warm up.
    """
    series: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(6):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            series[name].append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return {name: statistics.median(measured[1:]) for name, measured in series.items()}


def _memory_ceilings() -> dict:
    from triton_kernels import read_kernel

    num_words = 1 << 29  # 2 GiB
    src = torch.randint(-(2**31), 2**31 - 1, (num_words,), dtype=torch.int32, device="cuda")
    dst, sums = torch.empty_like(src), torch.empty(num_words // 2048, dtype=torch.int32, device="cuda")
    reads = {"torch amax": lambda: torch.amax(src)}
    for tile, warps in ((2048, 4), (4096, 4), (8192, 8)):
        launch = functools.partial(read_kernel[(num_words // tile,)], src, sums, TILE=tile, num_warps=warps)
        reads[f"triton {tile} words {warps} warps"] = launch
    read = {name: 4 * num_words / _eager_us(call) / 1e3 for name, call in reads.items()}
    copy = 8 * num_words / _eager_us(lambda: dst.copy_(src)) / 1e3
    return {"read_gbs": max(read.values()), "copy_gbs": copy, "read_gbs_by_kernel": read}


def _matmul_ceilings() -> dict:
    size, one = 8192, torch.ones((), device="cuda")
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    bf16 = 2 * size**3 / _eager_us(lambda: a @ b.T) / 1e6
    fp8 = None
    if torch.cuda.get_device_capability() >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        multiply = functools.partial(
            torch._scaled_mm, a8, b8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        fp8 = 2 * size**3 / _eager_us(multiply) / 1e6
    return {"bf16_matmul_tflops": bf16, "fp8_matmul_tflops": fp8}


def ceilings() -> dict:
    """What this card reaches on random data: linear read, copy, bf16 and fp8 matrix products."""
    return _memory_ceilings() | _matmul_ceilings()


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(2, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]
    lines = [header, ["-" * (w - 1) + ":" for w in widths], *rows]
    padded = [" | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(f"| {line} |" for line in padded)


def save(record: dict, directory: pathlib.Path) -> pathlib.Path:
    """One JSON per bench, card and commit."""
    card = re.sub(r"[^a-z0-9]+", "_", record["card"].lower()).strip("_")
    path = directory / f"{record['bench']}_{card}_{record['commit']}.json"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
