"""Arguments of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.engine.constraints.answers import Catalogue
from dsbd_cli.engine.drafting.bridge.bridged import AnyDraft
from dsbd_cli.engine.protocols import ForestModel, TextCodec
from dsbd_cli.requests import EngineInfo


class EngineOptions(TypedDict, total=False):
    """Arguments of Engine that stay as they were given."""

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
