"""Settings: small frozen dataclasses, validated once, where a default is written once.

`SamplingConfig` and the seed belong to one request; `MethodConfig` to a whole engine, because it fixes tensor shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from dsbd_cli.errors import UsageError, shorten
from dsbd_cli.token_rules import TokenRules, asked_rules
from dsbd_cli.variants import (
    DRAFTERS,
    FUSION,
    GRAMMAR,
    MIN_WIDTH,
    RULES,
    SECOND_DRAFTS,
    TREE_THRESHOLD,
    WIDTHS,
    Exactness,
    Rule,
    Setting,
    Value,
    Variant,
    Width,
    active,
    check_drafter_name,
    find_extensions,
    parse,
    parse_drafter,
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

T = TypeVar("T")
Test = Callable[[object], bool]
_KINDS: dict[type[Variant], str] = {Rule: "rule", Width: "width"}
WarpScope = Literal["pool", "beam"]
OnTooLong = Literal["error", "truncate-left"]
Numerics = Literal["invariant", "fast"]
Quantize = Literal["int8"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

ON_TOO_LONG, QUANTIZE, NUMERICS, DTYPES = map(get_args, (OnTooLong, Quantize, Numerics, Dtype))

BUILTIN_TARGET = "builtin:target"
BUILTIN_DRAFT = "builtin:draft"  # of the built-in target alone: another one has none, unless one is named
DEFAULT_BATCH_SIZE = 8
DEFAULT_DEPTH = 4  # where every iteration drafts as deep
MAX_AUTO_DEPTH = 8  # where the depth is adaptive
MAX_CERTAIN_DEPTH = 16  # where the drafter knows which layers pass
DEFAULT_DRAFTS = 8
MAX_TOP_LOGPROBS = 20  # as in the OpenAI API
SPARE_DRAFTS = 32  # of a layer, beyond the number of beams, at most
MOST_DRAFTED = 512  # nodes of all layers, where nobody says how many

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


def check_value(name: str, value: object, hint: object) -> None:
    """The value has this type. Raises UsageError."""
    if not _test(hint)(value):
        _require(False, name, value, _expected(hint))


def check_types(settings: object, *, open_: tuple[str, ...] = ()) -> None:
    """Every field of a dataclass has the type that is written beside it. open_: fields that may also be None until they
    are settled. Raises UsageError."""
    kind: type = type(settings)
    for name, hint, fits in _types(kind):
        value = getattr(settings, name)
        if not fits(value) and not (value is None and name in open_):
            _require(False, name, value, _expected(hint))


@cache
def _types(kind: type) -> tuple[tuple[str, object, Test], ...]:
    hints = get_type_hints(kind).items()
    return tuple((name, hint, _test(hint)) for name, hint in hints if not name.startswith("_"))


@cache
def _test(hint: object) -> Test:
    """Whether a value has this type. Made once for each type, because every row of a file is tested."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        plain = tuple(part for part in parts if isinstance(part, type) and part not in (int, float))
        others = [_test(part) for part in parts if part not in plain]
        return lambda value: isinstance(value, plain) or any(test(value) for test in others)
    if kind is Literal:
        return lambda value: isinstance(value, str) and value in parts
    if kind is tuple and parts[-1] is not ...:
        tests = [_test(part) for part in parts]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(item) for test, item in zip(tests, value, strict=True))
        )
    if kind in (tuple, dict):
        one = _test(parts[0])
        if kind is tuple:
            return lambda value: isinstance(value, tuple) and all(one(item) for item in value)
        assert parts[0] is parts[1]
        return lambda value: isinstance(value, dict) and all(one(item) for pair in value.items() for item in pair)
    if hint in (int, float):  # True is an int to Python, and to nobody else
        numbers = int if hint is int else (int, float)
        return lambda value: isinstance(value, numbers) and not isinstance(value, bool)
    assert isinstance(hint, type)
    return lambda value: isinstance(value, hint)


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
        source_lang, target_lang: of an encoder-decoder target that knows languages, as its tokenizer names them
            (eng_Latn, en, fr_XX). source_lang of a speech model: the language spoken; target_lang en: translate it.
        prefix: text that the answer begins with, of an encoder-decoder target.
        token_rules: rules of tokens, see token_rules.asked_rules: `checkpoint`, `none`, NAME=VALUE,... Default: those
            of the checkpoint for an encoder-decoder target, none for a decoder-only one.
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
    source_lang: str | None = None
    target_lang: str | None = None
    prefix: str | None = None
    token_rules: str | None = None

    if TYPE_CHECKING:  # what may be given, where that is more than what is then held

        def __init__(
            self,
            temperature: float = ...,
            top_k: int = ...,
            top_p: float = ...,
            min_p: float = ...,
            max_new_tokens: int = ...,
            stop: str | list[str] | tuple[str, ...] = ...,
            length_penalty: float = ...,
            early_stopping: bool = ...,
            n_best: int = ...,
            token_logprobs: bool = ...,
            top_logprobs: int = ...,
            source_lang: str | None = ...,
            target_lang: str | None = ...,
            prefix: str | None = ...,
            token_rules: str | None = ...,
        ) -> None: ...

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
        for name in ("source_lang", "target_lang", "prefix"):
            _require(getattr(self, name) != "", name, "", "a non-empty string")
        asked_rules(self.token_rules, TokenRules(), default="none")


def check_request(sampling: SamplingConfig, rule: str, num_beams: int) -> None:
    """What a request asks for goes together with the rule and the number of beams. Raises UsageError."""
    if sampling.temperature == 0 and not RULES[rule].cold:
        value = sampling.temperature
        message = f"temperature is 0, which {rule} does not take: use coupled, or search"
        raise UsageError(message, field="temperature", value=value)
    if sampling.n_best > num_beams:
        _refuse("n_best", sampling.n_best, f"num_beams is {num_beams}: lower it, or raise that")


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """How an engine decodes; one per engine. The defaults are those of the command.

    Rule, width and drafter are given by name, or spelled with their settings as on the command line:
    `MethodConfig(rule="fuzzy:0.2,divergence=js", drafter="ngram:4", width="threshold:0.7,min=2")`.

    Attributes:
        rule: verification rule, one of variants.RULES.
        num_beams: W, live beams at most.
        drafts_per_layer: K, drafted nodes per layer. Default: 8, or 2W if that is more; above W = 32 it is W + 32.
        depth: D, drafted layers; 0 is plain beam sampling (or beam search) without a draft. Default: 8 with
            adaptive_depth, else 4; fewer where that would be more than 512 drafted nodes.
        adaptive_depth: D and K are upper bounds, and every iteration takes what measured fastest below them (the
            command's `--depth auto`). Default: where no depth is given and the text cannot depend on the forest: rules
            coupled and search at fixed width, without memory_saving.
        width: width policy of a layer, fixed (always W) or threshold. Default: threshold for rejection and
            with-replacement where drafter beam drafts, else fixed.
        warp_scope: `pool` warps the joint law over (beam, token); `beam` warps each beam's row.
        memory_saving: keep only the best beam between iterations.
        drafter: who proposes the nodes, one of variants.DRAFTERS; or two joined by +, the second of them one that reads
            text.
        settings: of rule, width and drafter, by their fields in variants; only what differs from the defaults need be
            given. A mapping may be given; what is spelled with a name stands here, too.
    """

    rule: str = "coupled"
    num_beams: int = 4
    # None is not given: what it then is follows from the others, in __post_init__
    drafts_per_layer: int = None  # type: ignore[assignment]
    depth: int = None  # type: ignore[assignment]
    width: str = None  # type: ignore[assignment]
    warp_scope: WarpScope = "pool"
    memory_saving: bool = False
    adaptive_depth: bool = None  # type: ignore[assignment]
    drafter: str = "beam"
    settings: tuple[tuple[str, Value], ...] = ()
    _asks: str | None = field(default=None, init=False, repr=False, compare=False)  # what was given that needs a draft

    if TYPE_CHECKING:  # what may be given, where that is more than what is then held

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
        check_types(self, open_=FOLLOWING)
        self._settle()
        self._check_variants()
        _require(self.num_beams >= 1, "num_beams", self.num_beams, "1 or more")
        _require(self.depth >= 0, "depth", self.depth, "0 (no draft) or more")
        _require(self.drafts_per_layer >= 1, "drafts_per_layer", self.drafts_per_layer, "1 or more")
        least, expected = self.value(MIN_WIDTH), f"between 1 and {self.num_beams} (num_beams)"
        _require(1 <= least <= self.num_beams, MIN_WIDTH.field, least, expected)
        if self.adaptive_depth and not self.depth:
            _refuse("depth", self.depth, "adaptive_depth needs 1 or more to choose below")
        if self.depth and self.drafts_per_layer < self.required_width:
            reason = f"a layer needs {self.required_width} drafted nodes to pass: raise it, or use width threshold"
            _refuse("drafts_per_layer", self.drafts_per_layer, reason)

    def _read_spelled(self) -> None:
        """Settings that are spelled with a name, as in `ngram:4`, become settings."""
        _require(isinstance(self.settings, Mapping | tuple), "settings", self.settings, "a table of settings")
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
        drafts = given["drafts_per_layer"]
        if drafts is None:
            drafts = max(DEFAULT_DRAFTS, self.num_beams + min(self.num_beams, SPARE_DRAFTS))
        settled["drafts_per_layer"] = drafts
        most = max(1, MOST_DRAFTED // max(1, drafts))
        usual = MAX_AUTO_DEPTH if adaptive else DEFAULT_DEPTH
        usual = MAX_CERTAIN_DEPTH if self.drafter == GRAMMAR else usual
        settled["depth"] = min(usual, most) if depth is None else depth
        asking = [name for name, value in given.items() if value and value != "fixed"]
        settled["_asks"] = asking[0] if asking else None
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def _check_variants(self) -> None:
        """Rule, width and drafter fit each other, and every setting is one that it may be."""
        check_drafter_name(self.drafter)
        rule, width, drafters = RULES[self.rule], WIDTHS[self.width], [DRAFTERS[name] for name in self.drafter_names]
        self._check_settings()
        if len(drafters) == 2:
            share, most = self.value(SECOND_DRAFTS), self.drafts_per_layer - 1
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

    def _check_settings(self) -> None:
        """Every setting has a value that it may have, and stands only where it acts."""
        acting = {setting.field: setting for one in self.variants for setting in one.settings}
        every: list[Variant] = [*RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION]
        owners = {setting.field: one for one in every for setting in one.settings}
        for name, value in self.settings:
            if name not in owners:
                _refuse(name, value, "no rule, width or drafter has such a setting")
            if name not in acting:
                kind = _KINDS.get(type(owners[name]), "drafter")
                _refuse(name, value, f"the {kind} is {getattr(self, kind)}: only {kind} {owners[name].name} has one")
            hint = float | int if acting[name].kind is float else acting[name].kind
            check_value(name, value, hint)
            _require(acting[name].fits(value), name, value, acting[name].expected)
        given = dict(self.settings)
        for one in self.variants:
            for setting in one.settings:
                if setting.required and setting.field not in given:
                    message = f"{setting.field} is missing, but {one.name} needs it: {setting.text}"
                    raise UsageError(message, field=setting.field)

    def value(self, setting: Setting[T]) -> T:
        """The value of a variant's setting, or its default."""
        for name, value in self.settings:
            if name == setting.field:
                return value  # type: ignore[return-value]
        return setting.default

    def but(self, setting: Setting[T], value: T) -> MethodConfig:
        """The same with another value of a variant's setting. Raises UsageError where it does not act."""
        settings: dict[str, object] = {**dict(self.settings), setting.field: value}
        return replace(self, settings=tuple(settings.items()))  # type: ignore[arg-type]

    @classmethod
    def of(cls, given: Mapping[str, object]) -> MethodConfig:
        """From one table of its own fields and of variants' settings."""
        own = {one.name for one in fields(cls)} - {"settings"}
        return cls(
            **{name: value for name, value in given.items() if name in own},  # type: ignore[arg-type]
            settings={name: value for name, value in given.items() if name not in own},  # type: ignore[misc]
        )

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
    def variants(self) -> tuple[Variant, ...]:
        """Rule, width, drafters and what fuses two of them."""
        return active(self.rule, self.width, self.drafter)

    @property
    def drafters(self) -> tuple[Variant, ...]:
        """The drafters and what fuses two of them; none where nothing is drafted."""
        names = self.drafter_names if self.depth else ()
        return (*[DRAFTERS[name] for name in names], *([FUSION] if len(names) == 2 else []))

    @property
    def settled(self) -> dict[str, object]:
        """Values of all variants' settings by field, also where they follow from others; None for one that does not
        act."""
        values: dict[str, object] = {one.field: None for some in self.drafters for one in some.settings}
        acting = [one for variant in self.variants for one in variant.settings]
        values |= {one.field: self.value(one) for one in acting}
        follow = {TREE_THRESHOLD.field: self.value_threshold, SECOND_DRAFTS.field: self.second_share}
        values |= {name: value for name, value in follow.items() if name in values}
        for one in acting:
            if one.only is not None and values[one.only[0]] != one.only[1]:
                values[one.field] = None
        return values

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
    def value_threshold(self) -> float:
        """Least value of a node with tree threshold."""
        return self.value(TREE_THRESHOLD) or 1.0 / (max(1, self.depth) * self.drafts_per_layer)

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
        numerics: of a target: `invariant` computes every node the same way whatever else is in a forward, so that a
            text cannot depend on the draft or the batch; `fast` saves that work.
        tensor_parallel: of a target: processes, each with a GPU where there are any, that share every layer.
        kernels: on a GPU, layers whose small operations are known run as kernels; False: as transformers has them.
        quantize: `int8`: linear layers are made int8 at load, on the CPU.
    """

    source: str
    role: Literal["target", "draft"] = "target"
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    numerics: Numerics = "invariant"
    tensor_parallel: int = 1
    kernels: bool = True
    quantize: Quantize | None = None

    def __post_init__(self) -> None:
        expected = "1 or more, and 1 of a draft"
        _require(
            self.tensor_parallel == 1 or (self.tensor_parallel > 1 and self.role == "target"),
            "tensor_parallel",
            self.tensor_parallel,
            expected,
        )
        _require(self.quantize in (None, *QUANTIZE), "quantize", self.quantize, f"one of {', '.join(QUANTIZE)}")
        _require(self.numerics in NUMERICS, "numerics", self.numerics, f"one of {', '.join(NUMERICS)}")
        check_types(self)
        _require(self.dtype in DTYPES, f"{self.role} dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.device_map is not None and self.device != "auto":
            raise UsageError("device and device_map cannot be used together: give one of them")
        if self.quantize is not None and self.device_map is not None:
            _refuse("quantize", self.quantize, f"device_map is {self.device_map!r}: int8 runs on the CPU only")
        if self.quantize is not None and self.tensor_parallel > 1:
            _refuse("quantize", self.quantize, f"tensor_parallel is {self.tensor_parallel}: drop one of them")

    def of_draft(self, source: str, device: str | None = None) -> ModelSpec:
        """A draft that is loaded as this target is. device: one of its own."""
        same = self.device if self.device_map is None else "auto"
        return replace(self, source=source, role="draft", device=device or same, device_map=None, tensor_parallel=1)
