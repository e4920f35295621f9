"""Load a draft head for a loaded target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError, PairError
from dsbd_cli.models.checkpoints.hub import locate, locate_adapters
from dsbd_cli.models.checkpoints.loader import device_of
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.load import tensors_of
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.heads.formats import FoundHead, is_head, read_eagle3, read_mtp
from dsbd_cli.models.heads.head_model import HeadForestModel

TRIAL = 24  # tokens of the text by which the convention of layer numbers is found


def names_head(spec: ModelSpec) -> bool:
    """Whether a draft is a head: the target's own, or a folder that holds one."""
    if spec.in_target:
        return True
    place = locate(spec)
    return place.is_dir() and is_head(place)


def load_head(spec: ModelSpec, target_spec: ModelSpec, target: BaseForestModel) -> HeadForestModel:
    """Return a head that drafts for a target. Raises PairError and ModelError, each in one line that names the head."""
    if not isinstance(target, DecoderForestModel):
        raise PairError(f"{_name(spec)} reads hidden states of the target, but {_unfit(target)}")
    if locate_adapters(spec):
        raise PairError(f"{_name(spec)} has an adapter, which a head does not take: drop it")
    if device_of(spec) != target.device:
        raise PairError(f"{_name(spec)} runs where its target does, on {target.device}: name no device for it")
    try:
        if spec.in_target:
            found = read_mtp(tensors_of(locate(target_spec), target_spec), target)
        else:
            found = read_eagle3(locate(spec), target)
        model = HeadForestModel(target, found.decoder, found.layers[0], spec.source, found.form)
    except PairError as error:
        raise PairError(f"{_name(spec)} does not fit: {error}") from None
    except ModelError as error:
        raise ModelError(f"{_name(spec)} cannot be read: {error}") from None
    except KeyError as error:
        raise ModelError(f"{_name(spec)} cannot be read: the tensor {error.args[0]} is missing") from None
    except ValueError as error:
        raise ModelError(f"{_name(spec)} cannot be read: {error}") from None
    if found.ids is None:
        model.fit_width(target.vocab_size)
    else:
        model.spread(found.ids, target.vocab_size)
    model.notes = (f"{found.form}; {_choose_layers(model, found)}",)
    return model


def _choose_layers(model: HeadForestModel, found: FoundHead) -> str:
    """Read from the layers by which the head predicts the target's own text best; say which."""
    if not found.layers[0]:
        return "it reads the states after the final norm"
    if len(found.layers) > 1:
        text = _greedy(model.target)
        losses = []
        for layers in found.layers:
            model.read_from(layers)
            losses.append(_loss(model, text))
        best = min(range(len(losses)), key=losses.__getitem__)
        model.read_from(found.layers[best])
        other = f" (loss {losses[best]:.2f} on a text of the target; {losses[1 - best]:.2f} one layer off)"
    else:
        best, other = 0, ""
    return f"it reads the states after {_numbers(found.layers[best])} layers{other}"


@torch.inference_mode()
def _greedy(target: DecoderForestModel) -> list[int]:
    """Return a short text of the target, behind its first token."""
    eos = target.settings.eos
    text = [eos if isinstance(eos, int) else 0]
    for _ in range(min(TRIAL, target.max_positions or TRIAL) - 1):
        text.append(int(target.plain(torch.tensor([text]))[0, -1].argmax()))
    return text


@torch.inference_mode()
def _loss(model: HeadForestModel, text: Sequence[int]) -> float:
    """Return the mean loss, in nats, of the text under the head, where it reads true states alone; tokens that the
    head lacks are left out."""
    target, count = model.target, len(text)
    places = torch.arange(count, device=target.device)
    batch = ForestInput(
        tokens=torch.tensor([text], device=target.device),
        positions=places[None],
        slots=places[None],
        mask=(places <= places[:, None])[None],
        slot_positions=places[None],
        rows=torch.zeros(1, dtype=torch.int64, device=target.device),
        chain=True,
    )
    model.reserve(1, count + 1)
    target.forward(batch, logits=False)
    found = model.forward(batch)
    assert found is not None
    for one in (target, model):
        one.release()
    wide = torch.full((count, target.vocab_size), float("-inf"), device=target.device)
    columns = slice(None) if model.head_ids is None else model.head_ids
    wide[:, columns] = found[0].float()
    # the first token has no state before it
    said: Tensor = wide.log_softmax(-1)[1:-1].gather(1, batch.tokens[0, 2:, None])
    there = said[said > float("-inf")]
    return float(-there.mean()) if len(there) else 0.0


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _unfit(target: BaseForestModel) -> str:
    if target.paired:
        return "a model with an encoder has none that a head was made for"
    if target.state_bytes(0):
        return "recurrent and hybrid models, which run through transformers, do not give theirs yet"
    return "this one runs through transformers, which does not give them here"


def _name(spec: ModelSpec) -> str:
    return "the target's own MTP layer" if spec.in_target else f"draft head {spec.source!r}"
