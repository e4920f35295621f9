"""Adapters of a model: PEFT folders that are merged into its weights when it is loaded, and the tokenizer and chat
template that they may bring.

`model+adapter` names a model with an adapter, `model+one+two` one with two, which are merged one after the other. A
merged model has the shapes of its base, so that decoding costs nothing more, int8 included.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, one_line, shorten
from dsbd_cli.models.checkpoints.hub import (
    ADAPTER_WEIGHTS,
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    brought,
    locate_adapters,
)


def merge_adapters(model: Any, spec: ModelSpec) -> Any:
    """Return a transformers model with its spec's adapters merged into its weights.

    Raises ModelError for an adapter that does not fit, UnsupportedModelError for a kind that cannot be merged.
    """
    for folder in locate_adapters(spec):
        try:
            model = _merged(model, folder, adapter_name(folder, spec))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{adapter_name(folder, spec)} cannot be merged: {one_line(error)}") from error
    return model


def _merged(model: Any, folder: Path, name: str) -> Any:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    config = PeftConfig.from_pretrained(str(folder))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise UnsupportedModelError(f"{name} is {kind}, which is no change of weights and cannot be merged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the faults that they warn of are checked here
        adapted = PeftModel.from_pretrained(model, str(folder), config=config, torch_device=str(model.device))
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            given = {_plain(key) for key in file.keys()}  # noqa: SIM118
        wanted = {_plain(key) for key in get_peft_model_state_dict(adapted)}
        for missing, place in ((wanted - given, ADAPTER_WEIGHTS), (given - wanted, "the model")):
            if missing:
                raise ModelError(f"{name} does not fit: {place} has no {min(missing)} ({len(missing)} such weights)")
        if not hasattr(adapted.base_model, "merge_and_unload"):
            raise UnsupportedModelError(f"{name} is {kind}, which cannot be merged into the weights")
        return adapted.merge_and_unload(safe_merge=True)


def _plain(key: str) -> str:
    """Return the name of an adapter's weight without the prefix that all of them have."""
    return key.removeprefix("base_model.model.")


def adapter_name(folder: Path, spec: ModelSpec) -> str:
    """Return the name of an adapter in messages."""
    return f"{spec.role} adapter {str(folder)!r}"


def bringing(spec: ModelSpec) -> list[Path]:
    """Return the folders of the adapters whose tokenizer or chat template is used, in order."""
    return [folder for folder in locate_adapters(spec) if brought(folder)] if spec.tokenizer is None else []


def adapters_bring(spec: ModelSpec, what: str) -> bool:
    """Return whether the model's tokenizer, or its chat template, is that of an adapter. what: see brought."""
    return any(what in brought(folder) for folder in bringing(spec))


def notes_on_tokenizer(spec: ModelSpec) -> tuple[str, ...]:
    """Return a line for each adapter whose tokenizer or chat template is used."""
    hint = ": --set tokenizer=base takes the base's" if spec.role == "target" else ""
    return tuple(
        f"{adapter_name(folder, spec)} brings a {' and a '.join(brought(folder))}, which {verb} used{hint}"
        for folder in bringing(spec)
        for verb in ["is" if len(brought(folder)) == 1 else "are"]
    )


def template_in(folder: Path, name: str) -> str | dict[str, str]:
    """Return the chat template in an adapter's folder; several by name. name: of the adapter. Raises ModelError."""
    try:
        if (file := folder / CHAT_TEMPLATE).is_file():
            return file.read_text(encoding="utf-8")
        named = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))["chat_template"]
        return named if isinstance(named, str) else {one["name"]: one["template"] for one in named}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{name}: its chat template cannot be read: {one_line(error)}") from error


def misfit(base: Mapping[str, int], own: Mapping[str, int], width: int) -> str | None:
    """Return why an adapter's vocabulary does not fit a model's, None where it does: it has the model's tokens, and
    others may come behind. width: ids that the model has."""
    for token, index in sorted(base.items(), key=lambda item: item[1]):
        if own.get(token) != index:
            there = "missing" if token not in own else f"token {own[token]}"
            return f"{shorten(token)} is token {index} of the base, and {there} there"
    if (last := max(own.values(), default=0)) >= width:
        return f"it has the id {last}, but the model has {width} ids"
    return None
