"""PyTorch custom ops for the indexers of sparse-attention models: ``torch.ops.mqa.*``.

Importing this package registers the operators (schemas, CPU and CUDA kernels, fake kernels). Each operator has a
documented function here; those of the logits, the schedule and the selection take ``out=``.
"""

from pathlib import Path as _Path

from . import _library

_library.load()

# In a bare checkout the fake kernels lie beside this package, not inside it.
if not (_Path(__file__).parent / "meta").is_dir():
    __path__.append(str(_Path(__file__).parent.parent))

from . import meta as _meta  # noqa: E402, F401  (registers the fake kernels)
from .paged_logits import (  # noqa: E402
    compute_paged_mqa_logits_schedule,
    fp4_paged_mqa_logits,
    fp8_paged_mqa_logits,
    min_block_table_width,
    padded_seq_len,
    precompile_paged_mqa_logits,
)
from .quantize import (  # noqa: E402
    gather_k_cache_fp8,
    gather_k_cache_mxfp4,
    index_cache_block_bytes,
    quantize_k_cache_fp8,
    quantize_k_cache_mxfp4,
    quantize_q_fp8,
    quantize_q_mxfp4,
)
from .selection import topk_indices  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "compute_paged_mqa_logits_schedule",
    "fp4_paged_mqa_logits",
    "fp8_paged_mqa_logits",
    "gather_k_cache_fp8",
    "gather_k_cache_mxfp4",
    "index_cache_block_bytes",
    "min_block_table_width",
    "padded_seq_len",
    "precompile_paged_mqa_logits",
    "quantize_k_cache_fp8",
    "quantize_k_cache_mxfp4",
    "quantize_q_fp8",
    "quantize_q_mxfp4",
    "topk_indices",
]
