"""A transformers causal language model as a ForestModel: attention, recurrent layers, or both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.cache import ForestCache
from dsbd_cli.models.checkpoints.generation import positions_of
from dsbd_cli.models.recurrent.mixer_cache import MixerCache
from dsbd_cli.models.recurrent.mixers import REFUSED, bind, has_mixers
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.models.transformers_backend.attention import attention_over, replace_methods
from dsbd_cli.models.transformers_backend.base import MaskPlan, TransformersForestModel
from dsbd_cli.models.transformers_backend.positions import (
    DecoderPositions,
    bias_by_position,
    counts_positions,
    first_position,
    scale_by_position,
)

LOCAL = "gpt_neo"  # its layers have windows, but the model takes one mask: they look theirs up


class CausalForestModel(TransformersForestModel):
    """A decoder-only model: the prompt and the answer are one sequence."""

    def __init__(self, model: Any, name: str, stock: Callable[[], Any] | None = None) -> None:
        self._first_position = first_position(model)
        self._takes_one_mask = model.config.model_type == LOCAL
        self._positions: DecoderPositions | None = None
        if counts_positions(model):
            self._positions = DecoderPositions(model, positions_of(model.config.get_text_config(decoder=True)) or 1)
        super().__init__(model, name, stock)

    @property
    def max_positions(self) -> int | None:
        limit = super().max_positions
        return None if limit is None else limit - self._first_position

    def _new_cache(self, device: torch.device) -> ForestCache:
        kind = self._config.model_type
        if kind in REFUSED:
            raise UnsupportedModelError(f"{self.architecture} ({kind}) cannot hold a tree of tokens: {REFUSED[kind]}")
        scale_by_position(self._model)
        bias_by_position(self._model)
        replace_methods(self._model)
        if not has_mixers(self._model):
            return ForestCache()
        bind(self._model)
        return MixerCache(device)

    def keep_recurrent_states_in(self, precision: torch.dtype) -> None:
        """Hold recurrent states, and sum over them, in this dtype. It is called before `reserve`. In float64 the order
        of a sum, which depends on the drafts, does not reach a float32 result."""
        if isinstance(self._cache, RecurrentCache):
            self._cache.keep_in(precision)

    @cached_property
    def _without_attention(self) -> bool:
        """Whether the model has no attention: transformers then calls its cache by another name, and gives it neither
        positions nor a mask."""
        return "cache_params" in inspect.signature(type(self._model).forward).parameters

    def _masks_wanted(self) -> MaskPlan:
        if self._config.model_type == LOCAL:
            return MaskPlan(("full_attention", "sliding_attention"), self._config.window_size, None)
        return MaskPlan.of(self._config, recurrent=isinstance(self._cache, RecurrentCache))

    def _call(self, runner: Any, batch: ForestInput, embedded: Tensor | None = None) -> Any:
        """Return the output of `runner` for the nodes of a batch. embedded: [R, n, H], takes the place of the
        tokens."""
        metadata = self._attention_metadata(batch, "blocks")
        table = self._positions
        at_positions = table.at(batch.positions, batch.slot_positions, batch.tokens) if table else nullcontext()
        with self._cache.running(batch), attention_over(metadata), at_positions:
            arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
            if embedded is None:
                arguments["input_ids"] = self._ids_in_table(batch)
            else:
                arguments["inputs_embeds"] = embedded
            if self._without_attention:
                return runner(cache_params=self._cache, **arguments)
            masks = self._masks(batch, metadata)
            return runner(
                position_ids=batch.positions + self._first_position,
                attention_mask=masks["full_attention"] if isinstance(masks, dict) and self._takes_one_mask else masks,
                past_key_values=self._cache,
                **arguments,
            )
