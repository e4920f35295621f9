"""Models of transformers as ForestModels: all models that our own decoder does not know.

A subclass calls one forward: see causal.py.

Shape letters: R rows, n nodes of a forward, S active cache slots, V vocabulary, B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.attention.metadata import AttentionMetadata
from dsbd_cli.models.cache import ForestCache
from dsbd_cli.models.checkpoints.generation import checkpoint_rules, positions_of
from dsbd_cli.models.forest_model import (
    BaseForestModel,
    HiddenStateTap,
    ModelSize,
    address,
    calibration_tokens,
    unsupported,
)
from dsbd_cli.models.transformers_backend.attention import use_grouped_attention
from dsbd_cli.models.transformers_backend.host_reads import HostReadCounter
from dsbd_cli.models.transformers_backend.patching import PackedExperts, PackedLinear, QuantizedLinear
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.select import MODEL, ops_for

# Layer kinds whose state is one key and one value per token, so that a tree of tokens can be held.
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Kinds of models whose forward has no window: their `sliding_window` only limits the cache that transformers makes.
_WITHOUT_WINDOW = ("moshi",)
LAST = -1  # used as a number of layers, for the hidden state after the final norm


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """The masks that a model takes.

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
        used = getattr(config, "use_sliding_window", None) is not False and config.model_type not in _WITHOUT_WINDOW
        window = getattr(config, "sliding_window", None) if used else None
        chunk = getattr(config, "attention_chunk_size", None)
        if kinds in ((), ("full_attention",)):
            return cls((), None if kinds else window, None)
        return cls(kinds, window, chunk)

    def seen(self, kind: str, batch: ForestInput) -> Tensor:
        """Return which slots each node sees in the layers of one kind, [R, n, S] bool."""
        if kind == "full_attention":
            return batch.mask
        here, there = batch.positions[:, :, None], batch.slot_positions[:, None, :]
        if kind == "chunked_attention" and self.chunk is not None:
            return batch.mask & (here // self.chunk == there // self.chunk)
        return batch.mask if self.window is None else batch.mask & (here - there < self.window)


class TransformersForestModel(BaseForestModel):
    """A loaded transformers model over a packed forest. Construction runs one token through it to learn its shapes.

    A subclass implements `_call`, one forward. Raises UnsupportedModelError when the architecture keeps more than keys
    and values or cannot take a forest's mask.
    """

    _cache: ForestCache

    def __init__(self, model: Any, name: str, stock: Callable[[], Any] | None = None) -> None:
        """stock: loads the model once more, as it was before its weights were packed."""
        self._model = model
        self._body = model.base_model if model.base_model is not model else model.get_decoder()
        self._config = model.config.get_text_config(decoder=True)
        device = _input_device(model)
        super().__init__(name, device, self._new_cache(device), stock)
        self._ops = ops_for(device, model.dtype, MODEL)
        self._plan = self._masks_wanted()
        self._mask_dtype = model.dtype
        with unsupported(self.architecture):
            use_grouped_attention(model)
        self._waits_for_host = False
        self._noted_hidden_states: dict[int, Tensor] = {}  # hidden states of the last forward, by layers before them
        self._hooks: list[RemovableHandle] = []
        logits = self._probe()
        if self.kv_bytes_per_slot():
            self._mask_dtype = self._cache.dtype
        # a state holds the whole text before it, not a token
        self.copies_prefixes = bool(self.kv_bytes_per_slot()) and not self.recurrent_bytes(0)
        self._dtype = logits.dtype
        self._width = logits.shape[-1]

    @property
    def ops(self) -> Ops:
        return self._ops

    @property
    def settings(self) -> Any:
        """The transformers model."""
        return self._model

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights; some models give logits of a wider dtype."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def max_positions(self) -> int | None:
        """Positions the model was made for; a learned table cannot go past it, a rotary model gets worse there."""
        return positions_of(self._config)

    @property
    def embeddings(self) -> Tensor:
        table: Tensor = self._model.get_input_embeddings().weight
        return table

    @property
    def hidden_size(self) -> int:
        return int(self._config.hidden_size)

    @property
    def layer_count(self) -> int:
        return int(self._config.num_hidden_layers)

    @property
    def token_rules(self) -> TokenRules:
        """Token rules that the checkpoint's generation settings ask for."""
        return checkpoint_rules(self._model)

    @property
    def capturable(self) -> bool:
        """Whether a forward can be captured as a CUDA graph: all weights are on one GPU, no hook moves them, and
        nothing is read back."""
        devices = {parameter.device for parameter in self._model.parameters()}
        hooked = any(hasattr(module, "_hf_hook") for module in self._model.modules())
        return not self._waits_for_host and not hooked and len(devices) == 1 and next(iter(devices)).type == "cuda"

    @property
    def by_parts(self) -> bool:
        """Whether all layers of the last forward split their keys into prompt slots and suffix."""
        return self._all_split(self._cache.attending)

    @property
    def module(self) -> nn.Module:
        """The transformers model itself, for comparisons."""
        module: nn.Module = self._model
        return module

    def stock(self) -> nn.Module:
        """Return the model as transformers runs it, for comparisons. It is loaded a second time where ours has packed
        weights."""
        return self.module if self._load_stock is None else super().stock()

    @property
    def architecture(self) -> str:
        """Class name of the transformers model, for messages."""
        return type(self._model).__name__

    @property
    def size(self) -> ModelSize:
        """The sizes of the model. An embedding table that is not the LM head, too, is looked up and does not count as
        read. All experts of a mixture count as read."""
        # weights of packed layers are no parameters
        layers = [module for module in self._model.modules() if isinstance(module, PackedLinear | QuantizedLinear)]
        experts = [module.forward for module in self._model.modules() if isinstance(module.forward, PackedExperts)]
        packed = {address(part): part for layer in (*layers, *experts) for part in layer.packed}
        weights = {**packed, **{weight.data_ptr(): weight for weight in self._model.parameters()}}.values()
        buffers = {buffer.data_ptr(): buffer for buffer in self._model.buffers()}.values()
        held = sum(tensor.numel() * tensor.element_size() for tensor in (*weights, *buffers))
        count = sum(weight.numel() for weight in weights)
        table = self._model.get_input_embeddings().weight
        lm_head = getattr(self._model.get_output_embeddings(), "weight", None)
        if table.data_ptr() in packed or (lm_head is not None and lm_head.data_ptr() == table.data_ptr()):
            return ModelSize(held, held, 2 * count)
        return ModelSize(held, held - table.numel() * table.element_size(), 2 * (count - table.numel()))

    def leave_kernels(self) -> bool:
        if self.attention is None:
            return False
        self.attention = None
        self._distrust_kernels()
        return True

    @torch.no_grad()
    def plain(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] of separate sequences [B, T] by an ordinary causal forward, without our cache and
        masks."""
        logits: Tensor = self._model(input_ids=tokens, use_cache=False, return_dict=True).logits
        return logits.to(self._device)

    def calibrate(self) -> None:
        """Run the random tokens by which `quantize` finds outliers."""
        self.plain(calibration_tokens(len(self.embeddings), self.max_positions))

    def tap(self, tap: HiddenStateTap | None) -> None:
        stack = getattr(self._body, "layers", None)
        if tap is not None and tap.layers and not (isinstance(stack, nn.ModuleList) and len(stack) == self.layer_count):
            raise UnsupportedModelError(f"{self.architecture} has no plain list of layers to take hidden states after")
        super().tap(tap)
        for hook in self._hooks:
            hook.remove()
        self._noted_hidden_states.clear()
        self._hooks = [] if tap is None else self._hook_hidden_states(tap.layers)

    def _hook_hidden_states(self, layers: tuple[int, ...]) -> list[RemovableHandle]:
        """Register and return hooks that note hidden states after these numbers of layers in each forward; empty: after
        the final norm."""

        def note(number: int) -> Callable[[nn.Module, Any, Any], None]:
            def noted(module: nn.Module, inputs: Any, output: Any) -> None:
                keep(number, output if isinstance(output, Tensor) else output[0])

            return noted

        def note_input(module: nn.Module, inputs: Any, named: Any) -> None:
            keep(0, inputs[0] if inputs else named["hidden_states"])

        def keep(number: int, hidden: Tensor) -> None:
            if hidden.dim() != 3 or hidden.shape[-1] != self.hidden_size:
                raise UnsupportedModelError(f"{self.architecture} has layers that give no plain hidden states")
            self._noted_hidden_states[number] = hidden

        if not layers:
            return [self._body.register_forward_hook(note(LAST))]
        stack = self._body.layers
        return [
            stack[number - 1].register_forward_hook(note(number))
            if number
            else stack[0].register_forward_pre_hook(note_input, with_kwargs=True)
            for number in dict.fromkeys(layers)
        ]

    def layers_replaced(self) -> None:
        """Derive anew what depends on the kind of the linear layers, which have been replaced."""

    def _new_cache(self, device: torch.device) -> ForestCache:
        """Return the cache that this kind of model needs."""
        return ForestCache()

    def _masks_wanted(self) -> MaskPlan:
        """Return the masks that this kind of model needs."""
        return MaskPlan.of(self._config)

    def _call(self, runner: Any, batch: ForestInput) -> Any:
        """Return the output of `runner`, the model or its body, for the nodes of a batch, and write these to the
        cache."""
        raise NotImplementedError

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        output = self._call(self._model if logits else self._body, batch)
        if self._tap is not None:
            self._store_hidden_states([self._noted_hidden_states[number] for number in self._tap.layers or (LAST,)])
        values: Tensor | None = output.logits if logits else None
        return values

    def _masks(self, batch: ForestInput, metadata: AttentionMetadata) -> Tensor | dict[str, Tensor | None]:
        kinds = self._plan.kinds
        if not kinds:
            return self._additive("sliding_attention", batch, metadata)
        return {  # recurrent layers take none
            kind: self._additive(kind, batch, metadata) if kind in _LAYER_KINDS else None
            for kind in dict.fromkeys(("full_attention", *kinds))
        }

    def _additive(self, kind: str, batch: ForestInput, metadata: AttentionMetadata) -> Tensor:
        """Return the mask [R, 1, n, S] that eager and sdpa add to scores."""
        seen = self._plan.seen(kind, batch)
        return metadata.add(seen, self._mask_dtype, whole=seen is batch.mask).additive

    def _probe(self) -> Tensor:
        """Return the logits of one token. The cache learns the shapes of all layers from it, then its memory is
        freed."""
        zero = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        mask = torch.ones((1, 1, 1), dtype=torch.bool, device=self._device)
        with unsupported(self.architecture), torch.no_grad():
            self.reserve(1, 1)
            with HostReadCounter() as reads:
                output = self._call(self._model, ForestInput(zero, zero, zero, mask, zero))
            self._waits_for_host = bool(reads.counts)
            if not self.kv_bytes_per_slot() and not self.recurrent_bytes(0):
                raise ValueError("it keeps neither keys and values nor a state that is known here")
        self.release()
        logits: Tensor = output.logits
        return logits


def _input_device(model: Any) -> torch.device:
    """Return the device of token ids. Offloaded embeddings are on no real device, and are run where accelerate says."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
