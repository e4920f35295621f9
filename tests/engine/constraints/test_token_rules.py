"""Token rules on the device against the plain reference of tests/oracles, on random texts; and wrong ones, which must
fail.

Guards: an n-gram that reaches from the prompt into the answer and is not seen, a rule of another row, a rule that looks
at a sibling, another order of the rules.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.token_rules import Timestamps, TokenRules, asked_rules, written_rules
from dsbd_cli.engine.constraints import token_rules as device
from dsbd_cli.engine.constraints.legal import NodePaths
from dsbd_cli.engine.constraints.token_rules import RuleTable
from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.nodes import LayerNodes
from dsbd_cli.errors import UsageError
from tests.oracles.token_rules import ruled

V, DEPTH = 7, 3
ENDS = {1, 2}
TIMES = Timestamps(first=4, seconds=0.02, latest=1, end=2)


def rules_of(rng: random.Random) -> TokenRules:
    """Each rule in about every second draw."""

    def maybe(value: object, other: object) -> object:
        return value if rng.random() < 0.5 else other

    def some() -> tuple[int, ...]:
        return tuple(rng.sample(range(3, V), rng.randrange(3)))

    chosen: dict[str, object] = {
        "suppress_tokens": some(),
        "begin_suppress_tokens": some(),
        "bad_words_ids": tuple(
            tuple(rng.randrange(3, V) for _ in range(rng.randint(1, 4))) for _ in range(rng.randrange(8))
        ),
        "allowed_token_ids": maybe(tuple(rng.sample(range(V), 5)), ()),
        "logit_bias": maybe(tuple((token, rng.uniform(-3, 3)) for token in some()), ()),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "min_length": maybe(rng.randrange(6), 0),
        "min_new_tokens": maybe(rng.randrange(5), 0),
        "forced_bos_token_id": maybe(rng.randrange(V), None),
        "forced_eos_token_id": maybe(1, None),
        "no_repeat_ngram_size": maybe(rng.randrange(1, 4), 0),
        "repetition_penalty": maybe(rng.choice([0.7, 1.4]), 1.0),
        "timestamps": maybe(True, False),
    }
    return TokenRules(**chosen)  # type: ignore[arg-type]


def nodes_of(rng: random.Random, rows: int, length: list[int]) -> tuple[NodePaths, list[list[list[int]]]]:
    """Two beams per row, and a node of every layer below each: NodePaths, and the generated tokens of every node."""
    beams = Beams.empty(rows, 2, 4, 16, torch.device("cpu"))
    count, layers = 2 * (1 + DEPTH), torch.arange(1 + DEPTH).repeat_interleave(2)
    whole = torch.randint(0, V, (rows, 2, 16), generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    beams.history, beams.length = whole.clone(), torch.tensor(length)
    path = torch.zeros(rows, count, DEPTH, dtype=torch.int64)
    texts: list[list[list[int]]] = []
    for row in range(rows):
        drafted = [[rng.randrange(V) for _ in range(DEPTH)] for _ in range(2)]
        texts.append([])
        for node in range(count):
            root, layer = node % 2, int(layers[node])
            path[row, node, :layer] = torch.tensor(drafted[root][:layer], dtype=torch.int64)
            path[row, node, layer:] = rng.randrange(V)  # a sibling's, which must not be looked at
            texts[-1].append([*whole[row, root, : length[row]].tolist(), *drafted[root][:layer]])
    number = torch.zeros(rows, count, dtype=torch.int64)
    values: dict[str, Tensor] = {item.name: number for item in fields(LayerNodes)}
    values |= {"root": torch.arange(count).remainder(2).expand(rows, -1), "path_tokens": path}
    return NodePaths(LayerNodes(**values), layers, beams), texts


def differing(seed: int) -> int:
    """Nodes whose log-probabilities are not the reference's, in one random batch of rows with rules of their own."""
    rng = random.Random(seed)
    length = [rng.randrange(6) for _ in range(3)]
    paths, texts = nodes_of(rng, 3, length)
    eos = torch.tensor([token in ENDS for token in range(V)])
    times = replace(TIMES, latest=rng.choice([None, 0, 1]))
    table = RuleTable(eos, times)
    table.allocate(3)
    rules = [rules_of(rng) for _ in range(3)]
    prompts = [[rng.randrange(V) for _ in range(rng.choice([1, 1, 4]))] for _ in range(3)]
    new = [rng.randrange(1, 9) for _ in range(3)]
    on_logits = [rng.random() < 0.5 for _ in range(3)]
    for row in range(3):
        table.begin(row, rules[row], prompts[row], new[row], on_logits=on_logits[row])
    logits = torch.randn(3, 2 * (1 + DEPTH), V) * 2
    total = logits.logsumexp(-1, keepdim=True)
    logprobs = logits - total
    want = []
    for row in range(3):
        for node, text in enumerate(texts[row]):
            taken = float(total[row, node]) if on_logits[row] else None
            want.append(
                ruled(logprobs[row, node].tolist(), rules[row], prompts[row], text, ENDS, new[row], times, taken)
            )
    acting = table.acting([0, 0, 0], min(length))
    got = logprobs.clone().flatten(0, 1)
    if acting is not None:
        at = acting.of(paths)
        for part in (slice(0, 7), slice(7, None)):  # as the candidates are taken, some nodes at a time
            at.apply(got[part], part, total.flatten(0, 1)[part])
    close = torch.isclose(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
    return int((~close.all(-1)).sum())


def test_rules_are_the_references() -> None:
    assert [differing(seed) for seed in range(60)] == [0] * 60


def test_a_row_that_began_anew_keeps_no_rule() -> None:
    """Guards rules left behind in a row by the request before, and rows that changed places."""
    table = RuleTable(torch.tensor([token in ENDS for token in range(V)]))
    table.allocate(2)
    table.begin(0, TokenRules(suppress_tokens=(3,), no_repeat_ngram_size=1, forced_bos_token_id=5), [4], 9)
    table.begin(1, TokenRules(bad_words_ids=((6,),)), [4], 9)
    table.begin(0, TokenRules(repetition_penalty=2.0), [0, 4], 9)
    table.select([1, 0])
    paths, texts = nodes_of(random.Random(1), 2, [0, 0])
    acting = table.acting([0, 0], 0)
    assert acting is not None
    logprobs = torch.full((16, V), -1.0)
    acting.of(paths).apply(logprobs, slice(0, 16), torch.zeros(16, 1))
    assert logprobs[:8, 6].isneginf().all()
    assert not logprobs[8:].isneginf().any()
    assert logprobs[8].tolist() == ruled([-1.0] * V, TokenRules(repetition_penalty=2.0), [0, 4], texts[1][0], ENDS, 9)


def test_a_row_without_rules_keeps_none_of_the_one_before() -> None:
    """Guards a penalty that acts on because another row has one."""
    table = RuleTable(torch.tensor([token in ENDS for token in range(V)]), TIMES)
    table.allocate(2)
    table.begin(0, TokenRules(repetition_penalty=2.0, suppress_tokens=(3,), timestamps=True), [4], 9)
    table.begin(1, TokenRules(repetition_penalty=2.0, suppress_tokens=(5,), timestamps=True), [4], 9)
    table.begin(0, TokenRules(), [4], 9)
    paths, _ = nodes_of(random.Random(1), 2, [3, 3])
    acting = table.acting([0, 0], 3)
    assert acting is not None
    logprobs = torch.full((16, V), -1.0)
    acting.of(paths).apply(logprobs, slice(0, 16), torch.zeros(16, 1))
    assert (logprobs[:8] == -1.0).all()
    assert not (logprobs[8:] == -1.0).all(1).any()


def ignores_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    time_facts = device._time_facts
    monkeypatch.setattr(
        device, "_time_facts", lambda text, length, first: time_facts(text, length, first) * torch.tensor([1, 0, 1])
    )


def test_nothing_is_computed_without_rules() -> None:
    table = RuleTable(torch.zeros(V, dtype=torch.bool))
    table.allocate(2)
    table.begin(0, TokenRules(), [4], 9)
    assert table.acting([0, None], 0) is None


def forgets_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RuleTable.begin
    monkeypatch.setattr(
        RuleTable, "begin", lambda self, row, rules, prompt, new, **more: begin(self, row, rules, prompt[-1:], new, **more)
    )


def penalises_after_the_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_penalise", lambda logprobs, text, penalty, shift: None)


def longer_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = device._repeats
    monkeypatch.setattr(
        device, "_repeats", lambda text, size, longest, columns: repeats(text, size + 1, longest + 1, columns)
    )


def forces_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    force = device._force
    monkeypatch.setattr(device, "_force", lambda logprobs, token: force(logprobs, token.amax().expand_as(token)))


@pytest.mark.parametrize(
    "break_it", [forgets_the_prompt, penalises_after_the_bans, longer_ngrams, forces_at_every_step, ignores_pairs]
)
def test_mutants_fail(break_it, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    break_it(monkeypatch)
    assert sum(differing(seed) for seed in range(60)) > 10


CHECKPOINT = TokenRules(min_length=5, forced_bos_token_id=3, suppress_tokens=(7, 8))


@pytest.mark.parametrize(
    ("text", "default", "wanted"),
    [
        (None, "checkpoint", CHECKPOINT),
        (None, "none", TokenRules()),
        ("none", "checkpoint", TokenRules()),
        ("checkpoint", "none", CHECKPOINT),
        ("forced_bos_token_id=none, min_length=0", "checkpoint", TokenRules(suppress_tokens=(7, 8))),
        ("none,repetition_penalty=1.5", "checkpoint", TokenRules(repetition_penalty=1.5)),
        ("suppress_tokens=1+2", "none", TokenRules(suppress_tokens=(1, 2))),
    ],
)
def test_rules_are_asked_for_by_name(text: str | None, default: str, wanted: TokenRules) -> None:
    assert asked_rules(text, CHECKPOINT, default=default) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "checkpoints",
        "min_length",
        "no_repeat=3",
        "min_length=-1",
        "repetition_penalty=0",
        "suppress_tokens=a",
        "no_repeat_ngram_size=257",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="token_rules"):
        asked_rules(text, CHECKPOINT, default="none")


def test_a_row_writes_rules_as_an_object() -> None:
    written = written_rules({"no_repeat_ngram_size": 3, "forced_bos_token_id": None, "suppress_tokens": [1, 2]})
    assert asked_rules(written, CHECKPOINT, default="checkpoint") == TokenRules(
        min_length=5, no_repeat_ngram_size=3, suppress_tokens=(1, 2)
    )
    with pytest.raises(UsageError, match="token_rules"):
        written_rules({"no_repeat_ngram_size": "three"})
    with pytest.raises(UsageError) as found:
        written_rules({"x" * 10_000: "x"})
    assert len(str(found.value)) < 300
