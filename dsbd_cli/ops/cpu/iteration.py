"""CPU kernels of an iteration: the candidates of its nodes, the forest, its verification and the commit.

Tensor code takes some five microseconds for each of its operations, whatever their size, and an iteration of a few
beams has hundreds of them. The kernels do the same work in loops. The tensor code of engine/ is the specification. It
still drafts and verifies for rule `rejection`, a dynamic width and observers, drafts where a constraint acts or a
backlog is long, and selects many candidates.

The kernels themselves are in kernels/iteration.py; numba, which compiles them, is imported at their first call.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N = W0 + D*K nodes, n nodes of a layer, C
candidates per node, T suffix window, S slots, L history, F = W finished hypotheses kept, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.cpu.runtime import FLOATS, CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.layout import COLUMNS, FIELDS, FIRST, FLAGS, STREAMS
from dsbd_cli.ops.memory import CACHE_LINE

RULES = ("coupled", "search")
MOST_CANDIDATES = 256  # they are kept in order while they are found, which takes longer than sorting if there are many
WORK = 16  # multiplications that take as long as a pair of a pool, about
KINDS = {"w": torch.int64, "f": torch.float32, "b": torch.bool, "s": torch.int32}
BUFFER = ("numbers", "flags", "node_weight", "node_path", "node_ancestors", "mask")  # tensors of a KernelBuffer
ENDINGS = ("eos", "stops", "vocabulary", "stopping")
WARP = ("temperature", "top_k", "top_p", "min_p", "greedy", "by_beam")  # in this order: a kernel is given the first one


class CandidatesArguments(ctypes.Structure):
    """Arguments of the kernel `candidates`. items: nodes of all requests. row, node: strides of the logits in bytes."""

    _fields_ = fields(
        "taken", "threads", "items", "nodes", "vocabulary", "count", "narrow", "logits", "row", "node",
        "tokens", "best", "highest", "total", "work", "work_bytes",
    )  # fmt: skip


class BeginArguments(ctypes.Structure):
    """Arguments of the kernel `begin`: sizes and addresses. items: R."""

    _fields_ = fields(
        "taken", "threads", "items", "roots", "nodes", "layers", "window", "slots", "table_slots", "backlog",
        "trash", "last_position",
        "token", "path", "stop_state", "valid", "weight", "ancestors", "depth",
        "used", "common_prefix", "positions", "tokens", "row_key", "iteration",
        *BUFFER, "keys", "joined", "joined_mask",
    )  # fmt: skip


class ExtendArguments(ctypes.Structure):
    """Arguments of the kernel `extend`: sizes and addresses. items: R."""

    _fields_ = fields(
        "taken", "threads", "items", "nodes", "layers", "above", "candidates", "count", "first", "layer",
        "window", "slots", "table_slots", "coupled", "last_position", "tokens", "logprobs", *BUFFER,
        "used", "common_prefix", "positions", "held", "depth", *ENDINGS, *WARP,
        "work", "work_bytes",
    )  # fmt: skip


class VerifyArguments(ctypes.Structure):
    """Arguments of the kernel `verify`: sizes and addresses. items: R."""

    _fields_ = fields(
        "taken", "threads", "items", "nodes", "candidates", "roots", "width", "layers", "count",
        "coupled", "tokens", "logprobs", "path", "stop_state", "parent", "token", "valid", "drafter_id",
        "root_valid", "root_weight", "root_logprob", "length",
        "finished_score", "finished_logprob", "finished_length", "finished_by_length", "finished_origin",
        "finished_node", "finished_token", *ENDINGS, *WARP, "active", "max_new", "penalty", "early", "never",
        "row_beams",
        "out_parent", "out_token", "out_node", "out_valid", "out_weight", "out_logprob", "out_before", "report",
        "work", "work_bytes",
    )  # fmt: skip


class CommitArguments(ctypes.Structure):
    """Arguments of the kernel `commit`: sizes and addresses. items: R. history_row: stride in bytes."""

    _fields_ = fields(
        "taken", "threads", "items", "nodes", "roots", "width", "layers", "path_layers", "window", "history_length",
        "table_slots", "ran", "history", "history_row",
        "parent", "token", "valid", "weight", "logprob",
        "path", "stop_state", "root", "node_path", "node_ancestors", *ENDINGS, "active",
        "used", "common_prefix", "drafted", "positions", "tokens", "length", "depth", "iteration",
        "finished_length", "finished_origin", "finished_node", "finished_token", "finished_tokens",
        "out_valid", "out_token", "out_weight", "out_logprob", "out_path", "out_stop_state", "out_ancestors",
        "out_history", "source", "target", "report", "work", "work_bytes",
    )  # fmt: skip


def _named(kind: type[ctypes.Structure]) -> Any:
    """Return the offsets of a structure's fields, by their names."""
    names = [field[0] for field in kind._fields_]
    made: Any = namedtuple("Offsets", names)  # type: ignore[misc]
    return made(*offsets(kind))


CANDIDATES, BEGIN, EXTEND, VERIFY, COMMIT = (
    _named(kind) for kind in (CandidatesArguments, BeginArguments, ExtendArguments, VerifyArguments, CommitArguments)
)
LAYOUT = layout(
    *(CandidatesArguments, BeginArguments, ExtendArguments, VerifyArguments, CommitArguments),
    constants=(len(FIELDS), len(FLAGS), STREAMS, FIRST, COLUMNS),
)


def _addresses(tensors: Sequence[Tensor], kinds: str) -> list[int]:
    """Return the addresses of tensors. kinds: a letter of KINDS for each: its dtype."""
    for tensor, kind in zip(tensors, kinds, strict=True):
        assert tensor.dtype == KINDS[kind], (tensor.dtype, kinds)
        assert tensor.is_contiguous(), (tensor.shape, tensor.stride(), kinds)
    return [tensor.data_ptr() for tensor in tensors]


def _run(kernel: CpuKernel, arguments: Any, work: int, memory: int = 0) -> None:
    """Run a kernel on its items. work: multiplications, about. memory: bytes that each thread works in."""
    if memory:
        memory = -(-memory // CACHE_LINE) * CACHE_LINE  # no two threads share a line of the cache
        room = torch.empty(kernel.threads(work, arguments.items), memory, dtype=torch.uint8, device="cpu")
        arguments.work, arguments.work_bytes = room.data_ptr(), memory
    kernel(arguments, work, arguments.items)


@functools.cache
def compiled() -> dict[str, CpuKernel]:
    """Return the kernels by their names, made at the first call."""
    names = ("candidates", "begin", "extend", "verify", "commit")
    return dict(zip(names, kernels("iteration", *names), strict=True))


def fits(rule: str, *, recorded: bool = False) -> bool:
    """Return whether the kernels have a rule. recorded: they must record the distribution that drafts are drawn
    from."""
    return rule in RULES and not recorded


def candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the tokens [R, n, C] int64, ascending, and log-probabilities [R, n, C] float32 of the C = `count` best
    tokens of every node, as `top_candidates` of engine/core/candidates.py does; None where many are wanted or the
    kernel does not read such logits [R, n, V]."""
    if count > MOST_CANDIDATES or logits.dtype not in FLOATS or logits.dim() != 3 or logits.stride(2) != 1:
        return None
    rows, nodes, vocabulary = logits.shape
    tokens = torch.empty(rows, nodes, count, dtype=torch.int64, device="cpu")
    best = torch.empty(rows, nodes, count, dtype=torch.float32, device="cpu")
    highest, total = torch.empty(2, rows, nodes, 1, dtype=torch.float32, device="cpu").unbind(0)
    size = logits.element_size()
    arguments = CandidatesArguments(
        0, 0, rows * nodes, nodes, vocabulary, count, logits.dtype == torch.bfloat16,
        logits.data_ptr(), logits.stride(0) * size, logits.stride(1) * size,
        *_addresses((tokens, best, highest, total), "wfff"),
    )  # fmt: skip
    _run(compiled()["candidates"], arguments, 4 * rows * nodes * vocabulary, 12 * count + vocabulary)
    # in float64, as in logsumexp.py
    return tokens, (best - highest).sub_(total.to(torch.float64).log_().to(torch.float32))


def begin(
    beams: Sequence[Tensor],
    table: Sequence[Tensor],
    noise: Sequence[Tensor],
    buffer: Sequence[Tensor],
    keys: Tensor,
    joined: Sequence[Tensor],
    trash: int,
    last_position: int,
) -> None:
    """Write the roots, their slots, positions and mask, and the keys of the streams, as a `TensorBuffer` does.

    beams: token, path, stop_state, valid, weight, ancestors, depth. table: used, common_prefix, positions, tokens.
    noise: row_key, iteration. buffer: the tensors of a KernelBuffer. keys [R, D + 1, STREAMS]. joined: tokens,
    positions and slots [3, R, L + W0] and mask [R, L + W0, S] of the forward that runs L tokens of the backlog first; L
    may be 0. trash: a slot for tokens of the backlog that do not exist.
    """
    (rows, roots), (_, nodes, window), slots = beams[0].shape, buffer[4].shape, buffer[5].shape[2]
    arguments = BeginArguments(
        0, 0, rows, roots, nodes, keys.shape[1] - 1, window, slots, table[2].shape[1], joined[0].shape[2] - roots,
        trash, last_position,
        *_addresses(beams, "wwwbfbw"), *_addresses(table, "wwww"), *_addresses(noise, "ww"),
        *_addresses(buffer, "wbfwbb"), *_addresses((keys, *joined), "wwb"),
    )  # fmt: skip
    _run(compiled()["begin"], arguments, rows * roots * slots)


def extend(
    tokens: Tensor,
    logprobs: Tensor,
    buffer: Sequence[Tensor],
    table: Sequence[Tensor],
    position: Tensor,
    keys: Tensor,
    endings: Sequence[Tensor],
    warp: Sequence[Tensor],
    distribution: Sequence[Tensor],
    shape: Sequence[int],
    rule: str,
    flags: Sequence[bool],
    last_position: int,
) -> None:
    """Draft one layer as `BeamDrafter.drafts` and drafting.base.children do, and write the slots, positions and mask of
    the new nodes.

    tokens, logprobs [R, n, C]. endings: eos [V], table of the stop automaton. warp: temperature, top_k, top_p, min_p,
    greedy. distribution: nothing, see `fits`. shape: the first of the nodes above, layer, K. flags: of
    forest_buffer.warp_flags.
    """
    assert fits(rule, recorded=bool(distribution))
    assert len(endings[0]) == endings[1].shape[1]
    (rows, above, own), (first, layer, count) = tokens.shape, shape
    (_, nodes, window), slots = buffer[4].shape, buffer[5].shape[2]
    arguments = ExtendArguments(
        0, 0, rows, nodes, keys.shape[1] - 1, above, own, count, first, layer, window, slots, table[2].shape[1],
        rule == "coupled", last_position,
        *_addresses((tokens, logprobs), "wf"), *_addresses(buffer, "wbfwbb"), *_addresses(table, "wwww"),
        *_addresses((position, *endings), "wbs"), endings[1].shape[1], flags[0], *_addresses(warp, "fwffb"), flags[-1],
    )  # fmt: skip
    work = rows * (WORK * above * own + count * slots)
    _run(compiled()["extend"], arguments, work, 8 * (3 * above * own + 2 * count + 2 * above))


def verify(
    candidates: Sequence[Tensor],
    nodes: Sequence[Tensor],
    beams: Sequence[Tensor],
    finished: Sequence[Tensor],
    endings: Sequence[Tensor],
    warp: Sequence[Tensor],
    limits: Sequence[Tensor],
    keys: Tensor,
    distribution: Sequence[Tensor],
    out: Sequence[Tensor],
    drafts: int,
    rule: str,
    flags: Sequence[bool],
    own_limits: Sequence[Tensor] = (),
) -> None:
    """Do what `verify_forest` does. Finished hypotheses change in place; the rest is written to `out`.

    candidates: tokens, logprobs [R, N, C]. nodes: path, stop_state, parent, token, valid, drafter_id, sampled [R, N].
    beams: valid, weight, logprob [R, W0], length [R]. finished: score, logprob, length, by_length, origin, node, token
    [R, F]. endings: eos [V], table of the stop automaton. warp: temperature, top_k, top_p, min_p, greedy. limits:
    active, max_new, length_penalty, early [R]. keys [R, D + 1, STREAMS]. distribution: nothing, see `fits`. out:
    parent, token, node, valid, weight, logprob [R, W]; before [R, D + 1, W]; report [R, FIRST + D * COLUMNS] int64, of
    which 0 to 3 are done, invalid, steps and the sum of widths. flags: of forest_buffer.warp_flags. own_limits: never
    [R] bool and W of each row [R] int64; or nothing.
    """
    assert fits(rule, recorded=bool(distribution))
    assert len(endings[0]) == endings[1].shape[1]
    (rows, count, own), width, roots = candidates[0].shape, out[0].shape[1], beams[0].shape[1]
    layers = out[6].shape[1] - 1  # a gate may have ended the forest early; the keys are those of all layers
    assert count == roots + layers * drafts
    assert out[7].shape[1] == FIRST + layers * COLUMNS
    arguments = VerifyArguments(
        0, 0, rows, count, own, roots, width, layers, drafts, rule == "coupled",
        *_addresses(candidates, "wf"), *_addresses(nodes[:-1], "wwwwbw"), *_addresses(beams, "bffw"),
        *_addresses(finished, "ffwbwww"), *_addresses(endings, "bs"), endings[1].shape[1], flags[0],
        *_addresses(warp, "fwffb"), flags[-1], *_addresses(limits, "bwfb"),
        *(_addresses(own_limits, "bw") if own_limits else (0, 0)), *_addresses(out, "wwwbffww"),
    )  # fmt: skip
    work = WORK * rows * (layers + 1) * width * own
    _run(compiled()["verify"], arguments, work, 8 * (3 * width * own + 6 * width))


def commit(
    live: Sequence[Tensor],
    nodes: Sequence[Tensor],
    stops: Tensor,
    active: Tensor,
    table: Sequence[Tensor],
    beams: Sequence[Tensor],
    finished: Sequence[Tensor],
    out: Sequence[Tensor],
    moved: Sequence[Tensor],
    report: Tensor,
    ran: int,
    stopping: bool,
) -> None:
    """Do what `commit_beams` does: tokens of finished hypotheses, slots.compact, and the live beams of the next
    iteration.

    live: parent, token, valid, weight, logprob [R, W]. nodes: path, stop_state, root [R, N], path_tokens [R, N, D],
    ancestors [R, N, T]. table: used, common_prefix, drafted, positions, tokens, which change. beams: history [R, W0,
    L], and length, depth, iteration [R], which change. finished: length, and origin, node, token, tokens, which change.
    out: valid, token, weight, logprob, path, stop_state, ancestors, history [R, W, ..]; the history may be that of
    `beams`. moved: source and destination slots [R, T], to be written. report: of `verify`; 4 to 6 become used,
    common_prefix and drafted. ran: nodes that the draft has run; 0: it has run nothing new. stopping: there are stop
    strings.
    """
    (rows, width), (_, count, window), layers = live[0].shape, nodes[4].shape, nodes[3].shape[2]
    _, roots, length = beams[0].shape
    assert beams[0].dtype == torch.int64
    assert beams[0][0].is_contiguous()
    assert finished[4].shape == out[7].shape == (rows, width, length)
    arguments = CommitArguments(
        0, 0, rows, count, roots, width, (report.shape[1] - FIRST) // COLUMNS, layers, window, length,
        table[3].shape[1], ran, beams[0].data_ptr(), 8 * beams[0].stride(0),
        *_addresses(live, "wwbff"), *_addresses(nodes, "wwwwb"), 0, *_addresses((stops,), "s"), stops.shape[1],
        stopping, *_addresses((active,), "b"),
        *_addresses(table, "wwwww"), *_addresses(beams[1:], "www"), *_addresses(finished, "wwwww"),
        *_addresses(out, "bwffwwbw"), *_addresses(moved, "ww"), *_addresses((report,), "w"),
    )  # fmt: skip
    _run(compiled()["commit"], arguments, rows * width * (window + length), 8 * max(width, roots) * length)
