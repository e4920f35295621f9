"""The caches of target and draft as one: the same rows and slots in both, reserved, moved and given back together.

Letters: R rows, S slots, N nodes of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsbd_cli.engine.core.protocols import ForestModel, SourceModel
from dsbd_cli.engine.decoding.prefill import prefill

__all__ = ["Caches"]


def _bucket(size: int, step: int) -> int:
    return -(-size // step) * step


class Caches:
    """One cache row per request in the target and, where a draft model runs the forest, in the draft.

    Attributes:
        models: target and draft, or the target alone. slots: S, reserved per row; the last one is the trash slot.
    """

    def __init__(
        self, target: ForestModel, draft: ForestModel | None, *, large_steps: bool, moving: Callable[[], None]
    ) -> None:
        """large_steps: sizes are rounded up further, so that there are fewer shapes to capture.

        moving: called before the memory of a cache moves.
        """
        self.target, self.draft = target, draft
        self.models = [target] if draft is None else [target, draft]
        self.slots = 0
        self._slot_step, self._window_step = (128, 64) if large_steps else (32, 16)
        self._moving = moving
        self._reserved: tuple[object, ...] | None = None  # what `reserve` left: see _now

    def round_slots(self, slots: int) -> int:
        """A number of slots rounded up, so that shapes repeat."""
        return _bucket(slots, self._slot_step)

    def round_window(self, nodes: int) -> int:
        """A tail window rounded up, so that shapes repeat."""
        return _bucket(nodes, self._window_step)

    def reserve(self, rows: int, slots: int) -> None:
        """Memory for a new batch, slots rounded up. That of the last batch is used again where it has this size."""
        self.slots = self.round_slots(slots)
        if self._reserved != self._now(rows):
            self._moving()
            for model in self.models:
                model.release()  # else rows of one batch would multiply with slots of another
                model.reserve(rows, self.slots)
            self._reserved = self._now(rows)

    def _now(self, rows: int) -> tuple[object, ...]:
        """Rows, slots, and the generation of each cache: another engine may have used the same models since."""
        return (rows, self.slots, *(model.generation for model in self.models))

    def grow(self, rows: int, slots: int) -> bool:
        """At least `slots` slots per row for a running batch; what is stored stays. True where there are more now."""
        if slots <= self.slots:
            return False
        self._moving()
        self.slots = self.round_slots(max(slots, self.slots * 5 // 4))
        for model in self.models:
            model.reserve(rows, self.slots)
        self._reserved = None
        return True

    def release(self) -> None:
        """Give all memory back."""
        self._moving()
        self._reserved = None
        for model in self.models:
            model.release()

    def clear(self, row: int) -> None:
        """Zero a row for the next request: 0 times a NaN of an earlier one would be NaN."""
        for model in self.models:
            model.clear(row)

    def source_bytes(self, source: Tensor | None) -> int:
        """Bytes that a source takes in the models on the target's device; 0 without one."""
        if source is None:
            return 0
        here = [model for model in self.models if model.device == self.target.device]
        return sum(model.source_bytes(source) for model in here if isinstance(model, SourceModel))

    def encode(self, sources: Mapping[int, Tensor], *, draft: bool) -> None:
        """The target or the draft model reads sources, by row; nothing where there are none."""
        model = self.draft if draft else self.target
        if not sources or not isinstance(model, SourceModel):
            return
        generation = model.generation
        model.encode(list(sources), list(sources.values()))
        if model.generation != generation:
            self._moving()
            if self._reserved is not None:
                self._reserved = self._now(int(str(self._reserved[0])))

    def prefill_target(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """The target reads prompts, by row. Where its logits are invariant, a prompt is read as if it were alone."""
        self._prefill(self.target, prompts, apart=self.target.invariant)

    def prefill_draft(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """The draft model, if there is one, reads prompts, by row."""
        if self.draft is not None:
            self._prefill(self.draft, prompts, apart=False)

    def _prefill(self, model: ForestModel, prompts: Mapping[int, Sequence[int]], *, apart: bool) -> None:
        prefill(model, list(prompts), list(prompts.values()), trash=self.slots - 1, apart=apart)

    def move(self, source: Tensor, target: Tensor, trunk: Tensor, *, draft: bool) -> None:
        """Copy slots within each row, [R, T] each, in the target and, if `draft`, in the draft model. trunk: [R], slots
        that all live beams share from now on."""
        for model in self.models if draft else self.models[:1]:
            model.move(*(part.to(model.device) for part in (source, target, trunk)))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for model in self.models:
            model.select_rows(torch.tensor(rows, device=model.device))
