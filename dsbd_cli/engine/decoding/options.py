"""Arguments of an engine, and facts of the models in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.engine.constraints.answers import Catalogue
from dsbd_cli.engine.drafting.bridge.draft import AnyDraft
from dsbd_cli.engine.protocols import ForestModel, TextCodec
from dsbd_cli.ops.interface import Choice

__all__ = ["EngineChanges", "EngineInfo", "EngineOptions"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Names, dtypes and devices of the models that run, for records and reports.

    Attributes:
        told: what the user should know of the target.
        ops: what serves each operation of the target and of iterations.
        threads: of the processor. chat: the target has a chat template.
    """

    target: str
    draft: str | None
    dtype: str
    device: str
    draft_dtype: str | None = None
    draft_device: str | None = None
    told: tuple[str, ...] = ()
    ops: tuple[Choice, ...] = ()
    threads: int | None = None
    chat: bool = False


class EngineOptions(TypedDict, total=False):
    """Arguments of Engine that nothing changes later."""

    batch_size: int | None
    on_too_long: OnTooLong
    cuda_graphs: bool | None
    kernels: bool | None


class EngineChanges(EngineOptions, total=False):
    """Arguments of Engine, by name."""

    target: ForestModel
    draft: AnyDraft | None
    codec: TextCodec
    method: MethodConfig | None
    info: EngineInfo | None
    log_steps: bool
    catalogues: Mapping[str, Catalogue] | None
