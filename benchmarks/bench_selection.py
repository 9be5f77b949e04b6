"""Times topk_indices against a plain read of the same rows and torch.topk (README.md says how)."""

import argparse
import functools
import pathlib
import statistics
import time

import common
import plot
import torch

import torch_mqa_ops as mqa

CUDA_SHAPES = [(1, 131072), (4, 65536), (16, 32768), (64, 8192), (64, 32768), (256, 32768), (64, 131072)]
CPU_SHAPES = [(1, 131072), (16, 32768), (64, 8192)]
COLD_BYTES = 250_000_000  # of all input sets together: several times the L2 cache
READ_TILES = [(2048, 4), (4096, 4), (8192, 8)]  # (words per program, warps)
BLOCK = 64  # tokens a block of the table holds
VALUES = {
    "normal": lambda x: x,
    "eighths": lambda x: (x * 8).round() / 8,
    "all equal": torch.ones_like,
    "ascending": lambda x: torch.arange(x.shape[1], device=x.device, dtype=x.dtype).expand_as(x).contiguous(),
    "narrow": lambda x: 1 + 1e-5 * x,
    "offset": lambda x: 100 + 30 * x.relu(),
    "mostly -inf": lambda x: x.masked_fill(torch.arange(x.shape[1], device=x.device) % 97 != 0, -torch.inf),
    "top squeezed": lambda x: torch.where(x > 1.15, 5 + 1e-5 * x, x),
}
METHOD = (
    "graph replay, contenders alternating in one process, median of 15; cold: the calls on input sets of 250 MB "
    "together back to back; hot: one set again and again. Normal data, lengths uniform in [0.7, 1.3] x mean, rows a "
    "multiple of 256 columns apart. Useful bytes = tokens * 4 + rows * k * 4."
)
CPU_METHOD = "wall clock, contenders alternate, median of 15; data as on CUDA"


def make_lengths(rows: int, mean: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (mean * (0.7 + 0.6 * torch.rand(rows, generator=gen))).to(torch.int32).to(device)


def make_sets(rows: int, mean: int, count: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(logits [rows, the longest row], lengths) of each input set."""
    lengths = [make_lengths(rows, mean, device, seed) for seed in range(count)]
    width = max(int(each.max()) for each in lengths)
    pitch = mqa.padded_seq_len(width)
    logits = torch.randn(count, rows, pitch, device=device, generator=torch.Generator(device).manual_seed(1))
    return [(logits[i, :, :width], lengths[i]) for i in range(count)]


def check(logits: torch.Tensor, lengths: torch.Tensor, chosen: torch.Tensor) -> None:
    """Against a full sort: the values, and that the positions ascend."""
    for row, length, positions in zip(logits, lengths.tolist(), chosen.long(), strict=True):
        count = min(length, len(positions))
        assert (positions[count:] == -1).all()
        positions = positions[:count]
        assert (positions.diff() > 0).all()
        best = row[:length].sort(descending=True).values[:count]
        assert torch.equal(row[positions].sort(descending=True).values, best)


def masked_topk(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(columns >= lengths[:, None], -torch.inf).topk(min(k, logits.shape[1])).indices


def plain_read(sets: list) -> tuple[int, list]:
    """Calls that read every live column of each set and add it up; the fastest tile."""
    from triton_kernels import ragged_read_kernel

    def calls(tile: int, warps: int) -> list:
        made = []
        for logits, lengths in sets:
            grid = (logits.shape[0], -(-logits.shape[1] // tile))
            sums = torch.empty(grid, device=logits.device)
            launch = ragged_read_kernel[grid]
            made.append(functools.partial(launch, logits, lengths, sums, logits.stride(0), TILE=tile, num_warps=warps))
        return made

    timed = common.graph_times({tile: calls(*tile) for tile in READ_TILES}, target_ms=1.0, replays=5)
    best = min(timed, key=lambda tile: timed[tile]["us"])
    return best[0], calls(*best)


def our_calls(sets: list, k: int, **options) -> list:
    return [
        functools.partial(
            mqa.topk_indices, *each, k, **options, out=each[0].new_empty(len(each[0]), k, dtype=torch.int32)
        )
        for each in sets
    ]


def cuda_row(shape: tuple[int, int], sets: list, k: int, reads: dict[str, list]) -> dict:
    logits, lengths = sets[0]
    check(logits, lengths, mqa.topk_indices(logits, lengths, k))
    tables = {
        "block_tables": torch.randint(
            0, 2**20, (shape[0], -(-logits.shape[1] // BLOCK)), dtype=torch.int32, device=logits.device
        ),
        "block_size": BLOCK,
    }
    cold = {
        "ours": our_calls(sets, k),
        "ours, slots": our_calls(sets, k, **tables),
        "plain read": reads["cold"],
        "torch.topk + mask": [functools.partial(masked_topk, *each, k) for each in sets[:8]],
    }
    hot = {"ours": our_calls(sets[:1], k), "plain read": reads["hot"]}
    tokens = statistics.mean(int(lengths.sum()) for _, lengths in sets)
    times = common.graph_times(cold) | {f"{name}, hot": t for name, t in common.graph_times(hot).items()}
    useful = tokens * 4 + shape[0] * k * 4
    return {"rows": shape[0], "mean": shape[1], "k": k, "sets": len(sets), "useful_bytes": useful, "times": times}


def bench_values(device: torch.device) -> list[dict]:
    found = []
    for rows, mean in ((4, 65536), (64, 32768)):
        logits, lengths = make_sets(rows, mean, 1, device)[0]
        sets = {name: [(make(logits), lengths)] for name, make in VALUES.items()}
        for each in sets.values():
            check(*each[0], mqa.topk_indices(*each[0], 2048))
        times = common.graph_times({name: our_calls(each, 2048) for name, each in sets.items()})
        found.append({"rows": rows, "mean": mean, "k": 2048, "times": times})
    return found


def bench_uneven(device: torch.device) -> dict:
    logits = torch.randn(64, 500_224, device=device)
    uneven = torch.full((64,), 100, dtype=torch.int32, device=device)
    uneven[17] = 500_000
    cases = {"one of 500000 among 63 of 100": (logits, uneven), "it alone": (logits[17:18], uneven[17:18])}
    return common.graph_times({name: our_calls([case], 2048) for name, case in cases.items()})


def us(row: dict, name: str) -> str:
    return f"{row['times'][name]['us']:.2f}"


def ratio(row: dict, name: str, other: str) -> str:
    return f"{row['times'][name]['us'] / row['times'][other]['us']:.2f}"


def print_cuda(record: dict) -> None:
    header = ["shape", "k", "us", "read us", "read/ours", "hot us", "read us", "read/ours", "slots us", "torch us"]
    rows = [
        [
            f"{row['rows']} x {row['mean']}",
            str(row["k"]),
            us(row, "ours"),
            us(row, "plain read"),
            ratio(row, "plain read", "ours"),
            us(row, "ours, hot"),
            us(row, "plain read, hot"),
            ratio(row, "plain read, hot", "ours, hot"),
            us(row, "ours, slots"),
            us(row, "torch.topk + mask"),
        ]
        for row in record["rows"]
    ]
    print(common.format_table(header, rows))
    print("\nby values, k 2048, hot, us (times that of normal ones):")
    names = list(VALUES)
    lines = [
        [f"{row['rows']} x {row['mean']}"] + [f"{us(row, name)} ({ratio(row, name, 'normal')})" for name in names]
        for row in record["values"]
    ]
    print(common.format_table(["shape", *names], lines))
    print("\nuneven rows, k 2048, us: " + ", ".join(f"{name} {t['us']:.2f}" for name, t in record["uneven"].items()))


def run_cuda(arguments: argparse.Namespace, record: dict) -> pathlib.Path:
    device = torch.device("cuda", torch.cuda.current_device())
    for shape in arguments.shapes or CUDA_SHAPES:
        count = max(2, -(-COLD_BYTES // (shape[0] * shape[1] * 4)))
        sets = make_sets(*shape, count, device)
        tile, cold_reads = plain_read(sets)
        reads = {"cold": cold_reads, "hot": cold_reads[:1]}
        for k in arguments.k:
            row = cuda_row(shape, sets, k, reads) | {"read_tile": tile}
            record["rows"].append(row)
            times = "; ".join(f"{name} {t['us']:.2f}" for name, t in row["times"].items())
            print(f"{shape[0]} x {shape[1]} k {k}, us: {times}", flush=True)
        del sets, reads, cold_reads
        torch.cuda.empty_cache()
    record["values"] = bench_values(device)
    record["uneven"] = bench_uneven(device)
    print()
    print_cuda(record)
    return common.save(record, arguments.output)


def wall_us(contenders: dict) -> dict[str, dict]:
    series: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(common.REPLAYS + 1):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            series[name].append((time.perf_counter() - start) * 1e6)
    return {name: common.summary(measured[1:]) for name, measured in series.items()}


def run_cpu(arguments: argparse.Namespace, record: dict) -> pathlib.Path:
    for rows, width in arguments.shapes or CPU_SHAPES:
        normal = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        lengths = torch.full((rows,), width, dtype=torch.int32)
        for values, make in VALUES.items():
            logits = make(normal)
            for k in arguments.k:
                check(logits, lengths, mqa.topk_indices(logits, lengths, k))
                ours = functools.partial(mqa.topk_indices, logits, lengths, k)
                times = wall_us({"ours": ours, "torch.topk": functools.partial(logits.topk, k)})
                record["rows"].append({"rows": rows, "mean": width, "k": k, "values": values, "times": times})
    header = ["shape", "k", "values", "us", "torch us", "torch/ours"]
    lines = [
        [
            f"{row['rows']} x {row['mean']}", str(row["k"]), row["values"],
            us(row, "ours"), us(row, "torch.topk"), ratio(row, "torch.topk", "ours"),
        ]
        for row in record["rows"]
    ]  # fmt: skip
    print(common.format_table(header, lines))
    return common.save(record, arguments.output)


def main() -> None:
    def shape(text: str) -> tuple[int, int]:
        rows, mean = text.split("x")
        return int(rows), int(mean)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="ROWSxMEAN", help="for example 1x131072")
    parser.add_argument("--k", type=int, nargs="+", default=[2048, 1024, 512])
    parser.add_argument("--output", type=pathlib.Path, default=common.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    record = {"bench": "selection", **common.environment(torch.device("cuda" if on_gpu else "cpu"))}
    record |= {"method": METHOD if on_gpu else CPU_METHOD, "rows": []}
    print(f"{record['card']}, torch {record['torch']}, commit {record['commit']}", flush=True)
    path = (run_cuda if on_gpu else run_cpu)(arguments, record)
    print(f"\n{path}")
    print(plot.draw(path))


if __name__ == "__main__":
    main()
