"""The variants to choose from: verification rules, width policies, drafters and output formats.

A variant's name, its settings with their allowed values, what it can be used with and where its code is are written
here and nowhere else: config checks it, the command line spells it (`ngram:4`, `fuzzy:0.2,divergence=js`), records name
it.

Other packages add variants of their own through entry points of the group `dsbd`, each a RuleSpec, a DrafterSpec or a
Format.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import Literal, TypeVar, get_args

from dsbd_cli.config.checking import refuse
from dsbd_cli.config.variant import DrafterSpec, Format, Limit, RuleSpec, Setting, Variant, Width
from dsbd_cli.errors import UsageError, shorten

TreeName = Literal["greedy", "top-k"]
DivergenceName = Literal["kl", "kl_reversed", "js", "js_authors", "tv"]
FallbackName = Literal["target", "strict"]
FuzzyLawName = Literal["raw", "warped"]
V = TypeVar("V", bound="Variant")


def _table(*variants: V) -> dict[str, V]:
    return {variant.name: variant for variant in variants}


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
    default="kl",
    text="how the difference is measured",
    choices=get_args(DivergenceName),
)
FALLBACK: Setting[FallbackName] = Setting(
    field="fallback",
    default="target",
    text="above the threshold draw from the target, or test the drafts as rejection does",
    choices=get_args(FallbackName),
)
FUZZY_LAW: Setting[FuzzyLawName] = Setting(
    field="fuzzy_law",
    name="law",
    default="raw",
    text="compare the distributions before or after temperature and cuts",
    choices=get_args(FuzzyLawName),
)

RULES: dict[str, RuleSpec] = _table(
    RuleSpec(
        name="coupled",
        make="dsbd_cli.engine.verify.coupled:Coupled",
        text="for a seed the same text with any draft, or with none",
        exactness="same-text",
        greedy=True,
        row_beams=True,
    ),
    RuleSpec(
        name="rejection",
        make="dsbd_cli.engine.verify.rejection:Rejection",
        text="sequential tests; the same joint distribution",
        exactness="same-law",
        width="threshold",
        row_beams=True,
    ),
    RuleSpec(
        name="with-replacement",
        make="dsbd_cli.engine.verify.rejection:WithReplacement",
        text="the paper's distribution of independent draws, duplicates kept",
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
    RuleSpec(
        name="search",
        make="dsbd_cli.engine.verify.search:Search",
        text="deterministic beam search",
        exactness="same-text",
        samples=False,
        greedy=True,
        row_beams=True,
        limits=(
            Limit(
                field="width",
                values=("fixed",),
                reason="rule search is deterministic beam search, which it would change: use fixed",
            ),
            Limit(field="warp_scope", values=("pool",), reason="rule search takes no warping: use pool"),
        ),
    ),
    RuleSpec(
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
                reason="rule fuzzy compares the target with the pool distribution of drafter beam alone: use beam",
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
        needs_pool_distribution=True,
    ),
)

# Drafters

NGRAM: Setting[int] = Setting(
    field="ngram",
    name="longest",
    kind=int,
    default=12,
    text="how many of the last tokens are compared",
    least=1,
    most=1000,  # each of them is a step of its own in every iteration
)
INDEX: Setting[str | None] = Setting(
    field="index",
    default=None,
    text="a file that dsbd index made",
    required=True,
    is_file=True,
)
OWN_TEXT = "own"  # the source of drafter suffix that is a row's text alone
SUFFIX_SOURCE: Setting[str | None] = Setting(
    field="suffix_source",
    name="source",
    default=None,
    text="own: the row's text alone; or a file of dsbd index in addition",
    shown="the row's own text and the rows that are done",
    is_file=True,
)
SUFFIX_CONTEXT: Setting[int] = Setting(
    field="suffix_context", name="context", kind=int, default=20, text="how many of the last tokens are compared",
    least=2, most=20,
)  # fmt: skip
SUFFIX_MEMORY: Setting[int] = Setting(
    field="suffix_memory", name="memory", kind=int, default=256, text="MiB for the rows that are done", least=1,
    most=28 * 1024,
)  # fmt: skip
SUFFIX_CACHE: Setting[str | None] = Setting(
    field="suffix_cache",
    name="cache",
    default=None,
    text="a file that keeps the rows that are done for the next run",
    shown="they are not kept",
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
    default="greedy",
    text="how nodes are chosen (top-k is deterministic)",
    choices=get_args(TreeName),
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

BEAM = "beam"  # the drafter where none is named
SUFFIX = "suffix"  # the drafter without a model, where nothing is asked
GRAMMAR = "grammar"  # the drafter that knows which layers will pass
DRAFTERS: dict[str, DrafterSpec] = _table(
    DrafterSpec(
        name=BEAM,
        make="dsbd_cli.engine.drafting.beam:make",
        text="draws of the draft model's pool",
        runs_model=True,
        pool_distribution=True,
    ),
    DrafterSpec(
        name="rsd-c",
        make="dsbd_cli.engine.drafting.rsd:constant_branching",
        text="as many children for every node",
        settings=(BRANCHING,),
        runs_model=True,
    ),
    DrafterSpec(
        name="rsd-s",
        make="dsbd_cli.engine.drafting.rsd:stochastic_beams",
        text="stochastic beam search",
        runs_model=True,
    ),
    DrafterSpec(
        name="dynamic-tree",
        make="dsbd_cli.engine.drafting.dynamic_tree:make",
        text="nodes where an acceptance is likeliest",
        settings=(TREE,),
        runs_model=True,
    ),
    DrafterSpec(
        name="bridge",
        make="dsbd_cli.engine.drafting.bridge.drafter:make",
        text="a draft model with another tokenizer",
        runs_model=True,
        fuses=False,
        bridges=True,
    ),
    DrafterSpec(
        name="ngram",
        make="dsbd_cli.engine.drafting.ngram:make",
        text="looked up in the text itself",
        settings=(NGRAM,),
    ),
    DrafterSpec(
        name=SUFFIX,
        make="dsbd_cli.engine.drafting.suffix:make",
        text="looked up in the text itself and in the rows of the run that are done",
        settings=(SUFFIX_SOURCE, SUFFIX_CONTEXT, SUFFIX_MEMORY, SUFFIX_CACHE),
    ),
    DrafterSpec(
        name="retrieval",
        make="dsbd_cli.engine.drafting.suffix:make_retrieval",
        text="looked up in your own corpus",
        settings=(INDEX,),
    ),
    DrafterSpec(
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

# of a flat record, a row per beam
BEAM_COLUMNS = ("id", "rank", "answer_id", "text", "logprob", "score", "error", "reasoning", "tool_calls")
FORMATS: dict[str, Format] = _table(
    Format(
        name="native",
        make="dsbd_cli.io.records.native_record:native_record",
        text="records with scores and counters",
        resumable=True,
    ),
    Format(
        name="openai",
        make="dsbd_cli.io.records.openai_record:openai_record",
        text="lines of the OpenAI batch form",
        resumable=True,
    ),
    Format(
        name="text",
        make="dsbd_cli.io.records.native_record:text_record",
        text="the text alone, escaped as in JSON; an empty line for a row that failed",
        writes_beams=False,
        writes_tokens=False,
    ),
    Format(
        name="csv",
        make="dsbd_cli.io.records.beam_record:csv_record",
        text=f"a line per beam: {', '.join(BEAM_COLUMNS)}, and the columns of an input table that are no fields",
        columns=BEAM_COLUMNS,
        carries=True,
        writes_tokens=False,
    ),
    Format(
        name="parquet",
        make="dsbd_cli.io.records.beam_record:parquet_record",
        text="the same columns in a Parquet file (needs the extra parquet)",
        columns=BEAM_COLUMNS,
        carries=True,
        parquet=True,
        writes_tokens=False,
    ),
)

# Extensions

_TABLES: dict[type[Variant], dict[str, Variant]] = {RuleSpec: RULES, DrafterSpec: DRAFTERS, Format: FORMATS}  # type: ignore[dict-item]
_SPELLED = re.compile(r"[a-z][a-z0-9-]*")
_TAKEN_FIELDS = frozenset(  # names beside those of settings in a record's `method`
    (
        "rule num_beams drafts_per_layer depth adaptive_depth width warp_scope memory_saving drafter settings target "
        "draft quantize"
    ).split()
)


def register(variant: Variant) -> None:
    """Add a rule, a drafter or an output format. Raises UsageError where its name or a setting's is taken."""
    table = _TABLES.get(type(variant))
    if table is None:
        raise UsageError(f"{variant!r} is no Rule, Drafter or Format of dsbd_cli.config.variant")
    if not _SPELLED.fullmatch(variant.name) or variant.name in {"auto", "none"}:
        raise UsageError(f"the name {shorten(variant.name)} must be lower-case letters, digits and hyphens")
    if variant.name in table:
        raise UsageError(f"there is a {type(variant).__name__.removesuffix('Spec').lower()} {variant.name} already")
    others: list[Variant] = [*RULES.values(), *DRAFTERS.values(), *FORMATS.values(), *WIDTHS.values(), FUSION]
    fields = {setting.field for other in others for setting in other.settings}
    for setting in variant.settings:
        if setting.field in fields | _TAKEN_FIELDS or not setting.field.isidentifier():
            raise UsageError(f"{variant.name}: the field {shorten(setting.field)} is taken, or no identifier")
    table[variant.name] = variant


_extensions_found = False
_extension_fault: UsageError | None = None


def find_extensions() -> None:
    """Register the variants that installed packages offer as entry points of the group `dsbd`; once in a process.
    Raises UsageError that names the package, and raises it again at every further call."""
    global _extensions_found, _extension_fault  # noqa: PLW0603 - once in a process
    if _extension_fault is not None:
        raise _extension_fault
    if _extensions_found:
        return
    _extensions_found = True  # first, because an extension may import code that calls this again
    for point in entry_points(group="dsbd"):
        owner = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        try:
            extension = point.load()
            if not isinstance(extension, Variant):
                raise UsageError(f"{point.value} is no Rule, Drafter or Format of dsbd_cli.config.variant")
            register(extension)
        except Exception as error:
            _extension_fault = UsageError(
                f"extension {point.name}{owner} cannot be used: {error}; repair or uninstall it"
            )
            raise _extension_fault from error


# Names


def sampling_rules() -> dict[str, RuleSpec]:
    """Return the rules of --verify: those that sample."""
    return {name: rule for name, rule in RULES.items() if rule.samples}


def runs_model(drafter: str) -> bool:
    """Return whether one drafter, or one of two joined by +, runs the draft model."""
    return any(DRAFTERS[name].runs_model for name in drafter.split("+"))


def check_drafter_name(drafter: str) -> None:
    """Check that a name is that of one drafter, or of two of which the second reads text. Raises UsageError."""
    names = drafter.split("+")
    if len(names) > 2 or not all(name in DRAFTERS for name in names):
        refuse("drafter", drafter, f"must be one of {', '.join(DRAFTERS)}, or two of them joined by +")
    if len(names) == 1:
        return
    first, second = names
    if not (DRAFTERS[first].fuses and DRAFTERS[second].fuses):
        refuse("drafter", drafter, "bridge builds whole trees from text and fuses with none")
    if first == second:
        refuse("drafter", drafter, "must be two drafters: the same one drafts the same nodes")
    if DRAFTERS[first].runs_model and DRAFTERS[second].runs_model:
        readers = [name for name, drafter in DRAFTERS.items() if not drafter.runs_model]
        refuse(
            "drafter",
            drafter,
            f"the second of two must be one of {', '.join(readers)}: two that run the same draft model are no "
            "faster than one",
        )
    if DRAFTERS[second].runs_model:
        refuse("drafter", drafter, f"must be {second}+{first}: the one that runs the draft model stands first")


def drafting_variants(drafter: str) -> tuple[Variant, ...]:
    """Return the one drafter of a name, or the two that are joined by + and the variant that joins them."""
    drafters = [DRAFTERS[name] for name in drafter.split("+")]
    fusion = [FUSION if drafters[0].runs_model else LOOKUPS] if len(drafters) == 2 else []
    return (*drafters, *fusion)
