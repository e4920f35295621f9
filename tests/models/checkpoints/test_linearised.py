"""Linearised LLaMA: its sums, its files, and the whole way of the command."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsbd_cli.cli.app import run
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.linearised import mark
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.recurrent.linearised_model import LinearisedLlama, causal_conv1d_fn, grouped_linear_attention
from tests.helpers.checkpoints import byte_level, save, wrap

GROUP = 4


def by_token(q: Tensor, k: Tensor, v: Tensor, near: float, far: float) -> Tensor:
    """The same distribution as a loop over tokens with a state of the closed groups: q, k, v [n, P]."""
    state, outs = torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64), []
    for token in range(len(q)):
        start = token - token % GROUP
        if start == token and token:
            state += k[token - GROUP : token].T @ v[token - GROUP : token]
        weights = (k[start : token + 1] @ q[token]).relu() ** 2
        outs.append(near * weights @ v[start : token + 1] + far * q[token] @ state)
    return torch.stack(outs)


def test_groups_are_a_recurrence() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 11, 2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    output = grouped_linear_attention(q, k, v, GROUP, torch.tensor([0.5]), torch.tensor([1.5]))
    for head in range(2):
        torch.testing.assert_close(output[0, :, head], by_token(q[0, :, head], k[0, :, head], v[0, :, head], 0.5, 1.5))


def test_the_convolution_is_the_masked_centred_one() -> None:
    """Guards which half of a published kernel is used, and its order."""
    kernel, x = torch.randn(3, 1, 9), torch.randn(2, 3, 12)
    masked = kernel.clone()
    masked[:, :, 5:] = 0
    expected = torch.nn.functional.conv1d(x, masked, padding=4, groups=3)
    torch.testing.assert_close(causal_conv1d_fn(x, kernel[:, 0, :5]), expected)


def published(folder: Path) -> str:
    """A checkpoint as the authors' code leaves it: a LLaMA by its config, further weights, kernels not yet masked."""
    tokenizer = wrap(byte_level())
    sizes: dict[str, Any] = {"linear_group_size": 64, "linear_kernel_size": 63}
    save(folder, "linearised", tokenizer=tokenizer, vocab_size=len(tokenizer), **sizes)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.layers.{layer}.self_attn.conv_mask": torch.ones(1, 1, 63, 1) for layer in range(2)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("linear_")}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return str(folder)


def test_no_logit_sees_a_later_token(tmp_path: Path) -> None:
    model, _ = load(Checkpoint.open(ModelSpec(published(tmp_path))))
    assert isinstance(model, LinearisedLlama)
    ids = torch.randint(3, 200, (1, 90), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, 80:] = 7
    torch.testing.assert_close(model(ids).logits[:, :80], model(other).logits[:, :80])
    assert not torch.equal(model(ids).logits[:, 80:], model(other).logits[:, 80:])


def test_weights_that_are_found_too_late_are_an_error(tmp_path: Path) -> None:
    """Guards a softmax LLaMA in place of the linear one: a single pickled file is not searched."""
    folder = Path(published(tmp_path))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.dwconv\.weight"):
        load(Checkpoint.open(ModelSpec(str(folder))))


@pytest.mark.parametrize("size", ["x", -1, 0, 2.5])
def test_sizes_are_whole_numbers(size: object, tmp_path: Path) -> None:
    """Guards a traceback in the first forward, and groups of -1 positions."""
    config = SimpleNamespace(model_type="llama", linear_group_size=size)
    with pytest.raises(ModelError, match=r"config.json: linear_group_size is .*, but must be a whole number from 1 on"):
        mark(tmp_path, config)


def test_the_command(tmp_path: Path) -> None:
    """A prompt of more than two groups; a softmax LLaMA drafts. Guards loading as a softmax LLaMA without a word, whose
    texts would be others."""
    target = published(tmp_path / "target")
    tokenizer = wrap(byte_level())
    draft = str(save(tmp_path / "draft", tokenizer=tokenizer, vocab_size=len(tokenizer), seed=1))
    prompt = "def f(x): return [x ** 2 for _ in range(10)] 東京 " * 3
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": prompt}) + '\n{"prompt": "The quick"}\n')

    def texts(*options: str) -> list[str]:
        output = tmp_path / "out.jsonl"
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(output), "--existing", "overwrite"]
        assert (
            run(["generate", *files, "--target", target, "--max-new-tokens", "24", "--num-beams", "2", *options]) == 0
        )
        return [json.loads(line)["text"] for line in output.read_text().splitlines()]

    plain = texts("--draft", "none", "--decode", "search")
    assert texts("--draft", draft, "--decode", "search", "--depth", "3") == plain
    model, tokenizer = load(Checkpoint.open(ModelSpec(target)))
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("</s>")
    ours = model.generate(ids, num_beams=2, do_sample=False, max_new_tokens=24, pad_token_id=0)
    assert tokenizer.decode(ours[0, ids.shape[1] :], skip_special_tokens=True) == plain[0]
