"""`dsbd generate --until exec-ok:DATABASE,max-beams=N`: rows without a beam that passes are answered again, wider."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsbd_cli.config import Exactness, MethodConfig
from dsbd_cli.errors import InvalidRowError, RowError, UsageError
from dsbd_cli.job.cli.declare import option
from dsbd_cli.job.cli.options import ENDING
from dsbd_cli.job.pick.execution import ByExecution, Databases
from dsbd_cli.job.records import Row
from dsbd_cli.job.records.row import Fields
from dsbd_cli.lab.tasks.execute import SqlStoppedError
from dsbd_cli.requests import Hypothesis, Request, RequestResult
from dsbd_cli.stats import RequestStats
from dsbd_cli.variants import Setting, Variant, help_lines, parse

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine, EngineInfo

__all__ = ["Until", "UntilOptions", "Widening", "until_of"]

DATABASE: Setting[str | None] = Setting(
    field="database",
    kind=str,
    default=None,
    text="SQLite file, opened read-only, {name} stands for a field of the row's metadata",
    required=True,
    is_file=True,
)
MAX_BEAMS: Setting[int | None] = Setting(
    field="max_beams",
    name="max-beams",
    kind=int,
    default=None,
    text="beams of the last round",
    required=True,
    least=1,
)
CHECKS = {"exec-ok": Variant(name="exec-ok", text="SQL that runs", settings=(DATABASE, MAX_BEAMS))}
WINDOW = 4  # batches that are checked together


@dataclass(frozen=True)
class UntilOptions:
    """How long a row is answered again."""

    until: str | None = option(
        ENDING,
        f"as long as no beam passes, answer the row again with twice as many; the first beam that passes "
        f"becomes the text:{help_lines(CHECKS.values())}",
        metavar="CHECK",
    )


@dataclass(frozen=True, slots=True)
class Until:
    """What must pass, and the beams of each round, the first included."""

    check: ByExecution
    widths: tuple[int, ...]


def until_of(given: UntilOptions, method: MethodConfig) -> Until | None:
    """None where nothing is asked for. Raises UsageError for what cannot work together."""
    if given.until is None:
        return None
    _, settings = parse("--until", given.until, CHECKS)
    most, database = int(settings[MAX_BEAMS.field]), str(settings[DATABASE.field])
    if most <= method.num_beams:
        raise UsageError(
            f"--until {given.until}: max-beams is {most}, but must be more than --num-beams, which is "
            f"{method.num_beams}"
        )
    widths = [method.num_beams]
    while widths[-1] < most:
        widths.append(min(2 * widths[-1], most))
    check = ByExecution(Databases(database))
    check.check(f"--until {given.until}")
    return Until(check, tuple(widths))


class Widening:
    """An engine that answers rows in rounds. Engines of all rounds share the models, so they never run at once."""

    def __init__(
        self, first: Engine, until: Until, wider: Callable[[int], Engine], metadata: dict[int, object], *, window: int
    ) -> None:
        """wider: an engine of so many beams. metadata: of rows, by the id() of their requests. window: rows that are
        answered and checked together."""
        self._engines: dict[int, Engine] = {until.widths[0]: first}
        self._until, self._wider, self._window = until, wider, window
        self._metadata = metadata
        self._notes: dict[int, Fields] = {}
        self._stopping = False
        self.widened = self.passed = self.extra_calls = 0

    @property
    def info(self) -> EngineInfo | None:
        """Of the first round."""
        return self._engines[self._until.widths[0]].info

    @property
    def allowed(self) -> str | None:
        """Of the first round."""
        return self._engines[self._until.widths[0]].allowed

    @property
    def exactness(self) -> Exactness:
        """Of the first round."""
        return self._engines[self._until.widths[0]].exactness

    @property
    def steps(self) -> int:
        """Taken so far."""
        return sum(engine.steps for engine in self._engines.values())

    def stop(self) -> None:
        """As of an engine."""
        self._stopping = True
        for engine in list(self._engines.values()):
            engine.stop()
        self._until.check.stop()

    def told(self, row: Row) -> Fields | None:
        """What the rounds of a row came to, for its record; once."""
        return None if row.request is None else self._notes.pop(id(row.request), None)

    def line(self) -> str:
        """What the rounds have cost, for people."""
        return f"{self.widened} rows answered again, {self.passed} of them passed, {self.extra_calls} more target calls"

    def run(self, requests: Iterable[Request | RowError | None], *, ordered: bool = True) -> Iterator[RequestResult]:
        """As of an engine: results in order, whatever `ordered` says, some rows at a time."""
        group: list[Request | RowError] = []
        for request in requests:
            if request is not None:
                group.append(request)
            if group and (request is None or len(group) == self._window):
                yield from self._answer(group)
                group = []
            if self._stopping:
                return
        if group:
            yield from self._answer(group)

    def _answer(self, group: list[Request | RowError]) -> Iterator[RequestResult]:
        asked = [request for request in group if isinstance(request, Request)]
        done: dict[int, RequestResult] = {}
        rows = asked
        for width in self._until.widths:
            rows = self._round(width, rows, done)
            if self._stopping:
                return
        for request in group:
            if isinstance(request, RowError):
                yield RequestResult(Request(""), (), 0, RequestStats(), request)
            else:
                yield done[id(request)]

    def _round(self, width: int, rows: list[Request], done: dict[int, RequestResult]) -> list[Request]:
        """One round; returns the rows that need another one."""
        if not rows:
            return []
        if width not in self._engines:
            self._engines[width] = self._wider(width)
        engine, first = self._engines[width], width == self._until.widths[0]
        asked = [replace(row, sampling=replace(row.sampling, n_best=width)) for row in rows]
        results = list(engine.run(asked))
        for model in engine.models:
            model.release()  # the next round has other shapes
        left = []
        for row, answer in zip(rows, results, strict=False):
            before, result = done.get(id(row)), answer
            stats = result.stats if before is None else RequestStats.total([before.stats, result.stats])
            if not first:
                self.widened += width == self._until.widths[1]
                self.extra_calls += result.stats.target_calls
            passing, error, answered = None, result.error, width
            if error is not None and before is not None:  # out of memory, say: the answer of the round before stays
                result, error = before, None
                answered = self._until.widths[self._until.widths.index(width) - 1]
            elif error is None:
                try:
                    passing = self._passing(row, result.hypotheses)
                except InvalidRowError as failed:
                    error = failed
                except SqlStoppedError:
                    return []
            last = passing is not None or error is not None or width == self._until.widths[-1] or answered < width
            beams = _ordered(result.hypotheses, passing)[: row.sampling.n_best] if error is None else ()
            done[id(row)] = replace(result, request=row, hypotheses=beams, stats=stats, error=error)
            if not last:
                left.append(row)
                continue
            self.passed += passing is not None and not first
            self._metadata.pop(id(row), None)
            if error is None:
                self._notes[id(row)] = {
                    "passed": passing is not None,
                    "beam": passing,
                    "num_beams": answered,
                    "rounds": self._until.widths.index(width) + 1,
                    "target_calls": stats.target_calls,
                }
        return left

    def _passing(self, row: Request, beams: tuple[Hypothesis, ...]) -> int | None:
        """The first beam that passes. Raises InvalidRowError where there is no database."""
        metadata = self._metadata.get(id(row))
        check = self._until.check
        return next((rank for rank, beam in enumerate(beams) if check.passes(metadata, beam.text)), None)


def _ordered(beams: tuple[Hypothesis, ...], first: int | None) -> tuple[Hypothesis, ...]:
    """The beam that passes before all others, which keep their order."""
    return beams if first is None else (beams[first], *beams[:first], *beams[first + 1 :])
