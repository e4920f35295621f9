"""A kernel for the best tokens of every node, with one program per node. It selects by radix, and sums up the
distribution in the first reading of the logits.

Letters: R requests, n nodes, C candidates per node, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops.triton.distribution import NEG_INF, REGISTERS, is_finite, ordered

MOST = 4096  # candidates per node at most
BLOCK = 2048
ROUNDS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 4}  # of 8 bits: what a number fills in float32


@triton.jit(do_not_specialize=["row_stride", "node_stride", "nodes", "vocabulary", "count"])
def candidates_kernel(
    logits,
    out_tokens,
    out_logprobs,
    row_stride,
    node_stride,
    nodes,
    vocabulary,
    count,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Select the `count` largest logits of a node, sorted by token id, with their log-probabilities. Of equal logits
    the lower token id is taken."""
    node = tl.program_id(0).to(tl.int64)
    base = logits + (node // nodes) * row_stride + (node % nodes) * node_stride
    here = tl.arange(0, BLOCK)
    bins = tl.arange(0, 256)
    best = tl.full((), NEG_INF, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    broken = tl.full((), 0, tl.int32)
    prefix = tl.full((), 0, tl.uint32)
    above = tl.full((), 0, tl.int32)  # numbers whose leading bits are larger than `prefix`
    for turn in tl.static_range(ROUNDS):
        counted = tl.zeros((256,), tl.int32)
        for start in tl.range(0, vocabulary, BLOCK):
            at = start + here
            inside = at < vocabulary
            x = tl.load(base + at, mask=inside, other=NEG_INF).to(tl.float32)
            key = ordered(x)
            if turn == 0:
                broken += tl.sum((x != x).to(tl.int32), 0)
                top = tl.maximum(best, tl.max(x, 0))
                safe = tl.where(top == NEG_INF, 0.0, top)
                total = total * tl.exp(best - safe) + tl.sum(tl.exp(x - safe), 0)
                best = top
            else:
                inside = inside & ((key >> (32 - 8 * turn)) == prefix)
            digit = ((key >> (24 - 8 * turn)) & 255).to(tl.int32)
            counted += tl.histogram(digit, 256, mask=inside)
        reaching = tl.cumsum(counted, 0, reverse=True)
        chosen = tl.sum((reaching >= count - above).to(tl.int32), 0) - 1
        above += tl.sum(tl.where(bins == chosen, reaching - counted, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    ties = count - above  # how many of those that equal the last one taken are taken
    shift: tl.constexpr = 32 - 8 * ROUNDS
    taken = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    valid = is_finite(best) & (broken == 0)
    for start in tl.range(0, vocabulary, BLOCK):
        at = start + here
        inside = at < vocabulary
        x = tl.load(base + at, mask=inside, other=NEG_INF).to(tl.float32)
        leading = ordered(x) >> shift
        tied = inside & (leading == prefix)
        rank = equal + tl.cumsum(tied.to(tl.int32), 0)
        keep = (inside & (leading > prefix)) | (tied & (rank <= ties))
        index = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
        to = node * count + index
        tl.store(out_tokens + to, at.to(tl.int64), mask=keep)
        tl.store(out_logprobs + to, tl.where(valid, (x - best) - tl.log(total), float("nan")), mask=keep)
        taken += tl.sum(keep.to(tl.int32), 0)
        equal += tl.sum(tied.to(tl.int32), 0)


def fits(logits: Tensor, count: int) -> bool:
    """Return whether the kernel supports these logits [R, n, V] and this number of candidates."""
    return count <= MOST and logits.dtype in ROUNDS and logits.stride(-1) == 1 and logits.dim() == 3


@torch.library.custom_op("dsbd::candidates", mutates_args=())
def candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [R, n, C] int64, ascending, and log-probabilities [R, n, C] float32 of the C = `count` best
    tokens of every node, as `top_candidates` of engine/core/candidates.py does. logits [R, n, V]."""
    rows, nodes, vocabulary = logits.shape
    tokens = torch.empty(rows, nodes, count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, nodes, count, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(logits):
        candidates_kernel[(rows * nodes,)](
            *(logits, tokens, logprobs, logits.stride(0), logits.stride(1), nodes, vocabulary, count),
            BLOCK=block,
            ROUNDS=ROUNDS[logits.dtype],
            num_warps=8,
            enable_fp_fusion=False,
            maxnreg=REGISTERS,
        )
    return tokens, logprobs


@candidates.register_fake
def _(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], count)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)
