"""MTP layers of targets that transformers runs: a model of the target's own class that has this layer alone.

So gated attention, latent attention and mixtures of experts are computed as in the target, and the layer is packed,
masked and cached as every model of the Transformers backend is. In place of embeddings it is given token and state
joined.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError, one_line
from dsbd_cli.models.checkpoints.checkpoint import Tensors, quiet
from dsbd_cli.models.draft_heads.formats import (
    MTP_LM_HEAD,
    DraftHeadTensors,
    MtpNames,
    find_mtp,
    refuse_settings,
)
from dsbd_cli.models.draft_heads.model import AFTER_NORM, BaseDraftHead, without_first
from dsbd_cli.models.forest_model import BaseForestModel, HiddenStateTap, ModelSize, address
from dsbd_cli.models.transformers_backend.base import LAST
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.patching import pack, quantize

TABLES = ("model.embed_tokens.weight", "lm_head.weight")  # the target's own are used


class TransformersDraftHead(BaseDraftHead, CausalForestModel):
    """An MTP layer and the target of transformers whose states it reads and guesses. States are those after the final
    norm.

    model: of the target's class, with that layer alone, and with `mtp_fc`, `mtp_token_norm` and `mtp_state_norm`, which
    join token and state.
    """

    def __init__(self, target: BaseForestModel, model: Any, name: str, form: str) -> None:
        self._target, self.form = target, f"{form}; {AFTER_NORM}"
        target.tap(HiddenStateTap((), target.hidden_size, lambda taken: taken[0]))
        super().__init__(model, name)
        target.release()
        self._hook_hidden_states(())

    @property
    def architecture(self) -> str:
        return self.form

    @property
    def size(self) -> ModelSize:
        size = super().size
        theirs = {address(tensor) for tensor in _tables(self._target.settings)}
        shared = sum(tensor.nbytes for tensor in _tables(self._model) if address(tensor) in theirs)
        return replace(size, held_bytes=size.held_bytes - shared)

    def pack(self) -> None:
        pack(self.module)

    def quantize(self, weight_format: str) -> int:
        made = quantize(self.module, self._read_random, weight_format)
        self.pack()
        self.layers_replaced()
        return made

    def _call(self, runner: Any, batch: ForestInput, embedded: Tensor | None = None) -> Any:
        """Run the layer over nodes joined with the states of their parents."""
        model, ids = self._model, self._ids_in_table(batch)
        token, state = (
            model.mtp_token_norm(model.get_input_embeddings()(ids)),
            model.mtp_state_norm(self._parents(batch)),
        )
        return super()._call(runner, without_first(batch), model.mtp_fc(torch.cat((token, state), -1)))

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        output = super()._run(batch, logits=logits)
        if output is not None:
            self._guess(batch, self._noted_hidden_states[LAST])
        return output


def _tables(model: Any) -> list[Tensor]:
    """Return the memory of a model's embeddings and of its LM head."""
    lm_head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight, *getattr(lm_head, "packed", [lm_head.weight])]
    return list({address(table): table for table in tables}.values())


def read_transformers_mtp(tensors: Tensors, target: BaseForestModel, name: str) -> TransformersDraftHead:
    """Read the MTP layer of such a target's own checkpoint. Raises ModelError where there is none, or where it is
    not understood."""
    names, mtp_tensors = find_mtp(tensors, target.layer_count)
    theirs = target.settings
    model = _one_layer(mtp_tensors, names, theirs, target)
    own_lm_head = MTP_LM_HEAD in mtp_tensors
    model.set_input_embeddings(theirs.get_input_embeddings())
    lm_head = _linear(mtp_tensors, MTP_LM_HEAD, target) if own_lm_head else theirs.get_output_embeddings()
    model.set_output_embeddings(lm_head)
    mtp_tensors.refuse_rest(frozenset(("embed_tokens.weight",)))
    model.eval().requires_grad_(False).to(target.device)
    head = TransformersDraftHead(target, model, name, names.form)
    head.fit_width(target.vocab_size)
    return head


def _one_layer(mtp_tensors: DraftHeadTensors, names: MtpNames, theirs: Any, target: BaseForestModel) -> Any:
    """Return a model of the target's class with the MTP layer alone, whose embeddings and LM head are stand-ins."""
    config = theirs.config
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("its weights are quantised, which is not known here")
    if config.get_text_config(decoder=True) is not config:
        raise ModelError(f"{type(theirs).__name__} is not a model of text alone")
    refuse_settings(config.to_dict())
    layer = [
        name_of_tensor
        for name_of_tensor in mtp_tensors
        if name_of_tensor.startswith("layers.0.") and "rotary_emb" not in name_of_tensor
    ]
    state = {f"model.{name_of_tensor}": mtp_tensors[name_of_tensor]() for name_of_tensor in layer}
    state["model.norm.weight"] = mtp_tensors[f"{names.norm}.weight"]()
    sparse = any(".mlp.experts." in name_of_tensor for name_of_tensor in layer)
    with quiet():
        try:
            model, report = type(theirs).from_pretrained(
                None,
                config=_config(config, sparse=sparse),
                state_dict=state,
                dtype=target.weights_dtype,
                attn_implementation=getattr(theirs, "stock_attention", None),
                output_loading_info=True,
            )
        except (ValueError, RuntimeError, AttributeError, TypeError) as error:
            reason = one_line(error)
            raise ModelError(f"{type(theirs).__name__} cannot be made of its layer: {reason}") from None
    for what, keys in (("missing", report["missing_keys"]), ("not known here", report["unexpected_keys"])):
        if rest := sorted(set(keys) - set(TABLES)):
            raise ModelError(f"the tensor {rest[0].removeprefix('model.')} is {what}")
    hidden = target.hidden_size
    model.mtp_fc = _linear(mtp_tensors, f"{names.fc}.weight", target, 2 * hidden)
    for attribute, name in (("mtp_token_norm", names.token_norm), ("mtp_state_norm", names.state_norm)):
        norm = copy.deepcopy(model.base_model.norm)
        norm.weight = nn.Parameter(_tensor(mtp_tensors, f"{name}.weight", (hidden,)).to(norm.weight.dtype))
        setattr(model, attribute, norm)
    return model


def _config(config: Any, *, sparse: bool) -> Any:
    """Return the config of a model with the MTP layer alone. sparse: the layer has a mixture of experts."""
    settings = copy.deepcopy(config)
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "vocab_size": 1,  # of the stand-ins
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        if getattr(settings, name, None) is not None:
            setattr(settings, name, value)
    return settings


def _linear(mtp_tensors: DraftHeadTensors, name: str, target: BaseForestModel, inputs: int | None = None) -> nn.Linear:
    """Return a linear layer of the head; without `inputs` it is an LM head."""
    hidden = target.hidden_size
    shape = (target.vocab_size, hidden) if inputs is None else (hidden, inputs)
    made = nn.Linear(1, 1, bias=False, device="meta")
    made.weight = nn.Parameter(_tensor(mtp_tensors, name, shape).to(target.weights_dtype))
    made.out_features, made.in_features = shape
    return made


def _tensor(mtp_tensors: DraftHeadTensors, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor. Raises KeyError where it is missing, ModelError where it has another shape."""
    tensor = mtp_tensors[name]()
    if tensor.shape != shape:
        sizes = [" x ".join(map(str, size)) for size in (tensor.shape, shape)]
        raise ModelError(f"the tensor {name} is {sizes[0]}, not {sizes[1]}")
    return tensor
