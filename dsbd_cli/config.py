"""Settings: small frozen dataclasses, validated once, where a default is written once.

`SamplingConfig` and the seed belong to one request; `MethodConfig` to a whole engine, because it fixes tensor shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from dsbd_cli.errors import UsageError, shorten
from dsbd_cli.variants import (
    BRANCHING,
    DIVERGENCE,
    DRAFTERS,
    FALLBACK,
    FUSION,
    FUSION_TOP_K,
    FUZZY_LAW,
    FUZZY_THRESHOLD,
    MIN_WIDTH,
    NGRAM,
    RULES,
    SECOND_DRAFTS,
    TREE,
    TREE_THRESHOLD,
    WIDTH_THRESHOLD,
    WIDTHS,
    DivergenceName,
    Exactness,
    FallbackName,
    FuzzyLawName,
    Rule,
    RuleName,
    Setting,
    TreeName,
    Variant,
    WidthName,
    active,
    check_drafter_name,
)

__all__ = [
    "Exactness",
    "MethodConfig",
    "ModelSpec",
    "SamplingConfig",
    "check_request",
    "check_types",
    "check_value",
]

WarpScope = Literal["pool", "beam"]
OnTooLong = Literal["error", "truncate-left"]
Numerics = Literal["invariant", "fast"]

WARP_SCOPES: tuple[str, ...] = ("pool", "beam")
ON_TOO_LONG: tuple[str, ...] = ("error", "truncate-left")
NUMERICS: tuple[str, ...] = ("invariant", "fast")
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")

BUILTIN_TARGET = "builtin:target"
BUILTIN_DRAFT = "builtin:draft"
DEFAULT_BATCH_SIZE = 8
DEFAULT_DEPTH = 4  # where every iteration drafts as deep
MAX_AUTO_DEPTH = 8  # where the depth is adaptive
DEFAULT_DRAFTS = 8
MAX_TOP_LOGPROBS = 20  # as in the OpenAI API

FOLLOWING = ("depth", "adaptive_depth", "width", "drafts_per_layer")  # settings whose default follows from others


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        message = f"{name} is {shorten(value)}, but must be {expected}"
        raise UsageError(message, field=name, value=value, expected=expected)


def _refuse(name: str, value: object, reason: str) -> NoReturn:
    """reason: why another field does not allow the value, and what to do."""
    raise UsageError(f"{name} is {shorten(value)}, but {reason}", field=name, value=value)


def _check(setting: Setting[object], value: object) -> None:
    _require(setting.fits(value), setting.field, value, setting.expected)


def _fuzzy_fields(fuzzy: FuzzyConfig) -> dict[str, object]:
    return {
        FUZZY_THRESHOLD.field: fuzzy.threshold,
        DIVERGENCE.field: fuzzy.divergence,
        FALLBACK.field: fuzzy.fallback,
        FUZZY_LAW.field: fuzzy.law,
    }


def check_value(name: str, value: object, hint: object) -> None:
    """The value has this type. Raises UsageError."""
    _require(_fits(value, hint), name, value, _expected(hint))


def check_types(settings: object, *, open_: tuple[str, ...] = ()) -> None:
    """Every field of a dataclass has the type that is written beside it. open_: fields that may also be None until they
    are settled. Raises UsageError."""
    kind: type = type(settings)
    for name, hint in _types(kind):
        value = getattr(settings, name)
        if value is not None or name not in open_:
            check_value(name, value, hint)


@cache
def _types(kind: type) -> tuple[tuple[str, object], ...]:
    return tuple((name, hint) for name, hint in get_type_hints(kind).items() if not name.startswith("_"))


def _fits(value: object, hint: object) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(item, parts[0]) for pair in value.items() for item in pair)
    if hint in (int, float):  # True is an int to Python, and to nobody else
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    assert isinstance(hint, type)
    return isinstance(value, hint)


def _expected(hint: object) -> str:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_expected, parts))
    if kind is Literal:
        return f"one of {', '.join(parts)}"
    if kind is tuple:
        return {str: "a list of strings", int: "a list of integers"}.get(parts[0], "a list of objects with strings")
    words = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
    assert isinstance(hint, type)
    return words.get(hint, f"a {hint.__name__}")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What one request asks for.

    Attributes:
        temperature: divides log-probabilities. 0 is the limit: the most probable pairs are taken, without noise (rules
            `coupled` and `search` only).
        top_k: keep the k most probable pairs of the pool (or tokens of a row, see warp_scope); 0 keeps all.
        top_p: keep the smallest set of most probable pairs whose mass reaches top_p; 1 keeps all.
        min_p: drop pairs less probable than min_p times the most probable; 0 keeps all.
        max_new_tokens: generated tokens at most, the end token included.
        stop: strings that end a text; the text is cut before the string. One string, or a list of them, may be given.
        length_penalty: score = logprob / num_tokens ** length_penalty.
        early_stopping: end as soon as num_beams hypotheses are finished.
        n_best: hypotheses reported, best first.
        token_logprobs: report the raw log-probability of every token of every reported hypothesis.
        top_logprobs: with them, the N likeliest tokens at every place; 0 to 20.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool = False
    n_best: int = 1
    token_logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str | list):
            object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        check_types(self)
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number, 0 or more",
        )
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (keep all) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        _require(all(self.stop), "stop", self.stop, "a list of non-empty strings")
        _require(-10 <= self.length_penalty <= 10, "length_penalty", self.length_penalty, "between -10 and 10")
        _require(self.n_best >= 1, "n_best", self.n_best, "1 or more")
        most = MAX_TOP_LOGPROBS
        _require(0 <= self.top_logprobs <= most, "top_logprobs", self.top_logprobs, f"between 0 and {most}")
        if self.top_logprobs and not self.token_logprobs:
            _refuse("top_logprobs", self.top_logprobs, "token_logprobs is not asked for: ask for both")


def check_request(sampling: SamplingConfig, rule: RuleName, num_beams: int) -> None:
    """What a request asks for goes together with the rule and the number of beams. Raises UsageError."""
    if sampling.temperature == 0 and not RULES[rule].cold:
        value = sampling.temperature
        message = f"temperature is 0, which {rule} does not take: use coupled, or search"
        raise UsageError(message, field="temperature", value=value)
    if sampling.n_best > num_beams:
        _refuse("n_best", sampling.n_best, f"num_beams is {num_beams}: lower it, or raise that")


@dataclass(frozen=True, slots=True)
class FuzzyConfig:
    """Settings of rule fuzzy.

    Attributes:
        threshold: T; a layer is taken as drafted where the divergence of the two laws is at most T. 0: only where they
            are equal.
        divergence: of target p and draft q: kl (KL(q || p)), kl_reversed, js, js_authors or tv.
        fallback: above T, draw from the target (as published), or `strict`: test the drafts as rule rejection does.
        law: which laws are compared: raw, without temperature and cuts, or warped.
    """

    threshold: float
    divergence: DivergenceName = DIVERGENCE.default
    fallback: FallbackName = FALLBACK.default
    law: FuzzyLawName = FUZZY_LAW.default

    def __post_init__(self) -> None:
        for setting, value in (
            (FUZZY_THRESHOLD, self.threshold),
            (DIVERGENCE, self.divergence),
            (FALLBACK, self.fallback),
            (FUZZY_LAW, self.law),
        ):
            _check(setting, value)


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """How an engine decodes; one per engine. The defaults are those of the command.

    Attributes:
        rule: verification rule: coupled, rejection, with-replacement, search or fuzzy.
        num_beams: W, live beams at most.
        drafts_per_layer: K, drafted nodes per layer. Default: 8, or 2W if that is more.
        depth: D, drafted layers; 0 is plain beam sampling (or beam search) without a draft. Default: 8 with
            adaptive_depth, else 4.
        adaptive_depth: D and K are upper bounds, and every iteration takes what measured fastest below them (the
            command's `--depth auto`). Default: where no depth is given and the text cannot depend on the forest: rules
            coupled and search at fixed width, without memory_saving.
        width: width policy of a layer, fixed (always W) or threshold. Default: threshold for rejection and
            with-replacement where drafter beam drafts, else fixed.
        width_threshold: t, wanted chance that a layer yields its width (threshold only).
        min_width: W_min, least width a layer may pass with (threshold only).
        warp_scope: `pool` warps the joint law over (beam, token); `beam` warps each beam's row.
        memory_saving: keep only the best beam between iterations.
        drafter: who proposes the nodes, one of variants.DRAFTERS; or two joined by +, the second of them one that reads
            text.
        ngram: longest suffix that drafter ngram looks up, in tokens.
        index: file of dsbd index, for drafter retrieval.
        branching: children per node of drafter rsd-c; 0 for as many as fit.
        tree: how drafter dynamic-tree chooses: greedy, threshold (both sampled) or top-k (deterministic).
        tree_threshold: least value of a node with tree threshold; None is 1 / (D * K).
        second_drafts: nodes per layer of the second of two drafters; None is K / 4.
        fusion_top_k: what the second drafter looked up must be among this many of the draft model's best; 0: any may
            stand.
        fuzzy_threshold, divergence, fallback, fuzzy_law: of rule fuzzy, see FuzzyConfig; the threshold must be given.
    """

    rule: RuleName = "coupled"
    num_beams: int = 4
    # None is not given: what it then is follows from the others, in __post_init__
    drafts_per_layer: int = None  # type: ignore[assignment]
    depth: int = None  # type: ignore[assignment]
    width: WidthName = None  # type: ignore[assignment]
    width_threshold: float = WIDTH_THRESHOLD.default
    min_width: int = MIN_WIDTH.default
    warp_scope: WarpScope = "pool"
    memory_saving: bool = False
    adaptive_depth: bool = None  # type: ignore[assignment]
    drafter: str = "beam"
    ngram: int = NGRAM.default
    index: str | None = None
    branching: int = BRANCHING.default
    tree: TreeName = TREE.default
    tree_threshold: float | None = None
    second_drafts: int | None = None
    fusion_top_k: int = FUSION_TOP_K.default
    fuzzy_threshold: float | None = None
    divergence: DivergenceName | None = None
    fallback: FallbackName | None = None
    fuzzy_law: FuzzyLawName | None = None
    _asks: str | None = field(default=None, init=False, repr=False, compare=False)  # what was given that needs a draft

    def __post_init__(self) -> None:
        check_types(self, open_=FOLLOWING)
        self._settle()
        self._check_variants()
        _require(self.num_beams >= 1, "num_beams", self.num_beams, "1 or more")
        _require(self.depth >= 0, "depth", self.depth, "0 (no draft) or more")
        _require(self.drafts_per_layer >= 1, "drafts_per_layer", self.drafts_per_layer, "1 or more")
        _require(
            1 <= self.min_width <= self.num_beams,
            "min_width",
            self.min_width,
            f"between 1 and {self.num_beams} (num_beams)",
        )
        if self.adaptive_depth and not self.depth:
            _refuse("depth", self.depth, "adaptive_depth needs 1 or more to choose below")
        if self.depth and self.drafts_per_layer < self.required_width:
            reason = f"a layer needs {self.required_width} drafted nodes to pass: raise it, or use width threshold"
            _refuse("drafts_per_layer", self.drafts_per_layer, reason)

    def _settle(self) -> None:
        """Defaults that follow from other settings."""
        given = {name: getattr(self, name) for name in FOLLOWING}
        width, adaptive, depth = given["width"], given["adaptive_depth"], given["depth"]
        if width is None:
            first = DRAFTERS.get(self.drafter_names[0])
            pool = depth != 0 and first is not None and first.pool_law  # the only law that tells a width
            width = RULES[self.rule].width if pool else "fixed"
        if adaptive is None:
            same_text = RULES[self.rule].exactness == "same-text"
            adaptive = depth is None and same_text and not WIDTHS[width].dynamic and not self.memory_saving
        settled = {"width": width, "adaptive_depth": adaptive}
        settled["depth"] = (MAX_AUTO_DEPTH if adaptive else DEFAULT_DEPTH) if depth is None else depth
        drafts = given["drafts_per_layer"]
        settled["drafts_per_layer"] = max(DEFAULT_DRAFTS, 2 * self.num_beams) if drafts is None else drafts
        asking = [name for name, value in given.items() if value and value != "fixed"]
        settled["_asks"] = asking[0] if asking else None
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def _check_variants(self) -> None:
        """Rule, width and drafter fit each other, and every setting is one that it may be."""
        check_drafter_name(self.drafter)
        rule, width, drafters = RULES[self.rule], WIDTHS[self.width], [DRAFTERS[name] for name in self.drafter_names]
        acting = {setting.field for one in self.variants for setting in one.settings}
        for variant in (*RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION):
            for setting in variant.settings:
                self._check_setting(variant, setting, acts=setting.field in acting)
        if len(drafters) == 2:
            share, most = self.second_drafts, self.drafts_per_layer - 1
            _require(most >= 1, "drafts_per_layer", self.drafts_per_layer, "2 or more for two drafters")
            _require(share is None or 1 <= share <= most, SECOND_DRAFTS.field, share, f"between 1 and {most} (K - 1)")
        if self.depth == 0 and self.drafter != MethodConfig.__dataclass_fields__["drafter"].default:
            _refuse("drafter", self.drafter, "depth 0 drafts nothing: raise the depth, or drop the drafter")
        if self.depth == 0 and rule.needs_draft:
            _refuse("depth", self.depth, f"rule {rule.name} compares the target with a draft: raise it")
        for limit in rule.limits:
            value = getattr(self, limit.field)
            if value not in limit.values:
                _refuse(limit.field, value, limit.reason)
        if self.depth and width.needs_pool_law and not drafters[0].pool_law:
            reason = (
                f"it estimates acceptance from the pool law that drafter beam records, and {self.drafter} has none: "
                "use width fixed"
            )
            _refuse("width", self.width, reason)

    def _check_setting(self, variant: Variant, setting: Setting[object], *, acts: bool) -> None:
        """It has a value that it may have, and none where it would do nothing."""
        value = getattr(self, setting.field)
        if value is not None and not acts and self.__dataclass_fields__[setting.field].default is None:
            kind = "rule" if isinstance(variant, Rule) else "drafter"
            _refuse(setting.field, value, f"the {kind} is {getattr(self, kind)}: only {kind} {variant.name} has one")
        if value is None and acts and setting.required:
            message = f"{setting.field} is missing, but {variant.name} needs it: {setting.text}"
            raise UsageError(message, field=setting.field)
        if value is not None:
            _check(setting, value)

    def fit_draft(self, draft: str | None) -> MethodConfig:
        """This method, for a pair with this draft model or with none. Without one it is plain decoding, unless it was
        told to draft. Raises UsageError where method and models contradict each other."""
        if (draft is not None) == self.needs_draft:
            return self
        if draft is not None:
            reason = "depth 0 drafts nothing" if self.depth == 0 else f"drafter {self.drafter} uses no draft model"
            raise UsageError(f"draft is {shorten(draft)}, but {reason}: give draft None")
        needs = RULES[self.rule].needs_draft
        if needs or self.drafter != self.__dataclass_fields__["drafter"].default:
            asks = f"rule {self.rule} compares with" if needs else f"drafter {self.drafter} runs"
            raise UsageError(f"draft is None, but {asks} a draft model: give one")
        if self._asks is not None:
            asks = f"{self._asks} is {getattr(self, self._asks)}"
            raise UsageError(f"draft is None, but {asks}, which needs a draft model: give one, or drop it")
        return replace(self, depth=0, adaptive_depth=False, width="fixed")

    @property
    def fuzzy(self) -> FuzzyConfig | None:
        """Settings of rule fuzzy; None with any other rule."""
        if FUZZY_THRESHOLD not in RULES[self.rule].settings or self.fuzzy_threshold is None:
            return None
        return FuzzyConfig(
            threshold=self.fuzzy_threshold,
            divergence=self.divergence or DIVERGENCE.default,
            fallback=self.fallback or FALLBACK.default,
            law=self.fuzzy_law or FUZZY_LAW.default,
        )

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Rule, width, drafters and what fuses two of them."""
        return active(self.rule, self.width, self.drafter)

    @property
    def drafters(self) -> tuple[Variant, ...]:
        """The drafters and what fuses two of them; none where nothing is drafted."""
        names = self.drafter_names if self.depth else ()
        return (*[DRAFTERS[name] for name in names], *([FUSION] if len(names) == 2 else []))

    @property
    def settings(self) -> dict[str, object]:
        """Values of all variants' settings by field, also where they follow from others; None for one that does not
        act."""
        found = {one.field: None for variant in (*self.drafters, *self.variants) for one in variant.settings}
        settled = {
            **{name: getattr(self, name) for name in found},
            TREE_THRESHOLD.field: self.value_threshold,
            SECOND_DRAFTS.field: self.second_share,
            **({} if self.fuzzy is None else _fuzzy_fields(self.fuzzy)),
        }
        acting = [one for variant in self.variants for one in variant.settings]
        acting = [one for one in acting if one.only is None or getattr(self, one.only[0]) == one.only[1]]
        return {**found, **{one.field: settled[one.field] for one in acting}}

    @property
    def samples(self) -> bool:
        """The rule draws at random."""
        return RULES[self.rule].samples

    @property
    def takes_cold(self) -> bool:
        """The rule takes temperature 0."""
        return RULES[self.rule].cold

    @property
    def dynamic(self) -> bool:
        """A layer may pass with fewer than W live beams."""
        return WIDTHS[self.width].dynamic

    @property
    def bridges(self) -> bool:
        """The draft model has a tokenizer of its own."""
        return any(DRAFTERS[name].bridges for name in self.drafter_names)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafter, or the two that are fused."""
        return tuple(self.drafter.split("+"))

    @property
    def needs_draft(self) -> bool:
        """A draft model takes part."""
        return self.depth > 0 and any(DRAFTERS[name].runs_model for name in self.drafter_names)

    @property
    def judges_lookups(self) -> bool:
        """The second of two drafters looks up what the draft model then judges."""
        return FUSION in self.variants

    @property
    def value_threshold(self) -> float:
        """Least value of a node with tree threshold."""
        return self.tree_threshold or 1.0 / (max(1, self.depth) * self.drafts_per_layer)

    @property
    def second_share(self) -> int:
        """Nodes per layer of the second of two drafters."""
        return self.second_drafts or max(1, self.drafts_per_layer // 4)

    @property
    def required_width(self) -> int:
        """Live beams a layer needs to pass: W, or W_min where the width is dynamic."""
        return self.min_width if self.dynamic else self.num_beams

    @property
    def exactness(self) -> Exactness:
        """What the output shares with plain decoding at the same num_beams and seed."""
        exactness = RULES[self.rule].exactness
        narrower = (self.depth and self.dynamic) or self.memory_saving
        return "dynamic-width" if narrower and exactness != "lossy" else exactness


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Where a checkpoint is and how to load it.

    Attributes:
        source: alias, folder or hub id, as the user wrote it; `builtin:target` and `builtin:draft` are the shipped
            pair.
        role: `target` or `draft`; named in errors. `load` knows it.
        dtype: auto, float32, bfloat16 or float16.
        device: torch device string, or `auto`.
        device_map: accelerate's device map (`auto`, ...), exclusive with device.
        trust_remote_code: run code from the checkpoint's repository.
        allow_pickle: load .bin weights where there are no safetensors.
        numerics: of a target: `invariant` computes every node the same way whatever else is in a forward, so that a
            text cannot depend on the draft or the batch; `fast` saves that work.
    """

    source: str
    role: Literal["target", "draft"] = "target"
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    numerics: Numerics = "invariant"

    def __post_init__(self) -> None:
        _require(self.numerics in NUMERICS, "numerics", self.numerics, f"one of {', '.join(NUMERICS)}")
        check_types(self)
        _require(self.dtype in DTYPES, f"{self.role} dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.device_map is not None and self.device != "auto":
            raise UsageError("device and device_map cannot be used together: give one of them")

    def of_draft(self, source: str, device: str | None = None) -> ModelSpec:
        """A draft that is loaded as this target is. device: one of its own."""
        same = self.device if self.device_map is None else "auto"
        return replace(self, source=source, role="draft", device=device or same, device_map=None)
