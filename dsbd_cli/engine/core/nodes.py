"""Nodes of one layer of a forest, and the distribution that they were drawn from.

Letters: R requests, W beams, K drafts per layer, D layers, T suffix window, C candidates of a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates

DistributionScope = Literal["pool", "parent"]


@dataclass(slots=True)
class DraftDistribution:
    """The distribution Q that the sampled nodes of one layer were really drawn from. K1 of its K nodes are sampled;
    they come first.

    A drafter promises: given the layers above and the drafts 0 .. j-1 of this layer, draft j has exactly the
    distribution Q'_j, where
        scope `pool`: Q'_j is Q over (parent, token) of the whole pool, without the pairs drawn before;
        scope `parent`: Q'_j is the row q(. | parent_j), without the tokens drawn before below this parent. Which parent
            is next may depend on anything but the token to be drawn.
    So the order of the nodes must be the order of the draws, not an order made later from their results.

    Attributes:
        candidates: the tokens of each parent node, [R, n, Cq].
        log_q: [R, n, Cq] float32, normalised over the pool, or (scope `parent`) in each row.
        log_drawn: [R, K1] float64, log Q of each drafted pair.
        log_rest: [R, K1] float64, log of the mass not drawn before each draw (0 for the first): of Q, or of the
            parent's row.
    """

    candidates: Candidates
    log_q: Tensor
    log_drawn: Tensor
    log_rest: Tensor
    scope: DistributionScope = "pool"


@dataclass(slots=True)
class LayerNodes:
    """Nodes of one layer: W roots or K drafts, sampled ones first in draw order. Or the nodes of all layers
    (`Forest.flat`).

    Attributes:
        token, parent (node index in the forest), root (beam index), path (path key), stop_state: [R, n] int64.
        valid, ends: [R, n] bool; an ending node is never extended.
        sampled: [R, n] bool, drawn from the recorded distribution. A draft that is not sampled is deterministic: it was
            chosen without a draw of this layer (by rank, n-gram, corpus). Roots are not sampled.
        weight: [R, n] float32, running weight under the draft.
        path_tokens: [R, n, D] int64, tokens from layer 1 down to the node.
        ancestors: [R, n, T] bool over the suffix window, the node itself included.
        drafter_id: [R, n] int64, the drafter that proposed the node: 0 for the first, 1 for the second of two. Further
            sources of the first have 2 ** SOURCE_BITS and 4 ** SOURCE_BITS. A node that several proposed has the first
            of them.
        legal_state: [R, n] int64, see engine/constraints/legal.py; None where no constraint acts.
    """

    token: Tensor
    parent: Tensor
    root: Tensor
    path: Tensor
    stop_state: Tensor
    valid: Tensor
    ends: Tensor
    sampled: Tensor
    weight: Tensor
    path_tokens: Tensor
    ancestors: Tensor
    drafter_id: Tensor
    legal_state: Tensor | None = None


def at_nodes(value: Tensor, index: Tensor) -> Tensor:
    """Gather the entries of the nodes `index` [R, m] from value [R, n, X]: [R, m, X]."""
    return value.gather(1, index.unsqueeze(-1).expand(-1, -1, value.shape[-1]))
