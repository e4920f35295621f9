"""Readers of draft heads: what is read, and that whatever is not understood is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, PairError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.draft_heads import load as heads
from dsbd_cli.models.draft_heads.formats import is_draft_head
from dsbd_cli.models.draft_heads.load import load_draft_head
from dsbd_cli.models.forest_model import HiddenStateTap
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import load_pair
from tests.helpers.checkpoints import numbers, save
from tests.helpers.pairs import build_pair
from tests.helpers.tiny import build
from tests.models.decoders import V, build_decoder, save_decoder
from tests.models.draft_heads.checkpoints import KEPT, LAYER_IDS, LAYERS, add_mtp, eagle3


def spec_for(source: Path | str, role: Any = "target", **more: Any) -> ModelSpec:
    return ModelSpec(str(source), role, dtype="float32", device="cpu", **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("target"), build_decoder("llama", num_hidden_layers=LAYERS))


@pytest.fixture
def target(folder: Path) -> Any:
    return load_model(
        Checkpoint.open(spec_for(folder, "draft"))
    ).model  # as a draft no verdict on its bits is asked for


def change(folder: Path, changed: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    changed(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(source: Path | str, target: Any) -> Any:
    return load_draft_head(*open_pair(spec_for(target.name), spec_for(source, "draft")), target)


def test_heads_are_recognised_by_their_files(folder: Path, tmp_path: Path) -> None:
    assert is_draft_head(eagle3(tmp_path / "a", "speculators"))
    assert is_draft_head(eagle3(tmp_path / "b", "raw"))
    assert is_draft_head(eagle3(tmp_path / "c", "raw", architectures=None))  # by its tensors
    assert not is_draft_head(folder)
    assert not is_draft_head(tmp_path)
    assert not is_draft_head(save_decoder(tmp_path / "d", build_decoder("llama", num_hidden_layers=1)))


def test_a_pickle_is_read(target: Any, tmp_path: Path) -> None:
    folder = eagle3(tmp_path, "raw")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert read(folder, target).lm_head_ids.tolist() == KEPT.tolist()


def test_d2t_in_any_order(target: Any, tmp_path: Path) -> None:
    """Guards that d2t is offsets and that rows of the head follow their tokens."""
    folder = eagle3(tmp_path, "raw")
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    order = torch.randperm(len(KEPT), generator=torch.Generator().manual_seed(0))

    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = KEPT[order] - torch.arange(len(KEPT))
        tensors["lm_head.weight"] = rows[order]

    head = read(change(folder, shuffle), target)
    assert head.lm_head_ids.tolist() == KEPT.tolist()
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.decoder.weights.lm_head.compute(x), x @ rows.T)


@pytest.mark.parametrize("form", ["speculators", "raw"])
@pytest.mark.parametrize("better", [0, 1])
def test_both_conventions_of_layer_numbers_are_tried(
    form: str, better: int, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    real = heads._loss

    def loss(model: Any, text: Any) -> float:
        losses.append((model.target._tap.layers, real(model, text)))
        return float(len(losses) - 1 != better)

    monkeypatch.setattr(heads, "_loss", loss)
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    folder = eagle3(tmp_path, form, **(ids if form == "speculators" else {"eagle_config": ids}))
    head = read(folder, target)
    documented = [(0, 1, 2), (1, 2, 3)] if form == "speculators" else [(1, 2, 3), (0, 1, 2)]
    assert [layers for layers, _ in losses] == documented
    assert losses[0][1] != losses[1][1]
    assert target._tap.layers == documented[better]
    chosen = ", ".join(map(str, documented[better]))
    assert f"after {chosen} layers (loss 0.00 on a text of the target; 1.00 one layer off)" in head.form


def test_a_head_of_our_own_is_read_as_it_was_trained(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text decides it; the name of its target is told, because another one of the same sizes takes it, too."""
    monkeypatch.setattr(heads, "_loss", lambda *_: pytest.fail("tried"))
    verifier = {"verifier": {"name_or_path": "models/its-target", "architectures": ["LlamaForCausalLM"]}}
    head = read(eagle3(tmp_path, "speculators", dsbd_version="0.1.0", speculators_config=verifier), target)
    assert head.form.startswith("EAGLE-3, speculators form for 'models/its-target', ")
    assert f"it reads the states after {', '.join(map(str, LAYER_IDS))} layers" in head.form


@pytest.mark.parametrize("damaged", [None, "pickle"])
def test_damaged_weights_name_the_draft(damaged: str | None, folder: Path, tmp_path: Path) -> None:
    """Guards the look at a draft that only its tensors show to be a head. torch's own text about a pickle of more than
    tensors says how to run its code."""
    draft_folder = eagle3(tmp_path / "h", "raw", architectures=None)
    (draft_folder / "model.safetensors").write_bytes(b"x" * 40)
    if damaged:
        (draft_folder / "model.safetensors").unlink()
        torch.save({"x": Path("x")}, draft_folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=f"draft model '{draft_folder}' cannot be read: its weights cannot be read: "
    ) as caught:
        load_pair(*open_pair(spec_for(folder), spec_for(draft_folder, "draft")))
    assert ("holds more than tensors, which could run code" in str(caught.value)) is bool(damaged)
    assert "weights_only" not in str(caught.value)


def test_an_end_token_outside_of_the_vocabulary_begins_no_text(folder: Path, tmp_path: Path) -> None:
    """Guards a traceback at load, where the target's text says which layers a head reads."""
    target_folder = shutil.copytree(folder, tmp_path / "t")
    config = json.loads((target_folder / "config.json").read_text())
    (target_folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 10**6}))
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = eagle3(tmp_path / "h", "speculators", **ids)
    assert "one layer off" in read(head, load_model(Checkpoint.open(spec_for(target_folder, "draft"))).model).form


def test_without_layer_numbers_those_of_the_paper_are_taken(tmp_path: Path) -> None:
    deep = load_model(
        Checkpoint.open(spec_for(save_decoder(tmp_path / "t", build_decoder("llama", num_hidden_layers=8)), "draft"))
    ).model
    head = read(eagle3(tmp_path / "h", "raw", eagle_config=None), deep)
    assert head.form.endswith("it reads the states after 2, 4, 5 layers")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"norm_of_something": True}, "norm_of_something = True, which is not known"),
        ({"speculators_model_type": "dflash"}, "its form is dflash"),
        ({"target_hidden_size": 128}, "for a target of width 128, and the target's is 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "it reads the layers 1, 2, 9, and the target has 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight is 64 x 192"),
        ({"draft_vocab_size": 70}, "d2t has 78 tokens, but its config says 70"),
        ({"transformer_layer_config": 3}, "transformer_layer_config = 3, which is no object"),
        (
            {"eagle_aux_hidden_state_layer_ids": []},
            "eagle_aux_hidden_state_layer_ids = \\[\\], which names no layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "eagle_aux_hidden_state_layer_ids = 3, which names no layers"),
        ({"norm_before_fc": None, "fc_norm": True, "unused": None}, None),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], says: str | None, target: Any, tmp_path: Path) -> None:
    folder = eagle3(tmp_path, "speculators", **settings)
    if says is None:
        assert "fc_norm" in read(folder, target).form
        return
    with pytest.raises(ModelError, match=says) as caught:
        read(folder, target)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert target._tap is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"vocab_size": 98}, "a vocabulary of 98 tokens, and the target's is 97"),
        ({"num_hidden_layers": 2}, "it has 2 layers"),
        ({"model_type": "mistral"}, "its layer is of mistral"),
        ({"layer_types": ["sliding_attention"]}, "its layer has a sliding window"),
        ({"hidden_size": "wide"}, "its config is wrong"),
        ({"hidden_act": "relu"}, "its activation is relu"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5, which is not known"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": ["x"]}, r"eagle_config = \['x'\], which is no object"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, r"\['a'\], which names no layers"),
        ({"layer_types": 3, "vocab_size": 98}, "a vocabulary of 98 tokens"),
        ({"hidden_size": 128}, "it has no embeddings and is 128 wide, and the target's are 64 wide"),
    ],
)
def test_raw_settings_that_do_not_fit(settings: dict[str, Any], says: str, target: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        read(eagle3(tmp_path, "raw", **settings), target)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda tensors: tensors.update(norm_strange=torch.ones(64)), "the tensor norm_strange is not known"),
        (lambda tensors: tensors.pop("fc.weight"), "fc.weight is missing"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda tensors: tensors.pop("d2t"), "78 of 97 tokens, but no d2t"),
        (lambda tensors: tensors.update(t2d=torch.ones(V, dtype=torch.bool)), "d2t and t2d name different tokens"),
        (lambda tensors: tensors.update(t2d=torch.ones(V + 1, dtype=torch.bool)), "t2d has 98 tokens"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"] + 10), "it has the token 99"),
        (
            lambda tensors: tensors.update(d2t=torch.zeros_like(tensors["d2t"]) - torch.arange(78)),
            "does not give different",
        ),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(32)}), "norm.weight is 32"),
        (
            lambda tensors: tensors.update(d2t=tensors["d2t"][:, None]),
            r"d2t has the shape \[78, 1\], but must be a list of offsets",
        ),
        (lambda tensors: tensors["fc.weight"].fill_(float("nan")), "its logits are no finite numbers"),
    ],
)
def test_tensors_that_do_not_fit(changed: Any, says: str, target: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        read(change(eagle3(tmp_path, "raw"), changed), target)


def test_a_damaged_folder(target: Any, tmp_path: Path) -> None:
    folder = eagle3(tmp_path, "raw")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="its weights cannot be read"):
        read(folder, target)


def test_a_target_without_an_mtp_layer(target: Any) -> None:
    with pytest.raises(ModelError, match="the target's own MTP layer cannot be read: the checkpoint has none"):
        read("mtp", target)


@pytest.mark.parametrize("form", ["qwen", "deepseek"])
def test_mtp_that_is_not_understood(form: str, tmp_path: Path) -> None:
    folder = add_mtp(save_decoder(tmp_path, build_decoder("llama", num_hidden_layers=LAYERS)), form)
    target = load_model(Checkpoint.open(spec_for(folder, "draft"))).model
    at = "mtp." if form == "qwen" else "model.layers.4."
    change(folder, lambda tensors: tensors.update({f"{at}strange.weight": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"the tensor strange\.weight is not known"):
        read("mtp", target)
    second = "mtp.layers.1.mlp.up_proj.weight" if form == "qwen" else "model.layers.5.eh_proj.weight"
    change(folder, lambda tensors: tensors.update({second: torch.ones(64)}))
    with pytest.raises(ModelError, match="several MTP layers"):
        read("mtp", target)


def test_one_head_reads_a_target(target: Any, tmp_path: Path) -> None:
    folder = eagle3(tmp_path, "raw")
    read(folder, target)
    with pytest.raises(ModelError, match=r"a head reads the states of .* already"):
        read(folder, target)
    target.tap(None)
    target.tap(HiddenStateTap((1,), 64, lambda taken: taken[0]))


@pytest.mark.parametrize("source", ["mtp", "eagle3"])
@pytest.mark.parametrize(
    ("family", "says"),
    [("bart", "a model with an encoder has none"), ("mamba2", "all layers of this one are recurrent")],
)
def test_targets_without_states_are_refused(family: str, source: str, says: str, tmp_path: Path) -> None:
    target, head = tmp_path / "t", "mtp" if source == "mtp" else eagle3(tmp_path / "h", "raw")
    (build_pair(family) if family == "bart" else build(family)).save_pretrained(target)
    numbers().save_pretrained(target)
    with pytest.raises(PairError, match=says) as caught:
        load_pair(*open_pair(spec_for(target), spec_for(head, "draft")))
    assert "\n" not in str(caught.value)


def test_targets_that_are_spread_are_refused(target: Any) -> None:
    spread = replace(spec_for(target.name), device="auto", device_map="auto")
    with pytest.raises(PairError, match="this one is spread over several processes or devices"):
        load_draft_head(*open_pair(spread, spec_for("mtp", "draft")), target)


def test_a_target_without_a_list_of_layers(tmp_path: Path) -> None:
    folder = save(tmp_path / "t", "gpt2", n_embd=64, n_layer=4)
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no plain list of layers to take hidden states after"):
        load_pair(*open_pair(spec_for(folder), spec_for(eagle3(tmp_path / "h", "raw"), "draft")))


def test_heads_do_not_draft_through_text(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="--drafter bridge drafts through text"):
        load_pair(*open_pair(spec_for(folder), spec_for(eagle3(tmp_path, "raw"), "draft")), bridged=True)


def test_a_settings_file_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="is no object of settings"):
        is_draft_head(tmp_path)
