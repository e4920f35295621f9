"""The stepper, which runs iterations plainly or as CUDA graphs. At the end of each it reads one small tensor of
counters back to the host (`Report`), the iteration's only synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.constraints.legal import Constraint, acting
from dsbd_cli.engine.core.report import LayerCounters, Report, RowCounters
from dsbd_cli.engine.drafting.base import Drafter, Endings
from dsbd_cli.engine.iteration.batch_state import BatchState
from dsbd_cli.engine.iteration.cuda_graphs import IterationGraphs, shapes
from dsbd_cli.engine.iteration.iteration import DeviceReport, Iteration, IterationShape
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.ops.interface import Ops

PHASES = ("draft", "target", "verify")


class Stepper:
    """Runner of the iterations of one batch. `steady`: the last one took the time that its shape will take again."""

    def __init__(
        self,
        caches: Caches,
        drafter: Drafter,
        rule: Rule,
        endings: Endings,
        timer: PhaseTimer,
        graphs: IterationGraphs[DeviceReport] | None = None,
        stopping: Callable[[], bool] = lambda: False,
        constraints: Sequence[Constraint] = (),
        ops: Ops | None = None,
    ) -> None:
        """graphs: store of captured iterations; None runs them plainly. stopping: returns True when an iteration is to
        end in its middle, by raising EngineStopped. constraints: of the rows' answers. ops: operations of an iteration;
        None: plain torch."""
        self.caches, self.drafter, self.ops = caches, drafter, ops or Ops()
        self.rule, self.endings, self.timer, self.graphs = rule, endings, timer, graphs
        self.stopping, self.constraints = stopping, constraints
        self.steady = True
        self.observer = Observer()
        limits = [model.max_positions for model in caches.models if model.max_positions]
        self.last_position = min(limits, default=2**31) - 1

    def step(
        self, state: BatchState, shape: IterationShape, gate: Callable[[list[float]], bool] | None = None
    ) -> Report:
        """Run one iteration. gate: of DraftContext; None where iterations are captured."""
        assert gate is None or self.graphs is None
        iteration, slower = self.begin(state, shape, gate), self._slower()
        phases, legal = (iteration.draft, iteration.target, iteration.verify_and_commit), iteration.legal
        self.steady = shape.beams == state.method.num_beams
        report = iteration.report
        self.timer.start()
        if self.graphs is None or self.observer.attached or (legal is not None and legal.on_host):
            for name, phase in zip(PHASES, phases, strict=True):
                with self.observer.span(name):
                    phase()
                self.timer.lap(name)
        else:
            key = (replace(shape, generated=0), legal and legal.key, *self._static(state))
            report = self.graphs.run(key, state, report, phases, lambda number: self.timer.lap(PHASES[number]))
            self.steady = self.graphs.steady
        self.steady = self.steady and self._slower() == slower
        return read_report(report.counters, report.draft_calls)

    def begin(
        self, state: BatchState, shape: IterationShape, gate: Callable[[list[float]], bool] | None = None
    ) -> Iteration:
        """Return an iteration that has run nothing yet. Where the shape has fewer roots than W, the state keeps the
        first beam of each row alone."""
        if shape.beams < state.method.num_beams:
            state.beams = state.beams.first()
        return Iteration(
            state=state,
            shape=shape,
            legal=acting(self.constraints, state.legal_starts, shape.generated) if self.constraints else None,
            caches=self.caches,
            drafter=self.drafter,
            rule=self.rule,
            endings=self.endings,
            ops=self.ops,
            last_position=self.last_position,
            stopping=self.stopping,
            observer=self.observer,
            gate=gate,
        )

    def _slower(self) -> int:
        """Return how many forwards of the models so far took a time that their shape will not take again."""
        return sum(getattr(model, "slower_forwards", 0) for model in self.caches.models)

    def _static(self, state: BatchState) -> tuple[Hashable, ...]:
        """Return everything besides the shape that fixes sizes, branches or addresses of an iteration."""
        warp = state.warp
        return (
            shapes(state),
            (warp.max_top_k, warp.all_top_k, warp.even_top_k, warp.any_top_p, warp.any_min_p, warp.any_greedy),
            (state.limits.any_never, state.limits.any_narrow),
            (self.endings.stops.version, self.endings.stops.ending) if self.endings.stops.used else None,
        )


def read_report(counters: Tensor, draft_calls: int) -> Report:
    """Read the counters of `pack_counters`: the iteration's only transfer to the host."""
    first, width = len(RowCounters._fields), len(LayerCounters._fields)
    table: list[list[int]] = counters.tolist()
    return Report(
        rows=[RowCounters._make(line[:first]) for line in table],
        layers=[
            [LayerCounters._make(line[start : start + width]) for start in range(first, len(line), width)]
            for line in table
        ],
        draft_calls=draft_calls,
    )
