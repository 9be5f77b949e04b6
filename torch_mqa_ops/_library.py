"""Finds and loads the compiled libraries; the only place that knows where they lie."""

import re
import warnings
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_OLDEST_TORCH = (2, 11)


def load() -> None:
    """Loads _C_cpu (schemas and CPU kernels) and, when torch is a CUDA build, _C_cuda. Repeated calls do nothing."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(f"torch_mqa_ops needs torch 2.11 or later, and torch {torch.__version__} is installed")

    cpu = _FOLDER / "_C_cpu.abi3.so"
    if not cpu.exists():
        raise ImportError(
            f"torch_mqa_ops has not been built: {cpu.name} is missing from {_FOLDER}. In a checkout, run "
            "`python setup.py build_ext --inplace` (or `make build`)."
        )
    registered = torch._C._jit_get_schemas_for_operator("mqa::fp8_paged_mqa_logits")
    if registered and str(cpu.resolve()) not in torch.ops.loaded_libraries:
        raise ImportError(
            "torch.ops.mqa is already registered in this process, by another copy of torch_mqa_ops; "
            f"the one in {_FOLDER} was not loaded"
        )
    torch.ops.load_library(cpu)

    if torch.version.cuda is None:
        return
    cuda = _FOLDER / "_C_cuda.abi3.so"
    if cuda.exists():
        torch.ops.load_library(cuda)
    else:
        warnings.warn(
            "torch_mqa_ops was built without its CUDA library: torch.ops.mqa takes CPU tensors only. "
            "Build it where nvcc is found, or with MQA_CUDA=1 to learn why it is not.",
            stacklevel=3,
        )
