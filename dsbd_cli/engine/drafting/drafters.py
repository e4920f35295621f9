"""Construction of the drafter that a method names. `variants.DRAFTERS` says where the code of each is. Two names joined
by + become one drafter with merged drafts."""

from __future__ import annotations

from dsbd_cli.config.variants import DRAFTERS, FUSION_TOP_K
from dsbd_cli.engine.drafting.base import Drafter, DrafterInputs
from dsbd_cli.engine.drafting.beam import BeamDrafter, NoDrafter
from dsbd_cli.engine.drafting.merged import FusionDrafter
from dsbd_cli.engine.drafting.paths import PathDrafter
from dsbd_cli.errors import UsageError


def make_drafter(inputs: DrafterInputs) -> Drafter:
    """Make the drafter that a method names. Raises UsageError where its draft, its index or its code cannot be used."""
    method = inputs.method
    if method.depth == 0:
        return NoDrafter()
    first, *more = [_made(name, inputs) for name in method.drafter_names]
    if not more:
        return first
    second = more[0]
    if not isinstance(first, BeamDrafter | PathDrafter) or not isinstance(second, PathDrafter):
        raise UsageError(f"drafter {method.drafter} cannot be used: two are fused only where the second looks paths up")
    share, top_k = method.second_share, method.value(FUSION_TOP_K)
    fused = FusionDrafter(first, second, share, top_k, turns=method.looks_up_first)
    fused.sources = method.drafter_names
    return fused


def _made(name: str, inputs: DrafterInputs) -> Drafter:
    make = DRAFTERS[name].load()
    made = make(inputs) if callable(make) else None
    if not isinstance(made, Drafter):
        raise UsageError(f"drafter {name} cannot be used: {DRAFTERS[name].make} makes no Drafter")
    return made
