"""The target's distribution after every token of an answer, as far as it matters: its likeliest tokens, and the rest in
one.

Shape letters: n tokens of an answer, T tokens of a distribution, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.cache.prefill import prefill
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.train.target_answers import AnswerTokens

TOP = 64
CHUNK = 256  # answer tokens whose logits are held at once
STEP = 32
KEPT_BYTES = 1 << 30
LEAST = 1e-7  # of a probability whose logarithm is taken


@dataclass(frozen=True, slots=True)
class TopDistribution:
    """ids [n, T] int32: the likeliest tokens before each token of an answer. logs [n, T] float32: their
    log-probabilities at temperature 1."""

    ids: Tensor
    logs: Tensor

    @property
    def held_bytes(self) -> int:
        """Memory that it takes."""
        return self.ids.nbytes + self.logs.nbytes


class Teacher:
    """Distributions of answers, computed when they are first asked for and kept as long as there is room.

    Each answer is run alone, so that a distribution has the same bits whenever it is computed: a resumed run is the
    same run.
    """

    def __init__(self, target: ForestModel, kept_bytes: int = KEPT_BYTES) -> None:
        self._target, self._left = target, kept_bytes
        self._kept: dict[AnswerTokens, TopDistribution] = {}

    def distribution(self, answer: AnswerTokens) -> TopDistribution:
        """On the CPU."""
        if (found := self._kept.get(answer)) is not None:
            return found
        distribution = self._compute(answer)
        if distribution.held_bytes <= self._left:
            self._left -= distribution.held_bytes
            self._kept[answer] = distribution
        return distribution

    @torch.no_grad()
    def _compute(self, answer: AnswerTokens) -> TopDistribution:
        model, first = self._target, len(answer.prompt) - 1
        # the last token of the answer is read by nobody
        text = [*answer.prompt, *answer.tokens[:-1]]
        slots = -(-(len(text) + STEP) // STEP) * STEP
        model.release()
        model.reserve(1, slots + 1)
        prefill(model, [0], [answer.prompt], slots, apart=True)
        parts = []
        for start in range(first, len(text), CHUNK):
            end = min(start + CHUNK, len(text))
            logits = model.forward(_chain(text, start, end, model.device))
            assert logits is not None
            logs = logits[0].float().log_softmax(-1).topk(min(TOP, logits.shape[-1]), -1)
            parts.append((logs.indices.to(torch.int32).cpu(), logs.values.cpu()))
        model.release()
        return TopDistribution(torch.cat([ids for ids, _ in parts]), torch.cat([logs for _, logs in parts]))


def _chain(text: list[int], start: int, end: int, device: torch.device) -> ForestInput:
    """Tokens start .. end of a text behind those before them."""
    places = torch.arange(start, end, device=device).unsqueeze(0)
    index = torch.arange(end, device=device).unsqueeze(0)
    tokens = torch.tensor([text[start:end]], device=device)
    seen = index.unsqueeze(1) <= places.unsqueeze(2)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    return ForestInput(tokens, places, places, seen, index, rows=rows, chain=True)


def divergence(logits: Tensor, ids: Tensor, logs: Tensor) -> Tensor:
    """[n] float32: KL(target, draft), with all tokens beyond the T of the target's distribution in one.

    logits [n, V] of the draft; ids, logs [n, T] of the target. Reverse KL and total variation were no better
    (benchmarks/README.md).
    """
    found = logits.float()
    q_logs = found.gather(1, ids.long()) - found.logsumexp(-1, keepdim=True)
    p = logs.exp()
    p_rest, q_rest = ((1 - distribution.sum(1)).clamp(min=LEAST) for distribution in (p, q_logs.exp()))
    return (p * (logs - q_logs)).sum(1) + p_rest * (p_rest / q_rest).log()
