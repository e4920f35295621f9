"""Kernels of an iteration, called on its state: `verify_with_kernel` does what verify_forest does, `commit_with_kernel`
what commit_beams does. ops/select.py says where they are used. The tensor code is their specification."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import warp_flags, warp_tensors
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.iteration.commit_beams import nodes_run
from dsbd_cli.engine.iteration.finished import Live
from dsbd_cli.engine.iteration.state import BatchState
from dsbd_cli.engine.iteration.verify_forest import VerifiedForest
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.layout import COLUMNS, FIRST


def verification_kernel(ops: Ops, state: BatchState, forest: Forest, candidates: Candidates) -> ModuleType | None:
    """Return the kernel that verifies this forest; None where tensor code does. The kernel has the rules coupled,
    search and rejection at a fixed width. For rejection it needs the distributions that `extend` recorded."""
    method = state.method
    if method.dynamic or (method.rule == "rejection" and forest.depth and not forest.buffer.distribution):
        return None
    drafts, roots, width = forest.drafts_per_layer, forest.num_beams, candidates.tokens.shape[2]
    own_limits = state.limits.any_never or state.limits.any_narrow
    return ops.verify(method.num_beams, roots, width, drafts, method.rule, own_limits=own_limits)


def verify_with_kernel(
    kernel: ModuleType,
    state: BatchState,
    forest: Forest,
    candidates: Candidates,
    rule: Rule,
    endings: Endings,
    keys: Tensor,
) -> VerifiedForest:
    """Do what verify_forest does, with a kernel. Updates `state.finished` in place. Counters of layers that were not
    reached are 0, except the width and the numbers of drafted nodes."""
    beams, finished, limits, flat = state.beams, state.finished, state.limits, forest.flat
    (rows, width), depth = finished.score.shape, forest.depth

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=keys.device)

    real = torch.float32
    live = Live(
        *(new(width), new(width), new(width), new(width, dtype=torch.bool), new(width, dtype=real)),
        logprob=new(width, dtype=real),
    )
    before, report = new(depth + 1, width), new(FIRST + depth * COLUMNS)
    kernel.verify(
        _dense(candidates.tokens, candidates.logprobs),
        _dense(flat.path, flat.stop_state, flat.parent, flat.token, flat.valid, flat.drafter_id, flat.sampled),
        _dense(beams.valid, beams.weight, beams.logprob, beams.length),
        [
            *(finished.score, finished.logprob, finished.length, finished.by_length),
            *(finished.origin, finished.node, finished.token),
        ],
        [endings.eos, endings.stops.table],
        warp_tensors(state.warp),
        [state.active, limits.max_new, limits.length_penalty, limits.early],
        keys,
        forest.buffer.distribution if state.method.rule == "rejection" else [],
        [live.parent, live.token, live.node, live.valid, live.weight, live.logprob, before, report],
        forest.drafts_per_layer,
        state.method.rule,
        warp_flags(state.warp, stops=endings.stops.used, warps=rule.sampler.random),
        *([[limits.never, limits.num_beams]] if limits.any_never or limits.any_narrow else []),
    )
    done, invalid, steps, width_sum = (report[:, column] for column in range(4))
    counters = report[:, FIRST:].view(rows, depth, len(LayerCounters._fields))
    return VerifiedForest(
        live, steps, width_sum, done, invalid, counters, None if state.trace is None else before, report
    )


def commit_with_kernel(
    kernel: ModuleType,
    state: BatchState,
    forest: Forest,
    live: Live,
    report: Tensor,
    endings: Endings,
    *,
    draft_guesses: bool = False,
) -> tuple[Tensor, Tensor]:
    """Make the final beams the live ones and compact their slots, all in place where the number of beams is the same.
    Return source and destination [R, T] of the slots that the caches must copy. report: the packed counters, into which
    the kernel writes those of the slot table. draft_guesses: of commit_beams."""
    beams, table, finished, flat = state.beams, state.table, state.finished, forest.flat
    history, window, width = beams.history, beams.ancestors.shape[2], live.token.shape[1]
    if beams.token.shape[1] != width:
        rows = len(live.token)
        for name in ("valid", "token", "weight", "logprob", "path", "stop_state", "ancestors", "history"):
            value = getattr(beams, name)
            setattr(beams, name, value.new_zeros((rows, width, *value.shape[2:])))
    src_slots, dst_slots = live.token.new_empty((2, len(live.token), window)).unbind(0)
    out = [beams.valid, beams.token, beams.weight, beams.logprob, beams.path, beams.stop_state]
    kernel.commit(
        [live.parent, live.token, live.valid, live.weight, live.logprob],
        _dense(flat.path, flat.stop_state, flat.root, flat.path_tokens, flat.ancestors),
        endings.stops.table,
        state.active,
        [table.used, table.common_prefix, table.drafted, table.positions, table.tokens],
        [history, beams.length, beams.depth, state.iteration],
        [finished.length, finished.origin, finished.node, finished.token, finished.tokens],
        [*out, beams.ancestors, beams.history],
        [src_slots, dst_slots],
        report,
        nodes_run(forest, draft_guesses=draft_guesses),
        endings.stops.used,
    )
    return src_slots, dst_slots


def _dense(*values: Tensor) -> list[Tensor]:
    """Return the tensors without gaps: a gate may have ended the forest early, and a single root is a slice of W."""
    return [value.contiguous() for value in values]
