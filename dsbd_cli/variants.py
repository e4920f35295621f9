"""The variants to choose from: verification rules, width policies, drafters and output formats.

What a variant is called, which settings it has, what they may be, what it fits with and where its code is, is written
here and nowhere else: config checks it, the command line spells it (`ngram:4`, `fuzzy:0.2,divergence=js`), records name
it.

A package of somebody else adds its own through entry points of the group `dsbd`, each a Rule, a Drafter or a Format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, Literal, TypeVar

from dsbd_cli.errors import KINDS, UsageError, option_name, shorten

__all__ = [
    "DRAFTERS",
    "FORMATS",
    "FUSION",
    "RULES",
    "WIDTHS",
    "Drafter",
    "Format",
    "Rule",
    "Setting",
    "Variant",
    "Width",
    "active",
    "check_drafter_name",
    "find_extensions",
    "parse",
    "parse_drafter",
    "parse_settings",
    "register",
    "runs_model",
    "sampling_rules",
    "spell",
    "spelling",
    "typed_names",
]

TreeName = Literal["greedy", "threshold", "top-k"]
DivergenceName = Literal["kl", "kl_reversed", "js", "js_authors", "tv"]
FallbackName = Literal["target", "strict"]
FuzzyLawName = Literal["raw", "warped"]
Exactness = Literal["same-text", "same-law", "dynamic-width", "lossy"]

Value = int | float | str
T_co = TypeVar("T_co", covariant=True)
V = TypeVar("V", bound="Variant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Generic[T_co]):
    """One setting of a variant.

    Attributes:
        field: its name in MethodConfig and in records.
        kind: the type of its value.
        default: None where it must be given, or follows from other settings.
        text: what it says.
        name: how it is spelled, as in `min=2`; as its field where nothing is given.
        shown: the default in words, where it follows from other settings.
        choices, least, above, most: what a value may be.
        zero: what 0 stands for.
        required: it has no default.
        only: another field and the value under which this setting acts.
        is_file: a path, which may hold commas and equal signs.
    """

    field: str
    kind: type[int] | type[float] | type[str]
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
    only: tuple[str, str] | None = None
    is_file: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.field)

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        zero = f" ({self.zero})" if self.zero else ""
        low = f"above {self.above:g}" if self.above is not None else f"{self.least or 0:g}{zero} or more"
        if self.kind is str:
            return "a file" if self.is_file else "a text"
        return f"{low} and at most {self.most:g}" if self.most is not None else low

    @property
    def help(self) -> str:
        """What it says, what it may be and its default."""
        may = f": {', '.join(self.choices)}" if self.choices else ""
        shown = self.shown or self.default
        return self.text + may + ("" if shown is None or self.required else f" (default: {shown})")

    def fits(self, value: object) -> bool:
        """Whether a value of the right type is one that may be."""
        if self.choices:
            return value in self.choices
        if not isinstance(value, int | float):
            return value != ""
        low = value > self.above if self.above is not None else value >= (self.least or 0)
        return low and math.isfinite(value) and (self.most is None or value <= self.most)

    def read(self, text: str) -> Value | None:
        """The value of a text, None where it is of another type."""
        try:
            return self.kind(text)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of several ways to do a thing: its name, what it is in a few words, and its own settings.

    The first setting is spelled without its name.

    Attributes:
        make: `module:name` of what makes it: of a rule a class with the protocol verify.base.Rule, of a drafter a
            function of drafting.base.DrafterInputs that returns a drafting.base.Drafter, of an output format a function
            (row, result, method record) -> bytes. Imported when it is used.
    """

    name: str
    text: str
    settings: tuple[Setting[object], ...] = ()
    make: str = ""

    def load(self) -> object:
        """What `make` names. Raises UsageError."""
        module, _, name = self.make.partition(":")
        try:
            return getattr(import_module(module), name)
        except Exception as error:  # a module of somebody else raises what it likes
            said = f"{self.make or 'nothing'} cannot be imported ({type(error).__name__}: {error})"
            raise UsageError(f"{self.name} cannot be used: {said}") from error

    @property
    def usage(self) -> str:
        """How it is spelled, as in `fuzzy:THRESHOLD[,divergence=...]`."""
        return self._spelled(spelling(self.settings))

    @property
    def help(self) -> str:
        """One line: how it is spelled, what it is, and what its settings say."""
        # a narrow terminal cuts a long word off; the names of the settings follow anyway
        many = len(self.settings) > 2
        head = self._spelled(f"{spelling(self.settings[:1])}[,NAME=...]") if many else self.usage
        return f"{head}  {self.text}" + "".join(f"; {one.name}: {one.help}" for one in self.settings)

    def _spelled(self, settings: str) -> str:
        if not self.settings:
            return self.name
        return f"{self.name}:{settings}" if self.settings[0].required else f"{self.name}[:{settings}]"


def spelling(settings: Sequence[Setting[object]]) -> str:
    """How settings are spelled, as in `FIRST,asked=...[,free=...]`."""
    asked, free = (
        "".join(f",{one.name}=..." for one in settings[1:] if one.required is required) for required in (True, False)
    )
    return (settings[0].name.upper() if settings else "") + asked + (f"[{free}]" if free else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a variant fits with: the values of another field that it can be used with, and why."""

    field: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Variant):
    """How drafts are verified.

    Attributes:
        exactness: what the output shares with plain decoding at fixed width.
        samples: it draws at random.
        cold: it takes temperature 0.
        width: the width policy by default, where drafter beam drafts.
        needs_draft: it has nothing to do without a draft model.
        limits: what it fits with.
    """

    exactness: Exactness
    samples: bool = True
    cold: bool = False
    width: str = "fixed"
    needs_draft: bool = False
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Width(Variant):
    """How many live beams a layer must yield.

    Attributes:
        dynamic: fewer than W may be enough.
        needs_pool_law: it works only with a drafter whose law is one of the whole pool.
    """

    dynamic: bool = False
    needs_pool_law: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter(Variant):
    """Who proposes the nodes.

    Attributes:
        runs_model: it runs the draft model; others read text.
        pool_law: its nodes are draws from a law of the whole pool.
        fuses: it can be the first of two.
        bridges: the draft model has a tokenizer of its own.
    """

    runs_model: bool = False
    pool_law: bool = False
    fuses: bool = True
    bridges: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Variant):
    """How a row's answer is written.

    Attributes:
        resumable: its lines say which rows they answer, as a native record or an OpenAI line does, so that a run can be
            resumed.
    """

    resumable: bool = False


def _table(*variants: V) -> dict[str, V]:
    return {one.name: one for one in variants}


# Rules

FUZZY_THRESHOLD: Setting[float | None] = Setting(
    field="fuzzy_threshold",
    name="threshold",
    kind=float,
    default=None,
    text="take a layer as drafted where target and draft differ by this much at most",
    required=True,
    least=0,
)
DIVERGENCE: Setting[DivergenceName] = Setting(
    field="divergence",
    kind=str,
    default="kl",
    text="how the difference is measured",
    choices=("kl", "kl_reversed", "js", "js_authors", "tv"),
)
FALLBACK: Setting[FallbackName] = Setting(
    field="fallback",
    kind=str,
    default="target",
    text="above the threshold draw from the target, or test the drafts as rejection does",
    choices=("target", "strict"),
)
FUZZY_LAW: Setting[FuzzyLawName] = Setting(
    field="fuzzy_law",
    name="law",
    kind=str,
    default="raw",
    text="compare the laws before or after temperature and cuts",
    choices=("raw", "warped"),
)

RULES: dict[str, Rule] = _table(
    Rule(
        name="coupled",
        make="dsbd_cli.engine.verify.coupled:Coupled",
        text="for a seed the same text with any draft, or with none",
        exactness="same-text",
        cold=True,
    ),
    Rule(
        name="rejection",
        make="dsbd_cli.engine.verify.rejection:Rejection",
        text="sequential tests; the same joint law",
        exactness="same-law",
        width="threshold",
    ),
    Rule(
        name="with-replacement",
        make="dsbd_cli.engine.verify.rejection:WithReplacement",
        text="the paper's law of independent draws, duplicates kept",
        exactness="same-law",
        width="threshold",
        limits=(
            Limit(
                field="drafter",
                values=("beam",),
                reason="rule with-replacement tests independent draws of a pool, which only drafter beam gives: "
                "use rule rejection or coupled",
            ),
        ),
    ),
    Rule(
        name="search",
        make="dsbd_cli.engine.verify.search:Search",
        text="deterministic beam search",
        exactness="same-text",
        samples=False,
        cold=True,
        limits=(
            Limit(
                field="width",
                values=("fixed",),
                reason="rule search is deterministic beam search, which it would change: use fixed",
            ),
            Limit(field="warp_scope", values=("pool",), reason="rule search takes no warping: use pool"),
        ),
    ),
    Rule(
        name="fuzzy",
        make="dsbd_cli.engine.verify.fuzzy:Fuzzy",
        text="lossy on purpose",
        settings=(FUZZY_THRESHOLD, DIVERGENCE, FALLBACK, FUZZY_LAW),
        exactness="lossy",
        needs_draft=True,
        limits=(
            Limit(
                field="drafter",
                values=("beam",),
                reason="rule fuzzy compares the target with the pool law that only drafter beam records: use beam",
            ),
            Limit(
                field="width",
                values=("fixed",),
                reason="rule fuzzy takes whole layers, which no estimated width describes: use fixed",
            ),
            Limit(
                field="warp_scope",
                values=("pool",),
                reason="rule fuzzy takes drafts that the warped target excludes, and it gives them no weight: use pool",
            ),
        ),
    ),
)
SEARCH = "search"  # the rule of --decode search

# Widths

WIDTH_THRESHOLD: Setting[float] = Setting(
    field="width_threshold",
    name="chance",
    kind=float,
    default=0.7,
    text="wanted chance that a layer yields its width",
    above=0,
    most=1,
)
MIN_WIDTH: Setting[int] = Setting(
    field="min_width", name="min", kind=int, default=1, text="least width of a layer", least=1
)

WIDTHS: dict[str, Width] = _table(
    Width(name="fixed", text="always W"),
    Width(
        name="threshold",
        text="as many as are likely",
        settings=(WIDTH_THRESHOLD, MIN_WIDTH),
        dynamic=True,
        needs_pool_law=True,
    ),
)

# Drafters

NGRAM: Setting[int] = Setting(
    field="ngram", name="longest", kind=int, default=12, text="how many of the last tokens are compared", least=1
)
INDEX: Setting[str | None] = Setting(
    field="index",
    kind=str,
    default=None,
    text="a file that dsbd index made",
    required=True,
    is_file=True,
)
BRANCHING: Setting[int] = Setting(
    field="branching",
    kind=int,
    default=0,
    text="children per node",
    shown="as many as fit",
    zero="as many as fit",
)
TREE: Setting[TreeName] = Setting(
    field="tree",
    kind=str,
    default="greedy",
    text="how nodes are chosen (top-k is deterministic)",
    choices=("greedy", "threshold", "top-k"),
)
TREE_THRESHOLD: Setting[float | None] = Setting(
    field="tree_threshold",
    name="value",
    kind=float,
    default=None,
    text="least value of a node of tree threshold",
    shown="1 / (D * K)",
    above=0,
    most=1,
    only=("tree", "threshold"),
)
SECOND_DRAFTS: Setting[int | None] = Setting(
    field="second_drafts",
    name="share",
    kind=int,
    default=None,
    text="nodes per layer of the second",
    shown="K / 4",
    least=1,
)
FUSION_TOP_K: Setting[int] = Setting(
    field="fusion_top_k",
    name="top-k",
    kind=int,
    default=16,
    text="what is looked up must be among this many best of the draft model, with 0 any",
    zero="keep all",
)

GRAMMAR = "grammar"  # the drafter that knows which layers will pass
DRAFTERS: dict[str, Drafter] = _table(
    Drafter(
        name="beam",
        make="dsbd_cli.engine.drafting.beam:make",
        text="draws of the draft model's pool",
        runs_model=True,
        pool_law=True,
    ),
    Drafter(
        name="rsd-c",
        make="dsbd_cli.engine.drafting.rsd:constant_branching",
        text="as many children for every node",
        settings=(BRANCHING,),
        runs_model=True,
    ),
    Drafter(
        name="rsd-s",
        make="dsbd_cli.engine.drafting.rsd:stochastic_beams",
        text="stochastic beam search",
        runs_model=True,
    ),
    Drafter(
        name="dynamic-tree",
        make="dsbd_cli.engine.drafting.dynamic:make",
        text="nodes where an acceptance is likeliest",
        settings=(TREE, TREE_THRESHOLD),
        runs_model=True,
    ),
    Drafter(
        name="bridge",
        make="dsbd_cli.engine.drafting.bridge:make",
        text="a draft model with another tokenizer",
        runs_model=True,
        fuses=False,
        bridges=True,
    ),
    Drafter(
        name="ngram",
        make="dsbd_cli.engine.drafting.ngram:make",
        text="looked up in the text itself",
        settings=(NGRAM,),
    ),
    Drafter(
        name="retrieval",
        make="dsbd_cli.engine.drafting.retrieval:make",
        text="looked up in your own corpus",
        settings=(INDEX,),
    ),
    Drafter(name="trigram", make="dsbd_cli.engine.drafting.trigram:make", text="counts of the text itself"),
    Drafter(
        name=GRAMMAR,
        make="dsbd_cli.engine.drafting.grammar:make",
        text="all that a grammar lets follow, where that is few tokens",
    ),
)
FUSION = Variant(
    name="A+B",
    text="A with B that reads text, as in beam+ngram:4,share=2",
    settings=(SECOND_DRAFTS, FUSION_TOP_K),
)
LOOKUPS = Variant(name="A+B", text="two that read text", settings=(SECOND_DRAFTS,))

# Output formats

FORMATS: dict[str, Format] = _table(
    Format(
        name="native",
        make="dsbd_cli.job.records.native:native_record",
        text="records with scores and counters",
        resumable=True,
    ),
    Format(
        name="openai",
        make="dsbd_cli.job.records.openai:openai_record",
        text="lines of the OpenAI batch form",
        resumable=True,
    ),
    Format(
        name="text",
        make="dsbd_cli.job.records.native:text_record",
        text="the text alone, escaped as in JSON; an empty line for a row that failed",
    ),
)

# Extensions

_TABLES: dict[type[Variant], dict[str, Variant]] = {Rule: RULES, Drafter: DRAFTERS, Format: FORMATS}  # type: ignore[dict-item]
_SPELLED = re.compile(r"[a-z][a-z0-9-]*")
_COLUMNS = frozenset(  # what stands beside settings in a record's `method`
    (
        "rule num_beams drafts_per_layer depth adaptive_depth width warp_scope memory_saving drafter settings target "
        "draft quantize"
    ).split()
)


def register(variant: Variant) -> None:
    """Add a rule, a drafter or an output format. Raises UsageError where its name or a setting's is taken."""
    table = _TABLES.get(type(variant))
    if table is None:
        raise UsageError(f"{variant!r} is no Rule, Drafter or Format of dsbd_cli.variants")
    if not _SPELLED.fullmatch(variant.name) or variant.name in {"auto", "none"}:
        raise UsageError(f"the name {shorten(variant.name)} must be lower-case letters, digits and hyphens")
    if variant.name in table:
        raise UsageError(f"there is a {type(variant).__name__.lower()} {variant.name} already")
    others: list[Variant] = [*RULES.values(), *DRAFTERS.values(), *FORMATS.values(), *WIDTHS.values(), FUSION]
    known = {one.field for other in others for one in other.settings}
    for setting in variant.settings:
        if setting.field in known | _COLUMNS or not setting.field.isidentifier():
            raise UsageError(f"{variant.name}: the field {shorten(setting.field)} is taken, or no identifier")
    table[variant.name] = variant


_looked = False


def find_extensions() -> None:
    """Register what installed packages offer as entry points of the group `dsbd`; once in a process. Raises UsageError
    that names the package."""
    global _looked  # noqa: PLW0603 - once in a process
    if _looked:
        return
    _looked = True  # first of all: an extension may import what asks again
    for point in entry_points(group="dsbd"):
        owner = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        try:
            found = point.load()
            if not isinstance(found, Variant):
                raise UsageError(f"{point.value} is no Rule, Drafter or Format of dsbd_cli.variants")
            register(found)
        except Exception as error:
            raise UsageError(
                f"extension {point.name}{owner} cannot be used: {error}; repair or uninstall it"
            ) from error


# Names


def sampling_rules() -> dict[str, Rule]:
    """The rules of --verify: those that sample."""
    return {name: rule for name, rule in RULES.items() if rule.samples}


def runs_model(drafter: str) -> bool:
    """One drafter, or one of two joined by +, runs the draft model."""
    return any(DRAFTERS[name].runs_model for name in drafter.split("+"))


def check_drafter_name(drafter: str) -> None:
    """One drafter, or two of which the second reads text. Raises UsageError."""
    names = drafter.split("+")

    def refuse(reason: str) -> None:
        raise UsageError(f"drafter is {shorten(drafter)}, but {reason}", field="drafter", value=drafter)

    if len(names) > 2 or not all(name in DRAFTERS for name in names):
        refuse(f"must be one of {', '.join(DRAFTERS)}, or two of them joined by +")
    if len(names) == 1:
        return
    first, second = names
    if not (DRAFTERS[first].fuses and DRAFTERS[second].fuses):
        refuse("bridge builds whole trees from text and fuses with none")
    if first == second:
        refuse("must be two drafters: the same one drafts the same nodes")
    if DRAFTERS[first].runs_model and DRAFTERS[second].runs_model:
        readers = [name for name, one in DRAFTERS.items() if not one.runs_model]
        refuse(
            f"the second of two must be one of {', '.join(readers)}: two that run the same draft model are no "
            "faster than one"
        )
    if DRAFTERS[second].runs_model:
        refuse(f"must be {second}+{first}: the one that runs the draft model stands first")


def active(rule: str, width: str, drafter: str) -> tuple[Variant, ...]:
    """The variants that act with these choices; drafter: one, or two joined by +."""
    drafters = [DRAFTERS[name] for name in drafter.split("+")]
    fusion = [FUSION if drafters[0].runs_model else LOOKUPS] if len(drafters) == 2 else []
    return (RULES[rule], WIDTHS[width], *drafters, *fusion)


# Spelling


def parse(
    option: str, text: str, variants: Mapping[str, Variant], *, complete: bool = True
) -> tuple[str, dict[str, Value]]:
    """Name and settings, by their fields, of `NAME[:SETTINGS]`. option: where it stands. complete: required settings
    must be there. Raises UsageError."""
    name, _, settings = text.partition(":")
    if name not in variants:
        expected = f"one of {', '.join(variants)}"
        message = f"{option} is {shorten(name)}, but must be {expected}"
        raise UsageError(message, field=option, value=name, expected=expected)
    return name, _settings(f"{option} {text}", variants[name].usage, variants[name].settings, settings, complete)


def parse_settings(option: str, text: str, settings: Sequence[Setting[object]]) -> dict[str, Value]:
    """Settings, by their fields, of `FIRST[,NAME=...]`. option: where it stands. Raises UsageError."""
    return _settings(f"{option} {text}", spelling(settings), settings, text, complete=True)


def parse_drafter(text: str, option: str = "--drafter", *, complete: bool = True) -> tuple[str, dict[str, Value]]:
    """Name and settings of `A[:SETTINGS]` or `A[:SETTINGS]+B[:SETTINGS]`. What two share stands with the second. See
    parse. Raises UsageError."""
    parts = _parts(text)
    name = "+".join(part.partition(":")[0] for part in parts)
    check_drafter_name(name)
    drafters = active("coupled", "fixed", name)[2:]
    found: dict[str, Value] = {}
    for place, part in enumerate(parts):
        known = drafters[place].settings
        usage = drafters[place].usage
        if place == 1:  # what both share stands with the second
            known += drafters[2].settings
            usage = f"{drafters[0].name}+{Variant(name=drafters[1].name, text='', settings=known).usage}"
        found |= _settings(f"{option} {text}", usage, known, part.partition(":")[2], complete)
    for one in (setting for part in drafters for setting in part.settings):
        if one.only is not None and one.field in found and found.get(one.only[0]) != one.only[1]:
            raise UsageError(f"{option} {text}: {one.name} would do nothing without {one.only[0]} {one.only[1]}")
    return name, found


def _parts(text: str) -> list[str]:
    """The drafters of a spelling. A + inside the settings, as of a file's name, does not split."""
    parts: list[str] = []
    for part in text.split("+"):
        if parts and ":" in parts[-1] and part.partition(":")[0] not in DRAFTERS:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def _settings(given: str, usage: str, known: Sequence[Setting[object]], text: str, complete: bool) -> dict[str, Value]:
    """given: what was typed, for messages."""
    table = {one.name: one for one in known}
    found: dict[str, Value] = {}
    # a comma without a name behind it belongs to the value, which is then a file's name or wrong
    names = "|".join(map(re.escape, table)) if known and known[0].is_file else "[a-z-]+"
    for place, piece in enumerate(re.split(rf",(?=(?:{names})=)", text) if text else []):
        name, equals, value = piece.partition("=")
        if place == 0 and known and not (equals and (name in table or not known[0].is_file)):
            name, value = known[0].name, piece
        if name not in table:
            what = f"there is no setting {shorten(name)}" if known else "it has no settings"
            raise UsageError(f"{given}: {what}: it is spelled {usage}")
        setting = table[name]
        if setting.field in found:
            raise UsageError(f"{given}: {name} is given twice: it is spelled {usage}")
        read = setting.read(value)
        if read is None or not setting.fits(read):
            kind = f"{KINDS[setting.kind]}, " if read is None else ""
            shown = f"{read:g}" if isinstance(read, float) else shorten(value if read is None else read)
            raise UsageError(f"{given}: {name} is {shown}, but must be {kind}{setting.expected}: it is spelled {usage}")
        found[setting.field] = read
    for setting in known:
        if complete and setting.required and setting.field not in found:
            raise UsageError(f"{given}: {setting.name} is missing: it is spelled {usage}")
    return found


def spell(variant: Variant, settings: Mapping[str, object]) -> str:
    """The spelling of a variant with these settings, by their fields; defaults are left out."""
    words = []
    for place, one in enumerate(variant.settings):
        value = settings.get(one.field)
        if value is not None and value != one.default:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(shown if place == 0 else f"{one.name}={shown}")
    return ":".join([variant.name, *([",".join(words)] if words else [])])


def help_lines(variants: Iterable[Variant]) -> str:
    """Each variant with its settings on a line of its own."""
    return "".join(f"\n\n{one.help}" for one in variants)


def typed_names(options: Iterable[str]) -> dict[str, str]:
    """What a field is called on a command line that has these options: `--depth`, or `min of --width`."""
    options = list(options)
    owners: dict[str, tuple[Variant, ...]] = {
        "verify": tuple(RULES.values()),
        "width": tuple(WIDTHS.values()),
        "drafter": (*DRAFTERS.values(), FUSION),
    }
    names = {
        setting.field: f"{setting.name} of {option_name(option)}"
        for option, variants in owners.items()
        if option in options
        for one in variants
        for setting in one.settings
    }
    return {**names, **{name: option_name(name) for name in options}}
