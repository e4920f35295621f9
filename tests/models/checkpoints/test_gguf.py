"""GGUF files: the same model as the checkpoint that was put into one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from dsbd_cli import ModelSpec, Request, SamplingConfig, UsageError, load
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load as load_checkpoint
from tests.helpers.tiny_gguf import WORDS, tiny_qwen2, write_gguf


@pytest.fixture(scope="module")
def original() -> Qwen2ForCausalLM:
    return tiny_qwen2()


@pytest.fixture(scope="module")
def file(original: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(original, path)
    return path


def test_a_gguf_file_is_the_model_that_was_put_into_it(file: Path, original: Qwen2ForCausalLM) -> None:
    model, tokenizer = load_checkpoint(Checkpoint.open(ModelSpec(str(file), dtype="float32")))
    ids = torch.tensor([[1, 5, 9, 22]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert tokenizer.decode([0, 1, 2]) == "".join(WORDS[:3])


def test_a_gguf_file_answers(file: Path, original: Qwen2ForCausalLM, capfd: pytest.CaptureFixture[str]) -> None:
    engine = load(ModelSpec(str(file), dtype="float32"), None)
    request = Request("ABC", sampling=SamplingConfig(max_new_tokens=5, temperature=0))
    result = engine.generate(request)
    ids = torch.tensor([engine.codec.encode("ABC")])
    with torch.no_grad():
        best = original.generate(
            ids, num_beams=4, max_new_tokens=5, do_sample=False, pad_token_id=60, eos_token_id=61, length_penalty=1.0
        )
    assert list(result.hypotheses[0].token_ids) == best[0, ids.shape[1] :].tolist()
    assert capfd.readouterr().err == "", "no bar of the library"


def test_the_package_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find_spec(name, *rest)
    )
    with pytest.raises(UsageError, match=r"pip install 'dsbd\[gguf\]'"):
        load(str(file), None)
