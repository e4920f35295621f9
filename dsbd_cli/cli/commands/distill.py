"""`dsbd distill`: a draft for the user's own target, trained on the target's answers to the user's own prompts."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

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
    TargetOptions,
    TemplateOptions,
)
from dsbd_cli.cli.options.settings import RunSettings, devices_of, run_settings
from dsbd_cli.cli.run.files import check_model_folder, text_hash
from dsbd_cli.cli.run.messages import Talk, duration, say, set_style, talking, warn
from dsbd_cli.cli.run.prompts import (
    HELD_OUT_EVERY,
    HELD_OUT_MOST,
    hold_out,
    read_prompts,
    warn_left_out,
    warn_plain,
)
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.config.method import DEFAULT_DEPTH, MethodConfig
from dsbd_cli.config.model import DTYPES, ModelSpec, Quantize
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.variants import SEARCH
from dsbd_cli.errors import DsbdError, UsageError, option_name, plural
from dsbd_cli.requests import Request, check_seed
from dsbd_cli.threads import MOST_THREADS
from dsbd_cli.train.run_record import (
    BATCH,
    RECORD,
    Form,
    Measurement,
    Milestone,
    Record,
    TrainingPlan,
    read_record,
)
from dsbd_cli.train.run_report import milestone_line, show

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.io.lines.jsonl import LineWriter
    from dsbd_cli.train.student import StudentShape
    from dsbd_cli.train.training import Recipe, Training

DISTILL = "Distillation"
ANSWERS, CHECKPOINT = "answers.jsonl", "checkpoint"
STEPS = 1000
FEW_PROMPTS = 500
CUT_RATE, NEW_RATE = 5e-4, 1e-3  # learning rates: for the target's own layers, for a small Llama or a head
TREES = 4  # for a head, one in so many prompts is answered with all beams, the others with one
OF_TRAINING = ("layers", "hidden_size", "vocab", "steps", "learning_rate")  # settings that no answer depends on
ANSWERED = 32  # prompts that are answered together
TURN = 512  # prompts of a turn: first those with all beams, then the others
HELD_OUT_BETWEEN = 16  # held-out prompts that are measured on between the first and the last step
EVALUATIONS = 8
RECENT = 25  # steps whose mean loss is shown, and whose time tells that of the rest
CHECKPOINT_S = 300.0
SPEED_S = 60.0  # for runs with and without the draft, before and after training


@dataclass(frozen=True)
class DistillOptions:
    """Options of `dsbd distill`: from which prompts a target is distilled, into what, and how long."""

    input: Path | None = option(
        MAIN,
        f"prompts as generate reads them (required); every {HELD_OUT_EVERY}th, {HELD_OUT_MOST} at most, is "
        "held out to measure acceptance on",
        "-i",
    )
    columns: str | None = option(MAIN, COLUMNS, metavar="NAMES")
    chat: bool | None = flag(MAIN, CHAT)
    output: Path | None = option(
        MAIN,
        "folder of the draft (required); where a run was stopped, the same command goes on",
        "-o",
        metavar="FOLDER",
    )
    form: Form | None = option(
        DISTILL,
        "head: one layer that reads the target's hidden states (EAGLE-3); model: the target's own first layers",
        default="head where the target is a standard decoder, and no layers and no size are given",
        metavar="FORM",
    )
    vocab: int | None = option(DISTILL, "tokens of a head: those that the target is likeliest to say", default=8192)
    layers: int | None = option(
        DISTILL,
        "layers of the draft: the target's own first ones",
        default="a quarter of the target's; with --hidden-size 2",
    )
    hidden_size: int | None = option(
        DISTILL, "train a new Llama of this hidden size with the target's tokenizer instead", metavar="H"
    )
    steps: int | None = option(DISTILL, f"of training, {BATCH} answers each", default=STEPS, least=1)
    learning_rate: float | None = option(
        DISTILL,
        "the highest; it rises first, and falls to 0 in the second half",
        default=f"{CUT_RATE:g}, of a head and with --hidden-size {NEW_RATE:g}",
    )
    max_new_tokens: int | None = option(MAIN, "tokens of an answer at most", default=SamplingConfig().max_new_tokens)
    seed: int | None = option(MAIN, "of answers, batches and new weights", default=0)
    quantize: Quantize | None = option(
        DISTILL, "int8: of the target, and of the draft where it is measured, as of generate", metavar="int8"
    )
    threads: int | None = option(DISTILL, "processor threads, as of generate", least=1, most=MOST_THREADS)
    quiet: bool | None = flag(DISTILL, "nothing but errors", "-q")


@grouped
def distill(
    target: TargetOptions,
    options: DistillOptions,
    decoding: DecodeOptions,
    loading: LoadOptions,
    templates: TemplateOptions,
) -> None:
    """Train a draft for a target of your own on the target's answers to your own prompts.

    The target answers the prompts, and the draft, in float32, learns the target's distribution after every token of all
    W answers. A draft head learns it after the live beams of every step, also from its own guesses of hidden states.
    Acceptance on held-out prompts is measured before, during and after training.

    Ctrl-C keeps what is done, and leaves the draft so far in --output; the same command goes on.
    """
    set_style(quiet=options.quiet)
    if options.input is None:
        raise UsageError("--input is missing: name a file of prompts")
    if options.output is None:
        raise UsageError("--output is missing: name a folder for the draft")
    check_model_folder(options.output)
    if options.seed is not None:
        check_seed(options.seed)  # --decode search draws no answers, but batches and weights
    rate = options.learning_rate
    if rate is not None and not 0 < rate < 1:
        raise UsageError(f"--learning-rate is {rate:g}, but must be above 0 and below 1")
    place, draft_device = devices_of(loading.device)
    own = {"device": place, "quantize": options.quantize, "threads": options.threads}
    devices = DeviceOptions(**vars(loading) | vars(templates) | own)
    settings = _run_settings(target, options, decoding, devices)
    with StopSignals() as signals, talking() as talk:
        _Distilling(options, settings, draft_device, options.input, options.output, signals, talk).run()


def _run_settings(
    target: TargetOptions, options: DistillOptions, decoding: DecodeOptions, devices: DeviceOptions
) -> RunSettings:
    """Return the settings of the target without a draft, as generate would run it, with all beams reported."""
    search = decoding.decode == "search"
    beams = MethodConfig().num_beams if decoding.num_beams is None else decoding.num_beams
    return run_settings(
        PairOptions(target=target.target, draft="none"),
        MethodOptions(num_beams=beams, decode=decoding.decode),
        SamplingOptions(
            max_new_tokens=options.max_new_tokens, n_best=max(1, beams), seed=None if search else options.seed
        ),
        devices,
        chat=bool(options.chat),
    )


class _Distilling:
    """One run of the command."""

    def __init__(
        self,
        options: DistillOptions,
        settings: RunSettings,
        draft_device: str | None,
        source: Path,
        folder: Path,
        signals: StopSignals,
        talk: Talk,
    ) -> None:
        """draft_device: the draft's device; None: it has none of its own, and takes the target's."""
        self._options, self._settings, self._input = options, settings, source
        self._folder, self._signals, self._talk = folder, signals, talk
        self._spec, self._draft_device = settings.target, draft_device
        self._made_folder = False
        self._changes = list[str]()  # settings of training that differ from those of the run before, in words

    def run(self) -> None:
        """Answer the prompts, train the draft, measure it, and print the results."""
        from dsbd_cli.train.student import student_shape

        options = self._options
        shape = student_shape(self._spec, options.layers, options.hidden_size, options.form, options.vocab)
        if shape.form == "head" and self._draft_device is not None:
            raise UsageError(
                f"--device names {self._draft_device} for the draft, but a head runs where its target does"
            )
        requests, digest = self._requests()
        held, learnt = hold_out(requests)
        self._record = self._begin(shape, digest)
        self._record.prompts = len(learnt)
        self._signals.on_stop = _go_on
        from dsbd_cli.train.target_answers import answerable, open_answers

        # the file stays locked to the end, so that no second run trains in this folder
        with open_answers(self._folder / ANSWERS) as (done, writer):
            if self._changes:
                self._train_anew()
            try:
                self._talk.now("loading the target")
                engine = self._settings.load()
                self._check_stopped()
                warn_plain(options.chat, engine.info, requests)
            except DsbdError:
                if not done:
                    self._forget()
                raise
            held, failed = answerable(engine, held)
            warn_left_out(failed, "held-out prompt")
            self._answer(engine, learnt, done, writer, trees=shape.form == "head")
            self._train(engine, shape, held)

    # Starting and resuming

    def _requests(self) -> tuple[list[Request], str]:
        """Return the prompts, and a digest of their lines. Raises UsageError with the first bad line, or for too few
        prompts."""
        digest, name = blake2b(digest_size=16), f"--input {self._input}"
        columns = self._options.columns
        found = read_prompts("--input", self._input, self._settings.rows, seen=digest.update, columns=columns)
        if len(found) < HELD_OUT_EVERY:
            raise UsageError(
                f"{name} holds {plural(len(found), 'prompt')}, but {HELD_OUT_EVERY} or more are needed: "
                "hundreds are better"
            )
        if len(found) < FEW_PROMPTS:
            warn(f"{name} holds {len(found)} prompts: below {FEW_PROMPTS} a draft hardly learns more than these")
        return found, digest.hexdigest()

    def _begin(self, shape: StudentShape, digest: str) -> Record:
        """Return the record of a new folder, or of one that this command has left unfinished. Raises UsageError."""
        options, settings, method = self._options, self._settings, self._settings.method
        plan = TrainingPlan(
            target=self._spec.source,
            input=digest,
            form=shape.form,
            layers=shape.layers,
            hidden_size=shape.hidden_size,
            vocab=shape.vocab,
            steps=options.steps or STEPS,
            learning_rate=options.learning_rate or _default_rate(shape),
            decode="search" if method.rule == SEARCH else "sample",
            num_beams=method.num_beams,
            max_new_tokens=self._settings.rows.sampling.max_new_tokens,
            seed=options.seed or 0,
            dtype=self._spec.dtype,
            quantize=self._spec.quantize,
            chat=bool(options.chat),
            chat_template=None if settings.chat_template is None else text_hash(settings.chat_template),
            chat_template_kwargs=settings.chat_template_kwargs,
            tokenizer=self._spec.tokenizer,
        )
        folder = self._folder
        if not (folder / RECORD).is_file():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UsageError(f"--output {folder} exists: name a new folder")
            self._made_folder = not folder.exists()
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise UsageError(f"--output {folder}: {error.strerror or error}") from None
            record = Record(plan)
            record.write(folder)
            return record
        record = read_record(folder)
        if record.complete:
            raise UsageError(f"--output {folder} is finished: use it with --draft, or name a new folder")
        for item in fields(TrainingPlan):
            was, now = getattr(record.plan, item.name), getattr(plan, item.name)
            if was == now:
                continue
            change = "holds other prompts" if item.name == "input" else f"was {was} and is {now}"
            if item.name not in OF_TRAINING:
                raise UsageError(
                    f"{option_name(item.name)} {change}: go on with what --output {folder} was begun with, or "
                    "name a new folder"
                )
            self._changes.append(f"{option_name(item.name)} {change}")
        record.plan = plan
        return record

    def _train_anew(self) -> None:
        """Drop the draft that was trained with other settings. The answers stay."""
        from dsbd_cli.train.student import recover

        say(f"{', '.join(self._changes)}: training begins anew with the answers in {self._folder / ANSWERS}")
        recover(self._folder / CHECKPOINT)
        shutil.rmtree(self._folder / CHECKPOINT, ignore_errors=True)
        for path in (self._folder / "config.json", *self._folder.glob("model*.safetensors*")):
            path.unlink(missing_ok=True)
        self._record.milestones.clear()
        self._record.write(self._folder)

    @contextmanager
    def _stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` if a signal comes within the block. Raises StoppedError after the block if one came, and before
        it if one came earlier."""
        self._check_stopped()
        self._signals.on_stop = stop
        try:
            yield
        except UsageError:
            self._check_stopped()  # a stopped engine refuses to begin
            raise
        finally:
            self._signals.on_stop = _go_on
        self._check_stopped()

    def _check_stopped(self) -> None:
        if (number := self._signals.number) is not None:
            say("stopped; the same command goes on")
            raise StoppedError(number)

    def _forget(self) -> None:
        """Remove a folder in which nothing was done, so that it does not hold the next command to its settings."""
        for name in (ANSWERS, RECORD):
            (self._folder / name).unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):
                self._folder.rmdir()

    # The target's answers

    def _answer(self, engine: Engine, requests: list[Request], done: int, writer: LineWriter, *, trees: bool) -> None:
        """Let the target answer the prompts that have no answer yet, and read all answers.

        trees: for a head, every TREES-th prompt is answered with all beams, the others with one.
        """
        from dsbd_cli.train.target_answers import make_answers, read_answers

        path, began, failed = self._folder / ANSWERS, time.monotonic(), list[str]()
        answered = done

        def on_answer(_: int) -> None:
            nonlocal answered
            answered += 1
            left = (time.monotonic() - began) / (answered - done) * (len(requests) - answered)
            self._talk.now(
                f"the target answers: {answered} of {len(requests)} prompts, {duration(left)} left",
                {"answered": answered, "prompts": len(requests)},
            )

        together = engine.replace(batch_size=ANSWERED)
        before = 0
        for answering, some in _with_trees(together, requests) if trees else [(together, requests)]:
            todo = some[max(0, done - before) :]
            with self._stopping(answering.stop):
                failed += make_answers(answering, todo, writer, on_answer, trees=trees)
            before += len(some)
        warn_left_out(failed)
        self._answers = read_answers(path)
        if not self._answers:
            self._forget()
            raise DsbdError(f"no prompt of {self._input} could be answered, so there is nothing to learn from")
        self._record.answers = len(self._answers)
        tokens = sum(len(one.tokens) for one in self._answers)
        say(f"{len(self._answers)} answers of {tokens} tokens to learn from, in {path}")

    # The draft

    def _train(self, engine: Engine, shape: StudentShape, held: list[Request]) -> None:
        training = self._training(engine, shape)
        try:
            self._take_steps(engine, training, held)
        except StoppedError:
            if training.step:
                self._publish(training)
                say(f"{self._folder} holds the draft of step {training.step}, which --draft takes as it is")
            else:
                say(f"{self._folder} holds no draft yet, because no step was taken")
            raise

    def _publish(self, training: Training) -> None:
        """Write the draft as it is now to --output."""
        from dsbd_cli.train.student import publish_student

        publish_student(training.student, self._spec, self._folder)

    def _take_steps(self, engine: Engine, training: Training, held: list[Request]) -> None:
        record = self._record
        steps = record.plan.steps
        every = max(1, steps // EVALUATIONS)
        saved, losses = time.monotonic(), training.losses
        share = min(1.0, HELD_OUT_BETWEEN / max(1, len(held)))  # of the held-out prompts, between the ends
        # seconds of the last steps, and of a measurement on all held-out prompts; steps are faster when each answer has
        # been read once
        lately, measured = deque[float](maxlen=RECENT), 0.0
        while training.step < steps:
            if training.step % every == 0 and training.step not in {one.step for one in record.milestones}:
                self._save(training)
                began = time.monotonic()
                self._record_milestone(engine, training, self._folder / CHECKPOINT, held)
                if training.step and _is_best(record.milestones):
                    self._publish(training)
                saved = time.monotonic()
                measured = (saved - began) / (share if training.step else 1.0)
            began = time.monotonic()
            losses.append(training.run_step())
            lately.append(time.monotonic() - began)
            left = fmean(lately) * (steps - training.step)
            to_measure = math.ceil(steps / every) - math.ceil(training.step / every) + 1
            left += measured * (1 + share * (to_measure - 1))
            recent, latest = fmean(losses[-RECENT:]), record.milestones[-1]
            self._talk.now(
                f"step {training.step} of {steps}, loss {recent:.3f}, {duration(left)} left, at step {latest.step} "
                f"{milestone_line(latest)}",
                {"step": training.step, "steps": steps, "loss": recent},
            )
            if self._signals.number is not None or time.monotonic() - saved > CHECKPOINT_S:
                self._save(training)
                saved = time.monotonic()
                self._check_stopped()
        self._save(training)
        self._publish(training)
        if steps not in {one.step for one in record.milestones}:
            self._record_milestone(engine, training, self._folder, held)
        record.complete = True
        record.write(self._folder)
        shutil.rmtree(self._folder / CHECKPOINT, ignore_errors=True)
        if not self._options.quiet:
            chat = ["--chat"] if self._options.chat else []
            words = ["dsbd", "generate", "--target", record.plan.target, "--draft", str(self._folder), *chat]
            show(record, self._folder, len(held), shlex.join([*words, *self._as_trained()]))

    def _as_trained(self) -> list[str]:
        """Return the options by which generate runs the target as it was run here, where they are no defaults."""
        plan, words = self._record.plan, list[str]()
        for name, value, default in (
            ("--dtype", plan.dtype, "auto"),
            ("--quantize", plan.quantize, None),
            ("--decode", plan.decode, "sample"),
            ("--num-beams", plan.num_beams, MethodConfig().num_beams),
        ):
            words += [] if value == default else [name, str(value)]
        if self._spec.trust_remote_code:
            words += ["--trust-remote-code", "target" if plan.form == "head" else "both"]
        return words

    def _record_milestone(self, engine: Engine, training: Training, folder: Path, held: list[Request]) -> None:
        """Measure the draft in a folder, record the milestone and print it. The losses since the milestone before are
        cleared."""
        record, losses, step = self._record, training.losses, training.step
        ends = step in (0, record.plan.steps)
        timed = ends and len(held) > 1  # the first one warms up
        found = self._measure(engine, folder, held if ends else held[:HELD_OUT_BETWEEN], speed=timed)
        milestone = Milestone(step, fmean(losses) if losses else None, *found)
        losses.clear()
        record.milestones.append(milestone)
        record.write(self._folder)
        loss = "" if milestone.loss is None else f"loss {milestone.loss:.3f}, "
        say(f"step {milestone.step} of {record.plan.steps}: {loss}{milestone_line(milestone)}")
        for one, beams in zip(found, ("", " with one beam"), strict=True):
            if one is not None and one.speed is not None:
                plain, drafted = one.speed.plain, one.speed.drafted
                speeds = f"{plain:.1f} tokens/s without a draft, {drafted:.1f} with it ({one.speed.label})"
                say(f"measured here{beams}: {speeds}")
            elif one is not None and timed and one.acceptance is not None:
                say(f"{SPEED_S:.0f} s were too short to measure the speed{beams}: dsbd profile --seconds takes longer")
        if ends and not timed:
            there = "one" if held else "none"
            say(f"the speed is not measured, because that takes two held-out prompts or more, and there is {there}")

    def _training(self, engine: Engine, shape: StudentShape) -> Training:
        """Return the training, which goes on from the checkpoint if there is one."""
        from dsbd_cli.train.distributions import Teacher
        from dsbd_cli.train.student import load_student, new_student, read_moments, recover
        from dsbd_cli.train.training import Recipe, Training

        plan, folder = self._record.plan, self._folder / CHECKPOINT
        recipe = Recipe(plan.steps, plan.learning_rate, plan.seed, autocast=_compute_dtype(engine) == "bfloat16")
        spec = self._draft_spec(self._spec.source, "float32")
        recover(folder)
        going_on = (folder / "config.json").is_file()
        if shape.form == "head":
            training: Training = self._head_training(engine, shape, recipe, going_on=going_on)
        else:
            student = load_student(folder, spec) if going_on else new_student(spec, shape, recipe.seed)
            training = Training(student, Teacher(engine.target), self._answers, recipe)
        if going_on:
            training.restore(read_moments(folder))
            # milestones after this step are dropped, because their steps are taken again
            milestones = self._record.milestones
            self._record.milestones = [one for one in milestones if one.step <= training.step]
            if training.step in {one.step for one in self._record.milestones}:
                training.losses.clear()
            say(f"going on behind step {training.step}")
        return training

    def _head_training(self, engine: Engine, shape: StudentShape, recipe: Recipe, *, going_on: bool) -> Training:
        from dsbd_cli.models.forest_model import BaseForestModel
        from dsbd_cli.train.distributions import HeadTeacher, likely_tokens
        from dsbd_cli.train.head import new_head, read_head
        from dsbd_cli.train.training import HeadTraining

        target = engine.target
        assert isinstance(target, BaseForestModel)
        if going_on:
            student = read_head(self._folder / CHECKPOINT, self._spec)
        else:
            assert shape.vocab is not None
            ids = likely_tokens(target, self._answers, shape.vocab, self._on_choice)
            student = new_head(self._spec, ids, recipe.seed)
        teacher = HeadTeacher(target, student.taps, student.ids)
        return HeadTraining(student.to(target.device), teacher, self._answers, recipe)

    def _on_choice(self, number: int) -> None:
        """Say that `number` answers were read to choose the tokens of a head, and end where a signal came."""
        self._talk.now(f"choosing the tokens of the head: {number} answers read")
        self._check_stopped()

    def _draft_spec(self, source: str, dtype: str) -> ModelSpec:
        """Return how to load a draft that is made from the target. It may use the code of the target's checkpoint."""
        draft = self._spec.of_draft(source, self._draft_device)
        known = dtype if dtype in DTYPES else "auto"
        return replace(draft, dtype=known, trust_remote_code=self._spec.trust_remote_code)

    def _save(self, training: Training) -> None:
        from dsbd_cli.train.student import save_student

        save_student(training.student, self._spec, self._folder / CHECKPOINT, "float32", training.moments())

    def _measure(
        self, engine: Engine, folder: Path, held: list[Request], *, speed: bool
    ) -> tuple[Measurement, Measurement | None]:
        """Measure the draft in a folder on held-out prompts; a head also with one beam, if the run has several."""
        from dsbd_cli.train.compare import with_draft

        plain = self._settings.method
        method = MethodConfig(rule=plain.rule, num_beams=plain.num_beams, depth=DEFAULT_DEPTH)
        pair = with_draft(engine, self._draft_spec(str(folder), _compute_dtype(engine)), self._spec, method)
        held = [replace(one, sampling=replace(one.sampling, n_best=1)) for one in held]
        found = self._measured(pair, held, speed=speed)
        if self._record.plan.form == "model" or method.num_beams == 1:
            return found, None
        single = pair.replace(method=replace(method, num_beams=1))
        return found, self._measured(single, held, speed=speed)

    def _measured(self, pair: Engine, held: list[Request], *, speed: bool) -> Measurement:
        from dsbd_cli.lab.profiling.budget import Budget
        from dsbd_cli.train.draft_acceptance import measure_acceptance, measured_speed

        beams = "" if pair.method.num_beams > 1 else ", with one beam"

        def on_answer(number: int) -> None:
            self._talk.now(f"acceptance is measured{beams}: {number} of {len(held)} held-out prompts")

        on_answer(0)
        with self._stopping(pair.stop):
            found = measure_acceptance(pair, held, on_answer)
        if found is None or not speed:
            return Measurement(found)
        budget = Budget(SPEED_S)
        self._talk.now(f"measuring speed for {SPEED_S:.0f} s{beams}")
        with self._stopping(budget.stop):
            return Measurement(found, measured_speed(pair, held[:HELD_OUT_BETWEEN], budget))


def _go_on() -> None:
    """Do nothing when a signal comes: the run ends at the next `_check_stopped`."""


def _compute_dtype(engine: Engine) -> str:
    """Return the dtype that the target computes in; for an int8 target, the dtype of the layers that are not int8."""
    assert engine.info is not None
    return engine.info.dtype.rpartition("+")[2]


def _default_rate(shape: StudentShape) -> float:
    own = shape.form == "model" and shape.hidden_size is None
    return CUT_RATE if own else NEW_RATE


def _with_trees(engine: Engine, requests: list[Request]) -> list[tuple[Engine, list[Request]]]:
    """Return engines, each with prompts that it answers, in order.

    The engine itself answers every TREES-th prompt with all beams, and another one the others with one sampled beam.
    They take turns, so that the time of the answers so far tells that of the rest.
    """
    requests = [replace(one, sampling=replace(one.sampling, n_best=1)) for one in requests]
    if engine.method.num_beams == 1:
        return [(engine, requests)]
    single = engine.replace(method=MethodConfig(num_beams=1, depth=0))
    turns: list[tuple[Engine, list[Request]]] = []
    for start in range(0, len(requests), TURN):
        some = requests[start : start + TURN]
        turns += [(engine, some[::TREES]), (single, [row for place, row in enumerate(some) if place % TREES])]
    return turns


def _is_best(milestones: Sequence[Milestone]) -> bool:
    """Return whether the last milestone has at least as many steps per target call as any before."""
    found = [one.measured.acceptance for one in milestones]
    steps = [one.steps_per_call if one else 0.0 for one in found]
    return steps[-1] == max(steps)
