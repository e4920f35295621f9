"""Types that a drafter receives and returns, and functions that build its layers. A drafter never reads the target's
logits of its own iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.constraints.grammar import GrammarTable
from dsbd_cli.engine.constraints.legal import DEAD, Legal
from dsbd_cli.engine.constraints.stops import STOPPED, StopTable
from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import Warp
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import ForestBuffer, KernelBuffer, TensorBuffer, warp_flags
from dsbd_cli.engine.core.nodes import DistributionScope, DraftDistribution, LayerNodes, at_nodes
from dsbd_cli.engine.core.noise import extend_path
from dsbd_cli.engine.core.pool import match_pairs
from dsbd_cli.engine.core.sampler import Sampler
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.bridge.bridged import AnyDraft
from dsbd_cli.engine.drafting.text import PromptTable
from dsbd_cli.engine.planning.planner import Prospects
from dsbd_cli.engine.protocols import ForestModel, TextCodec
from dsbd_cli.errors import UsageError
from dsbd_cli.ops.interface import Ops


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """Inputs that drafters are made from. model: the draft, None where there is none. vocab_size: V of the target.
    grammars: grammars of the rows."""

    method: MethodConfig
    model: AnyDraft | None
    vocab_size: int
    codec: TextCodec
    device: torch.device
    grammars: GrammarTable

    def draft(self) -> ForestModel:
        """Return the draft model, for a drafter that needs one. Raises UsageError where it is a draft with tokens of
        its own."""
        from dsbd_cli.engine.drafting.bridge.bridged import BridgedDraft

        assert self.model is not None, "checked by MethodConfig.fit_draft"
        if isinstance(self.model, BridgedDraft):
            raise UsageError(f"drafter {self.method.drafter} takes a plain draft")
        return self.model


class EngineStopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """A request to stop the engine, raised in the middle of an iteration."""


@dataclass(slots=True)
class Endings:
    """Tests for pairs that end a sequence. stops: the automaton of stop strings and end tokens. Where it is used, it
    alone decides; else the checkpoint's end tokens do."""

    stops: StopTable
    _none: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._none = torch.zeros_like(self.stops.eos)

    @property
    def eos(self) -> Tensor:
        """Tokens that end every row, whatever its state: [V] bool. There are none where the automaton is used."""
        return self._none if self.stops.used else self.stops.eos

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The end tokens and the automaton's table, by the fields that ops/layout.py declares."""
        return {"eos": self.eos, "stops": self.stops.table}

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the stop states after the tokens, in the shape of tokens; NO_STOPS for all where the automaton is not
        used. state [R, n]; tokens [R, n] or [R, n, C]."""
        if self.stops.used:
            return self.stops.step(state, tokens)
        return torch.ones_like(tokens)

    def ends(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return which tokens end the sequence: bool in the shape of tokens, [R, n] or [R, n, C]."""
        return self.stops.step(state, tokens) == STOPPED if self.stops.used else self.stops.eos[tokens]


@dataclass(slots=True)
class DraftContext:
    """One iteration as a drafter sees it.

    Attributes:
        beams: the live beams. buffer: memory of this iteration's nodes, with the roots in it.
        sampler: how drafts are drawn. drafts_end: an end token may be drafted.
        warp: temperature and cuts of the rows. endings: which pairs end a sequence.
        num_beams: W. row_beams: [R] int64, W of each row; None where it is the same. depth: D. drafts_per_layer: K.
        row_key: [R] int64, key of each row's noise. iteration: [R] int64, number of each row's iteration.
        draft_backlog: the most used slots of a row that the draft has not run, or a number above it.
        looked_up: of two drafters the second one alone drafts.
        record_distribution: the distribution Q of each layer is needed.
        prompts: prompts of the rows, only where the drafter reads the text (needs_text).
        stopping: returns whether the engine was asked to stop.
        legal: the constraints that act, None where there are none.
        ops: operations that serve the engine's device.
        gate: decides whether a layer goes to the target, see goes_on. None: every drafted layer does.
        own_ids: [R, o] int64, of OwnIds, where a trimmed draft may draft them. They stay the same in all layers.
        prompt_slots, suffix: of the target's ForestInput.
    """

    beams: Beams
    buffer: ForestBuffer
    sampler: Sampler
    drafts_end: bool
    warp: Warp
    endings: Endings
    num_beams: int
    depth: int
    drafts_per_layer: int
    row_key: Tensor
    iteration: Tensor
    draft_backlog: int
    record_distribution: bool
    looked_up: bool = False
    prompts: PromptTable | None = None
    stopping: Callable[[], bool] = lambda: False
    legal: Legal | None = None
    ops: Ops | None = None
    gate: Callable[[list[float]], bool] | None = None
    own_ids: Tensor | None = None
    row_beams: Tensor | None = None
    prompt_slots: tuple[int, ...] | None = None
    suffix: int = 0

    @property
    def keys(self) -> Tensor:
        """Stream keys of all layers: [R, D + 1, STREAMS] int64."""
        return self.buffer.keys


class Drafter:
    """A drafter, which proposes a forest: the base class of all drafters.

    Attributes:
        model: the draft model that runs the forest's nodes, in the same cache slots as the target. None where the
            drafter has no model, or one with a cache of its own.
        on_host: the drafter works on the host, so an iteration cannot be captured as a CUDA graph.
        calls: number of draft forwards of the last proposal.
        learns_rows: row_ended keeps what it is told.
        sources: names that drafted nodes are counted by: of the first drafter, of the second one, of further sources of
            the first. A name may be empty. Without names nothing is counted.
        needs_text: the drafter reads context.prompts.
        by_kernel: kernels can write its forest.
    """

    model: ForestModel | None = None
    on_host: bool = False
    calls: int = 0
    learns_rows: bool = False
    sources: tuple[str, ...] = ()
    needs_text: bool = False
    by_kernel: bool = False

    def propose(self, context: DraftContext) -> Forest:
        """Return a forest of the roots and at most D layers of K nodes."""
        raise NotImplementedError

    def prospects(self, beams: Beams, prompts: PromptTable | None, depth: int, count: int) -> Prospects:
        """Return the chances that layers will pass, of each row that runs.

        It is asked before an iteration of at most `depth` layers of at most `count` nodes, of drafters that foresee
        them.
        """
        raise NotImplementedError

    def learn(self, forest: Forest, candidates: Candidates) -> None:
        """Learn from the target's candidates of the nodes [R, N] that were proposed last.

        A proposal may depend on what the target computed for its row in earlier iterations, and on nothing that it
        computes in this one. Before a row's iteration 0 the target computed for another request.

        On a GPU propose and learn are captured as parts of a CUDA graph. No Python runs at a replay, so a tensor that
        is kept from one iteration for the next must be written in place.
        """

    def row_ended(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Learn from a row that is done. prompt: its tokens. texts: those of its hypotheses, best first."""

    def run_ended(self) -> None:
        """Keep for the next run what this one has taught. Raises UsageError where it cannot be written."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows [n] int64 of the batch, in this order. A drafter that keeps data of each row overrides
        it."""

    def release(self) -> None:
        """Free the memory of a cache of the drafter's own. The cache of `model` belongs to the engine."""


@dataclass(slots=True)
class LayerDrafts:
    """Nodes proposed for one layer, before they are part of a forest. Sampled nodes come first, in draw order.

    Attributes:
        above: [R, m] int64, index of the parent among the nodes of the layer above (0 .. n-1).
        token: [R, m] int64. valid, sampled: [R, m] bool (sampled implies valid).
        weight: [R, m] float32, running weight under the drafter that proposed the node.
        confidence: [R] float32, see pair_confidence; None where the drafter cannot tell.
    """

    above: Tensor
    token: Tensor
    valid: Tensor
    sampled: Tensor
    weight: Tensor
    confidence: Tensor | None = None


def pair_confidence(context: DraftContext, nodes: LayerNodes, weight: Tensor) -> Tensor | None:
    """Return the share of a layer's mass that goes on to the W likeliest pairs below it: [R] float32, 0 where the layer
    has no mass. Return None where no gate asks for it.

    weight: [R, n, C], running weights of all pairs. The share depends on the distribution that the layer is drawn from,
    never on the draws: see goes_on.
    """
    if context.gate is None:
        return None
    live = nodes.valid & ~nodes.ends
    pairs = torch.where(live.unsqueeze(-1), weight, NEG_INF).flatten(1)
    best = pairs.topk(min(context.num_beams, pairs.shape[1]), 1).values
    if context.row_beams is not None:
        rank = torch.arange(best.shape[1], device=best.device)
        best = best.masked_fill(rank >= context.row_beams.unsqueeze(1), NEG_INF)
    total = torch.logsumexp(torch.where(live, nodes.weight, NEG_INF), 1)
    return (torch.logsumexp(best, 1) - total).exp().nan_to_num(nan=0.0)


def goes_on(context: DraftContext, forest: Forest, confidence: Tensor | None) -> bool:
    """Return whether a layer of this confidence goes to the target. Where it does not, end the forest above it.

    The confidence is read on the host. Under rule `rejection` the decision may use only what was known before the draws
    of this layer, and it may not drop a layer above. To look at draws and then drop them would leave the other drafts
    with another distribution than the recorded one.
    """
    if context.gate is None or confidence is None or context.gate(confidence.tolist()):
        return True
    forest.end()
    return False


def children(
    context: DraftContext,
    forest: Forest,
    layer: int,
    drafts: LayerDrafts,
    distribution: DraftDistribution | None = None,
) -> LayerNodes:
    """Write layer + 1 of the forest, below the nodes of `layer`, and return its nodes.

    The drafts must be m = K (context.drafts_per_layer) wide: pad with invalid ones. Invalid drafts may hold any token
    in 0 .. V-1 and any parent in 0 .. n-1. An illegal draft becomes invalid. distribution: the one that the drafts were
    drawn from.

    Raises EngineStopped where the engine was asked to stop. It is checked here because every layer that tensor code
    writes passes through this function.
    """
    if context.stopping():
        raise EngineStopped
    nodes, above, token, buffer = forest.layers[layer], drafts.above, drafts.token, forest.buffer
    assert above.shape[1] == forest.drafts_per_layer
    assert isinstance(buffer, TensorBuffer), "a kernel writes the others"
    path_tokens = at_nodes(nodes.path_tokens, above)
    path_tokens[:, :, layer] = token
    state = nodes.stop_state.gather(1, above)
    legal_state = None if context.legal is None else following(context, nodes, above, token)
    made = LayerNodes(
        token=token,
        parent=above + forest.offset(layer),
        root=nodes.root.gather(1, above),
        path=extend_path(nodes.path.gather(1, above), token),
        stop_state=context.endings.step(state, token),
        valid=drafts.valid if legal_state is None else drafts.valid & (legal_state != DEAD),
        ends=context.endings.ends(state, token),
        sampled=drafts.sampled,
        weight=drafts.weight,
        path_tokens=path_tokens,
        ancestors=at_nodes(nodes.ancestors, above) | buffer.own(layer + 1),
        drafter_id=torch.zeros_like(token),
        legal_state=legal_state,
    )
    assert layer + 1 == len(buffer.written), "a buffer holds one forest"
    buffer.written.append(made)
    return forest.add(distribution)


def extend(context: DraftContext, buffer: KernelBuffer, forest: Forest, layer: int, candidates: Candidates) -> bool:
    """Draft layer + 1 from candidates of the nodes of `layer` with a kernel. Return False where the gate has ended the
    forest. Raises EngineStopped where the engine was asked to stop."""
    if context.stopping():
        raise EngineStopped
    if context.gate is not None:
        nodes = forest.layers[layer]
        weight = nodes.weight.unsqueeze(-1) + candidates.logprobs.nan_to_num(nan=NEG_INF, neginf=NEG_INF)
        if not goes_on(context, forest, pair_confidence(context, nodes, weight)):
            return False
    endings, warp = context.endings, context.warp
    flags = warp_flags(warp, stops=endings.stops.used, warps=context.sampler.random)
    buffer.extend(layer, candidates, endings.tensors, warp, flags, context.record_distribution)
    forest.add(buffer.drafted_distribution(layer, candidates))
    return True


def following(context: DraftContext, nodes: LayerNodes, above: Tensor, token: Tensor) -> Tensor:
    """Return the legal states of tokens [R, m] below the nodes `above` [R, m]; DEAD where a token is illegal."""
    assert context.legal is not None
    assert nodes.legal_state is not None
    return context.legal.step(nodes.legal_state.gather(1, above), token)


def padded_top(x: Tensor, count: int, missing: float) -> tuple[Tensor, Tensor]:
    """Return the `count` largest numbers of each row, [R, count]: values and indices. Ties keep their order. Where
    there are fewer numbers above `missing`, the rest have this value and index 0."""
    x = torch.nn.functional.pad(x, (0, max(0, count - x.shape[1])), value=missing)
    index = x.argsort(dim=1, descending=True, stable=True)[:, :count]
    value = x.gather(1, index)
    return value, torch.where(value > missing, index, 0)


def merge_nodes(first: LayerDrafts, second: LayerDrafts, priority: Tensor, width: int) -> tuple[LayerDrafts, Tensor]:
    """Merge two proposals that have the same layer above into one layer of `width` nodes.

    The layer has all m1 nodes of `first`, in their order, then the nodes of `second` (deterministic ones only) that are
    not among them, those of the largest priority [R, m2] first. There is room for width - m1 nodes of `second`; if it
    has fewer, the rest is padding. `first` must fit.

    The second result [R, m2] says where each node of `second` is in the merged layer. A duplicate is where its equal in
    `first` is. A node that is absent or was dropped has -1.
    """
    kept, room = first.token.shape[1], width - first.token.shape[1]
    assert room >= 0
    equal = match_pairs(second.above, second.token, first.above, first.token, first.valid)
    new = second.valid & (equal < 0)
    order = torch.where(new, priority, NEG_INF).argsort(dim=1, descending=True, stable=True)
    # an absent node has the priority of an impossible one, so a second stable sort puts real ones first
    order = order.gather(1, (~new.gather(1, order)).to(torch.int8).argsort(dim=1, stable=True))
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    column = torch.where(new & (rank < room), rank + kept, torch.where(second.valid, equal, -1))
    fitting = order[:, :room]
    padding = room - fitting.shape[1]

    def join(mine: Tensor, other: Tensor) -> Tensor:
        return torch.cat((mine, torch.nn.functional.pad(other.gather(1, fitting), (0, padding))), 1)

    drafts = LayerDrafts(
        above=join(first.above, second.above),
        token=join(first.token, second.token),
        valid=join(first.valid, new),
        sampled=join(first.sampled, torch.zeros_like(second.valid)),
        weight=join(first.weight, second.weight),
    )
    return drafts, column


def record_distribution(
    candidates: Candidates, log_q: Tensor, index: Tensor, valid: Tensor, scope: DistributionScope = "pool"
) -> DraftDistribution:
    """Record the distribution of K1 draws, and the mass left before each draw. This mass is summed from what is left,
    so that nothing cancels.

    log_q: [R, n, C] float32, normalised over the pool or (scope `parent`) for each node (see
    distribution.row_distribution). index: [R, K1] int64, flat index of each draw, in draw order. valid: [R, K1] bool.
    """
    log_probs = log_q.flatten(1).to(torch.float64)
    drawn = torch.where(valid, log_probs.gather(1, index), NEG_INF)
    # with replacement an index can occur twice; `log_rest` is not used there. Absent draws must take nothing away.
    taken = torch.zeros_like(log_probs, dtype=torch.int8).scatter_reduce(1, index, valid.to(torch.int8), "amax").bool()
    left = log_probs.masked_fill(taken, NEG_INF)
    if scope == "pool":
        tail = torch.logcumsumexp(drawn.flip(1), 1).flip(1)
        return DraftDistribution(
            candidates, log_q, drawn, torch.logaddexp(tail, torch.logsumexp(left, 1, keepdim=True))
        )
    above = index // log_q.shape[2]
    rest = torch.logsumexp(left.view(log_q.shape), 2).gather(1, above)
    later = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool, device=index.device).triu()
    same = (above.unsqueeze(2) == above.unsqueeze(1)) & later
    tail = torch.logsumexp(torch.where(same, drawn.unsqueeze(1), NEG_INF), 2)
    return DraftDistribution(candidates, log_q, drawn, torch.logaddexp(tail, rest), scope)
