"""Speculative beam decoding: several beam steps per target call, with the output of plain decoding.

    import dsbd_cli

    engine = dsbd_cli.load()  # the built-in pair
    request = dsbd_cli.Request(id="a", seed=0, prompt="...")
    for result in engine.run([request]):
        print(result.hypotheses[0].text)

Names are imported when they are first used: `import dsbd_cli` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dsbd_cli._version import __version__

if TYPE_CHECKING:
    from dsbd_cli.config import MethodConfig, ModelSpec, SamplingConfig
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.engine.decoding.load import load
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
    from dsbd_cli.requests import Hypothesis, Request, RequestResult

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
    "PromptTooLongError",
    "Request",
    "RequestResult",
    "RowError",
    "SamplingConfig",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "load",
]

_HOMES = {
    "config": ("MethodConfig", "ModelSpec", "SamplingConfig"),
    "engine.decoding.engine": ("Engine",),
    "engine.decoding.load": ("load",),
    "requests": ("Hypothesis", "Request", "RequestResult"),
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
