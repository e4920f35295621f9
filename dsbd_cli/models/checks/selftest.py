"""Check, on the model just loaded, that a packed forest gives the logits of its separate paths.

Some architectures fail silently: they bias or cut attention by slot, whatever the mask says. A list of names would be
out of date at once, so a small forest is tried, with its tokens scattered over the slots. Models with recurrent layers
are tried a second time in the order of production, where a growing common prefix goes into their states.

Shape letters: N nodes of the test forest, B its paths, T tokens of the longest path, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.forest_model import BaseForestModel, SelfTestReport, unsupported
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel, sample_encoder_input
from dsbd_cli.models.verdicts import LIMITS, PADDING, TIMES_ROUNDING, limit_for

PROMPT = 7
# Used with recurrent layers. Those of CPU kernels have states that lie 16 to 23 tokens back. It is long enough that
# tokens go into the states, and that other tokens do when there is one more.
LONG_PROMPT = 31
# Three roots, four levels: parent of every node, in node order; -1 for a child of the prompt.
PARENTS = (-1, -1, -1, 0, 0, 1, 3, 4, 5, 7, 8)
# Wider than the windows by slot that are in use (256), so that such a window cuts something off.
SLOTS = 400
# Tokens of two sources, neither of which fills whole steps of the cache.
ENCODER_LENGTHS = (13, 40)
# The worst node may be off by so many times the limit.
OUTLIER = 3


def _path(node: int) -> list[int]:
    """Return the nodes from the root to `node`."""
    parent = PARENTS[node]
    return [*([] if parent < 0 else _path(parent)), node]


def _depth(node: int) -> int:
    """Return a node's depth below the prompt; 0 for a root."""
    return len(_path(node)) - 1


def _prompt_of(tokens: Tensor) -> int:
    """Return how many of the tokens come before the nodes."""
    return len(tokens) - len(PARENTS)


def self_test(model: BaseForestModel) -> SelfTestReport:
    """Compare the logits of a packed forest, before and after a move of its slots, with those of its separate paths.
    Return the errors; the cache's memory is freed.

    Raises UnsupportedModelError in one sentence where they disagree or the model refuses.
    """
    total = (LONG_PROMPT if model.recurrent_bytes(0) else PROMPT) + len(PARENTS)
    generator = torch.Generator().manual_seed(20)
    tokens = torch.randint(0, model.vocab_size, (total,), generator=generator).to(model.device)
    # a permutation spread over nearly all slots: neither order nor distance of slots means anything
    slots = (torch.randperm(total, generator=generator) * ((SLOTS - 2) // total)).to(model.device)
    encoder_inputs: Sequence[Tensor | None] = (None,)
    if isinstance(model, Seq2SeqForestModel):  # the same forest below each
        encoder_inputs = [sample_encoder_input(model, size, seed) for seed, size in enumerate(ENCODER_LENGTHS)]

    def separate(padding: int = 0) -> Tensor:
        with unsupported(model.architecture):
            return torch.cat(
                [_separate(_plain(model, encoder_input), tokens, padding) for encoder_input in encoder_inputs]
            )

    expected = separate()
    if not bool(expected.isfinite().all()):
        raise UnsupportedModelError(
            f"{model.architecture} gives logits that are no finite numbers: its weights or its config are damaged, or "
            "it needs another dtype (try float32)"
        )
    with unsupported(model.architecture):
        packed = _packed(model, tokens, slots, encoder_inputs)

    def checked(logits: Tensor, nodes: Sequence[int] | slice, cause: str) -> SelfTestReport:
        return _checked(model, logits, expected[nodes], lambda: separate(PADDING)[nodes], cause)

    report = checked(packed, slice(None), "attention or position by cache slot")
    if model.recurrent_bytes(0):
        with unsupported(model.architecture):
            grown, nodes = _in_production_order(model, tokens)
        report = max(report, checked(grown, nodes, "recurrent states"), key=lambda checks: checks.largest_error)
    return report


def _plain(model: BaseForestModel, encoder_input: Tensor | None) -> Callable[[Tensor], Tensor]:
    if isinstance(model, Seq2SeqForestModel):
        return lambda ids: model.plain(ids, encoder_input)
    return model.plain


def _checked(
    model: BaseForestModel, logits: Tensor, expected: Tensor, padded: Callable[[], Tensor], cause: str
) -> SelfTestReport:
    dtype = model.weights_dtype
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16
    errors = _errors(logits, expected, dtype)
    median, largest = errors.median().item(), errors.max().item()
    if dtype != torch.float32 and largest > OUTLIER * LIMITS[dtype]:
        # rounding decides attention between two equal scores: nodes that move in the ordinary forward, too, when it is
        # padded are left out
        sure = errors > TIMES_ROUNDING * _errors(padded(), expected, dtype)
        largest = errors[sure].max().item() if bool(sure.any()) else 0.0
    limit = limit_for(dtype, max(median, largest / OUTLIER), lambda: _errors(padded(), expected, dtype).median().item())
    report = SelfTestReport(median, largest, limit)
    if not (median <= limit and largest <= OUTLIER * limit):
        raise UnsupportedModelError(
            f"{model.architecture} cannot hold a tree of tokens: the logits of a packed forest are off "
            f"by {largest:.1g} of their spread ({cause}); use another model"
        )
    return report


def _separate(plain: Callable[[Tensor], Tensor], tokens: Tensor, padding: int = 0) -> Tensor:
    """Return the logits [N, V] of every node by running its path alone. padding: tokens added on the right, which
    change nothing before them except by rounding."""
    leaves, prompt = [node for node in range(len(PARENTS)) if node not in PARENTS], _prompt_of(tokens)
    paths = [list(range(prompt)) + [prompt + node for node in _path(leaf)] for leaf in leaves]
    longest = max(map(len, paths)) + padding
    index = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=tokens.device)
    logits = plain(tokens[index])  # [B, T, V]
    rows = [next(row for row, leaf in enumerate(leaves) if node in _path(leaf)) for node in range(len(PARENTS))]
    depths = [prompt + _depth(node) for node in range(len(PARENTS))]
    return logits[torch.tensor(rows, device=logits.device), torch.tensor(depths, device=logits.device)]


def _packed(
    model: BaseForestModel, tokens: Tensor, slots: Tensor, encoder_inputs: Sequence[Tensor | None] = (None,)
) -> Tensor:
    """Return the logits [R * N, V] of the nodes, in one row per source. The first six nodes run with the prompt, the
    others after the slots have moved and the rows have changed places. The last one runs alone, because some models
    make no mask for one token."""
    total, prompt = len(tokens), _prompt_of(tokens)
    split, rows = prompt + 6, len(encoder_inputs)
    device = tokens.device
    seen = torch.zeros((total, total), dtype=torch.bool)
    seen[:prompt, :prompt] = torch.ones(prompt, prompt).tril().bool()
    for node in range(len(PARENTS)):
        seen[prompt + node, :prompt] = True
        seen[prompt + node, [prompt + other for other in _path(node)]] = True
    seen = seen.to(device)
    positions = torch.tensor([*range(prompt), *(prompt + _depth(node) for node in range(len(PARENTS)))], device=device)

    def run(first: int, last: int) -> Tensor:
        mask = torch.zeros((last - first, SLOTS), dtype=torch.bool, device=device)
        mask[:, slots] = seen[first:last]
        slot_positions = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        slot_positions[slots] = positions
        part = slice(first, last)
        fields = (tokens[part], positions[part], slots[part], mask, slot_positions)
        ids, depths, places, mask, depth_of = (field.expand(rows, *field.shape) for field in fields)
        logits = model.forward(ForestInput(ids, depths, places, mask, depth_of))
        assert logits is not None
        return logits

    try:
        model.reserve(rows, SLOTS)
        if isinstance(model, Seq2SeqForestModel):
            for row in reversed(range(rows)):
                encoder_input = encoder_inputs[row]
                assert encoder_input is not None
                model.encode([row], [encoder_input])
        before = run(0, split)[:, prompt:]
        moved = slots.roll(1)  # every slot's content goes to another occupied slot: reads must come before writes
        here, there = (places[None, :split].expand(rows, -1) for places in (slots, moved))
        model.move(here, there, torch.zeros(rows, dtype=torch.int64, device=device))
        slots = moved
        if rows > 1:
            model.select_rows(torch.arange(rows, device=device).flip(0))
        after = torch.cat((run(split, total - 1), run(total - 1, total)), 1)
        if rows > 1:
            after = after.flip(0)
    finally:
        model.release()
    return torch.cat((before, after), 1).flatten(0, 1)


def _in_production_order(model: BaseForestModel, tokens: Tensor) -> tuple[Tensor, list[int]]:
    """Return the logits [m, V] of nodes in the order of production, and the numbers of these nodes.

    A prompt is read as a chain, and six nodes follow. Then the subtree of node 0 alone lives on, and node 0 joins the
    common prefix. Finally another request takes the row, whose prompt joins the common prefix by a move.
    """
    prompt_size = _prompt_of(tokens)
    device, trash, window = tokens.device, prompt_size + 32, prompt_size + 17
    first, kept = list(range(6)), [0, 3, 4]
    below = [node for node in range(6, len(PARENTS)) if _path(node)[0] == 0]

    def run(nodes: list[int], slot_of: dict[int, int], *, chain: bool = False) -> Tensor:
        """Run nodes of the forest, or -prompt_size .. -1 for the prompt. slot_of: slot of every node that is stored."""
        mask = torch.zeros((1, len(nodes), trash + 1), dtype=torch.bool)
        positions = torch.zeros((1, trash + 1), dtype=torch.int64)
        for node, slot in slot_of.items():
            positions[0, slot] = prompt_size + (node if node < 0 else _depth(node))
        for index, node in enumerate(nodes):
            path = range(-prompt_size, node + 1) if node < 0 else [*range(-prompt_size, 0), *_path(node)]
            mask[0, index, [slot_of[other] for other in path]] = True
        at = torch.tensor([slot_of[node] for node in nodes])
        tokens_in, slots = tokens.cpu()[torch.tensor(nodes) + prompt_size][None], at[None]
        depths = positions[:, at]
        if chain:  # with padding behind it
            tokens_in, slots, depths = (
                torch.nn.functional.pad(part, (0, 2), value=fill)
                for part, fill in ((tokens_in, 0), (slots, trash), (depths, 0))
            )
            mask = torch.nn.functional.pad(mask, (0, 0, 0, 2))
            mask[0, -2:, 0] = True
        batch = ForestInput(tokens_in, depths, slots, mask, positions, torch.tensor([0]) if chain else None)
        batch.chain = chain
        logits = model.forward(batch.to(device))
        assert logits is not None
        return logits[0, : len(nodes)]

    def move(src_slots: list[int], dst_slots: list[int], common_prefix: int) -> None:
        slots = torch.tensor([src_slots, dst_slots], device=device).unsqueeze(1)
        model.move(slots[0], slots[1], torch.tensor([common_prefix], device=device))

    prompt = {node: prompt_size + node for node in range(-prompt_size, 0)}
    try:
        model.reserve(1, trash + 1, window)
        run(list(prompt), prompt, chain=True)
        before = run(first, prompt | {node: prompt_size + node for node in first})
        places = [prompt_size, prompt_size + 1, prompt_size + 2]
        move([prompt_size + node for node in kept], places, prompt_size + 1)
        slots = prompt | dict(zip(kept, places, strict=True))
        slots |= {node: prompt_size + 3 + index for index, node in enumerate(below)}
        after = run(below, slots)
        model.clear(0)
        run(list(prompt), prompt)
        move(list(prompt.values()), list(prompt.values()), prompt_size)
        again = run(first, prompt | {node: prompt_size + node for node in first})
    finally:
        model.release()
    return torch.cat((before, after, again)), [*first, *below, *first]


def _errors(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of each node's logits relative to their spread, [N] float64."""
    resolution = 2 * torch.finfo(logits.dtype).eps / LIMITS[dtype]  # logits far from zero are stored coarsely
    logits, expected = logits.double(), expected.double()
    scale = expected.std(dim=-1) + resolution * expected.square().mean(dim=-1).sqrt()
    errors = (logits - expected).square().mean(dim=-1).sqrt() / scale.clamp_min(1e-12)
    return errors.nan_to_num(nan=float("inf"))
