"""Our own decoder over a packed forest.

On a CPU a forward of few nodes runs as a program, which is built when its shape first occurs. On a GPU the engine
captures it.

Letters: R rows, n nodes, S active slots, T suffix slots, H hidden width, E head dim, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.attention_metadata import AttentionMetadata, PromptKernel, additive_mask, filled_queries
from dsbd_cli.models.checkpoints.generation import CheckpointSettings, checkpoint_rules
from dsbd_cli.models.decoder.forward import Decoder, LayerInputs
from dsbd_cli.models.decoder.views import MaskView, PathView, PrefixView, View
from dsbd_cli.models.forest_attention import LEAST_DIM, Blocks
from dsbd_cli.models.forest_model import BaseForestModel, ModelSize, StateTap, address
from dsbd_cli.models.kv_cache import KVCache, PlaneSpec
from dsbd_cli.ops import run
from dsbd_cli.ops.cpu.prompt_attention import STEP
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.run import Arena, Program
from dsbd_cli.ops.select import LAYERS

MOST_NODES = 256  # of a program: with more nodes Python takes a small part of the time
MOST_PROGRAMS = 64
PROMPT_STEP = 8  # widths of prompts' forwards are multiples of it, so that programs repeat
POSITION_STEP = 1024  # rotary tables grow in steps of this size


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a forward. last: [R, n, H] after the final norm, and summed: before it. hidden_states: [R, n, H] after
    the layers that are watched. product: of the LM head, [R, n, V]; None where logits were not asked for."""

    last: Tensor
    summed: Tensor
    hidden_states: dict[int, Tensor]
    product: Tensor | None


@dataclass(slots=True)
class _LayerProgram:
    """The program that runs all forwards of one shape, with the memory of its inputs and results."""

    program: Program
    hidden: Tensor
    inputs: LayerInputs
    results: _Results

    def load(self, hidden: Tensor, inputs: LayerInputs) -> None:
        """Copy the inputs of a forward into those of the program."""
        self.hidden.copy_(hidden)
        self.inputs.slots.copy_(inputs.slots)
        for home, given in zip(self.inputs.angles, inputs.angles, strict=True):
            home[0].copy_(given[0])
            home[1].copy_(given[1])
        for view, given_view in zip(self.inputs.views, inputs.views, strict=True):
            view.load(given_view)


class DecoderForestModel(BaseForestModel):
    """A decoder over a packed forest."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        settings: CheckpointSettings,
        stock: Callable[[], Any] | None = None,
    ) -> None:
        """stock: loads the model as transformers runs it."""
        spec, weights = decoder.spec, decoder.weights
        device = weights.table.device
        super().__init__(name, device, KVCache(), stock)
        self.decoder, self._settings = decoder, settings
        self._watched: frozenset[int] = frozenset()  # numbers of layers after which hidden states are taken
        plane = PlaneSpec(spec.kv_heads, spec.head_dim, weights.dtype, device)
        self._cache.learn_all([(plane, plane)] * spec.layers)
        self._pads_forwards = decoder.ops.program is None  # kernels of the CPU compute each row by itself
        self._dtype, self._width = weights.dtype, sum(weights.head.parts)
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._built_programs = 0
        self._last_was_split = False  # whether the last forward split its keys into prompt slots and suffix
        self._programs: dict[Hashable, _LayerProgram] = {}
        self._programs_of = self.generation
        self._arena = Arena()

    @property
    def settings(self) -> CheckpointSettings:
        return self._settings

    @property
    def weights_dtype(self) -> torch.dtype:
        return self.decoder.weights.dtype

    @property
    def max_positions(self) -> int | None:
        return self.decoder.spec.positions

    @property
    def embeddings(self) -> Tensor:
        return self.decoder.weights.table

    @property
    def hidden_size(self) -> int:
        return self.decoder.spec.hidden

    @property
    def layer_count(self) -> int:
        return self.decoder.spec.layers

    @property
    def token_rules(self) -> TokenRules:
        return checkpoint_rules(self._settings)

    @property
    def architecture(self) -> str:
        return self._settings.architecture

    @property
    def ops(self) -> Ops:
        return self.decoder.ops

    @property
    def own_ids_below(self) -> int:
        return 0 if self.decoder.own_rows is None else len(self.decoder.own_rows.table)

    @property
    def capturable(self) -> bool:
        return self._device.type == "cuda"

    @property
    def by_parts(self) -> bool:
        return self._last_was_split

    @property
    def slower_forwards(self) -> int:
        """Number of forwards so far that built a program. Their time does not predict that of the next one of their
        shape."""
        return self._built_programs

    @property
    def size(self) -> ModelSize:
        weights, spec = self.decoder.weights, self.decoder.spec
        linears = [linear for layer in weights.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        held = [one for linear in (*linears, weights.head) for one in linear.weights]
        table = weights.table
        shared = any(address(one) == table.data_ptr() for one in held)
        read = sum(one.nbytes for one in held)
        inputs = (spec.hidden, spec.heads * spec.head_dim, spec.hidden, spec.inner) * spec.layers
        count = sum(sum(linear.parts) * wide for linear, wide in zip(linears, inputs, strict=True))
        count += self._width * spec.hidden
        return ModelSize(read + (0 if shared else table.nbytes), read, 2 * count)

    def shallow(self, each: int) -> DecoderForestModel:
        """Return a model of the same weights with the first `each` layers of every kind, and a cache of its own."""
        spec, weights, kinds = self.decoder.spec, self.decoder.weights, Counter[Hashable]()
        chosen = []
        for number, kind in enumerate(zip(spec.windows, spec.rotary, strict=True)):
            kinds[kind] += 1
            if kinds[kind] <= each:
                chosen.append(number)
        few = replace(
            spec,
            layers=len(chosen),
            windows=tuple(spec.windows[number] for number in chosen),
            rotary=tuple(spec.rotary[number] for number in chosen),
        )
        layers = replace(weights, layers=[weights.layers[number] for number in chosen])
        forest = DecoderForestModel(Decoder(few, layers, self.decoder.ops), self.name, self._settings)
        forest.attention = self.attention
        return forest

    def tap(self, tap: StateTap | None) -> None:
        super().tap(tap)  # a new tap moves the cache's memory, which ends all programs
        self._watched = frozenset() if tap is None else frozenset(tap.layers)

    def leave_kernels(self) -> bool:
        plain = self.ops.without(*LAYERS, reason="a kernel failed")
        if self.attention is None and plain is self.ops:
            return False
        self.attention, self.decoder.ops = None, plain
        self._distrust_kernels()
        return True

    def release(self) -> None:
        super().release()
        self.forget_programs()

    def forget_programs(self) -> None:
        """Drop all programs, because the cache's memory or the weights have changed."""
        self._programs, self._arena, self._programs_of = {}, Arena(), self.generation

    @torch.no_grad()
    def plain(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of separate sequences [B, T] by an ordinary causal forward, without our cache."""
        decoder, spec = self.decoder, self.decoder.spec
        count, length = tokens.shape
        places = torch.arange(length, device=self._device)
        shape = (count, length, spec.kv_heads, spec.head_dim)
        planes = [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2)]
        ahead = places[:, None] - places
        views = []
        for window in spec.kinds:
            seen = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
            views.append(MaskView(additive_mask(seen.expand(count, -1, -1), self._dtype)))
        angles = self._angles_at(places.expand(count, -1))
        slots = torch.arange(count * length, device=self._device)
        inputs = LayerInputs(slots, angles, views, lambda _: (planes[0], planes[1]))
        residual, branch, _ = decoder.layers(decoder.embed(tokens.to(self._device)), inputs)
        last, _ = decoder.finish(residual, branch)
        return self._fitted(decoder.logits(decoder.head(last), last))

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        decoder = self.decoder
        if batch.chain and not logits and self._prompt_kernel is not None and self.decoder.spec.kinds == (None,):
            batch = _without_padding(batch, self._cache.slots - 1)
        self._cache.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        hidden = decoder.embed(self._ids_in_table(batch))
        write = self._cache.under_way
        assert write is not None
        inputs = LayerInputs(write.flat, self._angles_at(batch.positions), self._views(batch), self._cache.planes)
        results = self._results(batch, hidden, inputs, logits)
        if self._tap is not None:
            self._leave_states([results.hidden_states[number] for number in self._tap.layers] or [results.last])
        return None if results.product is None else decoder.logits(results.product, results.last, batch.own_ids)

    def _results(self, batch: ForestInput, hidden: Tensor, inputs: LayerInputs, logits: bool) -> _Results:
        """Run the layers, the final norm and, with `logits`, the LM head, as a program where there is one."""
        few, keys = hidden.shape[:2].numel() <= MOST_NODES, [view.key() for view in inputs.views]
        if self.ops.program is None or not few or None in keys:
            return self._computed(hidden, inputs, logits)
        if self._programs_of != self.generation:
            self.forget_programs()
        ends = logits and self.decoder.weights.head.compiled  # a program would keep a copy of what torch computes
        key = (torch.get_num_threads(), hidden.shape, ends, *keys)
        made = self._programs.pop(key, None)
        if made is None:
            while len(self._programs) >= MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            made = self._built(hidden, inputs, ends)
            self._built_programs += 1
        self._programs[key] = made  # the last one now
        made.load(hidden, inputs)
        product = made.program.run()
        if logits and product is None:
            product = self.decoder.head(made.results.last)
        return replace(made.results, product=product)

    def _computed(self, hidden: Tensor, inputs: LayerInputs, logits: bool) -> _Results:
        residual, branch, hidden_states = self.decoder.layers(hidden, inputs, self._watched)
        run.begin(self.decoder.spec.layers)
        last, summed = self.decoder.finish(residual, branch)
        return _Results(last, summed, hidden_states, self.decoder.head(last) if logits else None)

    def _built(self, hidden: Tensor, inputs: LayerInputs, logits: bool) -> _LayerProgram:
        """Build the program for the shape of this forward, with copies of its inputs."""
        # the program runs in inference mode and outside of it, so its memory must not be that of inference tensors
        with torch.inference_mode(False), torch.no_grad():
            assert self.ops.program is not None
            places = LayerInputs(
                inputs.slots.clone(),
                [(cos.clone(), sin.clone()) for cos, sin in inputs.angles],
                [view.copy() for view in inputs.views],
                inputs.planes,
            )
            first = hidden.clone()
            program, results = self._arena.record(self.ops.program, lambda: self._computed(first, places, logits))
            if results.product is not None:
                program.renew(results.product)
        return _LayerProgram(program, first, places, results)

    def _angles_at(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cosines and sines [R, n, E] of the rotary angles at positions [R, n], by kind of rotary positions."""
        most = max(POSITION_STEP, self._cache.slots, positions.shape[1])
        known = len(self._angles[0][0]) if self._angles else 0
        if known < most:
            size = -(-most // POSITION_STEP) * POSITION_STEP
            dim = self.decoder.spec.head_dim
            self._angles = [
                tuple(one.to(self._dtype).to(self._device) for one in rotary.table(size, dim))  # type: ignore[misc]
                for rotary in self.decoder.spec.rotaries
            ]
        return [
            (nn.functional.embedding(positions, cos), nn.functional.embedding(positions, sin))
            for cos, sin in self._angles
        ]

    def _views(self, batch: ForestInput) -> list[View]:
        """Return what the nodes see, one view for each kind of window."""
        metadata, spec = self._attention_metadata(batch), self.decoder.spec
        self._last_was_split = metadata is not None
        by_paths = (
            metadata is not None
            and metadata.kernel is None
            and not metadata.fast
            and self.ops.path_attention is not None
        )
        seen = [_seen(batch, window) for window in spec.kinds]
        # where all nodes see all prompt slots no mask is added to scores, and `seen` is registered in its place
        prefix = None
        if metadata is None and batch.chain and self._prompt_kernel is not None:
            assert batch.mask[..., 0].all(), "each node sees its row from slot 0 on"
            prefix = PrefixView(batch.mask.sum(-1), self._prompt_kernel, batch.rows)
        plain = [(by_paths or prefix is not None) and window is None for window in spec.kinds]
        masks = [one if bare else additive_mask(one, self._dtype) for one, bare in zip(seen, plain, strict=True)]
        if metadata is None:
            blocks = Blocks.of(batch)
            return [
                prefix if bare and prefix is not None else MaskView(mask, batch.rows, blocks)
                for mask, bare in zip(masks, plain, strict=True)
            ]
        for mask, one, window in zip(masks, seen, spec.kinds, strict=True):
            metadata.add(mask, one, whole=window is None)
        if not by_paths:
            return [MaskView(mask, batch.rows, metadata) for mask in masks]
        unsplit = spec.softcap is not None or spec.head_dim < LEAST_DIM
        return [self._path_view(metadata.all_suffix() if unsplit else metadata, mask, batch) for mask in masks]

    def _path_view(self, metadata: AttentionMetadata, mask: Tensor, batch: ForestInput) -> PathView:
        spec, most = self.decoder.spec, max(metadata.prompt_slots)
        queries = filled_queries(spec.heads, spec.kv_heads, batch.tokens.shape[1], spec.head_dim)
        head = metadata.head(mask, queries) if most else None
        assert self.ops.path_attention is not None
        paths, kernel = metadata.paths(mask), self._prompt_kernel
        if most and head is None and kernel is not None:
            return PathView((), paths, None, self.ops.path_attention, PrefixView(metadata.counts, kernel))
        head = None if head is None else head[..., :most]
        return PathView(metadata.prompt_slots if most else (), paths, head, self.ops.path_attention)

    @property
    def _prompt_kernel(self) -> PromptKernel | None:
        """The kernel that attends to prompts; None where torch does."""
        spec = self.decoder.spec
        return self.ops.prompt_attention if spec.head_dim % STEP == 0 and spec.softcap is None else None


def _without_padding(batch: ForestInput, trash: int) -> ForestInput:
    """Return a chain without most of the nodes behind the longest row, which only fill up its width. Kernels compute
    each node by itself, so they need no such width. trash: the slot that padding is written to."""
    real = (batch.slots != trash).sum(1).max().item()
    width = min(-(-int(real) // PROMPT_STEP) * PROMPT_STEP, batch.slots.shape[1])
    tokens, positions, slots, mask = (
        field[:, :width] for field in (batch.tokens, batch.positions, batch.slots, batch.mask)
    )
    return replace(batch, tokens=tokens, positions=positions, slots=slots, mask=mask)


def _seen(batch: ForestInput, window: int | None) -> Tensor:
    """Return which slots the nodes see in layers with this window, [R, n, S] bool."""
    if window is None:
        return batch.mask
    return batch.mask & (batch.positions[:, :, None] - batch.slot_positions[:, None, :] < window)
