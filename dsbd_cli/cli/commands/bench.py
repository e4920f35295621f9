"""`dsbd bench`: a comparison of methods on the user's models and data."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsbd_cli.cli.options.bench_options import (
    DEFAULT_RECORDS,
    DEFAULT_ROUNDS,
    DEFAULT_TASKS,
    BenchOutputs,
    DataOptions,
    SweepOptions,
)
from dsbd_cli.cli.options.declare import grouped
from dsbd_cli.cli.options.options import (
    AnswerOptions,
    DeviceOptions,
    DrawOptions,
    MethodOptions,
    PairOptions,
    SamplingOptions,
)
from dsbd_cli.cli.options.settings import has_draft, refuse_idle, run_settings
from dsbd_cli.cli.run.files import check_columns, check_files_under, check_report_files
from dsbd_cli.cli.run.messages import Talk, duration, say, set_style, talking
from dsbd_cli.cli.run.prompts import CHAT_OR_NOT, check_chat
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.cli.run.summary import ROWS_FAILED
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.errors import DsbdError, UsageError, as_utf8, option_name
from dsbd_cli.io.lines.replace import write_atomically
from dsbd_cli.io.records.cells import column_rules
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.lab.bench.methods import FUZZY_METHODS, METHODS
from dsbd_cli.lab.bench.sweep import SweepPlan, choose_methods, plan, read_values
from dsbd_cli.lab.tasks.choose import OF_LINES, OWN_TASK, open_dataset
from dsbd_cli.lab.tasks.dataset import Dataset, with_shots
from dsbd_cli.lab.tasks.spider import QUESTIONS, SCHEMAS
from dsbd_cli.pick.execution import databases

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.lab.bench.run import Bench, OnWindow
    from dsbd_cli.lab.reports.bench_data import BenchReport


@grouped
def bench(
    data: DataOptions,
    sweep: SweepOptions,
    pair: PairOptions,
    drawing: DrawOptions,
    answers: AnswerOptions,
    devices: DeviceOptions,
    outputs: BenchOutputs,
    arguments: Sequence[str],
) -> None:
    """Compare methods on these models and this data: quality, speed, steps per target call, memory and energy.

    The models are loaded once. Every few records are answered by every method in turn.

    Without options: the built-in pair on its two tasks, in under two minutes. Ctrl-C prints what is measured by then.

    Exit code 3 says that some method gave no answer to some record; a note says which.
    """
    set_style(quiet=outputs.quiet)
    data = _with_own_prompts(data)
    draft_wanted = has_draft(pair)
    records, shots = data.records or DEFAULT_RECORDS, data.shots or 0
    if data.dev_data is not None and not shots:
        raise UsageError(f"--dev-data {data.dev_data} would do nothing without --shots: drop it")
    planned = _plan(sweep, draft_wanted)
    sampling = _sampling(drawing, planned)
    settings = run_settings(pair, MethodOptions(), sampling, devices, chat=bool(data.chat), allow=answers.allow)
    if draft_wanted and not any(setting.drafts for setting in planned.settings):
        refuse_idle("no method of --methods drafts", (f"--draft {pair.draft}", pair.draft))
    if settings.batch_size is None:
        raise UsageError("--batch-size auto would compare methods at different sizes: give a number")
    check_report_files(
        {"--json": outputs.json, "--plot": outputs.plot},
        [*_data_files(data), data.dev_data, answers.allow, sweep.index, *_databases(data.score), *settings.files],
        existing=outputs.existing,
    )
    datasets, notes = _datasets(data, shots, settings.rows), list[str]()
    planned = _runnable(planned, sweep.methods, settings.rows, datasets)
    with StopSignals() as signals:
        engine = settings.loader(drafts=any(setting.drafts for setting in planned.settings))()
        # behind the load, which decides how soon threads sleep before torch is imported
        from dsbd_cli.lab.bench.prepare import BenchConfig
        from dsbd_cli.lab.bench.run import Bench

        if engine.info is not None and engine.info.draft_form is not None:
            assisted = [setting for setting in planned.settings if METHODS[setting.method].peer and setting.drafts]
            planned = planned.without(
                assisted, sweep.methods, "transformers runs neither a draft head nor a trimmed draft"
            )
        check_chat(data.chat, engine.info)
        if data.input is not None and data.chat is None and _lack_template(engine, datasets, records):
            notes.append(CHAT_OR_NOT)
        bench_config = BenchConfig(
            datasets=datasets,
            settings=planned.settings,
            records=records,
            rounds=data.rounds or DEFAULT_ROUNDS,
            batch_size=settings.batch_size,
            sampling=settings.rows.sampling,
            seed=settings.rows.seed,
            data=None if data.data is None else as_utf8(str(data.data)),
            notes=(*planned.notes, *notes),
            grammar=settings.rows.grammar,
        )
        running = Bench(engine, bench_config, command=[str(word) for word in arguments] or ["bench"])
        signals.on_stop = running.stop
        failed = _run(running, outputs)
        if signals.number is not None:
            raise StoppedError(signals.number)
    if failed:
        raise typer.Exit(ROWS_FAILED)


def _plan(sweep: SweepOptions, draft: bool) -> SweepPlan:
    """Return the settings to run, with notes."""
    lists = {
        name: read_values(option_name(name), name, text)
        for name, text in vars(sweep).items()
        if name not in ("methods", "index") and text is not None
    }
    methods = sweep.methods
    if methods is None and "fuzzy_threshold" in lists:
        methods = ",".join(FUZZY_METHODS)
    names, notes = choose_methods(methods, draft=draft, drafters=lists.get("drafter", ()))
    planned = plan(names, lists, None if sweep.index is None else str(sweep.index))
    return dataclasses.replace(planned, notes=(*notes, *planned.notes))


def _runnable(planned: SweepPlan, methods: str | None, rows: RowReader, datasets: Sequence[Dataset]) -> SweepPlan:
    """Return the plan without the settings that cannot do what the run and its lines ask for.

    Raises UsageError if --methods names such a method.
    """
    asks = {what for dataset in datasets for what in dataset.asks}
    asks |= {"grammar"} if rows.grammar is not None else set()
    asks |= {"prefix"} if rows.sampling.prefix is not None else set()
    ours = (
        ("grammar", "follow a grammar"),
        ("allow", "follow a line's own allow"),
        ("prefix", "continue a prefix"),
        ("truncated", "truncate prompts"),
    )
    for what, verb in ours:
        if what in asks:
            peers = [setting for setting in planned.settings if not isinstance(setting.config, MethodConfig)]
            planned = planned.without(peers, methods, f"only methods of our own engine {verb}")
    if "greedy" in asks:
        cannot_be_greedy = [setting for setting in planned.settings if not setting.config.takes_greedy]
        planned = planned.without(cannot_be_greedy, methods, "some line asks for temperature 0, which it does not take")
    theirs = [
        setting.name
        for setting in planned.settings
        if setting.config.samples and not isinstance(setting.config, MethodConfig)
    ]
    if "seed" in asks and theirs:
        note = f"{', '.join(theirs)}: transformers draws with the run's seed, not with a line's own"
        planned = dataclasses.replace(planned, notes=(*planned.notes, note))
    if bare := next((dataset.name for dataset in datasets if dataset.execute is None), None):
        running = [setting for setting in planned.settings if METHODS[setting.method].pick == "exec"]
        planned = planned.without(running, methods, f"{bare} has no database to run SQL in")
    return planned


def _sampling(drawing: DrawOptions, planned: SweepPlan) -> SamplingOptions:
    """Return these options as options of generate.

    Raises UsageError for sampling options if no method samples, and for temperature 0 if some method does not take it.
    """
    if not any(setting.config.samples for setting in planned.settings):
        drawn = ("temperature", "top_k", "top_p", "min_p", "seed")
        refuse_idle("no method of --methods samples", *((option_name(name), getattr(drawing, name)) for name in drawn))
    cannot_be_greedy = [setting.name for setting in planned.settings if not setting.config.takes_greedy]
    if drawing.temperature == 0 and cannot_be_greedy:
        raise UsageError(
            f"--temperature is 0, which {cannot_be_greedy[0]} does not take: drop it, or take the method from --methods"
        )
    return SamplingOptions(**vars(drawing))


def _with_own_prompts(data: DataOptions) -> DataOptions:
    """Return the options with --input as the data of a task. Raises UsageError for what cannot be used with it."""
    if data.input is None:
        if OWN_TASK in [name.strip() for name in (data.task or "").split(",")]:
            raise UsageError(f"--task {OWN_TASK} is no task: name the prompts with --input")
        return data
    for name in ("task", "data"):
        if getattr(data, name) is not None:
            raise UsageError(f"--input and --{name} cannot be used together: give one of them")
    return dataclasses.replace(data, task=OWN_TASK, data=data.input)


def _lack_template(engine: Engine, datasets: Sequence[Dataset], records: int) -> bool:
    """Return whether one of the first `records` records of a data set is a plain prompt although the target has a chat
    template. The others are not answered, so that the gold SQL of a record among them need not run."""
    has_template = engine.info is not None and engine.info.chat
    return has_template and any(
        record.prompt and "messages" not in record.meta
        for data in datasets
        for record in itertools.islice(data.records(), records)
    )


def _data_files(data: DataOptions) -> list[Path]:
    """Return the files that the task's data are read from."""
    if data.data is None:
        return []
    return [data.data / QUESTIONS, data.data / SCHEMAS] if data.task == "spider" else [data.data]


def _databases(score: str | None) -> list[str]:
    """Return the databases that --score runs SQL on."""
    kind, _, template = (score or "").partition(":")
    return databases(template) if kind == "exec" else []


def _datasets(data: DataOptions, shots: int, rows: RowReader) -> list[Dataset]:
    """Return the data sets. rows: settings that lines inherit. Raises UsageError."""
    names = [name.strip() for name in (DEFAULT_TASKS if data.task is None else data.task).split(",")]
    for index, name in enumerate(names):
        if not name:
            raise UsageError(
                f"--task {data.task or repr(data.task)} names no task: write names with one comma between them"
            )
        if name in names[:index]:
            raise UsageError(f"--task: {name} stands there twice: drop one")
    if data.data is not None and len(names) > 1:
        raise UsageError(f"--data {data.data} belongs to one task, but --task is {', '.join(names)}: name one")
    if data.dev_data is not None and data.data is None:
        raise UsageError(f"--dev-data {data.dev_data} goes with --input or --data, but neither is given")
    if data.chat is not None and not any(name in OF_LINES for name in names):
        own = " and ".join(names) + (" bring their" if len(names) > 1 else " brings its")
        raise UsageError(f"--chat would do nothing, because {own} own prompts: drop it")
    check_files_under(data.files_under, "there is no --input and no --data" if data.data is None else None)
    check_columns(data.columns, data.data if names == [OWN_TASK] else None)
    columns = column_rules(data.columns, strict=rows.strict)
    opened = [
        open_dataset(
            name_of_task,
            data.data,
            data.dev_data,
            data.metric,
            data.files_under,
            data.score,
            rows=rows,
            columns=columns,
        )
        for name_of_task in names
    ]
    return [with_shots(dataset, shots) for dataset in opened] if shots else opened


def _run(running: Bench, outputs: BenchOutputs) -> bool:
    """Measure, then print and write the report. After a signal or an error it has what was measured until then. Returns
    whether some record has no answer. Raises the error."""
    failure: Exception | None = None
    with talking() as talk:
        try:
            report = running.run(_progress_of(talk, running.settings))
        except Exception as error:
            running.stop()
            failure, report = error, running.report()
    if not report.rows:
        if failure is not None:
            raise failure
        say("stopped before anything was measured")
        return False
    from dsbd_cli.lab.reports.bench_table import print_report

    try:
        _write(report, outputs)
    except DsbdError as error:
        if failure is None:
            raise
        say(str(error), level="error")
    finally:  # a full disk does not lose what was measured
        print_report(report, sys.stdout)
        if sys.stdout is not None:
            sys.stdout.flush()
    if failure is not None:
        raise failure
    return any(row.failed for row in report.rows)


def _write(report: BenchReport, outputs: BenchOutputs) -> None:
    if outputs.json is not None:
        from dsbd_cli.lab.reports.bench_json import json_lines

        write_atomically(outputs.json, json_lines(report))
    if outputs.plot is not None:
        from dsbd_cli.lab.reports.bench_plot import bench_figure, picture_bytes

        write_atomically(outputs.plot, picture_bytes(bench_figure(report), outputs.plot.suffix))


def _progress_of(talk: Talk, settings: int) -> OnWindow:
    """Return a function that reports which window is measured.

    In a log it reports at the beginning, after the first window, and after the first window of every method. settings:
    number of settings that are measured in turn.
    """
    told = set[int]()

    def on_window(done: int, total: int, name: str, left_s: float | None) -> None:
        due = done in (0, 1, settings) and done < total and done not in told
        told.add(done)
        left = "" if left_s is None else f", about {duration(left_s)} left"
        talk.now(f"{done} of {total} windows{left}, {name}", {"done": done, "total": total, "left_s": left_s}, due=due)

    return on_window
