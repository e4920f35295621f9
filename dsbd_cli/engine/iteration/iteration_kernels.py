"""Kernels of an iteration, called on its state: `verify_with_kernel` does what verify_forest does, `commit_with_kernel`
what commit_beams does. ops/select.py says where they are used. The tensor code is their specification."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import warp_flags
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.iteration.batch_state import BatchState
from dsbd_cli.engine.iteration.finished import Live
from dsbd_cli.engine.iteration.verify_forest import VerifiedForest
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.layout import COMMIT, FIRST, TENSORS, VERIFY, empty


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
    limits, (rows, beams), device = state.limits, state.finished.score.shape, keys.device
    live = Live(**empty("live", device, rows=rows, beams=beams))
    verified = empty("verified", device, rows=rows, beams=beams, layers=forest.depth)
    own = {"never": limits.never, "beams": limits.num_beams} if limits.any_never or limits.any_narrow else {}
    draft = forest.buffer.distribution if state.method.rule == "rejection" else {}
    tensors = VERIFY.gather(
        beam=state.beams, state=state, candidate=candidates, node=forest.flat, endings=endings.tensors, warp=state.warp,
        limits=limits, own=own, finished=state.finished, live=live, verified=verified, noise={"keys": keys},
        draft=draft,
    )  # fmt: skip
    flags = warp_flags(state.warp, stops=endings.stops.used, warps=rule.sampler.random)
    kernel.verify(tensors, forest.drafts_per_layer, state.method.rule, flags)
    report = verified["report"]
    done, invalid, steps, width_sum = (report[:, column] for column in range(4))
    counters = report[:, FIRST:].view(rows, forest.depth, len(LayerCounters._fields))
    before = None if state.trace is None else verified["before"]
    return VerifiedForest(live, steps, width_sum, done, invalid, counters, before, report)


def commit_with_kernel(
    kernel: ModuleType,
    state: BatchState,
    forest: Forest,
    live: Live,
    report: Tensor,
    endings: Endings,
    run: int,
) -> tuple[Tensor, Tensor]:
    """Make the final beams the live ones and compact their slots, all in place where the number of beams is the same.
    Return source and destination [R, T] of the slots that the caches must copy. report: the packed counters, into which
    the kernel writes those of the slot table. run: of commit_beams."""
    beams, (rows, width) = state.beams, live.token.shape
    old = {"history": beams.history, "length": beams.length, "depth": beams.depth}
    if beams.token.shape[1] != width:
        for field in (tensor.field for tensor in TENSORS if tensor.owner == "next"):
            value = getattr(beams, field)
            setattr(beams, field, value.new_zeros((rows, width, *value.shape[2:])))
    moved = empty("moved", report.device, rows=rows, window=beams.ancestors.shape[2])
    tensors = COMMIT.gather(
        beam=old, state=state, table=state.table, node=forest.flat, endings=endings.tensors, finished=state.finished,
        live=live, verified={"report": report}, next=beams, moved=moved,
    )  # fmt: skip
    kernel.commit(tensors, run, endings.stops.used)
    return moved["source"], moved["target"]
