"""CTranslate2 and llama.cpp as comparators."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import engines
from benchmarks.peers.engines import CTranslateConfig, CTranslatePeer, LlamaConfig, LlamaPeer
from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.errors import ModelError, UsageError
from dsbd_cli.lab.bench.methods import METHODS
from dsbd_cli.lab.bench.prepare import BenchConfig, Prompt
from dsbd_cli.lab.bench.runners import make_runner
from dsbd_cli.lab.bench.sweep import SweepSetting, plan
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.models.checkpoints.registry import resolve

PROMPTS = ("question: what did Nesen do\nanswer:\n", "passage: Kivel was a weaver.\nquestion: who was Kivel\nanswer:\n")
GREEDY = MethodConfig(rule="search", num_beams=1, depth=0)


def bench_config(sampling: SamplingConfig) -> BenchConfig:
    return BenchConfig((), (), records=2, rounds=1, batch_size=1, sampling=sampling)


@pytest.fixture(scope="module")
def engine() -> Any:
    return load(ModelSpec("builtin:target", dtype="float32"), None, method=MethodConfig(rule="search", num_beams=2))


def test_ctranslate2_finds_the_beams_that_ours_finds(engine: Any) -> None:
    sampling = SamplingConfig(max_new_tokens=8, n_best=2)
    ids = [engine.codec.encode(prompt) for prompt in PROMPTS]
    folder = Path(resolve("builtin:target").path)
    ours = list(engine.run([Request(prompt, sampling=sampling) for prompt in PROMPTS]))
    config = CTranslateConfig("beam-search", 2)
    peer = CTranslatePeer(config, folder, engine.target, engine.codec, sampling, 2)
    answers = list(peer.run(ids, 0))
    assert [answer.text for answer in answers] == [answer.text for answer in ours]
    assert [len(answer.ranked) for answer in answers] == [2, 2]
    assert list(map(peer.logprob, ids, answers)) == pytest.approx(
        [result.hypotheses[0].logprob for result in ours], abs=1e-3
    )
    greedy = CTranslatePeer(CTranslateConfig("greedy"), folder, engine.target, engine.codec, sampling, 1)
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
    sampling, folder = SamplingConfig(max_new_tokens=8), Path(resolve("builtin:target").path)
    peer = LlamaPeer(
        LlamaConfig("greedy"),
        folder,
        engine.target,
        engine.codec,
        sampling,
        64,
    )
    prompt = engine.codec.encode(PROMPTS[0])
    (answered,) = peer.run([prompt], 0)
    assert answered.text == "a table"
    assert answered.token_ids == (*engine.codec.encode("a table"), engine.codec.eos_ids[0])
    assert (asked[0]["prompt"], asked[0]["n_predict"], asked[0]["cache_prompt"]) == (list(prompt), 8, True)
    with pytest.raises(ModelError, match=r"llama\.cpp fails: .*full"):
        list(peer.run([prompt], 0))


def test_llama_cpp_itself_gives_the_answers_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made for the longest prompt with its answer, and no more is needed."""
    rooms, server = [], engines._server
    monkeypatch.setattr(
        engines, "_server", lambda folder, room, threads: rooms.append(room) or server(folder, room, threads)
    )
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    gguf = pytest.importorskip("tests.helpers.tiny_gguf", reason="gguf is not installed: pip install 'dsbd[gguf]'")
    gguf.write_gguf(gguf.tiny_qwen2(), tmp_path / "tiny.gguf")
    own = load(ModelSpec(str(tmp_path / "tiny.gguf"), dtype="float32"), None, method=GREEDY)
    sampling = SamplingConfig(max_new_tokens=8)
    prompts = ["ABC", "CAB" * 20]
    ids = [own.codec.encode(prompt) for prompt in prompts]
    monkeypatch.setattr("dsbd_cli.lab.bench.sweep.METHODS", {**METHODS, **engines.METHODS})
    monkeypatch.setattr("dsbd_cli.lab.bench.runners.METHODS", {**METHODS, **engines.METHODS})
    setting = plan(["llama-cpp-greedy"], {}).settings[0]
    runner = make_runner(own, setting, bench_config(sampling), max(map(len, ids)))
    asked = [Prompt(TaskRecord(str(n), prompt, "", {}), tuple(ids[n])) for n, prompt in enumerate(prompts)]
    answers = runner.run(asked)
    ours = [result.hypotheses[0] for result in own.run([Request(prompt, sampling=sampling) for prompt in prompts])]
    assert [answer.text for answer in answers] == [answer.text for answer in ours]
    assert rooms == [len(ids[1]) + sampling.max_new_tokens + 1]
    # it hands out no tokens: those of the text are counted, as a reader would
    assert [answer.tokens for answer in answers] == [len(own.codec.encode(answer.text)) for answer in ours]
    assert all(0 < answer.tokens <= 8 for answer in answers)
    assert all(logprob < 0 for logprob in runner.logprobs(asked, answers))


def test_what_they_cannot_do_is_refused(engine: Any) -> None:
    for config, kind, beams in (
        (LlamaConfig, "beam-search", 2),
        (CTranslateConfig, "beam-sampling", 2),
        (CTranslateConfig, "greedy", 2),
    ):
        with pytest.raises(UsageError):
            config(kind, beams)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="CTranslate2 takes no stop strings"):
        engines.SeparatePeer(
            CTranslateConfig("greedy"),
            engine.target,
            engine.codec,
            SamplingConfig(stop="\n"),
            1,  # type: ignore[arg-type]
        )


def test_a_target_or_package_that_does_not_fit_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingConfig(max_new_tokens=8)
    wrong = SweepSetting("llama-cpp-greedy", "", LlamaConfig("greedy"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="llama-cpp-greedy: it needs a package: pip install xllamacpp"):
        make_runner(engine, wrong, bench_config(sampling))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ModelError, match="llama-cpp-greedy: it reads a GGUF file, but --target is builtin:target"):
        make_runner(engine, wrong, bench_config(sampling))


def test_the_command_is_bench_with_more_methods(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "METHODS", dict(METHODS))
    assert command.main(["--help"]) == 0
    assert "dsbd bench" in capsys.readouterr().out
    assert [name for name in command.METHODS if name not in METHODS] == list(engines.METHODS)
