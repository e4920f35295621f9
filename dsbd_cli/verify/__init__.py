"""Verification rules by name."""

from __future__ import annotations

from dsbd_cli.verify.base import DraftedLayer, LayerDraws, LayerView, Rule
from dsbd_cli.verify.coupled import Coupled
from dsbd_cli.verify.rejection import Rejection, WithReplacement
from dsbd_cli.verify.search import Search

__all__ = ["RULES", "DraftedLayer", "LayerDraws", "LayerView", "Rule"]

RULES: dict[str, type[Rule]] = {
    "coupled": Coupled,
    "rejection": Rejection,
    "with-replacement": WithReplacement,
    "search": Search,
}
