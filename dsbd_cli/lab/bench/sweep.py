"""The settings that are run, made of names of methods and lists of values."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.spelling import typed_names
from dsbd_cli.config.variant import Value
from dsbd_cli.config.variants import runs_model
from dsbd_cli.errors import UsageError, option_name
from dsbd_cli.lab.bench.methods import AXES, DEFAULT_METHODS, METHODS, Method
from dsbd_cli.lab.peers.config import PeerConfig

Sweep = Mapping[str, Sequence[Value]]


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """One method at one point of the sweep. label: the point, as in `W=4 K=8`; empty without a sweep."""

    method: str
    label: str
    config: MethodConfig | PeerConfig

    @property
    def name(self) -> str:
        """Method and label."""
        return f"{self.method} {self.label}".strip()

    @property
    def drafts(self) -> bool:
        """Whether a draft model runs."""
        return self.config.needs_draft

    def fields(self) -> dict[str, object]:
        """Return all settings under the library's names."""
        setting_fields = {
            name: value for name, value in dataclasses.asdict(self.config).items() if not name.startswith("_")
        }
        if isinstance(self.config, MethodConfig):
            del setting_fields["settings"]
            setting_fields |= self.config.resolved
        return setting_fields


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Settings in order, and notes on what was left out and why."""

    settings: tuple[SweepSetting, ...]
    notes: tuple[str, ...]

    def without(self, left: Sequence[SweepSetting], methods: str | None, fault: str) -> SweepPlan:
        """Return the plan without the settings `left`. methods: the text of --methods. fault: the reason, for the note.
        Raises UsageError where `methods` names one of them."""
        named = [name.strip() for name in (methods or "").split(",")]
        if asked := next((setting.method for setting in left if setting.method in named), None):
            raise UsageError(f"--methods: {asked} cannot be run, because {fault}: leave it out")
        if not left:
            return self
        kept = tuple(setting for setting in self.settings if setting not in left)
        names = ", ".join(dict.fromkeys(setting.method for setting in left))
        return SweepPlan(kept, (*self.notes, f"left out: {names}: {fault}"))


def choose_methods(
    text: str | None, *, draft: bool = True, drafters: Sequence[Value] = ()
) -> tuple[list[str], tuple[str, ...]]:
    """Return the names in a comma list, and notes on methods that were left out.

    `all` means every method that runs on the loaded models; further methods may be named with it. None means the
    default methods. draft: whether there is a draft model. drafters: those of the sweep.

    Raises UsageError for names that do not exist, occur twice, or need a draft that is not there.
    """
    lookups = bool(drafters) and not any(runs_model(str(name)) for name in drafters)

    def runs(method: Method) -> bool:
        return draft or not method.drafts or (lookups and "drafter" in method.axes)

    names = [] if text is None else [name.strip() for name in text.split(",")]
    chosen, notes = [name for name in names if name != "all"], []
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UsageError(f"--methods: {name} stands there twice: drop one")
        if name == "all":
            continue
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"all, or some of {', '.join(METHODS)}"
            raise UsageError(f"--methods: there is no method {name!r}: {hint}")
        if not runs(METHODS[name]):
            raise UsageError(f"--methods: {name} needs a draft, but there is none: name one with --draft")
    if text is not None and "all" not in names:
        return chosen, ()
    every = DEFAULT_METHODS if text is None else tuple(name for name in METHODS if name not in chosen)
    if missing := [name for name in every if not runs(METHODS[name])]:
        notes.append(f"left out: {', '.join(missing)}: they need a draft, but there is none: name one with --draft")
    kept = [name for name in every if name not in missing]
    return [name for name in METHODS if name in (*kept, *chosen)] if text is not None else kept, tuple(notes)


def read_values(option: str, axis: str, text: str) -> list[Value]:
    """Read a list of values such as `1,2,4`. option: named in errors. axis: its name in AXES. Raises UsageError."""
    values: list[Value] = []
    for part in text.split(","):
        try:
            values.append(AXES[axis].kind(part.strip()))
        except ValueError:
            raise UsageError(
                f"{option} is {text!r}, but must be {AXES[axis].expected}, or several with commas"
            ) from None
    if len(set(values)) < len(values):
        raise UsageError(f"{option} is {text!r}, where a value stands twice: drop one")
    return values


def plan(names: Sequence[str], sweep: Sweep, index: str | None = None) -> SweepPlan:
    """Return every method at every point of the axes that act on it. Other settings keep the library's defaults.

    Points that are not possible (fewer drafts than beams, ...) are left out with a note. Raises UsageError for an axis
    that acts on no method, for an index that no drafter reads, and for a method of which no point is possible.

    index: file of dsbd index, for drafter retrieval.
    """
    if index is not None and not any("retrieval" in str(name).split("+") for name in sweep.get("drafter", ())):
        raise UsageError(f"{option_name('index')} {index} would do nothing, because no --drafter is retrieval: drop it")
    for axis in sweep:
        if not any(axis in METHODS[name].axes for name in names):
            raise UsageError(f"{option_name(axis)} would do nothing: it acts on none of {', '.join(names)}")
    settings: list[SweepSetting] = []
    left_out: dict[str, list[str]] = {}
    for name in names:
        made, faults = _settings(name, METHODS[name], sweep, index)
        if not made:
            point, fault = faults[0]
            raise UsageError(f"{name} {point}: {fault}".replace(" : ", ": "))
        settings += made
        for point, fault in faults:
            left_out.setdefault(fault, []).append(f"{name} {point}")
    notes = tuple(f"left out: {', '.join(which)}: {fault}" for fault, which in left_out.items())
    return SweepPlan(tuple(settings), notes)


def _settings(
    name: str, method: Method, sweep: Sweep, index: str | None
) -> tuple[list[SweepSetting], list[tuple[str, str]]]:
    axes = [axis for axis in method.axes if axis in sweep]
    made, faults = [], []
    for values in itertools.product(*(sweep[axis] for axis in axes)):
        point = dict(zip(axes, values, strict=True))
        label = " ".join(AXES[axis].label(value) for axis, value in point.items())
        try:
            made.append(SweepSetting(name, label, method.config(_completed(method, point, index))))
        except UsageError as error:
            faults.append((label, error.typed(typed_names((*AXES, "index")))))
    return made, faults


def _completed(method: Method, point: Mapping[str, Value], index: str | None) -> dict[str, Value]:
    """Return a point with its missing values filled in as in `dsbd generate`, the beams of transformers' methods
    included. Raises UsageError."""
    beams = point.get("num_beams", MethodConfig().num_beams)
    if method.peer is not None:
        return {"num_beams": beams} if "num_beams" in method.axes else {}
    if index is not None and "retrieval" in str(point.get("drafter")).split("+"):
        point = {**point, "index": index}
    if method.fixed.get("memory_saving") and beams == 1:
        message = "num_beams is 1, but memory-saving keeps one beam of several: it needs 2 or more"
        raise UsageError(message, field="num_beams", value=beams)
    if method.drafts and point.get("depth") == 0:
        message = "depth 0 drafts nothing: that is the baseline without a draft"
        raise UsageError(message, field="depth", value=0, expected="1 or more")
    return dict(point)
