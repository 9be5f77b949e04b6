"""Plain Triton kernels that benches measure against: a linear read, a copy, a gather of paged blocks, rows."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(src, out, TILE: tl.constexpr):
    """One word per program, the sum of TILE consecutive int32: few writes, and every load is needed."""
    pid = tl.program_id(0)
    words = tl.load(src + pid.to(tl.int64) * TILE + tl.arange(0, TILE))
    tl.store(out + pid, tl.sum(words, 0))


@triton.jit
def copy_kernel(src, dst, num_words, TILE: tl.constexpr):
    """dst[:num_words] = src[:num_words] (int32). A memcpy node in a CUDA graph is much slower than this."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(dst + at, tl.load(src + at, mask=at < num_words), mask=at < num_words)


@triton.jit
def gather_kernel(kv, pages, out, num_tokens, BLOCK: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr):
    """out[t] = float32(sum of the WORDS value words of token t + its scale's bits), wrapping in int32.

    kv: int32 [blocks, BLOCK * (WORDS + 1)], block-planar like the FP8 cache (the values of all tokens, then a
    word of scale each); pages: int32 [num_tokens / BLOCK]; out: float32 [num_tokens]. Every byte is read.
    """
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = token < num_tokens
    block = tl.load(pages + token // BLOCK, mask=live, other=0).to(tl.int64) * (BLOCK * (WORDS + 1))
    value_at = (block + token % BLOCK * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    values = tl.load(kv + value_at, mask=live[:, None], other=0)
    scale = tl.load(kv + block + BLOCK * WORDS + token % BLOCK, mask=live, other=0)
    tl.store(out + token, (tl.sum(values, 1) + scale).to(tl.float32), mask=live)


@triton.jit
def ragged_read_kernel(rows, lengths, sums, pitch, TILE: tl.constexpr):
    """sums[row, tile] = the sum of TILE neighbouring float32 of the row, as far as they lie below its length."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    first = tl.program_id(1) * TILE
    if first < length:
        at = first + tl.arange(0, TILE)
        values = tl.load(rows + row.to(tl.int64) * pitch + at, mask=at < length, other=0.0)
        tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(values, 0))
