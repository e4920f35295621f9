"""What transformers models of every kind share as ForestModels: names, devices, widths of the logits, masks and cache.

A kind of model says how one forward is called: see causal.py.

Shape letters: R rows, n nodes of a forward, S active cache slots, V vocabulary, B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.models import totals
from dsbd_cli.engine.models.attention import Sight, use_grouped_attention
from dsbd_cli.engine.models.cache import ForestCache
from dsbd_cli.engine.models.generation import checkpoint_rules
from dsbd_cli.engine.models.reads import HostReads
from dsbd_cli.errors import ModelError, UnsupportedModelError
from dsbd_cli.token_rules import TokenRules

if TYPE_CHECKING:
    from dsbd_cli.engine.models.fused import Fused
    from dsbd_cli.engine.models.invariance import Verdict
    from dsbd_cli.engine.models.selftest import SelfTestReport

__all__ = ["MaskPlan", "TransformersForest", "unsupported"]

CALIBRATION = 2, 64  # sequences and their tokens; more of them find no better outliers
NOT_COPIED = "prompts that begin alike are each read whole: a copied beginning would change bits here"
NOT_ASKED = (
    "prompts that begin alike are each read whole: the model takes too few tokens to check whether a copied beginning "
    "changes bits"
)
LONG = 2048  # slots from which on the kernel of attention serves forwards of which no bits are asked, too
LEAST_ROWS = 4  # products of fewer rows take other kernels
# Layer kinds whose state is one key and one value per token, so that a tree of tokens can be held.
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Which masks a model wants.

    Attributes:
        kinds: layer kinds of a model that takes one mask per kind; empty for a model that takes a single mask.
        window: width of sliding windows, counted in positions; None without windows.
        chunk: width of attention chunks; None without chunks.
    """

    kinds: tuple[str, ...]
    window: int | None
    chunk: int | None

    @classmethod
    def of(cls, config: Any, *, recurrent: bool = False) -> MaskPlan:
        """Read a (text) config. recurrent: layers of other kinds carry states that our cache holds; they get no mask.

        Raises UnsupportedModelError for layers that keep more than keys and values.
        """
        kinds = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
        unfit = [kind for kind in kinds if kind not in _LAYER_KINDS]
        if recurrent and not {"sliding_attention", "chunked_attention"} & set(kinds):
            return cls((), None, None)
        if unfit and not recurrent:
            raise UnsupportedModelError(
                f"{config.model_type} has {', '.join(unfit)} layers, whose state cannot branch into a tree: "
                "use a model with attention layers only"
            )
        used = getattr(config, "use_sliding_window", None) is not False
        window = getattr(config, "sliding_window", None) if used else None
        chunk = getattr(config, "attention_chunk_size", None)
        if kinds in ((), ("full_attention",)):
            return cls((), None if kinds else window, None)
        return cls(kinds, window, chunk)

    def seen(self, kind: str, batch: ForestInput) -> Tensor:
        """[R, n, S] bool: what each node sees in the layers of one kind."""
        if kind == "full_attention":
            return batch.mask
        here, there = batch.positions[:, :, None], batch.slot_positions[:, None, :]
        if kind == "chunked_attention" and self.chunk is not None:
            return batch.mask & (here // self.chunk == there // self.chunk)
        return batch.mask if self.window is None else batch.mask & (here - there < self.window)


class TransformersForest:
    """A loaded transformers model over a packed forest. Construction runs one token through it to learn its shapes.

    A kind of model overrides `_run`, one forward. Raises UnsupportedModelError when the architecture keeps more than
    keys and values or cannot take a forest's mask.
    """

    def __init__(self, model: Any, name: str, stock: Callable[[], Any] | None = None) -> None:
        """stock: loads the model once more, as it was before its weights were packed."""
        self.name = name
        self.invariant = False  # whether `settled` keeps its promise on this machine: see invariance.py
        self.varies: str | None = None  # why not
        self.told: tuple[str, ...] = ()  # what the user should know of how it runs
        self.fused: Fused | None = None  # modules that run as kernels
        self.tested: SelfTestReport | None = None  # what the check at load has measured
        self.attention: Callable[..., Tensor] | None = None  # the kernel
        self.quantized: str | None = None  # what its linear layers were made at load
        self._load_stock = stock
        self._stock: Any = None
        self._model = model
        self._body = model.base_model if model.base_model is not model else model.get_decoder()
        self._config = model.config.get_text_config(decoder=True)
        self._device = _input_device(model)
        self._cache = self._new_cache()
        self._plan = self._masks_wanted()
        self._embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._mask_dtype = model.dtype
        use_grouped_attention(model)
        if self._device.type == "cpu":
            totals.provide()
        self._reads = False
        self._sight: Sight | None = None
        logits = self._probe()
        if self.kv_bytes_per_slot():
            self._mask_dtype = self._cache.dtype
        # a state holds the whole text before it, not a token
        self.copies_prefixes = bool(self.kv_bytes_per_slot()) and not self.state_bytes(0)
        self._dtype = logits.dtype
        self._width = logits.shape[-1]
        self._kept: Tensor | None = None

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
        """Of the logits."""
        return self._dtype

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the weights: some models give wider logits."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; a learned table cannot go past it, a rotary model gets worse there."""
        limit = getattr(self._config, "max_position_embeddings", None)
        rope = getattr(self._config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # past this length transformers changes the frequencies of the whole batch, whatever the others' lengths
            limit = rope.get("original_max_position_embeddings") or limit
        return int(limit) if limit else None

    @property
    def token_rules(self) -> TokenRules:
        """Rules of tokens that the checkpoint's generation settings ask for."""
        return checkpoint_rules(self._model)

    @property
    def generation(self) -> int:
        """Changes whenever the cache's memory moves."""
        return self._cache.generation

    @property
    def slower_forwards(self) -> int:
        """Forwards so far that took longer than their shape will take again: layers were recorded, or compared."""
        return 0 if self._cache.replays is None else int(self._cache.replays.slower)

    @property
    def capturable(self) -> bool:
        """A forward may become a CUDA graph: all weights lie on one GPU, no hook moves them about, and nothing is read
        back."""
        devices = {parameter.device for parameter in self._model.parameters()}
        hooked = any(hasattr(module, "_hf_hook") for module in self._model.modules())
        return not self._reads and not hooked and len(devices) == 1 and next(iter(devices)).type == "cuda"

    @property
    def by_parts(self) -> bool:
        """All layers of the last forward split their keys into settled slots and tail."""
        return self._sight is not None and self._sight.used == self._cache.attending

    @property
    def module(self) -> nn.Module:
        """The transformers model itself, for comparators."""
        module: nn.Module = self._model
        return module

    def stock(self) -> nn.Module:
        """The model as transformers runs it, for comparators: loaded a second time where ours has packed weights."""
        if self._load_stock is None:
            return self.module
        if self._stock is None:
            self._stock = self._load_stock()
        module: nn.Module = self._stock
        return module

    @property
    def architecture(self) -> str:
        """Class name of the transformers model, for messages."""
        return type(self._model).__name__

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

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Own cache memory for rows x slots, of which `window` lie past the trunk at most (None: all); grows only and
        keeps what is there."""
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

    def keep_states_in(self, precision: torch.dtype) -> None:
        """Hold recurrent states in this dtype, where there are any; before `reserve`."""

    def state_bytes(self, window: int) -> int:
        """Bytes of a row's recurrent states and of the inputs of `window` slots past its trunk; 0 for attention."""
        return self._cache.bytes_of_states(window)

    def use_kernels(self, names: frozenset[str]) -> None:
        """Kernels to run from now on, of those that serve a model. What `move` is given must then be what an iteration
        gives: no target behind its source, and both ascending."""
        self._cache.kernel = "move" in names

    def leave_kernels(self) -> bool:
        """Run without kernels from now on: layers, products and attention, too. What was found of its invariance
        holds no longer. False where no kernel ran."""
        fused = self.fused is not None and bool(self.fused.counts)
        if not (fused or self.attention is not None):
            return False
        if self.fused is not None:
            self.fused.undo()
        self.attention = None
        if self.invariant:
            self.invariant, self.varies = False, "it was checked with kernels, one of which fails"
        return True

    @torch.no_grad()
    def move(self, source: Tensor, target: Tensor, trunk: Tensor) -> None:
        """Copy cache contents slot by slot within each row: source, target [R, T] int64. Recurrent states take in what
        joined the trunk [R]."""
        self._cache.advance(source, target, trunk)

    @torch.no_grad()
    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Write the nodes, return logits [R, n, V] in the model's dtype, [R, n, m] where the head lacks tokens (see
        head_ids); with logits=False the head is not run."""
        rows, count = batch.tokens.shape
        if batch.settled is not None and rows * count < LEAST_ROWS:
            batch = _repeated(batch, -(-LEAST_ROWS // rows))
        output = self._run(self._model if logits else self._body, batch)
        return self._fitted(output.logits.to(self._device))[:, :count] if logits else None

    @torch.no_grad()
    def plain(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of separate sequences [B, T] by an ordinary causal forward, without our cache and masks."""
        logits: Tensor = self._model(input_ids=tokens, use_cache=False, return_dict=True).logits
        return logits.to(self._device)

    def trust(self, found: Verdict) -> None:
        """Take what the check of invariance has found: prompts that begin alike are each read whole where only that
        keeps the bits."""
        self.varies, self.invariant = found.varies, found.varies is None
        if self.invariant:
            if self.copies_prefixes and not found.copies:
                self.told += (NOT_ASKED if found.copies is None else NOT_COPIED,)
            self.copies_prefixes = bool(found.copies)

    def calibrate(self) -> None:
        """Run the random tokens by which `quantize` finds outliers."""
        limit = self.max_positions or CALIBRATION[1]
        shape = CALIBRATION[0], min(CALIBRATION[1], limit)
        tokens = torch.randint(0, self._embeddings, shape, generator=torch.Generator().manual_seed(19))
        self._calibrate(tokens)

    def _calibrate(self, tokens: Tensor) -> None:
        self.plain(tokens)

    def layers_replaced(self) -> None:
        """Its linear layers have become others: what was settled by their kind is asked again, and recordings of them
        are dropped."""
        if self._cache.replays is not None:
            self._cache.replays.forget()

    def _new_cache(self) -> ForestCache:
        """The cache that this kind of model needs."""
        return ForestCache()

    def _masks_wanted(self) -> MaskPlan:
        """The masks that this kind of model needs."""
        return MaskPlan.of(self._config)

    def _run(self, runner: Any, batch: ForestInput) -> Any:
        """The output of `runner`, the model or its body, for the nodes of a batch; the cache holds them then."""
        raise NotImplementedError

    def _sees(self, batch: ForestInput) -> Sight | None:
        """What the layers of a forest's forward may split their keys by; kept for by_parts."""
        kernel, prompt, tail = self.attention, batch.prompt, batch.tail
        settled = None if batch.chain else batch.settled
        fast = settled is None
        if settled is None and kernel is not None and prompt is not None and batch.mask.shape[-1] >= LONG:
            settled, tail = (0,) * len(batch.tokens), batch.mask.shape[-1]
        self._sight = (
            None
            if settled is None
            else Sight(settled, tail, kernel=kernel, prompt=prompt, positions=batch.slot_positions, fast=fast)
        )
        return self._sight

    def _inputs(self, batch: ForestInput) -> Tensor:
        """Token ids [R, n]. A narrower draft knows no id of its target's extra ones: any legal id will do, only
        acceptance suffers."""
        return batch.tokens.clamp(max=self._embeddings - 1)

    def _masks(self, batch: ForestInput, sight: Sight | None) -> Tensor | dict[str, Tensor]:
        kinds = self._plan.kinds
        if not kinds:
            return self._additive("sliding_attention", batch, sight)
        return {kind: self._additive(kind, batch, sight) for kind in {"full_attention", *kinds} & _LAYER_KINDS}

    def _additive(self, kind: str, batch: ForestInput, sight: Sight | None) -> Tensor:
        """[R, 1, n, S], which eager and sdpa add to scores. Never -inf: an empty row would be NaN."""
        seen = self._plan.seen(kind, batch)
        mask = torch.zeros(seen.shape, dtype=self._mask_dtype, device=seen.device)
        additive = mask.masked_fill_(~seen, torch.finfo(self._mask_dtype).min)[:, None]
        if sight is not None:
            sight.add(additive, seen, whole=seen is batch.mask)
        return additive

    def _fitted(self, logits: Tensor) -> Tensor:
        if self._kept is not None:
            return logits[..., : len(self._kept)]
        if self._width <= logits.shape[-1]:
            return logits[..., : self._width]
        return nn.functional.pad(logits, (0, self._width - logits.shape[-1]), value=float("-inf"))

    def _probe(self) -> Tensor:
        """Logits of one token; makes the cache learn the shapes of all layers, then gives its memory back."""
        zero = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        mask = torch.ones((1, 1, 1), dtype=torch.bool, device=self._device)
        with unsupported(self.architecture), torch.no_grad():
            self.reserve(1, 1)
            with HostReads() as reads:
                output = self._run(self._model, ForestInput(zero, zero, zero, mask, zero))
            self._reads = bool(reads.counts)
            if not self.kv_bytes_per_slot() and not self.state_bytes(0):
                raise ValueError("it keeps neither keys and values nor a state that is known here")
        self.release()
        logits: Tensor = output.logits
        return logits


def _input_device(model: Any) -> torch.device:
    """Where token ids go; offloaded embeddings lie on no real device, and are run where accelerate says."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _repeated(batch: ForestInput, count: int) -> ForestInput:
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
        said = " ".join(str(error).split())[:160]
        raise UnsupportedModelError(
            f"{architecture} cannot hold a tree of tokens ({type(error).__name__}: {said}); "
            "use a model whose attention goes by mask and position_ids, such as Llama, Qwen or OPT"
        ) from error
