"""A draft head over a packed forest: one layer that reads, for each node, its token and the state of its parent.

A state here is the hidden state in a slot of the target's cache. For a node that the target has run it is made of the
target's hidden states. For a drafted node it is the head's own guess, which the target's next forward overwrites.

Letters: R rows, n nodes, S slots, H width of a state and of the head, T hidden width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.generation import CheckpointSettings
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.forward import Decoder, LayerInputs
from dsbd_cli.models.decoder.pack import find_outliers, pack_decoder, quantize_decoder
from dsbd_cli.models.decoder.weights import DecoderWeights, PlainLinear
from dsbd_cli.models.forest_model import BaseForestModel, HiddenStateTap, ModelSize, address, calibration_tokens
from dsbd_cli.ops import recording, reference
from dsbd_cli.ops.interface import Linear, Ops
from dsbd_cli.ops.reference import Norm

AFTER_NORM = "it reads the states after the final norm"


class DraftHeadDecoder(Decoder):
    """A decoder of one layer whose inputs are a token and a state, and whose outputs are logits and a state."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, parts: Eagle3Parts | MtpParts) -> None:
        super().__init__(config, weights, ops)
        self.parts = parts

    def plain_products(self) -> list[tuple[str, Any, str]]:
        products = super().plain_products()
        return [*products, ("fc", self.parts, "fc")] if isinstance(self.parts.fc, PlainLinear) else products

    def fuse(self, taken: list[Tensor]) -> Tensor:
        """Return the states [R, n, H] of nodes for which the target has computed these hidden states [R, n, T]."""
        raise NotImplementedError

    def start(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the layer's input [R, n, H or 2H] from embeddings and states [R, n, H]."""
        raise NotImplementedError

    def guess(self, summed: Tensor, last: Tensor) -> Tensor:
        """Return the head's guess at the states [R, n, H] of its own nodes. summed, last: hidden states before and
        after its final norm."""
        raise NotImplementedError


@dataclass(slots=True)
class Eagle3Parts:
    """The parts of an EAGLE-3 head other than its layer.

    Attributes:
        fc: [T * taps -> H], joins hidden states of the target.
        hidden_norm: [H], of states.
        joined_norm: [T * taps], of all hidden states together (norm_before_fc).
        tap_norms: [T], of each hidden state (fc_norm).
        norm_before_residual: the residual stream begins with the normalised state.
        norm_output: guesses are normalised.
    """

    fc: Linear
    hidden_norm: Norm
    joined_norm: Norm | None = None
    tap_norms: Sequence[Norm] = ()
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Decoder(DraftHeadDecoder):
    """The decoder of an EAGLE-3 head. Queries, keys and values are computed from token and state side by side [2H], and
    the residual stream begins with the state."""

    parts: Eagle3Parts

    def fuse(self, taken: list[Tensor]) -> Tensor:
        parts = self.parts
        if parts.tap_norms:
            taken = [reference.norm(norm, tap)[0] for norm, tap in zip(parts.tap_norms, taken, strict=True)]
        joined = torch.cat(taken, -1)
        if parts.joined_norm is not None:
            joined = reference.norm(parts.joined_norm, joined)[0]
        return parts.fc.compute(joined)

    def start(self, embedded: Tensor, states: Tensor) -> Tensor:
        return torch.cat((embedded, states), -1)

    def guess(self, summed: Tensor, last: Tensor) -> Tensor:
        return last if self.parts.norm_output else summed

    def _enter(self, norm: Norm | None, residual: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        if branch is not None:
            return super()._enter(norm, residual, branch)
        assert norm is not None, "families without a norm before the layer are refused"

        def entered() -> tuple[Tensor, Tensor]:
            embedded, states = (half.contiguous() for half in residual.chunk(2, -1))
            normed = self.ops.norm(self.parts.hidden_norm, states)[0]
            x = torch.cat((self.ops.norm(norm, embedded)[0], normed), -1)
            return x, normed if self.parts.norm_before_residual else states

        return recording.compute(entered)


@dataclass(slots=True)
class MtpParts:
    """The parts of an MTP layer other than a decoder layer. fc: [2H -> H], joins token and state. token_norm,
    state_norm: [H]."""

    fc: Linear
    token_norm: Norm
    state_norm: Norm


class MtpDecoder(DraftHeadDecoder):
    """The decoder of an MTP layer (multi-token prediction). Token and state are joined before an ordinary layer of the
    target's kind. States are those after the final norm."""

    parts: MtpParts

    def fuse(self, taken: list[Tensor]) -> Tensor:
        return taken[0]

    def start(self, embedded: Tensor, states: Tensor) -> Tensor:
        norm, parts = self.ops.norm, self.parts
        token, state = norm(parts.token_norm, embedded)[0], norm(parts.state_norm, states)[0]
        return parts.fc.compute(torch.cat((token, state), -1))

    def guess(self, summed: Tensor, last: Tensor) -> Tensor:
        return last


class BaseDraftHead(BaseForestModel):
    """The base class of draft heads, whatever runs their layer: a head and the target whose states it reads and
    guesses.

    form: a description of the head, for messages.
    """

    _target: BaseForestModel
    form: str

    @property
    def target(self) -> BaseForestModel:
        """The target whose states the head reads."""
        return self._target

    @property
    def max_positions(self) -> int | None:
        return self._target.max_positions

    @property
    def capturable(self) -> bool:
        return False

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Allocate cache memory as every model does. The target allocates as much, because the states are in its
        slots."""
        self._target.reserve(rows, slots, window)
        super().reserve(rows, slots, window)

    def stock(self) -> torch.nn.Module:
        raise ModelError(f"{self.name!r} is a draft head, which transformers cannot run: compare without it")

    def pack(self) -> None:
        """Pack the products that still have plain weights."""
        raise NotImplementedError

    def quantize(self, weight_format: str) -> int:
        """Quantize large products to `int8` or `int4`, and pack the others; return how many are quantized."""
        raise NotImplementedError

    def _read_random(self) -> None:
        """Run the random tokens by which outliers are found."""
        self.read(calibration_tokens(len(self._target.embeddings), self.max_positions))

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, m] of sequences [B, T], which the target reads first. The memory of both caches is
        freed."""
        count, length = tokens.shape
        places = torch.arange(length, device=self.device)
        batch = ForestInput(
            tokens=tokens.to(self.device),
            positions=places.expand(count, -1),
            slots=places.expand(count, -1),
            mask=(places <= places[:, None]).expand(count, -1, -1),
            slot_positions=places.expand(count, -1),
            rows=torch.arange(count, device=self.device),
            chain=True,
        )
        self.reserve(count, length + 1)
        self._target.forward(batch, logits=False)
        output = self.forward(batch)
        assert output is not None
        for model in (self._target, self):
            model.release()
        return output

    def _guess(self, batch: ForestInput, guesses: Tensor) -> None:
        """Write the guesses [R, n, H] of nodes to their slots, except for nodes that the target has run."""
        late = batch.late
        self._target.hidden_states[_rows(batch), batch.slots[:, late:]] = guesses[:, late:]

    def _parents(self, batch: ForestInput) -> Tensor:
        """Return the state [R, n, H] in the slot of each node's parent; zero where it has none."""
        # positions along a path follow one another, and no two slots of a path share one
        before = batch.mask & (batch.slot_positions[:, None] == batch.positions[..., None] - 1)
        seen, slot = before.to(torch.int8).max(-1)
        return torch.where(seen.unsqueeze(-1) > 0, self._target.hidden_states[_rows(batch), slot], 0)


class DecoderDraftHead(BaseDraftHead, DecoderForestModel):
    """A head whose layer our own decoder runs.

    layers: numbers of layers of the target after which hidden states are taken; empty: they are taken after its final
    norm.
    """

    def __init__(
        self, target: BaseForestModel, decoder: DraftHeadDecoder, layers: Sequence[int], name: str, form: str
    ) -> None:
        super().__init__(decoder, name, CheckpointSettings(form, None, {}))
        self._draft_head, self._target, self.form = decoder, target, form
        target.tap(self._tap_after(layers))

    @property
    def size(self) -> ModelSize:
        size, mine, target = super().size, self.decoder.weights, self._target
        theirs = [target.embeddings]
        if isinstance(target, DecoderForestModel):
            theirs += target.decoder.weights.lm_head.weights
        sizes = {address(weight): weight.nbytes for weight in (mine.table, *mine.lm_head.weights)}
        shared = sum(sizes[address(weight)] for weight in theirs if address(weight) in sizes)
        return replace(size, held_bytes=size.held_bytes - shared)

    def pack(self) -> None:
        pack_decoder(self.decoder, self.device)
        self.forget_programs()

    def quantize(self, weight_format: str) -> int:
        made = quantize_decoder(self.decoder, find_outliers(self.decoder, self._read_random), weight_format)
        self.forget_programs()
        return made

    def read_from(self, layers: Sequence[int]) -> None:
        """Make the target's states of its hidden states after these numbers of layers from now on."""
        self._target.tap(None)
        self._target.tap(self._tap_after(layers))

    def _tap_after(self, layers: Sequence[int]) -> HiddenStateTap:
        return HiddenStateTap(tuple(layers), self._draft_head.config.hidden, self._draft_head.fuse)

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        head, cache = self._draft_head, self._cache
        states = self._parents(batch)
        batch = without_first(batch)
        cache.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        write = cache.under_way
        assert write is not None
        hidden = head.start(head.embed(self._ids_in_table(batch)), states)
        # not by prefix: a head does not see slot 0
        attention = self._attention(batch, "all slots")
        inputs = LayerInputs(write.flat, self._angles_at(batch.positions, self._long(batch)), attention)
        results = self._results(batch, hidden, inputs, logits)
        if results.product is None:
            return None  # the target has run all nodes
        self._guess(batch, head.guess(results.summed, results.last))
        return head.logits(results.product, results.last, batch.own_ids)


def _rows(batch: ForestInput) -> Tensor:
    """Return the cache rows [R, 1] of a batch."""
    rows = torch.arange(len(batch.slots), device=batch.slots.device) if batch.rows is None else batch.rows
    return rows.unsqueeze(1)


def without_first(batch: ForestInput) -> ForestInput:
    """Return the batch without slot 0 for nodes that see any other slot. No state comes before the first token, so no
    head was trained to see it."""
    first, others = batch.mask[..., :1], batch.mask[..., 1:]
    mask = torch.cat((first & ~others.any(-1, keepdim=True), others), -1)
    return replace(batch, mask=mask, prompt=None, prompt_slots=None)
