"""Two drafts of one target, measured by the engine on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import DsbdError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.checkpoints.vocabulary import check_pair
from dsbd_cli.models.draft_heads.load import load_draft_head, names_draft_head
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import Request
from dsbd_cli.stats import RequestStats

ROUNDS = 2
# shares of the steps per target call that are lost, and of the time that is added; a few prompts vary by less
LOST = 0.02
SLOWER = 0.05


@dataclass(slots=True)
class Sums:
    """Sums over the rounds. stats: of all requests. tokens: of the best texts."""

    stats: RequestStats = field(default_factory=RequestStats)
    tokens: int = 0

    @property
    def token_ms(self) -> float:
        """Milliseconds per token in both models."""
        return 1e3 * (self.stats.draft_s + self.stats.target_s) / self.tokens


def worse(before: Sums, after: Sums) -> str | None:
    """Return how the second draft is worse than the first: fewer steps per target call, or more time per token in both
    models together. Return None where it is not, or where nothing was measured."""
    if not all(run.stats.target_calls and run.tokens for run in (before, after)):
        return None
    steps = [run.stats.steps_per_call for run in (before, after)]
    times = [run.token_ms for run in (before, after)]
    fewer, slower = 1 - steps[1] / steps[0] > LOST, times[0] > 0 and times[1] / times[0] - 1 > SLOWER
    worse = []
    if fewer:
        worse.append(f"{steps[1]:.2f} steps per target call instead of {steps[0]:.2f}")
    if fewer or slower:
        worse.append(f"{times[1]:.2f} ms per token in both models instead of {times[0]:.2f}")
    return ", ".join(worse) or None


def with_draft(engine: Engine, spec: ModelSpec, target: ModelSpec, method: MethodConfig | None = None) -> Engine:
    """Return a second engine with the same target and another draft, and another method if one is given. The two must
    not run at once, because they share the target. target: how the engine's target was loaded."""
    source, checkpoint = open_pair(target, spec)
    assert checkpoint is not None
    draft = _draft_head(engine, source, checkpoint) if names_draft_head(checkpoint) else _model(engine, checkpoint)
    info = None if engine.info is None else replace(engine.info, draft=spec.source)
    method = method or engine.method
    return engine.replace(draft=draft, method=method, batch_size=engine.batch_size, info=info)


def _model(engine: Engine, checkpoint: Checkpoint) -> BaseForestModel:
    loaded = load_model(checkpoint)
    if isinstance(engine.codec, HFCodec):
        check_pair(engine.codec, loaded.codec, engine.target.vocab_size, loaded.model.vocab_size)
    loaded.model.fit_width(engine.target.vocab_size)
    return loaded.model


def _draft_head(engine: Engine, target: Checkpoint, checkpoint: Checkpoint) -> BaseForestModel:
    """Load a head from a folder. It takes the place of the head that read the target's states before."""
    assert isinstance(engine.target, BaseForestModel)
    engine.target.tap(None)
    return load_draft_head(target, checkpoint, engine.target)


def measure(engines: Sequence[Engine], requests: Sequence[Request]) -> list[Sums]:
    """Measure each engine on the same requests, in turn, in several rounds, after one request to warm up.

    Raises DsbdError for the first request that fails.
    """
    totals = [Sums() for _ in engines]
    for engine in engines:
        _round(engine, requests[:1], Sums())
    for _ in range(ROUNDS):
        for engine, sums in zip(engines, totals, strict=True):
            _round(engine, requests, sums)
    return totals


def _round(engine: Engine, requests: Sequence[Request], sums: Sums) -> None:
    for result in engine.run(requests):
        if result.error is not None:
            raise DsbdError(f"prompt {result.request.id} cannot be measured on: {result.error}")
        sums.stats.add(result.stats)
        sums.tokens += result.hypotheses[0].num_tokens
