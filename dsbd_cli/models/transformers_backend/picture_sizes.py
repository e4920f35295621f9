"""Shapes of the pictures that an encoder takes, and the places that it makes of them. Each function is given the
encoder's config.

Letters: C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def picture_shape(config: Any) -> tuple[int, ...]:
    """Return the shape [C, H, W] that an encoder of pictures takes; C alone where it takes any size."""
    size, channels = config.image_size, _channels(config)
    if any_size(config):
        return (channels,)
    return (channels, size, size) if isinstance(size, int) else (channels, *map(int, size))


def sample_shape(config: Any) -> tuple[int, ...]:
    """Return the shape [C, H, W] of a picture that an encoder takes: a small one where it takes any size."""
    if not any_size(config):
        return picture_shape(config)
    patch = config.patch_size if isinstance(config.patch_size, int) else max(config.patch_size)
    side = config.window_size * patch * 2 ** (len(config.depths) - 1)
    return (_channels(config), side, side)


def picture_fault(config: Any, picture: Tensor) -> str | None:
    """Return in words what an encoder of pictures takes, where it does not take this one; None where it does."""
    wanted = picture_shape(config)
    if picture.ndim != 3 or tuple(picture.shape[: len(wanted)]) != wanted:
        return " x ".join(map(str, wanted)) + (" x any size" if len(wanted) == 1 else "")
    if any_size(config) and min(_swin_sides(config, picture)) < config.window_size:
        return f"a side of {sample_shape(config)[1]} or more"
    return None


def swin_places(config: Any, picture: Tensor) -> int:
    """Return the number of places that Swin makes of a picture [C, H, W]."""
    height, width = _swin_sides(config, picture)
    return height * width


def _swin_sides(config: Any, picture: Tensor) -> list[int]:
    """Return height and width in places: patches, which every stage but the last merges by four."""
    patches = (config.patch_size,) * 2 if isinstance(config.patch_size, int) else config.patch_size
    sides = [-(-side // patch) for side, patch in zip(picture.shape[1:], patches, strict=True)]
    for _ in config.depths[1:]:
        sides = [-(-side // 2) for side in sides]
    return sides


def _channels(config: Any) -> int:
    """Return the number of channels, which is three where the config does not name it (BLIP)."""
    return int(getattr(config, "num_channels", 3))


def any_size(config: Any) -> bool:
    """Return whether an encoder takes pictures of any size. Swin does: it pads a picture to whole windows, and has no
    table of positions unless its config asks for one."""
    return bool(getattr(config, "depths", None)) and not getattr(config, "use_absolute_embeddings", False)
