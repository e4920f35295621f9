"""Observers: hooks of an engine for code that measures or inspects it."""

from __future__ import annotations

from collections.abc import Mapping

from dsbd_cli.engine.cache.caches import CacheObserver
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.verify.base import LayerDraws, LayerView


class Observer(CacheObserver):
    """Hooks that an engine calls. They change nothing, and every method does nothing unless it is overridden.

    attached: `drafted` and `verified` are to be called. Then tensor code drafts and verifies, not a kernel or a CUDA
    graph, and the draft's distribution Q is always recorded.
    """

    attached: bool = False

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        """Receive a forest that was drafted for all rows. Tensors are on the device."""

    def verified(self, view: LayerView, draws: LayerDraws) -> None:
        """Receive a layer that was verified for all rows. Layers below the one where a row stopped are verified too,
        but not used."""

    def iterated(self, jobs: Mapping[int, RequestState], nodes: int, seconds: Mapping[str, float]) -> None:
        """Receive the end of an iteration of these requests. jobs: by row, as they were before it. nodes: N of each
        row. seconds: by phase."""
