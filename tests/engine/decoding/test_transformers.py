"""Rule `search` against transformers' own `generate(num_beams=W, do_sample=False)`, token for token, with and without
a draft.

Guards: another end rule, another tie or length rule, a cache that goes wrong inside a real model. 200 prompts and
more over three families.
Greedy decoding is W=1. Float32 sums in another order could flip a near-tie; none occurs with these seeds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.helpers.tiny import V, build
from tests.helpers.toys import NumberCodec

FAMILIES = ("llama", "opt", "gpt2")


@cache
def model(family: str, noise: float = 0.0) -> Any:
    """A tiny random model whose logits are spread enough to have opinions; with noise, a perturbed copy of it for a
    draft."""
    made = build(family)
    torch.manual_seed(5)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
            parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    return made


@cache
def forest(family: str, noise: float = 0.0) -> CausalForestModel:
    return CausalForestModel(model(family, noise), family)


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (3 + i % 9,), generator=generator).tolist() for i in range(count)]


def expected(
    made: Any, batch: list[list[int]], beams: int, eos: list[int], penalty: float, early: bool, new: int
) -> list[list[list[int]]]:
    """transformers' beams of prompts that are padded on the left: generated ids up to and with the end token."""
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = eos, 0
    width = max(map(len, batch))
    out = made.generate(
        torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]),
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        max_new_tokens=new,
        **({"length_penalty": penalty, "early_stopping": early} if beams > 1 else {}),
    )
    rows = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:end])
    return [rows[start : start + beams] for start in range(0, len(rows), beams)]


def answers(
    engine: Engine, batch: list[list[int]], beams: int, penalty: float, early: bool, new: int
) -> list[RequestResult]:
    sampling = SamplingConfig(max_new_tokens=new, length_penalty=penalty, early_stopping=early, n_best=beams)
    return list(
        engine.run(Request(id=str(i), seed=i, prompt_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(batch))
    )


def tokens(results: list[RequestResult]) -> list[list[list[int]]]:
    """Of every row all hypotheses."""
    return [[list(h.token_ids) for h in result.hypotheses] for result in results]


def decoded(
    engine: Engine, batch: list[list[int]], beams: int, penalty: float, early: bool, new: int
) -> list[list[list[int]]]:
    return tokens(answers(engine, batch, beams, penalty, early, new))


CASES = [
    # beams, end tokens, length penalty, early stopping
    (1, [2], 1.0, False),
    (2, [2], 1.0, False),
    (4, [2], 1.0, False),
    (8, [2], 0.0, True),
    (4, list(range(2, 12)), 1.0, False),
    (4, list(range(2, 12)), 2.0, False),
    (3, list(range(2, 12)), 0.0, False),
    (4, list(range(2, 12)), 1.0, True),
    (5, list(range(2, 12)), 0.0, True),
    (8, list(range(2, 8)), 2.0, True),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"W{case[0]}-eos{len(case[1])}-lp{case[2]:g}-{'early' if case[3] else 'late'}"
)
def test_search_is_transformers_beam_search(family: str, case: tuple[int, list[int], float, bool]) -> None:
    beams, eos, penalty, early = case
    batch, new = prompts(8, seed=beams), 14
    want = expected(model(family), batch, beams, eos, penalty, early, new)
    codec = NumberCodec(V, tuple(eos))
    target, draft = forest(family), forest(family, 0.02)
    plain = Engine(target, None, codec, MethodConfig(rule="search", num_beams=beams, depth=0), batch_size=5)
    assert decoded(plain, batch, beams, penalty, early, new) == want
    method = MethodConfig(rule="search", num_beams=beams, depth=3, drafts_per_layer=2 * beams)
    drafted = Engine(target, draft, codec, method, batch_size=3)
    results = answers(drafted, batch, beams, penalty, early, new)
    assert tokens(results) == want
    assert sum(result.stats.steps - result.stats.target_calls for result in results) > 0, "drafts were of use"


@pytest.mark.parametrize("family", FAMILIES)
def test_coupled_text_does_not_depend_on_a_real_draft(family: str) -> None:
    batch = prompts(12, seed=3)
    codec = NumberCodec(V, (2, 3))
    target = CausalForestModel(model(family), family)
    plain = Engine(target, None, codec, MethodConfig(rule="coupled", depth=0), batch_size=1)
    want = decoded(plain, batch, 4, 1.0, False, 16)
    for noise, drafts, depth, size in ((0.01, 8, 4, 12), (0.1, 5, 2, 5)):
        draft = CausalForestModel(model(family, noise), family)
        method = MethodConfig(rule="coupled", depth=depth, drafts_per_layer=drafts)
        engine = Engine(target, draft, codec, method, batch_size=size)
        assert decoded(engine, batch, 4, 1.0, False, 16) == want


def test_the_comparison_meets_many_lengths() -> None:
    """It would prove little if every request ended at the length limit, or all at once."""
    lengths = {
        len(row)
        for rows in expected(model("llama"), prompts(8, 4), 4, list(range(2, 12)), 1.0, False, 14)
        for row in rows
    }
    assert len(lengths) >= 5
