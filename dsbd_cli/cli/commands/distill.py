"""`dsbd distill`: a draft head for the user's own target, trained on the target's answers to the user's own prompts."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
from dsbd_cli.cli.run.prompts import HELD_OUT_EVERY, HELD_OUT_MOST, hold_out, read_prompts, warn_left_out, warn_plain
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import Quantize
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.variants import BEAM, SEARCH
from dsbd_cli.errors import DsbdError, UsageError, plural
from dsbd_cli.requests import Request, check_seed
from dsbd_cli.threads import MOST_THREADS
from dsbd_cli.train.run_record import BATCH, RECORD, Measurement, Milestone, TrainingPlan, open_record
from dsbd_cli.train.run_report import milestone_line, milestone_said, show

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.io.lines.jsonl import LineWriter
    from dsbd_cli.train.training import Training

DISTILL = "Distillation"
ANSWERS, CHECKPOINT = "answers.jsonl", "checkpoint"
STEPS = 1000
FEW_PROMPTS = 500
LEARNING_RATE = 1e-3
ANSWERED = 32  # prompts that are answered together
HELD_OUT_BETWEEN = 16  # held-out prompts that are measured on between the first and the last step
EVALUATIONS = 8
RECENT = 25  # steps whose mean loss is shown, and whose time tells that of the rest
CHECKPOINT_S = 300.0
SPEED_S = 60.0  # for runs with and without the draft, before and after training


@dataclass(frozen=True)
class DistillOptions:
    """Options of `dsbd distill`: from which prompts a head is distilled, and how long."""

    input: Path | None = option(
        MAIN,
        f"prompts as generate reads them (required); every {HELD_OUT_EVERY}th, {HELD_OUT_MOST} at most, is "
        "held out to measure acceptance on",
        "-i",
    )
    columns: str | None = option(MAIN, COLUMNS, metavar="NAMES")
    chat: bool | None = flag(MAIN, CHAT)
    output: Path | None = option(
        MAIN, "folder of the head (required); where a run was stopped, the same command goes on", "-o", metavar="FOLDER"
    )
    form: str | None = option(DISTILL, "head, the only form", hidden=True)
    vocab: int | None = option(DISTILL, "tokens of the head: those that the target is likeliest to say", default=8192)
    steps: int | None = option(DISTILL, f"of training, {BATCH} answers each", default=STEPS, least=1)
    learning_rate: float | None = option(
        DISTILL, "the highest; it rises first, and falls to 0 in the second half", default=f"{LEARNING_RATE:g}"
    )
    max_new_tokens: int | None = option(MAIN, "tokens of an answer at most", default=SamplingConfig().max_new_tokens)
    seed: int | None = option(MAIN, "of answers, batches and new weights", default=0)
    quantize: Quantize | None = option(
        DISTILL, "int8 or int4: of the target, and of the draft where it is measured, as of generate", metavar="FORMAT"
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
    """Train a draft head for a target of your own on the target's answers to your own prompts.

    The head is one layer that reads the target's hidden states (EAGLE-3). The target answers the prompts, and the head,
    in float32, learns the target's distribution after the live beams of every step, also from its own guesses of hidden
    states. Acceptance on held-out prompts is measured before, during and after training.

    Ctrl-C keeps what is done, and leaves the draft so far in --output; the same command goes on.
    """
    set_style(quiet=options.quiet)
    if options.input is None:
        raise UsageError("--input is missing: name a file of prompts")
    if options.output is None:
        raise UsageError("--output is missing: name a folder for the draft")
    if options.form not in (None, "head"):
        raise UsageError(
            f"--form is {options.form!r}, but distill makes draft heads alone: drop it, "
            "or give generate a smaller model of the target's family as --draft"
        )
    check_model_folder(options.output)
    if options.seed is not None:
        check_seed(options.seed)  # --decode search draws no answers, but batches and weights
    rate = options.learning_rate
    if rate is not None and not 0 < rate < 1:
        raise UsageError(f"--learning-rate is {rate:g}, but must be above 0 and below 1")
    target_device, draft_device = devices_of(loading.device)
    if draft_device is not None:
        raise UsageError(f"--device names {draft_device} for the draft, but a head runs where its target does")
    own = {"device": target_device, "quantize": options.quantize, "threads": options.threads}
    devices = DeviceOptions(**vars(loading) | vars(templates) | own)
    settings = _run_settings(target, options, decoding, devices)
    with StopSignals() as signals, talking() as talk:
        _Distilling(options, settings, signals, talk).run()


def _run_settings(
    target: TargetOptions, options: DistillOptions, decoding: DecodeOptions, devices: DeviceOptions
) -> RunSettings:
    """Return the settings of the target without a draft, as generate would run it, with all beams reported."""
    search = decoding.decode == "search"
    beams = MethodConfig().num_beams if decoding.num_beams is None else decoding.num_beams
    return run_settings(
        PairOptions(target=target.target, draft="none"),
        MethodOptions(num_beams=beams, decode=decoding.decode, drafter=BEAM),
        SamplingOptions(
            max_new_tokens=options.max_new_tokens, n_best=max(1, beams), seed=None if search else options.seed
        ),
        devices,
        chat=bool(options.chat),
    )


class _Distilling:
    """One run of the command."""

    def __init__(self, options: DistillOptions, settings: RunSettings, signals: StopSignals, talk: Talk) -> None:
        assert options.input is not None
        assert options.output is not None
        self._options, self._settings, self._spec = options, settings, settings.target
        self._input, self._folder = options.input, options.output
        self._signals, self._talk = signals, talk

    def run(self) -> None:
        """Answer the prompts, train the head, measure it, and print the results."""
        from dsbd_cli.train.draft_head import draft_head_vocabulary

        vocabulary = draft_head_vocabulary(self._spec, self._options.vocab)
        requests, digest = self._requests()
        held, learnt = hold_out(requests)
        self._made_folder = not self._folder.exists()
        self._record, changes = open_record(self._folder, self._plan(vocabulary, digest))
        self._record.prompts = len(learnt)
        self._signals.on_stop = _go_on
        from dsbd_cli.train.target_answers import answerable, open_answers

        # the file stays locked to the end, so that no second run trains in this folder
        with open_answers(self._folder / ANSWERS) as (done, writer):
            if changes:
                self._train_anew(changes)
            try:
                self._talk.now("loading the target")
                engine = self._settings.load()
                self._check_stopped()
                warn_plain(self._options.chat, engine.info, requests)
            except DsbdError:
                if not done:
                    self._forget()
                raise
            held, failed = answerable(engine, held)
            warn_left_out(failed, "held-out prompt")
            self._answer(engine, learnt, done, writer)
            self._train(engine, held)

    # Starting and resuming

    def _requests(self) -> tuple[list[Request], str]:
        """Return the prompts, and a digest of their lines. Raises UsageError with the first bad line, or for too few
        prompts."""
        digest, name = blake2b(digest_size=16), f"--input {self._input}"
        columns = self._options.columns
        requests = read_prompts("--input", self._input, self._settings.rows, seen=digest.update, columns=columns)
        if len(requests) < HELD_OUT_EVERY:
            raise UsageError(
                f"{name} holds {plural(len(requests), 'prompt')}, but {HELD_OUT_EVERY} or more are needed: "
                "hundreds are better"
            )
        if len(requests) < FEW_PROMPTS:
            warn(f"{name} holds {len(requests)} prompts: below {FEW_PROMPTS} a draft hardly learns more than these")
        return requests, digest.hexdigest()

    def _plan(self, vocabulary: int, digest: str) -> TrainingPlan:
        options, settings, method = self._options, self._settings, self._settings.method
        return TrainingPlan(
            target=self._spec.source,
            input=digest,
            vocab=vocabulary,
            steps=options.steps or STEPS,
            learning_rate=options.learning_rate or LEARNING_RATE,
            decode="search" if method.rule == SEARCH else "sample",
            num_beams=method.num_beams,
            max_new_tokens=settings.rows.sampling.max_new_tokens,
            seed=options.seed or 0,
            dtype=self._spec.dtype,
            quantize=self._spec.quantize,
            chat=bool(options.chat),
            chat_template=None if settings.chat_template is None else text_hash(settings.chat_template),
            chat_template_kwargs=settings.chat_template_kwargs,
            tokenizer=self._spec.tokenizer,
        )

    def _train_anew(self, changes: list[str]) -> None:
        """Drop the head that was trained with other settings. The answers stay. changes: these settings, in words."""
        from dsbd_cli.train.saving import recover

        say(f"{', '.join(changes)}: training begins anew with the answers in {self._folder / ANSWERS}")
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

    def _answer(self, engine: Engine, requests: list[Request], done: int, writer: LineWriter) -> None:
        """Let the target answer the prompts that have no answer yet, and read all answers."""
        from dsbd_cli.train.target_answers import answering_turns, make_answers, read_answers

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

        before = 0
        for answering, some in answering_turns(engine.replace(batch_size=ANSWERED), requests):
            todo = some[max(0, done - before) :]
            with self._stopping(answering.stop):
                failed += make_answers(answering, todo, writer, on_answer)
            before += len(some)
        warn_left_out(failed)
        self._answers = read_answers(path)
        if not self._answers:
            self._forget()
            raise DsbdError(f"no prompt of {self._input} could be answered, so there is nothing to learn from")
        self._record.answers = len(self._answers)
        tokens = sum(len(answer.tokens) for answer in self._answers)
        say(f"{len(self._answers)} answers of {tokens} tokens to learn from, in {path}")

    # The head

    def _train(self, engine: Engine, held: list[Request]) -> None:
        training = self._training(engine)
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
        from dsbd_cli.train.saving import publish_draft_head

        publish_draft_head(training.student, self._spec, self._folder)

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
            if training.step % every == 0 and training.step not in record.measured_steps:
                self._save(training)
                began = time.monotonic()
                self._record_milestone(engine, training, self._folder / CHECKPOINT, held)
                if training.step and record.last_is_best:
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
        if steps not in record.measured_steps:
            self._record_milestone(engine, training, self._folder, held)
        record.complete = True
        record.write(self._folder)
        shutil.rmtree(self._folder / CHECKPOINT, ignore_errors=True)
        if not self._options.quiet:
            show(record, self._folder, len(held), trusted=self._spec.trust_remote_code)

    def _record_milestone(self, engine: Engine, training: Training, folder: Path, held: list[Request]) -> None:
        """Measure the draft in a folder, record the milestone and print it. The losses since the milestone before are
        cleared."""
        record, losses, step = self._record, training.losses, training.step
        ends = step in (0, record.plan.steps)
        timed = ends and len(held) > 1  # the first one warms up
        measured = self._measure(engine, folder, held if ends else held[:HELD_OUT_BETWEEN], speed=timed)
        milestone = Milestone(step, fmean(losses) if losses else None, *measured)
        losses.clear()
        record.milestones.append(milestone)
        record.write(self._folder)
        for line in milestone_said(milestone, record.plan.steps, len(held), SPEED_S):
            say(line)

    def _training(self, engine: Engine) -> Training:
        """Return the training, which goes on from the checkpoint if there is one."""
        from dsbd_cli.train.training import open_training

        folder, record = self._folder / CHECKPOINT, self._record
        training = open_training(engine, self._spec, record.plan, self._answers, folder, self._on_choice)
        if training.resumed:
            # milestones after this step are dropped, because their steps are taken again
            record.milestones = [milestone for milestone in record.milestones if milestone.step <= training.step]
            if training.step in record.measured_steps:
                training.losses.clear()
            say(f"going on behind step {training.step}")
        return training

    def _on_choice(self, number: int) -> None:
        """Say that `number` answers were read to choose the tokens of a head, and end where a signal came."""
        self._talk.now(f"choosing the tokens of the head: {number} answers read")
        self._check_stopped()

    def _save(self, training: Training) -> None:
        from dsbd_cli.train.saving import save_draft_head

        save_draft_head(training.student, self._folder / CHECKPOINT, "float32", training.moments())

    def _measure(
        self, engine: Engine, folder: Path, held: list[Request], *, speed: bool
    ) -> tuple[Measurement, Measurement | None]:
        """Measure the head in a folder on held-out prompts; also with one beam, if the run has several."""
        from dsbd_cli.train.draft_acceptance import with_draft_head

        pair = with_draft_head(engine, folder, self._spec)
        held = [replace(request, sampling=replace(request.sampling, n_best=1)) for request in held]
        measurement = self._measured(pair, held, speed=speed)
        if pair.method.num_beams == 1:
            return measurement, None
        single = pair.replace(method=replace(pair.method, num_beams=1))
        return measurement, self._measured(single, held, speed=speed)

    def _measured(self, pair: Engine, held: list[Request], *, speed: bool) -> Measurement:
        from dsbd_cli.lab.profiling.budget import Budget
        from dsbd_cli.train.draft_acceptance import measure_acceptance, measured_speed

        beams = "" if pair.method.num_beams > 1 else ", with one beam"

        def on_answer(number: int) -> None:
            self._talk.now(f"acceptance is measured{beams}: {number} of {len(held)} held-out prompts")

        on_answer(0)
        with self._stopping(pair.stop):
            acceptance = measure_acceptance(pair, held, on_answer)
        if acceptance is None or not speed:
            return Measurement(acceptance)
        budget = Budget(SPEED_S)
        self._talk.now(f"measuring speed for {SPEED_S:.0f} s{beams}")
        with self._stopping(budget.stop):
            return Measurement(acceptance, measured_speed(pair, held[:HELD_OUT_BETWEEN], budget))


def _go_on() -> None:
    """Do nothing when a signal comes: the run ends at the next `_check_stopped`."""
