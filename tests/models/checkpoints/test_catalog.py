"""What is on this machine. tests/cli/test_models.py tests names through the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelNotFoundError
from dsbd_cli.models.checkpoints import hub
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint


def test_no_adapter_is_fetched(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `dsbd doctor`, which promises to fetch nothing."""
    monkeypatch.setattr(hub, "reachable", lambda endpoint: pytest.fail("the hub is asked"))
    for spec in (ModelSpec(f"{checkpoint}+org/lora@v1"), ModelSpec(str(checkpoint), adapters=("org/lora",))):
        with pytest.raises(ModelNotFoundError, match=r"target adapter 'org/lora.* is not on this machine: fetch it"):
            Checkpoint.open(spec, fetch=False)
