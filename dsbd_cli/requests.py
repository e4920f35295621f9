"""What goes into an engine and what comes out: plain data, no tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from dsbd_cli.config import SamplingConfig
from dsbd_cli.errors import RowError
from dsbd_cli.stats import RequestStats

__all__ = ["FinishReason", "Hypothesis", "Request", "RequestResult", "derive_seed"]

FinishReason = Literal["stop", "length"]


def derive_seed(run_seed: int, request_id: str) -> int:
    """A row's seed from the run's and the row's id, so that neither batch size nor order matters. 63 bits."""
    digest = hashlib.blake2b(f"{run_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. Exactly one of `prompt`, `messages` and `prompt_ids` is given; `seed` below 2**63."""

    id: str
    seed: int
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text. `logprob` is the raw log-probability (nats) of its tokens, the end token included, under the
    target as it was loaded: a forward in bfloat16 gives another value than one in float32. `score` = logprob /
    num_tokens ** length_penalty; `num_tokens` counts the end token."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprob: float
    score: float

    @property
    def num_tokens(self) -> int:
        """Generated tokens, the end token included."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Hypotheses of one request, best first, or the error that stopped this one request. `truncated_tokens` of the
    prompt were dropped on its left; `prompt_tokens` counts what is left."""

    request: Request
    hypotheses: tuple[Hypothesis, ...]
    prompt_tokens: int
    stats: RequestStats
    error: RowError | None = None
    truncated_tokens: int = 0
