"""Load a draft head for a loaded target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, PairError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.generation import read_settings
from dsbd_cli.models.checkpoints.loader import check_quantize, device_of, too_small
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.own_rows import OWN_IDS, OwnRows
from dsbd_cli.models.decoder.weights import PlainLinear
from dsbd_cli.models.draft_heads.formats import DraftHeadParts, is_draft_head, read_eagle3, read_mtp, refuse_settings
from dsbd_cli.models.draft_heads.model import AFTER_NORM, BaseDraftHead, DecoderDraftHead
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.ops.reference import DeviceLinear

TRIAL = 24  # tokens of the text by which the convention of layer numbers is found


def names_draft_head(draft: Checkpoint) -> bool:
    """Return whether a draft is a head: the target's own, or a folder that holds one."""
    if draft.spec.in_target:
        return True
    try:
        return draft.path.is_dir() and is_draft_head(draft.path)
    except ModelError as error:
        raise ModelError(f"draft model {draft.spec.source!r} cannot be read: {error}") from None


def load_draft_head(source: Checkpoint, draft: Checkpoint, target: BaseForestModel) -> BaseDraftHead:
    """Return a head that drafts for a target. source: the target's checkpoint. Raises PairError and ModelError, each in
    one line that names the head."""
    spec = draft.spec
    if (unfit := _why_unfit(target, source.spec)) is not None:
        raise PairError(f"{_name(spec)} reads hidden states of the target, but {unfit}")
    if draft.adapters:
        raise PairError(f"{_name(spec)} has an adapter, which a head does not take: drop it")
    if device_of(spec) != target.device:
        raise PairError(f"{_name(spec)} runs where its target does, on {target.device}: name no device for it")
    try:
        model = _loaded(draft, source, target)
        _pack(model, draft)
        logits = model.read(torch.zeros(1, 3, dtype=torch.int64))  # a head that cannot run fails now
        if not bool(logits.isfinite().all()):
            raise ModelError("its logits are no finite numbers, so its weights are damaged: get the files again")
    except PairError as error:
        raise PairError(f"{_name(spec)} does not fit: {error}") from None
    except KeyError as error:
        raise ModelError(f"{_name(spec)} cannot be read: the tensor {error.args[0]} is missing") from None
    except (ModelError, ValueError) as error:
        raise ModelError(f"{_name(spec)} cannot be read: {error}") from None
    return model


def _loaded(draft: Checkpoint, source: Checkpoint, target: BaseForestModel) -> BaseDraftHead:
    """Read a head. Raises what its readers raise."""
    name = draft.spec.source
    if not draft.spec.in_target:
        parts = read_eagle3(draft.path, target)
    elif isinstance(target, DecoderForestModel):
        settings = source.path / "config.json"
        refuse_settings(read_settings(settings) if settings.is_file() else {})
        parts = read_mtp(source.tensors, target)
    else:
        from dsbd_cli.models.draft_heads.transformers_mtp import read_transformers_mtp

        return read_transformers_mtp(source.tensors, target, name)
    model = DecoderDraftHead(target, parts.decoder, parts.layers[0], name, parts.form)
    if parts.ids is None:
        model.fit_width(target.vocab_size)
    else:
        model.spread(parts.ids, target.vocab_size)
        _share_rows(model, parts.ids, source)
    shared = f"; {OWN_IDS}" if model.own_ids_below else ""
    model.form = f"{parts.form}; {_choose_layers(model, parts)}{shared}"
    return model


def _share_rows(model: DecoderDraftHead, ids: Tensor, source: Checkpoint) -> None:
    """Let a head whose LM head is a part of the target's take the rows of other tokens from the target's."""
    target, lm_head = model.target, model.decoder.weights.lm_head
    assert isinstance(lm_head, PlainLinear)
    tables: list[Callable[[], Tensor]] = [lambda: target.embeddings]
    scale = 1.0
    if isinstance(target, DecoderForestModel):
        theirs, scale = target.decoder.weights.lm_head, target.decoder.config.logit_scale
        if isinstance(theirs, DeviceLinear):
            tables.append(lambda: theirs.weight)
        elif source.path.is_dir():
            # the target's packed head is no table any more, but its file still holds one
            tables += [get for name, get in source.tensors.items() if name == "lm_head.weight"]
    for table in tables:
        model.decoder.own_rows = OwnRows.of(lm_head.weights[0], ids, table(), target.weights_dtype, scale)
        if model.own_ids_below:
            return


def _pack(model: BaseDraftHead, draft: Checkpoint) -> None:
    """Pack a head's weights, or quantize them. Raises UsageError where that is not possible."""
    check_quantize(draft, None)
    if not draft.spec.quantizes:
        model.pack()
    elif not model.quantize(str(draft.spec.quantize)):
        raise too_small(draft.spec, _name(draft.spec))


def _choose_layers(model: DecoderDraftHead, parts: DraftHeadParts) -> str:
    """Choose the layers whose hidden states let the head predict the target's own text best. Return the choice in
    words."""
    if not parts.layers[0]:
        return AFTER_NORM
    best, other = 0, ""
    if len(parts.layers) > 1:
        text = _greedy_text(model.target)
        losses = []
        for layers in parts.layers:
            model.read_from(layers)
            losses.append(_loss(model, text))
        best = min(range(len(losses)), key=losses.__getitem__)
        model.read_from(parts.layers[best])
        other = f" (loss {losses[best]:.2f} on a text of the target; {losses[1 - best]:.2f} one layer off)"
    return f"it reads the states after {', '.join(map(str, parts.layers[best]))} layers{other}"


@torch.inference_mode()
def _greedy_text(target: BaseForestModel) -> list[int]:
    """Return a short greedy text of the target, with the token that it begins from."""
    eos = target.settings.config.get_text_config(decoder=True).eos_token_id
    text = [eos if isinstance(eos, int) and 0 <= eos < target.vocab_size else 0]
    for _ in range(min(TRIAL, target.max_positions or TRIAL) - 1):
        text.append(int(target.plain(torch.tensor([text]))[0, -1].argmax()))
    return text


@torch.inference_mode()
def _loss(model: DecoderDraftHead, text: Sequence[int]) -> float:
    """Return the mean loss, in nats, of the text under the head, where it reads true states alone; tokens that the
    head lacks are left out."""
    tokens = torch.tensor([text], device=model.device)
    logits = model.read(tokens)
    wide = torch.full((len(text), model.vocab_size), float("-inf"), device=model.device)
    columns = slice(None) if model.lm_head_ids is None else model.lm_head_ids
    wide[:, columns] = logits[0].float()
    # the first token has no state before it
    said: Tensor = wide.log_softmax(-1)[1:-1].gather(1, tokens[0, 2:, None])
    there = said[said > float("-inf")]
    return float(-there.mean()) if len(there) else 0.0


def _why_unfit(target: BaseForestModel, spec: ModelSpec) -> str | None:
    """Return why no head can read this target; None where one can."""
    if target.has_encoder:
        return "a model with an encoder has none that a head was made for"
    if not target.kv_bytes_per_slot():
        return "all layers of this one are recurrent: no slot holds a token, and a head attends to tokens"
    if spec.tensor_parallel > 1 or spec.device_map is not None:
        return "this one is spread over several processes or devices (tensor_parallel, device_map)"
    return None


def _name(spec: ModelSpec) -> str:
    return "the target's own MTP layer" if spec.in_target else f"draft head {spec.source!r}"
