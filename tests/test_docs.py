"""Every example that a reader may paste runs."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import torch_mqa_ops
import torch_mqa_ops.paged_logits
import torch_mqa_ops.quantize
import torch_mqa_ops.selection

ROOT = Path(__file__).resolve().parent.parent


MODULES = (torch_mqa_ops.paged_logits, torch_mqa_ops.quantize, torch_mqa_ops.selection)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_docstrings(module) -> None:
    torch.manual_seed(0)
    result = doctest.testmod(module, extraglobs={"torch": torch, "torch_mqa_ops": torch_mqa_ops})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_function_has_an_example() -> None:
    for name in torch_mqa_ops.__all__:
        text = getattr(torch_mqa_ops, name).__doc__
        assert "Raises:" in text, name
        assert ">>>" in text or name in ("padded_seq_len", "min_block_table_width"), name


TENSOR_FUNCTIONS = (
    "fp8_paged_mqa_logits",
    "fp4_paged_mqa_logits",
    "compute_paged_mqa_logits_schedule",
    "quantize_q_fp8",
    "quantize_k_cache_fp8",
    "gather_k_cache_fp8",
    "quantize_q_mxfp4",
    "quantize_k_cache_mxfp4",
    "gather_k_cache_mxfp4",
    "topk_indices",
)


@pytest.mark.parametrize("name", TENSOR_FUNCTIONS)
def test_every_tensor_argument_has_dtype_shape_and_strides(name) -> None:
    function = getattr(torch_mqa_ops, name)
    arguments = function.__doc__.partition("Args:")[2].partition("Returns:")[0].partition("Raises:")[0]
    entries = {}
    for entry in re.split(r"\n {8}(?=\w+: )", arguments)[1:]:
        argument, _, text = entry.partition(": ")
        entries[argument] = text
    signature = inspect.signature(function)
    assert list(entries) == list(signature.parameters)
    for argument, parameter in signature.parameters.items():
        if "Tensor" not in str(parameter.annotation):
            continue
        text = entries[argument]
        if argument != "out":
            assert re.search(r"(float|int|uint)\d+\w*.*``\[.*\]``", text), (argument, text)
        assert re.search("contiguous|strides?|as in :func:", text), (argument, text)


def test_concurrent_writers_are_ruled_out() -> None:
    for text in (torch_mqa_ops.fp8_paged_mqa_logits.__doc__, (ROOT / "README.md").read_text()):
        assert "concurrent writer touches has unspecified values" in " ".join(text.split())


def test_readme(device: str) -> None:
    """The README's blocks, in order, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict = {}
    for index, block in enumerate(blocks):
        source = block if index else block.replace('"cuda" if torch.cuda.is_available() else "cpu"', repr(device))
        exec(compile(source, f"README block {index}", "exec"), namespace)
    chosen = namespace["chosen"]
    assert chosen.shape == (2, 16)
    assert (chosen[1] < (512 if device == "cuda" else 300)).all()  # the third block, for GPUs, changes the lengths
    assert "print(chosen)" in blocks[2].partition("graph.replay()")[2], "a replay whose result nobody reads"
