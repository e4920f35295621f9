"""The suffix index against a search through all tokens.

Guards: a context that reaches over the end of a document, a chain that goes on into overwritten tokens, memory above
its limit, a path that is counted twice, contexts of the same hash.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_cli.engine.drafting.ngram import match_scores
from dsbd_cli.ops.cpu import suffix
from dsbd_cli.ops.cpu.suffix import BYTES, DECAY, HITS, LENGTHS, MOST_MATCH, NO_TOKEN, SKIPPED, SuffixIndex, look_back

PATHS, DEPTH = 12, 4
Found = tuple[dict[tuple[int, ...], float], float]


def search(held: Sequence[int], text: Sequence[int], longest: int) -> Found:
    """Weights of the paths that follow, and the best match, by a look at every position."""
    paths, best = dict[tuple[int, ...], float](), 0.0
    for skipped in range(SKIPPED + 1):
        context, differing = list(text[: len(text) - skipped]), list(text[len(text) - skipped :])
        for length in LENGTHS:
            if length > min(longest, len(context)):
                continue
            positions = [
                p
                for p in range(len(held) - 1, length - 1, -1)
                if held[p] != NO_TOKEN and list(held[p - length : p]) == context[-length:]
            ]
            hits = 0
            for p in positions[:HITS]:
                equal = 0
                while (
                    equal < min(longest, p, len(context))
                    and held[p - 1 - equal] == context[-1 - equal]
                    and held[p - 1 - equal] != NO_TOKEN
                ):
                    equal += 1
                instead = list(held[p : p + skipped])
                if len(instead) < skipped or p + skipped >= len(held) or NO_TOKEN in instead:
                    continue
                if skipped and instead[0] == differing[0]:
                    continue
                hits += 1
                score = DECAY**skipped * (1 - DECAY**equal) / (1 - DECAY)
                score += sum(
                    DECAY ** (skipped - 1 - step) for step in range(1, skipped) if instead[step] == differing[step]
                )
                alike = min(MOST_MATCH, math.log(1 - score * (1 - DECAY)) / math.log(DECAY))
                path = tuple(held[p + skipped : p + skipped + DEPTH])
                path = path[: path.index(NO_TOKEN)] if NO_TOKEN in path else path
                if not path or (path not in paths and len(paths) == PATHS):
                    continue
                paths[path] = paths.get(path, 0.0) + 2**alike
                best = max(best, alike)
            if hits:
                break
    return paths, best


def looked_up(index: SuffixIndex, texts: Sequence[Sequence[int]], longest: int) -> list[Found]:
    width = 24
    rows = np.full((len(texts), width), NO_TOKEN, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[max(0, width - len(text)) :] = text[-width:]
    tokens, weight, match = index.look_up(rows, longest, PATHS, DEPTH)
    answers = []
    for b in range(len(texts)):
        paths = {}
        for path, value in zip(tokens[b].tolist(), weight[b].tolist(), strict=True):
            if value > 0:
                real = tuple(token for token in path if token != NO_TOKEN)
                assert real
                assert real not in paths
                paths[real] = value
        answers.append((paths, float(match[b])))
    return answers


def same(left: Found, right: Found) -> bool:
    return left[0] == pytest.approx(right[0], rel=1e-5) and left[1] == pytest.approx(right[1], abs=1e-4)


DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=8)


@settings(max_examples=300, deadline=None)
@given(documents=DOCUMENTS, text=st.lists(st.integers(0, 3), max_size=24), longest=st.integers(2, 20))
def test_a_look_up_is_a_search_through_all_tokens(documents: list[list[int]], text: list[int], longest: int) -> None:
    index, held = SuffixIndex(1000), []
    for document in documents:
        index.insert(np.array(document, np.int32))
        held += [*document, NO_TOKEN]
    assert index.tokens.tolist() == held
    assert same(looked_up(index, [text], longest)[0], search(held, text, longest))


@pytest.mark.parametrize("seed", range(8))
def test_the_oldest_tokens_leave_first(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "FIRST_ROOM", 16)
    draw, index, held = random.Random(seed), SuffixIndex(100), list[int]()
    for _ in range(60):
        document = [draw.randint(0, 2 + seed) for _ in range(draw.randint(0, 90))]
        index.insert(np.array(document, np.int32))
        held = [*held, *document, NO_TOKEN][-64:]
        assert index.held == len(held)
        assert index.tokens.tolist() == held
        text = document[: draw.randint(0, 30)] or [0, 1]
        assert same(looked_up(index, [text], 20)[0], search(held, text, 20))
        assert index.nbytes <= 64 * BYTES


def test_positions_that_are_counted_from_the_beginning_again_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts inserted across position 2^31."""
    monkeypatch.setattr(suffix, "FIRST_ROOM", 16)
    draw, index, held = random.Random(0), SuffixIndex(64), list[int]()
    index.insert(np.zeros(64, np.int32))
    index._end = suffix.POSITIONS - 100
    for _ in range(30):
        document = [draw.randint(0, 3) for _ in range(20)]
        index.insert(np.array(document, np.int32))
        held = [*held, *document, NO_TOKEN][-64:]
        if len(held) == 64:
            assert index.tokens.tolist() == held
            found, expected = looked_up(index, [document], 20)[0], search(held, document, 20)
            assert set(found[0]) <= set(expected[0])
    assert same(found, expected)


def test_a_million_answers_keep_to_the_memory() -> None:
    """Answers of twenty tokens in documents of ten thousand answers each."""
    index, draw = SuffixIndex(2**16), np.random.default_rng(0)
    for _ in range(100):
        documents = draw.integers(0, 9, (10_000, 21), dtype=np.int32)
        documents[:, 20] = NO_TOKEN
        index.insert(documents.ravel()[:-1])
        assert index.nbytes == 2**16 * BYTES
        assert index.held == 2**16
    assert looked_up(index, [documents[-1, :12].tolist()], 20)[0][1] == 12


def test_a_corpus_larger_than_the_memory_keeps_its_end() -> None:
    index = SuffixIndex(1)
    tokens = np.arange(40_000, dtype=np.int32)
    index.insert(tokens)
    assert index.tokens.tolist() == [*range(40_000 - 2**14 + 1, 40_000), NO_TOKEN]


@pytest.mark.parametrize("longest", [2, 5, 16])
def test_a_look_back_is_the_comparison_of_tensors(longest: int) -> None:
    """That of `ngram`: the same places in the same order, and the same likeness."""
    draw = random.Random(longest)
    for _ in range(40):
        length = draw.randint(1, 40)
        text = [draw.randint(0, 3) for _ in range(length)]
        padded = [*text, *[NO_TOKEN] * 3]
        rank, start = match_scores(torch.tensor([[padded]]), torch.tensor([length]), longest).topk(min(4, length), 2)
        found = look_back(np.array([[*[NO_TOKEN] * 3, *text]], np.int32), np.array([length], np.int32), longest, 4, 5)
        expected = [
            [text[place + step % (length - place)] for step in range(5)]
            for worth, place in zip(rank[0, 0].tolist(), start[0, 0].tolist(), strict=True)
            if worth >= 0
        ]
        assert found.tokens[0][: len(expected)].tolist() == expected
        assert (found.weight[0] > 0).tolist() == [number < len(expected) for number in range(4)]
        score = rank[0, 0, 0].item() // len(padded) / 1000 if expected else 0.0
        alike = math.log(1 - min(score * (1 - DECAY), 1 - DECAY**MOST_MATCH)) / math.log(DECAY)
        assert found.match[0] == pytest.approx(alike, abs=1e-4)


def test_texts_of_a_batch_are_looked_up_apart() -> None:
    index = SuffixIndex(1000)
    index.insert(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32))
    texts = [[1, 2, 3], [9, 9], [3, 4, 5, 0], []]
    together = looked_up(index, texts, 20)
    assert together == [looked_up(index, [text], 20)[0] for text in texts]
    assert together[0] == ({(4, 5, 6, 7): 8.0}, 3.0)
    assert together[1] == together[3] == ({}, 0.0)
    assert list(together[2][0]) == [(7, 8, 9)]  # the last token differs
