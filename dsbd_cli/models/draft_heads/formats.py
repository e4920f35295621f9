"""Readers of draft heads: EAGLE-3 as `speculators` writes it, EAGLE-3 in its raw form, MTP layers inside a checkpoint.

Settings and tensors that are not understood are refused by name, because a wrong head never shows in a text, only in
its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.errors import ModelError, PairError, shorten
from dsbd_cli.models.checkpoints.checkpoint import Tensors, quiet, read_tensors
from dsbd_cli.models.checkpoints.generation import read_settings
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import KNOWN, decoder_config_of
from dsbd_cli.models.decoder.load import decoder_ops
from dsbd_cli.models.decoder.weights import DecoderWeights, PlainLinear, WeightReader
from dsbd_cli.models.draft_heads.model import DraftHeadDecoder, Eagle3Decoder, Eagle3Parts, MtpDecoder, MtpParts
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.ops.interface import Linear

SPECULATORS = "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
VERSION = "dsbd_version"  # in the config of a head that `dsbd distill` made
MTP_LM_HEAD = "shared_head.head.weight"
# settings of MTP layers, each with the only value that is known here; all others must be off
KNOWN_MTP = {"num_mtp_layers": 1, "mtp_num_hidden_layers": 1, "mtp_layer_types": ["full_attention"]}
PICKLE = "pytorch_model.bin"
# settings of a head itself, in addition to those of its layer
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OWN = frozenset((*FLAGS, LAYER_IDS, "draft_vocab_size", "target_hidden_size", "use_aux_hidden_state"))
# settings that do not change what a head computes
IDLE = frozenset(
    """
    architectures auto_map dsbd_version dtype eagle_config embed_requires_grad enable_sp_ulysses
    has_no_defaults_at_init model_type num_aux_hidden_states speculators_config speculators_model_type
    speculators_version target_model_type torch_dtype transformer_layer_config transformers_version
    _attn_implementation _name_or_path
    """.split()
)
LEFT_OUT = ("layer_types", "max_window_layers", "model_type", "num_hidden_layers", "sliding_window")
LAYER = ("input_layernorm.", "post_attention_layernorm.", "self_attn.", "mlp.")
UNUSED = frozenset(("t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"))


@dataclass(frozen=True, slots=True)
class DraftHeadParts:
    """A head that was read and fits its target.

    Attributes:
        decoder: on the target's device, with plain weights.
        ids: [m] int64, ascending, tokens of the columns of its logits; None: all tokens.
        layers: choices of layers of the target after which hidden states are taken, the documented one first.
        form: a description of the head, for messages.
    """

    decoder: DraftHeadDecoder
    ids: Tensor | None
    layers: tuple[tuple[int, ...], ...]
    form: str


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors that an MTP layer has and an ordinary layer lacks, without `.weight`. form: a description of
    the layer, for messages."""

    form: str
    fc: str
    token_norm: str
    state_norm: str
    norm: str


class DraftHeadTensors(Mapping[str, Callable[[], Tensor]]):
    """A checkpoint's tensors under the names of a decoder's first layer. It records which tensors were read, so that
    the rest can be refused."""

    def __init__(self, tensors: Tensors, name: Callable[[str], str]) -> None:
        self._tensors, self.taken = {name(full): get for full, get in tensors.items()}, set[str]()

    def __getitem__(self, name: str) -> Callable[[], Tensor]:
        self.taken.add(name)
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def refuse_rest(self, used: frozenset[str] = frozenset()) -> None:
        """Raise ModelError for a tensor that was not read. used: names that may be left."""
        rest = sorted(name for name in self._tensors.keys() - self.taken - used if "rotary_emb" not in name)
        if rest:
            raise ModelError(f"the tensor {rest[0]} is not known here")


def is_draft_head(folder: Path) -> bool:
    """Return whether a folder holds a draft head rather than a model, by its config and the names of its tensors."""
    config = read_settings(folder / "config.json") if (folder / "config.json").is_file() else {}
    if SPECULATORS in config or "Eagle3" in str(config.get("architectures")):
        return True
    return config.get("num_hidden_layers") == 1 and any("midlayer." in name for name in _tensors(folder))


def read_eagle3(folder: Path, target: BaseForestModel) -> DraftHeadParts:
    """Read an EAGLE-3 head. Raises ModelError for what is not understood, PairError for another target's head."""
    config = read_settings(folder / "config.json")
    kind = config.get(SPECULATORS)
    if kind not in (None, "eagle3"):
        raise ModelError(f"its form is {kind}, which is not known here: eagle3 is")
    for name in ("transformer_layer_config", "eagle_config"):
        if not isinstance(config.get(name), dict | None):
            raise ModelError(f"its config says {name} = {shorten(config[name])}, which is no object")
    layer = dict(config.get("transformer_layer_config") or config)
    own = {**config, **(config.get("eagle_config") or {})}
    _refuse_unknown(own, {*OWN, *IDLE, *(KNOWN if kind is None else ())})
    _refuse_unknown(layer, {*KNOWN, *IDLE, *(OWN if kind is None else ())})
    if own.get("use_aux_hidden_state") is False:
        raise ModelError("it takes no hidden states of inner layers (use_aux_hidden_state): EAGLE-1 is not known here")
    decoder_config = layer_config(layer)
    theirs, vocabulary = target.hidden_size, target.vocab_size
    if own.get("target_hidden_size") not in (None, theirs):
        raise PairError(f"it is for a target of width {own['target_hidden_size']}, and the target's is {theirs}")
    if decoder_config.vocabulary != vocabulary:
        raise PairError(
            f"it is for a vocabulary of {decoder_config.vocabulary} tokens, and the target's is {vocabulary}"
        )
    tensors = DraftHeadTensors(
        _tensors(folder), lambda name: name.removeprefix("model.").replace("midlayer.", "layers.0.").removesuffix("_")
    )
    layers = _layer_ids(own.get(LAYER_IDS), target.layer_count, speculators=kind is not None)
    if VERSION in config:  # it names layers as documented
        layers = layers[:1]
    flags = {name: bool(own.get(name)) for name in FLAGS}
    decoder, ids = _eagle3(tensors, decoder_config, target, len(layers[0]), flags, own.get("draft_vocab_size"))
    tensors.refuse_rest(UNUSED)
    kept = "all tokens" if ids is None else f"{len(ids)} of {vocabulary} tokens"
    said = ", ".join(name for name in FLAGS if flags[name])
    form = f"EAGLE-3, {'speculators' if kind else 'raw'} form{_verifier(config)}, {kept}" + (
        f", {said}" if said else ""
    )
    return DraftHeadParts(decoder, ids, layers, form)


def _verifier(config: Mapping[str, Any]) -> str:
    """Return for which target a head was made, in words, where its config says so. Another target of the same sizes
    takes it, too."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return f" for {shorten(name)}" if isinstance(name, str) and name else ""


def read_mtp(tensors: Tensors, target: DecoderForestModel) -> DraftHeadParts:
    """Read the MTP layer of the target's own checkpoint. Raises ModelError where there is none."""
    config, body = target.decoder.config, target.decoder.weights
    names, mtp_tensors = find_mtp(tensors, config.layers)
    one_layer = replace(config, layers=1, windows=(None,), rotary=(config.rotary[-1],), mixers=(), mixer=None)
    reader = WeightReader(one_layer, mtp_tensors, target.weights_dtype)
    weights = DecoderWeights(
        body.table, [reader.layer(0)], reader.norm(f"{names.norm}.weight", config.hidden), body.lm_head, body.dtype
    )
    parts = MtpParts(
        _product(reader, names.fc, 2 * config.hidden),
        *(
            reader.norm(f"{name}.weight", config.hidden).to(target.device)
            for name in (names.token_norm, names.state_norm)
        ),
    )
    if MTP_LM_HEAD in mtp_tensors:
        lm_head = reader.tensor(MTP_LM_HEAD, config.vocabulary, config.hidden)
        weights.lm_head = PlainLinear([lm_head], [None])
    mtp_tensors.refuse_rest(frozenset(("embed_tokens.weight",)))
    decoder = MtpDecoder(one_layer, weights, _ops(one_layer, target), parts)
    _move_to_target(decoder, target)
    return DraftHeadParts(decoder, None, ((),), names.form)


def refuse_settings(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for settings of a target's MTP layers that are not known here."""
    for name, value in settings.items():
        if "mtp" in name and value and value != KNOWN_MTP.get(name):
            raise ModelError(f"the target's config says {name} = {value!r}, which is not known here")


def find_mtp(tensors: Tensors, layers: int) -> tuple[MtpNames, DraftHeadTensors]:
    """Return the MTP layer that follows the `layers` layers of a checkpoint: the names of its parts, and its tensors
    under the names of a decoder's first layer. Raises ModelError where there is none, or several."""
    deep, second = f"model.layers.{layers}.", f"model.layers.{layers + 1}."
    if "mtp.fc.weight" in tensors:
        prefix, inner = "mtp.", ""
        names = MtpNames("MTP layer (mtp.*)", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    elif f"{deep}eh_proj.weight" in tensors:
        prefix, inner = deep, "layers.0."
        names = MtpNames(f"MTP layer ({deep}*)", "eh_proj", "enorm", "hnorm", "shared_head.norm")
    else:
        raise ModelError("the checkpoint has none (no mtp.fc, and no eh_proj behind the last layer)")
    if any(name.startswith(("mtp.layers.1.", second)) for name in tensors):
        raise ModelError("it has several MTP layers, and one is known here")
    own = {name.removeprefix(prefix): get for name, get in tensors.items() if name.startswith(prefix)}
    return names, DraftHeadTensors(own, lambda name: inner + name if name.startswith(LAYER) else name)


def _eagle3(
    tensors: DraftHeadTensors,
    config: DecoderConfig,
    target: BaseForestModel,
    taps: int,
    flags: Mapping[str, bool],
    rows: Any,
) -> tuple[Eagle3Decoder, Tensor | None]:
    """Return the decoder of a head and the tokens of its columns (None: all tokens)."""
    theirs, vocabulary = target.hidden_size, target.vocab_size
    reader = WeightReader(config, tensors, target.weights_dtype)
    table, width = target.embeddings, config.hidden
    if "embed_tokens.weight" in tensors:
        table = reader.tensor("embed_tokens.weight", config.vocabulary, width).to(target.device)
    elif width != theirs:
        raise PairError(f"it has no embeddings and is {width} wide, and the target's are {theirs} wide")
    ids, order = _lm_head_tokens(tensors, vocabulary, rows)
    if "lm_head.weight" in tensors:
        lm_head = reader.tensor("lm_head.weight", vocabulary if ids is None else len(ids), width)
        last: Linear = PlainLinear([lm_head if order is None else lm_head[order]], [None])
    elif ids is None and width == theirs and isinstance(target, DecoderForestModel):
        last = target.decoder.weights.lm_head
    else:
        raise ModelError("lm_head.weight is missing")
    parts = Eagle3Parts(
        fc=_product(reader, "fc", taps * theirs),
        hidden_norm=reader.norm("layers.0.hidden_norm.weight", width).to(target.device),
        joined_norm=reader.norm("input_norm.weight", taps * theirs).to(target.device)
        if flags["norm_before_fc"]
        else None,
        tap_norms=[reader.norm(f"fc_norm.{number}.weight", theirs).to(target.device) for number in range(taps)]
        if flags["fc_norm"]
        else (),
        norm_before_residual=flags["norm_before_residual"],
        norm_output=flags["norm_output"],
    )
    weights = DecoderWeights(
        table, [reader.layer(0, 2 * width)], reader.norm("norm.weight", width), last, target.weights_dtype
    )
    decoder = Eagle3Decoder(config, weights, _ops(config, target), parts)
    _move_to_target(decoder, target)
    return decoder, ids


def _lm_head_tokens(tensors: DraftHeadTensors, vocabulary: int, rows: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the tokens [m] of the head's columns, ascending, and the order [m] of its rows that gives them; None for
    both where the head has all tokens."""
    if "d2t" not in tensors:
        if rows not in (None, vocabulary):
            raise ModelError(f"it has {rows} of {vocabulary} tokens, but no d2t, which would say which")
        return None, None
    offsets = tensors["d2t"]().to(torch.int64)
    if offsets.ndim != 1 or not len(offsets):
        raise ModelError(f"d2t has the shape {list(offsets.shape)}, but must be a list of offsets")
    ids = torch.arange(len(offsets)) + offsets  # d2t holds offsets, not ids
    if rows not in (None, len(ids)):
        raise ModelError(f"d2t has {len(ids)} tokens, but its config says {rows}")
    ids, order = ids.sort()
    if not (int(ids[0]) >= 0 and bool((ids.diff() > 0).all())):
        raise ModelError("d2t does not give different tokens")
    if int(ids[-1]) >= vocabulary:
        raise PairError(f"it has the token {int(ids[-1])}, and the target's vocabulary has {vocabulary} tokens")
    if "t2d" in tensors:
        kept = tensors["t2d"]().to(torch.bool)
        if len(kept) != vocabulary:
            raise PairError(f"t2d has {len(kept)} tokens, and the target's vocabulary has {vocabulary}")
        if not torch.equal(kept.nonzero().flatten(), ids):
            raise ModelError("d2t and t2d name different tokens")
    return ids, order


def _layer_ids(ids: Any, layers: int, *, speculators: bool) -> tuple[tuple[int, ...], ...]:
    """Return choices of how many layers of the target to take hidden states after, the documented one first.

    Ids name layers whose inputs are taken (vLLM, speculators) or layers whose outputs are (SGLang, SpecForge).
    """
    if ids is None:
        ids = (2, layers // 2, layers - 3)
        choices = [0]
    elif isinstance(ids, list) and ids and all(type(layer) is int for layer in ids):
        choices = [0, 1] if speculators else [1, 0]
    else:
        raise ModelError(f"its config says {LAYER_IDS} = {shorten(ids)}, which names no layers")
    choices_of_ids = [tuple(layer + more for layer in ids) for more in choices]
    fitting = tuple(choice for choice in choices_of_ids if min(choice) >= 0 and max(choice) <= layers)
    if not fitting:
        raise PairError(f"it reads the layers {', '.join(map(str, ids))}, and the target has {layers}")
    return fitting


def layer_config(settings: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a head's single layer. Raises ModelError."""
    from transformers import AutoConfig

    kind = settings.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ModelError(f"its layer is of {kind}, which is not known here: llama and qwen3 are")
    if settings.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"it has {settings['num_hidden_layers']} layers, and one is known here")
    kinds = settings.get("layer_types")
    if settings.get("use_sliding_window") or (isinstance(kinds, list) and kinds[:1] == ["sliding_attention"]):
        raise ModelError("its layer has a sliding window, which is not known here")
    left = {name: value for name, value in settings.items() if name in KNOWN and name not in LEFT_OUT}
    try:
        with quiet():
            config = decoder_config_of(AutoConfig.for_model(kind, **left, num_hidden_layers=1))
    except Exception as error:  # of transformers' own checks
        raise ModelError(f"its config is wrong: {' '.join(str(error).split())[:160]}") from None
    if isinstance(config, str):
        raise ModelError(config)
    return replace(config, windows=(None,))


def _refuse_unknown(settings: Mapping[str, Any], read: Collection[str]) -> None:
    for name, value in sorted(settings.items()):
        if name not in read and value is not None and value is not False:
            raise ModelError(f"its config says {name} = {value!r}, which is not known here")


def _product(reader: WeightReader, name: str, inputs: int) -> Linear:
    return PlainLinear([reader.tensor(f"{name}.weight", reader.config.hidden, inputs)], [None])


def _move_to_target(decoder: DraftHeadDecoder, target: BaseForestModel) -> None:
    """Move a head's weights to the target's device."""
    decoder.weights.to(target.device)
    decoder.parts.fc.to(target.device)  # type: ignore[attr-defined]  # a plain one


def _ops(config: DecoderConfig, target: BaseForestModel) -> Any:
    return decoder_ops(config, target.device, target.weights_dtype)


def _tensors(folder: Path) -> Tensors:
    """Return the tensors of a folder, from safetensors files or a pickle of plain tensors."""
    from safetensors import SafetensorError

    try:
        tensors = read_tensors(folder)
        if not tensors and (folder / PICKLE).is_file():
            state = torch.load(folder / PICKLE, map_location="cpu", weights_only=True, mmap=True)
            tensors = {name: partial(state.__getitem__, name) for name in state}
    except UnpicklingError:
        raise ModelError(
            f"its weights cannot be read: {PICKLE} holds more than tensors, which could run code: get them as "
            "safetensors"
        ) from None
    except (OSError, EOFError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"its weights cannot be read: {' '.join(str(error).split())[:160]}") from None
    return tensors
