"""Attention of a packed forest: what a node computes does not depend on what else is in the forward.

A node sees its prompt and its own ancestors, but the slots between its ancestors hold other nodes, and which ones
depends on the drafts and on the neighbours. A masked slot adds an exact zero, yet it moves the others to other places
of a vectorised sum, and so changes the last bits. Here the keys of a row are split in two:

- its *prompt* slots hold the first tokens of its prompt, always the same ones in the same places. On a CPU a kernel
  computes them query by query (ops/cpu/prompt_attention.py). Elsewhere, and where a window hides some of them, torch's
  fused kernel computes them row by row, so that their number is the row's own.
- its *suffix* holds everything else. On a CPU a kernel visits, node by node, the slots that the node sees, in order of
  depth (ops/cpu/attention.py). Where that kernel does not fit, torch computes over all slots of the suffix. A score is
  a product of two short vectors, in float32. Sums over the slots are in float64, whose rounding error is some 2^-29 of
  a float32's last bit, so that their order does not reach the result.

The two parts are joined by their log-sums, as blocks are in FlashAttention (Dao et al. 2022). docs/hardware.md says
what this guarantees and what it costs. The functions here are torch code; views.py says which way serves where.

Shape letters: R rows, H kv heads, G query heads per kv head, n queries, m = G * n (filled up by `filled_queries`), S
slots, T suffix slots, E head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from dsbd_cli.engine.core.slots import PREFIX_STEP
from dsbd_cli.models.attention.metadata import MASKED, LayerMask, filled_queries

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made of the products of queries and keys, which are first multiplied by `scale`.

    softcap: scores become softcap * tanh(score / softcap). sinks [H * G]: a score per head that takes weight and has no
    value. bias [R or 1, H * G, n, S] is added to the scores (T5).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True where products are scaled and nothing else."""
        return self.softcap is None and self.sinks is None and self.bias is None


def by_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor | None:
    """Return attention [R, n, H * G, E] of query [R, H * G, n, E] over all slots of key and value [R, H, S, E] at once.

    mask [R, 1, n, S] is added to the scores. Returns None where the mask is missing, differs from head to head or comes
    with a bias: torch's own function serves then.
    """
    if scoring.softcap is not None or scoring.sinks is not None:
        return _written_out(query, key, value, mask, scoring).transpose(1, 2).contiguous()
    if mask is None or mask.shape[1] != 1 or scoring.bias is not None:
        return None
    return _fused(query, key, value, mask, scoring.scale)


def by_blocks(first: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Compute `by_mask`, without a bias, for a prompt whose tokens lie from slot `first` on in all rows.

    Queries attend in blocks of PREFIX_STEP tokens of the prompt, each block over the slots up to its own end. So what
    is computed for a token depends on the tokens before it alone: neither on where the reading began nor on how long
    the prompt is.
    """
    parts = []
    for start in range(0, query.shape[2], PREFIX_STEP):
        end = min(start + PREFIX_STEP, query.shape[2])
        seen = slice(first + end)
        states = query[:, :, start:end], key[:, :, seen], value[:, :, seen], mask[:, :, start:end, seen]
        part = by_mask(*states, scoring)
        assert part is not None, "a mask that all heads share"
        parts.append(part)
    return torch.cat(parts, 1)


def over_all_slots(mask: LayerMask, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute `by_mask` with a mask of ours, without a bias; `by_blocks` where a prompt is read in blocks."""
    if mask.first_slot is not None:
        return by_blocks(mask.first_slot, query, key, value, mask.additive, scoring)
    out = by_mask(query, key, value, mask.additive, scoring)
    assert out is not None, "a mask that all heads share"
    return out


def by_kernel(mask: LayerMask, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention [R, n, H * G, E] by the kernel of a GPU; in torch where it does not support the heads."""
    split = mask.split
    assert split is not None
    assert split.kernel is not None
    out = split.kernel(query, key, value, mask.seen, split.prompt, scoring.scale)
    if out is not None:
        return out.transpose(1, 2).contiguous()
    return (by_parts if split.exact else over_all_slots)(mask.unsplit, query, key, value, scoring)


def by_parts(mask: LayerMask, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return attention [R, n, H * G, E]: the fused kernel computes the prompt slots, sums in float64 the suffix, and
    their log-sums join both."""
    heads, count = query.shape[1:3]
    groups, split = heads // key.shape[1], mask.split
    assert split is not None
    grouped = _grouped(query, key.shape[1])
    prompts: Tensor | None = None
    if max(split.prompt_slots):
        hidden = mask.prompt_mask(grouped.shape[2])
        part = prompt_attention(split.prompt_slots, query, key, value, hidden, scoring.scale)
        prompts, log_sum = (part[:, :, : groups * count].unflatten(2, (groups, count)) for part in part)
    if not split.width:
        assert prompts is not None
        return prompts.flatten(1, 2).transpose(1, 2).contiguous()
    scores = torch.matmul(grouped.to(torch.float32), split.suffix_of(key, torch.float32).transpose(2, 3))
    scores = scores[:, :, : groups * count].unflatten(2, (groups, count))  # [R, H, G, n, T]
    scale, softcap = scoring.scale, scoring.softcap
    if softcap is not None:
        scores, scale = torch.tanh(scores.to(torch.float64) * (scale / softcap)).to(torch.float32), softcap
    scores = torch.add(mask.suffix_mask, scores, alpha=scale * LOG2_E)  # to base 2
    if scoring.bias is not None:  # it covers all slots, and with a bias all slots are suffix
        scores.add_(scoring.bias.to(torch.float32).unflatten(1, (-1, groups)), alpha=LOG2_E)
    highest = scores.amax(-1, keepdim=True)
    if prompts is not None:
        log_sum = log_sum.unsqueeze(-1) * LOG2_E
        highest = torch.maximum(highest, log_sum)
    # float64 here too: in float32 torch may compute the last few numbers of a tensor with another exp2
    weights = scores.sub_(highest).to(torch.float64).exp2_()
    total = weights.sum(-1, keepdim=True)
    values = split.suffix_of(value, torch.float64)
    out = torch.matmul(weights.flatten(2, 3), values).unflatten(2, (groups, count))
    if prompts is not None:
        share = (log_sum - highest).to(torch.float64).exp2_()
        out.addcmul_(prompts.to(torch.float64), share)
        total.add_(share)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(torch.float32).view(-1, groups, 1, 1) * LOG2_E
        total.add_((sink - highest).to(torch.float64).exp2_())
    return out.div_(total).flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous()


def prompt_attention(
    prompt_slots: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention over the prompt slots alone, [R, H, m, E], and its natural log-sums [R, H, m] float32, which are
    the lowest float32 where a row has no prompt slots.

    prompt_slots: leading slots of each row. mask: [R, 1, m, S or fewer], added to the scores; None where nothing is
    masked.
    """
    grouped = _grouped(query, key.shape[1])
    _, heads, queries, _ = grouped.shape
    outs, sums = [], []
    for slots, run in groupby(range(len(prompt_slots)), prompt_slots.__getitem__):
        first, *others = run
        part = slice(first, first + 1 + len(others))
        if not slots:
            outs.append(grouped.new_zeros(1 + len(others), heads, queries, value.shape[-1]))
            sums.append(grouped.new_full((1 + len(others), heads, queries), MASKED, dtype=torch.float32))
            continue
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped[part],
            key[part, :, :slots],
            value[part, :, :slots],
            attn_mask=None if mask is None else mask[part, ..., :slots],
            scale=scale,
        )
        outs.append(out)
        sums.append(log_sum)
    if len(outs) == 1:
        return outs[0], sums[0]
    return torch.cat(outs), torch.cat(sums)


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """Reshape a query [R, H * G, n, E] to [R, H, m, E], filled up with zeros to m queries."""
    rows, heads, count, dim = query.shape
    queries = heads // kv_heads * count
    missing = filled_queries(heads, kv_heads, count, dim) - queries
    grouped = query.reshape(rows, kv_heads, queries, dim)
    return nn.functional.pad(grouped, (0, 0, 0, missing)) if missing else grouped


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return [R, n, H * G, E] by torch's kernel over all slots at once.

    Query heads of one kv head become further queries of that head, so that only the small mask is repeated. In a
    prefill so long that the repeated mask would be larger than repeated keys and values, these are repeated instead.
    """
    rows, heads, count, dim = query.shape
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    fused = nn.functional.scaled_dot_product_attention
    if groups == 1 or count > 2 * kv_heads * dim:
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return fused(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2).contiguous()
    grouped, wide = query.reshape(rows, kv_heads, groups * count, dim), mask.repeat(1, 1, groups, 1)
    out = fused(grouped, key, value, attn_mask=wide, scale=scale)
    return out.reshape(rows, heads, count, value.shape[-1]).transpose(1, 2).contiguous()


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute attention with a softcap or sinks, which the fused kernel does not offer, in float32.

    Returns [R, H * G, n, E] in the dtype of the query.
    """
    rows, heads, count, dim = query.shape
    groups, scale, softcap = heads // key.shape[1], scoring.scale, scoring.softcap
    grouped = query.reshape(rows, key.shape[1], groups, count, dim).to(torch.float32)
    scores = grouped @ key.unsqueeze(2).transpose(3, 4).to(torch.float32)
    scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
    if mask is None and count > 1:  # transformers passes no mask for plain causal attention
        mask = torch.ones(count, key.shape[2], dtype=torch.bool, device=key.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask.unsqueeze(1), MASKED)
    elif mask is not None:
        scores = scores + mask.unsqueeze(1)
    out = torch.softmax(scores, -1) @ value.unsqueeze(2).to(torch.float32)
    if scoring.sinks is not None:  # a column more would put the rows at other places of memory, which changes bits
        sinks = scoring.sinks.to(torch.float64).view(1, -1, groups, 1, 1)
        share = (scores.to(torch.float64).logsumexp(-1, keepdim=True) - sinks).sigmoid_()
        out = (out.to(torch.float64) * share).to(torch.float32)
    return out.flatten(1, 2).to(query.dtype)
