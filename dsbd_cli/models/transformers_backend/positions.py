"""Positions of a forest's nodes in a decoder that would count them from its cache.

For the decoder behind an encoder three ways are known, and the loaded decoder shows which ones it has: the forward
takes positions as an argument; a child module adds a table's rows; relative biases are computed from distances. A
decoder with none of them is refused.

Decoder-only models take positions as an argument, but for decoders of this kind that are saved alone. RoBERTa counts
them from another number on. Llama 4 counts them from its cache where it scales queries, Bloom from its mask.

Shape letters: R rows, n nodes, S slots, P positions, d width of the model, H heads.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.transformers_backend.attention import node_positions, slot_positions

ARGUMENT = "decoder_position_ids"


@dataclass(frozen=True, slots=True)
class NodePositions:
    """Positions [R, n] of the current forward's nodes, positions [R, S] of the tokens in its slots, and the nodes'
    tokens [R, n], where they matter."""

    positions: Tensor
    slot_positions: Tensor
    tokens: Tensor | None


class _NotedError(Exception):
    """Signal that the child's output has been noted, so that the rest of the forward is not needed."""


class DecoderPositions:
    """The positions of a forest's nodes, passed to a decoder in the ways that it has.

    Attributes:
        argument: name of the argument that takes the positions, None where there is none.
        kinds: which of `argument`, `table` and `bias` the decoder has.
    """

    def __init__(self, model: Any, limit: int) -> None:
        """limit: P, positions of a table. Raises UnsupportedModelError where the decoder has no known way."""
        self._current: NodePositions | None = None
        decoder = decoder_of(model)
        # a model that wraps a whole language model hands on what begins with decoder_
        taking = {"position_ids": model.get_decoder()} if model.get_decoder() is not decoder else {ARGUMENT: model}
        taken = any(name in inspect.signature(type(module).forward).parameters for name, module in taking.items())
        self.argument = ARGUMENT if taken else None
        self.kinds = ["argument"] if self.argument else []
        child = getattr(decoder, "embed_positions", None)
        if self.argument is None and isinstance(child, nn.Module):
            self._table = _table(model, decoder, child, limit)
            self._padding = _padding(model, decoder, child, self._table)
            child.forward = self._from_table(child.forward)
            self.kinds.append("table")
        biased = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
        for module in biased:
            module.compute_bias = types.MethodType(self._bias(module), module)
        self.kinds += ["bias"] if biased else []
        if not self.kinds:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes its decoder's positions in no known way, so that they would be counted "
                "by cache slot; use another model"
            )

    @contextlib.contextmanager
    def at(self, positions: Tensor, slot_positions: Tensor, tokens: Tensor | None = None) -> Iterator[None]:
        """Enclose forwards of a forest: positions [R, n], slot_positions [R, S], tokens [R, n] int64."""
        self._current = NodePositions(positions, slot_positions, tokens)
        try:
            yield
        finally:
            self._current = None

    def _from_table(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a forward for the child that reads the table. A forest may have more nodes than the table has
        positions, so the stock forward cannot run first."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if self._current is None:
                return stock(*args, **kwargs)
            positions, tokens = self._current.positions, self._current.tokens
            embedded = self._table.to(positions.device)[positions]
            if self._padding is None or tokens is None:
                return embedded
            token, row = self._padding
            return torch.where((tokens == token).unsqueeze(-1), row.to(embedded.device), embedded)

        return forward

    def _bias(self, module: Any) -> Callable[..., Tensor]:
        """Return compute_bias of one attention layer, by distances of positions."""
        stock = type(module).compute_bias
        settings = {}
        if "bidirectional" in inspect.signature(type(module)._relative_position_bucket).parameters:
            settings = {
                "bidirectional": False,
                "num_buckets": module.relative_attention_num_buckets,
                "max_distance": module.relative_attention_max_distance,
            }

        def compute_bias(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
            now = self._current
            if now is None:
                bias: Tensor = stock(layer, *args, **kwargs)
                return bias
            away = now.slot_positions[:, None, :] - now.positions[:, :, None]  # [R, n, S]
            bucket = layer._relative_position_bucket(away, **settings)
            position_bias: Tensor = layer.relative_attention_bias(
                bucket.to(layer.relative_attention_bias.weight.device)
            )
            return position_bias.permute(0, 3, 1, 2)

        return compute_bias


def first_position(model: nn.Module) -> int:
    """Return the row of the table of positions that a text's first token takes: in RoBERTa and its kin the one behind
    that of padding; in other models 0."""
    tables: list[Any] = [module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")]
    return next((table.padding_idx + 1 for table in tables if hasattr(table, "position_embeddings")), 0)


def counts_positions(model: Any) -> bool:
    """Return whether a decoder-only model is the decoder of one with an encoder, which takes no positions and reads a
    table by counting from its cache (BART, Pegasus)."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(getattr(decoder, "embed_positions", None), nn.Module):
        return False
    return "position_ids" not in inspect.signature(type(decoder).forward).parameters


def scale_by_position(model: nn.Module) -> None:
    """Have the layers of Llama 4 that scale their queries by position take the positions of a forest's nodes."""
    for layer in model.modules():
        if getattr(layer, "attn_temperature_tuning", False) and not getattr(layer, "use_rope", True):
            # accelerate keeps the forward that its hook wraps under another name
            name = "_old_forward" if hasattr(layer, "_hf_hook") else "forward"
            setattr(layer, name, partial(_forward_by_position, layer, getattr(layer, name)))


def bias_by_position(model: Any) -> None:
    """Have Bloom compute its biases, which grow with the position of a key, from the positions of a forest's slots."""
    body = model.base_model
    if hasattr(body, "build_alibi_tensor"):
        body.build_alibi_tensor = partial(_alibi, body.build_alibi_tensor)


def _alibi(stock: Callable[..., Tensor], mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return biases [R * H, 1, S] of the slots. mask: of a model outside of a forest, [B, T]."""
    positions = slot_positions()
    if positions is None:
        return stock(mask, heads, dtype)
    rows, slots = positions.shape
    by_position = stock(torch.ones(1, slots, device=positions.device), heads, dtype)[:, 0]  # [H, S]
    return by_position[:, positions].transpose(0, 1).reshape(rows * heads, 1, slots)


def _forward_by_position(layer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a layer that scales queries. stock: the forward that counts positions from the cache."""
    positions = node_positions()
    if positions is None:
        return stock(*args, **kwargs)
    floors = torch.floor((positions.float() + 1.0) / layer.floor_scale)
    scaled = _ScaledByPosition(layer, (torch.log1p(floors) * layer.attn_scale + 1.0).unsqueeze(2))
    return type(layer).forward(scaled, *args, **kwargs)


class _ScaledByPosition:
    """A layer of Llama 4 whose queries are scaled where they are made. scales: [R, n, 1]."""

    attn_temperature_tuning = False

    def __init__(self, layer: Any, scales: Tensor) -> None:
        self._layer, self._scales = layer, scales

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def q_proj(self, hidden_states: Tensor) -> Tensor:
        query: Tensor = self._layer.q_proj(hidden_states)
        return (query * self._scales.to(query.device)).to(query.dtype)


def decoder_of(model: Any) -> Any:
    """Return the decoder of an encoder-decoder model, without its head where `get_decoder` gives a language model."""
    decoder = model.get_decoder()
    return decoder if getattr(decoder, "get_output_embeddings", lambda: None)() is None else decoder.get_decoder()


def _padding(model: Any, decoder: Any, child: nn.Module, table: Tensor) -> tuple[int, Tensor] | None:
    """Return the token that has no position and the row [d] that the child gives it: M2M100's padding, which some
    checkpoints begin answers with. None where every token has a position."""
    token = getattr(child, "padding_idx", None)
    if token is None or not 0 <= token < decoder.get_input_embeddings().weight.shape[0]:
        return None
    row = _output_of_child(model, decoder, child, torch.tensor([[token]]))[-1]
    return None if torch.equal(row, table[0]) else (token, row)


def _table(model: Any, decoder: Any, child: nn.Module, limit: int) -> Tensor:
    """Return the rows [P, d] that the child gives a plain chain of P tokens."""
    padding = getattr(child, "padding_idx", None)
    token = next(index for index in range(5, 8) if index != padding)
    return _output_of_child(model, decoder, child, torch.full((1, limit), token))[-limit:].clone()


def _output_of_child(model: Any, decoder: Any, child: nn.Module, ids: Tensor) -> Tensor:
    """Return the rows [P, d] that the child gives tokens [1, P] int64, noted in an ordinary forward of the decoder.

    To call the child directly, its arguments would have to be known, and they differ from model to model.
    """
    noted: list[Tensor] = []

    def note(module: nn.Module, args: object, out: Tensor) -> NoReturn:
        noted.append(out)
        raise _NotedError

    width = getattr(decoder, "config", model.config).hidden_size
    encoded = torch.zeros(1, 1, width, dtype=model.dtype, device=model.device)
    hook = child.register_forward_hook(note)
    why = "it has none"
    try:
        with torch.no_grad():
            decoder(input_ids=ids.to(model.device), encoder_hidden_states=encoded, use_cache=False)
    except _NotedError:
        pass
    except Exception as error:  # a decoder that takes other arguments raises what it likes
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    finally:
        hook.remove()
    if not noted:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not tell its decoder's positions ({why}); use another model"
        )
    return noted[0].reshape(-1, noted[0].shape[-1])
