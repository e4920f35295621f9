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
from dsbd_cli.lab.bench.sweep import choose_methods
from dsbd_cli.lab.peers import PeerConfig, engines
from dsbd_cli.lab.peers.engines import CTranslatePeer, LlamaPeer

PROMPTS = ("question: what did Nesen do\nanswer:\n", "passage: Kivel was a weaver.\nquestion: who was Kivel\nanswer:\n")
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
    assert (asked[0]["prompt"], asked[0]["n_predict"], asked[0]["cache_prompt"]) == (list(prompt), 8, False)
    with pytest.raises(ModelError, match=r"llama\.cpp fails: .*full"):
        list(peer.run([prompt], 0))


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
