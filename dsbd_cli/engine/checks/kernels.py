"""Checks of the kernels of an iteration: random iterations are run with kernels and with tensor code, and compared.

An iteration runs with one kernel in use, and again with tensor code alone. Both must leave the same beams, finished
hypotheses, slots and counters behind. So a difference names the kernel.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.constraints.stops import StopSet, StopTable
from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.drafting.beam import BeamDrafter
from dsbd_cli.engine.iteration.batch_state import BatchState, NewRow
from dsbd_cli.engine.iteration.iteration import IterationShape
from dsbd_cli.engine.iteration.stepper import Stepper
from dsbd_cli.engine.planning.planner import Shape
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.engine.verify.rules import make_rule
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.select import OpsOf, triton_ops
from dsbd_cli.ops.triton import Arguments, KernelCheck

VOCABULARY = 24
COMMON_PREFIX, SUFFIX, HISTORY = 5, 4, 24  # slots all beams share, slots of some, tokens generated at most
EOS = 2


class _TableModel:
    """A model whose logits depend on the token alone, by a table [V, V]."""

    max_positions, lm_head_ids, own_ids_below, generation, capturable, invariant = None, None, 0, 0, False, True

    def __init__(self, table: Tensor) -> None:
        self.table, self.device, self.vocab_size = table, table.device, table.shape[1]

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Return the logits of the nodes' tokens, [R, n, V]; None where they are not asked for."""
        return self.table[batch.tokens] if logits else None

    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Do nothing, because there is no cache."""

    def recurrent_bytes(self, window: int) -> int:
        """Return 0, because there are no states."""
        return 0


@dataclass
class IterationCase:
    """A batch before an iteration, and everything that is needed to run it. ops_of: returns operations by name."""

    method: MethodConfig
    state: BatchState
    shape: IterationShape
    target: Tensor
    draft: Tensor
    endings: Endings
    ops_of: OpsOf = triton_ops

    @classmethod
    def random(
        cls,
        method: MethodConfig,
        sampling: SamplingConfig,
        generator: torch.Generator,
        device: torch.device,
        *,
        roots: int,
        draft_backlog: int,
        rows: int = 3,
        broken: bool = False,
    ) -> IterationCase:
        """Make a case of random models and beams.

        roots: W0. draft_backlog: slots that the draft has not run. broken: some nodes have NaN.
        """
        width, shape = method.num_beams, Shape(method.depth, method.drafts_per_layer)
        nodes = shape.nodes(roots)
        window = 16 * (-(-(SUFFIX + nodes) // 16))

        def real(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        def below(limit: int, *size: int) -> Tensor:
            return torch.randint(limit, size, generator=generator)

        slots = COMMON_PREFIX + SUFFIX + nodes + 2
        state = BatchState.empty(method, rows, slots, window, HISTORY, torch.device("cpu"))
        # one row is free
        state.admit({row: NewRow(range(3, 4 + COMMON_PREFIX), row, sampling, stop_state=1) for row in range(rows - 1)})
        beams, finished = state.beams, state.finished
        beams.token, beams.path = below(VOCABULARY, rows, width), below(1 << 60, rows, width)
        beams.valid = (torch.rand(rows, width, generator=generator) < 0.8) & state.active.unsqueeze(1)
        beams.valid[: rows - 1, 0] = True
        beams.logprob = real(rows, width).abs().neg()
        beams.weight = beams.logprob * 0.9
        beams.ancestors[:, :, :SUFFIX] = torch.rand(rows, width, SUFFIX, generator=generator) < 0.6
        beams.history = below(VOCABULARY, rows, width, HISTORY)
        beams.length += below(4, rows) + 1
        beams.depth += COMMON_PREFIX + SUFFIX
        state.table.used += COMMON_PREFIX + SUFFIX - state.table.used
        state.table.common_prefix += COMMON_PREFIX - state.table.common_prefix
        state.table.drafted = state.table.used - draft_backlog
        state.table.tokens = below(VOCABULARY, rows, slots)
        state.table.positions = torch.arange(slots).expand(rows, slots).clone()
        finished.score = real(rows, width).sub(1).sort(1, descending=True).values
        finished.score[:, width // 2 :] = float("-inf")
        finished.logprob, finished.tokens = finished.score * 3, below(VOCABULARY, rows, width, HISTORY)
        finished.length = beams.length.unsqueeze(1).expand(rows, width).clone()
        state.limits.max_new = beams.length + below(method.depth + 4, rows) + 1
        if roots < width:
            state.beams = beams.first()
        stops = StopTable([bytes([65 + token]) for token in range(VOCABULARY)], VOCABULARY, device, [EOS])
        own = None if sampling.eos_token_id is None else frozenset(sampling.eos_token_id)
        if sampling.stop or own:
            state.beams.stop_state = state.beams.stop_state * 0 + stops.start(StopSet(tuple(sampling.stop), own))
        target = real(VOCABULARY, VOCABULARY) * 2
        draft = target + real(VOCABULARY, VOCABULARY)
        target[5:9] = target[5:9].round()  # ties
        target[:, 11:14] = float("-inf")
        if broken:
            target[int(beams.token[0, 0])] = float("nan")
            draft[7] = float("nan")
        sizes = IterationShape(slots - 1, shape.depth, shape.drafts_per_layer, draft_backlog, beams=roots)
        _to(state, device)
        return cls(method, state, sizes, target.to(device), draft.to(device), Endings(stops))

    def stepper(self, *used: str) -> Stepper:
        """Return a stepper that runs the iteration with these kernels."""
        target, draft = (cast(ForestModel, _TableModel(table)) for table in (self.target, self.draft))
        caches = Caches(target, draft, large_steps=False, moving=lambda: None)
        drafter = BeamDrafter(draft, VOCABULARY)
        rule = make_rule(self.method)
        return Stepper(caches, drafter, rule, self.endings, PhaseTimer(), ops=Ops(**self.ops_of(used)))

    def run(self, *used: str) -> tuple[Tensor, ...]:
        """Run an iteration with these kernels on a copy of the batch, and return the results, with 0 for numbers that
        have no meaning."""
        state = copy.deepcopy(self.state)
        report = self.stepper(*used).step(state, self.shape)
        beams, finished, table = state.beams, state.finished, state.table
        at = torch.arange(beams.history.shape[2], device=beams.history.device)
        written = beams.valid.unsqueeze(2) & (at < beams.length.view(-1, 1, 1))
        exists = (finished.score > float("-inf")) & state.active.unsqueeze(1)
        ended = exists.unsqueeze(2) & (at < finished.length.unsqueeze(2))
        slot = torch.arange(table.tokens.shape[1], device=at.device) < table.used.unsqueeze(1)
        own = [beams.token, beams.weight, beams.logprob, beams.path, beams.stop_state]
        reached = [
            [count if layer.reached or name.startswith("drafted") else 0 for name, count in layer._asdict().items()]
            for layers in report.layers
            for layer in layers
        ]
        rows = [list(row) for row in report.rows]
        traced: list[Tensor] = []
        if state.trace is not None:
            for marks, there in ((state.trace.live, written), (state.trace.done, ended)):
                traced += [marks.logprob.masked_fill(~there, 0), marks.beam * there]
                traced += [marks.top * there.unsqueeze(3), marks.top_logprob.masked_fill(~there.unsqueeze(3), 0)]
        return (
            *(beams.valid, *(torch.where(beams.valid, value, 0) for value in own)),
            *(beams.ancestors, beams.history * written, beams.length, beams.depth, state.iteration),
            *(
                finished.score.masked_fill(~exists, 0),
                finished.logprob.masked_fill(~exists, 0),
                finished.length * exists,
            ),
            *(finished.by_length & exists, finished.tokens * ended, table.used, table.common_prefix, table.drafted),
            *(table.tokens * slot, table.positions * slot, torch.tensor(rows), torch.tensor(reached)),
            *traced,
        )


def kernels(
    settings: Sequence[tuple[MethodConfig, SamplingConfig]],
    ops_of: OpsOf = triton_ops,
) -> list[KernelCheck]:
    """Return every kernel of an iteration with its reference. settings: methods and sampling of the cases. ops_of:
    returns operations by name."""

    def one(name: str) -> KernelCheck:
        def also_used(iteration: IterationCase) -> set[str]:
            """Return the kernels that run in both. Rule `rejection` compares with the distribution that `draft`
            records."""
            return {"draft"} if name == "verify" and iteration.method.rule == "rejection" else set()

        def cases(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
            for method, sampling in settings:
                width = method.num_beams
                for roots, draft_backlog, broken in ((1, 0, False), (width, 2, False), (width, 0, True)):
                    made = IterationCase.random(
                        method, sampling, generator, device, roots=roots, draft_backlog=draft_backlog, broken=broken
                    )
                    made.ops_of = ops_of
                    yield (made,)

        def op(iteration: IterationCase) -> tuple[Tensor, ...]:
            return iteration.run(name, *also_used(iteration))

        def reference(iteration: IterationCase) -> tuple[Tensor, ...]:
            return iteration.run(*also_used(iteration))

        return KernelCheck(name, op, reference, cases)

    return [
        KernelCheck("candidates", _candidates_with(ops_of, "candidates"), _candidates_with(ops_of), _logits),
        one("draft"),
        one("verify"),
        one("commit"),
        KernelCheck("move", _move_with("move"), _move_with(), _moves),
    ]


def _candidates_with(ops_of: OpsOf, *used: str) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    def run(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        candidates = top_candidates(logits, CandidateCount(count), ops=Ops(**ops_of(used)))
        some = candidates.logprobs > float("-inf")  # among tokens of -inf any may be chosen
        return torch.where(some, candidates.tokens, 0), candidates.logprobs

    return run


def _logits(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    for vocabulary, dtype in itertools.product((40, 300), (torch.float32, torch.bfloat16, torch.float16)):
        logits = torch.randn(1, 5, vocabulary, generator=generator) * 3
        logits[0, 1] = logits[0, 1].round()
        logits[0, 2, 4:] = float("-inf")
        logits[0, 3, 7] = float("nan")
        logits[0, 4] = float("-inf")
        yield logits.to(dtype).to(device), 24


def _move_with(*used: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(slots: Tensor, src_slots: Tensor, dst_slots: Tensor) -> Tensor:
        slots = slots.clone()
        Ops(**triton_ops(used)).move(slots, src_slots, dst_slots)
        return slots

    return run


def _moves(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    """Yield two of three rows of a slab with slots to move, in the order in which a commit moves them."""
    for width, window in ((16, 5), (700, 40)):
        slab = torch.randn(2, 3, 64, width, generator=generator)
        keep = torch.rand(2, window, generator=generator) < 0.5
        order = torch.argsort((~keep).to(torch.int8), dim=1, stable=True)
        dst_slots = 6 + torch.arange(window).expand(2, window)
        src_slots = torch.where(torch.arange(window) < keep.sum(1, keepdim=True), 6 + order, dst_slots)
        yield slab.to(device), src_slots.to(device), dst_slots.contiguous().to(device)


def _to(owner: object, device: torch.device) -> None:
    """Move all tensors of a state to a device."""
    for item in fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, item.name)
        if isinstance(value, Tensor):
            setattr(owner, item.name, value.to(device))
        elif hasattr(value, "__dataclass_fields__"):
            _to(value, device)


def _settings() -> Iterator[tuple[MethodConfig, SamplingConfig]]:
    """Yield each rule with the simplest settings that a user may have."""
    for rule in ("coupled", "search", "rejection"):
        method = MethodConfig.of({"rule": rule, "num_beams": 3, "drafts_per_layer": 4, "depth": 2, "width": "fixed"})
        yield method, SamplingConfig(max_new_tokens=HISTORY, top_k=0 if rule == "search" else 5)


KERNELS = tuple(kernels(list(_settings())))
