"""The table of methods that can be compared: ours, the baselines as settings of our engine, and those of others.

To add a method, add an entry to METHODS; to sweep another field of MethodConfig, add it to AXES and name it in the
`axes` of the methods that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dsbd_cli.config.method import DEFAULT_DEPTH, MAX_AUTO_DEPTH, MethodConfig
from dsbd_cli.config.variant import Value
from dsbd_cli.config.variants import DRAFTERS
from dsbd_cli.lab.peers.config import PeerConfig

PickName = Literal["score", "vote", "mbr", "exec"]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A field of MethodConfig that a sweep may set: its letter in labels and the type of its values."""

    letter: str
    kind: Callable[[str], Value]
    expected: str

    def label(self, value: Value) -> str:
        """Return the label of a value, as in `W=4`. A drafter's name is its own label."""
        return value if isinstance(value, str) else f"{self.letter}={value:g}"


def bench_drafters() -> tuple[str, ...]:
    """Return the drafters that a loaded pair can be run with. A bridge is not among them: it needs a draft with a
    tokenizer of its own."""
    return tuple(name for name, drafter in DRAFTERS.items() if not drafter.bridges)


def _drafter(text: str) -> str:
    """Return the name of a drafter, or of two joined by +, that the loaded pair can be run with. Raises ValueError for
    other texts."""
    if not set(text.split("+")) <= set(bench_drafters()):
        raise ValueError(text)
    return text


AXES: dict[str, _Axis] = {
    "num_beams": _Axis("W", int, "an integer"),
    "drafts_per_layer": _Axis("K", int, "an integer"),
    "depth": _Axis("D", int, "an integer"),
    "width_threshold": _Axis("t", float, "a number"),
    "min_width": _Axis("Wmin", int, "an integer"),
    "drafter": _Axis("", _drafter, f"one of {', '.join(bench_drafters())}, or two joined by +"),
    "fuzzy_threshold": _Axis("T", float, "a number"),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode.

    Attributes:
        fixed: fields of MethodConfig that define the method.
        axes: names in AXES that change it.
        peer: settings of another engine's method; None for a method of our engine.
        pick: how one of num_beams candidates is chosen, as in `dsbd pick --by`; None: the best hypothesis.
        independent: the candidates are num_beams samples of one beam each, not beams of one row.
    """

    fixed: Mapping[str, object] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    peer: PeerConfig | None = None
    pick: PickName | None = None
    independent: bool = False

    @property
    def drafts(self) -> bool:
        """Whether the method needs a draft model."""
        return self.peer.needs_draft if self.peer else self.fixed.get("depth") != 0

    def config(self, point: Mapping[str, object]) -> MethodConfig | PeerConfig:
        """Return the settings at one point of a sweep. Raises UsageError where the fields do not go together."""
        if self.peer is not None:
            return replace(self.peer, **point)  # type: ignore[arg-type]
        return MethodConfig.of({**FOREST, **self.fixed, **point})


FOREST = {"depth": DEFAULT_DEPTH, "width": "fixed"}  # defaults, which the fields of a method replace
# without a draft
SAMPLING = {"rule": "coupled", "depth": 0}
SEARCH = {"rule": "search", "depth": 0}
BEAMS = ("num_beams",)
DRAFTED = ("num_beams", "drafts_per_layer", "depth")
ANY_DRAFTER = (*DRAFTED, "drafter")
CHOSEN = ("num_beams", "drafts_per_layer", "drafter")
AUTO = {"adaptive_depth": True, "depth": MAX_AUTO_DEPTH}
THRESHOLD = (*DRAFTED, "width_threshold", "min_width")

METHODS: dict[str, Method] = {
    "greedy": Method({"rule": "search", "num_beams": 1, "depth": 0}),
    "multinomial": Method({"rule": "coupled", "num_beams": 1, "depth": 0}),
    # speculative sampling of one sequence
    "speculative": Method({"rule": "rejection", "num_beams": 1, "drafts_per_layer": 1}, ("depth",)),
    "beam-search": Method(SEARCH, BEAMS),
    "beam-sampling": Method(SAMPLING, BEAMS),
    "dsbd-coupled": Method({"rule": "coupled"}, ANY_DRAFTER),
    "dsbd-search": Method({"rule": "search"}, ANY_DRAFTER),
    "dsbd-coupled-auto": Method({"rule": "coupled", **AUTO}, CHOSEN),
    "dsbd-search-auto": Method({"rule": "search", **AUTO}, CHOSEN),
    "dsbd-rejection": Method({"rule": "rejection"}, ANY_DRAFTER),
    "dsbd-with-replacement": Method({"rule": "with-replacement"}, DRAFTED),
    "dsbd-coupled-threshold": Method({"rule": "coupled", "width": "threshold"}, THRESHOLD),
    "dsbd-rejection-threshold": Method({"rule": "rejection", "width": "threshold"}, THRESHOLD),
    "dsbd-with-replacement-threshold": Method({"rule": "with-replacement", "width": "threshold"}, THRESHOLD),
    "dsbd-memory-saving": Method({"rule": "rejection", "width": "threshold", "memory_saving": True}, THRESHOLD),
    "dsbd-fuzzy": Method({"rule": "fuzzy", "fuzzy_threshold": 0.2}, (*DRAFTED, "fuzzy_threshold")),
    # of W independent samples the likeliest, the commonest answer, the least risk by chrF, the first SQL that runs
    "best-of-n": Method(SAMPLING, BEAMS, pick="score", independent=True),
    "self-consistency": Method(SAMPLING, BEAMS, pick="vote", independent=True),
    "mbr": Method(SAMPLING, BEAMS, pick="mbr", independent=True),
    "samples-exec": Method(SAMPLING, BEAMS, pick="exec", independent=True),
    # the same of W beams, which count by their probability
    "beams-vote": Method(SAMPLING, BEAMS, pick="vote"),
    "beams-mbr": Method(SEARCH, BEAMS, pick="mbr"),
    "beams-exec": Method(SEARCH, BEAMS, pick="exec"),
    # transformers' own
    "hf-greedy": Method(peer=PeerConfig("greedy")),
    "hf-beam-search": Method(axes=BEAMS, peer=PeerConfig("beam-search")),
    "hf-beam-sampling": Method(axes=BEAMS, peer=PeerConfig("beam-sampling")),
    "hf-assisted": Method(peer=PeerConfig("assisted")),
}

DEFAULT_METHODS = (
    "greedy",
    "beam-search",
    "beam-sampling",
    "speculative",
    "dsbd-search",
    "dsbd-coupled",
    "dsbd-coupled-auto",
    "dsbd-rejection-threshold",
    "hf-beam-search",
    "hf-beam-sampling",
    "hf-assisted",
)

# methods of a run with --fuzzy-threshold and without --methods: plain sampling, the lossless rule with a draft, fuzzy
FUZZY_METHODS = ("beam-sampling", "dsbd-rejection", "dsbd-fuzzy")
