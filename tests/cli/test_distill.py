"""dsbd distill on tiny checkpoints: what it writes, that it goes on where it was stopped, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsbd_cli.cli.app import run
from dsbd_cli.cli.commands import distill as command
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.io.lines.lock import open_locked
from dsbd_cli.models.decoder import pack
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.ops.cpu.int8 import Int8Product
from dsbd_cli.train import run_report, target_answers
from dsbd_cli.train.distributions import Teacher
from dsbd_cli.train.run_record import DraftAcceptance, Measurement, Speed
from dsbd_cli.train.training import Training
from tests.helpers.checkpoints import byte_level, save, wrap

PROMPTS = [json.dumps({"id": str(n), "prompt": "The quick fox " * (1 + n % 3) + str(n)}) for n in range(24)]
OPTIONS = ["--device", "cpu", "--dtype", "float32", "--num-beams", "2", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = wrap(byte_level())
    folder = tmp_path_factory.mktemp("target") / "model"
    return str(save(folder, tokenizer=tokenizer, vocab_size=len(tokenizer), num_hidden_layers=3, seed=1))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(PROMPTS) + "\n")
    return str(path)


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SPEED_S", 0.01)
    monkeypatch.setattr(command, "EVALUATIONS", 2)


def distil(target: str, prompts: str, output: Path, *options: str, code: int = 0) -> None:
    words = ["--target", target, "-i", prompts, "-o", str(output), *OPTIONS, *options]
    assert run(["distill", *words]) == code


def record_of(folder: Path) -> Any:
    return json.loads((folder / "dsbd_distill.json").read_text())


def generate(target: str, draft: str, prompts: str, output: Path) -> list[str]:
    words = ["--target", target, "--draft", draft, *OPTIONS, "-i", prompts, "-o", str(output)]
    assert run(["generate", *words]) == 0
    return [json.loads(line)["text"] for line in output.read_text().splitlines()]


def test_from_prompts_to_a_head(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way: the loss falls, the folder is a head in the form of speculators, and the text is that
    without a draft."""
    monkeypatch.setattr(command, "SPEED_S", 60.0)
    folder, words = tmp_path / "head", ["--steps", "48", "--learning-rate", "0.003", "--vocab", "200"]
    distil(target, prompts, folder, *words)
    out, err = capfd.readouterr()
    record = record_of(folder)
    assert (record["complete"], record["prompts"], record["answers"]) == (True, 21, 21)
    assert (record["plan"]["form"], record["plan"]["vocab"]) == ("head", 200)
    assert [milestone["step"] for milestone in record["milestones"]] == [0, 24, 48]
    losses = [milestone["loss"] for milestone in record["milestones"][1:]]
    assert losses[1] < 0.8 * losses[0]
    first, last = record["milestones"][0], record["milestones"][-1]
    speed = last["measured"]["speed"]
    assert first["measured"]["speed"]["plain"] > 0
    assert speed["drafted"] > 0
    for word in ("before", "after", "tokens/s with the draft", "on 3 held-out prompts"):
        assert word in out
    # as a shell takes it
    assert f": dsbd generate --target {target} --draft {folder} --dtype float32 --num-beams 2\n" in out
    assert "steps per target call: tokens by which one run of the target makes each beam longer" in out
    assert ("\nthis draft pays: " in out) is (speed["drafted"] > speed["plain"])
    assert "pays: " in out or "this draft does not pay: " in out
    assert "measured here: " in err
    assert f"--input {prompts} holds 24 prompts: below 500 a draft hardly learns more than these" in err
    assert not (folder / "checkpoint").exists()
    first, last = first["measured"]["acceptance"], last["measured"]["acceptance"]
    assert last["by_depth"][0] >= first["by_depth"][0]
    assert record["milestones"][-1]["one_beam"]["acceptance"]["steps_per_call"] > 1
    for word in (" layers that pass", "one beam: layers that pass"):
        assert word in out
    assert "; with one beam layers that pass: " in err
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    widths = [max(Counter(branches).values()) for branches in (line["branches"] for line in lines)]
    assert [len(line["tree"]) > 6 for line in lines] == [number < 6 for number in range(21)], "6 trees, then 15 chains"
    assert max(widths[6:]) == 1
    config = json.loads((folder / "config.json").read_text())
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 200)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["t2d"].sum() == len(tensors["d2t"]) == 200
    assert not {path.name for path in folder.iterdir()} & {"tokenizer.json", "checkpoint", ".draft"}
    for more in ([], ["--decode", "search"]):
        texts = []
        for draft in (["none"], [str(folder), "--depth", "2", "--drafts-per-layer", "4"]):
            output = tmp_path / f"{len(more)}-{len(draft)}.jsonl"
            options = ["--draft", *draft, *OPTIONS, *more, "-i", prompts, "-o", str(output)]
            assert run(["generate", "--target", target, *options]) == 0
            records = [json.loads(line) for line in output.read_text().splitlines()]
            texts.append([record["text"] for record in records])
        assert texts[0] == texts[1]
        assert sum(record["stats"]["drafted"] for record in records) > 0
    small = ["--target", target, "--draft", target, "--texts", str(folder / "answers.jsonl"), "--size", "200"]
    assert run(["trim-draft", *small, "-o", str(tmp_path / "small"), "--quiet"]) == 0
    capfd.readouterr()
    distil(target, prompts, folder, *words, code=2)
    assert "is finished: use it with --draft" in capfd.readouterr().err


def test_a_head_of_an_int8_target(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the states that a head learns from: they are those of the target as it will run. A run that goes on keeps
    the format."""
    monkeypatch.setattr(pack.quantize_decoder, "__defaults__", (1,))
    loaded: list[type] = []
    real = Teacher.__init__

    def noting(self: Teacher, target: BaseForestModel, *rest: Any) -> None:
        assert isinstance(target, DecoderForestModel)
        loaded.append(type(target.decoder.weights.layers[0].down))
        real(self, target, *rest)

    monkeypatch.setattr(Teacher, "__init__", noting)
    words = ["--steps", "2", "--vocab", "200", "--quantize", "int8"]
    distil(target, prompts, tmp_path / "head", *words)
    assert loaded == [Int8Product]
    assert record_of(tmp_path / "head")["plan"]["quantize"] == "int8"
    record = record_of(tmp_path / "head") | {"complete": False}
    (tmp_path / "head" / "dsbd_distill.json").write_text(json.dumps(record))
    capfd.readouterr()
    distil(target, prompts, tmp_path / "head", *words[:-2], code=2)
    assert "--quantize was int8 and is None: go on with what --output" in capfd.readouterr().err


def test_other_steps_keep_the_answers(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a night of answers, where the loss is no number and a lower rate is asked for."""
    folder, whole, words = tmp_path / "head", tmp_path / "whole", ["--vocab", "150"]
    step = Training.run_step

    def fail(self: Training) -> float:
        loss = step(self)
        if self.step < 3:
            return loss
        for weights in self.student.parameters():
            weights.data.fill_(float("nan"))
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "run_step", fail)
        distil(target, prompts, folder, "--steps", "9", *words, code=1)
    assert "is no number: give a lower --learning-rate (the answers stay)" in capfd.readouterr().err
    stamp = (folder / "answers.jsonl").stat().st_mtime_ns
    words += ["--steps", "4", "--learning-rate", "0.0001"]
    distil(target, prompts, folder, *words)
    said = "--steps was 9 and is 4, --learning-rate was 0.001 and is 0.0001: training begins anew with the answers in "
    assert said in capfd.readouterr().err
    assert (folder / "answers.jsonl").stat().st_mtime_ns == stamp
    assert [milestone["step"] for milestone in record_of(folder)["milestones"]] == [0, 2, 4]
    distil(target, prompts, whole, *words)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_signal_while_tokens_are_chosen(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is begun: no head is made, and none measured."""
    choose = command._Distilling._on_choice

    def stop(self: Any, number: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        choose(self, number)

    monkeypatch.setattr(command._Distilling, "_on_choice", stop)
    distil(target, prompts, tmp_path / "head", "--steps", "2", "--vocab", "150", code=143)
    assert "stopped; the same command goes on" in capfd.readouterr().err
    assert not (tmp_path / "head" / "checkpoint").exists()


def test_a_stopped_run_goes_on_to_the_same_weights(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the target answers (and its last line torn), while a step is taken, and begun anew each time."""
    words = ["--vocab", "150", "--steps", "8"]
    monkeypatch.setattr(target_answers, "TURN", 8)  # three turns
    monkeypatch.setattr(command, "EVALUATIONS", 4)  # one at the step at which it is stopped
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    distil(target, prompts, whole, *words)

    stop = os.getpid(), signal.SIGTERM
    answer, calls = target_answers.make_answers, list[int]()

    def answer_and_stop(engine: Any, requests: Any, *more: Any, **named: Any) -> Any:
        calls.append(len(requests))
        last = len(calls) == 4
        failed = answer(engine, requests[:4] if last else requests, *more, **named)
        if last:
            os.kill(*stop)
        return failed

    with monkeypatch.context() as patched:
        patched.setattr(target_answers, "make_answers", answer_and_stop)
        distil(target, prompts, parts, *words, code=143)
    assert "stopped; the same command goes on" in capfd.readouterr().err
    with (parts / "answers.jsonl").open("ab") as stream:
        stream.write(b'{"id": "torn')

    step = Training.run_step

    def step_and_stop(self: Training) -> float:
        loss = step(self)
        if self.step == 6:
            os.kill(*stop)
        return loss

    with monkeypatch.context() as patched:
        patched.setattr(Training, "run_step", step_and_stop)
        distil(target, prompts, parts, *words, code=143)
    assert f"{parts} holds the draft of step 6, which --draft takes as it is" in capfd.readouterr().err
    assert load_file(parts / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    assert len(generate(target, str(parts), prompts, tmp_path / "early.jsonl")) == len(PROMPTS)
    (parts / "checkpoint").rename(parts / ".checkpoint.before")  # as kill -9 between two renames leaves it
    capfd.readouterr()
    distil(target, prompts, parts, *words)
    assert "going on behind step 6" in capfd.readouterr().err
    for name in ("model.safetensors", "answers.jsonl", "config.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    done = [
        [(milestone["step"], milestone["loss"]) for milestone in record_of(folder)["milestones"]]
        for folder in (whole, parts)
    ]
    assert done[0] == done[1]


def test_a_run_that_is_killed_leaves_the_best_draft_so_far(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a signal that is heard: what was published at a milestone loads, and a worse one does not replace it."""
    monkeypatch.setattr(command, "EVALUATIONS", 4)
    measured = command._Distilling._measure
    rates = iter([1.0, 3.0, 2.0])

    def measure(self: Any, *words: Any, **named: Any) -> Any:
        measured(self, *words, **named)
        return Measurement(DraftAcceptance(next(rates), (0.5,))), None

    published: list[int] = []
    step = Training.run_step

    def step_and_die(self: Training) -> float:
        if self.step == 5:
            raise RuntimeError("killed")
        return step(self)

    publish = command._Distilling._publish

    def noted(self: Any, training: Training) -> None:
        published.append(training.step)
        publish(self, training)

    monkeypatch.setattr(command._Distilling, "_measure", measure)
    monkeypatch.setattr(command._Distilling, "_publish", noted)
    monkeypatch.setattr(Training, "run_step", step_and_die)
    distil(target, prompts, tmp_path / "draft", "--vocab", "150", "--steps", "8", code=1)
    assert published == [2]
    assert len(generate(target, str(tmp_path / "draft"), prompts, tmp_path / "early.jsonl")) == len(PROMPTS)


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (Speed(10.0, 12.0, "D=1 K=2"), "this draft pays: 12.0 tokens/s with it (D=1 K=2), 10.0 without"),
        (Speed(10.0, 9.0, "D=1 K=2"), "9.0 tokens/s with it (D=1 K=2), 10.0 without; give more prompts and --steps"),
    ],
)
def test_the_verdict(speed: Speed, said: str) -> None:
    assert said in run_report.verdict(speed)
    begin = "this draft pays" if speed.drafted > speed.plain else "this draft does not"
    assert run_report.verdict(speed).startswith(begin)


@pytest.mark.parametrize("words", [[], ["--trust-remote-code", "target"]], ids=["plain", "trusted"])
def test_code_of_a_checkpoint_runs_on_demand(
    target: str, prompts: str, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target. A head is no code."""
    trusted: list[bool] = []
    plan: Any = SimpleNamespace(
        target=target, chat=False, dtype="auto", quantize=None, decode="sample", num_beams=MethodConfig().num_beams
    )

    def told(self: Any) -> None:
        trusted.append(self._spec.trust_remote_code)

    monkeypatch.setattr(command._Distilling, "run", told)
    distil(target, prompts, tmp_path / "draft", *words)
    assert trusted == [bool(words)]
    said = run_report.generate_words(plan, Path("head"), trusted=trusted[0])
    assert said == ["dsbd", "generate", "--target", target, "--draft", "head", *words]


def test_a_prompt_that_cannot_be_answered_is_left_out(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "fox " * 2000}), *PROMPTS[1:10]]) + "\n")
    distil(target, str(path), tmp_path / "draft", "--decode", "search", "--steps", "2")
    err = capfd.readouterr().err
    assert "warning: left out, because they cannot be answered: 1 prompt, the first with id '0': prompt has " in err
    assert "the speed is not measured, because that takes two held-out prompts or more, and there is one" in err
    assert "too short" not in err
    assert record_of(tmp_path / "draft")["complete"]
    distil(target, str(path), tmp_path / "quiet", "--steps", "1", "--quiet")
    assert capfd.readouterr() == ("", "")


def test_a_held_out_prompt_that_cannot_be_answered_is_left_out(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the number of prompts that the measurements are said to be of."""
    path = tmp_path / "prompts.jsonl"
    long = json.dumps({"id": "long", "prompt": "fox " * 2000})
    path.write_text("\n".join([*PROMPTS[:7], long, *PROMPTS[8:16]]) + "\n")
    distil(target, str(path), tmp_path / "draft", "--vocab", "150", "--steps", "1")
    out, err = capfd.readouterr()
    assert "left out, because they cannot be answered: 1 held-out prompt, the first with id 'long': prompt has " in err
    assert "measured on 1 held-out prompt: " in out


def test_prompts_go_through_the_chat_template_where_that_is_asked_for(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The target learns nothing of a chat from bare prompts, so bare prompts are told of."""
    chat, few = tmp_path / "chat", ["--vocab", "150", "--steps", "1"]
    shutil.copytree(target, chat)
    (chat / "chat_template.jinja").write_text("fox: {% for message in messages %}{{ message.content }}{% endfor %}")
    first = {}
    for words, warned in (([], True), (["--no-chat"], False), (["--chat"], False)):
        folder = tmp_path / "".join(["draft", *words])
        distil(str(chat), prompts, folder, *few, *words)
        assert ("the target has a chat template, but prompts are given" in capfd.readouterr().err) == warned
        assert record_of(folder)["plan"]["chat"] == (words == ["--chat"])
        first[folder.name] = json.loads((folder / "answers.jsonl").read_text().splitlines()[0])["prompt_ids"]
    assert first["draft"] == first["draft--no-chat"]
    assert first["draft--chat"][-len(first["draft"]) :] == first["draft"] != first["draft--chat"]
    distil(target, prompts, tmp_path / "none", *few, "--chat", code=2)
    assert f"error: --chat: target {target} has no chat template: drop it" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o {o}", "--input is missing"),
        ("-i {p}", "--output is missing"),
        ("-i {p} -o {o} --steps 0", "--steps is 0, but must be 1 or more"),
        ("-i {p} -o {o} --threads 1025", "--threads is 1025, but must be at most 1024"),
        ("-i {p} -o {o} --learning-rate 0", "--learning-rate is 0, but must be above 0 and below 1"),
        ("-i {p} -o {o} --learning-rate 2", "--learning-rate is 2, but must be above 0 and below 1"),
        ("-i {p} -o {o} --form model", "--form is 'model', but distill makes draft heads alone: drop it, or give"),
        ("-i {p} -o {o} --layers 2", "No such option: --layers"),
        ("-i {p} -o {o} --hidden-size 16", "No such option: --hidden-size"),
        ("-i {p} -o {o} --vocab 3", "--vocab is 3, but must be 64 or more"),
        ("-i {p} -o {o} --device cuda:99", "device 'cuda:99' is not there"),
        ("-i {p} -o {o} --device cpu,cpu", "--device names cpu for the draft, but a head runs where its target does"),
        ("-i {p} -o {o} --form head --vocab 3", "--vocab is 3, but must be 64 or more"),
        ("-i {p} -o {o} --num-beams 0", "--num-beams is 0, but must be 1 or more"),
        ("-i {p} -o {o} --seed -1", "seed is -1, but must be an integer from 0"),
        ("-i {p} -o {o} --decode search --seed -1", "--seed is -1, but must be an integer from 0"),
        ("-i {o}.none -o {o}", "--input {o}.none cannot be read: No such file"),
        ("-i {f} -o {o}", "--input {f} holds 3 prompts, but 8 or more are needed"),
        ("-i {b} -o {o}", "--input {b}: line 2: "),
        ("-i {p} -o {t}", "--output {t} exists: name a new folder"),
        ("-i {p} -o {o}\udcff", "--output is '{o}\\udcff', which is not UTF-8"),
        ("-i {p} -o {o}/a/b", "--output {o}/a/b: No such file or directory"),
        (
            "-i {p} -o {u} --decode search",
            "--decode was sample and is search: go on with what --output {u} was begun with, or name a new folder",
        ),
        ("-i {p} -o {d}", "dsbd_distill.json cannot be read: name a new folder with --output"),
    ],
)
def test_refusals(
    target: str, prompts: str, tmp_path: Path, options: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    few, bad, taken, unfinished, damaged = (
        tmp_path / name for name in ("few", "bad", "taken", "unfinished", "damaged")
    )
    few.write_text("\n".join(PROMPTS[:3]))
    bad.write_text("\n".join([PROMPTS[0], '{"id": "x"}', *PROMPTS[1:]]))
    taken.mkdir()
    (taken / "file").write_text("x")
    damaged.mkdir()
    (damaged / "dsbd_distill.json").write_text("{}")
    if "{u}" in options:
        plan = {"target": target, "input": "", "layers": 1, "hidden_size": None, "steps": 9, "learning_rate": 1e-3}
        plan |= {"form": "head", "vocab": json.loads((Path(target) / "config.json").read_text())["vocab_size"]}
        plan |= {"decode": "sample", "num_beams": 4, "max_new_tokens": 128, "seed": 0, "dtype": "auto"}
        unfinished.mkdir()
        content = {"schema": "dsbd.distill/1", "plan": plan, "complete": False, "prompts": 0, "answers": 0}
        (unfinished / "dsbd_distill.json").write_text(json.dumps({**content, "milestones": []}))
    names = {"p": prompts, "o": tmp_path / "new", "f": few, "b": bad, "t": taken, "u": unfinished, "d": damaged}
    assert run(["distill", "--target", target, *options.format(**names).split()]) == 2
    assert message.format(**names) in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_run_that_did_nothing_leaves_no_folder(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards a first command that was wrong, by whose settings the right one would be refused."""
    folder = tmp_path / "draft"
    distil(target, prompts, folder, "--max-new-tokens", "99999", code=1)
    assert "no prompt of " in capfd.readouterr().err
    assert not folder.exists()


def test_another_file_of_prompts_or_a_second_run_at_once(
    target: str, prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Any, *ignored: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self._check_stopped()

    monkeypatch.setattr(command._Distilling, "_answer", stop)
    distil(target, prompts, tmp_path / "draft", code=143)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(PROMPTS[:20]) + "\n")
    capfd.readouterr()
    with open_locked(tmp_path / "draft" / "answers.jsonl", create_only=False):
        distil(target, prompts, tmp_path / "draft", code=1)
    assert "is being written by another process" in capfd.readouterr().err
    distil(target, str(other), tmp_path / "draft", code=2)
    assert "--input holds other prompts: go on with what --output" in capfd.readouterr().err
