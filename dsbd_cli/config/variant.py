"""Kinds of variants: the facts that describe a rule, a width policy, a drafter and an output format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, Literal, TypeVar

from dsbd_cli.errors import MOST_INTEGER, UsageError

Exactness = Literal["same-text", "same-law", "dynamic-width", "lossy"]

Value = int | float | str
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[T_co]):
    """One setting of a variant.

    Attributes:
        field: its name in MethodConfig and in records.
        kind: the type of its value.
        default: None where it must be given, or follows from other settings.
        text: what it is for, as help says it.
        name: how it is spelled, as in `min=2`; by default as its field.
        shown: the default in words, where it follows from other settings.
        choices: the allowed values. least, most: the smallest and the largest allowed number; an integer is at most
            MOST_INTEGER in any case. above: a number that a value must be above.
        zero: what 0 stands for.
        required: it has no default.
        is_file: the value is a path, which may hold commas and equal signs.
    """

    field: str
    kind: type[int] | type[float] | type[str] = str
    default: T_co
    text: str
    name: str = ""
    shown: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    zero: str | None = None
    required: bool = False
    is_file: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.field)
        if self.kind is int and self.most is None:
            object.__setattr__(self, "most", MOST_INTEGER)

    @property
    def expected(self) -> str:
        """Description of the allowed values."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        zero = f" ({self.zero})" if self.zero else ""
        low = f"above {self.above:g}" if self.above is not None else f"{self.least or 0:g}{zero} or more"
        if self.kind is str:
            return "a file" if self.is_file else "a text"
        return f"{low} and at most {self.most:.10g}" if self.most is not None else low

    @property
    def help(self) -> str:
        """Description of the setting, its choices and its default."""
        may = f": {', '.join(self.choices)}" if self.choices else ""
        shown = self.shown or self.default
        return self.text + may + ("" if shown is None or self.required else f" (default: {shown})")

    def fits(self, value: object) -> bool:
        """Return whether a value of the right type is allowed."""
        if self.choices:
            return value in self.choices
        if not isinstance(value, int | float):
            return value != ""
        low = value > self.above if self.above is not None else value >= (self.least or 0)
        return low and math.isfinite(value) and (self.most is None or value <= self.most)

    def read(self, text: str) -> Value | None:
        """Return the value that a text stands for, None where it is of another type."""
        try:
            return self.kind(text)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of several ways to do a thing: its name, a description in a few words, and its own settings.

    The first setting is spelled without its name.

    Attributes:
        make: `module:name` of the code that makes it, imported when it is used. For a rule it is a class with base
            verify.base.Rule, for a drafter a function of drafting.base.DrafterInputs that returns a
            drafting.base.Drafter, for an output format a function (row, result, method record) -> bytes.
    """

    name: str
    text: str
    settings: tuple[Setting[object], ...] = ()
    make: str = ""

    def load(self) -> object:
        """Import what `make` names. Raises UsageError where that fails."""
        module, _, name = self.make.partition(":")
        try:
            return getattr(import_module(module), name)
        except Exception as error:  # a module of another package may raise anything
            reason = f"{self.make or 'nothing'} cannot be imported ({type(error).__name__}: {error})"
            raise UsageError(f"{self.name} cannot be used: {reason}") from error

    @property
    def usage(self) -> str:
        """Spelling of the variant, as in `fuzzy:THRESHOLD[,divergence=...]`."""
        return spelled(self.name, self.settings)

    @property
    def help(self) -> str:
        """Line of help: how the variant is spelled, what it is, and what its settings are for."""
        # a narrow terminal cuts a long word off; the names of the settings follow anyway
        head = spelled(self.name, self.settings, short=len(self.settings) > 2)
        return f"{head}  {self.text}" + "".join(f"; {setting.name}: {setting.help}" for setting in self.settings)


def spelled(name: str, settings: Sequence[Setting[object]], *, short: bool = False) -> str:
    """Return how a variant with these settings is spelled. short: only the first setting is named."""
    if not settings:
        return name
    spelling_of_settings = f"{spelling(settings[:1])}[,NAME=...]" if short else spelling(settings)
    return f"{name}:{spelling_of_settings}" if settings[0].required else f"{name}[:{spelling_of_settings}]"


def spelling(settings: Sequence[Setting[object]]) -> str:
    """Return how settings are spelled, as in `FIRST,asked=...[,free=...]`."""
    asked, free = (
        "".join(f",{setting.name}=..." for setting in settings[1:] if setting.required is required)
        for required in (True, False)
    )
    return (settings[0].name.upper() if settings else "") + asked + (f"[{free}]" if free else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limit of what a variant can be used with: the allowed values of another field, and why."""

    field: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec(Variant):
    """Description of a verification rule.

    Attributes:
        exactness: what the output shares with plain decoding at fixed width.
        samples: it draws at random.
        greedy: it accepts temperature 0.
        width: the default width policy where drafter beam drafts.
        needs_draft: it has nothing to do without a draft model.
        limits: what it can be used with.
        row_beams: a request may have fewer beams than the run.
    """

    exactness: Exactness
    samples: bool = True
    greedy: bool = False
    width: str = "fixed"
    needs_draft: bool = False
    limits: tuple[Limit, ...] = ()
    row_beams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Width(Variant):
    """Description of a width policy, which says how many live beams a layer must yield.

    Attributes:
        dynamic: fewer than W may be enough.
        needs_pool_distribution: it works only with a drafter whose distribution is over the whole pool.
    """

    dynamic: bool = False
    needs_pool_distribution: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec(Variant):
    """Description of a drafter.

    Attributes:
        runs_model: it runs the draft model; others read text.
        pool_distribution: its nodes are draws from a distribution of the whole pool.
        fuses: it can be joined with another drafter.
        bridges: the draft model has a tokenizer of its own.
    """

    runs_model: bool = False
    pool_distribution: bool = False
    fuses: bool = True
    bridges: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Variant):
    """Description of an output format, in which a row's answer is written.

    Attributes:
        resumable: its lines are JSON objects with the `id` and `key` of the rows that they answer, as native records
            or OpenAI lines have them, so that a run can be resumed.
        columns: the column names that a table begins with: as a line with commas between them, or as Parquet has them.
        carries: columns of an input table that are no fields stand behind these, as `method.carried` says.
        parquet: records go into a Parquet file.
        writes_beams: every reported beam is written; else the best text alone.
        writes_tokens: ids and log-probabilities of tokens are written where they are asked for.
    """

    resumable: bool = False
    columns: tuple[str, ...] = ()
    carries: bool = False
    parquet: bool = False
    writes_beams: bool = True
    writes_tokens: bool = True
