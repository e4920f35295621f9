"""Protocols of the models and tokenizers that the decoding loop works with. Pure types: any model that fits them can be
decoded with.

Shape letters: R requests (rows), n nodes in one forward, S active cache slots, V vocabulary, T moved slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dsbd_cli.answer_forms import AnswerForm
from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.token_rules import Timestamps
from dsbd_cli.ops.interface import Ops
from dsbd_cli.requests import Request, Segment, Source


@dataclass(slots=True)
class ForestInput:
    """One forward over nodes of several rows.

    Padding is written to the trash slot (the last one reserved, which no node sees) and sees slot 0. Drafts that are
    not real have ordinary slots that no live node sees.

    Attributes:
        tokens: [R, n] int64.
        positions: [R, n] int64, depth of each node counted from the start of the prompt.
        slots: [R, n] int64, cache slot that each node's key and value are written to.
        mask: [R, n, S] bool, True where the node sees the slot (a real node sees itself). No row is all False.
        slot_positions: [R, S] int64, depth of the token in each slot, from which sliding windows are computed.
        rows: [R] int64 cache rows when this forward covers only some rows (prefill); None for all rows in order.
        prompt_slots: number of leading slots of each row that hold its prompt, R numbers. They never move, and every
            node sees all of them, apart from sliding windows. Where it is given, the logits of a node must depend on
            its path alone: not on the other nodes, the slots, the other rows or their number. None: speed comes first.
            In a chain: the slots before its first node, the same number in all rows.
        suffix: T, most slots that a row may use behind its prompt slots; used with `prompt_slots` only.
        prompt: [R] int64 on the device, number of leading slots that every node sees; None: unknown. Where
            `prompt_slots` holds zeros, so that shapes stay the same, this counts the prompts' slots. Without
            `prompt_slots` it counts all slots that every node sees.
        chain: the forward is a prefill. The real nodes of a row come first, follow one another from the row's common
            prefix on, and each sees all slots before it. They become part of the common prefix.
        late: number of leading nodes that the target has run before. Set for a draft, where logits are wanted.
        own_ids: [R, o] int64, tokens of each row whose logits are appended to those of an LM head that lacks them; ids
            past the vocabulary stand for no token. See own_ids_below.
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
        """Return a copy on another device."""
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
        """Device of the inputs and of the logits."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Number of positions: depths at or past it cannot be embedded. None when unbounded."""
        ...

    @property
    def invariant(self) -> bool:
        """Whether forwards with `prompt_slots` keep its promise on this machine: a node's logits are the same to the
        last bit, whatever else is in the forward."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a forward may become part of a CUDA graph."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a forward reads."""
        ...

    @property
    def generation(self) -> int:
        """A number that changes whenever the cache's memory moves."""
        ...

    @property
    def lm_head_ids(self) -> Tensor | None:
        """Tokens of the m columns of the logits, [m] int64, ascending, where a draft's LM head lacks some; None: column
        v is token v."""
        ...

    @property
    def own_ids_below(self) -> int:
        """Exclusive upper bound of the tokens that `own_ids` of a forward may name, where the LM head lacks some. 0
        where a forward gives logits of the LM head's tokens alone."""
        ...

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Allocate cache memory for `rows` x `slots` (the last slot is the trash slot). Called again with more, it
        keeps the contents of all slots except the old trash slot.

        window: most slots that a row holds past its common prefix, nodes of a forward included; None: any. Recurrent
        layers allocate by it.
        """
        ...

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Write the nodes' keys and values, and return their logits [R, n, V] in the model's dtype. An LM head that
        lacks tokens returns [R, n, m + o]: logits of its own tokens, then those of `own_ids`, -inf where there is no
        token. With logits=False the LM head must not be run, and None is returned."""
        ...

    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Copy cache contents slot by slot within each row: src_slots, dst_slots [R, T] int64. All reads happen before
        any write. Pairs with equal slots are no-ops; several padding pairs may write to the trash slot.

        common_prefix: [R] int64, leading slots that all live beams share from now on, counting only slots that this
        model has run. They never move again, so recurrent layers may take them into one state.
        """
        ...

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these cache rows, in this order: rows [n] int64 on the model's device."""
        ...

    def clear(self, row: int, start: int = 0) -> None:
        """Zero a cache row from a slot on, so that a NaN that a failed request left there cannot reach the next one."""
        ...

    @property
    def copies_prefixes(self) -> bool:
        """Whether the leading slots of a row hold all that the model keeps of the beginning of a prompt, so that they
        may be copied to another row whose prompt begins in the same way. Where the model is `invariant`, copying
        changes no bit of a logit."""
        ...

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows: (source row, destination row, slots) each. All reads happen before any
        write."""
        ...

    def release(self) -> None:
        """Give all cache memory back. `reserve` must come before the next forward."""
        ...

    def kv_bytes_per_slot(self) -> int:
        """Return the bytes of keys and values that one token holds over all layers; 0 for models without a cache."""
        ...

    def recurrent_bytes(self, window: int) -> int:
        """Return the bytes that a row holds whatever its length, with `window` slots past its common prefix; 0 without
        recurrent layers."""
        ...


@runtime_checkable
class KernelModel(ForestModel, Protocol):
    """ForestModel that runs kernels, and can run without them."""

    def use_ops(self, ops: Ops) -> None:
        """Move slots by these operations from now on."""
        ...

    def leave_kernels(self) -> bool:
        """Run the layers without kernels from now on. Return False where no kernel was in use."""
        ...


@runtime_checkable
class EncoderDecoderModel(ForestModel, Protocol):
    """ForestModel of an encoder and a decoder: the encoder reads a source once, and the decoder runs the forest."""

    @property
    def max_encoder_input(self) -> int | None:
        """Most tokens of a source; None when unbounded."""
        ...

    def encoder_places(self, encoder_input: Tensor) -> int:
        """Return how many positions a source takes in the encoder, or a larger number."""
        ...

    @property
    def encoder_vocab_size(self) -> int:
        """Size of the encoder's vocabulary: token ids of a source are below it."""
        ...

    def encode(self, rows: Sequence[int], encoder_inputs: Sequence[Tensor]) -> None:
        """Read the sources of cache rows: token ids [Z] int64, features [bins, frames], a picture [C, H, W] or its
        patches [Z, d]. This comes before the first forward of a row. select_rows moves a source with its row, and clear
        forgets it."""
        ...

    def encoder_bytes(self, encoder_input: Tensor) -> int:
        """Return the bytes of memory that a row holds for this source."""
        ...


@runtime_checkable
class SwitchingModel(ForestModel, Protocol):
    """ForestModel that has other rotary frequencies in long texts (longrope). A text has those that its prompt asks for
    from its first token to its last."""

    @property
    def switch_position(self) -> int | None:
        """Most tokens of a text that does not have the frequencies of long ones. A longer prompt has them. None: all
        texts have the same."""
        ...

    def begin_row(self, row: int, tokens: int) -> None:
        """Choose the frequencies of a cache row for a prompt of so many tokens, before it is read. select_rows moves
        the choice with its row."""
        ...


@runtime_checkable
class DraftHeadModel(ForestModel, Protocol):
    """ForestModel of a draft head: it reads the hidden states that the target stores in its slots.

    For drafted nodes it reads its own guesses of these states. Once nodes are accepted, the head computes what it holds
    of them again from the target's states, so only the roots of a forest count as run.
    """

    @property
    def target(self) -> ForestModel:
        """Target whose hidden states the head reads."""
        ...


class TextCodec(Protocol):
    """Conversion of text to token ids and back."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a plain prompt, with the special tokens that the tokenizer adds by itself."""
        ...

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of pieces of text, with nothing added."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, object]], chat: ChatConfig) -> str:
        """Return the text of a conversation through the chat template. Its ids are those of `encode_pieces`, because a
        template writes the special tokens itself. Raises InvalidRowError without a template."""
        ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of generated ids, without special tokens or with them."""
        ...

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        """Return for every token id the bytes that it adds to the text in mid-sentence; empty for special tokens, where
        they are left out."""
        ...


@runtime_checkable
class AnswerCodec(TextCodec, Protocol):
    """TextCodec that knows how the checkpoint marks reasoning and calls of functions. The marks are text, whether they
    are special tokens or not."""

    @property
    def form(self) -> AnswerForm:
        """Form of the checkpoint's answers."""
        ...


@runtime_checkable
class SizedCodec(TextCodec, Protocol):
    """TextCodec that bounds the number of tokens of a long text before it is tokenized."""

    @property
    def bytes_per_token(self) -> int:
        """Most bytes of a text that one token covers: a bound of the tokenizer, or one that no natural text reaches."""
        ...

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of a text; 0 where none is known."""
        ...


class SourceWindows(Protocol):
    """Windows of a source that the encoder cannot take whole. They are read one after the other, because the answer to
    one says where the next begins."""

    @property
    def text(self) -> str:
        """Text of all windows that are answered. It grows at its end."""
        ...

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The same text with times."""
        ...

    def advance(self, ids: Sequence[int]) -> Tensor | None:
        """Take the answer to the present window, without its end token, and return the next window; None at the end of
        the source. Raises RowError."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderRequest:
    """A request to a model with an encoder.

    Attributes:
        encoder_input: token ids [Z] int64, or features [bins, frames], a picture [C, H, W] or patches [Z, d] float32.
        prompt: tokens that the decoder begins with. prefix: how many of the last of them are text of the answer.
        forced: token that must follow the prompt, in place of the checkpoint's forced token; None: the checkpoint's.
        listen: a function for a request that does not name the language of its speech; else None. From the target's
            logits [V] behind the prompt's first token it returns the prompt, which is as long, and the name of the
            language.
        windows: of the source, where it is read in several; `encoder_input` is then the first one.
    """

    encoder_input: Tensor
    prompt: list[int]
    prefix: int = 0
    forced: int | None = None
    listen: Callable[[Tensor], tuple[list[int], str]] | None = None
    windows: SourceWindows | None = None


@runtime_checkable
class EncoderDecoderCodec(TextCodec, Protocol):
    """TextCodec of a model with an encoder.

    Attributes:
        reads: what the encoder reads.
    """

    reads: Source

    @property
    def timestamps(self) -> Timestamps | None:
        """Timestamp tokens; None where the model has none."""
        ...

    def segments(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[Segment, ...]:
        """Return generated tokens, timestamps among them, as pieces of text with their times."""
        ...

    def encoder_input(self, request: Request) -> EncoderRequest:
        """Return the inputs of encoder and decoder for a request, which has no messages. Raises RowError where it
        cannot be answered."""
        ...

    def cut(self, encoder_input: Tensor, room: int) -> Tensor | None:
        """Return a source cut on its left to at most `room` tokens; None where it cannot be cut."""
        ...
