"""Devices that the weights of a model are loaded to, as its spec names them."""

from __future__ import annotations

import json
from typing import Any

import torch

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import UsageError, shorten


def placement(spec: ModelSpec) -> dict[str, Any]:
    """Return the keyword arguments that put the weights where the spec wants them."""
    if spec.device_map is not None:
        return {"device_map": device_map_of(spec)}
    device = device_of(spec)
    return {} if device.type == "cpu" else {"device_map": {"": str(device)}}


def device_of(spec: ModelSpec) -> torch.device:
    """Return the device that a spec without a device map names. Raises UsageError where it is not there."""
    if spec.device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return _device(spec, spec.device)


def _device(spec: ModelSpec, name: str) -> torch.device:
    """Return the CPU or the CUDA device of this name. Raises UsageError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"{spec.role} device {name!r} is not a device: use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"{spec.role} device {name!r} is not there: {count} CUDA devices are visible")
    return device


def device_map_of(spec: ModelSpec) -> Any:
    """Return the device map of a spec: a name that accelerate knows, or a device for each module. Raises UsageError."""
    given = spec.device_map or ""
    if not given.startswith("{"):
        return given
    try:
        found = json.loads(given)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{spec.role} device map {shorten(given)} is not JSON: {error}") from None
    if not found:
        raise UsageError(f"{spec.role} device map {given!r} is empty: name at least one module, '' for all")
    for module, place in found.items():
        if type(place) not in (int, str):
            raise UsageError(
                f"{spec.role} device map {given!r} puts {module!r} on {shorten(place)}, which is no device"
            )
        if place != "disk":
            _device(spec, f"cuda:{place}" if type(place) is int else place)
    return found


def check_device_map(model: Any, spec: ModelSpec) -> None:
    """Refuse a device map with a name that no module has: it would have no effect. Raises UsageError."""
    places = device_map_of(spec)
    parts = (model.named_modules, model.named_parameters, model.named_buffers)
    known = {name for named in parts for name, _ in named(remove_duplicate=False)}
    unknown = [] if not isinstance(places, dict) else [name for name in places if name not in known]
    if unknown:
        raise UsageError(
            f"{spec.role} device map {spec.device_map!r} names {shorten(unknown[0])}, but the model has no such module"
        )
