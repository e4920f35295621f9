"""Drafts of `ngram` from what the target said in the iteration before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsbd_cli.engine.constraints.legal import DEAD
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.drafting.ngram import NgramDrafter
from dsbd_cli.engine.drafting.recall import KEPT
from dsbd_cli.engine.verify.search import Search
from tests.engine.drafting.test_lookup import make_context

TEXT = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]


def context_of(texts: list[list[list[int]]], depth: int = 2, count: int = 3) -> DraftContext:
    context = make_context(texts, 3, count, depth)
    context.sampler = Search.sampler
    context.iteration += 1  # something was said of each row
    return context


def said(forest: Forest, tokens: list[int], probs: list[float]) -> Candidates:
    """The same of every node."""
    shape = (*forest.flat.token.shape, len(tokens))
    return Candidates(torch.tensor(tokens).expand(shape), torch.tensor(probs).log().expand(shape), full=False)


def first_layer(forest: Forest, row: int = 0) -> list[tuple[int, int]]:
    nodes = forest.layers[1]
    return [(int(nodes.root[row, k]), int(nodes.token[row, k])) for k in range(3) if nodes.valid[row, k]]


def test_what_the_target_said_is_drafted_with_its_alternatives() -> None:
    drafter = NgramDrafter(12, recalls=True)
    forest = drafter.propose(context_of([[TEXT]]))
    assert first_layer(forest)[0] == (0, 4)
    drafter.learn(forest, said(forest, [4, 8, 9], [0.1, 0.2, 0.7]))
    assert first_layer(drafter.propose(context_of([[TEXT]]))) == [(0, 9), (0, 8), (0, 4)]


def test_nothing_is_kept_where_nothing_is_recalled_or_after_a_release() -> None:
    for recalls in (False, True):
        drafter = NgramDrafter(12, recalls=recalls)
        forest = drafter.propose(context_of([[TEXT]]))
        drafter.learn(forest, said(forest, [4, 8, 9], [0.1, 0.2, 0.7]))
        drafter.release()
        assert first_layer(drafter.propose(context_of([[TEXT]]))) == first_layer(forest)


def two_rows() -> NgramDrafter:
    """Has heard of two rows of one seed and one prompt, so that their paths have the same keys: 8 of one, 9 of the
    other."""
    drafter = NgramDrafter(12, recalls=True)
    forest = drafter.propose(context_of([[TEXT], [TEXT]]))
    candidates = said(forest, [8, 9], [0.3, 0.7])
    candidates.logprobs = torch.stack((candidates.logprobs[0].flip(1), candidates.logprobs[1]))
    drafter.learn(forest, candidates)
    return drafter


def test_a_row_goes_by_what_was_said_of_itself() -> None:
    forest = two_rows().propose(context_of([[TEXT], [TEXT]]))
    assert first_layer(forest, 0) == [(0, 8), (0, 9)]
    assert first_layer(forest, 1) == [(0, 9), (0, 8)]


def test_a_row_that_begins_goes_by_nothing() -> None:
    context = context_of([[TEXT], [TEXT]])
    context.iteration[1] = 0
    forest = two_rows().propose(context)
    assert first_layer(forest, 0) == [(0, 8), (0, 9)]
    assert first_layer(forest, 1) == [(0, 4)]


@pytest.mark.parametrize(("kept", "first"), [([1, 0], 9), ([0], 8), ([1], 9)])
def test_rows_that_change_places_take_along_what_was_said(kept: list[int], first: int) -> None:
    drafter = two_rows()
    drafter.select(torch.tensor(kept))
    assert first_layer(drafter.propose(context_of([[TEXT]] * len(kept))))[0] == (0, first)


def test_a_batch_of_another_size_goes_by_nothing() -> None:
    assert first_layer(two_rows().propose(context_of([[TEXT]]))) == [(0, 4)]


def test_of_a_large_vocabulary_the_best_are_kept_whatever_stands_beside() -> None:
    """Guards a limit of numbers for the whole batch, and nodes as wide as the vocabulary."""
    drafter, vocabulary = NgramDrafter(12, recalls=True), 150_000
    forest = drafter.propose(context_of([[TEXT], [TEXT]]))
    shape = (*forest.flat.token.shape, vocabulary)
    logprobs = torch.full((vocabulary,), -20.0)
    logprobs[torch.tensor([149_999, 30, 8])] = torch.tensor([0.5, 0.3, 0.2]).log()
    drafter.learn(forest, Candidates(torch.arange(vocabulary).expand(shape), logprobs.expand(shape), full=True))
    context = context_of([[TEXT], [TEXT]])
    context.endings.stops.eos = torch.zeros(vocabulary, dtype=torch.bool)
    proposed = drafter.propose(context)
    assert first_layer(proposed, 0) == first_layer(proposed, 1) == [(0, 149_999), (0, 30), (0, 8)]
    assert drafter._recall is not None
    assert drafter._recall.at(proposed.flat.path)[1].shape == (*proposed.flat.path.shape, KEPT)


class No5:
    """Token 5 may not follow; there is one state."""

    def step(self, state: Tensor, token: Tensor) -> Tensor:
        return torch.where(token == 5, DEAD, state)


def test_guesses_that_are_illegal_take_no_room() -> None:
    """1 2 stands twice, before 3 and, nearer to the end, before 5."""
    context = context_of([[[1, 2, 3, 4, 1, 2, 5, 6, 1, 2]]], count=1)
    context.legal = No5()  # type: ignore[assignment]
    context.buffer.written[0].legal_state = context.beams.legal_state
    forest = NgramDrafter(12, recalls=False).propose(context)
    assert forest.flat.token[0].tolist() == [2, 3, 4]
    assert forest.flat.valid.all()


def test_what_was_said_of_an_absent_node_is_not_taken_for_another() -> None:
    drafter = NgramDrafter(12, recalls=True)
    forest = drafter.propose(context_of([[TEXT]]))
    forest.flat.valid[:] = False
    drafter.learn(forest, said(forest, [8, 9], [0.3, 0.7]))
    assert first_layer(drafter.propose(context_of([[TEXT]])))[0] == (0, 4)


def test_a_child_follows_the_place_that_guessed_it() -> None:
    """1 2 stands twice, before 3 and before 5: each child goes on behind its own place."""
    text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    forest = NgramDrafter(12, recalls=False).propose(context_of([[text]]))
    nodes = forest.layers[2]
    paths = {tuple(nodes.path_tokens[0, k].tolist()) for k in range(3) if nodes.valid[0, k]}
    assert {(3, 4), (5, 6)} <= paths
