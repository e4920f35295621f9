"""Recurrent and hybrid targets through the engine: transformers' beams, the same text with any draft, long texts.

Guards: a common prefix that is folded too early or late in the order of production, rows that get each other's states,
a draft that rests and comes back with a hole in its state, rounding that adds up in a state over hundreds of tokens.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.planning.planner import Shape
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.requests import Request
from tests.engine.decoding.test_transformers import decoded, prompts
from tests.helpers.tiny import RECURRENT, V, build
from tests.helpers.toys import NumberCodec
from tests.helpers.worlds import RandomPlanner

BEAMS, NEW = 4, 8
# transformers' cached decoding of these differs from its own full forward (a clamp of dt, or a state that is ignored
# when several tokens follow): the full forward is right
WITHOUT_CACHE = ("zamba2", "nemotron-h", "zamba", "jamba", "mamba", "falcon-mamba", "linearised")


built = cache(build)


@cache
def model(family: str, noise: float = 0.0, scale: float = 3.0) -> Any:
    """A tiny random model that has opinions; with noise, a perturbed copy of it for a draft."""
    made = deepcopy(built(family))
    torch.manual_seed(5)
    for key, parameter in made.named_parameters():
        if parameter.dim() > 1 and "A_log" not in key and "conv" not in key:
            parameter.mul_(scale)
            parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    return made


def expected(family: str, batch: list[list[int]]) -> list[list[list[int]]]:
    """transformers' beams: generated ids up to and with the end token. Prompts of one length share a call."""
    made = model(family)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 2, 0
    lengths = {len(prompt) for prompt in batch}
    rows: dict[tuple[int, ...], list[list[int]]] = {tuple(prompt): [] for prompt in batch}
    for length in lengths:
        together = [prompt for prompt in batch if len(prompt) == length]
        out = made.generate(
            torch.tensor(together),
            attention_mask=torch.ones(len(together), length, dtype=torch.int64),
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            do_sample=False,
            max_new_tokens=NEW,
            length_penalty=1.0,
            early_stopping=False,
            use_cache=family not in WITHOUT_CACHE,
        )
        for index, row in enumerate(out[:, length:].tolist()):
            end = next((i + 1 for i, token in enumerate(row) if token == 2), len(row))
            rows[tuple(together[index // BEAMS])].append(row[:end])
    return [rows[tuple(prompt)] for prompt in batch]


def engine(
    target: Any, draft: Any, *, rule: str = "search", depth: int = 3, batch: int = 3, ends: tuple[int, ...] = (2,)
) -> Engine:
    method = MethodConfig(rule=rule, num_beams=BEAMS, depth=0 if draft is None else depth, drafts_per_layer=8)  # type: ignore[arg-type]
    return Engine(target, draft, NumberCodec(V, ends), method, batch_size=batch)


SUMMED = [
    pytest.param(family, False, id=f"{family}-summed") for family in ("mamba2", "qwen3.5", "kimi-linear", "linearised")
]


@pytest.mark.parametrize(("family", "by_kernel"), [*((family, True) for family in RECURRENT), *SUMMED])
def test_search_is_transformers_beam_search(family: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hypotheses of six prompts of two lengths, in batches of four without a draft, and of three with one, and of
    two prompts one at a time; by kernels of a CPU, and one family of each kind by tensor code."""
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: by_kernel))
    generator = torch.Generator().manual_seed(4)
    batch = [torch.randint(3, V, (4 + 5 * (i % 2),), generator=generator).tolist() for i in range(6)]
    want = expected(family, batch)
    target, draft = CausalForestModel(model(family), family), CausalForestModel(model(family, 0.02), family)
    for small, rows, count in ((None, 4, 6), (draft, 3, 6), (None, 1, 2)):
        assert decoded(engine(target, small, batch=rows), batch[:count], BEAMS, 1.0, False, NEW) == want[:count]


@pytest.mark.parametrize("pair", [("mamba2", "llama"), ("llama", "mamba2"), ("qwen3.5", "lfm2"), ("mamba", "mamba2")])
def test_coupled_text_does_not_depend_on_the_draft(pair: tuple[str, str]) -> None:
    """A recurrent target with a draft of attention, and the other way round."""
    target, draft = (CausalForestModel(model(name), name) for name in pair)
    batch = prompts(4, seed=3)
    want = decoded(engine(target, None, rule="coupled", batch=1), batch, BEAMS, 1.0, False, NEW)
    for depth, rows in ((3, 3), (1, 2)):
        made = engine(target, draft, rule="coupled", depth=depth, batch=rows)
        assert decoded(made, batch, BEAMS, 1.0, False, NEW) == want


class Resting:
    """A planner that drafts now and then, so that the draft comes back to texts it has not seen."""

    foresees = False

    def __init__(self, rest: int) -> None:
        self.rest, self.asked = rest, 0

    def choose(self, *_: object) -> Shape:
        self.asked += 1
        return Shape(0, 8) if self.asked % (self.rest + 2) > 1 else Shape(3, 8)

    def gate(self, *_: object) -> None: ...

    def observe(self, *_: object) -> None: ...


@pytest.mark.parametrize("family", ["mamba2", "qwen3.5", "lfm2"])
def test_a_draft_that_rested_catches_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is the target itself: after a rest of 28 iterations its first drafts are all taken, which a hole in its
    state would prevent. What joined the common prefix meanwhile is read as a chain."""
    target, draft = CausalForestModel(model(family), family), CausalForestModel(model(family), family)
    made = engine(target, draft, rule="coupled", batch=2, ends=())
    made.log_steps = True
    monkeypatch.setattr(made, "_planner", Resting(28))
    read: list[int] = []
    catch_up = made._caches.catch_up

    def watched(rows: Any, tokens: Any, drafted: Any, common_prefix: Any) -> None:
        read.extend(end - start for start, end in zip(drafted, common_prefix, strict=True))
        catch_up(rows, tokens, drafted, common_prefix)

    monkeypatch.setattr(made._caches, "catch_up", watched)
    sampling = SamplingConfig(max_new_tokens=80, n_best=1, temperature=0.3)
    texts = [tuple(ids) for ids in prompts(2, 1)]
    requests = [Request(id=str(i), seed=i, prompt_ids=ids, sampling=sampling) for i, ids in enumerate(texts)]
    results = list(made.run(requests))
    assert read
    assert min(read) > 16
    for result in results:
        # every drafted iteration yields all its layers: D + 1 steps, but for the last one
        drafted = sum(step.nodes > BEAMS for step in result.stats.step_log)
        assert result.stats.steps - result.stats.target_calls >= 3 * drafted - 3
        assert drafted >= 4
    plain = list(engine(target, None, rule="coupled", batch=1, ends=()).run(requests))
    assert [r.text for r in results] == [r.text for r in plain]


@pytest.mark.parametrize("family", ["mamba2", "qwen3.5", "lfm2"])
def test_a_draft_has_run_what_is_above_a_layer_that_was_given_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is the target itself, so all layers that go to the target pass."""
    target, draft = CausalForestModel(model(family), family), CausalForestModel(model(family), family)
    made = engine(target, draft, rule="coupled", batch=2, ends=())
    made.log_steps = True
    made._planner = planner = RandomPlanner(4, 3, 8)
    choose = planner.choose
    monkeypatch.setattr(planner, "choose", lambda *arguments: choose(*arguments)._replace(drafts_per_layer=8))
    sampling = SamplingConfig(max_new_tokens=100, n_best=1, temperature=0.3)
    texts = [tuple(ids) for ids in prompts(2, 1)]
    requests = [Request(id=str(i), seed=i, prompt_ids=ids, sampling=sampling) for i, ids in enumerate(texts)]
    results = list(made.run(requests))
    assert planner.cuts >= {0, 1}
    for result in results:
        drafted = sum(len(step.layers) for step in result.stats.step_log)
        assert drafted > 10
        assert result.stats.steps - result.stats.target_calls >= drafted - 3  # but for the last iteration
    plain = list(engine(target, None, rule="coupled", batch=1, ends=()).run(requests))
    assert [r.text for r in results] == [r.text for r in plain]


@pytest.mark.parametrize("family", ["mamba2", "qwen3.5", "lfm2"])
def test_three_hundred_tokens_do_not_drift(family: str) -> None:
    """Log-probabilities of texts made with a draft, hundreds of moves and folds, against one full forward of each."""
    target = CausalForestModel(model(family, scale=2.0), family)
    draft = CausalForestModel(model(family, 0.05, 2.0), family)
    made = engine(target, draft, rule="coupled", batch=2, ends=())
    sampling = SamplingConfig(max_new_tokens=300, n_best=2, top_k=20, temperature=0.7)
    requests = [Request(id=str(i), seed=i, prompt_ids=(5, 6, 7 + i), sampling=sampling) for i in range(2)]
    for result in made.run(requests):
        for hypothesis in result.hypotheses:
            ids = torch.tensor([[*result.request.prompt_ids, *hypothesis.token_ids]])  # type: ignore[misc]
            logits = target.plain(ids)[0, 2:-1].double()
            total = torch.log_softmax(logits, -1).gather(1, ids[0, 3:, None]).sum().item()
            assert abs(total - hypothesis.logprob) < 2e-3
            assert len(hypothesis.token_ids) == 300


@pytest.mark.parametrize("family", ["qwen3.5", "mamba2"])
def test_a_draft_that_rested_reads_a_prompt_into_states_that_begin_anew(family: str) -> None:
    """While other rows draft, a row that came in meanwhile moves on with them, before the draft has read its prompt.
    Guards states of the draft that stand behind a prompt which is read from its beginning; 21 is no multiple of 8."""
    target, draft = (CausalForestModel(model(family), role) for role in ("target", "draft"))
    caches = Caches(target, draft, large_steps=False, moving=lambda: None)
    caches.begin(share=False)
    caches.reserve(1, 64, 16)
    prompt = torch.randint(3, V, (22,), generator=torch.Generator().manual_seed(3)).tolist()
    same, common_prefix = torch.tensor([[19, 20]]), torch.tensor([21])
    positions = torch.arange(64)[None]
    logits = []
    for rested in (False, True):
        caches.admit(0, prompt)
        if rested:
            caches.move(same, same, common_prefix, common_prefix, draft=True)
        caches.prefill_draft({0: prompt})
        last = torch.tensor([[prompt[-1]]])
        seen = (positions <= 21)[:, None]
        logits.append(draft.forward(ForestInput(last, torch.tensor([[21]]), torch.tensor([[21]]), seen, positions)))
    fresh, resumed = logits
    assert fresh is not None
    assert resumed is not None
    assert torch.equal(resumed, fresh)
    caches.release()
