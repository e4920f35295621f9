"""Mixtures of experts in GGUF files. transformers reads the numbers of experts alone, and would run another model.

What an architecture always does stands in no metadata, but in llama.cpp's code: Qwen3 normalises the weights of the
chosen experts, Qwen2 does not, and layers of gpt-oss have a window and none in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsbd_cli.errors import ModelError, UnsupportedModelError, shorten

if TYPE_CHECKING:
    from dsbd_cli.models.checkpoints.gguf.file import GgufFile

SOFTMAX, SOFTMAX_OF_CHOSEN = 1, 3  # of expert_gating_func

_COUNT, _CHOSEN, _WIDTH, _SHARED_WIDTH = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)
_KEYS = ("expert_", "moe_", "leading_dense_block_count", "interleave_moe_layer_step", "swiglu_")  # beginnings
_ALWAYS: Mapping[str, tuple[object, ...]] = {  # what may stand there, because it changes nothing
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (1,),
    "moe_every_n_layers": (1,),
}
_READ: Mapping[str, Mapping[str, tuple[object, ...]]] = {  # the same by architecture
    "qwen2moe": {"expert_gating_func": (SOFTMAX,), "expert_weights_norm": (False,), "expert_shared_count": (1,)},
    "qwen3moe": {"expert_gating_func": (SOFTMAX,), "expert_weights_norm": (True,)},
    "gpt-oss": {
        "expert_gating_func": (SOFTMAX, SOFTMAX_OF_CHOSEN),
        "expert_weights_norm": (True,),
        "swiglu_clamp_exp": (7.0,),
        "attention.sliding_window_pattern": (2,),
    },
}


def set_experts(config: Any, file: GgufFile) -> None:
    """Give a config that transformers has made of a GGUF file the settings of its mixture of experts, in place.

    Raises ModelError for numbers that do not fit the tensors, and UnsupportedModelError for settings that are not read.
    """
    if file.architecture not in _READ:
        return
    read = {**_ALWAYS, **_READ[file.architecture]}
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{file.architecture}.")
        known = name in (_COUNT, _CHOSEN, _WIDTH) or (name == _SHARED_WIDTH and file.architecture == "qwen2moe")
        if not known and (name in read or name.startswith(_KEYS)) and value not in read.get(name, ()):
            raise UnsupportedModelError(
                f"{file.name}: {file.path.name} says {key} = {shorten(value)}, which is not read: take its safetensors"
            )
    experts = _count(file, _COUNT)
    chosen = _count(file, _CHOSEN, most=experts)
    _check_tensors(file, experts)
    width = _count(file, _WIDTH, default=config.intermediate_size // chosen)
    if file.architecture == "gpt-oss":
        config.intermediate_size = width
        _set_gpt_oss(config, file)
        return
    config.moe_intermediate_size, config.norm_topk_prob = width, file.architecture == "qwen3moe"
    if file.architecture == "qwen2moe":
        config.shared_expert_intermediate_size = _count(file, _SHARED_WIDTH, default=config.intermediate_size)


def _set_gpt_oss(config: Any, file: GgufFile) -> None:
    """Set what transformers leaves at the values of the published models. The scaling of rotary positions is set behind
    this (rotary.py); as in the published models, its ramp is not rounded."""
    config.head_dim = _count(file, "attention.key_length", default=config.hidden_size // config.num_attention_heads)
    layers, window = range(config.num_hidden_layers), file.metadata.get(f"{file.architecture}.attention.sliding_window")
    config.sliding_window = None if window in (None, 0) else _count(file, "attention.sliding_window")
    windowed = config.sliding_window is not None
    config.layer_types = ["full_attention" if number % 2 or not windowed else "sliding_attention" for number in layers]
    theta = (config.rope_parameters or {}).get("rope_theta", config.default_theta)
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta, "truncate": False}


def _count(file: GgufFile, key: str, *, most: int | None = None, default: int | None = None) -> int:
    """Return a whole number above 0 of the file's metadata. key: without the architecture. default: where it is not
    there; None: it must be. Raises ModelError."""
    key = f"{file.architecture}.{key}"
    count = file.metadata.get(key, default)
    if type(count) is not int or count < 1 or (most is not None and count > most):
        limit = "a number above 0" if most is None else f"1 to {most}"
        said = f"says {key} = {shorten(count)}, but must say {limit}" if key in file.metadata else f"lacks {key}"
        raise ModelError(f"{file.name}: {file.path.name} {said}: get it again")
    return count


def _check_tensors(file: GgufFile, experts: int) -> None:
    """Check that the tensors of experts are of as many."""
    for tensor in file.tensors.values():
        if "_exps." in tensor.name and (len(tensor.shape) < 2 or tensor.shape[0] != experts):
            raise ModelError(
                f"{file.name}: {tensor.file.name} says {file.architecture}.{_COUNT} = {experts}, but {tensor.name} is "
                f"{' x '.join(map(str, tensor.shape))}: get it again"
            )
