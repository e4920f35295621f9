"""lm-eval's `dsbd` model generates what its `hf` model generates. Most is skipped where lm-eval is not installed, which
brings half a hundred packages: run it in an environment of its own."""

from __future__ import annotations

import json
import runpy
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsbd_cli.config.model import BUILTIN_DRAFT, BUILTIN_TARGET, ModelSpec
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from training.tasks import QaGenerator

TASK = """
task: toyqa
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "question:"], max_gen_toks: 16, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.filterwarnings("ignore")
def test_the_same_samples_as_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import dsbd_cli.lm_eval as ours

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "qa.jsonl"
    records = islice(QaGenerator().records("test", 1), 6)
    data.write_text("".join(json.dumps({"prompt": r.prompt, "answer": " " + r.reference}) + "\n" for r in records))
    (tmp_path / "toyqa.yaml").write_text(TASK.format(data=data))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    target, draft = (Checkpoint.open(ModelSpec(name)).path for name in (BUILTIN_TARGET, BUILTIN_DRAFT))
    samples = []
    for name, more in (("hf", ""), ("dsbd", ""), ("dsbd", f",assistant={draft}")):
        evaluation = lm_eval.simple_evaluate(
            model=name, model_args=f"pretrained={target},dtype=float32{more}", tasks=["toyqa"], task_manager=tasks,
            batch_size=4, device="cpu", log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
        samples.append([sample["resps"] for sample in evaluation["samples"]["toyqa"]])
    assert samples[0] == samples[1] == samples[2]
    assert all(text for [[text]] in samples[0])
    assert get_model("dsbd") is ours.DsbdLM


def without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DsbdLM over stand-ins for lm-eval."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.registry", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["lm_eval.api.registry"], "register_model", lambda name: lambda registered: registered, raising=False
    )
    monkeypatch.setattr(sys.modules["lm_eval.models.huggingface"], "HFLM", object, raising=False)
    return runpy.run_module("dsbd_cli.lm_eval")["DsbdLM"]


@pytest.mark.parametrize("end", ["</think>", 9])
def test_the_answer_alone_comes_back_with_a_think_end_token(end: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """HFLM would cut a text at the first stop string, which may stand in the reasoning."""
    made, asked = without_lm_eval(monkeypatch), dict[str, object]()
    words = {9: "</think>", 7: "</", 8: "think>"}

    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(words.get(token, f"w{token} ") for token in ids)

    sequences = [[1, 2, 3, 4, 9, 5, 6, 0], [1, 2, 3, 4, 5, 6, 3, 4], [1, 2, 9, 5, 9, 0, 0, 0]]
    if isinstance(end, str):
        sequences.append([1, 2, 3, 7, 8, 6, 0, 0])

    def generated(*_: object, **options: object) -> torch.Tensor:
        asked.update(options)
        return torch.tensor(sequences)

    monkeypatch.setitem(made._model_generate.__globals__, "generate", generated)
    tokenizer = SimpleNamespace(pad_token_id=0, decode=decode)
    lm = made.__new__(made)
    vars(lm).update(model=None, tokenizer=tokenizer, _assistant=None, think_end_token=end)
    padded = lm._model_generate(torch.zeros(len(sequences), 2), 9, ["\n"])
    expected = [[1, 2, 5, 6, 0], [1, 2, 3, 4, 5, 6, 3, 4], [1, 2, 5, 9, 0, 0, 0], [1, 2, 6, 0, 0]][: len(sequences)]
    most = max(map(len, expected))
    assert padded.tolist() == [[*row, *[0] * (most - len(row))] for row in expected]
    assert asked["think_end_token"] == end
    lm._model_generate(torch.zeros(len(sequences), 2), 9, [])
    asked.clear()
    lm._model_generate(torch.zeros(len(sequences), 2), 9, [""])
    assert asked["think_end_token"] is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"do_sample": False}),
        ({"temperature": 0.0}, {"do_sample": False}),
        ({"do_sample": False}, {"do_sample": False}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True, "temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
        # transformers refuses these; without the temperature it would sample at 1
        ({"do_sample": True, "temperature": 0.0}, {"do_sample": True, "temperature": 0.0}),
        ({"do_sample": True}, {"do_sample": True, "temperature": 0.0}),
    ],
)
def test_sampling_is_asked_for_as_hf_asks_for_it(
    asked: dict[str, object], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = without_lm_eval(monkeypatch)
    passed = dict[str, object]()
    monkeypatch.setitem(made._model_generate.__globals__, "generate", lambda *_, **options: passed.update(options))
    lm = SimpleNamespace(model=None, tokenizer=SimpleNamespace(pad_token_id=0), _assistant=None, think_end_token=None)
    with pytest.raises(AssertionError):  # nothing was generated
        made._model_generate(lm, None, 5, [], **asked)
    assert {name: passed[name] for name in ("do_sample", "temperature") if name in passed} == expected
