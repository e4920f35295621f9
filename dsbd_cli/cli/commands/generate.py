"""`dsbd generate`: a record for every input line, in input order, each written as soon as it is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import orjson
import typer

from dsbd_cli._version import __version__
from dsbd_cli.cli.options.declare import grouped
from dsbd_cli.cli.options.options import (
    STANDARD,
    AnswerOptions,
    DeviceOptions,
    FileOptions,
    JobOptions,
    MethodOptions,
    PairOptions,
    RowOptions,
    SamplingOptions,
    TalkOptions,
)
from dsbd_cli.cli.options.precedence import job_text
from dsbd_cli.cli.options.scale_options import ScaleOptions, pool_config
from dsbd_cli.cli.options.settings import RunSettings, refuse_idle, refuse_idle_templates, run_settings
from dsbd_cli.cli.run.dry_run import RowTally, dry_run_document, dry_run_lines
from dsbd_cli.cli.run.files import (
    check_files,
    count_rows,
    file_hash,
    how_to_resume,
    input_columns,
    input_header,
    lacks_input,
    open_input_lines,
    output_format,
    reads_table,
    resumes,
    text_hash,
    unlike_name,
)
from dsbd_cli.cli.run.flow import MakeRecord, ReadRow, RowFlow, TooManyErrorsError
from dsbd_cli.cli.run.messages import error_line, quote_command, say
from dsbd_cli.cli.run.output_files import Outputs, read_earlier_run
from dsbd_cli.cli.run.progress import Reporter, begin_talk
from dsbd_cli.cli.run.prompts import CHAT_OR_NOT, NOT_CONTINUED, check_chat, check_reasoning, is_left_off
from dsbd_cli.cli.run.shard import Shard, shard_of, sharded_files
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.cli.run.summary import Summary, rows_exit_code
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import SUFFIX_CACHE
from dsbd_cli.errors import NoWorkersError, UsageError, option_name, plural
from dsbd_cli.io.lines.jsonl import LineWriter, ReadLines, read_lines
from dsbd_cli.io.lines.line_reader import LineReader
from dsbd_cli.io.lines.resume import DoneRows, earlier_texts
from dsbd_cli.io.lines.tables import Header, lines_reader
from dsbd_cli.io.records.beam_record import carried_columns
from dsbd_cli.io.records.file_roots import files_root
from dsbd_cli.io.records.record_parts import CarriedColumn, MethodRecord, run_fingerprint
from dsbd_cli.io.records.row import Line, Row
from dsbd_cli.io.schemas.contracts import DRY_RUN
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:
    from dsbd_cli.scale.worker import LoadEngine, RunsRequests
    from dsbd_cli.scale.workers import PoolConfig

NOT_INVARIANT = (
    "on this machine the target's logits depend on what else is in a forward, so that rounding may change a text with "
    "the draft or the batch: records say same-law, not same-text (see docs/hardware.md)"
)

WIDE = 32  # beams; a run with as many or more says how much memory a row takes

DEMONSTRATION = (
    "the built-in pair answers, which is for demonstration and knows two toy formats: name a model with --target "
    "(dsbd models lists names)"
)

MOST_REMEMBERED = 4096  # answers of an earlier run that drafts are looked up in

EXPLAINED = (
    "generate answers prompts that come from a file or a pipe, and writes a record for each. For example:",
    quote_command("dsbd generate --target MODEL -i prompts.jsonl -o answers.jsonl"),
    quote_command("dsbd generate --target MODEL --input-format text < questions.txt"),
    'a line of prompts.jsonl is {"prompt": "..."}, and MODEL is a folder, a hub id or a GGUF file. Without --target '
    "the built-in pair answers, which is for demonstration and knows two toy formats: dsbd demo shows it",
)


@grouped
def generate(
    files: FileOptions,
    failing: RowOptions,
    pair: PairOptions,
    method: MethodOptions,
    sampling: SamplingOptions,
    answers: AnswerOptions,
    devices: DeviceOptions,
    scale: ScaleOptions,
    talk: TalkOptions,
    job: JobOptions,
    arguments: Sequence[str],
) -> None:
    """Answer prompts with speculative beam decoding: JSON lines in, one JSON line per input line out.

    A line is an object with prompt (or messages), an id and sampling options of its own, or a line of an OpenAI batch.

    Every option may also stand in --config FILE or in a variable such as DSBD_NUM_BEAMS.

    The command line wins over the file, the file over the environment. A switch --x is taken back by --no-x.
    """
    begin_talk(talk)
    strict = files.input_format == "strict"
    settings = run_settings(
        pair, method, sampling, devices, failing, strict=strict, chat=bool(files.chat), allow=answers.allow
    )
    if job.dry_run:
        if job.print_config:
            raise UsageError("--dry-run and --print-config cannot be used together: give one of them")
        idle = ("stats", files.stats), ("summary", files.summary)
        refuse_idle("--dry-run answers nothing", *((option_name(name), value) for name, value in idle))
    groups = (files, failing, pair, method, sampling, answers, devices, scale, talk)
    if job.print_config:
        typer.echo(job_text(groups))
        return
    shard = None if scale.shard is None else shard_of(scale.shard)
    if shard is not None:
        files = sharded_files(files, shard)
    form, named = output_format(files), f"--output-format {files.output_format}"
    if not form.writes_beams:
        refuse_idle(f"{named} writes the best text alone", ("--n-best", sampling.n_best))
    if not form.writes_tokens:
        refuse_idle(f"{named} writes no tokens", (option_name("token_logprobs"), sampling.token_logprobs or None))
    if files.input_format == "text" and not files.chat:
        refuse_idle_templates("--input-format text without --chat has prompts alone", devices)
    cache, several = settings.method.value(SUFFIX_CACHE), "--shard" if scale.workers is None else "--workers"
    looked_up = [*settings.method.index_files, cache]
    check_files(files, [answers.allow, devices.chat_template, *looked_up, job.config, *settings.files])
    if cache is not None and (scale.workers is not None or scale.shard is not None):
        raise UsageError(f"cache={cache} would be written by several processes: drop {several}")
    run = _GenerateRun(
        files,
        settings,
        pool_config(scale, devices),
        shard,
        talk,
        arguments,
        ordered=scale.order != "done",
        demonstrates=pair.target is None,
    )
    if code := run.try_out() if job.dry_run else run.answer():
        raise typer.Exit(code)


class _GenerateRun:
    """One run over one input."""

    def __init__(
        self,
        files: FileOptions,
        settings: RunSettings,
        pool: PoolConfig | None,
        shard: Shard | None,
        talk: TalkOptions,
        arguments: Sequence[str],
        *,
        ordered: bool,
        demonstrates: bool,
    ) -> None:
        """demonstrates: no model was named, so a line says that the built-in pair answers."""
        self._demonstrates = demonstrates
        self._has_plain_prompt = False  # whether a row with a plain prompt was read
        self._has_left_off = False  # whether a row with an answer that is not continued was read
        self._has_template = False  # whether the target is loaded and has a chat template
        self._files, self._settings, self._arguments = files, settings, arguments
        self._ordered, self._pool, self._json = ordered, pool, talk.log == "json"
        self._workers_open = ExitStack()
        self._method = MethodRecord(
            settings.method,
            settings.target.source,
            None if settings.draft is None else settings.draft.source,
            quantize=None if settings.target.quantize == "none" else settings.target.quantize,
        )
        kept = files.summary is not None or files.output not in (None, STANDARD)
        kwargs = settings.chat_template_kwargs
        pinned = kept and (pool is None or pool.address is None)
        self._fingerprint = run_fingerprint(
            self._method,
            settings.rows,
            dtype=settings.target.dtype,
            numerics=settings.target.numerics,
            on_too_long=settings.on_too_long,
            strict=settings.rows.strict,
            chat=settings.rows.chat or None,
            input_format="text" if files.input_format == "text" else "auto",
            output_format=files.output_format or "native",
            columns=files.columns,
            allow=None if settings.allow is None else file_hash("--allow", settings.allow),
            chat_template=None if settings.chat_template is None else text_hash(settings.chat_template),
            chat_template_kwargs=None if kwargs is None else orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS).decode(),
            tokenizer=settings.target.tokenizer,
            grammar=None if settings.rows.grammar is None else settings.rows.grammar.name,
            require_valid=settings.require_valid,
            files_under=None if files.files_under is None else str(files.files_under.resolve()),
            dsbd=__version__,
            **_digests(opened := [Checkpoint.open(model) for model in settings.models if pinned]),
        )
        self._commits = {f"{one.spec.role}_commit": one.commit for one in opened if one.commit is not None}
        self._shard = shard
        if shard is not None:
            assert files.input is not None
            self._fingerprint |= shard.settings(files.input)
        self._signals = StopSignals()
        self.reporter = Reporter(talk, files.output, says_why=files.output_format != "text")
        self.reporter.totals.may_draft = settings.method.depth > 0

    def answer(self) -> int:
        """Answer the rows, and return the exit code of a run that came to its end."""
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            stack.enter_context(self._workers_open)  # closed after the summary, which does not count this time
            stream, name = self._open_input(stack)
            outputs = stack.enter_context(
                Outputs(self._files, self._fingerprint, self.reporter, carried=self._method.carried)
            )
            settings = {**self._fingerprint, "batch_size": self._settings.batch_size, **self._commits}
            summary = stack.enter_context(Summary(self._files.summary, self.reporter.totals, settings))
            stack.callback(self.reporter.stop)
            reader = stack.enter_context(LineReader(stream, name, read=self._read_lines()))
            flow = self._flow(reader, outputs.done, outputs.begin, self._settings.max_errors)
            self._answer(flow, reader, outputs, summary)
            if self._shard is not None:
                reader.check()
                outputs.complete(flow.input_end)
        return rows_exit_code(self.reporter.totals)

    def try_out(self) -> int:
        """Read the whole input as `answer` does, print what a run would do, and return its exit code."""
        totals, tally = self.reporter.totals, RowTally()
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            stack.callback(self.reporter.stop)
            stream, name = self._open_input(stack)
            done, totals.retried = read_earlier_run(self._files, self._fingerprint)
            reader = stack.enter_context(LineReader(stream, name, read=self._read_lines()))
            nowhere = stack.enter_context(LineWriter.create(Path(os.devnull), overwrite=True))
            flow = self._flow(reader, done, lambda: (nowhere, None), None)
            self._signals.on_stop = lambda: None
            limit = None
            if flow.needs_engine(tally.record) and self._signals.number is None:
                limit = self._check_rows(flow, tally)
            self.reporter.stop()
            if self._signals.number is not None:
                say(f"stopped after {plural(totals.rows + totals.skipped, 'row')}")
                raise StoppedError(self._signals.number)
        output = str(self._files.output) if resumes(self._files) else None
        document = dry_run_document(tally, totals, done, source=name, output=output, limit=limit)
        if self._json:
            typer.echo(DRY_RUN.line(document))
        else:
            typer.echo("\n".join(dry_run_lines(document)))
        return rows_exit_code(totals)

    def _check_rows(self, flow: RowFlow, tally: RowTally) -> int | None:
        """Load the tokenizer and check the rows. Return the positions that a prompt and its answer must fit into."""
        from dsbd_cli import loading

        self._signals.on_stop = None  # an import is ended at once
        settings = self._settings
        engine = loading.load_dry(
            settings.target,
            settings.draft,
            method=settings.method,
            tell=self.reporter.warn,
            on_too_long=settings.on_too_long,
            allow=settings.allow,
            chat_template=settings.chat_template,
            chat_template_kwargs=settings.chat_template_kwargs,
        )
        for line in engine.info.notes:
            self.reporter.warn(line)
        self._has_template = engine.info.chat
        check_chat(self._files.chat, engine.info)
        self._warn_plain()
        self._signals.on_stop = engine.stop
        self.reporter.begin("the input is read, and nothing is answered", steps=lambda: 0)
        flow.run(engine, tally.record)
        return engine.limit

    def _open_input(self, stack: ExitStack) -> tuple[BinaryIO, str]:
        """Open the input, tell what is to know about it, and return the stream and its name. Raises UsageError."""
        if self._demonstrates and lacks_input(self._files):
            for line in EXPLAINED:
                say(line)
        stream, name, size = open_input_lines(self._files, stack)
        if note := unlike_name(self._files):
            self.reporter.warn(note)
        table = reads_table(self._files)
        # bytes do not measure the progress in a table, whose rows have other sizes than the lines made of them
        self.reporter.input_bytes, rows = size if table is None else None, count_rows(self._files, size)
        self.reporter.input_rows = rows if rows is None or self._shard is None else self._shard.rows(rows)
        header = input_header(self._files)
        if header is not None and table is not None:
            for note in header.notes(table):
                self.reporter.warn(note)
        if output_format(self._files).carries:
            self._method = replace(self._method, carried=self._carried(table, header))
        return stream, name

    def _read_lines(self) -> ReadLines:
        table = reads_table(self._files)
        return read_lines if table is None else lines_reader(table, input_columns(self._files))

    def _carried(self, table: Path | None, header: Header | None) -> tuple[CarriedColumn, ...]:
        """Return the columns of an input table that an output table repeats. Raises UsageError."""
        if header is not None:
            return carried_columns(header.columns.carried, header.kinds)
        if table is not None and not table.is_file():
            raise UsageError(
                f"--output-format {self._files.output_format} repeats columns of {table}, which is no ordinary file: "
                "they are not known before it is read, so write records (--output-format native)"
            )
        return ()

    def _flow(
        self,
        reader: LineReader,
        done: DoneRows,
        begin: Callable[[], tuple[LineWriter, LineWriter | None]],
        max_errors: int | None,
    ) -> RowFlow:
        source = None if self._files.input == STANDARD else self._files.input
        rows = replace(self._settings.rows, files_root=files_root(self._files.files_under, source))
        return RowFlow(
            reader,
            self._noting(rows.read_text if self._files.input_format == "text" else rows.read),
            self.reporter,
            done=done,
            max_errors=max_errors,
            stopping=lambda: self._signals.number is not None,
            begin=begin,
            ordered=self._ordered,
            shard=self._shard,
            require_valid=self._settings.require_valid,
        )

    def _noting(self, read: ReadRow) -> ReadRow:
        """Return a reader of rows that reports the first plain prompt, and the first answer that is not continued."""

        def noting(line: Line, *, index: int, number: int) -> Row:
            row = read(line, index=index, number=number)
            if row.request is None:
                return row
            if row.request.prompt is not None and not self._has_plain_prompt:
                self._has_plain_prompt = True
                self._warn_plain()
            if row.request.messages is not None and not self._has_left_off and is_left_off(row.request):
                self._has_left_off = True
                self.reporter.warn(NOT_CONTINUED)
            return row

        return noting

    def _warn_plain(self) -> None:
        """Warn that plain prompts go to a target with a chat template as they stand, if neither --chat nor --no-chat is
        given."""
        if self._has_plain_prompt and self._has_template and self._files.chat is None:
            self.reporter.warn(CHAT_OR_NOT)

    def _answer(self, flow: RowFlow, reader: LineReader, outputs: Outputs, summary: Summary) -> None:
        totals = self.reporter.totals
        try:
            if self._needs_engine(flow, outputs):
                self._run(flow, outputs, summary)
            else:
                reader.check()
                if outputs.is_empty:
                    outputs.begin()  # a run without rows has to make its file, too
            if self._signals.number is None and reader.complete:
                outputs.drop_gone()
            outputs.finish()
        except (TooManyErrorsError, NoWorkersError) as error:
            raise type(error)(f"{error}; {self._how_to_resume()}") from None
        except StoppedError:
            self.reporter.stop()
            raise
        if (number := self._signals.number) is not None:
            self.reporter.summary(f"stopped: {totals.line()}; {self._how_to_resume()}", always=True)
            raise StoppedError(number)
        self.reporter.summary(totals.line())

    def _needs_engine(self, flow: RowFlow, outputs: Outputs) -> bool:
        """Return whether some row can be read and has no answer yet. Rows before it that cannot be read are written.

        A signal ends this as it ends a run.
        """
        self._signals.on_stop = lambda: None
        needed = flow.needs_engine(self._record_maker(outputs.created, None))
        self._signals.on_stop = None
        return needed and self._signals.number is None

    def _run(self, flow: RowFlow, outputs: Outputs, summary: Summary) -> None:
        """Load the models and answer the rows."""
        engine = self._load(summary)
        summary.info = info = engine.info
        if info is not None:
            for line in info.notes:
                self.reporter.warn(line)
            method = self._method.method if info.drafts else self._method.method.without_drafts()
            self._method = replace(self._method, method=method, threads=info.threads, quantize=info.quantize)
            self.reporter.totals.may_draft = method.depth > 0
            self._has_template = info.chat
            check_chat(self._files.chat, info)
            check_reasoning(self._settings.rows.sampling.reasoning, info)
        self._warn_plain()
        if engine.exactness != self._method.method.exactness:
            self._method = replace(self._method, exactness=engine.exactness)
            if self._settings.target.numerics != "fast":
                self.reporter.warn(NOT_INVARIANT)
        outputs.begin()
        self.reporter.begin(_describe(self._settings, self._method.method, engine), steps=lambda: engine.steps)
        self._signals.on_stop = engine.stop
        flow.run(engine, self._record_maker(outputs.created, engine))

    def _record_maker(self, created: int, engine: RunsRequests | None) -> MakeRecord:
        """Return the function that makes a row's record. engine: None while only rows are written that failed without
        one."""
        first, make = replace(self._method, created=created), output_format(self._files).load()
        promised = None if engine is None else engine.exactness
        assert callable(make), "checked at the start"

        def method() -> MethodRecord:  # after a kernel has failed, less is promised for the rows to come
            if engine is None or engine.exactness == promised:
                return first
            return replace(first, exactness=engine.exactness)

        return lambda row, result: bytes(make(row, result, method()))

    def _how_to_resume(self) -> str:
        return how_to_resume(self._files, self._arguments, "native or openai")

    def _load(self, summary: Summary) -> RunsRequests:
        """Load the models, in this process or in its workers. This is where torch is imported."""
        load = self._settings.loader(log_steps=self._files.stats is not None)
        answering: RunsRequests
        if self._pool is not None:
            answering = self._workers(load, self._pool, summary)
        else:
            answering = engine = load()
            engine.tell = self.reporter.warn
            if resumes(self._files) and self._files.output is not None and self._files.output.exists():
                engine.remember(earlier_texts(self._files.output, MOST_REMEMBERED))
        if self._demonstrates:
            say(DEMONSTRATION)
        return answering

    def _workers(self, load: LoadEngine, pool: PoolConfig, summary: Summary) -> RunsRequests:
        """Start workers, which take the place of an engine of this process."""
        from dsbd_cli.scale.worker import WorkerSetup
        from dsbd_cli.scale.workers import RayEngine

        settings = self._settings
        assert settings.batch_size is not None
        setup = WorkerSetup(load, settings.models, settings.batch_size)
        engine = RayEngine(setup, pool, self.reporter.warn, self._give_up)
        self._workers_open.callback(engine.close)
        with self.reporter.waiting(lambda: f"loading, {engine.describe()}"):
            engine.start()
        summary.workers = lambda: engine.reports
        self.reporter.note = engine.describe
        return engine

    def _give_up(self, message: str) -> None:
        """End the process now, as an error would, because its main thread cannot."""
        self.reporter.stop()
        error_line(f"{message}; {self._how_to_resume()}")
        os._exit(NoWorkersError.exit_code)


def _digests(models: Iterable[Checkpoint]) -> dict[str, str]:
    """Return the digests of the models' files.

    They are not taken for a Ray on other machines, because this machine may lack the files. The workers compare theirs.
    """
    return {f"{one.spec.role}_{part}": digest for one in models for part, digest in one.digests.items()}


def _describe(settings: RunSettings, method: MethodConfig, engine: RunsRequests) -> str:
    info = engine.info
    most = "up to " if method.adaptive_depth else ""
    drafts = f"{most}{method.depth} layers of {method.drafts_per_layer} drafts" if method.depth else "no draft"
    drafts += f" by {method.drafter}" if method.depth and method.drafter != MethodConfig().drafter else ""
    allowed = f"; {engine.allowed}" if engine.allowed else ""
    footprint = getattr(engine, "footprint", None)  # an engine of this process has it, workers do not
    allowed += f"; {footprint}" if footprint and method.num_beams >= WIDE else ""
    models = f"target {settings.target.source}" + (f", draft {settings.draft.source}" if settings.draft else "")
    if info is not None:
        threads = "" if info.threads is None else f", {plural(info.threads, 'thread')}"
        models += f" ({info.dtype}, {info.device}{threads})"
        models += "" if info.draft_form is None else f"; draft: {info.draft_form}"
    return (
        f"{models}; rule {method.rule}, {method.num_beams} beams, {drafts}, width {method.width} ({engine.exactness})"
        f"{allowed}"
    )
