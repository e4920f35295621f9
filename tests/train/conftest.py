"""The checkpoint that is made once per session."""

from __future__ import annotations

from tests.helpers.checkpoints import checkpoint

__all__ = ["checkpoint"]
