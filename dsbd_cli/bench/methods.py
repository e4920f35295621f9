"""The table of methods that can be compared: ours, the baselines as settings of our engine, and transformers'.

To add a method, add an entry to METHODS; to sweep another field of MethodConfig, add it to AXES and name it in the
`axes` of the methods that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dsbd_cli.config import MethodConfig
from dsbd_cli.peers.config import PeerConfig, PeerName

__all__ = ["AXES", "BASELINES", "DEFAULT_METHODS", "METHODS", "Axis", "Method"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A field of MethodConfig that a sweep may set: its letter in labels and the type of its values."""

    letter: str
    kind: Callable[[str], int | float]
    expected: str


AXES: dict[str, Axis] = {
    "num_beams": Axis("W", int, "an integer"),
    "drafts_per_layer": Axis("K", int, "an integer"),
    "depth": Axis("D", int, "an integer"),
    "width_threshold": Axis("t", float, "a number"),
    "min_width": Axis("Wmin", int, "an integer"),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode.

    Attributes:
        about: what it is, in a few words.
        fixed: fields of MethodConfig that make it what it is.
        axes: names in AXES that act on it.
        peer: transformers' method, where it is theirs.
    """

    about: str
    fixed: Mapping[str, object] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    peer: PeerName | None = None

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft model."""
        return self.peer == "assisted" if self.peer else self.fixed.get("depth") != 0

    def config(self, point: Mapping[str, object]) -> MethodConfig | PeerConfig:
        """At one point of a sweep. Raises UsageError where the fields do not go together."""
        if self.peer is not None:
            return PeerConfig(self.peer, **point)  # type: ignore[arg-type]
        return MethodConfig(**{**self.fixed, **point})  # type: ignore[arg-type]


BEAMS = ("num_beams",)
DRAFTED = ("num_beams", "drafts_per_layer", "depth")
THRESHOLD = (*DRAFTED, "width_threshold", "min_width")

METHODS: dict[str, Method] = {
    "greedy": Method("the likeliest token", {"rule": "search", "num_beams": 1, "depth": 0}),
    "multinomial": Method("plain sampling", {"rule": "coupled", "num_beams": 1, "depth": 0}),
    "speculative": Method(
        "speculative sampling of one sequence",
        {"rule": "rejection", "num_beams": 1, "drafts_per_layer": 1},
        ("depth",),
    ),
    "beam-search": Method("beam search without a draft", {"rule": "search", "depth": 0}, BEAMS),
    "beam-sampling": Method("beam sampling without a draft", {"rule": "coupled", "depth": 0}, BEAMS),
    "dsbd-coupled": Method("rule coupled, fixed width", {"rule": "coupled"}, DRAFTED),
    "dsbd-search": Method("rule search: beam search with a draft", {"rule": "search"}, DRAFTED),
    "dsbd-rejection": Method("rule rejection, fixed width", {"rule": "rejection"}, DRAFTED),
    "dsbd-with-replacement": Method("the paper's law, fixed width", {"rule": "with-replacement"}, DRAFTED),
    "dsbd-coupled-threshold": Method(
        "rule coupled, threshold width", {"rule": "coupled", "width": "threshold"}, THRESHOLD
    ),
    "dsbd-rejection-threshold": Method(
        "rule rejection, threshold width", {"rule": "rejection", "width": "threshold"}, THRESHOLD
    ),
    "dsbd-with-replacement-threshold": Method(
        "the paper's law, threshold width", {"rule": "with-replacement", "width": "threshold"}, THRESHOLD
    ),
    "dsbd-memory-saving": Method(
        "rule rejection, threshold width, one beam kept between iterations",
        {"rule": "rejection", "width": "threshold", "memory_saving": True},
        THRESHOLD,
    ),
    "hf-greedy": Method("transformers' greedy", peer="greedy"),
    "hf-beam-search": Method("transformers' beam search", axes=BEAMS, peer="beam-search"),
    "hf-beam-sampling": Method("transformers' beam sampling", axes=BEAMS, peer="beam-sampling"),
    "hf-assisted": Method("transformers' assisted sampling, one sequence at a time", peer="assisted"),
}

# What speeds are compared with: the same number of beams without a draft, and one sequence.
BASELINES = ("beam-sampling", "greedy", "beam-search")

DEFAULT_METHODS = (
    "greedy",
    "beam-search",
    "beam-sampling",
    "speculative",
    "dsbd-search",
    "dsbd-coupled",
    "dsbd-rejection-threshold",
    "hf-beam-search",
    "hf-beam-sampling",
    "hf-assisted",
)
