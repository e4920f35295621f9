"""Speculative beam decoding: several beam steps per target call, with the output of plain decoding.

    import dsbd_cli

    engine = dsbd_cli.load()  # the built-in pair
    print(engine.generate("...").text)

`Engine.run` answers many prompts and goes on after one that fails; `Engine.stream` yields text as it becomes certain.

Names are imported when they are first used: `import dsbd_cli` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dsbd_cli._version import __version__

if TYPE_CHECKING:
    from dsbd_cli.config.method import MethodConfig
    from dsbd_cli.config.model import ModelSpec
    from dsbd_cli.config.sampling import SamplingConfig
    from dsbd_cli.dropin.generate import generate
    from dsbd_cli.dropin.live import from_models
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.errors import (
        DsbdError,
        InvalidRowError,
        ModelError,
        ModelNotFoundError,
        NumericalError,
        OutputError,
        PairError,
        PromptTooLongError,
        RowError,
        UnsupportedModelError,
        UsageError,
    )
    from dsbd_cli.loading import load
    from dsbd_cli.requests import Hypothesis, Piece, Request, RequestResult, TokenDetail

__all__ = [
    "DsbdError",
    "Engine",
    "Hypothesis",
    "InvalidRowError",
    "MethodConfig",
    "ModelError",
    "ModelNotFoundError",
    "ModelSpec",
    "NumericalError",
    "OutputError",
    "PairError",
    "Piece",
    "PromptTooLongError",
    "Request",
    "RequestResult",
    "RowError",
    "SamplingConfig",
    "TokenDetail",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "from_models",
    "generate",
    "load",
]

_HOMES = {
    "config.method": ("MethodConfig",),
    "config.model": ("ModelSpec",),
    "config.sampling": ("SamplingConfig",),
    "dropin.generate": ("generate",),
    "dropin.live": ("from_models",),
    "engine.decoding.engine": ("Engine",),
    "loading": ("load",),
    "requests": (
        "Hypothesis",
        "Piece",
        "Request",
        "RequestResult",
        "TokenDetail",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'dsbd_cli' has no attribute {name!r}")
    home = _HOME_OF.get(name, "errors")
    value: object = getattr(import_module(f"dsbd_cli.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
