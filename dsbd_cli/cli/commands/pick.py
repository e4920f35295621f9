"""`dsbd pick`: a choice among the candidates of every record, in input order, with its reason, written as soon as it is
made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import typer

from dsbd_cli._version import __version__
from dsbd_cli.cli.options.declare import flag, grouped, option
from dsbd_cli.cli.options.options import (
    COLUMNS,
    MAIN,
    MAX_ERRORS,
    PIPED,
    Existing,
    FileOptions,
    StreamOptions,
    TalkOptions,
    TemplateOptions,
)
from dsbd_cli.cli.options.settings import template_settings
from dsbd_cli.cli.run.files import (
    check_columns,
    check_files,
    check_rows_file,
    how_to_resume,
    open_input_lines,
    text_hash,
)
from dsbd_cli.cli.run.flow import check_errors
from dsbd_cli.cli.run.output_files import Outputs
from dsbd_cli.cli.run.progress import Reporter, begin_talk
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.cli.run.summary import rows_exit_code
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.variants import BEAM_COLUMNS
from dsbd_cli.errors import DsbdError, InvalidRowError, RowError, UsageError, one_line, option_name, plural, reading
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.jsonl import read_lines
from dsbd_cli.io.lines.line_reader import LineReader
from dsbd_cli.io.lines.tables import is_table, lines_reader
from dsbd_cli.io.records.cells import column_rules
from dsbd_cli.io.records.row import Line, held_bytes
from dsbd_cli.io.schemas.contracts import PICK, dump_line
from dsbd_cli.pick.candidate_rows import CandidateRow, group_of_lines, record_row
from dsbd_cli.pick.choosers import METRICS, ByRisk, ByScore, ByVote, Choice, Chooser, Equal, Weights, read_regex
from dsbd_cli.pick.execution import DEFAULT_TIMEOUT_S, ByExecution, Otherwise, databases
from dsbd_cli.pick.prompts import ByReward, PromptsById
from dsbd_cli.pick.sandbox import SqlStoppedError

NO_RECORDS = "pick reads native or openai records, which hold the key of their row"
PLAIN = (
    "the reward model has a chat template, but prompts are given to it as they stand: --chat puts each through the "
    "template, --no-chat ends this line"
)
CHOICE, FILES = "How one is chosen", "Input and output"

By = Literal["score", "vote", "exec", "mbr", "model"]
OPTIONS_OF: dict[str, tuple[By, ...]] = {
    "answer_regex": ("vote",),
    "equal": ("vote",),
    "weights": ("vote", "mbr"),
    "database": ("exec",),
    "majority": ("exec",),
    "timeout": ("exec",),
    "else_": ("exec",),
    "metric": ("mbr",),
    "model": ("model",),
    "prompts": ("model",),
    "columns": ("model",),
    "chat": ("model",),
    "chat_template": ("model",),
    "chat_template_kwargs": ("model",),
    "device": ("model",),
}

# by setting of a run: its name as the user types it
TYPED = {name: option_name(name) for name in ("by", "input_format", "output_format", "candidates")}
TYPED |= {name.rstrip("_"): option_name(name) for name in OPTIONS_OF}


@dataclass(frozen=True)
class PickOptions(TemplateOptions):
    """Options of how one candidate is chosen."""

    by: By | None = option(
        MAIN,
        "score: the highest score; vote: the commonest answer; exec: the first SQL that runs; mbr: the least "
        "risk against all others; model: the highest reward",
        metavar="HOW",
    )
    answer_regex: str | None = option(
        CHOICE,
        "vote: the answer in a text is the last match, its first group if it has one",
        default="the whole text",
        metavar="REGEX",
    )
    equal: Equal | None = option(
        CHOICE,
        "vote: answers are one whose text is the same (text), or whose value is (math: 1/2 and 0.5, by math-verify)",
        default="text",
        metavar="HOW",
    )
    weights: Weights | None = option(
        CHOICE,
        "vote, mbr: what a candidate counts: uniform, for samples; score: exp(score); probability: "
        "exp(logprob), for beams, which are all different",
        default="uniform",
        metavar="HOW",
    )
    database: str | None = option(
        CHOICE, "exec: SQLite file, opened read-only; {name} stands for a field of the row's metadata", metavar="FILE"
    )
    majority: bool | None = flag(CHOICE, "exec: of those that run, the first whose result most others have too")
    timeout: float | None = option(
        CHOICE, "exec: seconds that one candidate may run", default=DEFAULT_TIMEOUT_S, metavar="S"
    )
    else_: Otherwise | None = option(
        CHOICE,
        "exec: where nothing runs: first: the first candidate is chosen; error: the row fails",
        default="first",
        metavar="WHAT",
    )
    metric: str | None = option(CHOICE, f"mbr: {' or '.join(METRICS)}", default="chrf", metavar="NAME")
    model: str | None = option(CHOICE, "model: sequence classifier with one output; folder or hub id", metavar="MODEL")
    prompts: Path | None = option(CHOICE, "model: the input of dsbd generate, for the prompts by id")
    columns: str | None = option(CHOICE, f"model: {COLUMNS}", metavar="NAMES")
    chat: bool | None = flag(
        CHOICE,
        "model: put each prompt through the reward model's chat template, as one message of a user; "
        "--no-chat: as it stands",
    )
    device: str | None = option(CHOICE, "model: cpu, cuda, cuda:1, ...", default="auto", metavar="DEVICE")


@dataclass(frozen=True)
class PickFiles(StreamOptions):
    """Options of where candidates come from and choices go to."""

    existing: Existing | None = option(
        MAIN,
        "where --output exists: error; overwrite; resume: choose only for rows that it does not hold; retry: "
        "resume, and choose again for failed rows",
        default="error",
        metavar="WHAT",
    )
    input_format: Literal["records", "lines"] | None = option(
        FILES,
        "records: of dsbd generate, native or openai; lines: a candidate per line, --candidates of them per "
        "row (as mbrs reads them)",
        default="records",
        metavar="FORM",
    )
    output_format: Literal["native", "text", "lines"] | None = option(
        FILES,
        "native: records that say what was chosen and why; text: the chosen text alone, escaped as in JSON; "
        "lines: nothing is chosen, all --candidates of a row are written, one per line (as mbrs reads them)",
        default="native",
        metavar="FORM",
    )
    candidates: int | None = option(FILES, "candidates per row, with a format lines", least=1)
    max_errors: int | None = option(FILES, MAX_ERRORS, least=1)


@partial(grouped, elsewhere=PIPED)
def pick(how: PickOptions, files: PickFiles, talk: TalkOptions, arguments: Sequence[str]) -> None:
    """Choose one of the n best of every row: by score, by vote, by running it, by least risk, or by a reward model.

    A line is a record of dsbd generate --n-best N. A line comes out for every line in, in order, as soon as it is done.

    Exit code 3 says that some rows failed; their records say why.
    """
    begin_talk(talk)
    _check(how, files)
    chooser = _chooser(how)
    own = FileOptions(
        input=files.input,
        output=files.output,
        input_format="text" if files.input_format == "lines" else None,
        output_format="text" if files.output_format in ("text", "lines") else None,
        existing=files.existing,
    )
    check_files(own, [*databases(how.database or ""), how.prompts, how.chat_template])
    if code := _PickRun(how, files, own, talk, arguments, chooser).run():
        raise typer.Exit(code)


def _check(how: PickOptions, files: PickFiles) -> None:
    """Refuse options that contradict each other. Raises UsageError."""
    writes_all = files.output_format == "lines"
    if how.by is None and not writes_all:
        raise UsageError(f"--by is missing: it says how to choose, one of {', '.join(get_args(By))}")
    if writes_all and how.by is not None:
        raise UsageError(
            f"--by {how.by} would do nothing, because --output-format lines writes all candidates: drop it"
        )
    for name, ways in OPTIONS_OF.items():
        if getattr(how, name) is not None and how.by not in ways:
            raise UsageError(f"{option_name(name)} would do nothing without --by {' or '.join(ways)}: drop it")
    needed = {"exec": ("database",), "model": ("model", "prompts")}.get(how.by or "", ())
    for name in needed:
        if getattr(how, name) is None:
            raise UsageError(f"--by {how.by} needs --{name}")
    if how.metric is not None and how.metric not in METRICS:
        hint = " (write --output-format lines and give them to mbrs, which has it)" if how.metric == "comet" else ""
        raise UsageError(f"--metric is {how.metric!r}, but must be one of {', '.join(METRICS)}{hint}")
    lines = files.input_format == "lines"
    if files.input is not None and is_table(files.input) and not lines:
        raise UsageError(f"{NO_RECORDS}, not a table such as {files.input}")
    if (lines or writes_all) != (files.candidates is not None):
        if files.candidates is None:
            raise UsageError("a format lines needs --candidates N: how many lines make a row")
        raise UsageError(f"--candidates {files.candidates} would do nothing without a format lines: drop it")
    if lines and (how.by in ("score", "exec", "model") or how.weights in ("score", "probability") or writes_all):
        what = f"--by {how.by}" if how.weights is None else f"--weights {how.weights}"
        what = "--output-format lines" if writes_all else what
        raise UsageError(f"--input-format lines holds texts alone, but {what} needs records: give those")
    if how.timeout is not None and not 0 < how.timeout < float("inf"):
        raise UsageError(f"--timeout is {how.timeout:g}, but must be a number of seconds above 0")


def _chooser(how: PickOptions) -> Chooser | None:
    """Return the chooser; None for a reward model, which is loaded later.

    Raises UsageError.
    """
    match how.by:
        case "score":
            return ByScore()
        case "vote":
            answer = None if how.answer_regex is None else read_regex("--answer-regex", how.answer_regex)
            return ByVote(answer, how.weights or "uniform", how.equal or "text")
        case "exec":
            timeout_s = how.timeout or DEFAULT_TIMEOUT_S
            chooser = ByExecution(how.database or "", bool(how.majority), timeout_s, how.else_ or "first")
            chooser.check("--database")
            return chooser
        case "mbr":
            return ByRisk(how.metric or "chrf", how.weights or "uniform")
        case _:
            return None


class _PickRun:
    """One run over one input."""

    def __init__(
        self,
        how: PickOptions,
        files: PickFiles,
        own: FileOptions,
        talk: TalkOptions,
        arguments: Sequence[str],
        chooser: Chooser | None,
    ) -> None:
        """own: the files as options of `dsbd generate`. chooser: None where nothing is chosen, or by a reward model."""
        self._how, self._files, self._own, self._arguments = how, files, own, arguments
        values = {
            "by": how.by,
            **{name.rstrip("_"): getattr(how, name) for name in OPTIONS_OF if name != "device"},
            "input_format": files.input_format or "records",
            "output_format": files.output_format or "native",
            "candidates": files.candidates,
            "dsbd": __version__,
        }
        self._settings: dict[str, object] = {
            name: value if value is None or isinstance(value, int | float) else str(value)
            for name, value in values.items()
        }
        self._template = template_settings(how)
        if (template := self._template[0]) is not None:
            self._settings["chat_template"] = text_hash(template)
        self._signals = StopSignals()
        self._reporter = Reporter(talk, files.output, says_why=(files.output_format or "native") == "native")
        self._chosen = self._not_first = self._none_ran = 0
        self._chooser = chooser

    def run(self) -> int:
        """Choose for every row, and return the exit code."""
        totals = self._reporter.totals
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            stream, name, size = open_input_lines(self._own, stack, "dsbd pick < records.jsonl")
            self._reporter.input_bytes = size
            outputs = stack.enter_context(Outputs(self._own, self._settings, self._reporter, TYPED))
            stack.callback(self._reporter.stop)
            blank = self._files.input_format == "lines"  # where a blank line is an empty candidate
            reader = stack.enter_context(LineReader(stream, name, read=partial(read_lines, blank=blank)))
            if self._how.by == "model":
                self._chooser = self._load_reward_model(stack)
            writer, _ = outputs.begin()
            self._signals.on_stop = self._stop
            of_lines = self._files.input_format == "lines" and self._files.candidates
            for row in self._groups(reader, of_lines) if of_lines else self._records(reader):
                if self._signals.number is not None:
                    break
                if row is None:
                    writer.flush()
                    continue
                done = outputs.done.take(row.id, row.key)
                if isinstance(self._chooser, ByReward) and (done is not None or row.error is not None):
                    self._chooser.pass_over(row)
                if done is not None:
                    totals.skip(done)
                    continue
                try:
                    lines = self._lines(row)
                except SqlStoppedError:
                    break
                for line in lines:
                    writer.write(line)
                check_errors(totals.failed, self._files.max_errors, f"; {self._how_to_resume()}")
            writer.flush()
            if self._signals.number is None and reader.complete:
                outputs.drop_gone()
        if self._signals.number is not None:
            self._reporter.summary(f"stopped: {self._summary_line()}; {self._how_to_resume()}", always=True)
            raise StoppedError(self._signals.number)
        self._reporter.summary(self._summary_line(), always=self._none_ran > 0)
        return rows_exit_code(totals)

    def _stop(self) -> None:
        if isinstance(self._chooser, ByExecution):
            self._chooser.stop()

    def _load_reward_model(self, stack: ExitStack) -> Chooser:
        """Load the reward model. This is where torch is imported."""
        path, how = self._how.prompts, self._how
        assert path is not None
        with reading(f"--prompts {path}"):
            check_columns(how.columns, path)
            rules = column_rules(how.columns)
            check_rows_file(path, rules)
            stream = stack.enter_context(open_input(path))
        from dsbd_cli.models.reward import RewardModel

        model = RewardModel(ModelSpec(how.model or "", device=how.device or "auto"), *self._template)
        if how.chat and not model.chat:
            raise UsageError(f"--chat: reward model {how.model} has no chat template: drop it")
        prompts = PromptsById(stream, str(path), lines_reader(path, rules), chat=bool(how.chat))
        return ByReward(model.scores, prompts, self._warn_plain if how.chat is None and model.chat else None)

    def _warn_plain(self) -> None:
        self._reporter.warn(PLAIN)

    def _records(self, reader: LineReader) -> Iterator[CandidateRow | None]:
        """Yield a row for each record, and None where no line is ready."""
        index = 0
        for item in reader:
            if item is None:
                yield None
                continue
            number, line = item
            if number == 1 and held_bytes(line).startswith(",".join(BEAM_COLUMNS).encode()):
                raise UsageError(f"{NO_RECORDS}, not lines of --output-format csv")
            yield record_row(line, index=index, number=number)
            index += 1

    def _groups(self, reader: LineReader, count: int) -> Iterator[CandidateRow | None]:
        """Yield a row for every `count` lines, and None where no line is ready."""
        index, group, first = 0, list[Line](), 0
        for item in reader:
            if item is None:
                yield None
                continue
            number, line = item
            first = first if group else number
            group.append(line)
            if len(group) == count:
                yield group_of_lines(group, index=index, number=first)
                index, group = index + 1, []
        if group:
            message = InvalidRowError(
                f"line {first}: {len(group)} lines are left, but a row has {count} (--candidates)"
            )
            yield CandidateRow(index, first, str(index), "", error=message)

    def _lines(self, row: CandidateRow) -> list[bytes]:
        """Return the lines to write for a row. Raises SqlStoppedError if its choice was stopped before it was made."""
        error: RowError | None = row.error
        choice: Choice | None = None
        if error is None:
            try:
                if self._chooser is not None:
                    choice = self._chooser.choose(row)
                elif (count := len(row.candidates)) != self._files.candidates:
                    raise InvalidRowError(f"the row has {count} candidates, not {self._files.candidates}")
            except RowError as failed:
                error = type(failed)(f"line {row.number}: {failed}")
            except (DsbdError, SqlStoppedError):
                raise
            except Exception as failed:  # whatever a text causes in a library is an error of its row
                message = one_line(failed)
                error = RowError(f"line {row.number}: {type(failed).__name__}: {message}".removesuffix(": "))
        self._reporter.row(row.index, row.id, error)
        if error is None:
            self._chosen += 1
            self._not_first += choice is not None and choice.beam > 0
            self._none_ran += choice is not None and choice.why.get("ran") == 0
            if len(row.candidates) == 1 and self._chooser is not None:
                message = f"row {row.index} (id {row.id}) has one candidate: dsbd generate --n-best N reports more"
                self._reporter.warn(message, kind="one candidate")
        if self._files.output_format == "lines":
            texts = (
                [candidate.text for candidate in row.candidates]
                if error is None
                else [""] * (self._files.candidates or 0)
            )
            return [" ".join(text.split()).encode() for text in texts]
        if self._files.output_format == "text":
            return [b"" if choice is None else dump_line(row.candidates[choice.beam].text)[1:-1]]
        return [_record(row, choice, self._how.by or "", error)]

    def _summary_line(self) -> str:
        totals = self._reporter.totals
        parts = [plural(totals.rows, "row")]
        if self._how.by is not None and self._chosen:
            parts.append(f"{self._not_first} of {self._chosen} not the first candidate")
        if self._none_ran:
            parts.append(f"{plural(self._none_ran, 'row')} with nothing that runs (--else error makes them fail)")
        parts += [f"{totals.failed} failed"] if totals.failed else []
        parts += [f"{totals.skipped} done before"] if totals.skipped else []
        failed = totals.skipped_failed
        parts += [f"{failed} of them failed (--existing retry chooses for them again)"] if failed else []
        return ", ".join(parts)

    def _how_to_resume(self) -> str:
        return how_to_resume(self._own, self._arguments, "native")


def _record(row: CandidateRow, choice: Choice | None, by: str, error: RowError | None) -> bytes:
    record: dict[str, object] = {"schema": PICK.id, "index": row.index, "id": row.id}
    if row.metadata is not None:
        record["metadata"] = row.metadata
    record["key"] = row.key
    if error is not None or choice is None:
        record["error"] = {"type": type(error).__name__, "message": str(error), "line": row.number}
        return PICK.line(record)
    record.update(row.candidates[choice.beam].fields)
    record["pick"] = {"by": by, "beam": choice.beam, "of": len(row.candidates), **choice.why}
    return PICK.line(record)
