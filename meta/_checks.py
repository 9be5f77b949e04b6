"""The argument rules of csrc/common/check.h for tensors without data, in the same order and the same words.

What only memory can show (alignment of a base address, overlap of two tensors) is left to the kernels, and so is what a
symbolic size cannot decide.
"""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require(op: str, condition, text) -> None:
    """``text`` is called only if the condition (a bool or SymBool) fails."""
    torch._check(condition, lambda: f"{op}: {text()}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choice_text(values) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def check_dtype(op: str, name: str, dtype: torch.dtype, *allowed: torch.dtype) -> None:
    names = choice_text(dtype_name(value) for value in allowed)
    require(op, dtype in allowed, lambda: f"{name} must be {names}, got {dtype_name(dtype)}")


def check_rank(op: str, name: str, tensor: torch.Tensor, rank: int, shape: str) -> None:
    require(op, tensor.dim() == rank, lambda: f"{name} must have shape {shape}, got {list(tensor.shape)}")


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: str, sizes) -> None:
    def text() -> str:
        return f"{name} must have shape {shape} = {list(sizes)}, got {list(tensor.shape)}"

    require(op, tensor.dim() == len(sizes), text)
    for have, want in zip(tensor.shape, sizes, strict=True):
        require(op, have == want, text)


def check_choice(op: str, what: str, value, *allowed: int) -> None:
    if isinstance(value, int):
        condition = value in allowed
    else:
        from torch.fx.experimental.symbolic_shapes import sym_or

        condition = sym_or(*(value == candidate for candidate in allowed))
    require(op, condition, lambda: f"{what} of {choice_text(allowed)}, got {value}")


def check_range(op: str, what: str, value, low: int, high: int) -> None:
    def text() -> str:
        return f"{what} from {low} to {high}, got {value}"

    require(op, value >= low, text)
    require(op, value <= high, text)


def check_inner_contiguous(op: str, name: str, tensor: torch.Tensor, count: int = 1) -> None:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    words = {1: "last dimension", 2: "last two dimensions", 3: "last three dimensions"}[count]
    expected = 1
    for dim in range(tensor.dim() - 1, tensor.dim() - 1 - count, -1):
        size, stride = tensor.size(dim), tensor.stride(dim)
        if not guard_or_false(size == 1):
            require(
                op,
                stride == expected,
                lambda: (
                    f"{name} must be contiguous in its {words}, got shape {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())}"
                ),
            )
        expected = expected * size


def check_device(op: str, name: str, tensor: torch.Tensor, reference_name: str, reference: torch.Tensor) -> None:
    require(
        op,
        tensor.device == reference.device,
        lambda: f"{name} must be on {reference.device} like {reference_name}, got {tensor.device}",
    )


def check_cache(
    op: str, name: str, cache: torch.Tensor, format: str, head_dim, interleaved_scales: bool = False
) -> None:
    """``format`` is "fp8" or "mxfp4"."""
    shape = "[blocks, S, 1, D + 4]" if format == "fp8" else "[blocks, S, 1, D/2 + D/32]"
    token_bytes = head_dim + 4 if format == "fp8" else head_dim // 2 + head_dim // 32
    check_rank(op, name, cache, 4, shape)
    check_dtype(op, name, cache.dtype, torch.uint8)
    check_choice(op, f"{name} must have S", cache.size(1), 16, 32, 64, 128, 256)
    check_shape(op, name, cache, shape, [cache.size(0), cache.size(1), 1, token_bytes])
    check_inner_contiguous(op, name, cache, 3)

    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if guard_or_true(cache.size(0) > 1):
        require(
            op,
            cache.stride(0) % 16 == 0,
            lambda: f"{name} must have a block stride that is a multiple of 16 bytes, got {cache.stride(0)}",
        )
    if interleaved_scales:
        require(
            op,
            cache.size(1) == 128,
            lambda: f"is_kv_sf_interleaved must be False unless {name} has S = 128, got True with S = {cache.size(1)}",
        )


def check_no_internal_overlap(op: str, name: str, tensor: torch.Tensor) -> None:
    sizes, strides = tensor.shape, tensor.stride()
    if not all(isinstance(value, int) for value in (*sizes, *strides)) or tensor.numel() == 0:
        return
    inner = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        require(
            op,
            stride >= inner,
            lambda: f"{name} must not overlap itself, got shape {list(sizes)} with strides {list(strides)}",
        )
        inner += (size - 1) * stride
