"""Verification rules by name."""

from __future__ import annotations

from dsbd_cli.config import MethodConfig
from dsbd_cli.engine.verify.base import DraftedLayer, LayerDraws, LayerView, Rule
from dsbd_cli.engine.verify.coupled import Coupled
from dsbd_cli.engine.verify.fuzzy import Fuzzy
from dsbd_cli.engine.verify.rejection import Rejection, WithReplacement
from dsbd_cli.engine.verify.search import Search

__all__ = ["RULES", "DraftedLayer", "LayerDraws", "LayerView", "Rule", "make_rule"]

RULES: dict[str, type[Rule]] = {
    "coupled": Coupled,
    "rejection": Rejection,
    "with-replacement": WithReplacement,
    "search": Search,
}


def make_rule(method: MethodConfig) -> Rule:
    """The rule of a method; `fuzzy` is the one that has settings of its own."""
    return Fuzzy(method.fuzzy) if method.fuzzy is not None else RULES[method.rule]()
