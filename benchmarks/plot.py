"""The picture of a result file: `python benchmarks/plot.py RESULT.json`."""

import json
import pathlib
import sys


def draw(path: pathlib.Path) -> str:
    """Writes the picture beside the file; says where, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return f"no plot: matplotlib is not installed here; elsewhere, python benchmarks/plot.py {path.name}"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads(path.read_text())
    figure, axes = pyplot.subplots(figsize=(9, 6.5), layout="constrained")
    (_draw_selection if record["bench"] == "selection" else _draw_logits)(axes, record)
    axes.grid(which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    return str(picture)


def _draw_selection(axes, record: dict) -> None:
    """Bars for the shapes, one for each k and contender."""
    rows = record["rows"]
    shapes = list(dict.fromkeys((row["rows"], row["mean"]) for row in rows))
    if "values" in rows[0]:
        rows = [row for row in rows if row["values"] == "normal"]
    names = [(k, name) for k in dict.fromkeys(row["k"] for row in rows) for name in rows[0]["times"]]
    for i, (k, name) in enumerate(names):
        heights = [
            row["times"][name]["us"]
            for shape in shapes
            for row in rows
            if (row["rows"], row["mean"], row["k"]) == (*shape, k)
        ]
        places = [at + 0.8 * (i / len(names) - 0.5) for at in range(len(shapes))]
        axes.bar(places, heights, width=0.75 / len(names), align="edge", label=f"{name}, k {k}")
    axes.set(yscale="log", ylabel="us per call")
    axes.set_xticks(range(len(shapes)), [f"{rows} x {mean}" for rows, mean in shapes])
    axes.set_title(f"topk_indices, {record['card']}, {record['date'][:10]}, {record['commit']}")


def _draw_logits(axes, record: dict) -> None:
    rows = record["rows"]
    markers = dict(zip(sorted({row["heads"] for row in rows}, reverse=True), "o^sDv", strict=False))
    for next_n, heads in sorted({(row["next_n"], row["heads"]) for row in rows}):
        points = sorted(
            (row["useful_bytes"] / 1e6, row["times"]["ours"]["us"])
            for row in rows
            if (row["next_n"], row["heads"]) == (next_n, heads)
        )
        style = {"color": f"C{(next_n - 1) % 10}", "marker": markers[heads], "markersize": 5}
        axes.plot(*zip(*points, strict=True), **style, linewidth=0.8, label=f"ours, n {next_n}, H {heads}")
    if record["peer"]:
        points = [
            (row["useful_bytes"] / 1e6, row["times"][record["peer"]]["us"])
            for row in rows
            if record["peer"] in row["times"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "x", color="0.3", markersize=5, label=f"{record['peer']}, fp8 cache")
    # The gather writes one float32 per token whatever n is: its own bytes, averaged over the rows of a shape.
    gather: dict[float, list[float]] = {}
    for row in rows:
        gather.setdefault(row["gather_bytes"] / 1e6, []).append(row["times"]["plain gather"]["us"])
    points = sorted((megabytes, sum(us) / len(us)) for megabytes, us in gather.items())
    axes.plot(*zip(*points, strict=True), "k-s", markersize=3, linewidth=1.2, label="plain gather")
    ends = [f(row["useful_bytes"] / 1e6 for row in rows) for f in (min, max)]
    for name, key, style in (("linear read", "read_gbs", "k--"), ("copy", "copy_gbs", "k:")):
        rate = record["ceilings"][key]
        axes.plot(ends, [1e3 * x / rate for x in ends], style, linewidth=1, label=f"{name}, {rate:.0f} GB/s")
    axes.set(xscale="log", yscale="log", xlabel="useful MB per call", ylabel="us per call")
    op = "fp4_paged_mqa_logits" if record.get("cache") == "mxfp4" else "fp8_paged_mqa_logits"
    axes.set_title(f"{op}, {record['card']}, {record['date'][:10]}, {record['commit']}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(draw(pathlib.Path(name)))
