"""Adapters of a model: PEFT folders that are merged into its weights when it is loaded.

`model+adapter` names a model with an adapter, `model+one+two` one with two, which are merged one after the other. A
merged model has the shapes of its base, so that decoding costs nothing more, int8 included.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, one_line
from dsbd_cli.models.checkpoints.hub import ADAPTER_WEIGHTS, locate_adapters


def merge_adapters(model: Any, spec: ModelSpec) -> Any:
    """Return a transformers model with its spec's adapters merged into its weights.

    Raises ModelError for an adapter that does not fit, UnsupportedModelError for a kind that cannot be merged.
    """
    for folder in locate_adapters(spec):
        try:
            model = _merged(model, folder, _name(folder, spec))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{_name(folder, spec)} cannot be merged: {one_line(error)}") from error
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


def _name(folder: Path, spec: ModelSpec) -> str:
    return f"{spec.role} adapter {str(folder)!r}"
