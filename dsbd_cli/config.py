"""Settings: small frozen dataclasses, validated once, where a default is written once.

`SamplingConfig` and the seed belong to one request; `MethodConfig` to a whole engine, because it fixes tensor shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dsbd_cli.errors import UsageError

__all__ = ["DRAFTERS", "RULES", "WIDTHS", "MethodConfig", "ModelSpec", "SamplingConfig", "check_drafter_name"]

RuleName = Literal["coupled", "rejection", "with-replacement", "search", "fuzzy"]
WidthName = Literal["fixed", "threshold"]
WarpScope = Literal["pool", "beam"]
TreeName = Literal["greedy", "threshold", "top-k"]
DivergenceName = Literal["kl", "kl_reversed", "js", "js_authors", "tv"]
FallbackName = Literal["target", "strict"]
FuzzyLawName = Literal["raw", "warped"]
Exactness = Literal["same-text", "same-law", "dynamic-width", "lossy"]
OnTooLong = Literal["error", "truncate-left"]

RULES: tuple[str, ...] = ("coupled", "rejection", "with-replacement", "search", "fuzzy")
WIDTHS: tuple[str, ...] = ("fixed", "threshold")
MODEL_DRAFTERS: tuple[str, ...] = ("beam", "rsd-c", "rsd-s", "dynamic-tree", "bridge")
TEXT_DRAFTERS: tuple[str, ...] = ("ngram", "retrieval", "trigram")
DRAFTERS: tuple[str, ...] = (*MODEL_DRAFTERS, *TEXT_DRAFTERS)
TREES: tuple[str, ...] = ("greedy", "threshold", "top-k")
DIVERGENCES: tuple[str, ...] = ("kl", "kl_reversed", "js", "js_authors", "tv")
FALLBACKS: tuple[str, ...] = ("target", "strict")
FUZZY_LAWS: tuple[str, ...] = ("raw", "warped")
WARP_SCOPES: tuple[str, ...] = ("pool", "beam")
ON_TOO_LONG: tuple[str, ...] = ("error", "truncate-left")
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")

BUILTIN_TARGET = "builtin:target"
BUILTIN_DRAFT = "builtin:draft"
DEFAULT_BATCH_SIZE = 8
MAX_AUTO_DEPTH = 8


def _require(condition: bool, field: str, value: object, expected: str) -> None:
    if not condition:
        raise UsageError(f"{field} is {value!r}, but must be {expected}")


def check_drafter_name(drafter: str) -> None:
    """One drafter, or two of which the second reads text. Raises UsageError."""
    names = drafter.split("+")
    listed = f"one of {', '.join(DRAFTERS)}, or two of them joined by +"
    _require(all(name in DRAFTERS for name in names) and len(names) <= 2, "drafter", drafter, listed)
    if len(names) == 2 and "bridge" in names:
        raise UsageError(f"drafter is {drafter!r}, but bridge builds whole trees from text and fuses with none")
    if len(names) == 2:
        _require(names[0] != names[1], "drafter", drafter, "two drafters: the same one drafts the same nodes")
        if set(names) <= set(MODEL_DRAFTERS):
            raise UsageError(
                f"drafter is {drafter!r}, but the second of two must be one of {', '.join(TEXT_DRAFTERS)}: two that "
                "run the same draft model are no faster than one"
            )
        swapped = f"{names[1]}+{names[0]}: the one that runs the draft model stands first"
        _require(names[1] in TEXT_DRAFTERS, "drafter", drafter, swapped)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What one request asks for.

    Attributes:
        temperature: divides log-probabilities; above 0. Temperature 0 is beam search, which is the rule `search`.
        top_k: keep the k most probable pairs of the pool (or tokens of a row, see warp_scope); 0 keeps all.
        top_p: keep the smallest set of most probable pairs whose mass reaches top_p; 1 keeps all.
        min_p: drop pairs less probable than min_p times the most probable; 0 keeps all.
        max_new_tokens: generated tokens at most, the end token included.
        stop: strings that end a text; the text is cut before the string.
        length_penalty: score = logprob / num_tokens ** length_penalty.
        early_stopping: end as soon as num_beams hypotheses are finished.
        n_best: hypotheses reported, best first.
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

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature > 0,
            "temperature",
            self.temperature,
            "above 0 (temperature 0 is beam search: use the rule search)",
        )
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (keep all) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        _require(all(self.stop), "stop", self.stop, "a list of non-empty strings")
        _require(-10 <= self.length_penalty <= 10, "length_penalty", self.length_penalty, "between -10 and 10")
        _require(self.n_best >= 1, "n_best", self.n_best, "1 or more")


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
    divergence: DivergenceName = "kl"
    fallback: FallbackName = "target"
    law: FuzzyLawName = "raw"

    def __post_init__(self) -> None:
        finite = math.isfinite(self.threshold) and self.threshold >= 0
        _require(finite, "fuzzy_threshold", self.threshold, "a number, 0 or more")
        _require(self.divergence in DIVERGENCES, "divergence", self.divergence, f"one of {', '.join(DIVERGENCES)}")
        _require(self.fallback in FALLBACKS, "fallback", self.fallback, f"one of {', '.join(FALLBACKS)}")
        _require(self.law in FUZZY_LAWS, "fuzzy_law", self.law, f"one of {', '.join(FUZZY_LAWS)}")


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """How an engine decodes; one per engine.

    Attributes:
        rule: verification rule: coupled, rejection, with-replacement, search or fuzzy.
        num_beams: W, live beams at most.
        drafts_per_layer: K, drafted nodes per layer.
        depth: D, drafted layers; 0 is plain beam sampling (or beam search) without a draft.
        adaptive_depth: D and K are upper bounds, and every iteration takes what measured fastest below them.
        width: width policy of a layer, fixed (always W) or threshold.
        width_threshold: t, wanted chance that a layer yields its width (threshold only).
        min_width: W_min, least width a layer may pass with (threshold only).
        warp_scope: `pool` warps the joint law over (beam, token); `beam` warps each beam's row.
        memory_saving: keep only the best beam between iterations.
        drafter: who proposes the nodes, one of DRAFTERS; or two joined by +, the second of them one that reads text.
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
    drafts_per_layer: int = 8
    depth: int = 4
    width: WidthName = "fixed"
    width_threshold: float = 0.7
    min_width: int = 1
    warp_scope: WarpScope = "pool"
    memory_saving: bool = False
    adaptive_depth: bool = False
    drafter: str = "beam"
    ngram: int = 4
    index: str | None = None
    branching: int = 0
    tree: TreeName = "greedy"
    tree_threshold: float | None = None
    second_drafts: int | None = None
    fusion_top_k: int = 16
    fuzzy_threshold: float | None = None
    divergence: DivergenceName | None = None
    fallback: FallbackName | None = None
    fuzzy_law: FuzzyLawName | None = None

    def __post_init__(self) -> None:
        self._check_drafter()
        self._check_fuzzy()
        _require(self.rule in RULES, "rule", self.rule, f"one of {', '.join(RULES)}")
        _require(self.width in WIDTHS, "width", self.width, f"one of {', '.join(WIDTHS)}")
        _require(self.warp_scope in WARP_SCOPES, "warp_scope", self.warp_scope, f"one of {', '.join(WARP_SCOPES)}")
        _require(self.num_beams >= 1, "num_beams", self.num_beams, "1 or more")
        _require(self.depth >= 0, "depth", self.depth, "0 (no draft) or more")
        _require(self.drafts_per_layer >= 1, "drafts_per_layer", self.drafts_per_layer, "1 or more")
        _require(0 < self.width_threshold <= 1, "width_threshold", self.width_threshold, "above 0 and at most 1")
        _require(
            1 <= self.min_width <= self.num_beams,
            "min_width",
            self.min_width,
            f"between 1 and {self.num_beams} (num_beams)",
        )
        if self.rule == "search" and self.width != "fixed":
            raise UsageError(
                "rule search is deterministic beam search; width threshold would change it: use width fixed"
            )
        if self.rule == "search" and self.warp_scope != "pool":
            raise UsageError("rule search takes no warping; warp_scope beam does nothing with it")
        if self.adaptive_depth and not self.depth:
            raise UsageError("adaptive_depth needs a depth of 1 or more to choose below")
        if self.depth and self.drafts_per_layer < self.required_width:
            raise UsageError(
                f"drafts_per_layer is {self.drafts_per_layer}, but a layer needs {self.required_width} drafted nodes "
                "to pass: raise it, or use width threshold"
            )

    def _check_drafter(self) -> None:
        """One drafter or two that fit each other, the rule and the width."""
        names = self.drafter_names
        check_drafter_name(self.drafter)
        _require(self.ngram >= 1, "ngram", self.ngram, "1 or more")
        _require(self.branching >= 0, "branching", self.branching, "0 (as many as fit) or more")
        _require(self.tree in TREES, "tree", self.tree, f"one of {', '.join(TREES)}")
        _require(self.fusion_top_k >= 0, "fusion_top_k", self.fusion_top_k, "0 (keep all) or more")
        threshold, share, most = self.tree_threshold, self.second_drafts, self.drafts_per_layer - 1
        _require(threshold is None or 0 < threshold <= 1, "tree_threshold", threshold, "above 0 and at most 1")
        if len(names) == 2:
            _require(most >= 1, "drafts_per_layer", self.drafts_per_layer, "2 or more for two drafters")
            _require(share is None or 1 <= share <= most, "second_drafts", share, f"between 1 and {most} (K - 1)")
        if ("retrieval" in names) != (self.index is not None):
            raise UsageError(
                "drafter retrieval needs an index: make one with dsbd index"
                if self.index is None
                else f"index would do nothing, because drafter {self.drafter} does not read one: drop it"
            )
        if self.depth == 0 and self.drafter != "beam":
            raise UsageError(f"depth 0 drafts nothing, but drafter is {self.drafter!r}: raise depth or drop it")
        if self.rule == "with-replacement" and self.drafter != "beam":
            raise UsageError(
                f"rule with-replacement tests independent draws of a pool, which only drafter beam gives, not "
                f"{self.drafter}: use rule rejection or coupled"
            )
        if self.depth and self.width == "threshold" and names[0] != "beam":
            raise UsageError(
                f"width threshold estimates acceptance from the pool law that drafter beam records; {self.drafter} "
                "has none: use width fixed"
            )

    def _check_fuzzy(self) -> None:
        """Rule fuzzy has what it needs, and no other rule is given its options."""
        if self.rule != "fuzzy":
            for name in ("fuzzy_threshold", "divergence", "fallback", "fuzzy_law"):
                value = getattr(self, name)
                if value is not None:
                    raise UsageError(f"{name} is {value!r}, but the rule is {self.rule}: only rule fuzzy has one")
            return
        if self.fuzzy is None:
            raise UsageError(
                "fuzzy_threshold is missing, but rule fuzzy needs it: up to which divergence a layer is taken"
            )
        if self.depth == 0:
            raise UsageError("rule fuzzy compares the target with a draft, but depth 0 drafts nothing: raise depth")
        if self.drafter != "beam":
            raise UsageError(
                f"rule fuzzy compares the target with the pool law that drafter beam records; {self.drafter} has "
                "another one or none: use drafter beam"
            )
        if self.width != "fixed":
            raise UsageError("rule fuzzy takes whole layers, which no estimated width describes: use width fixed")
        if self.warp_scope != "pool":
            raise UsageError(
                "rule fuzzy takes drafts that the warped target excludes, and warp_scope beam gives them no weight: "
                "use warp_scope pool"
            )

    @property
    def fuzzy(self) -> FuzzyConfig | None:
        """Settings of rule fuzzy; None with any other rule."""
        if self.rule != "fuzzy" or self.fuzzy_threshold is None:
            return None
        return FuzzyConfig(
            threshold=self.fuzzy_threshold,
            divergence=self.divergence or "kl",
            fallback=self.fallback or "target",
            law=self.fuzzy_law or "raw",
        )

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafter, or the two that are fused."""
        return tuple(self.drafter.split("+"))

    @property
    def needs_draft(self) -> bool:
        """A draft model takes part."""
        return self.depth > 0 and any(name in MODEL_DRAFTERS for name in self.drafter_names)

    @property
    def judges_lookups(self) -> bool:
        """The second of two drafters looks up what the draft model then judges."""
        names = self.drafter_names
        return len(names) == 2 and names[0] in MODEL_DRAFTERS

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
        return self.num_beams if self.width == "fixed" else self.min_width

    @property
    def exactness(self) -> Exactness:
        """What the output shares with plain decoding at the same num_beams and seed."""
        if self.rule == "fuzzy":
            return "lossy"
        if self.depth and self.width == "threshold":
            return "dynamic-width"
        if self.memory_saving:
            return "dynamic-width"
        return "same-text" if self.rule in ("coupled", "search") else "same-law"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Where a checkpoint is and how to load it.

    Attributes:
        source: alias, folder or hub id, as the user wrote it; `builtin:target` and `builtin:draft` are the shipped
            pair.
        role: `target` or `draft`; named in errors.
        dtype: auto, float32, bfloat16 or float16.
        device: torch device string, or `auto`.
        device_map: accelerate's device map (`auto`, ...), exclusive with device.
        trust_remote_code: run code from the checkpoint's repository.
        allow_pickle: load .bin weights where there are no safetensors.
    """

    source: str
    role: Literal["target", "draft"] = "target"
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"{self.role} dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.device_map is not None and self.device != "auto":
            raise UsageError("device and device_map cannot be used together: give one of them")
