"""transformers' generate as comparator: delivered tokens only, the texts of our own search, nothing left behind."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.errors import ModelError, UsageError
from dsbd_cli.lab.peers.base import delivered, sequence_logprob
from dsbd_cli.lab.peers.config import PeerConfig
from dsbd_cli.lab.peers.transformers_generate import TransformersPeer
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.patching import PackedLinear
from dsbd_cli.ops.select import packing_works

SAMPLING = SamplingConfig(max_new_tokens=24)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(method=MethodConfig(num_beams=3, depth=4))


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    return [engine.codec.encode(record.prompt) for record in islice(TASKS["qa"].records(), 4)]


def peer(engine: Engine, kind: str, num_beams: int = 1, batch_size: int = 4, **sampling: object) -> TransformersPeer:
    assert isinstance(engine.target, BaseForestModel)
    assert isinstance(engine.draft, BaseForestModel)
    assert isinstance(engine.codec, HFCodec)
    asked = SamplingConfig(**{"max_new_tokens": 24, **sampling})
    return TransformersPeer(PeerConfig(kind, num_beams), engine.target, engine.draft, engine.codec, asked, batch_size)


@pytest.mark.parametrize(("kind", "num_beams"), [("greedy", 1), ("beam-search", 3)])
def test_it_gives_the_texts_of_our_own_search(
    kind: str, num_beams: int, engine: Engine, prompts: list[list[int]]
) -> None:
    """Two implementations of one method agree, in padded batches too: prompts, limits and ends are the same."""
    method = MethodConfig(rule="search", num_beams=num_beams, depth=0)
    requests = [Request(id=str(i), seed=0, prompt_ids=tuple(p), sampling=SAMPLING) for i, p in enumerate(prompts)]
    ours = [result.hypotheses[0] for result in Engine(engine.target, None, engine.codec, method).run(requests)]
    runner = peer(engine, kind, num_beams)
    theirs = list(runner.run(prompts, seed=0))
    assert [answer.token_ids for answer in theirs] == [answer.token_ids for answer in ours]
    assert [answer.text for answer in theirs] == [answer.text for answer in ours]
    logprobs = list(map(runner.logprob, prompts, theirs))
    assert logprobs == pytest.approx([answer.logprob for answer in ours], abs=1e-3)


def test_it_takes_the_rules_that_transformers_has(engine: Engine, prompts: list[list[int]]) -> None:
    """Those alone, and with the same texts; the others are refused, because they would do nothing."""
    rules = SamplingConfig(max_new_tokens=24, logit_bias={40: 3.0}, bad_words_ids=((46, 47), (50,)))
    requests = [Request(id=str(i), prompt_ids=tuple(p), sampling=rules) for i, p in enumerate(prompts)]
    method = MethodConfig(rule="search", num_beams=3, depth=0)
    ours = [result.hypotheses[0] for result in Engine(engine.target, None, engine.codec, method).run(requests)]
    asked = {"logit_bias": rules.logit_bias, "bad_words_ids": rules.bad_words_ids}
    theirs = list(peer(engine, "beam-search", 3, **asked).run(prompts, seed=0))
    assert [answer.token_ids for answer in theirs] == [answer.token_ids for answer in ours]
    with pytest.raises(ModelError, match="transformers' generate has no presence_penalty: leave it out of --methods"):
        peer(engine, "beam-search", 3, token_rules="presence_penalty=1")


def test_only_tokens_up_to_the_end_are_delivered(engine: Engine, prompts: list[list[int]]) -> None:
    assert delivered([5, 6, 0, 0, 7], (0,)) == (5, 6, 0)
    assert delivered([5, 6], (0,)) == (5, 6)
    answers = list(peer(engine, "greedy").run(prompts, seed=0))
    assert all(answer.token_ids.count(0) <= 1 for answer in answers)
    assert len({len(answer.token_ids) for answer in answers}) > 1, "else no row was padded, and the test shows nothing"
    short = list(peer(engine, "greedy", max_new_tokens=2).run(prompts, seed=0))
    assert [len(answer.token_ids) for answer in short] == [2] * len(prompts)


@pytest.mark.parametrize(("kind", "num_beams"), [("beam-sampling", 3), ("assisted", 1)])
def test_samplers_go_by_their_seed_and_leave_the_global_one_alone(
    kind: str, num_beams: int, engine: Engine, prompts: list[list[int]]
) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    hot = {"temperature": 2.0}
    first = [answer.token_ids for answer in peer(engine, kind, num_beams, **hot).run(prompts, seed=1)]
    again = [answer.token_ids for answer in peer(engine, kind, num_beams, **hot).run(prompts, seed=1)]
    other = [answer.token_ids for answer in peer(engine, kind, num_beams, **hot).run(prompts, seed=2)]
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), before)


def test_the_module_runs_on_stock_attention_only_meanwhile(engine: Engine, prompts: list[list[int]]) -> None:
    theirs = engine.target.stock().config  # type: ignore[attr-defined]
    before = theirs._attn_implementation
    seen = []
    for _ in peer(engine, "greedy", batch_size=2).run(prompts, seed=0):
        seen.append(theirs._attn_implementation)
    assert set(seen) == {"sdpa"}
    assert theirs._attn_implementation == before


@pytest.mark.skipif(not packing_works(torch.float32), reason="this torch build cannot pack weights")
def test_transformers_runs_plain_weights(engine: Engine, tmp_path: Path) -> None:
    """Guards a comparator that is sped up by our packed layers, of a model that is our own or one of transformers'."""
    from dsbd_cli.models.load_model import load_model
    from tests.helpers.checkpoints import save

    loaded = load_model(Checkpoint.open(ModelSpec(str(save(tmp_path, "opt")), device="cpu"))).model
    assert PackedLinear in [type(layer) for layer in loaded.module.modules()]  # type: ignore[attr-defined]
    for forest in (loaded, engine.target):
        assert isinstance(forest, BaseForestModel)
        assert PackedLinear not in [type(layer) for layer in forest.stock().modules()]
        assert forest.stock() is forest.stock()


def test_cache_bytes_are_those_of_all_beams(engine: Engine, prompts: list[list[int]]) -> None:
    """Each beam of transformers has a row of its own; the last token of a text is never run."""
    (answer,) = peer(engine, "beam-search", 3).run(prompts[:1], seed=0)
    per_token = engine.target.kv_bytes_per_slot()
    assert answer.kv_bytes is not None
    slots = answer.kv_bytes / per_token
    assert slots % 3 == 0
    assert 3 * len(prompts[0]) < slots <= 3 * (len(prompts[0]) + SAMPLING.max_new_tokens)
    (single,) = peer(engine, "assisted").run(prompts[:1], seed=0)
    assert single.kv_bytes is None


def test_a_stop_string_ends_the_text(engine: Engine, prompts: list[list[int]]) -> None:
    (whole,) = peer(engine, "greedy").run(prompts[:1], seed=0)
    stop = whole.text.split()[1]
    (cut,) = peer(engine, "greedy", stop=(stop,)).run(prompts[:1], seed=0)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_stop_ends_between_and_within_batches(engine: Engine, prompts: list[list[int]]) -> None:
    runner = peer(engine, "greedy", batch_size=1)
    answers = runner.run(prompts, seed=0)
    next(answers)
    runner.stop()
    assert runner.stopped
    assert list(answers) == []


def test_an_empty_answer_costs_nothing(engine: Engine) -> None:
    assert isinstance(engine.target, BaseForestModel)
    assert sequence_logprob(engine.target, torch.tensor([1, 2]), []) == 0.0


@pytest.mark.parametrize(("kind", "num_beams"), [("greedy", 2), ("assisted", 4), ("beam-search", 0), ("viterbi", 1)])
def test_a_peer_that_does_not_exist_is_refused(kind: str, num_beams: int) -> None:
    with pytest.raises(UsageError):
        PeerConfig(kind, num_beams)
