"""A loaded model over a packed forest, as the engine sees it: what models of every kind share.

A kind of model says how one forward is computed: decoder/decoder_model.py for our own, adapter.py for those of
transformers.

Shape letters: R rows, n nodes of a forward, S active cache slots, V vocabulary, B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.errors import ModelError, UnsupportedModelError, one_line
from dsbd_cli.models.forest_attention import AttentionMetadata
from dsbd_cli.models.kv_cache import KVCache, PlaneSpec
from dsbd_cli.ops.interface import Ops

CALIBRATION = 2, 64  # sequences and their tokens; more of them find no better outliers
NOT_COPIED = "prompts that begin alike are each read whole: a copied beginning would change bits here"
NOT_ASKED = (
    "prompts that begin alike are each read whole: the model takes too few tokens to check whether a copied beginning "
    "changes bits"
)
LONG = 2048  # slots from which on the kernel of attention serves forwards of which no bits are asked, too
LEAST_ROWS = 4  # products of fewer rows take other kernels


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of one model. held_bytes: parameters and buffers in memory; read_bytes: what a forward reads of them;
    flops_per_node: a multiplication and an addition per parameter that it reads."""

    held_bytes: int
    read_bytes: int
    flops_per_node: int


@dataclass(frozen=True, slots=True)
class StateTap:
    """State that each forward leaves in the slots of its nodes, for a draft head.

    Attributes:
        layers: after so many layers hidden states are taken; none: after the final norm. width: H of a state.
        fuse: hidden states [R, n, H'] of each -> state [R, n, H].
    """

    layers: tuple[int, ...]
    width: int
    fuse: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """Relative errors measured: median and largest over the nodes, and the limit for the median."""

    median_error: float
    largest_error: float
    limit: float


def size_of(model: ForestModel) -> ModelSize | None:
    """Return the sizes of a loaded model; None of any other."""
    return model.size if isinstance(model, BaseForestModel) else None


class BaseForestModel:
    """A loaded model over a packed forest. A kind of model has `_run`, one forward, and `plain`.

    Attributes:
        name: as it was asked for. invariant: whether `prompt_slots` keeps its promise on this machine (invariance.py);
        varies: why not. notes: what the user should know of how it runs. tested: what the check at load measured.
        attention: the attention kernel of a GPU. quantized: what its linear layers were made at load.
    """

    def __init__(self, name: str, device: torch.device, cache: KVCache) -> None:
        self.name = name
        self.invariant = False
        self.varies: str | None = None
        self.notes: tuple[str, ...] = ()
        self.tested: SelfTestReport | None = None
        self.attention: Callable[..., Tensor | None] | None = None
        self.quantized: str | None = None
        self._device, self._cache = device, cache
        self._metadata: AttentionMetadata | None = None
        self._tap: StateTap | None = None
        self._dtype, self._width = torch.float32, 0
        self._kept: Tensor | None = None
        self.copies_prefixes = True
        self._fills = True  # forwards of fewer than LEAST_ROWS nodes are filled up

    @property
    def vocab_size(self) -> int:
        """V, width of the logits that forward returns, or would if the head lacked no tokens."""
        return self._width

    @property
    def device(self) -> torch.device:
        """Where inputs are expected and logits returned."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._dtype

    @property
    def paired(self) -> bool:
        """Whether it has an encoder."""
        return False

    @property
    def settings(self) -> Any:
        """Return the object that has the checkpoint's `config` and `generation_config`."""
        raise NotImplementedError

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights: some models give wider logits."""
        raise NotImplementedError

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None when unbounded."""
        raise NotImplementedError

    @property
    def embeddings(self) -> Tensor:
        """Embedding table [V, H]."""
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """H, width of a hidden state."""
        raise NotImplementedError

    @property
    def layer_count(self) -> int:
        """Number of decoder layers."""
        raise NotImplementedError

    @property
    def token_rules(self) -> TokenRules:
        """Rules of tokens that the checkpoint's generation settings ask for."""
        raise NotImplementedError

    @property
    def architecture(self) -> str:
        """Name of the model's class, for messages."""
        raise NotImplementedError

    @property
    def size(self) -> ModelSize:
        """How large the model is."""
        raise NotImplementedError

    @property
    def ops(self) -> Ops:
        """Return the operations that serve its layers."""
        raise NotImplementedError

    @property
    def capturable(self) -> bool:
        """A forward may become a CUDA graph."""
        raise NotImplementedError

    @property
    def by_parts(self) -> bool:
        """All layers of the last forward split their keys into prompt slots and suffix."""
        raise NotImplementedError

    def stock(self) -> nn.Module:
        """Return the model as transformers runs it, for comparators."""
        raise NotImplementedError

    def plain(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of separate sequences [B, T] by an ordinary causal forward."""
        raise NotImplementedError

    def leave_kernels(self) -> bool:
        """Run without kernels from now on. False where no kernel ran."""
        raise NotImplementedError

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        """Return logits [R, n, V] of the nodes of a batch, None where none are wanted; the cache holds the nodes."""
        raise NotImplementedError

    @property
    def generation(self) -> int:
        """Changes whenever the cache's memory moves."""
        return self._cache.generation

    def fit_width(self, width: int) -> None:
        """Return logits of this width: more columns are cut off, missing ones are -inf.

        For drafts whose padding ids differ from the target's; that the ids mean the same is checked by check_pair.
        """
        self._width = width
        if self._kept is not None:
            self._kept = self._kept[self._kept < width]

    def spread(self, ids: Tensor, width: int) -> None:
        """Take the model's logits as those of `ids` [n] int64, ascending, in a vocabulary of this width."""
        self._kept, self._width = ids.to(self._device), width

    @property
    def head_ids(self) -> Tensor | None:
        """Tokens [m] int64 of the logits' columns, ascending, where the head lacks some; None: column v is token v."""
        return self._kept

    @property
    def own_ids_below(self) -> int:
        """Tokens below this may be asked for by `own_ids` of a forward, where the head lacks some; 0: none may."""
        return 0

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Own cache memory for rows x slots, of which `window` lie past the common prefix at most (None: all); grows
        only and keeps what is there."""
        self._cache.reserve(rows, slots, window)

    def release(self) -> None:
        """Give the cache's memory back."""
        self._cache.release()

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        """Keep only these cache rows, in this order: rows [n] int64. The memory stays reserved."""
        self._cache.select_rows(rows)

    @torch.no_grad()
    def clear(self, row: int, start: int = 0) -> None:
        """Zero a cache row from a slot on: NaN times a weight of zero is NaN, so a failed request would reach the next
        one."""
        self._cache.clear(row, start)

    @torch.no_grad()
    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows: (source row, target row, slots) each. All reads happen before any write."""
        self._cache.copy_prefixes(copies)

    def kv_bytes_per_slot(self) -> int:
        """Bytes of keys and values that one token holds over all layers."""
        return self._cache.bytes_per_slot

    def tap(self, tap: StateTap | None) -> None:
        """Leave such states in the slots from the next forward on; None: no longer. Raises ModelError where another
        head reads the states already, UnsupportedModelError where the model does not give them."""
        if tap is not None and self._tap is not None:
            raise ModelError(f"a head reads the states of {self.name!r} already: load the model once for each head")
        self._tap = tap
        if tap is not None:
            self._cache.add_states(PlaneSpec(1, tap.width, self.weights_dtype, self._device))

    @property
    def states(self) -> Tensor:
        """The states of all slots [R', S', H], where there is a tap."""
        return self._cache.states

    def _leave_states(self, taken: list[Tensor]) -> None:
        """Put what the tap makes of hidden states [R, n, H'] into the slots of the nodes that have run."""
        write = self._cache.under_way
        assert write is not None
        assert self._tap is not None
        made = self._tap.fuse(taken).flatten(0, 1)
        self.states.flatten(0, 1).index_copy_(0, write.flat, made.to(self.states.dtype))

    def keep_states_in(self, precision: torch.dtype) -> None:
        """Hold recurrent states in this dtype, where there are any; before `reserve`."""

    def state_bytes(self, window: int) -> int:
        """Bytes of a row's recurrent states and of the inputs of `window` slots past its common prefix; 0 for
        attention."""
        return self._cache.bytes_of_states(window)

    def use_ops(self, ops: Ops) -> None:
        """Move slots by these operations from now on. What `move` is given must then be what an iteration gives: no
        target behind its source, and both ascending."""
        self._cache.ops = ops

    @torch.no_grad()
    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Copy cache contents slot by slot within each row: src_slots, dst_slots [R, T] int64. Recurrent states take in
        what joined the common prefix [R]."""
        self._cache.advance(src_slots, dst_slots, common_prefix)

    @torch.no_grad()
    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Write the nodes, return logits [R, n, V] in the model's dtype, [R, n, m + o] where the head lacks tokens (see
        head_ids and ForestInput.own_ids); with logits=False the head is not run."""
        rows, count = batch.tokens.shape
        if self._fills and batch.prompt_slots is not None and rows * count < LEAST_ROWS:
            batch = repeated(batch, -(-LEAST_ROWS // rows))
        found = self._run(batch, logits=logits)
        own = 0 if batch.own_ids is None else batch.own_ids.shape[1]
        return None if found is None else self._fitted(found.to(self._device), own)[:, :count]

    def trust(self, varies: str | None, copies: bool | None) -> None:
        """Take what the check of invariance has found (`invariance.Verdict`): prompts that begin alike are each read
        whole where only that keeps the bits."""
        self.varies, self.invariant = varies, varies is None
        if self.invariant:
            if self.copies_prefixes and not copies:
                self.notes += (NOT_ASKED if copies is None else NOT_COPIED,)
            self.copies_prefixes = bool(copies)

    def _attention_metadata(self, batch: ForestInput) -> AttentionMetadata | None:
        """Return what the layers of a forest's forward may split their keys by, and keep it for by_parts."""
        kernel, prompt, suffix = self.attention, batch.prompt, batch.suffix
        prompt_slots = None if batch.chain else batch.prompt_slots
        fast = prompt_slots is None
        if prompt_slots is None and kernel is not None and prompt is not None and batch.mask.shape[-1] >= LONG:
            prompt_slots, suffix = (0,) * len(batch.tokens), batch.mask.shape[-1]
        self._metadata = (
            None
            if prompt_slots is None
            else AttentionMetadata(
                prompt_slots,
                suffix,
                kernel=kernel,
                path_attention=self.ops.path_attention,
                prompt=prompt,
                positions=batch.slot_positions,
                fast=fast,
            )
        )
        return self._metadata

    def _fitted(self, logits: Tensor, own: int = 0) -> Tensor:
        """Cut logits to the width. own: columns of own ids, the last ones."""
        if self._kept is not None:
            kept = logits[..., : len(self._kept)]
            if not own:
                return kept
            return logits if logits.shape[-1] == len(self._kept) + own else torch.cat((kept, logits[..., -own:]), -1)
        if self._width <= logits.shape[-1]:
            return logits[..., : self._width]
        return nn.functional.pad(logits, (0, self._width - logits.shape[-1]), value=float("-inf"))


def repeated(batch: ForestInput, count: int) -> ForestInput:
    """The same with the last node as often as it takes to have `count` nodes; all write the same to the same slot."""
    more = count - batch.tokens.shape[1]
    tokens, positions, slots, mask = (
        torch.cat((field, field[:, -1:].expand(-1, more, *field.shape[2:])), 1)
        for field in (batch.tokens, batch.positions, batch.slots, batch.mask)
    )
    return replace(batch, tokens=tokens, positions=positions, slots=slots, mask=mask)


@contextlib.contextmanager
def unsupported(architecture: str) -> Iterator[None]:
    """Turn what a model raises into one sentence; models refuse in many words. Memory errors pass."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ModelError):
        raise
    except Exception as error:
        reason = one_line(error)
        raise UnsupportedModelError(
            f"{architecture} cannot hold a tree of tokens ({type(error).__name__}: {reason}); "
            "use a model whose attention goes by mask and position_ids, such as Llama, Qwen or OPT"
        ) from error
