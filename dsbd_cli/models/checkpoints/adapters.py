"""Adapters of a model: PEFT folders that are merged into its weights when it is loaded, and the tokenizer and chat
template that they may bring.

`model+adapter` names a model with an adapter, `model+one+two` one with two, which are merged one after the other. A
merged model has the shapes of its base, so that decoding costs nothing more, int8 included.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, ModelNotFoundError, UnsupportedModelError, UsageError, one_line, shorten
from dsbd_cli.models.checkpoints.hub import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    has_weights,
    hub_folder,
)
from dsbd_cli.models.checkpoints.registry import expanded, hub_location, parts_of

_TEXT_FILES = [*VOCABULARIES, TOKENIZER_CONFIG, CHAT_TEMPLATE, "*tokens*.json", "merges.txt"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder of peft's. name: of the adapter, for messages. brings: the parts of a model's text side that it brings
    beside its weights, in words: a tokenizer, a chat template, both or neither."""

    path: Path
    name: str
    brings: tuple[str, ...]


def open_adapters(spec: ModelSpec) -> tuple[Adapter, ...]:
    """Return a model's adapters, which are fetched from the hub if they are not here yet.

    Raises ModelNotFoundError, ModelError for a folder that holds none, UsageError where adapters cannot be merged, or
    the base's tokenizer is asked for and no adapter brings another.
    """
    adapters = tuple(_opened(source, spec) for source in (*parts_of(spec.source)[1], *spec.adapters))
    if spec.tokenizer is not None and not any(adapter.brings for adapter in adapters):
        reason = f"no adapter of {spec.source} brings a tokenizer or a chat template: drop it"
        raise UsageError(f"tokenizer is {spec.tokenizer}, but {reason}", field="tokenizer", value=spec.tokenizer)
    if not adapters:
        return ()
    for field, value in (("device_map", spec.device_map), ("tensor_parallel", spec.tensor_parallel)):
        if value not in (None, 1):
            reason = "adapters are merged on one device: drop it, or load a merged checkpoint"
            raise UsageError(f"{field} is {value}, but {reason}", field=field, value=value)
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{spec.role} model {spec.source!r} has an adapter, which needs: pip install 'dsbd[adapters]'")
    return adapters


def _opened(source: str, spec: ModelSpec) -> Adapter:
    name, folder = f"{spec.role} adapter {source!r}", expanded(source)
    if not folder.exists() and (location := hub_location(source)) is not None:
        folder = hub_folder(location, name, ADAPTER_CONFIG, [[ADAPTER_CONFIG, ADAPTER_WEIGHTS, *_TEXT_FILES]])
    if not folder.is_dir():
        raise ModelNotFoundError(f"{name}: there is no such folder")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{name}: {folder} holds no {ADAPTER_CONFIG}, so it is no adapter of peft")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        hint = ": adapter_model.bin is a pickle, save it as safetensors" if any(folder.glob("*.bin")) else ""
        raise ModelError(f"{name}: {folder} holds no {ADAPTER_WEIGHTS}{hint}")
    return Adapter(folder, f"{spec.role} adapter {str(folder)!r}", _brought(folder))


def _brought(folder: Path) -> tuple[str, ...]:
    if has_weights(folder):  # a whole checkpoint: its tokenizer is its own
        return ()
    settings = folder / TOKENIZER_CONFIG
    has = {
        "tokenizer": any(any(folder.glob(pattern)) for pattern in VOCABULARIES),
        "chat template": (folder / CHAT_TEMPLATE).is_file()
        or (settings.is_file() and b'"chat_template"' in settings.read_bytes()),
    }
    return tuple(name for name, there in has.items() if there)


def merge_adapters(model: Any, adapters: Sequence[Adapter]) -> Any:
    """Return a transformers model with adapters merged into its weights.

    Raises ModelError for an adapter that does not fit, UnsupportedModelError for a kind that cannot be merged.
    """
    for adapter in adapters:
        try:
            model = _merged(model, adapter.path, adapter.name)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{adapter.name} cannot be merged: {one_line(error)}") from error
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
            stored = {_plain(key) for key in file.keys()}  # noqa: SIM118
        wanted = {_plain(key) for key in get_peft_model_state_dict(adapted)}
        for missing, lacking in ((wanted - stored, ADAPTER_WEIGHTS), (stored - wanted, "the model")):
            if missing:
                raise ModelError(f"{name} does not fit: {lacking} has no {min(missing)} ({len(missing)} such weights)")
        if not hasattr(adapted.base_model, "merge_and_unload"):
            raise UnsupportedModelError(f"{name} is {kind}, which cannot be merged into the weights")
        return adapted.merge_and_unload(safe_merge=True)


def _plain(key: str) -> str:
    """Return the name of an adapter's weight without the prefix that all of them have."""
    return key.removeprefix("base_model.model.")


def template_in(adapter: Adapter) -> str | dict[str, str]:
    """Return the chat template in an adapter's folder; several by name. Raises ModelError."""
    try:
        if (file := adapter.path / CHAT_TEMPLATE).is_file():
            return file.read_text(encoding="utf-8")
        named = json.loads((adapter.path / TOKENIZER_CONFIG).read_text(encoding="utf-8"))["chat_template"]
        return named if isinstance(named, str) else {template["name"]: template["template"] for template in named}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{adapter.name}: its chat template cannot be read: {one_line(error)}") from error


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
