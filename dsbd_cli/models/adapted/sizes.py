"""How large a loaded model is, and how much of it a forward reads."""

from __future__ import annotations

from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.models.forest import Forest, ModelSize

__all__ = ["ModelSize", "size_of"]


def size_of(model: ForestModel) -> ModelSize | None:
    """Return the sizes of a loaded model; None of any other."""
    return model.size if isinstance(model, Forest) else None
