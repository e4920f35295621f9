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
what this guarantees and what it costs.

Shape letters: R rows, H kv heads, G query heads per kv head, n queries, m = G * n (filled up by `filled_queries`), S
slots, T suffix slots, E head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dsbd_cli.engine.core.slots import PREFIX_STEP
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.attention_metadata import MASKED, AttentionMetadata, filled_queries
from dsbd_cli.ops.cpu import prompt_attention as cpu_prompts
from dsbd_cli.ops.cpu.attention import takes

LEAST_DIM = 32  # torch uses other kernels for smaller heads
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


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt that is read in blocks: n tokens from slot `first` on, the same in all rows.

    Queries attend in blocks of PREFIX_STEP tokens of the prompt, each block over the slots up to its own end. So what
    is computed for a token depends on the tokens before it alone: neither on where the reading began nor on how long
    the prompt is.
    """

    first: int

    @classmethod
    def of(cls, batch: ForestInput) -> Blocks | None:
        """Return the blocks of a batch that reads a prompt on the CPU. None for other batches and where bits are not
        promised. On other devices torch's kernels are checked at load."""
        if not batch.chain or batch.prompt_slots is None or batch.tokens.device.type != "cpu":
            return None
        return cls(batch.prompt_slots[0])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
        """Compute `attention` block by block."""
        parts = []
        for start in range(0, query.shape[2], PREFIX_STEP):
            end = min(start + PREFIX_STEP, query.shape[2])
            seen = slice(self.first + end)
            states = query[:, :, start:end], key[:, :, seen], value[:, :, seen], mask[:, :, start:end, seen]
            part = attention(None, *states, scoring)
            assert part is not None, "a mask that all heads share"
            parts.append(part)
        return torch.cat(parts, 1)


def attention(
    metadata: AttentionMetadata | Blocks | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor | None:
    """Return attention of query [R, H * G, n, E] over key and value [R, H, S, E]: [R, n, H * G, E].

    mask [R, 1, n, S] is added to the scores. Returns None where the mask is missing, differs from head to head or comes
    with a bias: torch's own function serves then.
    """
    if isinstance(metadata, Blocks):
        if mask is not None and scoring.bias is None:
            return metadata.attend(query, key, value, mask, scoring)
        metadata = None
    out = None if metadata is None else _by_metadata(metadata, query, key, value, mask, scoring)
    if out is not None:
        return out
    if scoring.softcap is not None or scoring.sinks is not None:
        return _written_out(query, key, value, mask, scoring).transpose(1, 2).contiguous()
    if mask is None or mask.shape[1] != 1 or scoring.bias is not None:
        return None
    return _over_all_slots(query, key, value, mask, scoring.scale)


def _by_metadata(
    metadata: AttentionMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor | None:
    """Return attention [R, n, H * G, E] of a forward whose slots are split, by a kernel or in two parts; None where
    torch's attention over all slots serves."""
    known = metadata.of(mask)
    if known is None:
        return None
    part, mask = known
    if part is metadata.across:
        scoring = replace(scoring, bias=None)  # T5 passes zeros here, because a source has no distance to an answer
    found = None
    if part.kernel is not None and scoring.plain:
        found = part.served(query, key, value, mask, scoring.scale)
    if found is None and part.fast:
        return None
    metadata.used += 1
    if found is None:
        unlike = key.shape[-1] != value.shape[-1] or key.shape[-1] < LEAST_DIM
        if part.kernel is not None or unlike or scoring.softcap is not None or scoring.bias is not None:
            part = part.all_suffix()
        if part.width and part.path_attention is not None and takes(query, key, value):
            return _by_paths(part, query, key, value, mask, scoring)
        found = _by_parts(part, query, key, value, mask, scoring)
    return found.transpose(1, 2).contiguous()


def _over_all_slots(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return [R, n, H * G, E] by torch's kernel over all slots at once.

    Query heads of one kv head become further queries of that head, so that only the small mask is repeated. In a
    prefill so long that the repeated mask would be larger than repeated keys and values, these are repeated instead.
    """
    rows, heads, count, dim = query.shape
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    fused = nn.functional.scaled_dot_product_attention
    if groups == 1 or count > 2 * kv_heads * dim:
        if groups > 1:
            key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        return fused(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2).contiguous()
    grouped, wide = query.reshape(rows, kv_heads, groups * count, dim), mask.repeat(1, 1, groups, 1)
    out = fused(grouped, key, value, attn_mask=wide, scale=scale)
    return out.reshape(rows, heads, count, value.shape[-1]).transpose(1, 2).contiguous()


def _by_paths(
    metadata: AttentionMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Return attention [R, n, H * G, E]: a kernel computes the suffix and joins it with the prompt slots."""
    prompt_part = None
    if max(metadata.prompt_slots):
        head = metadata.head_for(mask, query, key)
        if head is None and metadata.prompt_attention is not None and cpu_prompts.takes(query, key, value):
            prompt_part = metadata.prompt_attention(query, key, value, metadata.counts, scoring.scale)
        else:
            prompt_part = prompt_attention(metadata.prompt_slots, query, key, value, head, scoring.scale)
    assert metadata.path_attention is not None
    softcap, sinks, bias = scoring.softcap, scoring.sinks, scoring.bias
    return metadata.path_attention(
        *(metadata.paths(mask), query, key, value, scoring.scale),
        prompt_part=prompt_part, softcap=softcap, sinks=sinks, bias=bias,
    )  # fmt: skip


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """Reshape a query [R, H * G, n, E] to [R, H, m, E], filled up with zeros to m queries."""
    rows, heads, count, dim = query.shape
    queries = heads // kv_heads * count
    missing = filled_queries(heads, kv_heads, count, dim) - queries
    grouped = query.reshape(rows, kv_heads, queries, dim)
    return nn.functional.pad(grouped, (0, 0, 0, missing)) if missing else grouped


def _by_parts(
    metadata: AttentionMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Return attention [R, H * G, n, E]: the fused kernel computes the prompt slots, sums in float64 the suffix, and
    their log-sums join both."""
    rows, heads, count, _ = query.shape
    groups = heads // key.shape[1]
    queries = groups * count
    grouped = _grouped(query, key.shape[1])
    prompt_part = None
    if max(metadata.prompt_slots):
        head = metadata.head_for(mask, query, key)
        prompt_part = prompt_attention(metadata.prompt_slots, query, key, value, head, scoring.scale)
    if not metadata.width:
        assert prompt_part is not None
        return prompt_part[0][:, :, :queries].reshape(rows, heads, count, -1)
    scores = torch.matmul(grouped.to(torch.float32), metadata.pick(key, torch.float32).transpose(2, 3))
    scores = scores[:, :, :queries].unflatten(2, (groups, count))  # [R, H, G, n, T]
    scale, softcap = scoring.scale, scoring.softcap
    if softcap is not None:
        scores, scale = torch.tanh(scores.to(torch.float64) * (scale / softcap)).to(torch.float32), softcap
    scores = torch.add(metadata.suffix(mask), scores, alpha=scale * LOG2_E)  # to base 2
    if scoring.bias is not None:  # it covers all slots, and with a bias all slots are suffix
        scores.add_(scoring.bias.to(torch.float32).unflatten(1, (-1, groups)), alpha=LOG2_E)
    highest = scores.amax(-1, keepdim=True)
    if prompt_part is not None:
        prompt_slots, log_sum = (part[:, :, :queries].unflatten(2, (groups, count)) for part in prompt_part)
        log_sum = log_sum.unsqueeze(-1) * LOG2_E
        highest = torch.maximum(highest, log_sum)
    # float64 here too: in float32 torch may compute the last few numbers of a tensor with another exp2
    weights = scores.sub_(highest).to(torch.float64).exp2_()
    total = weights.sum(-1, keepdim=True)
    values = metadata.pick(value, torch.float64)
    out = torch.matmul(weights.flatten(2, 3), values).unflatten(2, (groups, count))
    if prompt_part is not None:
        share = (log_sum - highest).to(torch.float64).exp2_()
        out.addcmul_(prompt_slots.to(torch.float64), share)
        total.add_(share)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(torch.float32).view(-1, groups, 1, 1) * LOG2_E
        total.add_((sink - highest).to(torch.float64).exp2_())
    return out.div_(total).flatten(1, 2).to(query.dtype)


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
    for first, last in _runs(prompt_slots):
        part, slots = slice(first, last), prompt_slots[first]
        if not slots:
            outs.append(grouped.new_zeros(last - first, heads, queries, value.shape[-1]))
            sums.append(grouped.new_full((last - first, heads, queries), MASKED, dtype=torch.float32))
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


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return where each run of equal numbers begins and ends."""
    starts = [place for place, number in enumerate(numbers) if not place or number != numbers[place - 1]]
    return list(zip(starts, [*starts[1:], len(numbers)], strict=True))


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
    if scoring.sinks is not None:
        sink = scoring.sinks.to(torch.float32).view(1, -1, groups, 1, 1).expand(rows, -1, -1, count, 1)
        scores = torch.cat((scores, sink), -1)
    weights = torch.softmax(scores, -1)
    if scoring.sinks is not None:
        weights = weights[..., :-1]
    return (weights @ value.unsqueeze(2).to(torch.float32)).flatten(1, 2).to(query.dtype)
