"""Our own decoder: the logits, texts and hidden states of transformers for every family that it knows; programs give
the bits of plain forwards; what is not known is run by transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsbd_cli import load
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.cache.prefill import prefill
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError, UnsupportedModelError
from dsbd_cli.models import load_model as stages
from dsbd_cli.models import verdicts
from dsbd_cli.models.attention import views
from dsbd_cli.models.attention.views import MaskView, PathView, PrefixView
from dsbd_cli.models.checkpoints import loader
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.decoder import decoder_model
from dsbd_cli.models.decoder import load as decoder_load
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.forest_model import BaseForestModel, HiddenStateTap, unsupported
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.verdicts import Verdict
from dsbd_cli.ops.cpu import linear
from dsbd_cli.ops.cpu.program import loop
from dsbd_cli.ops.recording import Arena, Program
from dsbd_cli.ops.select import packing_works
from dsbd_cli.requests import Request
from dsbd_cli.user_cache import cache_folder
from tests.helpers.checkpoints import numbers, save
from tests.helpers.kernels import only, refuse, replaced, serves
from tests.helpers.toys import NumberCodec
from tests.helpers.worlds import RandomPlanner
from tests.models.checks.test_invariance import all_slots_at_once
from tests.models.decoders import DECODERS, V, build_decoder, first_layers, save_decoder

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="forwards of these tests run on the CPU")
KERNELS = pytest.mark.skipif(not serves("norm"), reason="kernels of numba do not run here")
NARROW_HEADS = "llama small head"  # kernels take half heads of 16
# in bfloat16 their angles, or the residual stream, stay float32
FLOAT_ANGLES = (
    *("olmo2", "olmo3", "flex olmo", "helium", "ernie4.5", "ernie4.5 moe"),
    *("olmo hybrid", "olmo hybrid rotary", "lfm3", "lfm3 plain", "mamba2"),
)
# transformers does not limit their step sizes where it reads its cache
WITHOUT_CACHE = ("nemotron-h", "nemotron-h moe", "nemotron-h latent")


def spec_for(folder: Path, role: Any = "target", dtype: str = "float32", **more: Any) -> ModelSpec:
    return ModelSpec(str(folder), role, dtype=dtype, device="cpu", **more)


def decoder_of(folder: Path, **settings: Any) -> DecoderForestModel:
    """Load a checkpoint that our own decoder must take, with nothing to say about it."""
    forest, _, report = load_model(Checkpoint.open(spec_for(folder, **settings)))
    assert report.notes == ()
    assert isinstance(forest, DecoderForestModel)
    return forest


Loads = Callable[..., tuple[DecoderForestModel, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """Models by family and settings, each made and loaded once: ours, and transformers' in float32."""

    @cache
    def load(name: str, layers: int | None = None, **changes: Any) -> tuple[DecoderForestModel, Any]:
        theirs = build_decoder(name, **changes)
        if layers is not None:
            theirs = first_layers(theirs, layers)
        folder = save_decoder(tmp_path_factory.mktemp("decoder"), theirs)
        return decoder_of(folder, role="draft" if layers is not None else "target"), theirs

    return load


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, V, shape, generator=torch.Generator().manual_seed(seed))


def apart(computed: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, in standard deviations of what is wanted."""
    return float((computed.float() - wanted.float()).square().mean().sqrt() / wanted.float().std())


# Equality with transformers


@pytest.mark.parametrize("name", DECODERS)
def test_every_family_is_transformers(name: str, loaded: Loads) -> None:
    forest, theirs = loaded(name)
    ids = tokens(2, 40)
    with torch.inference_mode():
        assert apart(forest.plain(ids), theirs(input_ids=ids, use_cache=False).logits) <= 2e-6
    assert self_test(forest).largest_error <= 1e-4
    assert forest.invariant, forest.varies
    assert forest.copies_prefixes == (forest.decoder.config.mixer is None)
    assert forest.architecture == type(theirs).__name__
    assert forest.max_positions == (None if name == "mamba2" else 512)
    assert forest.switch_position == (256 if name == "phi3 longrope" else None)
    assert ("norm" in forest.ops.by("numba")) == (serves("norm") and name != NARROW_HEADS)


@pytest.mark.parametrize("name", DECODERS)
def test_every_config_is_the_same_after_json(name: str) -> None:
    """As later loads read it."""
    kind, settings = DECODERS[name]
    config = decoder_config_of(getattr(transformers, kind)(**settings))
    assert isinstance(config, DecoderConfig)
    assert DecoderConfig.from_json(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("name", ["qwen3 moe", "granite moe"])
def test_a_mixture_without_a_prefix(name: str, tmp_path: Path) -> None:
    theirs = build_decoder(name)
    file = save_decoder(tmp_path, theirs) / "model.safetensors"
    save_file({key.removeprefix("model."): tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    ids = tokens(1, 20)
    with torch.inference_mode():
        assert apart(decoder_of(tmp_path).plain(ids), theirs(input_ids=ids, use_cache=False).logits) <= 2e-6


def test_a_mixture_whose_groups_have_too_few_experts_runs_through_transformers() -> None:
    kind, settings = DECODERS["glm4 moe"]
    config = decoder_config_of(getattr(transformers, kind)(**{**settings, "topk_group": 1}))
    assert config == "its config says topk_group = 1, which has fewer experts than a token"


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in FLOAT_ANGLES])
def test_every_family_in_bfloat16(name: str, tmp_path: Path) -> None:
    theirs = build_decoder(name).to(torch.bfloat16)
    forest = decoder_of(save_decoder(tmp_path / "model", theirs, torch.bfloat16), dtype="bfloat16")
    assert forest.weights_dtype == forest.dtype == torch.bfloat16
    ids = tokens(2, 40)
    with torch.inference_mode():
        # where two experts' scores are near each other, rounding may choose the other one
        limit = 6e-2 if forest.decoder.config.mixture is None else 0.15
        assert apart(forest.plain(ids), theirs(input_ids=ids, use_cache=False).logits) <= limit
    assert self_test(forest).largest_error <= 0.2
    assert forest.invariant, forest.varies


@pytest.mark.parametrize("name", FLOAT_ANGLES)
def test_families_whose_angles_stay_float32_fall_back_in_bfloat16(name: str, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "model", build_decoder(name), torch.bfloat16)
    forest = load_model(Checkpoint.open(spec_for(folder, dtype="bfloat16"))).model
    assert isinstance(forest, CausalForestModel)


PROMPTS = [tokens(length, seed=length).tolist() for length in (3, 11, 70, 130)]  # the last two have prompt slots


@pytest.mark.parametrize("name", DECODERS)
def test_beams_and_scores_are_those_of_transformers(name: str, loaded: Loads) -> None:
    """Rule `search`, without a draft and with one of the first layers: all beams, in order, with their scores."""
    (target, theirs), (draft, _) = loaded(name), loaded(name, 2)
    beams, ends, new = 4, list(range(2, 10)), 10
    together = [PROMPTS] if target.decoder.config.mixer is None else [[prompt] for prompt in PROMPTS]
    wanted: list[tuple[list[list[int]], list[float]]] = []
    for prompts in together:  # a convolution with a bias reads padding
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        out = theirs.generate(
            padded, attention_mask=(padded > 0).long(), do_sample=False, num_beams=beams, num_return_sequences=beams,
            max_new_tokens=new, eos_token_id=ends, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
            early_stopping=False, length_penalty=1.0, use_cache=name not in WITHOUT_CACHE,
        )  # fmt: skip
        rows = [until(row, ends) for row in out.sequences[:, longest:].tolist()]
        wanted += [
            (rows[at : at + beams], out.sequences_scores[at : at + beams].tolist()) for at in range(0, len(rows), beams)
        ]
    for drafter, depth in ((None, 0), (draft, 3)):
        method = MethodConfig(rule="search", num_beams=beams, depth=depth, drafts_per_layer=2 * beams)
        engine = Engine(target, drafter, NumberCodec(V, tuple(ends)), method, batch_size=3)
        sampling = SamplingConfig(max_new_tokens=new, n_best=beams, early_stopping=False, length_penalty=1.0)
        requests = [Request(prompt_ids=tuple(prompt), sampling=sampling) for prompt in PROMPTS]
        for result, (rows, scores) in zip(engine.run(requests), wanted, strict=True):
            assert [list(beam.token_ids) for beam in result.hypotheses] == rows
            assert [beam.score for beam in result.hypotheses] == pytest.approx(scores, abs=2e-4)


def until(row: list[int], ends: list[int]) -> list[int]:
    """Token ids up to and with the first end token."""
    return row[: next((position + 1 for position, token in enumerate(row) if token in ends), len(row))]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("programs", [True, False])
def test_hidden_states_are_those_of_transformers(name: str, programs: bool, loaded: Loads) -> None:
    """After no, one and all layers; the last one before its norm, which transformers has normalised."""
    ours, theirs = loaded(name)
    last: list[Tensor] = []
    norms = ("norm", "embedding_norm", "final_layernorm", "norm_f")  # the last one by its name in transformers
    norm = next(filter(None, (getattr(theirs.base_model, name, None) for name in norms)))
    hook = norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    ids = tokens(1, 12)
    with torch.inference_mode():
        wanted = theirs(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    if name == "mamba2":  # which leaves out the embeddings
        wanted = (theirs.get_input_embeddings()(ids), *wanted)
    forest = DecoderForestModel(ours.decoder, name, ours.settings)
    taken: list[Tensor] = []

    def fuse(states: list[Tensor]) -> Tensor:
        taken[:] = states
        return states[0]

    forest.tap(HiddenStateTap((0, 1, 3), forest.hidden_size, fuse))
    with eager(forest, programs=programs):
        for _ in range(2):  # a program is run when it is built, and again
            forest.reserve(1, 64)
            forest.forward(chain(ids))
            for state, expected in zip(taken, (wanted[0], wanted[1], last[0]), strict=True):
                torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    forest.release()


# What is not known


def changed(folder: Path, **fields: Any) -> Path:
    """Change settings of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tmp_path / "model", build_decoder("llama"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_act": "relu"}, "its activation is relu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "its rotary positions are"),
    ],
)
def test_a_setting_that_is_not_known_falls_back(fields: dict[str, Any], said: str, folder: Path) -> None:
    from transformers import AutoConfig

    changed(folder, **fields)
    reason = decoder_config_of(AutoConfig.from_pretrained(folder))
    assert isinstance(reason, str)
    assert said in reason
    forest, _, report = load_model(Checkpoint.open(spec_for(folder)))
    assert isinstance(forest, CausalForestModel)
    assert report.notes == ()


@pytest.mark.parametrize("settings", [{"rope_theta": "x"}, {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}])
def test_a_setting_of_a_wrong_type_is_one_line(settings: dict[str, Any], folder: Path) -> None:
    """Guards a traceback of our decoder: transformers says what is wrong."""
    changed(folder, rope_parameters={"rope_type": "default", **settings})
    with pytest.raises(ModelError, match="cannot be loaded: "):
        load_model(Checkpoint.open(spec_for(folder)))


@pytest.mark.parametrize("fields", [{"sliding_window": None}, {"query_pre_attn_scalar": -1}])
def test_settings_with_which_no_forward_runs_are_one_line(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = changed(save(tmp_path, "gemma2 window"), **fields)
    with pytest.raises(UnsupportedModelError, match=r"target model .*: Gemma2ForCausalLM .*"):
        load_model(Checkpoint.open(spec_for(folder)))


def test_a_list_of_more_layers_than_there_are(tmp_path: Path) -> None:
    """As in a checkpoint that has lost its last layers. Guards a traceback."""
    folder = changed(save_decoder(tmp_path, build_decoder("smollm3")), no_rope_layers=[1, 0, 1, 1, 0, 1])
    assert decoder_of(folder).decoder.config.rotary == (0, 1, 0)


@pytest.mark.parametrize("part", [-1.0, 3.0])
def test_heads_are_not_rotated_by_more_than_their_width(part: float, folder: Path) -> None:
    """Guards a traceback: transformers' Llama does not read this setting."""
    changed(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part})
    assert isinstance(load_model(Checkpoint.open(spec_for(folder))).model, CausalForestModel)


def test_a_config_key_that_is_not_known_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that transformers declares and this package has never heard of; one that transformers does not read
    changes nothing."""
    from transformers import LlamaConfig

    from dsbd_cli.models.decoder import families

    config = LlamaConfig(**DECODERS["llama"][1], my_note="hello")
    assert isinstance(decoder_config_of(config), DecoderConfig)
    monkeypatch.setattr(families, "KNOWN", families.KNOWN - {"mlp_bias"})
    assert isinstance(decoder_config_of(config), DecoderConfig)
    config.mlp_bias = True
    assert decoder_config_of(config) == "its config says mlp_bias = True, which is not known here"


def test_an_architecture_that_is_not_known_falls_back(tmp_path: Path) -> None:
    for family in ("gpt2", "cohere"):
        forest, _, report = load_model(Checkpoint.open(spec_for(save(tmp_path / family, family))))
        assert isinstance(forest, CausalForestModel)
        assert report.notes == ()


@pytest.mark.parametrize("change", [{"eps": 0.1}, {"scale": 0.5}, {"residual_scale": 0.9}, {"gelu": True}])
def test_logits_that_are_not_transformers_fall_back(
    change: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a family that is read wrongly: the model that answers is the model that was named."""
    real = decoder_load.decoder_config_of
    monkeypatch.setattr(decoder_load, "decoder_config_of", lambda config: replace(real(config), **change))
    for _ in range(2):  # the second load knows it
        forest, _, report = load_model(Checkpoint.open(spec_for(folder)))
        assert isinstance(forest, CausalForestModel)
        assert forest.invariant
        (line,) = report.notes
        assert line.startswith("the target runs through transformers: in our own decoder its logits are off by")
        monkeypatch.setattr(stages, "differs", lambda *_: pytest.fail("asked again"))


@pytest.mark.parametrize("fault", ["missing", "shape", "head"])
def test_a_tensor_that_is_not_where_it_should_be(fault: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "lm_head.weight" if fault == "head" else "model.layers.1.mlp.up_proj.weight"
    if fault == "shape":
        weights[name] = weights[name][:, :32].contiguous()
    else:
        del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(Checkpoint.open(spec_for(folder)))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


# Forms of checkpoints


def test_shards_and_pickles(tmp_path: Path, folder: Path) -> None:
    """The bits of the single file."""
    wanted = decoder_of(folder).plain(tokens(1, 20))
    model = build_decoder("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1
    (tmp_path / "pickle").mkdir()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path / "pickle")
    for name in ("shards", "pickle"):
        numbers().save_pretrained(tmp_path / name)
        assert torch.equal(decoder_of(tmp_path / name).plain(tokens(1, 20)), wanted)


def test_a_whole_file_goes_before_shards(tmp_path: Path, folder: Path) -> None:
    whole, shards = build_decoder("llama"), build_decoder("llama")
    with torch.no_grad():
        shards.model.norm.weight.add_(1)
    shards.save_pretrained(tmp_path / "both", max_shard_size="50KB")
    whole.save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "both")
    shutil.copy(next((tmp_path / "both").glob("model-*")), tmp_path / "both" / "model_old.safetensors")
    numbers().save_pretrained(tmp_path / "both")
    assert torch.equal(decoder_of(tmp_path / "both").plain(tokens(1, 20)), decoder_of(folder).plain(tokens(1, 20)))


def test_a_gguf_file(tmp_path: Path) -> None:
    from tests.helpers.tiny_gguf import tiny_qwen2, write_gguf

    original = tiny_qwen2()
    write_gguf(original, tmp_path / "tiny.gguf")
    forest = decoder_of(tmp_path / "tiny.gguf")
    ids = tokens(1, 9) % forest.vocab_size
    with torch.inference_mode():
        assert apart(forest.plain(ids), original(ids).logits) <= 1e-5


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    from tests.models.checkpoints.test_compressed_tensors import quantized

    quantized(tmp_path, "W8A16", "pack-quantized")
    assert isinstance(load_model(Checkpoint.open(ModelSpec(str(tmp_path), device="cpu"))).model, DecoderForestModel)


def test_a_trimmed_draft(folder: Path, tmp_path: Path) -> None:
    from collections import Counter

    from dsbd_cli.train.trim import trim

    trim(spec_for(folder, "draft"), tmp_path / "small", Counter(dict.fromkeys(range(5, 20), 1)), size=20)
    full, small = (decoder_of(path, role="draft") for path in (folder, tmp_path / "small"))
    assert small.lm_head_ids is not None
    assert len(small.lm_head_ids) == 20
    assert small.vocab_size == V
    ids = tokens(1, 9)
    assert torch.equal(small.plain(ids), full.plain(ids)[..., small.lm_head_ids])


# Programs


@contextmanager
def eager(forest: BaseForestModel, *, programs: bool = False) -> Iterator[None]:
    """Layers are called one by one inside."""
    assert isinstance(forest, DecoderForestModel)
    before = forest.decoder.ops
    forest.decoder.ops = replace(before, program=before.program if programs else None)
    yield
    forest.decoder.ops = before


def chain(ids: Tensor, first: int = 0, slots: int = 64, **more: Any) -> ForestInput:
    """Tokens [1, n] in a row, from slot `first` on."""
    count = ids.shape[1]
    places = torch.arange(count)[None] + first
    mask = torch.zeros(1, count, slots, dtype=torch.bool)
    mask[0, :, first : first + count] = torch.ones(count, count, dtype=torch.bool).tril()
    return ForestInput(ids, places, places, mask, torch.arange(slots)[None], **more)


def answers(
    target: BaseForestModel,
    prompts: list[list[int]],
    method: MethodConfig,
    draft: BaseForestModel | None = None,
    new: int = 16,
    batch_size: int | None = None,
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Token ids and log-probabilities of all beams, to the last bit."""
    engine = Engine(target, draft, NumberCodec(V, (2,)), method, batch_size=batch_size or len(prompts))
    sampling = SamplingConfig(max_new_tokens=new, n_best=method.num_beams)
    results = engine.run([Request(prompt_ids=tuple(prompt), sampling=sampling) for prompt in prompts])
    return [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in results]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in tokens(length, seed=seed)]


SEARCH = MethodConfig(rule="search", num_beams=3, depth=0)
WINDOWS = {"sliding_window": 40}
BITS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DECODERS if name != NARROW_HEADS),
    *((name, WINDOWS) for name in ("mistral window", "ministral", "gemma3", "gemma2")),
]


@ON_CPU
@KERNELS
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_by_the_kernel_are_those_by_masks(name: str, loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt slots of a draft's forwards hold nothing that one of its nodes does not see, not even where the backlog
    reaches back into the prompt."""
    target, _ = loaded(name)
    draft = decoder_of(Path(target.name), role="draft")
    errors, within = list[float](), 0
    forward = draft.forward

    def compared(batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        nonlocal within
        if batch.prompt_slots is None:
            return forward(batch, logits=logits)
        within += bool((batch.positions[:, : batch.late] < starts[: len(batch.tokens), None]).any())
        masked = forward(replace(batch, prompt_slots=None))
        direct = forward(batch)
        assert masked is not None
        assert direct is not None
        real = batch.slots < batch.mask.shape[-1]  # tokens of a backlog that do not exist are written elsewhere
        errors.append(apart(direct[real], masked[real]))
        return direct

    monkeypatch.setattr(draft, "forward", compared)
    lengths = (129, 97, 65)  # all tokens but the last fill whole steps of prompt slots
    starts = torch.tensor(lengths) - 1
    requests = [Request(prompt_ids=tuple(prompt(length, length))) for length in lengths]
    method = MethodConfig(rule="search", num_beams=3, depth=2, drafts_per_layer=6)
    engine = Engine(target, draft, NumberCodec(V, (2,)), method, batch_size=3)
    for seed in range(4):
        engine._planner = RandomPlanner(seed, 2, 6, gated=False)
        list(engine.run(requests))
    assert len(errors) > 40
    assert within > 3, "no backlog reached into a prompt"
    assert max(errors) <= 1e-5


@ON_CPU
@KERNELS
@pytest.mark.parametrize(("name", "changes"), BITS, ids=[f"{name} {changes or ''}" for name, changes in BITS])
def test_programs_give_the_bits_of_plain_forwards(name: str, changes: dict[str, Any], loaded: Loads) -> None:
    """A short prompt, all of whose slots are suffix; a long one with prompt slots; rows with different numbers of
    these. Layers with a window see a part of them."""
    target, _ = loaded(name, **changes)
    for prompts in ([prompt(9)], [prompt(150)], [prompt(70, 1), prompt(131, 2), prompt(20, 3)]):
        target.release()
        with eager(target):
            wanted = answers(target, prompts, SEARCH, new=9)
            assert not target._programs
        assert answers(target, prompts, SEARCH, new=9) == wanted
        assert target._programs


@ON_CPU
@KERNELS
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "phi4 partial rotary"])
def test_programs_of_bfloat16(name: str, tmp_path: Path) -> None:
    if not packing_works(torch.bfloat16):
        pytest.skip("this machine packs no products of bfloat16")
    target = decoder_of(save_decoder(tmp_path / "model", build_decoder(name), torch.bfloat16), dtype="bfloat16")
    prompts = [prompt(70, 1), prompt(131, 2)]
    with eager(target):
        wanted = answers(target, prompts, SEARCH)
    assert answers(target, prompts, SEARCH) == wanted
    assert target._programs


@ON_CPU
@KERNELS
@pytest.mark.parametrize("invariant", [True, False])
def test_programs_of_drafts_and_trees(invariant: bool, loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes in several numbers; where no bits are promised, forwards go by masks, a draft's as its target's."""
    kinds: set[type] = set()

    def noted(key: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda view: (kinds.add(type(view)), key(view))[1]

    (target, _), (draft, _) = loaded("llama"), loaded("llama", 2)
    for kind in (MaskView, PathView, PrefixView):
        monkeypatch.setattr(kind, "key", noted(kind.key))
    monkeypatch.setattr(target, "invariant", invariant)
    method = MethodConfig(rule="coupled", num_beams=3, depth=2, drafts_per_layer=4)
    token_ids = [prompt(12), prompt(80, 1)]
    target.release()
    draft.release()
    with eager(target), eager(draft):
        wanted = answers(target, token_ids, method, draft)
    assert answers(target, token_ids, method, draft) == wanted
    assert target._programs
    assert draft._programs
    prompts = {PrefixView} if serves("prompt_attention") else set()
    assert kinds == {PathView if invariant else MaskView} | prompts


@ON_CPU
@KERNELS
def test_paths_that_outgrow_a_program(loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "LEAST_PADDED", 4)
    target, _ = loaded("llama")
    target.release()
    with eager(target):
        wanted = answers(target, [prompt(9)], SEARCH, new=40)
    rooms: set[int] = set()
    copy = PathView.copy

    def noting(view: PathView) -> PathView:
        copied = copy(view)
        rooms.add(copied.paths.slots.shape[2])
        return copied

    monkeypatch.setattr(PathView, "copy", noting)
    assert answers(target, [prompt(9)], SEARCH, new=40) == wanted
    assert len(rooms) > 1
    assert min(rooms) < 40


@ON_CPU
@KERNELS
def test_a_cache_that_has_moved_gets_other_programs(loaded: Loads) -> None:
    """Guards addresses of memory that was given back, and programs that hold it."""
    target, _ = loaded("llama")
    for length in (9, 40, 9):
        with eager(target):
            wanted = answers(target, [prompt(length)], SEARCH)
        assert answers(target, [prompt(length)], SEARCH) == wanted
        assert target._programs
        assert target._arena.nbytes
        target.release()
        assert (target._programs, target._arena.nbytes) == ({}, 0)
    ids, logits = tokens(1, 5), []
    for slots in (64, 128):
        target.reserve(1, slots)  # the memory grows, and so moves
        logits.append(target.forward(chain(ids, prompt_slots=(0,), suffix=64)))
    assert torch.equal(*logits)
    assert len(target._programs) == 1


@ON_CPU
@KERNELS
@pytest.mark.skipif(not serves("prompt_attention"), reason="torch attends to prompts")
def test_longer_prompts_do_not_pile_up(loaded: Loads) -> None:
    """Guards blocks that became too small, which only earlier programs hold: they are few, however many widths there
    are."""
    target, _ = loaded("llama")
    target.release()
    target.reserve(1, 300)
    for length in range(9, 250, 8):
        prefill(target, [0], [prompt(length)], trash=299, apart=True)
    blocks = {id(kept): kept for made in target._programs.values() for kept in made.program._kept}
    held = sum(kept.nbytes for kept in blocks.values() if isinstance(kept, Tensor) and kept.dtype == torch.uint8)
    assert 0 < held < 3 * target._arena.nbytes
    target.release()


@ON_CPU
@KERNELS
def test_only_so_many_programs_are_kept(loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ran last."""
    monkeypatch.setattr(decoder_model, "MOST_PROGRAMS", 3)
    target, _ = loaded("llama")
    target.release()
    target.reserve(1, 64)
    built: list[int] = []
    real = target._built
    monkeypatch.setattr(target, "_built", lambda hidden, *rest: built.append(hidden.shape[1]) or real(hidden, *rest))
    for count in (4, 5, 6, 4, 7, 4, 5):
        target.forward(chain(tokens(1, count), prompt_slots=(0,), suffix=64))
        assert len(target._programs) <= 3
    assert built == [4, 5, 6, 7, 5]


@ON_CPU
@pytest.mark.skipif(not serves("prompt_attention"), reason="torch attends to prompts")
@pytest.mark.parametrize("forgotten", [False, True])
def test_prompts_of_any_length_share_programs(forgotten: bool, loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of a prompt there is, is an input. A mutant that forgets it gives other bits."""
    target, _ = loaded("llama")
    prompts = [prompt(length, length) for length in (200, 90, 70)]
    target.release()
    with eager(target):
        wanted = answers(target, prompts, SEARCH, batch_size=1)
    built: list[int] = []
    real, load = target._built, decoder_model._LayerProgram.load
    monkeypatch.setattr(target, "_built", lambda hidden, *rest: built.append(hidden.shape[1]) or real(hidden, *rest))

    def forgetting(made: Any, hidden: Tensor, inputs: Any) -> None:
        prompts = [
            view.prompt.counts
            for view in made.inputs.attention.views
            if isinstance(view, PathView) and view.prompt is not None
        ]
        before = [counts.clone() for counts in prompts]
        load(made, hidden, inputs)
        for counts, old in zip(prompts, before, strict=True):
            counts.copy_(old)

    if forgotten:
        monkeypatch.setattr(decoder_model._LayerProgram, "load", forgetting)
    assert (answers(target, prompts, SEARCH, batch_size=1) == wanted) is not forgotten
    assert len(built) == len(set(built))
    target.release()


@ON_CPU
@KERNELS
@pytest.mark.skipif(not serves("prompt_attention"), reason="torch attends to prompts")
@pytest.mark.parametrize("forgotten", [None, "slots", "counts", "rows"])
def test_prompts_are_read_by_programs(forgotten: str | None, loaded: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one width in several rows share a program, which is no wider than the longest needs. A mutant that
    forgets an input writes other bits."""
    target, _ = loaded("llama")
    built: list[int] = []
    real, load = target._built, decoder_model._LayerProgram.load
    monkeypatch.setattr(target, "_built", lambda hidden, *rest: built.append(hidden.shape[1]) or real(hidden, *rest))

    def read() -> list[Tensor]:
        target.release()
        target.reserve(3, 65)
        for row, length in enumerate((12, 16, 30)):
            prefill(target, [row], [prompt(length, row)], trash=64, apart=True)
        layers = range(target.layer_count)
        return [plane[:, :64].clone() for layer in layers for plane in target._cache.planes(layer)]

    def forgetting(made: Any, hidden: Tensor, inputs: Any) -> None:
        (view,) = made.inputs.attention.views
        tensor = {"slots": made.inputs.slots, "counts": view.counts, "rows": view.rows}[forgotten]
        before = tensor.clone()
        load(made, hidden, inputs)
        tensor.copy_(before)

    with eager(target):
        wanted = read()
    if forgotten is not None:
        monkeypatch.setattr(decoder_model._LayerProgram, "load", forgetting)
    same = all(torch.equal(logits, other) for logits, other in zip(read(), wanted, strict=True))
    assert same is (forgotten is None)
    assert built == [16, 32]
    target.release()


@ON_CPU
@KERNELS
@pytest.mark.parametrize("packed", [True, False])
def test_logits_stay_when_their_program_runs_again(
    packed: bool, loaded: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards results in the memory of a program, whether or not the LM head runs in it."""
    target, _ = loaded("llama")
    target.release()
    target.reserve(1, 64)
    if not packed:
        monkeypatch.setattr(target.decoder.weights.lm_head, "compiled", False)
    ids = tokens(1, 4)
    first, second = (target.forward(chain(tokens, prompt_slots=(0,), suffix=64)) for tokens in (ids, ids.flip(1)))
    assert len(target._programs) == 1
    again = target.forward(chain(ids, prompt_slots=(0,), suffix=64))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    target.release()


@ON_CPU
@KERNELS
def test_forwards_in_and_outside_of_inference_mode(loaded: Loads) -> None:
    """Guards places that belong to the mode in which they were made."""
    target, _ = loaded("llama")
    target.release()
    target.reserve(1, 64)
    with torch.inference_mode():
        within = target.forward(chain(tokens(1, 5), prompt_slots=(0,), suffix=64))
    beyond = target.forward(chain(tokens(1, 5), prompt_slots=(0,), suffix=64))
    assert len(target._programs) == 1
    assert torch.equal(within, beyond)


@ON_CPU
@KERNELS
@pytest.mark.parametrize("forgotten", ["hidden", "slots", "angles", "paths", "window", "mask"])
def test_a_program_must_be_given_all_of_it(forgotten: str, monkeypatch: pytest.MonkeyPatch, loaded: Loads) -> None:
    """Guards the tests of bits: without any part of its inputs a program gives others."""
    name, ids = ("ministral", prompt(90)) if forgotten == "window" else ("llama", prompt(9))
    target, _ = loaded(name, **(WINDOWS if forgotten == "window" else {}))
    if forgotten == "mask":
        monkeypatch.setattr(target, "invariant", False)
    target.release()
    with eager(target):
        wanted = answers(target, [ids], SEARCH)
    load = decoder_model._LayerProgram.load

    def forgetting(made: Any, hidden: Tensor, inputs: Any) -> None:
        views = made.inputs.attention.views
        places: dict[str, list[Tensor]] = {
            "hidden": [made.hidden],
            "slots": [made.inputs.slots],
            "angles": [part for pair in made.inputs.angles for part in pair],
            "paths": [part for view in views if isinstance(view, PathView)
                      for part in (view.paths.slots, view.paths.counts, view.paths.bounds)],
            "window": [view.prompt_mask for view in views
                       if isinstance(view, PathView) and view.prompt_mask is not None],
            "mask": [view.mask.additive for view in views if isinstance(view, MaskView)],
        }  # fmt: skip
        kept = [(tensor, tensor.clone()) for tensor in places[forgotten]]
        load(made, hidden, inputs)
        for tensor, before in kept:
            tensor.copy_(before)

    monkeypatch.setattr(decoder_model._LayerProgram, "load", forgetting)
    assert answers(target, [ids], SEARCH) != wanted
    target.release()


def test_results_of_torch_in_a_program_have_no_gaps() -> None:
    """Guards kernels that go by a result's shape, where torch gave it in another order; several results."""
    program, values = Program(Arena(), loop), torch.arange(6.0).view(2, 3)
    program.begin(0)
    turned = program.compute(values.t)
    assert turned.is_contiguous()
    pair = program.compute(lambda: (values.t(), turned.expand(2, 3, 2).transpose(0, 2)))
    assert all(tensor.is_contiguous() for tensor in pair)
    program.close()
    for start in (0, 7):
        values.copy_(torch.arange(6.0).view(2, 3) + start)
        program.run()
        assert torch.equal(turned, values.t())
        assert torch.equal(pair[0], values.t())
        assert torch.equal(pair[1], values.t().expand(2, 3, 2).transpose(0, 2))


def test_layers_take_turns_in_an_arena() -> None:
    """A layer reads what the one before it left, and takes the memory of the one before that."""
    arena, places = Arena(), []
    for layer in range(4):
        arena.begin(layer)
        places.append((arena.block(100).data_ptr(), arena.block(50).data_ptr()))
    assert places[0] == places[2] != places[1] == places[3]
    assert arena.nbytes == 2 * (128 + 64)


@ON_CPU
def test_where_the_loop_cannot_run_nothing_is_a_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced(monkeypatch, "program", load=refuse):
        forest = decoder_of(folder)
    answers(forest, [prompt(9)], SEARCH)
    assert forest.invariant
    assert not forest._programs


@ON_CPU
def test_decoders_that_leave_their_kernels_promise_no_bits(folder: Path) -> None:
    forest = decoder_of(folder)
    wanted = answers(forest, [prompt(20)], SEARCH)
    assert forest.leave_kernels() == serves("norm")
    assert not forest.leave_kernels()
    assert forest.invariant != serves("norm")
    answered = answers(forest, [prompt(20)], SEARCH)
    assert [[ids for ids, _ in row] for row in answered] == [[ids for ids, _ in row] for row in wanted]


# Verdicts


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check may be made from now on."""
    monkeypatch.setattr("dsbd_cli.models.checks.selftest.self_test", lambda *_: pytest.fail("a self-test"))
    monkeypatch.setattr("dsbd_cli.models.checks.invariance.check", lambda *_: pytest.fail("a check of invariance"))
    monkeypatch.setattr(stages, "differs", lambda *_: pytest.fail("a comparison"))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that are made from now on."""
    made: list[str] = []
    real = stages.differs

    def noting(*arguments: Any) -> str | None:
        made.append("differs")
        return real(*arguments)

    monkeypatch.setattr(stages, "differs", noting)
    return made


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5", "falcon-h1"])
def test_a_second_load_makes_no_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits and the same promises; nor is transformers' model loaded."""
    folder = save_decoder(tmp_path / "model", build_decoder(name))
    first, _, report = load_model(Checkpoint.open(spec_for(folder)))
    forbid(monkeypatch)
    monkeypatch.setattr(stages, "load_network", lambda *_, **__: pytest.fail("transformers' model"))
    again, _, later = load_model(Checkpoint.open(spec_for(folder)))
    assert report == later
    assert torch.equal(first.plain(tokens(2, 30)), again.plain(tokens(2, 30)))
    assert answers(first, [prompt(80)], SEARCH) == answers(again, [prompt(80)], SEARCH)
    for field in ("invariant", "varies", "copies_prefixes"):
        assert getattr(first, field) == getattr(again, field), field


@ON_CPU
@pytest.mark.parametrize("name", ["llama", "gemma3", "bamba"])
def test_a_few_layers_of_each_kind_are_asked_for_invariance(
    name: str, loaded: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind is among them, and sums that depend on the company are found by them as by all."""
    forest, _ = loaded(name)
    few, whole = forest.shallow(1), forest.shallow(9)
    kinds = [*dict.fromkeys(forest.decoder.config.layer_kinds)]
    assert few.decoder.config.layer_kinds == kinds
    assert len(kinds) == {"llama": 1, "gemma3": 2, "bamba": 2}[name]
    assert torch.equal(whole.plain(tokens(2, 30)), forest.plain(tokens(2, 30)))
    copies = None if name == "bamba" else True  # states are not copied
    assert check(forest) == check(few) == Verdict(None, copies)
    for model in (forest, few):
        model.decoder.ops = replace(model.decoder.ops, path_attention=None)
    assert check(few).varies is None
    all_slots_at_once(monkeypatch)
    assert check(forest).varies is not None
    assert check(few).varies is not None


def test_all_layers_are_checked_where_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a first load the first ones of a kind, for `dsbd doctor` all."""
    asked: list[int] = []
    monkeypatch.setattr(stages, "LAYERS_CHECKED", 1)
    monkeypatch.setattr(
        "dsbd_cli.models.checks.invariance.check",
        lambda forest: asked.append(forest.decoder.config.layers) or check(forest),
    )
    whole = decoder_of(folder).decoder.config.layers
    load_model(Checkpoint.open(spec_for(folder)), anew=True)
    assert asked == [1, whole]
    assert whole > 1


def test_what_a_verdict_depends_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file, number of threads, dtype or role is asked anew, and so is all of it where `anew` is said."""
    made = counted(monkeypatch)
    decoder_of(folder)
    decoder_of(folder)
    assert len(made) == 1
    load_model(Checkpoint.open(spec_for(folder)), anew=True)
    assert len(made) == 2
    decoder_of(folder)
    assert len(made) == 2
    decoder_of(folder, dtype="bfloat16")
    decoder_of(folder, role="draft")
    decoder_of(folder, numerics="fast")
    assert len(made) == 5
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        decoder_of(folder)
    finally:
        torch.set_num_threads(before)
    assert len(made) == 6
    torch.set_float32_matmul_precision("high")
    try:
        decoder_of(folder)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(made) == 7
    stat = (folder / "model.safetensors").stat()
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    decoder_of(folder)
    assert len(made) == 8
    for name, other in (("_code", lambda: "other"), ("instructions", lambda: frozenset({"other"}))):
        monkeypatch.setattr(verdicts, name, other)
        decoder_of(folder)
    monkeypatch.setattr(verdicts, "version", lambda package: "99.0.0")
    decoder_of(folder)
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    decoder_of(folder)
    assert len(made) == 12
    real = verdicts._installed
    monkeypatch.setattr(verdicts, "_installed", lambda name: None if name == "numba" else real(name))
    decoder_of(folder)
    assert len(made) == 13
    with replaced(
        monkeypatch, load=refuse
    ):  # as with a numpy that numba refuses: torch's products may depend on their number of rows
        decoder_of(folder)
        decoder_of(folder)
        assert len(made) == 14
    decoder_of(folder)
    assert len(made) == 15


@pytest.mark.parametrize("named", [None, "int8", "float16"])
def test_the_dtype_of_the_checkpoint(named: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Guards a checkpoint whose config names no dtype, or one that nothing computes in."""
    changed(folder, dtype=named)
    monkeypatch.setattr(stages, "dtype_of", lambda *_: "auto")
    monkeypatch.setattr(loader, "dtype_of", lambda *_: "auto")
    if named == "int8":
        with pytest.raises(ModelError, match=r"cannot be loaded: .*int8"):
            load_model(Checkpoint.open(spec_for(folder)))
        return
    forest = decoder_of(folder)
    assert forest.weights_dtype == (torch.float32 if named is None else torch.float16)


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "mamba2"])
def test_a_later_load_imports_nothing_of_transformers(name: str, tmp_path: Path) -> None:
    """Guards the start: importing it and making a tokenizer take seconds. The first load, here, has done both; the ids
    of the later one, in a process of its own, are the same."""
    folder = save_decoder(tmp_path / "model", build_decoder(name))
    engine = load(spec_for(folder), None)
    assert engine.codec.encode("w5 w9 </s>") == [5, 9, 2]
    code = (
        "import sys; from dsbd_cli import ModelSpec, load; "
        f"engine = load(ModelSpec({str(folder)!r}, dtype='float32', device='cpu'), None); "
        "print(type(engine.target).__name__, 'transformers' in sys.modules, engine.codec.encode('w5 w9 </s>'))"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert again.stdout == "DecoderForestModel False [5, 9, 2]\n"


def test_a_verdict_with_another_digit_is_none(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards another model under the name of this one: its settings stand in the verdict."""
    made = counted(monkeypatch)
    decoder_of(folder)
    (file,) = (tmp_path / "cache" / "dsbd" / "verdicts").iterdir()
    text = file.read_text()
    position = text.index('"eps": ') + len('"eps": ')
    file.write_text(f"{text[:position]}2{text[position + 1 :]}")
    assert decoder_of(folder).decoder.config.eps == DECODERS["llama"][1].get("rms_norm_eps", 1e-6)
    assert len(made) == 2
    assert file.read_text() == text


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_stored_tokenizer_that_is_damaged_is_stored_again(damage: str, folder: Path, tmp_path: Path) -> None:
    """Guards seconds of every later load."""
    decoder_of(folder)
    (file,) = (tmp_path / "cache" / "dsbd" / "tokenizers").iterdir()
    content = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(b"x")
    assert load(spec_for(folder), None).codec.encode("w5 w9") == [5, 9]
    assert file.read_bytes() == content


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": "other/1", "decoder": null}', "\x00"])
def test_a_broken_verdict_is_none(text: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    decoder_of(folder)
    (file,) = (tmp_path / "cache" / "dsbd" / "verdicts").iterdir()
    assert file.suffix == ".json"
    whole = file.read_text()
    file.write_text(text)
    assert decoder_of(folder).invariant
    assert len(made) == 2
    assert file.read_text() == whole


def test_a_user_without_a_home_loads_models(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards every command in a container whose user has no entry and no HOME, and a folder named ~ beside the data."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert decoder_of(folder).invariant
    assert "every load checks the model anew: there is no home folder" in caplog.text
    assert not (tmp_path / "~").exists()


def test_a_shortage_of_memory_says_nothing_about_a_model() -> None:
    """Guards a verdict that stays: with any amount of memory the model would run by transformers from then on."""
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught, unsupported("Llama"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert not isinstance(caught.value, UnsupportedModelError)
    with pytest.raises(UnsupportedModelError, match="cannot hold a tree"), unsupported("Llama"):
        raise RuntimeError("shapes differ")


def test_the_cache_folder_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of settings do, which no shell reads."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/kept")
    assert cache_folder() == tmp_path / "kept" / "dsbd"


def test_nothing_is_left_of_a_file_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    verdicts.write_verdict("0", {"decoder": "x"})
    assert list((tmp_path / "cache" / "dsbd" / "verdicts").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_costs_checks_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert decoder_of(folder).invariant
    assert "every load checks the model anew" in caplog.text


@pytest.mark.parametrize("way", ["CompiledLinear", "TorchLinear"])
def test_the_size_is_told_whatever_packs_the_weights(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards torch's packed weights, which do not say where they lie."""
    with only(monkeypatch, getattr(linear, way)):
        model = decoder_of(save_decoder(tmp_path, build_decoder("llama")))
    assert 0 < model.size.read_bytes <= model.size.held_bytes
