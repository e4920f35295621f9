"""Settings under which kernels of an iteration are compared with tensor code."""

from __future__ import annotations

from typing import Any

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks.kernels import HISTORY, kernels
from dsbd_cli.ops.select import OpsOf, triton_ops
from dsbd_cli.ops.triton import KernelCheck

ALL = {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "stop": ("AB",)}

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "coupled-plain": ({"rule": "coupled"}, {"top_k": 5}),
    "coupled-all": ({"rule": "coupled"}, ALL),
    "coupled-beam": ({"rule": "coupled", "warp_scope": "beam"}, ALL),
    "coupled-cold": ({"rule": "coupled", "depth": 1}, {"temperature": 0.0, "top_k": 5}),
    "coupled-whole": ({"rule": "coupled", "depth": 1}, {}),
    "coupled-W1": ({"rule": "coupled", "num_beams": 1, "drafts_per_layer": 1}, {"top_k": 5, "length_penalty": 0.7}),
    "coupled-saving": ({"rule": "coupled", "depth": 1, "memory_saving": True}, {"top_k": 5}),
    "coupled-tokens": ({"rule": "coupled"}, {"top_k": 5, "token_logprobs": True, "top_logprobs": 2}),
    "search": ({"rule": "search"}, {}),
    "search-stops": ({"rule": "search", "num_beams": 2}, {"stop": ("AB",), "early_stopping": True}),
    "coupled-ends": ({"rule": "coupled"}, {"top_k": 5, "eos_token_id": (3, 8, 20)}),
    "search-ends": ({"rule": "search"}, {"eos_token_id": (5, 9), "stop": ("AB",)}),
    "search-W16": ({"rule": "search", "num_beams": 16, "drafts_per_layer": 20, "depth": 1}, {}),
    "rejection": ({"rule": "rejection"}, {"top_k": 5}),
    "rejection-beam": ({"rule": "rejection", "warp_scope": "beam"}, ALL | {"temperature": 0.7}),
    "rejection-exhausted": ({"rule": "rejection", "num_beams": 4, "depth": 1}, {"top_k": 2}),
}
# limits of rows that the kernels of a GPU do not have
OWN_LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "coupled-never": ({"rule": "coupled", "num_beams": 2}, {"top_k": 5, "early_stopping": "never"}),
    "search-never": ({"rule": "search", "num_beams": 2}, {"early_stopping": "never", "length_penalty": 0.5}),
    "coupled-narrow": ({"rule": "coupled"}, {"top_k": 5, "num_beams": 2}),
    "search-narrow": ({"rule": "search"}, {"num_beams": 1, "stop": ("AB",)}),
}


def made(method: dict[str, Any], sampling: dict[str, Any], ops_of: OpsOf = triton_ops) -> list[KernelCheck]:
    """The kernels of an iteration with its method and its rows' sampling."""
    shape = {"num_beams": 3, "drafts_per_layer": 4, "depth": 2, "width": "fixed"}
    return kernels([(MethodConfig.of(shape | method), SamplingConfig(max_new_tokens=HISTORY, **sampling))], ops_of)
