"""What the functions do around the operators: check Python types and that no gradient is asked for; report writes.

Values, shapes, dtypes and devices are checked once, by the operators.
"""

from collections.abc import Iterable
from typing import Any

import torch


def need_tensor(function: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Raises TypeError unless ``value`` is a tensor, RuntimeError if a gradient could be expected through it."""
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {_type(value)}")
    if value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{function}: {name} must not require grad, for there is no backward (call it under torch.no_grad()), "
            "got requires_grad=True"
        )


def need_int(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is an int (a SymInt while tracing); bool is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{function}: {name} must be an int, got {_type(value)}")


def need_float(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a float or an int; bool is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{function}: {name} must be a float, got {_type(value)}")


def need_bool(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a bool, got {_type(value)}")


def need_dtype(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a torch.dtype."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{function}: {name} must be a torch.dtype, got {_type(value)}")


def need_iterable(function: str, name: str, value: Any, members: type) -> list:
    """The members of ``value``; raises TypeError for a str, what cannot be iterated over, or a member of other type."""
    rule = f"{function}: {name} must be an iterable of {members.__name__}"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{rule}, got {_type(value)}")
    value = list(value)
    for member in value:
        if isinstance(member, bool) or not isinstance(member, members):
            raise TypeError(f"{rule}, got one with a member of type {_type(member)}")
    return value


def need_variant(function: str, name: str, value: Any) -> None:
    """Raises unless ``value`` names a cache format."""
    if not isinstance(value, str):
        raise TypeError(f"{function}: {name} must be a str, got {_type(value)}")
    if value not in ("fp8", "fp4"):
        raise RuntimeError(f"{function}: {name} must be 'fp8' or 'fp4', got {value!r}")


def need_device(function: str, name: str, value: Any) -> torch.device:
    """The device that ``value`` names; raises if it names none."""
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
        raise TypeError(f"{function}: {name} must be a torch.device, str or int, got {_type(value)}")
    try:
        device = torch.device(value)
    except (RuntimeError, ValueError):  # ValueError: an int past 64 bits
        device = None
    # torch takes any index for the CPU, but there is only one.
    if device is None or (device.type == "cpu" and device.index not in (None, 0)):
        raise RuntimeError(f"{function}: {name} must be a CPU or CUDA device, got {str(value)!r}")
    return device


def _type(value: Any) -> str:
    return type(value).__name__


def wrote(tensor: torch.Tensor) -> None:
    """Bumps the version of a caller's tensor, so that autograd refuses to go back through its old contents.

    Here, not in the operators: the stable ABI has no such call, and a Python kernel under the operators would cost
    5 us, compiled graphs included. Those count their writes themselves.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensor)
