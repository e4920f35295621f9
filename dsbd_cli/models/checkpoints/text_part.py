"""The text part of a model that also reads images or sound: its config and its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# language_model.model.layers.0 and model.language_model.layers.0 are model.layers.0
_PREFIX = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:(?:model|backbone)\.)?(?=(lm_head\.)?)")
_VISUAL = "visual."  # beginning of names of the other part where the text part has no prefix (Qwen2-VL)


def text_name(name: str) -> str | None:
    """Return the name that a text model alone gives to a tensor of the text part; None for any other name."""
    match = _PREFIX.match(name)
    if match is None:
        return None
    return f"{'' if match[1] else 'model.'}{name[match.end() :]}"


def text_tensors(tensors: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Return tensors under the names of a text model alone. Those of other parts stay as they are."""
    return {text_name(name) or name: read for name, read in tensors.items()}


def of_text(tensors: Iterable[str]) -> set[str]:
    """Return those of a model's tensors that are of its text part: all where no name tells another part."""
    names = set(tensors)
    text = {name for name in names if text_name(name) is not None}
    return text or {name for name in names if not name.startswith(_VISUAL)}


def other_parts(config: Any) -> bool:
    """Return whether a transformers config is of a model without an encoder that also reads images or sound. A config
    of which there is also a text model alone names its class."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        return False
    named = (getattr(config, "architectures", None) or [None])[0]
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or named == MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(
        config.model_type
    )
