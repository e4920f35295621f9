"""CTranslate2 and llama.cpp as comparators."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.engine.models.registry import resolve
from dsbd_cli.errors import ModelError, UsageError
from dsbd_cli.lab.bench.prepare import Prompt
from dsbd_cli.lab.bench.runners import make_runner
from dsbd_cli.lab.bench.sweep import choose_methods, plan
from dsbd_cli.lab.peers import PeerConfig, engines
from dsbd_cli.lab.peers.engines import CTranslatePeer, LlamaPeer
from dsbd_cli.lab.tasks.record import TaskRecord

PROMPTS = ("question: what did Nesen do\nanswer:\n", "passage: Kivel was a weaver.\nquestion: who was Kivel\nanswer:\n")
GREEDY = MethodConfig(rule="search", num_beams=1, depth=0)
FLOAT32 = {"engine": "ctranslate2", "dtype": "float32"}


@pytest.fixture(scope="module")
def engine() -> Any:
    return load(ModelSpec("builtin:target", dtype="float32"), None, method=MethodConfig(rule="search", num_beams=2))


def test_ctranslate2_finds_the_beams_that_ours_finds(engine: Any) -> None:
    sampling = SamplingConfig(max_new_tokens=8, n_best=2)
    ids = [engine.codec.encode(prompt) for prompt in PROMPTS]
    place = Path(resolve("builtin:target").path)
    ours = list(engine.run([Request(prompt, sampling=sampling) for prompt in PROMPTS]))
    config = PeerConfig("beam-search", 2, **FLOAT32)  # type: ignore[arg-type]
    peer = CTranslatePeer(config, place, engine.target, engine.codec, sampling, 2)
    found = list(peer.run(ids, 0))
    assert [one.text for one in found] == [one.text for one in ours]
    assert [len(one.ranked) for one in found] == [2, 2]
    assert peer.logprobs(ids, found) == pytest.approx([one.hypotheses[0].logprob for one in ours], abs=1e-3)
    greedy = CTranslatePeer(PeerConfig("greedy", **FLOAT32), place, engine.target, engine.codec, sampling, 1)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(greedy, "stopped", True)
        assert not list(greedy.run(ids, 0))
    assert len(next(iter(greedy.run(ids, 0))).token_ids) <= 8


def test_ctranslate2_says_what_it_cannot_convert(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="CTranslate2 cannot convert"):
        engines.convert(tmp_path, tmp_path, "float32")


def test_llama_cpp_gets_token_ids_and_gives_text(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"choices": [{"text": "a table", "finish_reason": "stop"}]} if len(asked) == 1 else {"error": "full"}

    monkeypatch.setattr(engines, "_server", lambda *_: SimpleNamespace(handle_completions=answer))
    sampling, place = SamplingConfig(max_new_tokens=8), Path(resolve("builtin:target").path)
    peer = LlamaPeer(
        PeerConfig("greedy", engine="llama-cpp"),
        place,
        engine.target,
        engine.codec,
        sampling,
        64,
    )
    prompt = engine.codec.encode(PROMPTS[0])
    (found,) = peer.run([prompt], 0)
    assert found.text == "a table"
    assert found.token_ids == (*engine.codec.encode("a table"), engine.codec.eos_ids[0])
    assert (asked[0]["prompt"], asked[0]["n_predict"], asked[0]["cache_prompt"]) == (list(prompt), 8, True)
    with pytest.raises(ModelError, match=r"llama\.cpp fails: .*full"):
        list(peer.run([prompt], 0))


def test_llama_cpp_itself_gives_the_answers_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made for the longest prompt with its answer, and no more is needed."""
    rooms, server = [], engines._server
    monkeypatch.setattr(
        engines, "_server", lambda place, room, threads: rooms.append(room) or server(place, room, threads)
    )
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install 'dsbd[llama-cpp]'")
    gguf = pytest.importorskip("tests.models.tiny_gguf", reason="gguf is not installed: pip install 'dsbd[gguf]'")
    gguf.write_gguf(gguf.tiny_qwen2(), tmp_path / "tiny.gguf")
    own = load(ModelSpec(str(tmp_path / "tiny.gguf"), dtype="float32"), None, method=GREEDY)
    sampling = SamplingConfig(max_new_tokens=8)
    prompts = ["ABC", "CAB" * 20]
    ids = [own.codec.encode(prompt) for prompt in prompts]
    found = plan(["llama-cpp-greedy"], {}).settings[0]
    runner = make_runner(own, found, sampling, 0, 1, longest=max(map(len, ids)))
    asked = [Prompt(TaskRecord(str(n), prompt, "", {}), tuple(ids[n])) for n, prompt in enumerate(prompts)]
    answers = runner.run(asked)
    ours = [one.hypotheses[0] for one in own.run([Request(prompt, sampling=sampling) for prompt in prompts])]
    assert [one.text for one in answers] == [one.text for one in ours]
    assert rooms == [len(ids[1]) + sampling.max_new_tokens + 1]
    # it hands out no tokens: those of the text are counted, as a reader would
    assert [one.tokens for one in answers] == [len(own.codec.encode(one.text)) for one in ours]
    assert all(0 < one.tokens <= 8 for one in answers)
    assert all(logprob < 0 for logprob in runner.with_logprobs(asked, answers))


def test_what_they_cannot_do_is_refused(engine: Any) -> None:
    for wrong in (
        {"kind": "beam-search", "num_beams": 2, "engine": "llama-cpp"},
        {"kind": "beam-sampling", "num_beams": 2, **FLOAT32},
        {"kind": "greedy", "engine": "ctranslate2"},
        {"kind": "greedy", "dtype": "int8"},
    ):
        with pytest.raises(UsageError):
            PeerConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="ctranslate2 takes no stop strings"):
        engines.SeparatePeer(
            PeerConfig("greedy", **FLOAT32),
            engine.target,
            engine.codec,
            SamplingConfig(stop="\n"),
            1,  # type: ignore[arg-type]
        )


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"llama-cpp-greedy needs a package: pip install 'dsbd\[llama-cpp\]'"):
        choose_methods("greedy,llama-cpp-greedy")
    with pytest.raises(UsageError, match=r"ct2-greedy needs a package: pip install 'dsbd\[ctranslate2\]'"):
        choose_methods("ct2-greedy")
    names, _ = choose_methods("all")
    assert not [name for name in names if name.startswith(("ct2-", "llama-"))]
