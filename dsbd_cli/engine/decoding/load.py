"""From names to an engine: the one call that puts models, codec and engine together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsbd_cli.config import (
    BUILTIN_DRAFT,
    BUILTIN_TARGET,
    DEFAULT_BATCH_SIZE,
    MethodConfig,
    ModelSpec,
    OnTooLong,
)
from dsbd_cli.engine.models.hub import locate

if TYPE_CHECKING:
    from dsbd_cli.engine.core.protocols import ForestModel
    from dsbd_cli.engine.decoding.engine import Engine

__all__ = ["load"]


def load(
    target: str = BUILTIN_TARGET,
    draft: str | None = BUILTIN_DRAFT,
    *,
    method: MethodConfig | None = None,
    batch_size: int | None = DEFAULT_BATCH_SIZE,
    log_steps: bool = False,
    on_too_long: OnTooLong = "error",
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    draft_device: str | None = None,
    cuda_graphs: bool | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Engine:
    """Load a target and a draft checkpoint (alias, folder or hub id; draft None for plain beams) into an engine.

    batch_size None: as many requests together as fit in memory. cuda_graphs None: captured where both models lie whole
    on one GPU.

    Raises ModelNotFoundError, UnsupportedModelError, PairError or ModelError where the checkpoints cannot be used.
    """
    if method is None:
        method = MethodConfig() if draft is not None else MethodConfig(depth=0)
    spec = ModelSpec(
        source=target,
        role="target",
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    draft_spec = None
    if draft is not None:
        own_device = draft_device or (device if device_map is None else "auto")
        draft_spec = replace(spec, source=draft, role="draft", device=own_device, device_map=None)
    for wanted in (spec, draft_spec):
        if wanted is not None:
            locate(wanted)
    # heavy imports only now, so that a wrong name is told at once
    from dsbd_cli.engine.decoding.engine import Engine, EngineInfo
    from dsbd_cli.engine.drafting import BridgedDraft
    from dsbd_cli.engine.models.pair import load_pair, markers

    bridged = draft is not None and method.drafter == "bridge"
    pair = load_pair(spec, draft_spec, bridged=bridged)
    info = EngineInfo(
        target=target,
        draft=draft,
        dtype=pair.target_dtype,
        device=str(pair.target.device),
        draft_dtype=pair.draft_dtype,
        draft_device=str(pair.draft.device) if pair.draft is not None else None,
    )
    proposing: ForestModel | BridgedDraft | None = pair.draft
    if pair.draft is not None and pair.draft_codec is not None:
        codec = pair.draft_codec
        proposing = BridgedDraft(pair.draft, codec, pair.codec, markers(pair.codec, codec))
    return Engine(
        pair.target,
        proposing,
        pair.codec,
        method,
        batch_size=batch_size,
        info=info,
        log_steps=log_steps,
        on_too_long=on_too_long,
        cuda_graphs=cuda_graphs,
    )
