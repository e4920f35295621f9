"""The drafters that read the text, as tensors, against scalar references written from their descriptions.

Guards: an index off by one at the end of a context, a match across rows or beams, a tree cut in the wrong order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from dsbd_cli.engine.constraints.stops import StopTable
from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.forest_buffer import ForestSizes, TensorBuffer
from dsbd_cli.engine.core.slots import SlotTable
from dsbd_cli.engine.drafting.base import DraftContext, Endings
from dsbd_cli.engine.drafting.index import CorpusTokens
from dsbd_cli.engine.drafting.ngram import BEST_LOGPROB, LOGPROB_STEP, PLACES, NgramDrafter
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths
from dsbd_cli.engine.drafting.suffix import SuffixDrafter
from dsbd_cli.engine.drafting.text import PromptTable, contexts, suffix
from dsbd_cli.engine.verify.coupled import Coupled
from dsbd_cli.engine.verify.search import Search
from dsbd_cli.ops.select import suffix_index
from tests.helpers.layers import warp_of

CPU = torch.device("cpu")
EOS = 0


def make_context(texts: Sequence[Sequence[Sequence[int]]], prompt: int, count: int, depth: int) -> DraftContext:
    """texts[row][beam]: the tokens so far, the first `prompt` of which are the prompt; all beams equally likely."""
    rows, width = len(texts), max(len(beams) for beams in texts)
    new = [len(beams[0]) - prompt for beams in texts]
    beams = Beams.empty(rows, width, 64, max(new) + 3, CPU)
    prompts = PromptTable.empty(rows, CPU)
    beams.history += 7  # what stands past the end means nothing
    for row, own in enumerate(texts):
        prompts.put(row, own[0][:prompt])
        beams.length[row] = new[row]
        for beam, tokens in enumerate(own):
            assert len(tokens) == len(own[0])
            beams.valid[row, beam] = True
            beams.token[row, beam] = tokens[-1]
            beams.history[row, beam, : new[row]] = torch.tensor(tokens[prompt:])
    table = SlotTable.empty(rows, 128 + depth * count, CPU)
    noise = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    return DraftContext(
        beams=beams,
        sampler=Coupled.sampler,
        drafts_end=Coupled.drafts_end,
        warp=warp_of(rows, (1.0, 0, 1.0, 0.0), "pool"),
        endings=Endings(StopTable([b"x"] * 50, 50, CPU, [EOS])),
        num_beams=width,
        depth=depth,
        drafts_per_layer=count,
        buffer=TensorBuffer(ForestSizes(width, count, depth, 64), beams, table, noise),
        row_key=noise[0],
        iteration=noise[1],
        draft_backlog=0,
        record_distribution=False,
        prompts=prompts,
    )


def random_texts(seed: int, letters: int = 4) -> list[list[list[int]]]:
    """Rows of other lengths and numbers of beams; few letters, so that there is much to find."""
    draw = random.Random(seed)
    rows = []
    for _ in range(6):
        length, prompt = draw.randint(1, 30), [draw.randint(1, letters) for _ in range(3)]
        rows.append([prompt + [draw.randint(1, letters) for _ in range(length)] for _ in range(draw.randint(1, 3))])
    return rows


def as_lists(paths: Paths, row: int) -> list[tuple[int, tuple[int, ...], float]]:
    """(beam, tokens, weight) of the real paths, heaviest first."""
    listed = [
        (int(paths.root[row, m]), tuple(paths.tokens[row, m, : int(paths.length[row, m])].tolist()), float(w))
        for m, w in enumerate(paths.weight[row].tolist())
        if paths.length[row, m] > 0
    ]
    return sorted(listed, key=lambda item: -item[2])


def test_contexts_are_prompt_and_history() -> None:
    texts = random_texts(0)
    context = make_context(texts, 3, 4, 2)
    assert context.prompts is not None
    tokens, length = contexts(context.prompts, context.beams)
    for row, beams in enumerate(texts):
        assert length[row] == len(beams[0])
        for beam, own in enumerate(beams):
            assert tokens[row, beam].tolist() == own + [-1] * (tokens.shape[2] - len(own))
            assert suffix(tokens, length, 6)[row, beam].tolist() == ([-1] * 6 + own)[-6:]


def places_of(text: list[int], longest: int) -> list[int]:
    """Earlier places, best first: the most alike, then the latest."""

    def worth(position: int) -> int:
        backs = range(1, min(longest, position) + 1)
        return sum(max(1, round(1000 * 0.85 ** (back - 1))) for back in backs if text[position - back] == text[-back])

    places = [position for position in range(1, len(text)) if worth(position)]
    return sorted(places, key=lambda position: (worth(position), position), reverse=True)


def lookup(text: list[int], longest: int, depth: int) -> list[tuple[int, ...]]:
    """Continuations, best place first; a path past the end repeats itself."""
    return [tuple(text[p + step % (len(text) - p)] for step in range(depth)) for p in places_of(text, longest)]


@pytest.mark.parametrize("longest", [1, 3, 12])
def test_ngram_is_its_scalar_reference(longest: int) -> None:
    texts = random_texts(longest)
    context = make_context(texts, 3, 5, 4)
    paths = NgramDrafter(longest, recalls=False).paths(context)
    for row, beams in enumerate(texts):
        expected = [
            (beam, tokens, (1 + 1 / len(beams)) * 0.25**rank)
            for beam, own in enumerate(beams)
            for rank, tokens in enumerate(lookup(own, longest, 4)[:5])
        ]
        assert _same(as_lists(paths, row), expected)


def test_ngram_goes_on_behind_a_changed_token() -> None:
    """The beams copy 1 .. 9; one of them has changed the last token, the other one the token before it."""
    source = [1, 2, 3, 4, 5, 6, 7, 8, 9, 20]
    changed = [*source, 1, 2, 3, 4, 15], [*source, 1, 2, 3, 14, 5]
    context = make_context([list(changed)], 2, 2, 4)
    context.sampler = Search.sampler
    forest = NgramDrafter(12, recalls=True).propose(context)
    paths = {
        (int(forest.layers[4].root[0, k]), *forest.layers[4].path_tokens[0, k].tolist())
        for k in range(2)
        if forest.layers[4].valid[0, k]
    }
    assert paths == {(0, 6, 7, 8, 9), (1, 6, 7, 8, 9)}


def guessed_tree(beams: list[list[int]], longest: int, depth: int, count: int) -> list[list[tuple[int, ...]]]:
    """(beam, tokens ...) of the best pairs of each layer, best first. A root follows several places, each node below
    one only: that which guessed its token."""
    places = [[(position, len(own) - position) for position in places_of(own, longest)[:PLACES]] for own in beams]
    layer = [((beam,), 0.0, matches) for beam, matches in enumerate(places)]
    layers = []
    for _ in range(depth):
        below = []
        for path, weight, matches in layer:
            text, taken = beams[path[0]], set[int]()
            for rank, (position, period) in enumerate(matches):
                if text[position] not in taken:
                    taken.add(text[position])
                    after = position + 1 if position + 1 < len(text) else position + 1 - period
                    below.append(
                        ((*path, text[position]), weight + BEST_LOGPROB - LOGPROB_STEP * rank, [(after, period)])
                    )
        layer = sorted(below, key=lambda node: -node[1])[:count]
        layers.append([path for path, _, _ in layer])
    return layers


@pytest.mark.parametrize("longest", [1, 3, 12])
@pytest.mark.parametrize("recalls", [False, True])
def test_the_nodes_of_ngram_are_those_of_its_scalar_reference(longest: int, recalls: bool) -> None:
    """Guards a node that follows a place of another one, and a path past the end of the text that goes on elsewhere
    than at its beginning."""
    texts = [*random_texts(longest), [[1, 2, 3, 4, 2, 3]], [[1, 2, 1, 2, 1, 2], [1, 2, 3, 3, 3, 3]]]
    context = make_context(texts, 3, 6, 7)
    context.sampler = Search.sampler
    forest = NgramDrafter(longest, recalls=recalls).propose(context)
    for row, beams in enumerate(texts):
        for layer, wanted in enumerate(guessed_tree(beams, longest, 7, 6), 1):
            nodes = forest.layers[layer]
            drafted = [
                (int(nodes.root[row, k]), *nodes.path_tokens[row, k, :layer].tolist())
                for k in range(6)
                if nodes.valid[row, k]
            ]
            assert drafted == wanted


def _same(paths: list[tuple[int, tuple[int, ...], float]], expected: list[tuple[int, tuple[int, ...], float]]) -> bool:
    """Equal as multisets, weights up to rounding."""

    def key(items: list[tuple[int, tuple[int, ...], float]]) -> list[tuple[int, tuple[int, ...], float]]:
        return sorted((beam, tokens, round(weight, 5)) for beam, tokens, weight in items)

    return key(paths) == key(expected)


def make_corpus(seed: int) -> CorpusTokens:
    draw = random.Random(seed)
    return CorpusTokens([draw.randint(1, 4) for _ in range(draw.randint(0, 60))] for _ in range(12))


def source_of(corpus: CorpusTokens) -> SuffixDrafter:
    index = suffix_index(len(corpus.ids))
    index.insert(corpus.tokens[:-1])
    return SuffixDrafter({"file": index}, 20)


def tree_of(paths: list[tuple[int, tuple[int, ...], float]], depth: int, count: int) -> list[set[tuple[int, ...]]]:
    """The `count` heaviest prefixes of each layer below kept ones."""
    layers: list[set[tuple[int, ...]]] = []
    above: set[tuple[int, ...]] = {(beam,) for beam, _, _ in paths}
    for layer in range(1, depth + 1):
        weight: Counter[tuple[int, ...]] = Counter()
        for beam, tokens, value in paths:
            if len(tokens) >= layer and (beam, *tokens[: layer - 1]) in above and EOS not in tokens[:layer]:
                weight[(beam, *tokens[:layer])] += value
        above = set(sorted(weight, key=lambda prefix: -weight[prefix])[:count])
        layers.append(above)
    return layers


class Fixed(PathDrafter):
    """Drafts given paths."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def paths(self, context: DraftContext) -> Paths:
        return self._paths


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_of_paths_is_its_scalar_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, number, depth, count = 3, 40, 4, 6
    paths = Paths(
        root=torch.randint(0, 2, (rows, number), generator=generator),
        tokens=torch.randint(0, 4, (rows, number, depth), generator=generator),
        length=torch.randint(0, depth + 1, (rows, number), generator=generator),
        weight=torch.rand(rows, number, generator=generator),
    )
    context = make_context([[[5, 6, 7, 8], [5, 6, 7, 9]]] * rows, 3, count, depth)
    forest = Fixed(paths).propose(context)
    for row in range(rows):
        expected = tree_of(as_lists(paths, row), depth, count)
        for layer, wanted in enumerate(expected, 1):
            nodes = forest.layers[layer]
            drafted = [
                (int(nodes.root[row, k]), *nodes.path_tokens[row, k, :layer].tolist())
                for k in range(count)
                if nodes.valid[row, k]
            ]
            assert len(drafted) == len(set(drafted))
            assert set(drafted) == wanted


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_is_read_from_the_context(depth: int) -> None:
    for drafter in (NgramDrafter(4, recalls=False), source_of(make_corpus(0))):
        forest = PathDrafter.propose(drafter, make_context([[[1, 2, 1, 2, 1]]], 3, 4, depth))
        assert forest.depth == depth
        assert [layer.token.shape[1] for layer in forest.layers] == [1, *[4] * depth]
