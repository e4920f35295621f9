"""The result of a bench run: plain numbers, from which the tables, the plots and the JSON lines are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsbd_cli.errors import plural

BASELINES = ("hf-beam-search", "greedy", "beam-search", "beam-sampling")  # what a user has today comes first
SIGNIFICANT = 0.05  # a p value below it is called a difference


@dataclass(frozen=True, slots=True)
class Interval:
    """A number and a range around it. The field that holds it says which range."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of one method. Nothing here is estimated.

    Attributes:
        source: the counter: nvml, rapl:package-0, ..., or `unavailable`.
        j_per_token: joules per delivered token, of windows long enough for the counter; None where there is none.
        j_per_token_above_idle: the same without what the machine draws when idle.
        idle_watts: measured before the run.
        watts: mean power while the method ran.
    """

    source: str = "unavailable"
    j_per_token: float | None = None
    j_per_token_above_idle: float | None = None
    idle_watts: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class PairedTest:
    """A comparison of the main scores of one method and a baseline, record by record.

    Attributes:
        baseline: name of the baseline's setting, which has as many beams, if there is such a setting.
        records: number of records that both have answered; `better`, `worse`: number on which this method scores
            higher, lower.
        difference: mean of this method's scores minus that of the baseline's.
        test: mcnemar (exact) where all scores are 0 or 1, else sign-flip.
        p: two-sided; `p_holm`: after Holm's correction over all methods that were compared with this baseline.
        least: number of records that must differ, all one way, for a difference to show at all.
    """

    baseline: str
    records: int
    better: int
    worse: int
    difference: float
    test: str
    p: float
    p_holm: float
    least: int

    @property
    def shown(self) -> bool:
        """Whether the two differ by more than chance."""
        return self.p_holm < SIGNIFICANT


STOPPED = "Stopped early: this is what was measured until then."


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One method at one setting on one task.

    Attributes:
        method: name of the method; `setting`: what a sweep has set, as in `W=4 K=8`, empty if nothing.
        settings: every setting, by the library's names.
        records: number answered; `failed`: how many of these have no answer (scored as wrong, and none of their tokens
            count).
        windows: number of stretches of records that were timed, each next to one of every other method.
        tokens: delivered by the best beams up to and with their end tokens, in `seconds`.
        scores: metric -> mean over the records with its 95 % interval, Wilson's for scores that are 0 or 1, else by
            bootstrap; the main metric first.
        logprob_per_token: of the best beams under the raw target, nats.
        tokens_per_s: median of the windows and their middle half (quartiles).
        ratios: baseline -> this method's speed divided by the baseline's, median of pairs of neighbouring windows and
            quartiles.
        steps_per_call: beam-sampling steps per target call; None for others' code, which does not count them.
        accepted_by_drafter: accepted share of each drafter's nodes, where there are two; a node that both proposed
            counts for the first.
        accepted_by_depth: accepted share of the drafted nodes in each layer that was verified.
        passed_by_depth: share of all target calls in which this layer passed.
        target_calls, draft_calls: per record.
        kv_peak_bytes: most that one request held in both models' caches; for transformers that of the target at the
            end.
        peak_memory_bytes: of the whole process or device (memory_source) while the method ran.
        paired: baseline -> the test of this method's main scores against the baseline's.
    """

    task: str
    method: str
    setting: str
    settings: Mapping[str, object]
    batch_size: int
    exactness: str | None
    records: int
    failed: int
    windows: int
    tokens: int
    seconds: float
    scores: Mapping[str, Interval]
    logprob_per_token: float | None
    tokens_per_s: Interval
    ratios: Mapping[str, Interval] = field(default_factory=dict)
    steps_per_call: float | None = None
    acceptance_rate: float | None = None
    accepted_by_drafter: Mapping[str, float | None] = field(default_factory=dict)
    accepted_by_depth: tuple[float, ...] = ()
    passed_by_depth: tuple[float, ...] = ()
    mean_width: float | None = None
    target_calls: float | None = None
    draft_calls: float | None = None
    kv_peak_bytes: int | None = None
    peak_memory_bytes: int | None = None
    memory_source: str = "rss"
    energy: Energy = field(default_factory=Energy)
    paired: Mapping[str, PairedTest] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Method and setting."""
        return f"{self.method} {self.setting}".strip()

    @property
    def quality(self) -> Interval | None:
        """The main metric, if answers are scored."""
        return next(iter(self.scores.values()), None)

    @property
    def drafted(self) -> bool:
        """Whether anything was drafted, which `--depth auto` may leave out."""
        return self.acceptance_rate is not None or any(self.passed_by_depth)

    @property
    def metric(self) -> str | None:
        """Name of the main metric."""
        return next(iter(self.scores), None)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Rows of a bench run, and what they share.

    Attributes:
        environment: command, versions, device, commit (see metrics.environment).
        run: target, draft, dtype, sampling, seed, rounds, ...
        notes: what a reader must know: records left out, settings that are not possible, energy that is not measured.
        complete: False where the run was stopped early.
    """

    rows: Sequence[BenchRow]
    environment: Mapping[str, object]
    run: Mapping[str, object]
    notes: Sequence[str] = ()
    complete: bool = True

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(dict.fromkeys(row.task for row in self.rows))

    def of(self, task: str) -> list[BenchRow]:
        """Return the rows of one task."""
        return [row for row in self.rows if row.task == task]


def task_title(task: str, rows: Sequence[BenchRow]) -> str:
    """Return the name of a task with the number of its records."""
    return f"{task}, {plural(max(row.records for row in rows), 'record')}"


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indexes of the points (speed, quality) that no other point beats in both, slowest first."""
    best: list[int] = []
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    highest = float("-inf")
    for index in order:
        if points[index][1] > highest:
            best.append(index)
            highest = points[index][1]
    return best[::-1]
