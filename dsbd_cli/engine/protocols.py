"""Protocols of the models and tokenizers that the decoding loop works with. Pure types: any model that fits may be
decoded with.

Shape letters: R requests (rows), n nodes in one forward, S active cache slots, V vocabulary, T moved slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dsbd_cli.config.token_rules import Timestamps
from dsbd_cli.ops.interface import Ops
from dsbd_cli.requests import Request, Segment, Source


@dataclass(slots=True)
class ForestInput:
    """One forward over nodes of several rows.

    Padding and absent parents are written to the trash slot (the last one reserved, never seen) and see slot 0. Drafts
    that are not real stand in ordinary slots that no live node sees.

    Attributes:
        tokens: [R, n] int64.
        positions: [R, n] int64, depth of each node counted from the start of the prompt.
        slots: [R, n] int64, cache slot that each node's key and value are written to.
        mask: [R, n, S] bool, True where the node sees the slot (a real node sees itself). No row is all False.
        slot_positions: [R, S] int64, depth of the token in each slot; sliding windows go by it.
        rows: [R] int64 cache rows when this forward covers only some rows (prefill); None for all rows in order.
        prompt_slots: how many leading slots of each row hold its prompt, R numbers. They never move, and every node
            sees all of them, windows aside. Where given, the logits of a node must not depend on anything but its path:
            not on the other nodes, the slots, the other rows or how many there are. None: speed comes first. Of a
            chain, the slots before its first node, as many in all rows.
        suffix: T, how many slots from there on a row may use at most; of use with `prompt_slots` only.
        prompt: [R] int64 on the device, leading slots that every node sees. Where `prompt_slots` holds zeros, so that
            its shapes stay the same, those of the prompts; without `prompt_slots` as many as there are. None: nobody
            counted.
        chain: a prefill. The real nodes of a row stand first, follow one another from the row's common prefix on, and
            each sees all before it; they join the common prefix.
        late: how many leading nodes the target has run before; of a draft, where logits are wanted.
        own_ids: [R, o] int64, tokens of each row whose logits are wanted behind those of a head that lacks them; past
            the vocabulary where there is none. See own_ids_below.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor
    slot_positions: Tensor
    rows: Tensor | None = None
    prompt_slots: tuple[int, ...] | None = None
    suffix: int = 0
    chain: bool = False
    prompt: Tensor | None = None
    late: int = 0
    own_ids: Tensor | None = None

    def to(self, device: torch.device) -> ForestInput:
        """The same on another device."""
        return ForestInput(
            self.tokens.to(device),
            self.positions.to(device),
            self.slots.to(device),
            self.mask.to(device),
            self.slot_positions.to(device),
            None if self.rows is None else self.rows.to(device),
            self.prompt_slots,
            self.suffix,
            self.chain,
            None if self.prompt is None else self.prompt.to(device),
            self.late,
            None if self.own_ids is None else self.own_ids.to(device),
        )


class ForestModel(Protocol):
    """A causal language model over a packed forest: one cache row per request, a slot per token, visibility by mask."""

    @property
    def vocab_size(self) -> int:
        """V, width of the logits that forward returns."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs are expected and logits returned."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Depths at or past this cannot be embedded; None when unbounded."""
        ...

    @property
    def invariant(self) -> bool:
        """Whether forwards with `prompt_slots` keep its promise on this machine: a node's logits are the same to the
        last bit in any company."""
        ...

    @property
    def capturable(self) -> bool:
        """A forward may become part of a CUDA graph."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever the cache's memory moves."""
        ...

    @property
    def head_ids(self) -> Tensor | None:
        """Tokens [m] int64 of the m columns of the logits, ascending, where a draft's head lacks some; None: column v
        is token v."""
        ...

    @property
    def own_ids_below(self) -> int:
        """Tokens below this may be asked for by `own_ids` of a forward, where the head lacks some; 0 where a forward
        gives logits of the head's tokens alone."""
        ...

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Own cache memory for `rows` x `slots` (the last slot is the trash slot). Called again with more, it keeps the
        contents of all slots except the old trash slot.

        window: most slots that a row holds past its common prefix, nodes of a forward included; None: any. Recurrent
        layers go by it.
        """
        ...

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Write the nodes' keys and values, return logits [R, n, V] in the model's dtype, of a head that lacks tokens
        [R, n, m + o]: of its own tokens and of `own_ids`, -inf where there is none. None with logits=False, when the
        output head must not be run."""
        ...

    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Copy cache contents slot by slot within each row: src_slots, dst_slots [R, T] int64. All reads happen before
        any write. Pairs with source == target are no-ops; several padding pairs may aim at the trash slot.

        common_prefix: [R] int64, leading slots that all live beams share from now on, of those that this model has run.
        They never move again, so that recurrent layers may take them into one state.
        """
        ...

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these cache rows, in this order: rows [n] int64 on the model's device."""
        ...

    def clear(self, row: int, start: int = 0) -> None:
        """Zero a cache row from a slot on, so that NaN a failed request left there cannot reach the next one."""
        ...

    @property
    def copies_prefixes(self) -> bool:
        """Whether all that a model keeps of a prompt's beginning stands in the leading slots of its row, so that they
        may be copied to another row whose prompt begins alike. Where the model is `invariant`, no bit of a logit
        changes with it."""
        ...

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows: (source row, target row, slots) each. All reads happen before any write."""
        ...

    def release(self) -> None:
        """Give all cache memory back; reserve comes before the next forward."""
        ...

    def kv_bytes_per_slot(self) -> int:
        """Bytes of keys and values that one token holds over all layers; 0 for models without a cache."""
        ...

    def state_bytes(self, window: int) -> int:
        """Bytes that a row holds whatever its length, with so many slots past its common prefix; 0 without recurrent
        layers."""
        ...


@runtime_checkable
class KernelModel(ForestModel, Protocol):
    """ForestModel that runs kernels, and can do without."""

    def use_ops(self, ops: Ops) -> None:
        """Move slots by these operations from now on."""
        ...

    def leave_kernels(self) -> bool:
        """Run its layers without kernels from now on. False where no kernel ran."""
        ...


@runtime_checkable
class EncoderDecoderModel(ForestModel, Protocol):
    """ForestModel of an encoder and a decoder: it reads a source once, and the forest answers it."""

    @property
    def max_encoder_input(self) -> int | None:
        """Tokens of a source at most; None when unbounded."""
        ...

    def encoder_places(self, encoder_input: Tensor) -> int:
        """Places of a source in the encoder, or more."""
        ...

    @property
    def encoder_vocab_size(self) -> int:
        """Token ids that a source may hold are below this."""
        ...

    def encode(self, rows: Sequence[int], encoder_inputs: Sequence[Tensor]) -> None:
        """Read the sources of cache rows: token ids [Z] int64, features [bins, frames], a picture [C, H, W] or its
        patches [Z, d]. It comes before the first forward of a row; select_rows and clear move and forget a source with
        its row."""
        ...

    def encoder_bytes(self, encoder_input: Tensor) -> int:
        """Bytes of memory that a row holds for this source."""
        ...


@runtime_checkable
class HeadModel(ForestModel, Protocol):
    """ForestModel of a draft head: it reads the states that the target leaves in its slots.

    Of drafted nodes it reads its own guesses. What it holds of them is made anew from the target's states once they
    are accepted, so only the roots of a forest count as run.
    """

    @property
    def target(self) -> ForestModel:
        """Return the target whose states it reads."""
        ...


class TextCodec(Protocol):
    """Text to token ids and back."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the tokenizer adds by itself."""
        ...

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """Token ids of pieces of text, nothing added."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation through the tokenizer's chat template. Raises InvalidRowError without a
        template."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids, special tokens left out."""
        ...

    def token_bytes(self) -> list[bytes]:
        """For every token id the bytes it adds to the text in mid-sentence; empty for special tokens."""
        ...


@runtime_checkable
class SizedCodec(TextCodec, Protocol):
    """A codec that tells of a long text what its tokens must be, before it is tokenized."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a text that one token covers at most: a bound of the tokenizer, or one that no text of people
        reaches."""
        ...

    def size(self, asked: str | list[dict[str, str]]) -> int:
        """Bytes of a plain prompt or a conversation."""
        ...

    def least_tokens(self, asked: str | list[dict[str, str]]) -> int:
        """How many tokens a plain prompt or a conversation has at least; 0 where nothing can be told."""
        ...

    def encode(self, prompt: str, most: int | None = None) -> list[int]:
        """Return token ids as every codec does. most: characters of the prompt, the last ones."""
        ...

    def encode_chat(self, messages: list[dict[str, str]], most: int | None = None) -> list[int]:
        """Return token ids as every codec does.

        most: characters of the conversation's text, the last ones, behind the token that every text begins with.
        """
        ...


@dataclass(frozen=True, slots=True)
class EncoderRequest:
    """A request to a model with an encoder.

    Attributes:
        encoder_input: token ids [Z] int64, or features [bins, frames], a picture [C, H, W] or patches [Z, d] float32.
        prompt: tokens that the decoder begins with. prefix: how many of the last of them are text of the answer.
        forced: token that has to follow the prompt, in place of the checkpoint's own; None: no other.
        listen: where the request names no language of its speech, what makes the prompt, which is as long, and the name
            of the language from the target's logits [V] behind the prompt's first token; else None.
    """

    encoder_input: Tensor
    prompt: list[int]
    prefix: int = 0
    forced: int | None = None
    listen: Callable[[Tensor], tuple[list[int], str]] | None = None


@runtime_checkable
class EncoderDecoderCodec(TextCodec, Protocol):
    """TextCodec of a model with an encoder.

    Attributes:
        reads: what the encoder reads.
    """

    reads: Source

    @property
    def timestamps(self) -> Timestamps | None:
        """Tokens of times; None where the model has none."""
        ...

    def segments(self, ids: Sequence[int]) -> tuple[Segment, ...]:
        """Generated tokens that hold times, as text with times."""
        ...

    def encoder_input(self, request: Request) -> EncoderRequest:
        """Return what a request is to encoder and decoder. Raises RowError where it cannot be answered."""
        ...

    def cut(self, encoder_input: Tensor, room: int) -> Tensor | None:
        """A source of at most `room` tokens, cut on its left; None where that cannot be."""
        ...
