"""The demo runs as a user runs it, and its figures are those of a decode loop that reads its cache correctly."""

from __future__ import annotations

import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BATCH = 4
REQUESTS = 8
RATE = "tokens/s, compiling and prefill excluded"


def run_demo(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    # Threads that wait by spinning slow each other down many times over on a machine with other work.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "decode_loop.py"), *arguments],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def read_table(stdout: str) -> dict[str, list[str]]:
    """Title -> the cell of each pass; columns are set apart by two spaces or more."""
    rows = (re.split(r" {2,}", line.strip()) for line in stdout.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) in (3, 5)}


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.split()[0]) for cell in cells]


def check_picture(path: Path) -> None:
    """Not blank: white ground, a grey curve, many blue and few red marks."""
    image = pytest.importorskip("matplotlib.image").imread(path)[..., :3]
    height, width, _ = image.shape
    assert height > 600 and width > 800
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    painted = 1 - ((red == 1) & (green == 1) & (blue == 1)).mean()
    assert 0.03 < painted < 0.7
    grey = (abs(red - green) < 0.01) & (abs(green - blue) < 0.01) & (red > 0.5) & (red < 0.95)
    assert grey.sum() > 2000
    assert ((blue > red + 0.3) & (blue > 0.6)).sum() > 2000


def test_default_run(device: str, tmp_path: Path) -> None:
    steps, picture = 8, tmp_path / "scores.png"
    result = run_demo("--steps", str(steps), "--device", device, "--output", str(picture))
    assert "compiled" in result.stdout and ("CUDA graph" in result.stdout) == (device == "cuda")
    assert "untrained" in result.stdout
    table = read_table(result.stdout)
    assert table["bytes fed per request and step (next_n)"] == ["1", "2"]

    taken, decoded = numbers(table["decode steps"]), numbers(table["tokens (bytes) decoded"])
    assert taken[0] == steps and 0.5 * steps <= taken[1] <= steps
    assert decoded[0] == BATCH * steps
    assert BATCH * steps <= decoded[1] <= BATCH * steps + REQUESTS  # a held draft may overshoot by one

    rates, milliseconds = numbers(table[RATE]), numbers(table["ms per step"])
    for rate, count, n, ms in zip(rates, decoded, taken, milliseconds, strict=True):
        assert rate == pytest.approx(count / (n * ms / 1e3), rel=0.02)

    for share in numbers(table["exact float32 top-64 found"]):
        assert 90 <= share <= 100
    size = int(re.search(r"pool of (\d+)", result.stdout).group(1))
    assert min(numbers(table[f"pages handed out (pool of {size}, reused)"])) > size  # some were given out twice
    assert table["index cache"] == ["FP8", "FP8"]
    assert table["index cache per token and layer"] == ["132 B", "132 B"]
    assert table["the same keys in bfloat16"] == ["256 B", "256 B"]
    assert table["the same keys in float32"] == ["512 B", "512 B"]

    # No terminal here: plain lines.
    assert "next_n 2" in result.stderr and "\r" not in result.stderr
    check_picture(picture)


def test_both_formats_side_by_side(device: str, tmp_path: Path) -> None:
    options = ("--steps", "4", "--device", device, "--no-compile", "--output", str(tmp_path / "scores.png"))
    result = run_demo("--cache", "mxfp4", *options)
    table = read_table(result.stdout)
    assert table["index cache"] == ["FP8", "FP8", "MXFP4", "MXFP4"]
    assert table["index cache per token and layer"] == ["132 B", "132 B", "68 B", "68 B"]
    shares = numbers(table["exact float32 top-64 found"])
    assert min(shares[:2]) >= 90 and all(85 <= share < fp8 for share, fp8 in zip(shares[2:], shares[:2], strict=True))
    alone = read_table(run_demo(*options).stdout)
    assert [cells[:2] for title, cells in table.items() if title not in (RATE, "ms per step")] == [
        cells for title, cells in alone.items() if title not in (RATE, "ms per step")
    ]


def timeless(stdout: str) -> dict[str, list[str]]:
    return {title: cells for title, cells in read_table(stdout).items() if title not in (RATE, "ms per step")}


def test_guesses_come_from_the_cache(device: str, tmp_path: Path) -> None:
    """Random bytes can be guessed only by finding an earlier copy, further back than top-k would reach by chance."""
    generator = random.Random(7)
    repeated, fresh = tmp_path / "repeated", tmp_path / "fresh"
    repeated.write_bytes(generator.randbytes(80) * 15)
    fresh.write_bytes(generator.randbytes(1200))
    options = ("--steps", "8", "--device", device, "--no-compile", "--output", str(tmp_path / "scores.png"))

    found = run_demo("--text", str(repeated), *options)
    assert min(numbers(read_table(found.stdout)["next byte guessed right"])) >= 98
    held = float(read_table(found.stdout)["second-byte drafts that held"][1].split()[0])
    steps = numbers(read_table(found.stdout)["decode steps"])
    assert held > 50 and steps[1] < steps[0]
    assert timeless(run_demo("--text", str(repeated), *options).stdout) == timeless(found.stdout)

    nothing = run_demo("--text", str(fresh), *options)
    assert max(numbers(read_table(nothing.stdout)["next byte guessed right"])) <= 10


@pytest.mark.parametrize("misses", [0, 3])
def test_legend_names_misses_where_there_are_any(misses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kwargs: figures.append(figure))
    demo = runpy.run_path(str(ROOT / "examples" / "decode_loop.py"))
    scores = torch.arange(200.0)
    demo["draw"](bytes(200), scores, scores, torch.arange(100 - misses, 200 - misses), "FP8", Path("unused.png"))
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert [label for label in labels if "not selected" in label] == (
        [f"in the exact float32 top-100 but not selected ({misses})"] if misses else []
    )


def test_help_covers_every_option() -> None:
    text = " ".join(run_demo("--help").stdout.split())
    for option, words in (
        ("--text TEXT", "any file"),
        ("--steps STEPS", "steps of"),
        ("--device {cpu,cuda}", "where to decode"),
        ("--cache {fp8,mxfp4}", "format of the index keys"),
        ("--output OUTPUT", "file to save the picture to (default: decode_loop.png)"),
        ("--no-compile", "run the step eagerly"),
    ):
        assert f"{option} {words}" in text


def test_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"too little")
    result = run_demo("--text", str(short), "--device", "cpu", expect=2)
    assert "the text must have" in result.stderr and "got 10" in result.stderr
    for unreadable, reason in ((tmp_path / "absent", "No such file or directory"), (tmp_path, "Is a directory")):
        result = run_demo("--text", str(unreadable), "--device", "cpu", expect=2)
        assert result.stderr.endswith(f"--text must be a file that can be read, got {unreadable}: {reason}\n")
        assert "Traceback" not in result.stderr
    assert "--steps must be from 4 to 1000, got 0" in run_demo("--steps", "0", "--device", "cpu", expect=2).stderr
