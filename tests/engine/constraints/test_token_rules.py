"""Token rules on the device against the plain reference of tests/oracles, on random texts; and wrong ones, which must
fail.

Guards: an n-gram that reaches from the prompt into the answer and is not seen, a rule of another row, a rule that looks
at a sibling, another order of the rules.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.sampling import SamplingConfig
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
        "renormalize_logits": maybe(True, False),
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


BUSY = TokenRules(
    repetition_penalty=2.0,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    logit_bias=((2, 1.0), (5, -1.0)),
    bad_words_ids=((3,), (4, 5, 6)),
    allowed_token_ids=(1, 2, 3, 4),
    suppress_tokens=(3,),
    timestamps=True,
)


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
    table.begin(0, BUSY, [4], 9, on_logits=True)
    table.begin(1, BUSY, [4], 9, on_logits=True)
    table.begin(0, TokenRules(), [4], 9, on_logits=True)
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


def test_wider_tables_keep_what_they_hold() -> None:
    """Guards words and biases of a row that move when another row brings more of them, or longer ones."""
    table = RuleTable(torch.tensor([token in ENDS for token in range(V)]))
    table.allocate(2)
    rules = [
        TokenRules(bad_words_ids=((4, 5), (5, 5)), logit_bias=((3, 2.0),)),
        TokenRules(bad_words_ids=((1, 2, 3, 4), (4, 6), (6, 6, 6)), logit_bias=((1, 1.0), (2, -1.0), (6, 0.5))),
    ]
    paths, texts = nodes_of(random.Random(2), 2, [4, 4])
    for row in range(2):
        table.begin(row, rules[row], [4], 9)
    acting = table.acting([0, 0], 4)
    assert acting is not None
    logprobs = torch.full((16, V), -1.0)
    acting.of(paths).apply(logprobs, slice(0, 16), torch.zeros(16, 1))
    want = [ruled([-1.0] * V, rules[node // 8], [4], texts[node // 8][node % 8], ENDS, 9) for node in range(16)]
    assert logprobs.tolist() == want
    assert table.words.shape == (2, 3, 4)


def test_nothing_is_computed_without_rules() -> None:
    table = RuleTable(torch.zeros(V, dtype=torch.bool))
    table.allocate(2)
    table.begin(0, TokenRules(), [4], 9)
    assert table.acting([0, None], 0) is None


def forgets_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RuleTable.begin
    monkeypatch.setattr(
        RuleTable,
        "begin",
        lambda self, row, rules, prompt, new, **more: begin(self, row, rules, prompt[-1:], new, **more),
    )


def penalises_after_the_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_penalise", lambda logprobs, text, penalty, shift: None)


def longer_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = device._repeats
    monkeypatch.setattr(
        device, "_repeats", lambda text, size, longest, columns: repeats(text, size + 1, longest + 1, columns)
    )


def counts_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presence and frequency of the whole text, where some rule looks at it."""
    made = device._NodeRules

    def counting(*values: Any) -> Any:
        *others, text, counted, facts = values
        return made(*others, text, counted if text is None or counted is None else text, facts)

    monkeypatch.setattr(device, "_NodeRules", counting)


def counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subtract = device._subtract
    monkeypatch.setattr(
        device,
        "_subtract",
        lambda logprobs, counted, presence, frequency: subtract(logprobs, counted, presence + frequency, 0 * frequency),
    )


def penalises_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    penalise = device._penalise
    monkeypatch.setattr(
        device, "_penalise", lambda logprobs, text, penalty, shift: penalise(logprobs, text, penalty, 0 * shift)
    )


def normalises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "log_normalise", lambda logprobs: logprobs)


def completes_by_the_last_two(monkeypatch: pytest.MonkeyPatch) -> None:
    completions = device._completions
    monkeypatch.setattr(
        device, "_completions", lambda text, words, row, columns: completions(text, words[:, :, -2:], row, columns)
    )


def takes_the_words_of_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    completions = device._completions
    monkeypatch.setattr(
        device, "_completions", lambda text, words, row, columns: completions(text, words, 0 * row, columns)
    )


def adds_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_add", lambda logprobs, token, number: None)


def looks_at_the_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of the live beam in place of the drafted node's own."""
    monkeypatch.setattr(
        NodePaths,
        "generated",
        lambda self: (
            self.beams.history.gather(1, self.nodes.root.unsqueeze(2).expand(-1, -1, self.beams.history.shape[2])),
            self.beams.length.unsqueeze(1).expand_as(self.nodes.root),
        ),
    )


def forces_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    force = device._force
    monkeypatch.setattr(device, "_force", lambda logprobs, token: force(logprobs, token.amax().expand_as(token)))


MUTANTS = [
    forgets_the_prompt,
    penalises_after_the_bans,
    longer_ngrams,
    ignores_pairs,
    counts_the_prompt,
    counts_once,
    penalises_log_probabilities,
    normalises_nothing,
    completes_by_the_last_two,
    takes_the_words_of_the_first_row,
    adds_no_bias,
    looks_at_the_beam,
    forces_at_every_step,
]


@pytest.mark.parametrize("break_it", MUTANTS)
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
        ("bad_words_ids=4+5-6-7", "none", TokenRules(bad_words_ids=((4,), (5, 6, 7)))),
        ("logit_bias=4:-1.5+6:2", "none", TokenRules(logit_bias=((4, -1.5), (6, 2.0)))),
        (
            "presence_penalty=-0.5,frequency_penalty=2,allowed_token_ids=8",
            "none",
            TokenRules(presence_penalty=-0.5, frequency_penalty=2.0, allowed_token_ids=(8,)),
        ),
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
        "presence_penalty=2.1",
        "frequency_penalty=nan",
        "logit_bias=5",
        "logit_bias=5:101",
        "logit_bias=5:1+5:2",
        "bad_words_ids=4--5",
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
    values = {"bad_words_ids": [[5, 6], [7]], "logit_bias": {"5": -1.5}, "presence_penalty": 0.5}
    assert asked_rules(written_rules(values), TokenRules(), default="none").acting == values
    assert asked_rules(written_rules({"bad_words_ids": [7]}), TokenRules(), default="none").bad_words_ids == ((7,),)
    for wrong in ({"no_repeat_ngram_size": "three"}, {"bad_words_ids": [[]]}, {"suppress_tokens": [[1]]}):
        with pytest.raises(UsageError, match="token_rules"):
            written_rules(wrong)
    with pytest.raises(UsageError) as caught:
        written_rules({"x" * 10_000: "x"})
    assert len(str(caught.value)) < 300


def test_a_request_overrides_token_rules() -> None:
    """Guards a rule that is asked for twice in different ways: one of them would be ignored."""
    sampling = SamplingConfig(token_rules="checkpoint,no_repeat_ngram_size=3", min_length=0, logit_bias={5: 1.0})
    assert sampling.rules(CHECKPOINT, "none") == replace(
        CHECKPOINT, min_length=0, no_repeat_ngram_size=3, logit_bias=((5, 1.0),)
    )
    same = SamplingConfig(token_rules="repetition_penalty=1.5", repetition_penalty=1.5)
    assert same.rules(CHECKPOINT, "none") == TokenRules(repetition_penalty=1.5)
    with pytest.raises(UsageError, match=r"repetition_penalty is 1\.2, but token_rules has repetition_penalty 1\.5"):
        SamplingConfig(token_rules="repetition_penalty=1.5", repetition_penalty=1.2)
    # as in transformers, where min_new_tokens takes the place of min_length
    assert SamplingConfig(min_new_tokens=0).rules(CHECKPOINT, "checkpoint").min_length == 0
    assert SamplingConfig(min_length=4).rules(CHECKPOINT, "checkpoint").min_length == 4
    for both in ({"min_new_tokens": 2}, {"token_rules": "min_new_tokens=2"}):
        with pytest.raises(UsageError, match="min_length is 3, but min_new_tokens is given, which acts in its place"):
            SamplingConfig(min_length=3, **both)
    with pytest.raises(UsageError, match=r"logit_bias is \[.*, but must be token ids, each once"):
        SamplingConfig(logit_bias=((5, 1.0), (5, 2.0)))
