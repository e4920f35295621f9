"""Counts of what one setting has done on one task, window by window, and the row of the report made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variant import Exactness
from dsbd_cli.lab.bench.runners import BestAnswer
from dsbd_cli.lab.bench.statistics import middle_half, paired_tests, score_interval
from dsbd_cli.lab.bench.sweep import SweepSetting
from dsbd_cli.lab.metrics.energy import EnergyMeter, EnergyWindow
from dsbd_cli.lab.reports.bench_data import BASELINES, BenchRow, Energy, PairedTest
from dsbd_cli.stats import RequestStats


class Counters:
    """Sums of our engine's counters. Nothing is kept of single requests."""

    def __init__(self, depth: int) -> None:
        self._requests, self._sums = 0, RequestStats()
        self._drafted, self._accepted, self._passed = ([0] * depth for _ in range(3))

    def add(self, stats: RequestStats) -> None:
        """Add the counters of one request."""
        self._requests += 1
        self._sums.add(stats)
        for layer in (layer for step in stats.step_log for layer in step.layers if layer.layer <= len(self._drafted)):
            self._drafted[layer.layer - 1] += layer.drafted
            self._accepted[layer.layer - 1] += layer.accepted
            self._passed[layer.layer - 1] += layer.passed

    def fields(self) -> dict[str, object]:
        """Return fields of a BenchRow; none where other code answers, which has no such counters."""
        sums = self._sums
        if not self._requests:
            return {}
        return {
            "steps_per_call": _share(sums.steps, sums.target_calls),
            "acceptance_rate": _share(sums.accepted, sums.drafted),
            "accepted_by_drafter": {name: part.acceptance_rate for name, part in sums.drafters.items()},
            "accepted_by_depth": tuple(a / d if d else 0.0 for a, d in zip(self._accepted, self._drafted, strict=True)),
            "passed_by_depth": tuple(_share(count, sums.target_calls) or 0.0 for count in self._passed),
            "mean_width": _share(sums.width_sum, sums.steps),
            "target_calls": sums.target_calls / self._requests,
            "draft_calls": sums.draft_calls / self._requests,
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Tally:
    """Sums over the windows of one setting on one task."""

    def __init__(self, task: str, setting: SweepSetting, batch_size: int) -> None:
        self.task, self.setting, self.batch_size = task, setting, batch_size
        self.exactness: Exactness | None = None  # of the engine after its last window; None for other code
        self.speeds: dict[tuple[int, int], float] = {}  # (round, window) -> tokens/s
        self._tokens = 0
        self._seconds = 0.0
        # of windows long enough for the counter of joules
        self._joules, self._metered_s, self._metered_tokens = 0.0, 0.0, 0
        self._scores: dict[str, list[float]] = {}
        self._logprob, self._logprob_tokens = 0.0, 0
        self._counters = Counters(setting.config.depth if isinstance(setting.config, MethodConfig) else 0)
        self._kv: list[int] = []
        self._peaks: list[int] = []
        self._records = self.failed = 0
        self.first_error: str | None = None

    def add_time(self, round_and_batch: tuple[int, int], tokens: int, window: EnergyWindow, peak: int | None) -> None:
        """Add one timed window. peak: bytes; None where it was not measured."""
        self.speeds[round_and_batch] = tokens / window.seconds
        self._tokens += tokens
        self._seconds += window.seconds
        if window.joules is not None:
            self._joules += window.joules
            self._metered_s += window.seconds
            self._metered_tokens += tokens
        if peak is not None:
            self._peaks.append(peak)

    def add_answers(
        self, answers: Sequence[BestAnswer], scores: Sequence[Mapping[str, float]], logprobs: Sequence[float]
    ) -> None:
        """Add the answers of the first round with their scores and log-probabilities. An answer that failed counts as
        wrong, even where the reference is empty."""
        for answer, score, logprob in zip(answers, scores, logprobs, strict=True):
            self._records += 1
            self.failed += answer.error is not None
            self.first_error = self.first_error or answer.error
            for name, value in score.items():
                self._scores.setdefault(name, []).append(value if answer.error is None else 0.0)
            if answer.error is None:
                self._logprob += logprob
                self._logprob_tokens += answer.tokens
            if answer.stats is not None:
                self._counters.add(answer.stats)
            if answer.kv_bytes is not None:
                self._kv.append(answer.kv_bytes)

    @property
    def main_scores(self) -> list[float]:
        """Scores of the first metric, record by record; empty where answers are not scored."""
        return next(iter(self._scores.values()), [])

    def row(
        self,
        ratios: Mapping[str, Sequence[float]],
        meter: EnergyMeter,
        memory_source: str,
        paired: Mapping[str, PairedTest] | None = None,
    ) -> BenchRow:
        """Return the row of at least one window. ratios: baseline -> speed ratios of the windows that both have."""
        return BenchRow(
            task=self.task,
            method=self.setting.method,
            setting=self.setting.label,
            settings=self.setting.fields(),
            batch_size=self.batch_size,
            exactness=self.exactness,
            records=self._records,
            failed=self.failed,
            windows=len(self.speeds),
            tokens=self._tokens,
            seconds=self._seconds,
            scores={name: score_interval(values) for name, values in self._scores.items()},
            logprob_per_token=self._logprob / self._logprob_tokens if self._logprob_tokens else None,
            tokens_per_s=middle_half(list(self.speeds.values())),
            ratios={name: middle_half(values) for name, values in ratios.items()},
            paired=paired or {},
            kv_peak_bytes=max(self._kv, default=None),
            peak_memory_bytes=max(self._peaks, default=None),
            memory_source=memory_source,
            energy=self._energy(meter),
            **self._counters.fields(),  # type: ignore[arg-type]
        )

    def _energy(self, meter: EnergyMeter) -> Energy:
        joules, seconds, tokens = self._joules, self._metered_s, self._metered_tokens
        if not tokens:
            return Energy(source=meter.source, idle_watts=meter.idle_watts)
        idle = meter.idle_watts
        above = None if idle is None else (joules - idle * seconds) / tokens
        return Energy(meter.source, joules / tokens, above, idle, joules / seconds)


def ratios_of(tally: Tally, others: Sequence[Tally]) -> dict[str, list[float]]:
    """Return, for each baseline, the ratios of this tally's speed to the baseline's in the same round and window."""
    ratios = {}
    for name in BASELINES:
        if (base := _baseline_of(tally, others, name)) is None:
            continue
        pairs = [
            tally.speeds[round_and_batch] / speed
            for round_and_batch, speed in base.speeds.items()
            if speed and round_and_batch in tally.speeds
        ]
        if pairs:
            ratios[name] = pairs
    return ratios


def paired_of(tallies: Sequence[Tally]) -> dict[Tally, dict[str, PairedTest]]:
    """Return, for every tally, the paired tests of its main scores against each baseline's. Holm's correction is over
    the methods of a task."""
    tests: dict[Tally, dict[str, PairedTest]] = {tally: {} for tally in tallies}
    for task in dict.fromkeys(tally.task for tally in tallies):
        for name in BASELINES:
            compared, pairs = [], []
            for tally in (other for other in tallies if other.task == task):
                base = _baseline_of(tally, tallies, name)
                # where a run was stopped, one may have answered more windows; both began with the same records
                scores = list(zip(tally.main_scores, base.main_scores, strict=False)) if base is not None else []
                if base is not None and scores:
                    compared.append(tally)
                    pairs.append((base.setting.name, [mine for mine, _ in scores], [other for _, other in scores]))
            for tally, test in zip(compared, paired_tests(pairs), strict=True):
                tests[tally][name] = test
    return tests


def _baseline_of(tally: Tally, others: Sequence[Tally], name: str) -> Tally | None:
    """Return the baseline with as many beams, or else its first setting (a method with one beam has no other). Returns
    None for the baseline itself, and where it was not run."""
    candidates = [other for other in others if other.task == tally.task and other.setting.method == name]
    if not candidates or tally.setting.method == name:
        return None
    same = [
        candidate for candidate in candidates if candidate.setting.config.num_beams == tally.setting.config.num_beams
    ]
    return (same or candidates)[0]
