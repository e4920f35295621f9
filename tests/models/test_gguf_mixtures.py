"""GGUF files of mixtures of experts: run as stored by our own decoder, read by transformers, and damaged."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.cli.app import run
from dsbd_cli.errors import ModelError, UnsupportedModelError, shorten
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.gguf.experts import set_experts
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.loader import load_network
from dsbd_cli.models.decoder.load import first_part
from dsbd_cli.models.load_model import _DecoderLoad
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.cpu.int8_groups import CompiledInt8Groups
from dsbd_cli.ops.select import quantize_missing
from tests.helpers.gguf_mixtures import EXPERTS, MODELS, write_mixture
from tests.helpers.quantized_files import TOKENS, apart, loaded, logits, requests, texts

FILES = {  # architecture, blocks of the experts' first and last products
    "qwen3moe": ("qwen3moe", "Q4_0", "Q4_0"),
    "qwen3moe as Q4_K_M": ("qwen3moe", "Q4_K", "Q6_K"),
    "qwen2moe": ("qwen2moe", "Q4_K", "Q6_K"),
    "gpt-oss": ("gpt-oss", "MXFP4", "MXFP4"),
}

compiled = pytest.mark.skipif(quantize_missing("int4") is not None, reason="no kernel of int4 on this processor")


@pytest.fixture(scope="module", params=FILES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """The name of a file, its path, and transformers' model of the same weights."""
    path = tmp_path_factory.mktemp("mixture") / "model.gguf"
    return request.param, path, write_mixture(path, *FILES[request.param])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3") / "model.gguf"
    write_mixture(path, "qwen3moe", "Q4_0")
    return path


@compiled
def test_experts_run_as_stored(stored: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, path, plain = stored
    first = loaded(path)
    assert type(first.target).__name__ == "DecoderForestModel"
    assert first.info.quantize == GgufFile.open(path, "x").form
    assert (first.exactness, first.info.notes) == ("same-text", ())
    for layer in first.target.decoder.weights.layers:
        products = (layer.mixture.gate_up, layer.mixture.down)
        four_bits = [CompiledInt4 if kind != "Q6_K" else CompiledInt8Groups for kind in FILES[name][1:]]
        assert [type(product.backend) for product in products] == four_bits
    assert 1e-4 < apart(logits(first), plain) < 0.06, "inputs are in int8"
    monkeypatch.setattr(_DecoderLoad, "_checked", None)  # what the first load has found serves the second one
    second = loaded(path)
    assert torch.equal(logits(first), logits(second))
    assert texts(first) == texts(second)
    assert len(set(texts(first))) > 1


@compiled
def test_a_text_depends_on_no_other_row_and_no_draft(stored: tuple[str, Path, Any]) -> None:
    _, path, _ = stored
    alone = loaded(path)
    own = [tuple(alone.generate([request])[0].hypotheses[0].token_ids) for request in requests()]
    assert texts(loaded(path, ModelSpec(str(path), role="draft", dtype="float32", quantize="int8"), 4)) == own


def test_dequantised_experts_are_those_of_the_file(stored: tuple[str, Path, Any]) -> None:
    _, path, plain = stored
    engine = loaded(path, quantize="none")
    assert (type(engine.target).__name__, engine.info.quantize) == ("DecoderForestModel", None)
    assert apart(logits(engine), plain) < 1e-5


@pytest.mark.parametrize("drafted", [False, True])
def test_beams_are_those_of_transformers(stored: tuple[str, Path, Any], drafted: bool) -> None:
    _, path, plain = stored
    draft = ModelSpec(str(path), role="draft", dtype="float32") if drafted else None
    method = MethodConfig(rule="search", num_beams=3, depth=2 if drafted else 0, drafts_per_layer=6)
    engine = load(ModelSpec(str(path), dtype="float32", quantize="none"), draft, method=method)
    sampling = SamplingConfig(max_new_tokens=8, n_best=3)
    for length in (6, 90):
        ids = torch.randint(0, 250, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            wanted = plain.generate(ids, do_sample=False, num_beams=3, num_return_sequences=3, max_new_tokens=8)
        [result] = engine.generate([Request(prompt_ids=tuple(ids[0].tolist()), id="0", sampling=sampling)])
        beams = [[*hypothesis.token_ids] for hypothesis in result.hypotheses]
        assert beams == wanted[:, length:].tolist()
        assert len(set(map(tuple, beams))) == 3


def test_one_layer_is_compared_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain weights, and as the file has them. Four layers of a large mixture would take too much memory."""
    path, layers = tmp_path / "model.gguf", list[int]()
    write_mixture(path, "qwen3moe", "Q4_0", num_hidden_layers=3)

    def counted(parts: Any, count: int, vocabulary: int) -> Any:
        layers.append(count)
        return first_part(parts, count, vocabulary)

    monkeypatch.setattr("dsbd_cli.models.load_model.first_part", counted)
    loaded(path)
    assert set(layers) == {1}


def test_transformers_reads_the_same_model(stored: tuple[str, Path, Any]) -> None:
    """With the settings that it does not read itself, and for gpt-oss with our names of tensors."""
    _, path, plain = stored
    checkpoint = Checkpoint(ModelSpec(str(path), dtype="float32"), path)
    theirs = load_network(checkpoint)
    state = plain.state_dict()
    assert {name: tensor.shape for name, tensor in theirs.state_dict().items()} == {
        name: tensor.shape for name, tensor in state.items()
    }
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with torch.inference_mode():
        assert apart(theirs(input_ids=TOKENS, use_cache=False).logits, plain) < 1e-6


@compiled
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_experts_are_quantized_again(stored: tuple[str, Path, Any], weight_format: str) -> None:
    _, path, plain = stored
    engine = loaded(path, quantize=weight_format)
    assert engine.info.quantize == weight_format
    assert apart(logits(engine), plain) < (0.06 if weight_format == "int8" else 0.4)


@pytest.mark.parametrize("architecture", MODELS)
def test_plain_experts(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    plain = write_mixture(path, architecture, "F16", others="F16")
    engine = loaded(path)
    assert (type(engine.target).__name__, engine.info.quantize, engine.info.notes) == ("DecoderForestModel", None, ())
    assert apart(logits(engine), plain) < 1e-5


# Settings


def config_of(path: Path, **metadata: Any) -> Any:
    """The config of a file whose metadata say something else. None: they lack it."""
    checkpoint = Checkpoint(ModelSpec(str(path)), path)
    config, file = copy.deepcopy(checkpoint.config), checkpoint.gguf
    assert file is not None
    for name, value in metadata.items():
        key = f"{file.architecture}.{name.replace('__', '.')}"
        file.metadata.pop(key, None)
        if value is not None:
            file.metadata[key] = value
    set_experts(config, file)
    return config


def test_widths_follow_from_others_where_no_metadata_tell_them(tmp_path: Path) -> None:
    """As in llama.cpp: those of an expert from that of the experts that are chosen."""
    write_mixture(tmp_path / "model.gguf", "qwen2moe", "Q4_0", intermediate_size=768)
    config = config_of(tmp_path / "model.gguf")
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (256, 512)
    assert not config.norm_topk_prob
    none = dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"))
    config = config_of(tmp_path / "model.gguf", **none)
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (384, 768)


def test_gpt_oss_has_windows_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_mixture(path, "gpt-oss", "Q4_0", num_hidden_layers=3)
    checkpoint = Checkpoint(ModelSpec(str(path)), path)
    config = checkpoint.config
    assert (config.sliding_window, config.head_dim, config.swiglu_limit, config.swiglu_alpha) == (12, 32, 7.0, 1.702)
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    rope = config.rope_parameters
    assert {key: rope[key] for key in ("rope_type", "factor", "truncate", "original_max_position_embeddings")} == {
        "rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = config_of(path, attention__sliding_window=None, attention__key_length=None)
    assert (config.sliding_window, config.head_dim, set(config.layer_types)) == (None, 64, {"full_attention"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_weights_scale", 2.5), ("expert_gating_func", 2), ("expert_weights_norm", False),
        ("expert_group_count", 4), ("expert_shared_count", 1), ("expert_unknown", "x"), ("moe_latent_size", 64),
        ("leading_dense_block_count", 1), ("expert_shared_feed_forward_length", 512),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_refused(qwen3: Path, name: str, value: Any) -> None:
    told = rf"model\.gguf says qwen3moe\.{name} = {shorten(value)}, which is not read"
    with pytest.raises(UnsupportedModelError, match=told):
        config_of(qwen3, **{name: value})


def test_settings_that_change_nothing_are_read(qwen3: Path) -> None:
    config = config_of(
        qwen3, expert_weights_scale=1.0, expert_gating_func=1, expert_weights_norm=True, expert_group_count=1
    )
    assert config.norm_topk_prob


# Damage


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("expert_count", None, "lacks qwen3moe.expert_count"),
        ("expert_count", 0, "says qwen3moe.expert_count = 0, but must say a number above 0"),
        ("expert_count", 8, "says qwen3moe.expert_count = 8, but blk.0.ffn_gate_exps.weight is 4 x 256 x 256"),
        ("expert_used_count", 5, "says qwen3moe.expert_used_count = 5, but must say 1 to 4"),
        ("expert_feed_forward_length", "x", "says qwen3moe.expert_feed_forward_length = 'x', but must say"),
    ],
)
def test_numbers_that_cannot_be_are_told(qwen3: Path, name: str, value: Any, told: str) -> None:
    with pytest.raises(ModelError, match=rf"^target model '.*': model\.gguf {re.escape(told)}"):
        config_of(qwen3, **{name: value})


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    """The line of a run that fails."""
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n'), encoding="utf-8"))
        assert run(["generate", "--target", str(path), "--draft", "none", "--max-new-tokens", "4", *options]) == 1
    *notes, line = capsys.readouterr().err.splitlines()
    assert line.startswith("dsbd: error: "), line
    assert all(note.startswith("compiling ") for note in notes), notes
    return line


@pytest.mark.parametrize("options", [(), ("--quantize", "none")])
def test_a_broken_expert_is_one_line(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one, in a layer behind those that are compared at the first load."""
    path = tmp_path / "model.gguf"
    write_mixture(path, "gpt-oss", "MXFP4", num_hidden_layers=5)
    tensor = GgufFile.open(path, "x").tensors["blk.4.ffn_up_exps.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.offset + tensor.size - 17] = 255
    path.write_bytes(content)
    assert "blk.4.ffn_up_exps.weight that are NaN" in failure(monkeypatch, capsys, path, *options)


def test_another_number_of_experts_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_mixture(path, "qwen3moe", "Q4_0")
    content, key = path.read_bytes(), b"qwen3moe.expert_count"
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + (EXPERTS + 1).to_bytes(4, "little") + content[at + 4 :])
    assert f"says qwen3moe.expert_count = {EXPERTS + 1}, but blk.0.ffn_" in failure(monkeypatch, capsys, path)


@compiled
def test_records_name_the_form(
    stored: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path, _ = stored
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n'), encoding="utf-8"))
    assert run(["generate", "--target", str(path), "--draft", "none", "--max-new-tokens", "4"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["method"]["quantize"] == GgufFile.open(path, "x").form
