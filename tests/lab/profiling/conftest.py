"""A toy pair behind `dsbd_cli.loading`, and what `dsbd profile` says about it."""

from __future__ import annotations

import contextlib
import io
import json
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

import dsbd_cli
from dsbd_cli import Engine, MethodConfig, ModelSpec
from dsbd_cli.cli.app import run
from dsbd_cli.engine.drafting.bridge.bridged import BridgedDraft
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.requests import EngineInfo
from tests.helpers.bridged import TextModel, codec
from tests.helpers.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 12
PARTS_TOLD = tuple(f"dsbd: {part}" for part in ("loading", "timing", "drafting", "warming up", "round", "measured"))


def toy_load(
    target: ModelSpec, draft: ModelSpec | None, *, method: MethodConfig, batch_size: int, **_: object
) -> Engine:
    """As decoding.load.load, with tables for models; for a bridge two that share no vocabulary."""
    if method.drafter == "bridge":
        kinds = codec("bytes"), codec("byte-level")
        info = EngineInfo(target.source, draft and draft.source, "float32", "cpu", "float32", "cpu")
        bridged = BridgedDraft(TextModel("byte-level"), kinds[1], kinds[0])
        return Engine(TextModel("bytes"), bridged, kinds[0], method, batch_size=batch_size, info=info)
    big, small = table_pair(2, VOCABULARY, 0.6)
    names = target.source, draft and draft.source
    info = EngineInfo(*names, "float32", "cpu", "float32" if draft else None, "cpu" if draft else None)
    numbers = NumberCodec(VOCABULARY, (3,))
    return Engine(big, small if draft else None, numbers, method, batch_size=batch_size, info=info)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def faults(self) -> list[str]:
        """What was said besides the parts that were measured."""
        lines = self.err.splitlines()
        return [line for line in lines if not line.startswith(PARTS_TOLD)]


@pytest.fixture
def dsbd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """dsbd("profile", ...) in this process, on the toy pair."""
    module = types.ModuleType("dsbd_cli.loading")
    module.load = toy_load  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "dsbd_cli.loading", module)
    monkeypatch.setattr(dsbd_cli, "loading", module, raising=False)
    monkeypatch.delenv("DSBD_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
        return Outcome(code, out.getvalue(), err.getvalue())

    return call


class HandClock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowLM(TableLM):
    """A table whose forwards take `per_node` seconds of a hand-moved clock for each node of each row."""

    def __init__(self, inner: TableLM, clock: HandClock, per_node: float) -> None:
        super().__init__(inner.table)
        self._clock, self._per_node = clock, per_node

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        self._clock.now += batch.tokens.numel() * self._per_node
        return super().forward(batch, logits=logits)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts for the toy codec, all with one seed, which a probe must not mix up."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"row {i}", "prompt": f"{i} {i + 1} 0", "max_new_tokens": 12, "seed": 7} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
