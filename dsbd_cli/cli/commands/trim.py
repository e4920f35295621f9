"""`dsbd trim-draft`: a draft with a smaller LM head, and what that costs and saves."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsbd_cli.cli.options.declare import flag, grouped, option
from dsbd_cli.cli.options.options import (
    CHAT,
    COLUMNS,
    MAIN,
    DecodeOptions,
    DeviceOptions,
    LoadOptions,
    MethodOptions,
    PairOptions,
    SamplingOptions,
    TemplateOptions,
)
from dsbd_cli.cli.options.settings import RunSettings, fixed_depth, refuse_idle, refuse_idle_templates, run_settings
from dsbd_cli.cli.run.files import check_columns, check_model_folder
from dsbd_cli.cli.run.messages import say, set_style, warn
from dsbd_cli.cli.run.prompts import HELD_OUT_EVERY, HELD_OUT_MOST, hold_out, read_prompts, warn_left_out, warn_plain
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import DsbdError, UsageError, option_name, plural, reading
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.jsonl import read_lines, read_object
from dsbd_cli.io.lines.tables import is_table
from dsbd_cli.io.schemas import contracts
from dsbd_cli.lab.reports.units import DASH
from dsbd_cli.pick.candidate_rows import record_row
from dsbd_cli.requests import Request

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.train.compare import Sums
    from dsbd_cli.train.trim import TrimReport

TRIM = "Trimming"
COUNTERS = ("steps", "target_calls", "draft_calls", "drafted", "accepted")


@dataclass(frozen=True)
class TrimOptions:
    """Options of `dsbd trim-draft`: what is counted, what is kept, where it goes."""

    output: Path | None = option(TRIM, "new folder for the trimmed draft (required)", "-o", metavar="FOLDER")
    texts: list[str] | None = option(TRIM, "count a file that dsbd generate wrote; may be repeated", metavar="FILE")
    input: Path | None = option(
        TRIM,
        "answer these prompts now, as generate reads them, and count the answers; "
        f"every {HELD_OUT_EVERY}th, {HELD_OUT_MOST} at most, is held out",
        "-i",
    )
    held_out: Path | None = option(TRIM, "prompts to measure on instead of every eighth one")
    columns: str | None = option(TRIM, COLUMNS, metavar="NAMES")
    chat: bool | None = flag(MAIN, CHAT)
    size: int | None = option(TRIM, "rows to keep, special and end tokens among them")
    coverage: float | None = option(TRIM, "keep as many rows as cover this share of the counted tokens")
    max_new_tokens: int | None = option(MAIN, "generated tokens at most", default=SamplingConfig().max_new_tokens)
    json: bool | None = flag(TRIM, "one JSON object on standard output, no table")
    quiet: bool | None = flag(TRIM, "no table, nothing but errors", "-q")


@grouped
def trim_draft(
    trim: TrimOptions, pair: PairOptions, decoding: DecodeOptions, loading: LoadOptions, templates: TemplateOptions
) -> None:
    """Write a draft whose LM head has only the rows of frequent tokens (VocabTrim): cheaper to run, the text the same.

    Tokens are counted in the target's answers: in files of dsbd generate (--texts), or in answers to --input.

    Acceptance and time of both drafts are measured on held-out prompts and shown.
    """
    set_style(quiet=trim.quiet)
    if trim.output is None:
        raise UsageError("--output is missing: name a new folder for the trimmed draft")
    check_model_folder(trim.output)
    if (trim.texts is None) == (trim.input is None):
        raise UsageError("give either --texts or --input: what shall be counted")
    if trim.input is not None and trim.held_out is not None and trim.input.resolve() == trim.held_out.resolve():
        raise UsageError(
            f"--input and --held-out are both {trim.input}, but a draft is not measured on what it is made from: "
            "name other prompts, or drop --held-out"
        )
    check_columns(trim.columns, next((path for path in (trim.input, trim.held_out) if path and is_table(path)), None))
    if trim.json and trim.quiet:
        raise UsageError("--json and --quiet cannot be used together: give one of them")
    if trim.texts is not None and trim.held_out is None:
        idle = {**vars(decoding), "max_new_tokens": trim.max_new_tokens}
        refuse_idle(
            "--texts are counted, and nothing is answered without --held-out",
            *((f"{option_name(name)} {value}", value) for name, value in idle.items()),
            ("--chat" if trim.chat else "--no-chat", trim.chat),
        )
        refuse_idle_templates("--texts are counted, and nothing is answered without --held-out", templates)
    method = MethodOptions(**vars(decoding))
    sampling = SamplingOptions(max_new_tokens=trim.max_new_tokens)
    devices = DeviceOptions(**vars(loading) | vars(templates))
    settings = run_settings(pair, fixed_depth(pair, method), sampling, devices, chat=bool(trim.chat))
    if settings.draft is None:
        raise UsageError("there is no draft to trim: name one with --draft")
    with StopSignals():
        _Trimming(trim, settings, settings.draft, trim.output).run()


class _Trimming:
    """One run of the command."""

    def __init__(self, trim: TrimOptions, settings: RunSettings, draft: ModelSpec, output: Path) -> None:
        self._trim, self._settings, self._draft, self._output = trim, settings, draft, output

    def run(self) -> None:
        """Count tokens, write the trimmed draft, measure both drafts, and print the results."""
        from dsbd_cli.models.checkpoints.catalog import end_tokens
        from dsbd_cli.train.trim import check, trim

        check(self._draft, self._output, size=self._trim.size, coverage=self._trim.coverage)
        prompts = self._prompts(self._trim.input, "--input")
        held = self._prompts(self._trim.held_out, "--held-out")
        if self._trim.held_out is None:
            held, prompts = hold_out(prompts)
        if asked := (*prompts, *held):
            warn_plain(self._trim.chat, self._engine.info, asked)
        counts = self._count(prompts)
        held = self._answerable(held, "held-out prompt")  # nothing may fail once the draft is written
        size, coverage, ends = self._trim.size, self._trim.coverage, end_tokens(self._settings.target)
        report = trim(self._draft, self._output, counts, size=size, coverage=coverage, end_tokens=ends)
        try:
            measured = self._measure(held) if held else None
        except StoppedError as stopped:
            say(f"stopped: {self._output} is written, but not measured", level="error")
            stopped.early = False
            raise
        if measured is None:
            say("nothing is measured, because no prompts are held out: --held-out FILE names some")
        else:
            from dsbd_cli.train.compare import worse

            if loss := worse(*measured):
                more = "a larger --size or --coverage keeps more rows"
                warn(f"the trimmed draft is worse than the full one: {loss}: {more}")
        if self._trim.json:
            typer.echo(contracts.TRIM.line(self._record(report, len(held), measured)))
        elif not self._trim.quiet:
            _show(report, measured, len(held), str(self._output))

    def _prompts(self, path: Path | None, name: str) -> list[Request]:
        if path is None:
            return []
        columns = self._trim.columns if is_table(path) else None
        requests = read_prompts(name, path, self._settings.rows, columns=columns)
        if not requests:
            raise UsageError(f"{name} {path} holds no prompts")
        return requests

    def _answerable(self, prompts: list[Request], kind: str) -> list[Request]:
        """Return the prompts that fit both models, and warn of the others."""
        if not prompts:
            return []
        from dsbd_cli.train.target_answers import answerable

        kept, failed = answerable(self._engine, prompts)
        warn_left_out(failed, kind)
        return kept

    def _count(self, prompts: list[Request]) -> Counter[int]:
        if self._trim.texts is not None:
            from dsbd_cli.train.trim import count_texts

            return count_texts(self._draft, self._texts())
        counts: Counter[int] = Counter()
        prompts = self._answerable(prompts, "prompt")
        if not prompts:
            raise DsbdError(f"no prompt of {self._trim.input} can be answered, so there is nothing to count")
        for result in self._engine.run(prompts):
            if result.error is not None:
                raise DsbdError(f"prompt {result.request.id} cannot be answered: {result.error}")
            counts.update(result.hypotheses[0].token_ids)
        return counts

    def _texts(self) -> Iterator[str]:
        for name in self._trim.texts or ():
            if is_table(Path(name)):
                raise UsageError(f"--texts {name} is a table, whose texts are not counted: give native or openai lines")
            with reading(f"--texts {name}"), open_input(Path(name)) as stream:
                for number, line in read_lines(stream):
                    record = (read_object(line) if isinstance(line, bytes) else None) or {}
                    if record.get("error") is not None:
                        continue
                    if isinstance(text := record.get("text"), str):
                        yield text
                        continue
                    row = record_row(line, index=number - 1, number=number)
                    if row.error is not None:
                        raise UsageError(f"--texts {name}, {row.error}")
                    yield row.candidates[0].text

    def _measure(self, held: list[Request]) -> tuple[Sums, Sums]:
        from dsbd_cli.train.compare import measure, with_draft

        small = replace(self._draft, source=str(self._output))
        trimmed = with_draft(self._engine, small, self._settings.target)
        first, second = measure((self._engine, trimmed), held)
        return first, second

    @cached_property
    def _engine(self) -> Engine:
        """The target with the full draft, which is loaded when it is first needed."""
        return self._settings.load()

    def _record(self, report: TrimReport, prompts: int, measured: tuple[Sums, Sums] | None) -> dict[str, object]:
        record: dict[str, object] = {
            "schema": contracts.TRIM.id,
            "target": self._settings.target.source,
            "draft": self._draft.source,
            "output": str(self._output),
            **asdict(report),
            "held_out_prompts": prompts,
        }
        for name, numbers in zip(("before", "after"), measured or (None, None), strict=True):
            record[name] = numbers if numbers is None else {**_sums(numbers), **_rates(numbers)}
        return record


def _sums(measured: Sums) -> dict[str, float]:
    """Return the counters, the tokens of the best texts and the seconds, by their names in the record."""
    counters = {name: getattr(measured.stats, name) for name in COUNTERS}
    stats = measured.stats
    return {**counters, "tokens": measured.tokens, "draft_s": stats.draft_s, "target_s": stats.target_s}


def _rates(measured: Sums) -> dict[str, float | None]:
    """Return shares, steps per call and ms per token, computed from the sums; None where nothing was counted."""

    def per(value: float, count: int) -> float | None:
        return round(value / count, 6) if count else None

    stats = measured.stats
    return {
        "acceptance_rate": per(stats.accepted, stats.drafted),
        "steps_per_call": per(stats.steps, stats.target_calls),
        "draft_ms_per_token": per(1e3 * stats.draft_s, measured.tokens),
        "target_ms_per_token": per(1e3 * stats.target_s, measured.tokens),
    }


def _show(report: TrimReport, measured: tuple[Sums, Sums] | None, prompts: int, output: str) -> None:
    from dsbd_cli.lab.reports.screen import Screen, before_and_after

    table = before_and_after()
    table.add_row("head rows", str(report.vocab_size), str(report.kept))
    table.add_row("head MB", *(f"{n / 1e6:.3f}" for n in (report.head_bytes_before, report.head_bytes_after)))
    table.add_row(f"of {report.counted} counted tokens", f"{1:.2%}", f"{report.coverage:.2%}")
    if measured is not None:
        names = {
            "acceptance_rate": "drafts accepted",
            "steps_per_call": "steps per target call",
            "draft_ms_per_token": "draft ms per token",
            "target_ms_per_token": "target ms per token",
        }
        rates = [_rates(rate) for rate in measured]
        for name, title in names.items():
            table.add_row(title, *(DASH if rate[name] is None else f"{rate[name]:.3f}" for rate in rates))
    console = Screen(sys.stdout)
    console.print(table)
    on = f", measured on {plural(prompts, 'held-out prompt')}" if measured is not None else ""
    console.say(f"{output} is written{on}")
