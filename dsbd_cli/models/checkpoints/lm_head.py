"""A draft's trimmed LM head: a file next to its weights that holds the rows that are left and their token ids.

`dsbd trim-draft` writes it (see trim.py), the loader puts it in place of the checkpoint's LM head. Only ids in the file
get a logit; the others are -inf, so the draft never proposes them. Input ids are those of the full vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, one_line, shorten

LM_HEAD_FILE = "dsbd_head.safetensors"
FORMAT = "dsbd.head/1"


@dataclass(frozen=True, slots=True)
class TrimmedLMHead:
    """The n rows that are left of an LM head.

    Attributes:
        ids: [n] int64, ascending, the token id of each row. weight: [n, H]. bias: [n] or None.
        vocab_size: V, logits of the full LM head.
    """

    ids: Tensor
    weight: Tensor
    bias: Tensor | None
    vocab_size: int


def plain_lm_head(model: Any) -> nn.Linear:
    """Return the LM head of a transformers model. Raises UnsupportedModelError where it is no plain linear layer."""
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no plain linear LM head, so its rows cannot be taken apart: use another draft"
        )
    return lm_head


def lm_head_keys(model: Any) -> set[str]:
    """Return the names of the LM head's weights in the model's state."""
    lm_head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is lm_head]
    return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


def write_lm_head(folder: Path, lm_head: TrimmedLMHead) -> None:
    """Write the LM head into a checkpoint folder."""
    tensors = {"ids": lm_head.ids.to(torch.int32), "weight": lm_head.weight}
    if lm_head.bias is not None:
        tensors["bias"] = lm_head.bias
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = {"format": FORMAT, "vocab_size": str(lm_head.vocab_size), "sha256": _digest(tensors)}
    save_file(tensors, folder / LM_HEAD_FILE, metadata=about)


def read_trimmed_lm_head(folder: Path) -> TrimmedLMHead | None:
    """Return the LM head of a trimmed draft; None for an ordinary checkpoint. Raises ModelError where the file is
    damaged."""
    path = folder / LM_HEAD_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(path, one_line(error)) from None
    if about.get("format") != FORMAT:
        raise ModelError(
            f"{path} has the format {about.get('format')!r}, but this version reads {FORMAT}: "
            "make it again with dsbd trim-draft"
        )
    if not {"ids", "weight"} <= tensors.keys():
        raise _damaged(path, "ids or weight is missing")
    if about.get("sha256") != _digest(tensors):
        raise _damaged(path, "its contents are not what was written")
    ids, weight, size = tensors["ids"].to(torch.int64), tensors["weight"], about.get("vocab_size", "")
    if not size.isdecimal() or ids.ndim != 1 or weight.ndim != 2 or len(ids) != len(weight) or not len(ids):
        shapes = f"ids {list(ids.shape)} for rows {list(weight.shape)}"
        raise _damaged(path, f"{shapes} of a vocabulary of {shorten(size) if size else 'no'} tokens")
    if not (int(ids[0]) >= 0 and int(ids[-1]) < int(size) and bool((ids.diff() > 0).all())):
        raise _damaged(path, f"the ids are not ascending ids below {size}")
    bias = tensors.get("bias")
    if bias is not None and bias.shape != ids.shape:
        raise _damaged(path, f"the bias is for {bias.numel()} rows, not for {len(ids)}")
    return TrimmedLMHead(ids, weight, bias, int(size))


def lm_head_rows(folder: Path) -> int | None:
    """Return the number of rows of a trimmed draft's LM head, from the file's header alone; None for an ordinary
    checkpoint."""
    path = folder / LM_HEAD_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            return int(file.get_slice("ids").get_shape()[0])
    except (SafetensorError, OSError) as error:
        raise _damaged(path, one_line(error)) from None


def install(model: Any, lm_head: TrimmedLMHead, name: str) -> None:
    """Put the rows in place of the model's LM head, untied from the embedding table.

    Raises ModelError when they are not rows of this model's LM head.
    """
    old = plain_lm_head(model)
    if lm_head.weight.shape[1] != old.in_features or lm_head.vocab_size != old.out_features:
        raise ModelError(
            f"{name}: {LM_HEAD_FILE} is for a head of {lm_head.vocab_size} x {lm_head.weight.shape[1]}, but the "
            f"model's is {old.out_features} x {old.in_features}: make it again with dsbd trim-draft"
        )
    device, dtype = old.weight.device, old.weight.dtype
    if device.type == "meta":
        raise ModelError(f"{name}: a trimmed draft cannot be offloaded: give it a device with --device TARGET,DRAFT")
    rows = nn.Linear(old.in_features, len(lm_head.ids), bias=lm_head.bias is not None, device=device, dtype=dtype)
    rows.load_state_dict({"weight": lm_head.weight} | ({} if lm_head.bias is None else {"bias": lm_head.bias}))
    model.set_output_embeddings(rows)
    added = getattr(model, "final_logits_bias", None)  # of BART and similar models, apart from the LM head
    if added is not None and added.shape[-1] == lm_head.vocab_size:
        model.final_logits_bias = added[..., lm_head.ids.to(added.device)]
    model.config.get_text_config(decoder=True).tie_word_embeddings = False
    model.trimmed_lm_head = (lm_head.ids.to(device), lm_head.vocab_size)


def installed(model: Any) -> tuple[Tensor, int] | None:
    """Return the ids [n] of the LM head's rows and V, as `install` has recorded them; None for an ordinary model."""
    lm_head: tuple[Tensor, int] | None = getattr(model, "trimmed_lm_head", None)
    return lm_head


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is damaged ({why}): make it again with dsbd trim-draft")


def trimmed_target(spec: ModelSpec) -> UnsupportedModelError:
    """Return the error that refuses a target whose LM head lacks tokens."""
    return UnsupportedModelError(f"target model {spec.source!r} is a trimmed draft: only a draft may lack tokens")
