"""The base class of loaded models over a packed forest: all that models of every kind share.

A subclass computes one forward: decoder/decoder_model.py does so for our own decoder, transformers_backend/base.py for
models of transformers.

Shape letters: R rows, n nodes of a forward, S active cache slots, V vocabulary, B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.errors import ModelError, UnsupportedModelError, one_line, out_of_memory
from dsbd_cli.models.attention.metadata import AttentionMetadata, Reading
from dsbd_cli.models.kv_cache import KVCache, PlaneLayout
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.quantized_weight import QuantizedWeight

CALIBRATION = 2, 64  # sequences and their tokens
NOT_COPIED = "prompts that begin alike are each read whole: a copied beginning would change bits here"
NOT_ASKED = (
    "prompts that begin alike are each read whole: the model takes too few tokens to check whether a copied beginning "
    "changes bits"
)
LEAST_ROWS = 4  # libraries compute products of fewer rows with other kernels


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of one model. held_bytes: parameters and buffers in memory. read_bytes: the part of them that a forward
    reads. flops_per_node: a multiplication and an addition for each parameter that a forward reads."""

    held_bytes: int
    read_bytes: int
    flops_per_node: int


def address(weight: Tensor | QuantizedWeight) -> int:
    """Return a number that identifies the memory of a weight. Those that torch has packed, and those of a quantised
    file, have no address."""
    return id(weight) if isinstance(weight, QuantizedWeight) or weight.is_mkldnn else weight.data_ptr()


@dataclass(frozen=True, slots=True)
class HiddenStateTap:
    """Hidden states that each forward stores in the slots of its nodes, where a draft head reads them.

    Attributes:
        layers: numbers of layers after which hidden states are taken; empty: they are taken after the final norm.
        width: H of what is stored.
        fuse: joins hidden states [R, n, H'], one for each of these places, to one [R, n, H].
    """

    layers: tuple[int, ...]
    width: int
    fuse: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """Relative errors that the check at load measured: median and largest over the nodes, and the limit for the
    median."""

    median_error: float
    largest_error: float
    limit: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a load. tested: errors that its check measured. notes: lines for the user about how the model runs."""

    tested: SelfTestReport
    notes: tuple[str, ...] = ()


class Loaded(NamedTuple):
    """A model that is loaded and checked, and its codec. Nothing about them is set afterwards."""

    model: BaseForestModel
    codec: HFCodec
    report: LoadReport

    def noting(self, *notes: str) -> Loaded:
        """Return the same with further lines for the user."""
        return self._replace(report=replace(self.report, notes=(*self.report.notes, *notes)))


def size_of(model: ForestModel) -> ModelSize | None:
    """Return the sizes of a model that this package has loaded; None for any other model."""
    return model.size if isinstance(model, BaseForestModel) else None


def calibration_tokens(rows: int, limit: int | None) -> Tensor:
    """Return the random tokens [B, T] by which outliers are found; more of them find no better ones. rows: of the
    embedding table. limit: positions of the model."""
    count, length = CALIBRATION
    return torch.randint(0, rows, (count, min(length, limit or length)), generator=torch.Generator().manual_seed(19))


class BaseForestModel:
    """A loaded model over a packed forest. A subclass implements `_run`, which is one forward, and `plain`.

    Attributes:
        name: the model as the user named it.
        invariant: whether `prompt_slots` keeps its promise on this machine (checks/invariance.py).
        varies: the reason why it does not.
        attention: the attention kernel of a GPU; None without one.
        stored_form: name of the form of a quantised file's weights, where products read them as they are.
    """

    def __init__(
        self, name: str, device: torch.device, cache: KVCache, load_stock: Callable[[], Any] | None = None
    ) -> None:
        """load_stock: loads the model as transformers runs it."""
        self.name = name
        self.invariant = False
        self.varies: str | None = None
        self.attention: Callable[..., Tensor | None] | None = None
        self.stored_form: str | None = None
        self._load_stock = load_stock
        self._stock: Any = None
        self._device, self._cache = device, cache
        self._metadata: AttentionMetadata | None = None  # of the last forward, where its slots were split
        self._tap: HiddenStateTap | None = None
        self._dtype, self._width = torch.float32, 0
        self._lm_head_ids: Tensor | None = None
        self.copies_prefixes = True
        self._pads_forwards = True  # forwards of fewer than LEAST_ROWS nodes are filled up

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits that forward returns, or would return if the head lacked no tokens."""
        return self._width

    @property
    def device(self) -> torch.device:
        """The device that inputs are expected on and logits are returned on."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._dtype

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder."""
        return False

    @property
    def settings(self) -> Any:
        """The object that holds the checkpoint's `config` and `generation_config`."""
        raise NotImplementedError

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights; some models give logits of a wider dtype."""
        raise NotImplementedError

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; None when unbounded."""
        raise NotImplementedError

    @property
    def embeddings(self) -> Any:
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
        """Token rules that the checkpoint's generation settings ask for."""
        raise NotImplementedError

    @property
    def architecture(self) -> str:
        """Name of the model's class, for messages."""
        raise NotImplementedError

    @property
    def size(self) -> ModelSize:
        """The sizes of the model."""
        raise NotImplementedError

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a forward reads."""
        return self.size.read_bytes

    @property
    def ops(self) -> Ops:
        """The operations that serve the model's layers."""
        raise NotImplementedError

    @property
    def capturable(self) -> bool:
        """Whether a forward can be captured as a CUDA graph."""
        raise NotImplementedError

    @property
    def by_parts(self) -> bool:
        """Whether all layers of the last forward split their keys into prompt slots and suffix."""
        raise NotImplementedError

    def stock(self) -> nn.Module:
        """Return the model as transformers runs it, for comparisons. It is loaded at the first call."""
        if self._stock is None:
            assert self._load_stock is not None, "a model of a checkpoint"
            self._stock = self._load_stock()
        module: nn.Module = self._stock
        return module

    def plain(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of separate sequences [B, T] by an ordinary causal forward."""
        raise NotImplementedError

    def leave_kernels(self) -> bool:
        """Run without kernels from now on. Return False where no kernel ran."""
        raise NotImplementedError

    def _distrust_kernels(self) -> None:
        """Drop the result of the check of invariance, which was made with kernels."""
        if self.invariant:
            self.invariant, self.varies = False, "it was checked with kernels, one of which fails"

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        """Run one forward: write the nodes of a batch to the cache and return their logits [R, n, V]; None without
        `logits`."""
        raise NotImplementedError

    @property
    def generation(self) -> int:
        """A number that changes whenever the cache's memory moves."""
        return self._cache.generation

    def fit_width(self, width: int) -> None:
        """Give logits this width from now on: further columns are cut off, missing ones are -inf.

        This serves drafts whose padding ids differ from the target's. `check_pair` has checked that the ids mean the
        same.
        """
        self._width = width
        if self._lm_head_ids is not None:
            self._lm_head_ids = self._lm_head_ids[self._lm_head_ids < width]

    def spread(self, ids: Tensor, width: int) -> None:
        """Declare that the columns of the model's logits are the tokens `ids` [n] int64, ascending, of a vocabulary of
        this width."""
        self._lm_head_ids, self._width = ids.to(self._device), width

    @property
    def lm_head_ids(self) -> Tensor | None:
        """Token ids [m] int64 of the logits' columns, ascending, where the head lacks tokens; None where column v is
        token v."""
        return self._lm_head_ids

    @property
    def own_ids_below(self) -> int:
        """Bound below which `own_ids` of a forward may ask for any token, where the head lacks some; 0: it may ask for
        none."""
        return 0

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Allocate cache memory for rows x slots, of which at most `window` lie past a row's common prefix (None: all).
        The memory only grows and keeps its contents."""
        self._cache.reserve(rows, slots, window)

    def release(self) -> None:
        """Free the cache's memory."""
        self._metadata = None
        self._cache.release()

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        """Keep only these cache rows, in this order: rows [n] int64. The memory stays reserved."""
        self._cache.select_rows(rows)

    @torch.no_grad()
    def clear(self, row: int, start: int = 0) -> None:
        """Zero a cache row from slot `start` on. NaN times a weight of zero is NaN, so NaN that a failed request leaves
        there would reach the next request."""
        self._cache.clear(row, start)

    @torch.no_grad()
    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows: (source row, target row, slots) each. All reads happen before any write."""
        self._cache.copy_prefixes(copies)

    def kv_bytes_per_slot(self) -> int:
        """Return the bytes of one token's keys and values over all layers, and of its hidden state where there is a
        tap."""
        return self._cache.bytes_per_slot

    def tap(self, tap: HiddenStateTap | None) -> None:
        """Store hidden states in the slots from the next forward on, as `tap` describes; None: store them no longer.

        Raises ModelError where another head reads the states already, UnsupportedModelError where the model does not
        give hidden states.
        """
        if tap is not None and self._tap is not None:
            raise ModelError(f"a head reads the states of {self.name!r} already: load the model once for each head")
        self._tap = tap
        if tap is not None:
            self._cache.add_hidden_states(PlaneLayout(1, tap.width, self.weights_dtype, self._device))

    @property
    def hidden_states(self) -> Tensor:
        """The hidden states of all slots [R', S', H], where there is a tap."""
        return self._cache.hidden_states

    def _store_hidden_states(self, taken: list[Tensor]) -> None:
        """Fuse hidden states [R, n, H'] as the tap says and write the result to the slots of the nodes that have just
        run."""
        write = self._cache.under_way
        assert write is not None
        assert self._tap is not None
        made = self._tap.fuse(taken).flatten(0, 1)
        self.hidden_states.flatten(0, 1).index_copy_(0, write.flat, made.to(self.hidden_states.dtype))

    def keep_recurrent_states_in(self, precision: torch.dtype) -> None:
        """Hold recurrent states, where the model has any, in this dtype. It is called before `reserve`."""

    def recurrent_bytes(self, window: int) -> int:
        """Return the bytes of a row's recurrent states and of the inputs of `window` slots past its common prefix; 0
        for a model with attention layers alone."""
        return self._cache.recurrent_bytes(window)

    def use_ops(self, ops: Ops) -> None:
        """Move slots by these operations from now on. `move` may then be given only what an iteration gives it: source
        and target slots ascend, and no target lies behind its source."""
        self._cache.ops = ops

    @torch.no_grad()
    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Copy cache contents slot by slot within each row: src_slots, dst_slots [R, T] int64. Recurrent states take in
        the tokens that joined the common prefix [R]."""
        self._cache.advance(src_slots, dst_slots, common_prefix)

    @torch.no_grad()
    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Write the nodes to the cache and return logits [R, n, V] in the model's dtype. With logits=False the head is
        not run.

        Where the head lacks tokens, the logits are [R, n, m + o]: see lm_head_ids and ForestInput.own_ids.
        """
        rows, count = batch.tokens.shape
        if self._pads_forwards and batch.prompt_slots is not None and rows * count < LEAST_ROWS:
            batch = repeated(batch, -(-LEAST_ROWS // rows))
        output = self._run(batch, logits=logits)
        own = 0 if batch.own_ids is None else batch.own_ids.shape[1]
        return None if output is None else self._fitted(output.to(self._device), own)[:, :count]

    def trust(self, varies: str | None, copies: bool | None) -> tuple[str, ...]:
        """Apply the result of the check of invariance, whose fields are those of `verdicts.Verdict`. Prompts that begin
        alike are each read whole where only that keeps the bits, or where copying was not checked. Return a line for
        the user where this changes how the model runs."""
        self.varies, self.invariant = varies, varies is None
        if not self.invariant:
            return ()
        copied, self.copies_prefixes = self.copies_prefixes, bool(copies)
        return (NOT_ASKED if copies is None else NOT_COPIED,) if copied and not copies else ()

    def _ids_in_table(self, batch: ForestInput) -> Tensor:
        """Return token ids [R, n] that the embedding table has. A draft may lack the last ids of its target; any other
        id may take their place, because only acceptance suffers."""
        return batch.tokens.clamp(max=len(self.embeddings) - 1)

    def _attention_metadata(self, batch: ForestInput, reading: Reading) -> AttentionMetadata:
        """Prepare attention for the layers of a forward. Keep this for `by_parts` where slots are split: the masks of a
        prompt are large. reading: of a prompt."""
        metadata = AttentionMetadata.of(batch, self.ops, self.attention, reading)
        self._metadata = None if metadata.split is None else metadata
        return metadata

    def _all_split(self, layers: int) -> bool:
        """Return whether this number of layers, which are all, attended by split slots in the last forward."""
        return self._metadata is not None and self._metadata.used == layers

    def _fitted(self, logits: Tensor, own: int = 0) -> Tensor:
        """Cut or pad logits to the model's width, or cut them to the head's tokens. own: how many of the last columns
        are own ids, which stay."""
        if (ids := self._lm_head_ids) is not None:
            kept = logits[..., : len(ids)]
            if not own:
                return kept
            return logits if logits.shape[-1] == len(ids) + own else torch.cat((kept, logits[..., -own:]), -1)
        if self._width <= logits.shape[-1]:
            return logits[..., : self._width]
        return nn.functional.pad(logits, (0, self._width - logits.shape[-1]), value=float("-inf"))


def repeated(batch: ForestInput, count: int) -> ForestInput:
    """Return the batch with its last node repeated until there are `count` nodes. The copies write the same numbers to
    the same slot."""
    more = count - batch.tokens.shape[1]
    tokens, positions, slots, mask = (
        torch.cat((field, field[:, -1:].expand(-1, more, *field.shape[2:])), 1)
        for field in (batch.tokens, batch.positions, batch.slots, batch.mask)
    )
    return replace(batch, tokens=tokens, positions=positions, slots=slots, mask=mask)


@contextlib.contextmanager
def unsupported(architecture: str) -> Iterator[None]:
    """Turn an exception of a model into an UnsupportedModelError of one sentence. Memory errors, which say nothing
    about the model, and ModelErrors pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelError) or out_of_memory(error):
            raise
        reason = one_line(error)
        raise UnsupportedModelError(
            f"{architecture} cannot hold a tree of tokens ({type(error).__name__}: {reason}); "
            "use a model whose attention goes by mask and position_ids, such as Llama, Qwen or OPT"
        ) from error
