"""The shown forest against arithmetic done here, and against what the engine went on with."""

from __future__ import annotations

import io
from collections import Counter

import pytest
import torch
from rich.console import Console
from torch import Tensor

from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.lab.profiling.snapshot import Snapshot
from dsbd_cli.lab.reports.profile_data import ShownForest, ShownNode
from dsbd_cli.lab.reports.profile_tree import SYMBOLS, forest_tree
from tests.helpers.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 6
METHODS = {
    "coupled": MethodConfig(rule="coupled", num_beams=2, drafts_per_layer=4, depth=2),
    "coupled threshold": MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=3, depth=2, width="threshold"),
    "rejection": MethodConfig(rule="rejection", num_beams=2, drafts_per_layer=4, depth=2, width="fixed"),
    "rejection threshold": MethodConfig(rule="rejection", num_beams=3, drafts_per_layer=4, depth=3, width="threshold"),
    "search": MethodConfig(rule="search", num_beams=2, drafts_per_layer=3, depth=2),
    "no draft": MethodConfig(rule="coupled", num_beams=2, depth=0),
}


def show(
    target: TableLM, draft: TableLM, method: MethodConfig, number: int, seed: int = 5, eos: tuple[int, ...] = ()
) -> ShownForest:
    """The forest of iteration `number`. The text is as long as that one and the next may make it."""
    codec = NumberCodec(target.vocab_size, eos)
    engine = Engine(target, draft if method.depth else None, codec, method, log_steps=True)
    snapshot = Snapshot(seed, number)
    engine.observe(snapshot)
    sampling = SamplingConfig(top_k=0, max_new_tokens=(number + 1) * (method.depth + 1) + 1)
    (result,) = list(engine.run([Request(id="r", seed=seed, prompt="1 0", sampling=sampling)]))
    steps = result.stats.step_log
    assert len(steps) > number, "a longer text is needed"
    names = [str(token) for token in range(target.vocab_size)]
    return snapshot.shown("r", method.rule, steps[number - 1].steps, names)


def distribution_of(table: Tensor, paths: list[list[int]], normalised: bool) -> dict[tuple[int, ...], float]:
    """exp(sum of log p) of every continuation of the paths, by path; each starts with the two prompt tokens."""
    logs = torch.log_softmax(table.double(), -1)
    weights = {}
    for path in paths:
        weight = sum(float(logs[path[i - 2], path[i - 1], path[i]]) for i in range(2, len(path)))
        for token in range(table.shape[-1]):
            weights[*path, token] = weight + float(logs[path[-2], path[-1], token])
    total = float(torch.logsumexp(torch.tensor(list(weights.values()), dtype=torch.float64), 0)) if normalised else 0.0
    return {path: float(torch.tensor(value - total).exp()) for path, value in weights.items()}


def path_of(forest: ShownForest, node: ShownNode) -> list[int]:
    """Tokens from the prompt down to the node."""
    tokens = []
    at: ShownNode | None = node
    while at is not None:
        tokens.append(int(at.token))
        at = forest.nodes[at.parent] if at.parent is not None else None
    return [1, *reversed(tokens)]


@pytest.mark.parametrize("name", ["coupled", "coupled threshold", "rejection", "rejection threshold", "search"])
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_p_and_q_are_the_distributions_of_their_pools(name: str, seed: int) -> None:
    """Guards against P or Q of the wrong beam, layer or token, and against a distribution that is not normalised."""
    target, draft = table_pair(3, VOCABULARY, 0.5)
    method = METHODS[name]
    forest = show(target, draft, method, 1, seed)
    normalised = method.rule != "search"
    for layer in range(1, forest.depth + 1):
        above = [node for node in forest.nodes if node.layer == layer - 1]
        drafted = [node for node in above if node.state != "completed"]
        live = [node for node in above if node.state in ("root", "accepted")]
        p = distribution_of(target.table, [path_of(forest, node) for node in live], normalised)
        q = distribution_of(draft.table, [path_of(forest, node) for node in drafted], normalised)
        for node in (node for node in forest.nodes if node.layer == layer):
            path = tuple(path_of(forest, node))
            if node.state in ("accepted", "rejected", "completed"):
                assert node.p == pytest.approx(p[path], abs=1e-5)
            else:
                assert node.p is None
            if node.state == "completed":
                assert node.q is None
            else:
                assert node.q == pytest.approx(q[path], abs=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_what_is_live_in_the_end_is_what_the_next_iteration_begins_with(name: str, number: int) -> None:
    """Guards against nodes called accepted or completed that the engine did not go on with."""
    for seed in range(3):
        target, draft = table_pair(11, VOCABULARY, 0.4)
        forest = show(target, draft, METHODS[name], number, seed)
        then = show(target, draft, METHODS[name], number + 1, seed)
        last = [node for node in forest.nodes if node.layer == forest.verified]
        live = Counter(node.token for node in last if node.state in ("accepted", "completed"))
        assert live == Counter(node.token for node in then.nodes if node.layer == 0)
        assert all(node.state == "unreached" for node in forest.nodes if node.layer > forest.verified)


@pytest.mark.parametrize("name", METHODS)
def test_states_follow_from_the_parents(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        target, draft = table_pair(seed, VOCABULARY, 0.8)
        forest = show(target, draft, METHODS[name], 2, seed)
        for node in forest.nodes:
            seen[node.state] += 1
            if node.parent is None:
                assert node.state == "root"
                continue
            live = forest.nodes[node.parent].state in ("root", "accepted")
            assert forest.nodes[node.parent].layer == node.layer - 1
            assert live or node.state in ("dead", "unreached")
            assert not (live and node.state == "dead")
    if METHODS[name].depth:
        assert {"accepted", "rejected", "completed", "dead"} <= set(seen)
    else:
        assert set(seen) == {"root", "completed"}


def test_an_end_that_nobody_drafted_is_shown_as_finished() -> None:
    target, draft = table_pair(4, VOCABULARY, 0.2, {5: 2.0})
    method = MethodConfig(num_beams=4, drafts_per_layer=4, depth=2)
    forests = [show(target, draft, method, 1, seed, eos=(5,)) for seed in range(12)]
    ended = [node for forest in forests for node in forest.nodes if node.state == "finished"]
    assert ended
    assert {node.token for node in ended} == {"5"}
    assert all(node.p is not None and node.p > 0 for node in ended)


def test_the_tree_of_a_case_done_by_hand() -> None:
    """Search, W=2, K=2, D=1. Target: 1 (.6), 2 (.3), 3 (.1); draft: 1 (.5), 3 (.4), 2 (.1). So 1 is accepted, 3 is
    rejected, and 2 completes the layer."""
    target = torch.tensor([0.0, 0.6, 0.3, 0.1]).clamp(min=1e-9).log().expand(4, 4, 4).contiguous()
    draft = torch.tensor([0.0, 0.5, 0.1, 0.4]).clamp(min=1e-9).log().expand(4, 4, 4).contiguous()
    method = MethodConfig(rule="search", num_beams=2, drafts_per_layer=2, depth=1)
    forest = show(TableLM(target), TableLM(draft), method, 1)
    console = Console(width=80, color_system=None, record=True, file=io.StringIO())
    console.print(forest_tree(forest))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[2:6] == [
        "● '0'",
        "├── ✓ '1'  P 0.600  Q 0.500",
        "├── ✗ '3'  P 0.100  Q 0.400",
        "└── + '2'  P 0.300",
    ]
    assert "✗ rejected draft (1)" in lines


def test_nodes_are_told_apart_without_colours() -> None:
    symbols = [symbol for symbol, _, _ in SYMBOLS.values()]
    assert len(set(symbols)) == len(symbols)
