"""Quantised files end to end: GGUF, GPTQ, AWQ and compressed-tensors run as they are stored, as exactly as plain
models do."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Starcoder2Config

from dsbd_cli import ModelSpec
from dsbd_cli.cli.app import run
from dsbd_cli.errors import ModelError, UsageError
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.load_model import _DecoderLoad
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.cpu.int8 import CompiledInt8
from dsbd_cli.ops.cpu.int8_groups import CompiledInt8Groups
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.select import quantize_missing
from tests.helpers.checkpoints import save
from tests.helpers.gguf_models import random_model, write_model
from tests.helpers.kernels import table
from tests.helpers.quantized_files import (
    FORMS,
    SAFETENSORS,
    SETTINGS,
    apart,
    loaded,
    logits,
    requests,
    texts,
    write_quantized,
    write_safetensors,
)

OTHERS = {**SETTINGS, "architectures": ["Starcoder2ForCausalLM"], "sliding_window": None}

compiled = pytest.mark.skipif(quantize_missing("int4") is not None, reason="no kernel of int4 on this processor")


@pytest.fixture(scope="module", params=FORMS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """The name of a form, a checkpoint in it, and transformers' model of the same weights."""
    return (request.param, *write_quantized(tmp_path_factory.mktemp("stored"), request.param))


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized(tmp_path_factory.mktemp("awq"), "awq")[0]


def backends(engine: Any) -> set[type | None]:
    """Classes that compute the products of 100,000 weights or more."""
    weights = engine.target.decoder.weights
    products = [product for layer in weights.layers for product in (layer.qkv, layer.gate_up, layer.down)]
    return {type(getattr(product, "backend", None)) for product in products}


@compiled
def test_it_runs_as_stored(stored: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    form, path, plain = stored
    first = loaded(path)
    assert first.info.quantize == form
    assert first.info.dtype == f"{form}+float32"
    assert first.exactness == "same-text"
    assert not first.info.notes
    assert backends(first) == {CompiledInt8Groups if form == "gguf-q8_0" else CompiledInt4}
    assert 1e-4 < apart(logits(first), plain) < 0.05, "inputs are in int8"
    monkeypatch.setattr(_DecoderLoad, "_checked", None)  # what the first load has found serves the second one
    second = loaded(path)
    assert (second.info.quantize, second.exactness) == (form, "same-text")
    assert torch.equal(logits(first), logits(second))
    assert texts(first) == texts(second)
    assert len(set(texts(first))) > 1


DEEP = {**SETTINGS, "vocab_size": 4400, "num_hidden_layers": 6}


@pytest.mark.parametrize("quantize", [None, "none", "int8", "int4"])
@pytest.mark.parametrize("name", ["blk.5.ffn_down.weight", "token_embd.weight", "blk.5.attn_norm.weight"])
def test_damage_behind_the_part_that_is_compared_is_told(tmp_path: Path, name: str, quantize: Any) -> None:
    """In the last layer, and in the last row of the vocabulary."""
    if quantize in ("int8", "int4") and quantize_missing(quantize) is not None:
        pytest.skip(f"no kernel of {quantize} on this processor")
    path = tmp_path / "model.gguf"
    write_model(path, random_model(LlamaConfig, **DEEP), "llama", kind="Q4_0", scale=0.01)
    tensor = GgufFile.open(path, "x").tensors[name]
    content, end = bytearray(path.read_bytes()), tensor.offset + tensor.size
    at, nan = (end - 18, b"\x00\x7e") if len(tensor.shape) > 1 else (end - 4, b"\x00\x00\xc0\x7f")
    content[at : at + len(nan)] = nan
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"{re.escape(name)}.* NaN"):
        loaded(path, quantize=quantize)


@pytest.mark.parametrize(("key", "count"), [("head_count", 0), ("head_count_kv", 0), ("block_count", 4_000_000)])
def test_counts_of_a_gguf_file_that_cannot_be_are_told(tmp_path: Path, key: str, count: int) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, random_model(LlamaConfig, **SETTINGS), "llama", kind="Q4_0", scale=0.01)
    content = path.read_bytes()
    name = f"llama.{'' if key == 'block_count' else 'attention.'}{key}".encode()
    at = content.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4
    path.write_bytes(content[:at] + count.to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelError, match=rf"says {re.escape(name.decode())} = {count}, but must say 1"):
        loaded(path)


@compiled
def test_a_text_depends_on_no_other_row_and_no_draft(stored: tuple[str, Path, Any]) -> None:
    _, path, _ = stored
    alone = loaded(path)
    own = [tuple(alone.generate([request])[0].hypotheses[0].token_ids) for request in requests()]
    drafted = loaded(path, ModelSpec(str(path), role="draft", dtype="float32", quantize="int8"), 4)
    assert drafted.info.draft_dtype == "int8+float32"
    assert texts(drafted) == own


def test_it_is_dequantised_where_that_is_asked_for(stored: tuple[str, Path, Any]) -> None:
    _, path, plain = stored
    engine = loaded(path, quantize="none")
    assert engine.info.quantize is None
    assert engine.info.dtype == "float32"
    assert engine.exactness == "same-text"
    assert apart(logits(engine), plain) < 1e-5


def test_it_is_dequantised_where_no_kernel_serves(
    stored: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, plain = stored
    with table(monkeypatch, []):
        engine = loaded(path)
    assert engine.info.quantize is None
    decoder = engine.target.decoder
    assert not any(
        isinstance(weight, QuantizedWeight)
        for product in (decoder.weights.lm_head, *(layer.down for layer in decoder.weights.layers))
        for weight in product.weights
    )
    assert any(" runs dequantised, in the memory of plain weights: " in note for note in engine.info.notes)
    assert apart(logits(engine), plain) < 1e-5


@compiled
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_it_is_quantized_again(stored: tuple[str, Path, Any], weight_format: str) -> None:
    _, path, plain = stored
    engine = loaded(path, quantize=weight_format)
    assert engine.info.quantize == weight_format
    assert apart(logits(engine), plain) < (0.05 if weight_format == "int8" else 0.3)
    assert backends(engine) == ({CompiledInt8} if weight_format == "int8" else {CompiledInt4, CompiledInt8})


# Families that our decoder does not know


@pytest.mark.parametrize("form", SAFETENSORS)
def test_another_family_runs_dequantised(tmp_path: Path, form: str) -> None:
    assert all(importlib.util.find_spec(package) is None for package in ("gptqmodel", "awq")), "none is needed"
    plain = write_safetensors(tmp_path, form, random_model(Starcoder2Config, **OTHERS))
    engine = loaded(tmp_path)
    assert type(engine.target).__name__ == "CausalForestModel"
    assert engine.info.quantize is None
    assert engine.info.notes == (f"the target is {form} and runs dequantised, in the memory of plain weights",)
    assert apart(logits(engine), plain) < 1e-5
    assert not loaded(tmp_path, quantize="none").info.notes


@compiled
def test_another_family_is_quantized_again(tmp_path: Path) -> None:
    plain = write_safetensors(tmp_path, "gptq", random_model(Starcoder2Config, **OTHERS))
    engine = loaded(tmp_path, quantize="int8")
    assert (engine.info.quantize, engine.info.notes) == ("int8", ())
    assert 1e-4 < apart(logits(engine), plain) < 0.05


def test_another_family_with_a_broken_tensor(tmp_path: Path) -> None:
    write_safetensors(tmp_path, "gptq", random_model(Starcoder2Config, **OTHERS))
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.c_fc"
    tensors[f"{name}.scales"][2, 3] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name}.* infinite"):
        loaded(tmp_path)


# The command line


def generated(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the records of a run."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", written)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "The quick"}\n'), encoding="utf-8"))
        code = run(["generate", "--draft", "none", "--max-new-tokens", "4", *options])
    assert isinstance(written.buffer, io.BytesIO)
    return code, [json.loads(line) for line in written.buffer.getvalue().splitlines()]


@compiled
def test_records_name_the_form(stored: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    form, path, _ = stored
    code, [record] = generated(monkeypatch, "--target", str(path))
    assert code == 0
    assert record["method"]["quantize"] == form
    code, [record] = generated(monkeypatch, "--target", str(path), "--quantize", "none")
    assert (code, record["method"]["quantize"]) == (0, None)


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, *options: str) -> str:
    """The line of a run that fails."""
    capsys.readouterr()
    assert generated(monkeypatch, *options) == (code, [])
    *notes, line = capsys.readouterr().err.splitlines()
    assert line.startswith("dsbd: error: "), line
    assert all(note.startswith("compiling ") for note in notes), notes
    return line


def test_none_on_a_plain_target_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = save(tmp_path / "plain")
    with pytest.raises(UsageError, match=r"quantize is none, but .* is not quantised"):
        loaded(plain, quantize="none")
    line = fails(monkeypatch, capsys, 2, "--target", str(plain), "--quantize", "none")
    assert "is not quantised" in line
    with pytest.raises(UsageError, match=r"target model .* and draft model .* are not quantised"):
        loaded(plain, ModelSpec(str(plain), role="draft", quantize="none"), quantize="none")


def plain(folder: Path, awq: Path, model: Any) -> None:
    """Write a model with the tokenizer of the checkpoint `awq`."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((awq / name).read_bytes())


def test_none_dequantises_a_draft_of_a_plain_target(awq: Path, tmp_path: Path) -> None:
    plain(tmp_path, awq, random_model(LlamaConfig, **SETTINGS))
    draft = ModelSpec(str(awq), role="draft", dtype="float32", quantize="none")
    engine = loaded(tmp_path, draft, quantize="none")
    assert (engine.info.dtype, engine.info.draft_dtype) == ("float32", "float32")


@compiled
@pytest.mark.parametrize("kind", [LlamaConfig, Starcoder2Config])
def test_int4_without_a_layer_for_it_is_an_error(kind: type, awq: Path, tmp_path: Path) -> None:
    """The LM head is large, which int4 leaves to int8; by our own decoder, and by transformers' modules."""
    settings = {**(OTHERS if kind is Starcoder2Config else SETTINGS), "hidden_size": 64, "intermediate_size": 128}
    plain(tmp_path, awq, random_model(kind, **{**settings, "vocab_size": 2000}))
    assert loaded(tmp_path, quantize="int8").info.quantize == "int8"
    with pytest.raises(UsageError, match=r"quantize is int4, but .* which int4 leaves to int8: take int8, or drop it"):
        loaded(tmp_path, quantize="int4")


@pytest.mark.parametrize(
    ("part", "message"),
    [("scales", "scales .*(NaN|infinite)"), ("qzeros", "qzeros is 8 x 31"), ("qweight", "qweight has 255 inputs")],
)
def test_a_broken_tensor_is_one_line(
    awq: Path,
    tmp_path: Path,
    part: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors, name = load_file(awq / "model.safetensors"), f"model.layers.1.self_attn.q_proj.{part}"
    if part == "scales":
        tensors[name][2, 3] = torch.inf
    else:
        tensors[name] = (tensors[name][:, :-1] if part == "qzeros" else tensors[name][:-1]).contiguous()
    for file in awq.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for options in ((), ("--quantize", "none"), ("--quantize", "int8")):
        line = fails(monkeypatch, capsys, 1, "--target", str(tmp_path), *options)
        assert "model.layers.1.self_attn.q_proj" in line
        assert re.search(message, line), line


def test_a_truncated_gguf_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = write_quantized(tmp_path, "gguf-q4_0")
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.gguf is cut short" in fails(monkeypatch, capsys, 1, "--target", str(path))


def test_a_form_that_is_not_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    line = fails(monkeypatch, capsys, 1, "--target", str(tmp_path))
    assert "'bitsandbytes', which is not read: take its GPTQ" in line
    assert " cannot be loaded: " in line


def test_a_form_that_is_read_elsewhere_is_one_line(
    awq: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(monkeypatch, capsys, 1, "--target", str(awq), "--device", "sequential")
    assert "its awq weights are read for causal language models of transformers' own, on one device" in line
