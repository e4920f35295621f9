"""GGUF files: the same model as the checkpoint that was put into one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import Qwen2Config, Qwen2ForCausalLM

from dsbd_cli import ModelSpec, Request, SamplingConfig, UsageError, load
from dsbd_cli.engine.models.loader import load as load_checkpoint

WORDS = [*(chr(code) for code in range(33, 33 + 59)), "!!"]
LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def named(name: str) -> str:
    """The name of a weight in GGUF."""
    for ours, theirs in {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, theirs)
    _, _, layer, rest = name.split(".", 3)
    inner, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYERS[inner]}.{kind}"


@pytest.fixture(scope="module")
def original() -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=61,
            initializer_range=0.4,
        )
    ).eval()


@pytest.fixture(scope="module")
def file(original: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config, writer = original.config, GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*WORDS, "<pad>", "<end>", "<a>", "<b>"])
    writer.add_token_types([TokenType.NORMAL] * 60 + [TokenType.CONTROL] * 4)
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(61)
    writer.add_pad_token_id(60)
    for name, weight in original.state_dict().items():
        writer.add_tensor(named(name), weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_the_model_that_was_put_into_it(file: Path, original: Qwen2ForCausalLM) -> None:
    model, tokenizer = load_checkpoint(ModelSpec(str(file), dtype="float32"))
    ids = torch.tensor([[1, 5, 9, 22]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert tokenizer.decode([0, 1, 2]) == "".join(WORDS[:3])


def test_a_gguf_file_answers(file: Path, original: Qwen2ForCausalLM, capfd: pytest.CaptureFixture[str]) -> None:
    engine = load(ModelSpec(str(file), dtype="float32"), None)
    request = Request("ABC", sampling=SamplingConfig(max_new_tokens=5, temperature=0))
    found = engine.generate(request)
    ids = torch.tensor([engine.codec.encode("ABC")])
    with torch.no_grad():
        best = original.generate(
            ids, num_beams=4, max_new_tokens=5, do_sample=False, pad_token_id=60, eos_token_id=61, length_penalty=1.0
        )
    assert list(found.hypotheses[0].token_ids) == best[0, ids.shape[1] :].tolist()
    assert capfd.readouterr().err == "", "no bar of the library"


def test_the_package_that_is_missing_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))
    with pytest.raises(UsageError, match=r"pip install 'dsbd\[gguf\]'"):
        load(str(file), None)
