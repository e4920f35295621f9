"""The training loop. Its batches follow from seed and step alone, so that a resumed run gives the same draft.

It is a short loop of our own, because transformers' Trainer takes datasets, collators and callbacks for what are sixty
lines here, and evaluates and resumes in its own ways.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from dsbd_cli.errors import DsbdError
from dsbd_cli.train.distributions import Teacher, divergence
from dsbd_cli.train.head import HeadStudent, Trees
from dsbd_cli.train.run_record import BATCH
from dsbd_cli.train.target_answers import AnswerTokens

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.98), 0.01, 1.0
WARM_UP_SHARE, WARM_UP_MOST = 0.05, 100
UNROLLED, DECAY = 4, 0.8  # steps that a head is unrolled for, and the weight of a step relative to the one before
LOSSES = "losses"  # their name in a checkpoint
LOGIT_BYTES = 256 << 20  # of the float32 logits of answers that go through a model together
HEAD_BYTES = 512 << 20  # of the logits, attention scores and states of answers that go through a head together


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that the trained weights follow from, besides the answers. autocast: products in bfloat16."""

    steps: int
    learning_rate: float
    seed: int
    autocast: bool

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0. It rises, is constant until half of the steps, and falls to 0."""
        warm = max(1, min(WARM_UP_MOST, int(WARM_UP_SHARE * self.steps)))
        return self.learning_rate * min(1.0, (step + 1) / warm, 2.0 * (1.0 - step / self.steps))

    def places(self, step: int, count: int) -> list[int]:
        """Return the indices, of `count`, of the answers that a step trains on. Each is used once before any is used
        twice."""
        return [
            _order(self.seed, place // count, count)[place % count] for place in range(step * BATCH, (step + 1) * BATCH)
        ]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


class Training:
    """A student, its optimizer and the number of its steps. `student` is trained in place. losses: of the last steps;
    the caller fills and clears them, and a checkpoint keeps them."""

    def __init__(self, student: nn.Module, teacher: Teacher, answers: Sequence[AnswerTokens], recipe: Recipe) -> None:
        self.student, self.step, self.losses = student, 0, list[float]()
        self._teacher, self._answers, self._recipe = teacher, answers, recipe
        parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self._device = parameters[0].device
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, fused=True)
        # most models can leave out the logits of positions that are not needed
        self._can_skip_logits = "logits_to_keep" in inspect.signature(type(student).forward).parameters

    def _weight_sum(self, batch: list[AnswerTokens]) -> float:
        """Return the number by which the sum of the batch's divergences is divided."""
        return sum(one.learnt for one in batch)

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's state and the losses, by name."""
        state = self._optimizer.state_dict()["state"]
        found = {f"{number}.{name}": tensor for number, some in state.items() for name, tensor in some.items()}
        return found | {LOSSES: torch.tensor(self.losses, dtype=torch.float64)}

    def restore(self, moments: dict[str, Tensor]) -> None:
        """Continue after the step at which the moments were taken, with the student of that step."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in moments.items():
            if key == LOSSES:
                self.losses = tensor.tolist()
                continue
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.step = int(moments["0.step"]) if state else 0

    def run_step(self) -> float:
        """Train one step and return the mean divergence in nats per token. Raises DsbdError where it is not finite."""
        batch = [self._answers[place] for place in self._recipe.places(self.step, len(self._answers))]
        weight_sum = self._weight_sum(batch)
        total = 0.0
        for part in self._parts(batch):
            loss = self._loss(part) / weight_sum
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if not math.isfinite(total):
            raise DsbdError(
                f"the loss of step {self.step + 1} is no number: give a lower --learning-rate (the answers stay)"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate(self.step)
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def _parts(self, batch: list[AnswerTokens]) -> list[list[AnswerTokens]]:
        """Divide the batch into answers that go through the student together: of similar length, and few enough for
        the memory of a part. An answer that takes more goes alone."""
        parts: list[list[AnswerTokens]] = []
        for one in sorted(batch, key=lambda one: (len(one.prompt), len(one.tokens))):
            wider = [*parts[-1], one] if parts else [one]
            if parts and len(wider) * self._bytes(wider) <= self._most_bytes:
                parts[-1] = wider
            else:
                parts.append([one])
        return parts

    @property
    def _most_bytes(self) -> int:
        return LOGIT_BYTES

    def _bytes(self, part: list[AnswerTokens]) -> int:
        """Return the bytes that each answer of a part takes, padded to the longest: of its float32 logits."""
        width: int = self.student.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        return 4 * _span(part)[1] * width

    def _loss(self, part: list[AnswerTokens]) -> Tensor:
        """Return the sum of the divergences over all tokens of the answers."""
        start, count = _span(part)
        # padding comes after a text, where no token of the text sees it
        texts = [[*one.prompt, *one.tokens[:-1]] for one in part]
        ids = torch.tensor([text + [0] * (start + count - len(text)) for text in texts], device=self._device)
        keep = {"logits_to_keep": count} if self._can_skip_logits else {}
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.autocast):
            logits: Tensor = self.student(input_ids=ids, use_cache=False, **keep).logits[:, -count:]
        total = logits.new_zeros((), dtype=torch.float32)
        for row, one in enumerate(part):
            distribution, begin = self._teacher.distribution(one), len(one.prompt) - 1 - start
            mine = logits[row, begin : begin + len(one.tokens)]
            total = (
                total + divergence(mine, distribution.ids.to(self._device), distribution.logs.to(self._device)).sum()
            )
        return total


class HeadTraining(Training):
    """Training of a draft head, unrolled on its own guesses."""

    student: HeadStudent

    @property
    def _most_bytes(self) -> int:
        return HEAD_BYTES

    def _bytes(self, part: list[AnswerTokens]) -> int:
        """Return the bytes that each answer of a part takes, padded to the longest: of its float32 logits and attention
        scores in each unrolled step, and of the target's states."""
        spec, learnt, most = self.student.spec, max(one.learnt for one in part), max(len(one.text) for one in part)
        scores = spec.heads * most
        return 4 * (UNROLLED * learnt * (len(self.student.d2t) + scores) + most * len(self.student.taps) * spec.hidden)

    def _weight_sum(self, batch: list[AnswerTokens]) -> float:
        found = 0.0
        for one in batch:
            depths = torch.tensor(one.positions[len(one.prompt) - 1 :]) - (len(one.prompt) - 1)
            found += sum(DECAY**step * int((depths >= step).sum()) for step in range(UNROLLED))
        return found

    def _loss(self, part: list[AnswerTokens]) -> Tensor:
        targets, states = [self._teacher.distribution(one) for one in part], list[Tensor]()
        for target in targets:
            assert target.states is not None, "a HeadTeacher keeps states"
            states.append(target.states)
        trees = Trees.of(part, states).to(self._device)
        most = trees.nodes.shape[1]
        ids, logs = (
            torch.stack([nn.functional.pad(one, (0, 0, 0, most - len(one))) for one in some]).to(self._device)
            for some in ([target.ids for target in targets], [target.logs for target in targets])
        )
        total = torch.zeros((), device=self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.autocast):
            for step, (logits, real) in enumerate(self.student.unrolled(trees, UNROLLED)):
                total = total + DECAY**step * divergence(logits[real], ids[real], logs[real]).sum()
        return total


def _span(part: list[AnswerTokens]) -> tuple[int, int]:
    """Return the first position whose logits are needed, and the number of positions from there on."""
    start = min(len(one.prompt) for one in part) - 1
    return start, max(len(one.prompt) - 1 + len(one.tokens) for one in part) - start
