"""Fake kernels: what the operators return for tensors without data, so that torch.compile and torch.export can trace
them.

Installed as ``torch_mqa_ops.meta``. Imported under another name, it would register every fake twice.
"""

if __name__ != "torch_mqa_ops.meta":
    raise ImportError("meta is part of torch_mqa_ops: import torch_mqa_ops")

from . import paged_logits, quantize, selection  # noqa: F401
