"""A transformers causal language model as a ForestModel."""

from __future__ import annotations

from typing import Any

from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.models.adapter import TransformersForest
from dsbd_cli.engine.models.attention import seeing

__all__ = ["CausalForestModel"]


class CausalForestModel(TransformersForest):
    """A decoder-only model: the prompt and the answer are one sequence."""

    def _run(self, runner: Any, batch: ForestInput) -> Any:
        self._cache.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        sight = self._sees(batch)
        masks = self._masks(batch, sight)
        with seeing(sight):
            return runner(
                input_ids=self._inputs(batch),
                position_ids=batch.positions,
                attention_mask=masks,
                past_key_values=self._cache,
                use_cache=True,
                return_dict=True,
            )
