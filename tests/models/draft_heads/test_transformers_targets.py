"""Draft heads of targets that transformers runs: states, laws and texts, as in test_heads.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from dsbd_cli.engine.protocols import DraftHeadModel
from dsbd_cli.errors import ModelError, UsageError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.draft_heads.load import load_draft_head
from dsbd_cli.models.draft_heads.model import DecoderDraftHead
from dsbd_cli.models.draft_heads.transformers_mtp import TransformersDraftHead
from dsbd_cli.models.forest_model import HiddenStateTap
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import load_pair
from dsbd_cli.models.transformers_backend.base import LAST
from dsbd_cli.models.transformers_backend.patching import QuantizedLinear
from dsbd_cli.models.verdicts import TIMES_ROUNDING
from tests.helpers.checkpoints import numbers
from tests.helpers.tiny import V, build
from tests.models.draft_heads.checkpoints import LAYER_IDS, ScalarHead, eagle3
from tests.models.draft_heads.test_draft_heads import (
    Watch,
    answers,
    apart,
    choose,
    engine_of,
    follow,
    guide_of,
    spec_for,
    watched,
)
from tests.models.draft_heads.transformers_targets import LAYERS, StockHead, save_target
from tests.ops.cpu.test_int8 import any_size, needs_int8  # noqa: F401

Loads = Callable[[str], tuple[Any, TransformersDraftHead, StockHead]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """Pairs by family, each made and loaded once, with the head's formula."""

    @cache
    def load(family: str) -> tuple[Any, TransformersDraftHead, StockHead]:
        folder, whole = save_target(tmp_path_factory.mktemp("targets"), family)
        pair = load_pair(*open_pair(spec_for(folder), spec_for("mtp", "draft")))
        head: Any = pair.draft
        assert isinstance(head, DecoderDraftHead if family == "qwen3.5" else TransformersDraftHead)
        return pair, head, StockHead(folder, whole, family)

    return load


@pytest.mark.parametrize(
    ("family", "rule", "beams", "depths"),
    [
        ("qwen3.5", "search", 4, [3, 1]),
        ("qwen3.5", "coupled", 1, [3, 0, 0, 1, 2]),
        ("qwen3-next", "coupled", 4, [0, 0, 0, 0, 0, 0, 2, 3]),
        ("qwen3.5-moe", "search", 4, [2, 0]),
        ("deepseek-v3", "search", 4, [3, 1]),
        ("glm4-moe", "coupled", 3, [2, 0, 3]),
    ],
)
def test_states_and_laws_are_those_of_a_formula(
    family: str, rule: str, beams: int, depths: list[int], loaded: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the plane of states through prompts, forests, moves, refill and growth, the layer that was read, and the
    head's laws after iterations in which some layers, none or all passed and after iterations without drafts."""
    monkeypatch.setattr("dsbd_cli.engine.cache.prefill.CHUNK", 32)  # tokens of a prompt that are read at once
    watch = watched(loaded(family), rule, beams, depths, monkeypatch)
    pair, _, formula = loaded(family)
    # our decoder, which runs Qwen3.5, sums in another order than transformers
    times = TIMES_ROUNDING * (1.5 if family == "qwen3.5" else 1)
    assert watch.worst[0] <= max(1e-5, times * rounding(pair.target.name, formula)), "states"
    assert watch.worst[1] <= 1e-4, "laws"  # a layer of experts turns 1e-5 into 3e-5


def rounding(target: str, formula: StockHead) -> float:
    """How far the states of transformers' own float32 forward are from those in float64, on this processor."""
    stock: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    path = torch.randint(0, V, (48,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        state = stock(input_ids=path[None], output_hidden_states=True).hidden_states[-1][0]
    return apart(state, formula.truth(path.tolist()))


@pytest.mark.parametrize(
    ("family", "rule", "beams"),
    [
        ("qwen3.5", "search", 1),
        ("qwen3.5", "search", 4),
        ("qwen3.5", "coupled", 1),
        ("qwen3.5", "coupled", 3),
        ("qwen3-next", "search", 4),
        ("qwen3-next", "coupled", 1),
        ("qwen3.5-moe", "coupled", 3),
        ("deepseek-v3", "search", 3),
        ("deepseek-v3", "coupled", 4),
        ("glm4-moe", "search", 1),
        ("glm4-moe", "coupled", 4),
    ],
)
def test_no_text_depends_on_the_head(family: str, rule: str, beams: int, loaded: Loads) -> None:
    """Rows decoded one by one with one beam."""
    pair, head, _ = loaded(family)
    assert pair.target.invariant
    plain = answers(engine_of(pair.target, None, rule, beams, batch=3))
    for batch, more in ((1 if beams == 1 else 2, {}), (4, {"adaptive_depth": True})):
        engine = engine_of(pair.target, head, rule, beams, batch=batch, **more)
        assert answers(engine) == plain


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
def test_a_layer_says_what_it_says_in_transformers(family: str, loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with the model by which transformers' own `generate(use_mtp=True)` drafts."""
    pair, head, _ = loaded(family)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(pair.target.name, dtype=torch.float32)
    # which says the number of the layer in the checkpoints that were published
    monkeypatch.setattr(theirs, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])
    layer = MtpModel.from_pretrained(theirs)
    tokens = torch.tensor([[5, 40, 11, 30, 7, 60, 12]])
    with torch.no_grad():
        states = theirs(input_ids=tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
        cache = MtpCache(config=theirs.config.get_mtp_config())
        last = layer.forward_layer(0, states, torch.arange(1, 7)[None], cache, input_ids=tokens[:, 1:])
        wanted = layer._project_to_logits(last)
    assert apart(head.read(tokens)[:, 1:], wanted) <= 1e-5


def eagle3_pair(folder: Path, family: str) -> tuple[Any, DecoderDraftHead, ScalarHead]:
    """Write a target of the Transformers backend and an EAGLE-3 head, and load them; return them with the head's
    formula."""
    if family == "gpt-oss":
        kinds = ["sliding_attention", "full_attention"]
        wide = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layer_types": 2 * kinds,
        }
        build("gpt-oss window", **wide).save_pretrained(folder / "target")
        numbers().save_pretrained(folder / "target")
    else:
        save_target(folder / "target", family)
    draft_folder = eagle3(folder / "head", "speculators")
    pair = load_pair(*open_pair(spec_for(folder / "target"), spec_for(draft_folder, "draft")))
    head: Any = pair.draft
    head.read_from(LAYER_IDS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64).eval()
    theirs.set_experts_implementation("eager")
    tensors = {name: tensor.double() for name, tensor in load_file(draft_folder / "model.safetensors").items()}
    return pair, head, ScalarHead(tensors, json.loads((draft_folder / "config.json").read_text()), theirs, LAYER_IDS)


@pytest.mark.parametrize(
    ("family", "rule", "beams"), [("gpt-oss", "search", 4), ("gpt-oss", "coupled", 1), ("qwen3.5", "coupled", 4)]
)
def test_states_and_laws_of_eagle3(
    family: str, rule: str, beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards hidden states of inner layers, the embeddings among them, in prompts, forests and moves."""
    pair, head, formula = eagle3_pair(tmp_path, family)
    guide = guide_of(pair.target.name)
    plain = answers(engine_of(pair.target, None, rule, beams))
    watch = Watch(head, formula)
    follow(head, guide, watch, monkeypatch)
    engine = engine_of(pair.target, head, rule, beams)
    choose(engine, [3, 0, 2], monkeypatch)
    engine.observe(watch)
    assert answers(engine) == plain
    assert watch.worst[0] <= 2e-5, "states"
    assert watch.worst[1] <= 1e-4, "laws"
    assert min(watch.counted) > 20
    assert len({count for depth, count in watch.passed if depth}) > 2


@needs_int8
@pytest.mark.parametrize("family", ["qwen3.5-moe", "deepseek-v3"])
def test_a_layer_in_int8(family: str, any_size: None, tmp_path: Path) -> None:  # noqa: F811
    folder, _ = save_target(tmp_path, family)
    more = {"dtype": "bfloat16", "quantize": "int8"}
    pair = load_pair(*open_pair(spec_for(folder, **more), spec_for("mtp", "draft", **more)))
    assert (pair.target_dtype, pair.draft_dtype) == ("int8+bfloat16", "int8+bfloat16")
    head: Any = pair.draft
    kinds = {name: type(module) for name, module in head.module.named_modules()}
    assert kinds["mtp_fc"] == kinds["model.layers.0.self_attn.o_proj"] == QuantizedLinear
    tokens = torch.tensor([[5, 40, 11, 30, 7, 60, 12]])
    said = head.read(tokens)[:, 1:]
    plain: Any = load_pair(
        *open_pair(spec_for(folder, dtype="bfloat16"), spec_for("mtp", "draft", dtype="bfloat16"))
    ).draft
    assert not any(isinstance(module, QuantizedLinear) for module in plain.module.modules())
    assert 0 < apart(said.float(), plain.read(tokens)[:, 1:].float()) < 0.2
    for rule, beams in (("search", 4), ("coupled", 1)):
        without = answers(engine_of(pair.target, None, rule, beams))
        assert answers(engine_of(pair.target, head, rule, beams)) == without


@needs_int8
def test_a_layer_that_is_too_small_for_int8(loaded: Loads) -> None:
    pair, _, _ = loaded("qwen3.5")
    target, spec = pair.target, spec_for("mtp", "draft", quantize="int8")
    target.tap(None)
    with pytest.raises(UsageError, match=r"the target's own MTP layer has no linear layer of .* or more: drop it"):
        load_draft_head(*open_pair(spec_for(target.name), spec), target)
    target.tap(None)
    target.tap(HiddenStateTap((), 64, lambda taken: taken[0]))  # as it was


def test_what_the_engine_sees(loaded: Loads) -> None:
    pair, head, _ = loaded("qwen3.5")
    target = pair.target
    assert isinstance(head, DraftHeadModel)
    assert not isinstance(target, DraftHeadModel)
    assert head.lm_head_ids is None
    assert (head.vocab_size, head.max_positions) == (V, target.max_positions)
    assert (head.copies_prefixes, target.copies_prefixes) == (True, False)
    assert pair.draft_form == "MTP layer (mtp.*); it reads the states after the final norm"
    assert not pair.notes
    # keys and values of one layer; in the target's slots a state beside those of its one layer of attention
    assert head.kv_bytes_per_slot() == 4 * 2 * 2 * 32
    assert target.kv_bytes_per_slot() == 4 * (2 * 2 * 32 + 64)
    held = load_file(Path(target.name) / "model.safetensors")
    own = sum(tensor.nbytes for name, tensor in held.items() if name.startswith("mtp."))
    # norms and `fc` are not counted; embeddings and LM head are the target's
    assert 0.8 * own <= head.size.held_bytes < own + 4 * V * 64
    with pytest.raises(ModelError, match="a head reads the states of"):
        target.tap(HiddenStateTap((), 64, lambda taken: taken[0]))


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        ("qwen3.5", {"mtp.strange.weight": torch.ones(64)}, r"the tensor strange\.weight is not known here"),
        ("qwen3.5", {"mtp.layers.0.mlp.strange.weight": torch.ones(64)}, "mlp.strange.weight is not known here"),
        ("qwen3.5-moe", {"mtp.fc.weight": torch.ones(64, 64)}, r"the tensor fc\.weight is 64 x 64, not 64 x 128"),
        ("qwen3.5", {"mtp.layers.0.self_attn.q_proj.weight": None}, "self_attn.q_proj.weight is missing"),
        ("qwen3.5-moe", {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(128, 64)}, "cannot be made of its layer"),
        ("qwen3.5-moe", {"mtp.norm.weight": None}, r"the tensor norm\.weight is missing"),
        ("qwen3.5", {"mtp.layers.1.mlp.up_proj.weight": torch.ones(64)}, "several MTP layers"),
        ("qwen3-next", {"mtp.fc.weight": None}, "the checkpoint has none"),
    ],
)
def test_a_layer_that_is_not_understood(
    family: str, changed: dict[str, Tensor | None], says: str, tmp_path: Path
) -> None:
    folder, _ = save_target(tmp_path, family)
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    target = load_model(Checkpoint.open(spec_for(folder, "draft"))).model
    with pytest.raises(ModelError, match=says) as caught:
        load_draft_head(*open_pair(spec_for(folder), spec_for("mtp", "draft")), target)
    assert "\n" not in str(caught.value)
    assert "the target's own MTP layer cannot be read: " in str(caught.value)


def test_settings_of_an_mtp_layer_that_are_not_known(tmp_path: Path) -> None:
    folder, _ = save_target(tmp_path, "qwen3.5")
    config = json.loads((folder / "config.json").read_text())
    accepted = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    for more, says in ((accepted, None), ({"mtp_layer_types": ["sliding_attention"]}, r"mtp_layer_types = \['sliding")):
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        target = load_model(Checkpoint.open(spec_for(folder, "draft"))).model
        if says is None:
            assert load_draft_head(*open_pair(spec_for(folder), spec_for("mtp", "draft")), target)
            continue
        with pytest.raises(ModelError, match=says):
            load_draft_head(*open_pair(spec_for(folder), spec_for("mtp", "draft")), target)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """DeepSeek's checkpoints hold the LM head twice."""
    folder, _ = save_target(tmp_path, "deepseek-v3")
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}.shared_head.head.weight"
    own = torch.randn(V, 64, generator=torch.Generator().manual_seed(3))
    tokens, said = torch.tensor([[5, 40, 11, 30, 7]]), []
    for head in (tensors["lm_head.weight"].clone(), own):
        save_file({**tensors, name: head}, folder / "model.safetensors")
        draft: Any = load_pair(*open_pair(spec_for(folder), spec_for("mtp", "draft"))).draft
        said.append((draft.read(tokens)[0, -1], draft._noted_hidden_states[LAST][0, -1]))
    assert apart(said[0][0], said[0][1] @ tensors["lm_head.weight"].T) <= 1e-5
    assert apart(said[1][0], said[1][1] @ own.T) <= 1e-5
