"""The cache of recurrent layers (states.py) behind the interface that transformers' mixers expect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.cache import ForestCache
from dsbd_cli.models.recurrent.linear_state import GroupedState, LinearState
from dsbd_cli.models.recurrent.memory import Convolution, LayerMemory, SelectiveState
from dsbd_cli.models.recurrent.states import RecurrentCache

Memory = TypeVar("Memory", bound=LayerMemory)

_current: ContextVar[MixerCache | None] = ContextVar("current", default=None)


class MixerCache(RecurrentCache, ForestCache):
    """A RecurrentCache that is handed to transformers' mixers. It learns their layers in the first forward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._layer: tuple[int, int] = (0, 0)
        self._calls = 0

    @contextlib.contextmanager
    def running(self, batch: ForestInput) -> Iterator[None]:
        with super().running(batch):
            token = _current.set(self)
            try:
                yield
            finally:
                _current.reset(token)

    @staticmethod
    def current() -> MixerCache | None:
        """Return the cache whose forward is under way; None outside one, where mixers run as transformers wrote
        them."""
        return _current.get()

    # answers to transformers' mixers: there is no earlier state, so that they run their code for many tokens

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Note which layer runs next. The convolution stores its inputs itself."""
        self._layer, self._calls = (layer_idx, state_idx), 0
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return recurrent_states

    # memory of layers, for the scans

    def convolution(self, device: torch.device, taps: int) -> Convolution:
        """Return the memory of the convolution in the layer under way."""
        return self._memory(Convolution, lambda: Convolution(self, device, taps))

    def linear(self, device: torch.device) -> LinearState:
        """Return the memory of the linear state in the layer under way."""
        return self._memory(LinearState, lambda: LinearState(self, device))

    def grouped(self, device: torch.device, group: int) -> GroupedState:
        """Return the memory of the grouped state in the layer under way."""
        return self._memory(GroupedState, lambda: GroupedState(self, device, group))

    def selective(self, device: torch.device) -> SelectiveState:
        """Return the memory of a scan in the layer under way; a layer may scan several times, head by head."""
        self._calls += 1
        return self._memory(SelectiveState, lambda: SelectiveState(self, device), self._calls)

    def _memory(self, kind: type[Memory], make: Callable[[], Memory], call: int = 0) -> Memory:
        """Return the memory of this kind in the layer under way, which is made where there is none."""
        key = (*self._layer, kind, call)
        if key not in self.memories:
            self.memories[key] = make()
        memory = self.memories[key]
        assert isinstance(memory, kind)
        return memory
