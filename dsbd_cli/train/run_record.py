"""The record in a draft's folder: what the draft was made with, and how it did. No tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from dsbd_cli.errors import UsageError, option_name
from dsbd_cli.io.lines.replace import write_atomically
from dsbd_cli.io.schemas.contracts import DISTILL

RECORD = "dsbd_distill.json"
BATCH = 8  # answers of a step
OF_TRAINING = ("vocab", "steps", "learning_rate")  # settings that no answer depends on
DEPRECATED = {"form": "head", "layers": 1, "hidden_size": None}  # of a plan: written, and the same in every record


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings that the weights follow from, besides device and machine.

    input: a digest of the prompts' lines. chat: whether they went through the target's chat template. chat_template: a
    digest of the template in place of the target's.
    """

    target: str
    vocab: int
    steps: int
    learning_rate: float
    decode: str
    num_beams: int
    max_new_tokens: int
    seed: int
    dtype: str
    input: str
    quantize: str | None = None
    chat: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured tokens/s on this machine, one prompt at a time. plain: without a draft. drafted: with this draft, at the
    fastest D and K that were run. label: this D and K."""

    plain: float
    drafted: float
    label: str


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Acceptance of a draft. steps_per_call: steps that one target call yields. by_depth: for each layer, first layer
    first, how often it passed of the times that it was reached. Layers that were never reached are left out."""

    steps_per_call: float
    by_depth: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of a draft at one number of beams. acceptance: None where nothing was drafted. speed: None where it
    was not measured."""

    acceptance: DraftAcceptance | None
    speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class Milestone:
    """The draft after `step` steps. loss: mean since the milestone before, in nats per token; None before the first
    step. measured: with the beams of the run. one_beam: with one beam, where the run has several."""

    step: int
    loss: float | None
    measured: Measurement
    one_beam: Measurement | None = None


@dataclass(slots=True)
class Record:
    """A run of the command. prompts, answers: how many of them are trained on."""

    plan: TrainingPlan
    complete: bool = False
    prompts: int = 0
    answers: int = 0
    milestones: list[Milestone] = field(default_factory=list)

    @property
    def measured_steps(self) -> set[int]:
        """Steps that have a milestone."""
        return {milestone.step for milestone in self.milestones}

    @property
    def last_is_best(self) -> bool:
        """Whether the last milestone has at least as many steps per target call as any before."""
        measured = [milestone.measured.acceptance for milestone in self.milestones]
        steps = [acceptance.steps_per_call if acceptance else 0.0 for acceptance in measured]
        return steps[-1] == max(steps)

    def write(self, folder: Path) -> None:
        """Write the record, whole or not at all. Raises OutputError."""
        write_atomically(folder / RECORD, self.page())

    def page(self) -> bytes:
        """Return the document."""
        record = asdict(self)
        record["plan"] |= DEPRECATED
        return DISTILL.page({"schema": DISTILL.id, **record})


def open_record(folder: Path, plan: TrainingPlan) -> tuple[Record, list[str]]:
    """Return the record of a new folder, which is made, or of one that a run has left unfinished; and, in words, the
    settings of training that differ from those of that run. Raises UsageError for other settings that differ, and for a
    folder that holds anything else."""
    if not (folder / RECORD).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--output {folder} exists: name a new folder")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output {folder}: {error.strerror or error}") from None
        record = Record(plan)
        record.write(folder)
        return record, []
    record, changes = _read_record(folder), list[str]()
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
        changes.append(f"{option_name(item.name)} {change}")
    record.plan = plan
    return record, changes


def _read_record(folder: Path) -> Record:
    """Read the record in a folder. Raises UsageError where it cannot be read."""
    path = folder / RECORD
    try:
        record = orjson.loads(path.read_bytes())
        if any(record["plan"].pop(name) != value for name, value in DEPRECATED.items()):
            raise ValueError
        plan = TrainingPlan(**record["plan"])
        milestones = [_milestone(milestone) for milestone in record["milestones"]]
        return Record(plan, record["complete"], record["prompts"], record["answers"], milestones)
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} cannot be read: name a new folder with --output") from None


def _milestone(fields: dict[str, object]) -> Milestone:
    step, loss, alone = fields["step"], fields["loss"], fields["one_beam"]
    if not isinstance(step, int) or not isinstance(loss, float | None):
        raise TypeError
    return Milestone(step, loss, _measurement(fields["measured"]), None if alone is None else _measurement(alone))


def _measurement(fields: Any) -> Measurement:
    passed, speed = fields["acceptance"], fields["speed"]
    return Measurement(
        None if passed is None else DraftAcceptance(passed["steps_per_call"], tuple(passed["by_depth"])),
        None if speed is None else Speed(**speed),
    )
