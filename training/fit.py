"""The training loop that target and draft share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM

from training.batches import Batch

SAVE_EVERY_S = 180.0
LOG_EVERY = 25
WARMUP_STEPS = 150

Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(slots=True)
class Progress:
    """How far a run is: by steps, and by wall clock where a limit is set."""

    steps: int
    minutes: float | None
    started_s: float
    step: int = 0

    def fraction(self) -> float:
        """The part of the run that is done, 0 to 1."""
        by_steps = self.step / self.steps
        if self.minutes is None:
            return min(1.0, by_steps)
        return min(1.0, max(by_steps, (time.monotonic() - self.started_s) / (60 * self.minutes)))

    def rate(self, peak: float) -> float:
        """The learning rate: warm-up, constant until half, then linear to zero."""
        return peak * min(1.0, (self.step + 1) / WARMUP_STEPS, 2.0 * (1.0 - self.fraction()))


def start(steps: int, minutes: float | None) -> Progress:
    """A run that starts now."""
    return Progress(steps, minutes, time.monotonic())


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices with weight decay, the rest without."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]


def fit(
    model: LlamaForCausalLM, data: Iterator[Batch], loss: Loss, progress: Progress, peak: float, folder: Path
) -> None:
    """Train until the progress is complete; the model is saved every few minutes and at the end."""
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=peak, betas=(0.9, 0.98), fused=True)
    saved_s, tokens, total = time.monotonic(), 0, 0.0
    model.train()
    while progress.fraction() < 1.0:
        batch = next(data)
        for group in optimizer.param_groups:
            group["lr"] = progress.rate(peak)
        value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        tokens += batch.ids.numel()
        total += value.item()
        if progress.step % LOG_EVERY == 0:
            elapsed_s = time.monotonic() - progress.started_s
            print(
                f"step {progress.step} loss {total / LOG_EVERY:.4f} done {progress.fraction():.3f} "
                f"tokens {tokens} tok_per_s {tokens / elapsed_s:.0f}",
                flush=True,
            )
            total = 0.0
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            save(model, folder)
            saved_s = time.monotonic()
    save(model, folder)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model in float32, whole or not at all."""
    draft = folder.with_name(folder.name + ".part")
    model.save_pretrained(draft)
    folder.mkdir(parents=True, exist_ok=True)
    for file in draft.iterdir():
        file.replace(folder / file.name)
