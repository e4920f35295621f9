"""Recurrent mixers of our own decoder: their weights, and what they compute between two products.

Letters: R rows, n nodes, o outputs, C channels of the convolution, J its taps; G, H, N, P as in
models/recurrent/states.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.models.decoder.config import MixerConfig
from dsbd_cli.models.recurrent.linear_state import LinearState
from dsbd_cli.models.recurrent.memory import Convolution
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import Linear, Ops
from dsbd_cli.ops.reference import Norm


@dataclass(slots=True)
class Mixer:
    """The recurrent mixer of one layer.

    Attributes:
        into: product of the input. Its parts, side by side: for `delta` queries, keys, values, gate, betas and steps;
            for `convolution` input gate, output gate and x; for `mamba2` gate, x, B, C and steps.
        out: product of the output.
        taps: [C, J] float32. taps_bias: [C] float32, or None.
        decay: [H] float32, negative: log-decay of a step of size 1. step_bias, skip: [H] float32. None without them.
        norm: of the output, [H * P]; None without one.
        scales: [o] factors of the parts of `into`; None without them.
    """

    config: MixerConfig
    into: Linear
    out: Linear
    taps: Tensor
    taps_bias: Tensor | None = None
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Norm | None = None
    scales: Tensor | None = None

    def to(self, device: torch.device) -> None:
        """Move everything but the products to a device, in place."""
        self.taps = self.taps.to(device)
        for name in ("taps_bias", "decay", "step_bias", "skip", "norm", "scales"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.to(device))

    def declare(self, cache: RecurrentCache, layer: int, dtype: torch.dtype) -> None:
        """Add the memory of this layer to a cache. dtype: of the model."""
        config, device = self.config, self.taps.device
        convolution = Convolution(cache, device, config.taps)
        convolution.declare(config.convolved, dtype)
        cache.memories[layer, Convolution] = convolution
        if config.heads:
            state = LinearState(cache, device)
            corrects = config.kind == "delta"
            state.declare(config.groups, config.heads, config.key_dim, config.value_dim, corrects=corrects)
            cache.memories[layer, LinearState] = state

    def compute(self, x: Tensor, cache: RecurrentCache, layer: int, ops: Ops) -> Tensor:
        """Mix the input x [R, n, hidden] with what the cache holds of a layer. Return the output [R, n, hidden]."""
        config, mixed, scales = self.config, self.into.compute(x), self.scales
        if scales is not None:
            unscaled = mixed
            mixed = recording.compute(lambda: unscaled * scales)
        between = {"delta": self._delta, "convolution": self._convolution, "mamba2": self._mamba2}[config.kind]
        shape = (*x.shape[:2], config.width)
        y = recording.postpone(shape, x.dtype, lambda: between(mixed, cache, layer, ops))
        if config.heads:
            first = 0 if config.kind == "mamba2" else config.convolved
            gate, groups = mixed[..., first : first + config.width], config.norm_groups
            y = ops.gated_norm(self.norm, y, gate, groups, config.gate == "norm")
        return self.out.compute(y)

    def _delta(self, mixed: Tensor, cache: RecurrentCache, layer: int, ops: Ops) -> Tensor:
        config = self.config
        parts = mixed.split((config.convolved, config.width, config.heads, config.heads), -1)
        x = self._convolved(parts[0], cache, layer)
        q, k, g, beta = ops.delta_inputs(
            x, parts[2].float(), parts[3].float(), self.decay, self.step_bias, config.groups, config.key_dim,
            config.beta,
        )  # fmt: skip
        v = x[..., -config.width :].unflatten(-1, (config.heads, config.value_dim))
        return _state(cache, layer).correct(q, k, v, g, beta).flatten(2).to(mixed.dtype)

    def _convolution(self, mixed: Tensor, cache: RecurrentCache, layer: int, ops: Ops) -> Tensor:
        inner, outer, x = mixed.chunk(3, -1)
        return outer * _memory(cache, layer).run(inner * x, self.taps, self.taps_bias).to(mixed.dtype)

    def _mamba2(self, mixed: Tensor, cache: RecurrentCache, layer: int, ops: Ops) -> Tensor:
        config, keys = self.config, self.config.groups * self.config.key_dim
        _, convolved, steps = mixed.split((config.width, config.convolved, config.heads), -1)
        sizes, g = ops.step_sizes(steps.float(), self.decay, self.step_bias, config.limits)
        parts = self._convolved(convolved, cache, layer).split((config.width, keys, keys), -1)
        shapes = (config.heads, config.value_dim), *((config.groups, config.key_dim),) * 2
        x, b, c = (part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
        return _state(cache, layer).attend(c, b, x, g, sizes, self.skip).flatten(2).to(mixed.dtype)

    def _convolved(self, x: Tensor, cache: RecurrentCache, layer: int) -> Tensor:
        """Convolve x [R, n, C], and apply silu. Return [R, n, C] float32, rounded to the dtype of x."""
        return _memory(cache, layer).run(x, self.taps, self.taps_bias, "silu").to(x.dtype).float()


def _memory(cache: RecurrentCache, layer: int) -> Convolution:
    memory = cache.memories[layer, Convolution]
    assert isinstance(memory, Convolution)
    return memory


def _state(cache: RecurrentCache, layer: int) -> LinearState:
    memory = cache.memories[layer, LinearState]
    assert isinstance(memory, LinearState)
    return memory
