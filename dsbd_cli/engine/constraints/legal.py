"""Constraints on the tokens that may follow a node, by the path that the node stands for: tries, grammars, token rules.

A beam and a drafted node carry one integer, `legal_state`, beside `stop_state`. Both advance in the same places: in
drafting/base.children and in the commit. Log-probabilities are normalised over the whole vocabulary first. Then a
constraint changes them, in most cases to -inf, and only then the best candidates are taken. This is the same for target
and draft.

A state belongs to one constraint: FREE to none, DEAD to a path that nothing may follow, larger ones to tries, negative
ones to grammars, whose states are on the host. A constraint leaves the states of others as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.candidates import LegalTokens
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import LayerNodes, at_nodes

FREE, DEAD = 0, 1
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Nodes that a constraint is asked about: those of one layer, or all N of a forest.

    Attributes:
        nodes: their tokens, parents, states and paths, [R, n] each. `nodes.legal_state` is there.
        layer: [n] int64, the layer of each node, 0 for roots.
        beams: the live beams that the roots are.
    """

    nodes: LayerNodes
    layer: Tensor
    beams: Beams

    @classmethod
    def of(cls, forest: Forest, beams: Beams, layer: int | None = None) -> NodePaths:
        """Take the nodes of one layer, or of the whole forest where `layer` is None."""
        nodes = forest.flat if layer is None else forest.layers[layer]
        index = torch.arange(nodes.token.shape[1], device=nodes.token.device)
        if layer is not None:
            return cls(nodes, torch.full_like(index, layer), beams)
        above = torch.div(index - forest.num_beams, max(1, forest.drafts_per_layer), rounding_mode="floor")
        return cls(nodes, torch.where(index < forest.num_beams, 0, above + 1), beams)

    @property
    def state(self) -> Tensor:
        """Legal states of the nodes: [R, n] int64."""
        assert self.nodes.legal_state is not None, "a forest that was proposed under a constraint"
        return self.nodes.legal_state

    def generated(self) -> tuple[Tensor, Tensor]:
        """Return the generated tokens down to each node, the node's own token last: [R, n, L], and how many they are:
        [R, n] int64. Entries past them are meaningless."""
        beams, path = self.beams, self.nodes.path_tokens
        history = at_nodes(beams.history, self.nodes.root)
        at = beams.length.unsqueeze(1) + torch.arange(path.shape[2], device=path.device)
        at = at.clamp(max=history.shape[2] - 1).unsqueeze(1).expand_as(path)
        return history.scatter(2, at, path), beams.length.unsqueeze(1) + self.layer


def joined(prompt: Tensor, lengths: Tensor, generated: Tensor, count: Tensor) -> Tensor:
    """Join prompts and the tokens that were generated after them: [R, n, P + L], NO_TOKEN past the end.

    prompt: [R, P], of which lengths [R] tokens are there. generated: [R, n, L], of which count [R, n] are.
    """
    room = generated.shape[2]
    own = torch.arange(prompt.shape[1] + room, device=prompt.device) - lengths.view(-1, 1, 1)
    own = own.expand(-1, generated.shape[1], -1)  # place among the generated tokens
    before = torch.nn.functional.pad(prompt, (0, room)).unsqueeze(1)
    text = torch.where(own < 0, before, generated.gather(2, own.clamp(0, room - 1)))
    return text.masked_fill(own >= count.unsqueeze(2), NO_TOKEN)


class ActiveConstraint(Protocol):
    """A constraint in one iteration.

    Attributes:
        key: all that determines its shapes, branches and addresses, for CUDA graphs.
        on_host: it reads the forest on the host, so that the iteration cannot be captured.
        changes: it changes log-probabilities of legal tokens, which are then those of the target.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def on_host(self) -> bool: ...

    @property
    def changes(self) -> bool: ...

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after the tokens, [R, n] int64 each; DEAD where a token is illegal."""
        ...

    def of(self, nodes: NodePaths) -> LegalTokens:
        """Return which tokens may follow these nodes. It is called before the forward that computes their logits is
        started."""
        ...


class Constraint(Protocol):
    """A kind of constraint, with the tables of all rows."""

    def acting(self, starts: Sequence[int | None], generated: int) -> ActiveConstraint | None:
        """Return the constraint for one iteration; None where no row is concerned.

        starts: the state in which each row's request began, None for a free row. generated: tokens that every running
        row has at least.
        """
        ...


@dataclass(frozen=True, slots=True)
class Legal:
    """All constraints that act in one iteration. They are applied one after another."""

    constraints: tuple[ActiveConstraint, ...]

    @property
    def key(self) -> Hashable:
        """Keys of all constraints, see ActiveConstraint."""
        return tuple(constraint.key for constraint in self.constraints)

    @property
    def on_host(self) -> bool:
        """True where some constraint reads the forest on the host, so that the iteration cannot be captured."""
        return any(constraint.on_host for constraint in self.constraints)

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after the tokens, [R, n] int64 each; DEAD where a token is illegal."""
        for constraint in self.constraints:
            state = constraint.step(state, tokens)
        return state

    def of(self, nodes: NodePaths) -> LegalTokens:
        """Return which tokens may follow these nodes."""
        rules = [constraint.of(nodes) for constraint in self.constraints]
        return rules[0] if len(rules) == 1 else _CombinedConstraint(rules)

    def changes(self, nodes: NodePaths) -> LegalTokens | None:
        """Return what changes the log-probabilities of legal tokens after these nodes; None where nothing does."""
        return next((constraint.of(nodes) for constraint in self.constraints if constraint.changes), None)


def acting(constraints: Sequence[Constraint], starts: Sequence[int | None], generated: int) -> Legal | None:
    """Return the constraints that concern some row of a batch; None where there are none, so that nothing is
    computed."""
    acting_now = [active for each in constraints if (active := each.acting(starts, generated)) is not None]
    return Legal(tuple(acting_now)) if acting_now else None


@dataclass(frozen=True, slots=True)
class _CombinedConstraint:
    """Several constraints on the same nodes."""

    rules: list[LegalTokens]

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return None: there is no list, because each constraint may take tokens from the others' lists."""
        return None

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Apply the constraints one after another."""
        for rule in self.rules:
            rule.apply(logprobs, part, total)
