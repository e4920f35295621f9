"""The training loop. Its batches follow from seed and step alone, so that a resumed run gives the same draft.

It is a short loop of our own, because transformers' Trainer takes datasets, collators and callbacks for what are sixty
lines here, and evaluates and resumes in its own ways.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import DsbdError
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.train.distributions import Teacher, divergence, likely_tokens
from dsbd_cli.train.draft_head import DraftHeadStudent, Trees, new_draft_head, read_draft_head
from dsbd_cli.train.run_record import BATCH, TrainingPlan
from dsbd_cli.train.saving import read_moments, recover
from dsbd_cli.train.target_answers import AnswerTokens

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.98), 0.01, 1.0
WARM_UP_SHARE, WARM_UP_MOST = 0.05, 100
UNROLLED, DECAY = 4, 0.8  # steps that a head is unrolled for, and the weight of a step relative to the one before
LOSSES = "losses"  # their name in a checkpoint
CHUNK_BYTES = 512 << 20  # of the logits, attention scores and states of answers that go through a head together


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
            _order(self.seed, number // count, count)[number % count]
            for number in range(step * BATCH, (step + 1) * BATCH)
        ]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


class Training:
    """A head that is unrolled on its own guesses, its optimizer and the number of its steps. `student` is trained in
    place. losses: of the last steps; the caller fills and clears them, and a checkpoint keeps them. resumed: it goes on
    from a checkpoint."""

    def __init__(
        self, student: DraftHeadStudent, teacher: Teacher, answers: Sequence[AnswerTokens], recipe: Recipe
    ) -> None:
        self.student, self.step, self.losses, self.resumed = student, 0, list[float](), False
        self._teacher, self._answers, self._recipe = teacher, answers, recipe
        parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self._device = parameters[0].device
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, fused=True)

    def _weight_sum(self, batch: list[AnswerTokens]) -> float:
        """Return the number by which the sum of the batch's divergences is divided."""
        total = 0.0
        for answer in batch:
            depths = torch.tensor(answer.positions[len(answer.prompt) - 1 :]) - (len(answer.prompt) - 1)
            total += sum(DECAY**step * int((depths >= step).sum()) for step in range(UNROLLED))
        return total

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's state and the losses, by name."""
        state = self._optimizer.state_dict()["state"]
        moments = {f"{number}.{name}": tensor for number, some in state.items() for name, tensor in some.items()}
        return moments | {LOSSES: torch.tensor(self.losses, dtype=torch.float64)}

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
        self.step, self.resumed = int(moments["0.step"]) if state else 0, True

    def run_step(self) -> float:
        """Train one step and return the mean divergence in nats per token. Raises DsbdError where it is not finite."""
        batch = [self._answers[index] for index in self._recipe.places(self.step, len(self._answers))]
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
        for answer in sorted(batch, key=lambda answer: (len(answer.prompt), len(answer.tokens))):
            wider = [*parts[-1], answer] if parts else [answer]
            if parts and len(wider) * self._bytes(wider) <= CHUNK_BYTES:
                parts[-1] = wider
            else:
                parts.append([answer])
        return parts

    def _bytes(self, part: list[AnswerTokens]) -> int:
        """Return the bytes that each answer of a part takes, padded to the longest: of its float32 logits and attention
        scores in each unrolled step, and of the target's states."""
        config, learnt, most = (
            self.student.config,
            max(answer.learnt for answer in part),
            max(len(answer.text) for answer in part),
        )
        scores = config.heads * most
        return 4 * (
            UNROLLED * learnt * (len(self.student.d2t) + scores) + most * len(self.student.taps) * config.hidden
        )

    def _loss(self, part: list[AnswerTokens]) -> Tensor:
        """Return the sum of the divergences over all unrolled steps and all tokens of the answers."""
        targets = [self._teacher.distribution(answer) for answer in part]
        trees = Trees.of(part, [target.states for target in targets]).to(self._device)
        most = trees.nodes.shape[1]
        ids, logs = (
            torch.stack([nn.functional.pad(tensor, (0, 0, 0, most - len(tensor))) for tensor in some]).to(self._device)
            for some in ([target.ids for target in targets], [target.logs for target in targets])
        )
        total = torch.zeros((), device=self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.autocast):
            for step, (logits, real) in enumerate(self.student.unrolled(trees, UNROLLED)):
                total = total + DECAY**step * divergence(logits[real], ids[real], logs[real]).sum()
        return total


def open_training(
    engine: Engine,
    spec: ModelSpec,
    plan: TrainingPlan,
    answers: Sequence[AnswerTokens],
    folder: Path,
    on_choice: Callable[[int], None],
) -> Training:
    """Return the training of a head for the engine's target, which goes on from the checkpoint in `folder` if there is
    one. spec: how the target was loaded. on_choice: see likely_tokens. Raises ModelError and OutputError."""
    target = engine.target
    assert isinstance(target, BaseForestModel)
    recipe = Recipe(plan.steps, plan.learning_rate, plan.seed, autocast=compute_dtype(engine) == "bfloat16")
    recover(folder)
    going_on = (folder / "config.json").is_file()
    if going_on:
        head = read_draft_head(folder, spec)
    else:
        head = new_draft_head(spec, likely_tokens(target, answers, plan.vocab, on_choice), recipe.seed)
    training = Training(head.to(target.device), Teacher(target, head.taps, head.ids), answers, recipe)
    if going_on:
        training.restore(read_moments(folder))
    return training


def compute_dtype(engine: Engine) -> str:
    """Return the dtype that the target computes in; of a quantized target the dtype of its other layers."""
    assert engine.info is not None
    return engine.info.dtype.rpartition("+")[2]
