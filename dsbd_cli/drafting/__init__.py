"""Drafters: how a forest is proposed."""

from __future__ import annotations

from dsbd_cli.drafting.base import DraftContext, Drafter, Endings
from dsbd_cli.drafting.beam import BeamDrafter, NoDrafter

__all__ = ["BeamDrafter", "DraftContext", "Drafter", "Endings", "NoDrafter"]
