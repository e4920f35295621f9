"""Looking into an engine from outside: a drafter and a rule that tell an observer what passes through them."""

from __future__ import annotations

from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.probs import Candidates
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.base import DraftContext, Drafter
from dsbd_cli.engine.verify.base import LayerDraws, LayerView, Rule

__all__ = ["WatchedDrafter", "watch"]


class Observer:
    """Is told of every forest and every verified layer of all rows, on the device. Must change nothing."""

    def proposed(self, context: DraftContext, forest: Forest) -> None:
        """A forest was drafted."""

    def verified(self, rule: Rule, view: LayerView, draws: LayerDraws) -> None:
        """A layer was verified. Layers below the one where a row stopped are verified too, for nothing."""


class WatchedDrafter(Drafter):
    """Drafts as the inner drafter does, and tells."""

    def __init__(self, inner: Drafter, observer: Observer) -> None:
        self.inner, self.observer = inner, observer
        self.model, self.on_host, self.needs_text = inner.model, inner.on_host, inner.needs_text

    def propose(self, context: DraftContext) -> Forest:
        """The inner drafter's forest."""
        forest = self.inner.propose(context)
        self.calls = self.inner.calls
        self.observer.proposed(context, forest)
        return forest

    def learn(self, forest: Forest, candidates: Candidates) -> None:
        """As the inner drafter."""
        self.inner.learn(forest, candidates)

    def select(self, rows: Tensor) -> None:
        """As the inner drafter."""
        self.inner.select(rows)

    def release(self) -> None:
        """As the inner drafter."""
        self.inner.release()


class _WatchedRule(Rule):
    """Verifies as the inner rule does, and tells. Asks for the law Q in every case, so that it can be shown."""

    needs_law = True

    def __init__(self, inner: Rule, observer: Observer) -> None:
        self.inner, self.observer = inner, observer
        self.sampler, self.drafts_end = inner.sampler, inner.drafts_end

    def verify(self, view: LayerView) -> LayerDraws:
        """The inner rule's draws."""
        draws = self.inner.verify(view)
        self.observer.verified(self.inner, view, draws)
        return draws


def watch(engine: Engine, observer: Observer) -> None:
    """From now on the engine's iterations are told to the observer. Tensor code verifies: the kernel asks no rule."""
    stepper = engine.stepper
    stepper.kernels -= {"walk"}
    stepper.drafter = WatchedDrafter(stepper.drafter, observer)
    stepper.rule = _WatchedRule(stepper.rule, observer)
