"""What the functions do around the operators: check Python types and that no gradient is asked for; report writes.

Values, shapes, dtypes and devices are checked once, by the operators.
"""

from collections.abc import Iterable
from typing import Any

import torch


def need_tensor(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises TypeError unless ``value`` is a tensor, RuntimeError if a gradient could be expected through it."""
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad, and torch_mqa_ops has no backward: call it under torch.no_grad()")


def need_int(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is an int (a SymInt while tracing); bool is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def need_bool(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def need_dtype(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a torch.dtype."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {type(value).__name__}")


def need_iterable(name: str, value: Any) -> list:
    """The members of ``value``; raises TypeError for a str or what cannot be iterated over."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be an iterable of values, got {type(value).__name__}")
    return list(value)


def need_variant(function: str, name: str, value: Any) -> None:
    """Raises unless ``value`` names a cache format."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")
    if value not in ("fp8", "fp4"):
        raise RuntimeError(f"{function}: {name} must be 'fp8' or 'fp4', got {value!r}")


def wrote(tensor: torch.Tensor) -> None:
    """Bumps the version of a caller's tensor, so that autograd refuses to go back through its old contents.

    Here, not in the operators: the stable ABI has no such call, and a Python kernel under the operators would cost
    5 us, compiled graphs included. Those count their writes themselves.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensor)
