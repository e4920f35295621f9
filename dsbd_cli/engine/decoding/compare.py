"""Two drafts of one target, measured by the engine on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsbd_cli.config import MethodConfig, ModelSpec
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.models.pair import check_pair, load_model
from dsbd_cli.engine.models.tokenize import HFCodec
from dsbd_cli.errors import DsbdError
from dsbd_cli.requests import Request

__all__ = ["Measure", "measure", "with_draft", "worse"]

ROUNDS = 2
LOST = 0.02  # of the steps per target call or of the time: less is what a few prompts vary by
SLOWER = 0.05


@dataclass(frozen=True, slots=True)
class Measure:
    """Sums over the rounds; draft_s and target_s are seconds of the phases, tokens those of the best texts."""

    steps: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0

    def plus(self, other: Measure) -> Measure:
        """Both together."""
        return Measure(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def worse(before: Measure, after: Measure) -> str | None:
    """How the second draft is worse than the first: fewer steps per target call, or more time per token in both models
    together; None where it is not."""
    if not (before.target_calls and after.target_calls and before.tokens and after.tokens):
        return None
    steps = [one.steps / one.target_calls for one in (before, after)]
    times = [1e3 * (one.draft_s + one.target_s) / one.tokens for one in (before, after)]
    fewer, slower = 1 - steps[1] / steps[0] > LOST, times[0] > 0 and times[1] / times[0] - 1 > SLOWER
    said = []
    if fewer:
        said.append(f"{steps[1]:.2f} steps per target call instead of {steps[0]:.2f}")
    if fewer or slower:
        said.append(f"{times[1]:.2f} ms per token in both models instead of {times[0]:.2f}")
    return ", ".join(said) or None


def with_draft(engine: Engine, spec: ModelSpec, method: MethodConfig | None = None) -> Engine:
    """A second engine with the same target and another draft, and another method if one is given. The two must not run
    at once: they share the target."""
    draft, codec = load_model(spec)
    if isinstance(engine.codec, HFCodec):
        check_pair(engine.codec, codec, engine.target.vocab_size, draft.vocab_size)
    draft.fit_width(engine.target.vocab_size)
    info = None if engine.info is None else replace(engine.info, draft=spec.source)
    method = method or engine.method
    return Engine(engine.target, draft, engine.codec, method, batch_size=engine.batch_size, info=info)


def measure(engines: Sequence[Engine], requests: Sequence[Request]) -> list[Measure]:
    """Each engine on the same requests, in turn, several rounds, after one request to warm up.

    Raises the first request's error.
    """
    found = [Measure() for _ in engines]
    for engine in engines:
        _round(engine, requests[:1])
    for _ in range(ROUNDS):
        for place, engine in enumerate(engines):
            found[place] = found[place].plus(_round(engine, requests))
    return found


def _round(engine: Engine, requests: Sequence[Request]) -> Measure:
    total = Measure()
    for result in engine.run(requests):
        if result.error is not None:
            raise DsbdError(f"prompt {result.request.id} cannot be measured on: {result.error}")
        stats = result.stats
        total = total.plus(
            Measure(
                steps=stats.steps,
                target_calls=stats.target_calls,
                draft_calls=stats.draft_calls,
                drafted=stats.drafted,
                accepted=stats.accepted,
                tokens=result.hypotheses[0].num_tokens,
                draft_s=stats.draft_s,
                target_s=stats.target_s,
            )
        )
    return total
