"""The checkpoint that is made once per session, and a cache folder of its own for every test."""

from __future__ import annotations

from tests.helpers.checkpoints import checkpoint, checks_are_made_anew

__all__ = ["checkpoint", "checks_are_made_anew"]
