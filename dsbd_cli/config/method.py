"""Settings of a whole engine: rule, width, drafter and the forest's size. They are the same for all of its requests,
because they fix tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

from dsbd_cli.config.checking import T, check_types, check_value, refuse, require
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.spelling import parse, parse_drafter
from dsbd_cli.config.variant import Exactness, RuleSpec, Setting, Value, Variant, Width
from dsbd_cli.config.variants import (
    BEAM,
    DRAFTERS,
    FUSION,
    GRAMMAR,
    INDEX,
    MIN_WIDTH,
    OWN_TEXT,
    RULES,
    SECOND_DRAFTS,
    SUFFIX,
    SUFFIX_CACHE,
    SUFFIX_MEMORY,
    SUFFIX_SOURCE,
    WIDTHS,
    check_drafter_name,
    drafting_variants,
    find_extensions,
    runs_model,
)
from dsbd_cli.errors import MOST_INTEGER, UsageError, shorten

_KINDS: dict[type[Variant], str] = {RuleSpec: "rule", Width: "width"}
WarpScope = Literal["pool", "beam"]
DEFAULT_BATCH_SIZE = 8
DEFAULT_DEPTH = 4  # where all iterations have the same depth
MAX_AUTO_DEPTH = 8  # where the depth is adaptive
MAX_CERTAIN_DEPTH = 16  # where the drafter knows which layers pass
DEFAULT_DRAFTS = 8
SPARE_DRAFTS = 32  # default drafts of a layer beyond the number of beams, at most
MOST_LOOKED_UP = 4  # beams, where nothing is asked: with so many look-ups were measured to cost nothing
MOST_DRAFTED = 512  # nodes of all layers, where no depth is given

DERIVED = ("depth", "adaptive_depth", "width", "drafts_per_layer")  # settings whose default follows from others


def check_request(sampling: SamplingConfig, rule: str, num_beams: int) -> None:
    """Check that the settings of a request fit the rule and the number of beams. Raises UsageError."""
    if sampling.temperature == 0 and not RULES[rule].greedy:
        value = sampling.temperature
        message = f"temperature is 0, which {rule} does not take: use coupled, or search"
        raise UsageError(message, field="temperature", value=value)
    if sampling.n_best > num_beams:
        refuse("n_best", sampling.n_best, f"num_beams is {num_beams}: lower it, or raise that")
    if sampling.num_beams is not None and sampling.num_beams > num_beams:
        refuse("num_beams", sampling.num_beams, f"the run has {num_beams}: lower it, or raise that")
    if sampling.num_beams not in (None, num_beams) and not RULES[rule].row_beams:
        refuse("num_beams", sampling.num_beams, f"the run has {num_beams}, and with rule {rule} all rows have as many")


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """Settings of how an engine decodes; one per engine. The defaults are those of the command.

    Rule, width and drafter are given by name, or spelled with their settings as on the command line:
    `MethodConfig(rule="fuzzy:0.2,divergence=js", drafter="ngram:4", width="threshold:0.7,min=2")`.

    Attributes:
        rule: verification rule, one of variants.RULES.
        num_beams: W, live beams at most.
        drafts_per_layer: K, drafted nodes per layer. Default: 8, or 2W if that is more; above W = 32 it is W + 32.
        depth: D, drafted layers; 0 is plain beam sampling (or beam search) without a draft. Default: 8 with
            adaptive_depth, else 4 (drafter grammar: 16); fewer where that would be more than 512 drafted nodes.
        adaptive_depth: D and K are upper bounds, and every iteration takes those below them that were measured fastest
            (the command's `--depth auto`). Default: where no depth is given and the text cannot depend on the forest:
            rules coupled and search at fixed width, without memory_saving.
        width: width policy of a layer, fixed (always W) or threshold. Default: threshold for rejection and
            with-replacement where drafter beam drafts, else fixed.
        warp_scope: `pool` warps the joint distribution over (beam, token); `beam` warps each beam's row.
        memory_saving: keep only the best beam between iterations.
        drafter: the drafter that proposes the nodes, one of variants.DRAFTERS; or two joined by +, the second of which
            reads text.
        settings: settings of rule, width and drafter, by their fields in variants. Only what differs from the defaults
            need be given. A mapping may be given. Settings that are spelled with a name are moved here.
    """

    rule: str = "coupled"
    num_beams: int = 4
    # None means not given: __post_init__ then sets a value that follows from the other settings
    drafts_per_layer: int = None  # type: ignore[assignment]
    depth: int = None  # type: ignore[assignment]
    width: str = None  # type: ignore[assignment]
    warp_scope: WarpScope = "pool"
    memory_saving: bool = False
    adaptive_depth: bool = None  # type: ignore[assignment]
    drafter: str = BEAM
    settings: tuple[tuple[str, Value], ...] = ()
    # a given setting that needs a draft
    _asks_for_draft: str | None = field(default=None, init=False, repr=False, compare=False)
    # there is no draft and none was asked for: look-ups serve where they cost nothing, see Engine
    _assumed: bool = field(default=False, init=False, repr=False, compare=False)

    if TYPE_CHECKING:  # more types may be given than the fields then hold

        def __init__(
            self,
            rule: str = ...,
            num_beams: int = ...,
            drafts_per_layer: int | None = ...,
            depth: int | None = ...,
            width: str | None = ...,
            warp_scope: WarpScope = ...,
            memory_saving: bool = ...,
            adaptive_depth: bool | None = ...,
            drafter: str = ...,
            settings: Mapping[str, Value | None] | tuple[tuple[str, Value], ...] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        find_extensions()
        self._read_spelled()
        check_types(self, open_=DERIVED)
        self._resolve()
        self._check_variants()
        require(self.num_beams >= 1, "num_beams", self.num_beams, "1 or more")
        require(self.depth >= 0, "depth", self.depth, "0 (no draft) or more")
        require(self.drafts_per_layer >= 1, "drafts_per_layer", self.drafts_per_layer, "1 or more")
        for name in ("num_beams", "depth", "drafts_per_layer"):
            require(getattr(self, name) <= MOST_INTEGER, name, getattr(self, name), f"at most {MOST_INTEGER}")
        least, expected = self.value(MIN_WIDTH), f"between 1 and {self.num_beams} (num_beams)"
        require(1 <= least <= self.num_beams, MIN_WIDTH.field, least, expected)
        if self.adaptive_depth and not self.depth:
            refuse("depth", self.depth, "adaptive_depth needs 1 or more to choose below")
        if self.depth and self.drafts_per_layer < self.required_width:
            reason = f"a layer needs {self.required_width} drafted nodes to pass: raise it, or use width threshold"
            refuse("drafts_per_layer", self.drafts_per_layer, reason)

    def _read_spelled(self) -> None:
        """Move settings that are spelled with a name, as in `ngram:4`, into `settings`. Raises UsageError."""
        pairs: object = tuple(self.settings.items()) if isinstance(self.settings, Mapping) else self.settings
        named = isinstance(pairs, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
        )
        require(named, "settings", self.settings, "a table of settings")
        given = dict(self.settings)
        for name, table in (("rule", RULES), ("width", WIDTHS)):
            text = getattr(self, name)
            if isinstance(text, str):
                chosen, some = parse(name, text, table, complete=False)
                given |= some
                object.__setattr__(self, name, chosen)
        if isinstance(self.drafter, str):
            chosen, some = parse_drafter(self.drafter, "drafter", complete=False)
            given |= some
            object.__setattr__(self, "drafter", chosen)
        settings = sorted((name, value) for name, value in given.items() if value is not None)
        object.__setattr__(self, "settings", tuple(settings))

    def _resolve(self) -> None:
        """Set the defaults that follow from other settings."""
        derived = {name: getattr(self, name) for name in DERIVED}
        asking = [name for name, value in derived.items() if value and value != "fixed"]
        depth, adaptive, width, drafts = derived.values()
        if width is None:
            first = DRAFTERS.get(self.drafter_names[0])
            # a width can only be estimated from a pool distribution
            pool = depth != 0 and first is not None and first.pool_distribution
            width = RULES[self.rule].width if pool else "fixed"
        if adaptive is None:
            same_text = RULES[self.rule].exactness == "same-text"
            adaptive = depth is None and same_text and not WIDTHS[width].dynamic and not self.memory_saving
        if drafts is None:
            drafts = max(DEFAULT_DRAFTS, self.num_beams + min(self.num_beams, SPARE_DRAFTS))
        if depth is None:
            usual = MAX_AUTO_DEPTH if adaptive else DEFAULT_DEPTH
            foresees = self.drafter == GRAMMAR or (adaptive and (self.drafter == SUFFIX or self._pairs_look_ups))
            usual = MAX_CERTAIN_DEPTH if foresees else usual
            depth = min(usual, max(1, MOST_DRAFTED // max(1, drafts)))
        for name, value in zip(DERIVED, (depth, adaptive, width, drafts), strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_asks_for_draft", asking[0] if asking else None)

    def _check_variants(self) -> None:
        """Check that rule, width and drafter fit each other, and that every setting has an allowed value. Raises
        UsageError."""
        check_drafter_name(self.drafter)
        rule, width, drafters = RULES[self.rule], WIDTHS[self.width], [DRAFTERS[name] for name in self.drafter_names]
        self._check_settings()
        if len(drafters) == 2:
            share, most = self.value(SECOND_DRAFTS), self.drafts_per_layer - 1
            require(most >= 1, "drafts_per_layer", self.drafts_per_layer, "2 or more for two drafters")
            require(share is None or 1 <= share <= most, SECOND_DRAFTS.field, share, f"between 1 and {most} (K - 1)")
        if SUFFIX in self.drafter_names:
            self._check_suffix()
        if self.depth == 0 and self.drafter != BEAM:
            refuse("drafter", self.drafter, "depth 0 drafts nothing: raise the depth, or drop the drafter")
        if self.depth == 0 and rule.needs_draft:
            refuse("depth", self.depth, f"rule {rule.name} compares the target with a draft: raise it")
        for limit in rule.limits:
            value = getattr(self, limit.field)
            if value not in limit.values:
                refuse(limit.field, value, limit.reason)
        if self.depth and width.needs_pool_distribution and not drafters[0].pool_distribution:
            reason = (
                f"it estimates acceptance from the pool distribution that drafter beam records, and {self.drafter} has "
                "none: use width fixed"
            )
            refuse("width", self.width, reason)

    def _check_suffix(self) -> None:
        """Check the settings of drafter suffix. Raises UsageError."""
        given = dict(self.settings)
        if given.get(SUFFIX_CACHE.field) is not None and given[SUFFIX_CACHE.field] == given.get(SUFFIX_SOURCE.field):
            refuse(SUFFIX_CACHE.field, given[SUFFIX_CACHE.field], "it would replace the source: name another file")
        for setting in (SUFFIX_MEMORY, SUFFIX_CACHE):
            if setting.field not in given:
                continue
            if given.get(SUFFIX_SOURCE.field) == OWN_TEXT:
                refuse(setting.field, given[setting.field], f"source {OWN_TEXT} looks up in no other row: drop one")
            if self.exactness != "same-text":
                reason = "the text of a seed may depend on the drafts here, so other rows are not looked up: drop it"
                refuse(setting.field, given[setting.field], reason)

    def _check_settings(self) -> None:
        """Check that every setting has an allowed value and belongs to a variant that acts, and that no required one is
        missing. Raises UsageError."""
        acting = {setting.field: setting for variant in self.variants for setting in variant.settings}
        every: list[Variant] = [*RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION]
        owners = {setting.field: variant for variant in every for setting in variant.settings}
        for name, value in self.settings:
            if name not in owners:
                refuse(name, value, "no rule, width or drafter has such a setting")
            if name not in acting:
                kind = _KINDS.get(type(owners[name]), "drafter")
                refuse(name, value, f"the {kind} is {getattr(self, kind)}: only {kind} {owners[name].name} has one")
            hint = float | int if acting[name].kind is float else acting[name].kind
            check_value(name, value, hint)
            require(acting[name].fits(value), name, value, acting[name].expected)
        settings = dict(self.settings)
        for variant in self.variants:
            for setting in variant.settings:
                if setting.required and setting.field not in settings:
                    message = f"{setting.field} is missing, but {variant.name} needs it: {setting.text}"
                    raise UsageError(message, field=setting.field)

    def value(self, setting: Setting[T]) -> T:
        """Return the value of a variant's setting, or its default."""
        for name, value in self.settings:
            if name == setting.field:
                return value  # type: ignore[return-value]
        return setting.default

    def but(self, setting: Setting[T], value: T) -> MethodConfig:
        """Return the same method with another value of a variant's setting. Raises UsageError where the setting does
        not act."""
        settings: dict[str, object] = {**dict(self.settings), setting.field: value}
        return replace(self, settings=tuple(settings.items()))  # type: ignore[arg-type]

    @classmethod
    def of(cls, given: Mapping[str, object]) -> MethodConfig:
        """Make a method from one table of its own fields and of variants' settings."""
        own = {item.name for item in fields(cls)} - {"settings"}
        return cls(
            **{name: value for name, value in given.items() if name in own},  # type: ignore[arg-type]
            settings={name: value for name, value in given.items() if name not in own},  # type: ignore[misc]
        )

    def fit_draft(self, draft: str | None) -> MethodConfig:
        """Return this method for a pair with this draft model, or with none. Without one it becomes plain decoding,
        unless it was told to draft. Raises UsageError where method and models contradict each other."""
        if (draft is not None) == self.needs_draft:
            return self
        if draft is not None:
            reason = "depth 0 drafts nothing" if self.depth == 0 else f"drafter {self.drafter} uses no draft model"
            raise UsageError(f"draft is {shorten(draft)}, but {reason}: give draft None")
        needs = RULES[self.rule].needs_draft
        if needs or self.drafter != BEAM:
            asks = f"rule {self.rule} compares with" if needs else f"drafter {self.drafter} runs"
            raise UsageError(f"draft is None, but {asks} a draft model: give one")
        if self._asks_for_draft is not None:
            asks = f"{self._asks_for_draft} is {getattr(self, self._asks_for_draft)}"
            other = "drop it" if self._asks_for_draft == "width" else f"drafter {SUFFIX}"
            raise UsageError(f"draft is None, but {asks}, which needs a draft model: give one, or {other}")
        if self.adaptive_depth and not self.dynamic and self.num_beams <= MOST_LOOKED_UP:
            looks_up = replace(self, drafter=SUFFIX, depth=None, adaptive_depth=None)  # type: ignore[arg-type]
            object.__setattr__(looks_up, "_assumed", True)
            return looks_up
        return self.without_drafts()

    def without_drafts(self) -> MethodConfig:
        """Return this method as plain decoding."""
        return replace(self, drafter=BEAM, depth=0, adaptive_depth=False, width="fixed")

    @property
    def assumed(self) -> bool:
        """True where nothing was asked, so that look-ups serve only where they cost nothing."""
        return self._assumed

    @property
    def index_files(self) -> tuple[str, ...]:
        """Files that the drafters look up in, without the cache of `suffix`."""
        return tuple(name for name in (self.value(SUFFIX_SOURCE), self.value(INDEX)) if name not in (None, OWN_TEXT))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Rule, width, drafters and the variant that joins two drafters."""
        return (RULES[self.rule], WIDTHS[self.width], *drafting_variants(self.drafter))

    @property
    def drafters(self) -> tuple[Variant, ...]:
        """The drafters and the variant that joins two of them; none where nothing is drafted."""
        names = self.drafter_names if self.depth else ()
        return (*[DRAFTERS[name] for name in names], *([FUSION] if len(names) == 2 else []))

    @property
    def resolved(self) -> dict[str, object]:
        """Values of all variants' settings by field, also of those that follow from others."""
        values: dict[str, object] = {setting.field: None for some in self.drafters for setting in some.settings}
        values |= {setting.field: self.value(setting) for variant in self.variants for setting in variant.settings}
        if SECOND_DRAFTS.field in values:
            values[SECOND_DRAFTS.field] = self.second_share
        return values

    @property
    def samples(self) -> bool:
        """True where the rule draws at random."""
        return RULES[self.rule].samples

    @property
    def takes_greedy(self) -> bool:
        """True where the rule accepts temperature 0."""
        return RULES[self.rule].greedy

    @property
    def dynamic(self) -> bool:
        """True where a layer may pass with fewer than W live beams."""
        return WIDTHS[self.width].dynamic

    @property
    def bridges(self) -> bool:
        """True where the draft model has a tokenizer of its own."""
        return any(DRAFTERS[name].bridges for name in self.drafter_names)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Name of the drafter, or names of the two that are joined."""
        return tuple(self.drafter.split("+"))

    @property
    def needs_draft(self) -> bool:
        """True where a draft model takes part."""
        return self.depth > 0 and runs_model(self.drafter)

    @property
    def looks_up_first(self) -> bool:
        """True where an iteration drafts look-ups alone if they promise more than the draft model."""
        return self.adaptive_depth and self._pairs_look_ups

    @property
    def _pairs_look_ups(self) -> bool:
        """True for a draft model and a drafter that foresees which layers pass, where texts depend on neither."""
        first, *second = self.drafter_names
        same_text = RULES[self.rule].exactness == "same-text"
        return same_text and runs_model(first) and second in ([SUFFIX], [GRAMMAR])

    @property
    def second_share(self) -> int:
        """Nodes per layer of the second of two drafters."""
        return self.value(SECOND_DRAFTS) or max(1, self.drafts_per_layer // 4)

    @property
    def required_width(self) -> int:
        """Live beams a layer needs to pass: W, or W_min where the width is dynamic."""
        return self.value(MIN_WIDTH) if self.dynamic else self.num_beams

    @property
    def exactness(self) -> Exactness:
        """Relation of the output to plain decoding at the same num_beams and seed, as docs/algorithm.md defines it."""
        exactness = RULES[self.rule].exactness
        narrower = (self.depth and self.dynamic) or self.memory_saving
        return "dynamic-width" if narrower and exactness != "lossy" else exactness


def check_engine_options(
    method: object, batch_size: object, on_too_long: object, log_steps: object, cuda_graphs: object, kernels: object
) -> None:
    """Check the types of an engine's options. Raises UsageError."""
    check_value("method", method, MethodConfig | None)
    check_value("batch_size", batch_size, int | None)
    check_value("on_too_long", on_too_long, OnTooLong)
    check_value("log_steps", log_steps, bool)
    check_value("cuda_graphs", cuda_graphs, bool | None)
    check_value("kernels", kernels, bool | None)
