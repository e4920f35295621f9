"""Our own decoder over a packed forest.

On a CPU a forward of few nodes runs as a program, which is built when its shape first occurs. On a GPU the engine
captures it.

Letters: R rows, n nodes, S active slots, T suffix slots, H hidden width, E head dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.attention.forest import Scoring, over_all_slots
from dsbd_cli.models.attention.metadata import LayerMask, Reading
from dsbd_cli.models.attention.views import LayerViews, MaskView, View, prompt_kernel, view_of
from dsbd_cli.models.checkpoints.generation import CheckpointSettings, checkpoint_rules
from dsbd_cli.models.decoder.config import Rotary
from dsbd_cli.models.decoder.forward import Decoder, LayerInputs
from dsbd_cli.models.forest_model import BaseForestModel, HiddenStateTap, ModelSize, address
from dsbd_cli.models.kv_cache import KVCache, PlaneLayout
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import Linear, Ops
from dsbd_cli.ops.recording import Arena, Program
from dsbd_cli.ops.select import EXPERTS, LAYERS, MIXERS

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
        for home, angles in zip(self.inputs.angles, inputs.angles, strict=True):
            home[0].copy_(angles[0])
            home[1].copy_(angles[1])
        if self.inputs.query_growth is not None and inputs.query_growth is not None:
            self.inputs.query_growth.copy_(inputs.query_growth)
        self.inputs.attention.load(inputs.attention)


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
        config, weights = decoder.config, decoder.weights
        device = weights.table.device
        self._states = RecurrentCache(device) if config.mixer is not None else None
        super().__init__(name, device, self._states or KVCache(), stock)
        self.decoder, self._settings = decoder, settings
        self._watched: frozenset[int] = frozenset()  # numbers of layers after which hidden states are taken
        plane = PlaneLayout(config.kv_heads, config.head_dim, weights.dtype, device)
        self._scoring = [Scoring(config.scale, config.softcap, layer.sinks) for layer in weights.layers]
        attending = [number for number in range(config.layers) if config.attends(number)]
        self._kinds = {number: config.kinds.index(config.windows[number]) for number in attending}
        query, key = (
            torch.empty(1, 1, heads, config.head_dim, dtype=weights.dtype, device=device).transpose(1, 2)
            for heads in (config.heads, config.kv_heads)
        )
        self._form = query, key, key  # a query, a key and a value in the form of all layers'
        self._cache.learn_all(dict.fromkeys(attending, (plane, plane)))
        if self._states is not None:
            self._declare(self._states)
            self.copies_prefixes = False  # a state holds the whole text before it, not a token
        self._pads_forwards = decoder.ops.program is None  # kernels of the CPU compute each row by itself
        self._dtype, self._width = weights.dtype, sum(weights.lm_head.parts)
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._angle_positions = 0  # in a table; tables of long texts lie behind the others
        self._long_rows = torch.zeros(0, dtype=torch.bool, device=device)  # rows with the frequencies of long texts
        self._growth = torch.empty(0)  # factors of queries, see `query_growth` of the config, by position // length
        self._built_programs = 0
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
        return self.decoder.config.positions

    @property
    def switch_position(self) -> int | None:
        """Most tokens of a text that does not have the rotary frequencies of long ones, see SwitchingModel."""
        return self.decoder.config.switch_position

    def begin_row(self, row: int, tokens: int) -> None:
        """Choose the rotary frequencies of a cache row for a prompt of so many tokens, see SwitchingModel."""
        if self.switch_position is not None:
            self._long_rows[row] = tokens > self.switch_position

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        super().reserve(rows, slots, window)
        if (more := rows - len(self._long_rows)) > 0:
            with torch.inference_mode(False):  # it is written to in inference mode and outside of it
                self._long_rows = nn.functional.pad(self._long_rows, (0, more))

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._long_rows[: len(rows)] = self._long_rows[rows]

    @property
    def embeddings(self) -> Any:
        return self.decoder.weights.table

    @property
    def hidden_size(self) -> int:
        return self.decoder.config.hidden

    @property
    def layer_count(self) -> int:
        return self.decoder.config.layers

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
        return self._metadata is not None

    @property
    def slower_forwards(self) -> int:
        """Number of forwards so far that built a program. Their time does not predict that of the next one of their
        shape."""
        return self._built_programs

    @property
    def size(self) -> ModelSize:
        weights, config = self.decoder.weights, self.decoder.config
        hidden, table, mixture, mixer = config.hidden, weights.table, config.mixture, config.mixer
        products: list[tuple[Linear, int, float]] = [(weights.lm_head, hidden, 1.0)]  # inputs, share that is read
        share = 0.0 if mixture is None else mixture.router.chosen / mixture.experts
        for number, layer in enumerate(weights.layers):
            inputs = {"out": config.heads * config.head_dim, "down": config.inner_of(number)}
            inputs["mixer_out"] = 0 if mixer is None else mixer.width
            if mixture is not None:
                latent = mixture.latent or hidden
                inputs |= {"mixture.gate_up": latent, "mixture.down": mixture.inner, "mixture.latent_out": latent}
            for name, owner, field in layer.products:
                part = share if name in ("mixture.gate_up", "mixture.down") else 1.0
                products.append((getattr(owner, field), inputs.get(name, hidden), part))
        held = [(weight, part) for linear, _, part in products for weight in linear.weights]
        shared = any(address(weight) == address(table) for weight, _ in held)
        count = sum(sum(linear.parts) * wide * part for linear, wide, part in products)
        read = sum(weight.nbytes * part for weight, part in held)
        total = sum(weight.nbytes for weight, _ in held) + (0 if shared else table.nbytes)
        return ModelSize(total, int(read), int(2 * count))

    def shallow(self, each: int) -> DecoderForestModel:
        """Return a model of the same weights with the first `each` layers of every kind, and a cache of its own."""
        config, weights, kinds = self.decoder.config, self.decoder.weights, Counter[Hashable]()
        chosen = []
        for number, kind in enumerate(config.layer_kinds):
            kinds[kind] += 1
            if kinds[kind] <= each:
                chosen.append(number)
        layers = replace(weights, layers=[weights.layers[number] for number in chosen])
        decoder = Decoder(config.with_layers(chosen), layers, self.decoder.ops)
        forest = DecoderForestModel(decoder, self.name, self._settings)
        if self._states is not None:
            forest.keep_recurrent_states_in(self._states.precision)
        forest.attention = self.attention
        return forest

    def tap(self, tap: HiddenStateTap | None) -> None:
        super().tap(tap)  # a new tap moves the cache's memory, which ends all programs
        self._watched = frozenset() if tap is None else frozenset(tap.layers)

    def leave_kernels(self) -> bool:
        plain = self.ops.without(*LAYERS, *EXPERTS, *MIXERS[:-1], reason="a kernel failed")
        if self.attention is None and plain is self.ops:
            return False
        self.attention, self.decoder.ops = None, plain
        self._distrust_kernels()
        return True

    def release(self) -> None:
        super().release()
        self._long_rows = self._long_rows[:0]
        self.forget_programs()

    def forget_programs(self) -> None:
        """Drop all programs, because the cache's memory or the weights have changed."""
        self._programs, self._arena, self._programs_of = {}, Arena(), self.generation

    def keep_recurrent_states_in(self, precision: torch.dtype) -> None:
        if self._states is not None:
            self._states.keep_in(precision)

    def _declare(self, states: RecurrentCache) -> None:
        """Add the memory of all recurrent mixers to a cache."""
        for number, layer in enumerate(self.decoder.weights.layers):
            if layer.mixer is not None:
                layer.mixer.declare(states, number, self.decoder.weights.dtype)

    @torch.no_grad()
    def plain(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of separate sequences [B, T] by an ordinary causal forward, without our cache."""
        decoder, config = self.decoder, self.decoder.config
        count, length = tokens.shape
        places = torch.arange(length, device=self._device)
        shape = (count, length, config.kv_heads, config.head_dim)
        planes = [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2)]
        ahead = places[:, None] - places
        views = []
        for window in config.kinds:
            seen = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
            mask = LayerMask(seen.expand(count, -1, -1), self._dtype, None, whole=True)
            views.append(MaskView(mask, over_all_slots))
        long = length > (self.switch_position or length)
        angles = self._angles_at(places.expand(count, -1), torch.full((count,), long, device=self._device))
        slots = torch.arange(count * length, device=self._device)
        attention = LayerViews(views, self._kinds, self._scoring, lambda _: (planes[0], planes[1]))
        inputs = LayerInputs(slots, angles, attention, self._growth_at(places.expand(count, -1)))
        running: Any = contextlib.nullcontext()
        if self._states is not None:
            inputs.states, running = self._states_of_texts(places.expand(count, -1), ahead)
        with running:
            residual, branch, _ = decoder.layers(decoder.embed(tokens.to(self._device)), inputs)
        last, _ = decoder.finish(residual, branch)
        return self._fitted(decoder.logits(decoder.lm_head(last), last))

    def _states_of_texts(self, places: Tensor, ahead: Tensor) -> tuple[RecurrentCache, Any]:
        """Return a cache for whole texts, which are read as chains by tensor code, and what encloses that forward.
        places: [B, T]. ahead: [T, T], how far the first place is behind the second."""
        states, count = RecurrentCache(self._device, kernels=False), len(places)
        states.keep_in(torch.float64)
        self._declare(states)
        states.reserve(count, places.shape[1] + 1, 1)
        seen = (ahead >= 0).expand(count, -1, -1)
        return states, states.running(ForestInput(places, places, places, seen, places, chain=True))

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        decoder = self.decoder
        read = batch.chain and not logits and decoder.config.kinds == (None,)
        if read and prompt_kernel(self.ops, *self._form, self._scoring[0]) is not None:
            batch = _without_padding(batch, self._cache.slots - 1)
        with self._cache.running(batch):
            hidden = decoder.embed(self._ids_in_table(batch))
            write = self._cache.under_way
            assert write is not None
            angles, growth = self._angles_at(batch.positions, self._long(batch)), self._growth_at(batch.positions)
            inputs = LayerInputs(write.flat, angles, self._attention(batch, "prefix"), growth, self._states)
            results = self._results(batch, hidden, inputs, logits)
        if self._tap is not None:
            self._store_hidden_states([results.hidden_states[number] for number in self._tap.layers] or [results.last])
        return None if results.product is None else decoder.logits(results.product, results.last, batch.own_ids)

    def _results(self, batch: ForestInput, hidden: Tensor, inputs: LayerInputs, logits: bool) -> _Results:
        """Run the layers, the final norm and, with `logits`, the LM head, as a program where there is one."""
        few, views = hidden.shape[:2].numel() <= MOST_NODES, inputs.attention.key()
        if self.ops.program is None or not few or views is None:
            return self._computed(hidden, inputs, logits)
        if self._programs_of != self.generation:
            self.forget_programs()
        ends = logits and self.decoder.weights.lm_head.compiled  # a program would keep a copy of what torch computes
        key = (torch.get_num_threads(), hidden.shape, ends, views, inputs.query_growth is not None)
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
            product = self.decoder.lm_head(made.results.last)
        return replace(made.results, product=product)

    def _computed(self, hidden: Tensor, inputs: LayerInputs, logits: bool) -> _Results:
        residual, branch, hidden_states = self.decoder.layers(hidden, inputs, self._watched)
        recording.begin(self.decoder.config.layers)
        last, summed = self.decoder.finish(residual, branch)
        return _Results(last, summed, hidden_states, self.decoder.lm_head(last) if logits else None)

    def _built(self, hidden: Tensor, inputs: LayerInputs, logits: bool) -> _LayerProgram:
        """Build the program for the shape of this forward, with copies of its inputs."""
        # the program runs in inference mode and outside of it, so its memory must not be that of inference tensors
        with torch.inference_mode(False), torch.no_grad():
            assert self.ops.program is not None
            places = LayerInputs(
                inputs.slots.clone(),
                [(cos.clone(), sin.clone()) for cos, sin in inputs.angles],
                inputs.attention.copy(),
                None if inputs.query_growth is None else inputs.query_growth.clone(),
                inputs.states,
            )
            first = hidden.clone()
            program, results = self._arena.record(self.ops.program, lambda: self._computed(first, places, logits))
            if results.product is not None:
                program.renew(results.product)
        return _LayerProgram(program, first, places, results)

    def _long(self, batch: ForestInput) -> Tensor:
        """Return which rows of a batch [R] have the rotary frequencies of long texts."""
        return self._long_rows[: len(batch.slots)] if batch.rows is None else self._long_rows[batch.rows]

    def _angles_at(self, positions: Tensor, long: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cosines and sines [R, n, E] of the rotary angles at positions [R, n], by kind of rotary positions.
        long: [R] bool, rows with the frequencies of long texts."""
        config, most = self.decoder.config, max(POSITION_STEP, self._cache.slots, positions.shape[1])
        if self._angle_positions < most:
            self._angle_positions = -(-most // POSITION_STEP) * POSITION_STEP
            self._angles = [self._tables(rotary) for rotary in config.rotaries]
        if config.switch_position is not None:
            positions = positions + long.unsqueeze(1) * self._angle_positions
        return [
            (nn.functional.embedding(positions, cos), nn.functional.embedding(positions, sin))
            for cos, sin in self._angles
        ]

    def _tables(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [n, E] of one kind of rotary positions; where texts may be long, those of long texts
        behind the others."""
        kinds = [rotary]
        if self.decoder.config.switch_position is not None:
            kinds.append(replace(rotary, frequencies=rotary.long or rotary.frequencies))
        tables = [kind.table(self._angle_positions, self.decoder.config.head_dim) for kind in kinds]
        cos, sin = (torch.cat(parts).to(self._dtype).to(self._device) for parts in zip(*tables, strict=True))
        return cos, sin

    def _growth_at(self, positions: Tensor) -> Tensor | None:
        """Return the factors [R, n] of queries at positions [R, n]; None where all positions have the factor 1."""
        growth, most = self.decoder.config.query_growth, max(self._cache.slots, positions.shape[1])
        if growth is None or most <= growth[1]:
            return None
        beta, length = growth
        if len(self._growth) * length < most:
            factors = [1 + beta * math.log(1 + step) for step in range(-(-most // length))]
            self._growth = torch.tensor(factors, dtype=self._dtype, device=self._device)
        return self._growth[positions // length]

    def _attention(self, batch: ForestInput, reading: Reading) -> LayerViews:
        """Return what the nodes see, one view for each kind of window. reading: of a prompt."""
        metadata, views = self._attention_metadata(batch, reading), list[View]()
        for window in self.decoder.config.kinds:
            mask = metadata.add(_seen(batch, window), self._dtype, whole=window is None)
            views.append(view_of(metadata, mask, *self._form, self._scoring[0], batch.rows))
        return LayerViews(views, self._kinds, self._scoring, self._cache.planes)


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
