"""The target's distribution after every token of an answer, reduced to its likeliest tokens and all others as one, and
the hidden states that a head reads.

Shape letters: n tokens of an answer, T tokens of a distribution, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.cache.prefill import prefill
from dsbd_cli.engine.planning.memory_limit import free_bytes
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.models.forest_model import BaseForestModel, HiddenStateTap
from dsbd_cli.train.target_answers import AnswerTokens

TOP = 64
CHUNK = 256  # answer tokens whose logits are held at once
STEP = 32
MASS_ANSWERS = 128  # answers from which the tokens of a head are chosen
KEPT_SHARE = 3  # distributions may take the free memory divided by this number
LEAST = 1e-7  # least probability that a logarithm is taken of


@dataclass(frozen=True, slots=True)
class TopDistribution:
    """The likeliest tokens at each place of an answer, with their log-probabilities.

    Attributes:
        ids: [n, T] int32, columns of the head's logits.
        logs: [n, T] float32, log-probabilities at temperature 1, normalised over the tokens of the head.
        states: [N, S], hidden states of all tokens that the target has read, of several layers side by side.
    """

    ids: Tensor
    logs: Tensor
    states: Tensor

    @property
    def held_bytes(self) -> int:
        """Memory of the tensors in bytes."""
        return self.ids.nbytes + self.logs.nbytes + self.states.nbytes


class Teacher:
    """Distributions over the tokens of a head, and the hidden states that it reads, of answers. They are computed when
    they are first asked for, and kept while there is room.

    Each answer is run alone, so that a distribution has the same bits whenever it is computed. So a resumed run gives
    the same head.
    """

    def __init__(
        self, target: BaseForestModel, layers: Sequence[int], ids: Tensor, kept_bytes: int | None = None
    ) -> None:
        """layers: numbers of target layers after which states are taken. ids: [C], tokens of the head. kept_bytes: of
        the distributions that are kept, at most; None: a third of the free memory."""
        self._target, self._ids = target, ids.to(target.device)
        self._tap = HiddenStateTap(tuple(layers), len(layers) * target.hidden_size, lambda taken: torch.cat(taken, -1))
        self._left = free_bytes(torch.device("cpu")) // KEPT_SHARE if kept_bytes is None else kept_bytes
        self._kept: dict[AnswerTokens, TopDistribution] = {}

    def distribution(self, answer: AnswerTokens) -> TopDistribution:
        """Return the distribution of an answer, on the CPU."""
        if (kept := self._kept.get(answer)) is not None:
            return kept
        distribution = self._compute(answer)
        if distribution.held_bytes <= self._left:
            self._left -= distribution.held_bytes
            self._kept[answer] = distribution
        return distribution

    @torch.no_grad()
    def _compute(self, answer: AnswerTokens) -> TopDistribution:
        target, parts = self._target, []
        target.tap(None)  # removes the tap of the head that was measured last
        target.tap(self._tap)
        try:
            for logits in answer_logits(target, answer):
                logs = logits[:, self._ids].log_softmax(-1).topk(min(TOP, len(self._ids)), -1)
                parts.append((logs.indices.to(torch.int32).cpu(), logs.values.cpu()))
            states = target.hidden_states[0, : len(answer.text)].cpu().clone()
        finally:
            target.release()
            target.tap(None)
        return TopDistribution(torch.cat([ids for ids, _ in parts]), torch.cat([logs for _, logs in parts]), states)


def answer_logits(target: ForestModel, answer: AnswerTokens) -> Iterator[Tensor]:
    """Yield logits [c, V] float32 after the prompt and after each further token of an answer, at most CHUNK of them at
    a time. The target's cache holds the answer until the caller releases it."""
    first, text = len(answer.prompt) - 1, answer.text
    slots = -(-(len(text) + STEP) // STEP) * STEP
    target.release()
    target.reserve(1, slots + 1)
    prefill(target, [0], [answer.prompt], slots, apart=True)
    for start in range(first, len(text), CHUNK):
        logits = target.forward(_nodes(answer, start, min(start + CHUNK, len(text)), target.device))
        assert logits is not None
        yield logits[0].float()


@torch.no_grad()
def likely_tokens(
    target: ForestModel, answers: Sequence[AnswerTokens], count: int, on_answer: Callable[[int], None] = lambda _: None
) -> Tensor:
    """Return the tokens with the most mass under the target's distributions, [count] int64, ascending. At most
    MASS_ANSWERS of the answers are read. on_answer: called after each of these with how many are done."""
    mass = torch.zeros(target.vocab_size, dtype=torch.float64)
    for number, answer in enumerate(answers[:: -(-len(answers) // MASS_ANSWERS)], 1):
        for logits in answer_logits(target, answer):
            mass += logits.softmax(-1).sum(0).cpu()
        on_answer(number)
    target.release()
    return mass.topk(min(count, len(mass))).indices.sort().values


def _nodes(answer: AnswerTokens, start: int, end: int, device: torch.device) -> ForestInput:
    """Return tokens `start` to `end` of a text as the input of a forward that follows those before them."""
    positions = torch.tensor([answer.positions[:end]], device=device)
    return ForestInput(
        tokens=torch.tensor([answer.text[start:end]], device=device),
        positions=positions[:, start:],
        slots=torch.arange(start, end, device=device).unsqueeze(0),
        mask=answer.sees(start, end).unsqueeze(0).to(device),
        slot_positions=positions,
        rows=torch.zeros(1, dtype=torch.int64, device=device),
    )


def divergence(logits: Tensor, ids: Tensor, logs: Tensor) -> Tensor:
    """Return KL(target, draft) for each token, [n] float32. All tokens beyond the T of the target's distribution count
    as one.

    logits [n, V] of the draft; ids, logs [n, T] of the target. Reverse KL and total variation were no better
    (benchmarks/README.md).
    """
    values = logits.float()
    q_logs = values.gather(1, ids.long()) - values.logsumexp(-1, keepdim=True)
    p = logs.exp()
    p_rest, q_rest = ((1 - distribution.sum(1)).clamp(min=LEAST) for distribution in (p, q_logs.exp()))
    return (p * (logs - q_logs)).sum(1) + p_rest * (p_rest / q_rest).log()
