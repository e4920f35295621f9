"""Drafts of `ngram` from what the target said in the iteration before."""

from __future__ import annotations

import torch

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.probs import Candidates
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.drafting.ngram import NgramDrafter, NgramSource
from dsbd_cli.engine.verify.search import Search
from tests.drafting.test_lookup import make_context

TEXT = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]


def context_of(texts: list[list[list[int]]], depth: int = 2, count: int = 3) -> DraftContext:
    context = make_context(texts, 3, count, depth)
    context.sampler = Search.sampler
    return context


def said(forest: Forest, tokens: list[int], probs: list[float]) -> Candidates:
    """The same of every node."""
    shape = (*forest.flat.token.shape, len(tokens))
    return Candidates(torch.tensor(tokens).expand(shape), torch.tensor(probs).log().expand(shape), full=False)


def first_layer(forest: Forest, row: int = 0) -> list[tuple[int, int]]:
    nodes = forest.layers[1]
    return [(int(nodes.root[row, k]), int(nodes.token[row, k])) for k in range(3) if nodes.valid[row, k]]


def test_what_the_target_said_is_drafted_with_its_alternatives() -> None:
    drafter = NgramDrafter(NgramSource(12), recalls=True)
    forest = drafter.propose(context_of([[TEXT]]))
    assert first_layer(forest)[0] == (0, 4)
    drafter.learn(forest, said(forest, [4, 8, 9], [0.1, 0.2, 0.7]))
    assert first_layer(drafter.propose(context_of([[TEXT]]))) == [(0, 9), (0, 8), (0, 4)]


def test_nothing_is_kept_where_nothing_is_recalled_or_after_a_release() -> None:
    for recalls in (False, True):
        drafter = NgramDrafter(NgramSource(12), recalls=recalls)
        forest = drafter.propose(context_of([[TEXT]]))
        drafter.learn(forest, said(forest, [4, 8, 9], [0.1, 0.2, 0.7]))
        drafter.release()
        assert first_layer(drafter.propose(context_of([[TEXT]]))) == first_layer(forest)


def test_a_row_with_the_same_seed_and_another_prompt_is_not_it() -> None:
    """Paths count from the prompt, so rows of one seed share the keys of their paths."""
    other = [9, *TEXT[1:]]
    drafter = NgramDrafter(NgramSource(12), recalls=True)
    forest = drafter.propose(context_of([[TEXT]]))
    drafter.learn(forest, said(forest, [8, 9], [0.3, 0.7]))
    alone = NgramDrafter(NgramSource(12), recalls=True).propose(context_of([[other]]))
    assert first_layer(drafter.propose(context_of([[other]]))) == first_layer(alone)


def test_what_was_said_of_an_absent_node_is_not_taken_for_another() -> None:
    drafter = NgramDrafter(NgramSource(12), recalls=True)
    forest = drafter.propose(context_of([[TEXT]]))
    forest.flat.valid[:] = False
    drafter.learn(forest, said(forest, [8, 9], [0.3, 0.7]))
    assert first_layer(drafter.propose(context_of([[TEXT]])))[0] == (0, 4)


def test_a_child_follows_the_place_that_guessed_it() -> None:
    """1 2 stands twice, before 3 and before 5: each child goes on behind its own place."""
    text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    forest = NgramDrafter(NgramSource(12), recalls=False).propose(context_of([[text]]))
    nodes = forest.layers[2]
    found = {tuple(nodes.path_tokens[0, k].tolist()) for k in range(3) if nodes.valid[0, k]}
    assert {(3, 4), (5, 6)} <= found
