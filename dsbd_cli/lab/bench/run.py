"""The run: every window of records by every method in turn, so that a drift of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import EncoderDecoderModel
from dsbd_cli.errors import UsageError
from dsbd_cli.io.records.record_parts import sampling_fields
from dsbd_cli.lab.bench.prepare import BenchConfig, Prepared, prepare, window_size
from dsbd_cli.lab.bench.runners import make_runner
from dsbd_cli.lab.bench.sweep import SweepSetting
from dsbd_cli.lab.bench.tally import Tally, paired_of, ratios_of
from dsbd_cli.lab.metrics.energy import find_meter
from dsbd_cli.lab.metrics.environment import environment
from dsbd_cli.lab.metrics.memory import PeakMemory, synchronise
from dsbd_cli.lab.reports.bench_data import BenchReport

OnWindow = Callable[[int, int, str, float | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class BenchPart:
    """Records of a task and the settings that answer them."""

    task: str
    data: Prepared
    settings: tuple[SweepSetting, ...]
    rounds: int


class Bench:
    """A run of everything that is measured with one pair of models.

    The models are loaded once, by the engine `pair`; every method runs on them.
    """

    def __init__(
        self,
        pair: Engine,
        bench: BenchConfig,
        *,
        command: Sequence[str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """command: the command line, for the record. clock: for the estimate of the time that is left.

        Raises UsageError where a record or a setting cannot be run.
        """
        self._pair, self._bench = pair, bench
        if named := sorted(filter(None, pair.catalogues)):
            raise UsageError(f"--allow has catalogues with names ({named[0]}, ...): bench holds all records to one")
        device = pair.target.device
        self._meter = find_meter(str(device), synchronize=partial(synchronise, device))
        self._memory = PeakMemory(device)
        self._stopping = False
        size, room = window_size(bench.batch_size), self._room()
        self._parts = [
            BenchPart(
                dataset.name,
                prepare(dataset, pair.codec, bench.records, size, room, bench.sampling),
                tuple(bench.settings),
                bench.rounds,
            )
            for dataset in bench.datasets
        ]
        ids = [prompt.ids for part in self._parts for window in part.data.windows for prompt in window]
        longest = max(map(len, ids))
        self._runners = {setting: make_runner(pair, setting, bench, longest) for setting in bench.settings}
        self._tallies = {
            (part, setting): Tally(part.task, setting, self._runners[setting].batch_size)
            for part in self._parts
            for setting in part.settings
        }
        self._environment = environment(command, str(device))
        self._clock = clock
        self._window_seconds: dict[tuple[BenchPart, SweepSetting], list[float]] = {key: [] for key in self._tallies}

    @property
    def units(self) -> int:
        """Number of timed windows in all."""
        return sum(part.rounds * len(part.settings) * len(part.data.windows) for part in self._parts)

    @property
    def settings(self) -> int:
        """Number of settings that are measured in turn."""
        return len(self._bench.settings)

    def stop(self) -> None:
        """End soon, and keep the windows that are done. May be called from a signal handler."""
        self._stopping = True
        for runner in self._runners.values():
            runner.stop()

    def left_s(self) -> float | None:
        """Return the seconds that the rest will take, estimated from the windows that are done; None before the first
        one.

        A method that has not run on a task is expected to take its mean time on other tasks, or else the mean of all
        methods.
        """
        every = [seconds for some in self._window_seconds.values() for seconds in some]
        if not every:
            return None
        of_setting: dict[SweepSetting, list[float]] = {}
        for (_, setting), some in self._window_seconds.items():
            of_setting.setdefault(setting, []).extend(some)
        return sum(
            (part.rounds * len(part.data.windows) - len(some)) * fmean(some or of_setting[setting] or every)
            for (part, setting), some in self._window_seconds.items()
        )

    def run(self, progress: OnWindow = lambda done, total, name, left_s: None) -> BenchReport:
        """Measure everything. progress: called before each window and at the end, with the windows done, the windows in
        all, the name of the next one, and the seconds that are left (None where they are not known)."""
        self._meter.measure_idle()
        first = self._parts[0].data.windows[0][:1]
        for setting, runner in self._runners.items():
            if not self._stopping:
                progress(0, self.units, f"warming up {setting.name}", None)
                runner.run(first)  # warm-up: lazy set-up and the first use of kernels
        for number in range(self._bench.rounds):
            for window in range(max(len(part.data.windows) for part in self._parts)):
                for part in self._parts:
                    if number < part.rounds and window < len(part.data.windows):
                        self._window(part, number, window, progress)
        progress(self._done, self.units, "", self.left_s())
        return self.report()

    def report(self) -> BenchReport:
        """Return the report of what has been measured so far."""
        tallies = [tally for tally in self._tallies.values() if tally.speeds]
        paired = paired_of(tallies)
        rows = [
            tally.row(ratios_of(tally, tallies), self._meter, self._memory.source, paired[tally]) for tally in tallies
        ]
        data_notes = [note for part in self._parts for note in part.data.notes]
        notes = list(dict.fromkeys([*self._bench.notes, *data_notes, *self._failures()]))
        if not self._meter.available:
            notes.append(f"energy is not measured: {self._meter.reason}")
        elif self._meter.idle_watts is not None:
            notes.append(f"energy by {self._meter.source}; the idle machine draws {self._meter.idle_watts:.1f} W")
        return BenchReport(rows, self._environment, self._about(), notes, not self._stopping)

    def _failures(self) -> Iterator[str]:
        """Yield a note for each data set on which some method has failed to answer."""
        for part in self._parts:
            failed = [
                tally for (part_of_tally, _), tally in self._tallies.items() if part_of_tally is part and tally.failed
            ]
            if failed:
                counts = ", ".join(f"{tally.setting.name} {tally.failed}" for tally in failed)
                yield (
                    f"{part.data.dataset.name}: records without an answer, which count as wrong: {counts}; "
                    f"the first: {failed[0].first_error}"
                )

    @property
    def _done(self) -> int:
        """Number of timed windows so far."""
        return sum(map(len, self._window_seconds.values()))

    def _window(self, part: BenchPart, number: int, window: int, progress: OnWindow) -> None:
        """Measure one window by every method, each time beginning with another one."""
        data, settings = part.data, part.settings
        first = (number * len(data.windows) + window) % len(settings)
        for setting in (*settings[first:], *settings[:first]):
            if self._stopping:
                return
            progress(self._done, self.units, f"{data.dataset.name}: {setting.name}", self.left_s())
            began = self._clock()
            self._measure(part, setting, number, window)
            self._window_seconds[part, setting].append(self._clock() - began)

    def _measure(self, part: BenchPart, setting: SweepSetting, number: int, window: int) -> None:
        prompts, runner = part.data.windows[window], self._runners[setting]
        tally = self._tallies[part, setting]
        self._memory.start()
        self._meter.start()
        answers = runner.run(prompts)
        used = self._meter.stop()
        peak = self._memory.peak()
        if self._stopping or len(answers) < len(prompts):
            return  # the window was cut off, so its time cannot be compared
        if number == 0:
            ranks, score = part.data.dataset.ranks, part.data.dataset.score
            pairs = list(zip(prompts, answers, strict=True))
            if ranks is not None:
                scores = [ranks(prompt.record, answer.ranked) for prompt, answer in pairs]
            else:
                scores = [score(prompt.record, answer.text) for prompt, answer in pairs]
            tally.add_answers(answers, scores, runner.logprobs(prompts, answers))
        tally.exactness = runner.exactness  # it is weaker once a kernel has failed
        tally.add_time((number, window), sum(answer.tokens for answer in answers), used, peak)

    def _room(self) -> int | None:
        """Return how many tokens a prompt may have in every model that some setting uses; None for any number."""
        drafts = any(setting.drafts for setting in self._bench.settings)
        models = self._pair.models if drafts else [self._pair.target]
        if isinstance(self._pair.target, EncoderDecoderModel):
            encoder_inputs = [model.max_encoder_input for model in models if isinstance(model, EncoderDecoderModel)]
            return min((limit for limit in encoder_inputs if limit is not None), default=None)
        limits = [model.max_positions for model in models if model.max_positions is not None]
        return min(limits) - self._bench.sampling.max_new_tokens if limits else None

    def _about(self) -> dict[str, object]:
        info, bench = self._pair.info, self._bench
        return {
            "target": info.target if info else None,
            "draft": info.draft if info else None,
            "dtype": info.dtype if info else None,
            "torch_device": str(self._pair.target.device),
            "batch_size": bench.batch_size,
            "window_records": window_size(bench.batch_size),
            "rounds": bench.rounds,
            "seed": bench.seed,
            "data": bench.data,
            "notes": list(bench.notes),
            "grammar": None if bench.grammar is None else bench.grammar.name,
            **sampling_fields(bench.sampling),
        }
