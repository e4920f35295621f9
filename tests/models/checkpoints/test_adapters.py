"""Adapters: a model named with them computes what peft's merged model computes; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import dsbd_cli
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import DsbdError
from dsbd_cli.models.checkpoints.catalog import tokenizer_of
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.checkpoints.loader import load_network
from dsbd_cli.models.checkpoints.registry import parts_of
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.draft_heads.load import load_draft_head
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.verdicts import fingerprint
from tests.helpers.checkpoints import numbers
from tests.helpers.pairs import build_pair
from tests.helpers.tiny import build
from tests.models.decoders import build_decoder, save_decoder

# peft asks transformers for what it is about to rename
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

BUILD: dict[str, Any] = {
    "llama": build_decoder,
    "llama tied": build_decoder,
    "qwen2": build_decoder,
    "gemma3": build_decoder,
    "m2m100": build_pair,
    "whisper": build_pair,
    "qwen3.5": build,
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 4},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 32}},
    "head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "bias": {"bias": "all"},
}


def adapt(model: Any, folder: Path, seed: int = 1, **settings: Any) -> Any:
    """Save a random adapter of a model; return the model with it merged."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **settings})
    adapted = peft.get_peft_model(deepcopy(model), config)
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            move = 0.3 if "lora" in name else 0.1
            weight.data.add_(move * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    adapted.save_pretrained(str(folder))
    return adapted.merge_and_unload()


def saved(folder: Path, model: Any) -> Path:
    """Write a checkpoint folder with a tokenizer."""
    model.save_pretrained(folder)
    numbers().save_pretrained(folder)
    return folder


def spec_of(source: object, **more: Any) -> ModelSpec:
    return ModelSpec(str(source), device="cpu", **{"dtype": "float32", **more})


SEARCH = dsbd_cli.MethodConfig(rule="search", num_beams=3)
SAMPLING = dsbd_cli.SamplingConfig(max_new_tokens=9, n_best=3)


def engine_of(source: object, draft: str | None = None, **more: Any) -> dsbd_cli.Engine:
    return dsbd_cli.load(spec_of(source, **more), draft, method=SEARCH)


def answers_of(engine: dsbd_cli.Engine) -> list[Any]:
    """Token ids and log-probabilities of all beams, to the last bit."""
    rows = [dsbd_cli.Request(prompt=text, sampling=SAMPLING) for text in ("w5 w9 w40", "w7 w7 w8 w50 w3")]
    return [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in engine.run(rows)]


def answers(source: object, draft: str | None = None, **more: Any) -> list[Any]:
    """The same of the engine of a source."""
    return answers_of(engine_of(source, draft, **more))


@pytest.mark.parametrize("name", BUILD)
def test_the_weights_are_those_of_the_merged_model(name: str, tmp_path: Path) -> None:
    """Of decoders, encoder-decoder and recurrent models, to the last bit."""
    model = BUILD[name](name)
    base = saved(tmp_path / "base", model)
    merged = adapt(model, tmp_path / "adapter").state_dict()
    weights = load_network(Checkpoint.open(spec_of(f"{base}+{tmp_path / 'adapter'}"))).state_dict()
    assert weights.keys() == merged.keys()
    assert all(torch.equal(weights[key], merged[key]) for key in merged)
    plain = model.state_dict()
    assert sum(not torch.equal(plain[key], merged[key]) for key in merged) > 3


@pytest.fixture(scope="module")
def unadapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[Any, Path, list[Any]]]:
    """Models by family and whether they have biases, each made, saved and asked once: model, folder and answers."""

    @cache
    def made(name: str, bias: bool) -> tuple[Any, Path, list[Any]]:
        model = build_decoder(name, mlp_bias=bias)
        base = saved(tmp_path_factory.mktemp("base"), model)
        return model, base, answers(base)

    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_kinds_of_adapters(
    name: str, kind: str, tmp_path: Path, unadapted: Callable[[str, bool], tuple[Any, Path, list[Any]]]
) -> None:
    """All beams of our own decoder are those of the merged checkpoint; with an LM head for a tied one, too."""
    model, base, plain = unadapted(name, kind == "bias")
    merged = adapt(model, tmp_path / "adapter", **KINDS[kind])
    if kind == "head":
        merged.config.tie_word_embeddings = False
    engine = engine_of(f"{base}+{tmp_path / 'adapter'}")
    adapted = answers_of(engine)
    assert adapted == answers(saved(tmp_path / "merged", merged))
    assert adapted != plain
    forest: Any = engine.target
    assert isinstance(forest, DecoderForestModel)
    assert forest.invariant


@pytest.mark.parametrize("name", ["m2m100", "qwen3.5"])
def test_beams_of_adapted_models(name: str, tmp_path: Path) -> None:
    model = BUILD[name](name)
    base = saved(tmp_path / "base", model)
    merged = saved(tmp_path / "merged", adapt(model, tmp_path / "adapter"))
    adapted = answers(f"{base}+{tmp_path / 'adapter'}")
    assert adapted == answers(merged) != answers(base)


def test_adapters_add_up_one_after_the_other(tmp_path: Path) -> None:
    model = build_decoder("llama")
    base = save_decoder(tmp_path / "base", model)
    once = adapt(model, tmp_path / "one")
    adapt(model, tmp_path / "two", seed=2)
    twice = peft.PeftModel.from_pretrained(deepcopy(once), str(tmp_path / "two")).merge_and_unload()
    adapted = answers(f"{base}+{tmp_path / 'one'}+{tmp_path / 'two'}")
    assert adapted == answers(saved(tmp_path / "merged", twice)) != answers(saved(tmp_path / "once", once))
    assert adapted == answers(base, adapters=(str(tmp_path / "one"), str(tmp_path / "two")))
    assert adapted == answers(f"{base}+{tmp_path / 'one'}", adapters=(str(tmp_path / "two"),))


@pytest.mark.skipif(torch.cuda.is_available(), reason="int8 runs on the CPU")
def test_int8_is_that_of_the_merged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsbd_cli.models.decoder import pack

    monkeypatch.setattr(pack.quantize_decoder, "__defaults__", (1,))
    model = build_decoder("llama")
    base = save_decoder(tmp_path / "base", model, torch.bfloat16)
    adapt(model.to(torch.bfloat16), tmp_path / "adapter")
    folder = f"{base}+{tmp_path / 'adapter'}"
    merged = saved(tmp_path / "merged", load_network(Checkpoint.open(spec_of(folder, dtype="bfloat16"))))
    asked = {"dtype": "bfloat16", "quantize": "int8"}
    assert answers(folder, **asked) == answers(merged, **asked) != answers(base, **asked)


def test_a_changed_adapter_is_another_model(tmp_path: Path) -> None:
    """What an earlier load has found of the base, or of the adapter before, is not taken for it."""
    base, other = save_decoder(tmp_path / "base", build_decoder("llama")), tmp_path / "adapter"
    adapt(build_decoder("llama"), other)
    both = spec_of(f"{base}+{other}")

    def digest() -> str:
        return fingerprint(both, Checkpoint.open(both).files)

    first = digest()
    assert digest() == first != fingerprint(both, base.iterdir())
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({**tensors, "more": torch.ones(1)}, other / "adapter_model.safetensors")
    assert digest() != first


def test_a_draft_may_have_one(tmp_path: Path) -> None:
    model = build_decoder("llama")
    base = save_decoder(tmp_path / "base", model)
    adapt(model, tmp_path / "adapter")
    target = f"{base}+{tmp_path / 'adapter'}"
    assert answers(target) == answers(target, str(base)) == answers(target, target)
    assert answers(base, str(base), adapters=(str(tmp_path / "adapter"),)) == answers(target), (
        "a draft does not inherit"
    )


OWN = "{% for m in messages %}w9 {{ m.content }}{% endfor %}"
BASE = "{% for m in messages %}w8 {{ m.content }}{% endfor %}"


@pytest.fixture
def based(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with a chat template, and an adapter of it without a tokenizer."""
    model = build_decoder("llama")
    model.save_pretrained(tmp_path / "base")
    tokenizer = numbers()
    tokenizer.chat_template = BASE
    tokenizer.save_pretrained(tmp_path / "base")
    adapt(model, tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


def bring(adapter: Path, template: str | None = OWN, **changes: Any) -> Any:
    """Put a tokenizer into an adapter's folder, as trainers do."""
    tokenizer = numbers(**changes)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(adapter)
    return tokenizer


def codec_of(base: Path, adapter: Path, **more: Any) -> tuple[HFCodec, tuple[str, ...]]:
    _, codec, report = load_model(Checkpoint.open(spec_of(f"{base}+{adapter}", **more)))
    return codec, report.notes


def shown(codec: HFCodec) -> str:
    return codec.render_chat([{"role": "user", "content": "w5"}])


def test_the_tokenizer_and_the_template_of_an_adapter_are_used_with_a_line(based: tuple[Path, Path]) -> None:
    """Or those of the base, where that is asked for. A second load does the same."""
    base, adapter = based
    both = f"target adapter {str(adapter)!r} brings a %s used: --set tokenizer=base takes the base's"
    assert (shown(codec_of(base, adapter)[0]), codec_of(base, adapter)[1]) == ("w8 w5", ())
    (adapter / "chat_template.jinja").write_text(OWN, encoding="utf-8")
    codec, notes = codec_of(base, adapter)
    assert (shown(codec), notes) == ("w9 w5", (both % "chat template, which is",))
    (adapter / "chat_template.jinja").unlink()
    bring(adapter)
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())  # as axolotl leaves it there
    for _ in range(2):
        codec, notes = codec_of(base, adapter)
        assert (shown(codec), notes) == ("w9 w5", (both % "tokenizer and a chat template, which are",))
    codec, notes = codec_of(base, adapter, tokenizer="base")
    assert (shown(codec), notes) == ("w8 w5", ())
    assert shown(tokenizer_of(spec_of(f"{base}+{adapter}"))) == "w9 w5", "also where no weights are loaded"


def test_an_end_token_of_an_adapter_ends_a_text_too(based: tuple[Path, Path]) -> None:
    base, adapter = based
    assert codec_of(base, adapter)[0].eos_ids == (2,)
    bring(adapter)
    settings = json.loads((adapter / "tokenizer_config.json").read_text(encoding="utf-8"))
    (adapter / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "w7"}), encoding="utf-8")
    assert codec_of(base, adapter)[0].eos_ids == (7, 2)
    assert codec_of(base, adapter, tokenizer="base")[0].eos_ids == (2,)


def test_an_adapters_tokenizer_without_a_template_has_that_of_the_base(based: tuple[Path, Path]) -> None:
    bring(based[1], template=None)
    assert shown(codec_of(*based)[0]) == "w8 w5"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"changed": {5: "other"}}, "'w5' is token 5 of the base, and missing there"),
        ({"changed": {5: "x5", 6: "w5"}}, "'w5' is token 5 of the base, and token 6 there"),
        ({"width": 130}, "it has the id 129, but the model has 97 ids"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(based: tuple[Path, Path], changes: Any, said: str) -> None:
    bring(based[1], **changes)
    with pytest.raises(DsbdError, match=r"brings a tokenizer that does not fit: .*: --set tokenizer=base") as caught:
        codec_of(*based)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert shown(codec_of(*based, tokenizer="base")[0]) == "w8 w5"


@pytest.mark.parametrize("text", ["{", '{"chat_template": 5}', '{"chat_template": [{"name": "a"}]}'])
def test_a_template_that_cannot_be_read_is_an_error(based: tuple[Path, Path], text: str) -> None:
    (based[1] / "tokenizer_config.json").write_text(text.replace("{", '{"chat_template" ', 1) if text == "{" else text)
    with pytest.raises(DsbdError, match=r"target adapter .*: its chat template cannot be read"):
        codec_of(*based)


def test_the_bases_tokenizer_is_asked_for_in_vain(based: tuple[Path, Path]) -> None:
    base, adapter = based
    for source in (f"{base}+{adapter}", str(base)):
        with pytest.raises(DsbdError, match=r"^tokenizer is base, but no adapter of .* brings a tokenizer or a chat"):
            Checkpoint.open(spec_of(source, tokenizer="base"))


def test_digests_tell_whose_tokenizer_is_used(based: tuple[Path, Path]) -> None:
    base, adapter = based
    spec = spec_of(f"{base}+{adapter}")
    before = Checkpoint.open(spec).digests
    bring(adapter)
    first = Checkpoint.open(spec).digests
    bring(adapter, template=BASE)
    digests = [before, first, Checkpoint.open(spec).digests]
    assert len({digest["tokenizer"] for digest in digests}) == 3
    assert len({digest["weights"] for digest in digests}) == len({digest["config"] for digest in digests}) == 1
    assert Checkpoint.open(replace(spec, tokenizer="base")).digests == before


def test_names_with_a_plus_that_are_there_are_names(tmp_path: Path) -> None:
    (tmp_path / "llama+lora").mkdir()
    assert parts_of(str(tmp_path / "llama+lora")) == (str(tmp_path / "llama+lora"), ())
    assert parts_of(f"{tmp_path}/llama+lora+x") == (f"{tmp_path}/llama", ("lora", "x"))
    assert parts_of("org/base@v1+org/adapter@v2") == ("org/base@v1", ("org/adapter@v2",))


def _prompt_tuning(folder: Path) -> None:
    model = build_decoder("llama")
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    peft.get_peft_model(deepcopy(model), config).save_pretrained(str(folder))


def _another_model(folder: Path) -> None:
    adapt(build_decoder("llama", num_hidden_layers=5), folder)


def _another_size(folder: Path) -> None:
    adapt(build_decoder("llama", intermediate_size=48), folder)


def _half(folder: Path) -> None:
    adapt(build_decoder("llama"), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, folder / "adapter_model.safetensors")


def _nan(folder: Path) -> None:
    adapt(build_decoder("llama"), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[min(tensors)][:] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")


def _cut_off(folder: Path) -> None:
    adapt(build_decoder("llama"), folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _no_json(folder: Path) -> None:
    adapt(build_decoder("llama"), folder)
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")


def _no_kind(folder: Path) -> None:
    adapt(build_decoder("llama"), folder)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "MAGIC"}), encoding="utf-8")


def _pickle(folder: Path) -> None:
    adapt(build_decoder("llama"), folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _a_checkpoint(folder: Path) -> None:
    save_decoder(folder, build_decoder("llama"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_prompt_tuning, "PROMPT_TUNING, which is no change of weights and cannot be merged"),
        (_another_model, r"does not fit: the model has no .*layers\.3"),
        (_another_size, "cannot be merged: .*size mismatch"),
        (_half, "does not fit: adapter_model.safetensors has no .*lora_A"),
        (_nan, "cannot be merged: .*NaN"),
        (_cut_off, "cannot be merged"),
        (_no_json, "cannot be merged"),
        (_no_kind, "cannot be merged"),
        (_pickle, "holds no adapter_model.safetensors: adapter_model.bin is a pickle"),
        (_a_checkpoint, "holds no adapter_config.json"),
    ],
)
def test_refusals(make: Any, said: str, tmp_path: Path) -> None:
    """One line that names the adapter."""
    base = save_decoder(tmp_path / "base", build_decoder("llama"))
    make(tmp_path / "adapter")
    with pytest.raises(DsbdError, match=said) as caught:
        load_model(Checkpoint.open(spec_of(f"{base}+{tmp_path / 'adapter'}")))
    assert "target adapter" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_beside_the_weights_is_merged_where_it_is_named(tmp_path: Path) -> None:
    """Guards weights that an adapter has been merged into already, which transformers would merge it into again if peft
    is installed."""
    model = build_decoder("llama")
    own, both = (save_decoder(tmp_path / name, model) for name in ("own", "both"))
    merged = saved(tmp_path / "merged", adapt(model, both))
    note = f"the target's folder holds an adapter, too, which is not merged: {both}+{both} merges it"
    tokens = torch.arange(5, 25).reshape(1, 20)
    for _ in range(2):
        for source, wanted, notes in ((both, own, (note,)), (f"{both}+{both}", merged, ())):
            forest, _, report = load_model(Checkpoint.open(spec_of(source)))
            assert isinstance(forest, DecoderForestModel)
            assert report.notes == notes
            assert torch.equal(forest.plain(tokens), load_model(Checkpoint.open(spec_of(wanted))).model.plain(tokens))


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    base = save_decoder(tmp_path / "base", build_decoder("llama"))
    for source, said in (
        (f"{base}+./none", "target adapter './none': there is no such folder"),
        (f"{base}+", "has an empty name beside a"),
        (f"+{base}", "has an empty name beside a"),
        (f"{base}+org/adapter", "target adapter 'org/adapter' is not in the hub cache"),
    ):
        with pytest.raises(DsbdError, match=said):
            Checkpoint.open(spec_of(source))


def test_where_adapters_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_decoder("llama")
    base = save_decoder(tmp_path / "base", model)
    adapt(model, tmp_path / "adapter")
    both = f"{base}+{tmp_path / 'adapter'}"
    with pytest.raises(DsbdError, match="device_map is auto, but adapters are merged on one device"):
        Checkpoint.open(ModelSpec(both, device_map="auto"))
    with pytest.raises(DsbdError, match="tensor_parallel is 2, but adapters are merged on one device"):
        Checkpoint.open(ModelSpec(both, tensor_parallel=2))
    forest = load_model(Checkpoint.open(spec_of(base))).model
    with pytest.raises(DsbdError, match="has an adapter, which a head does not take"):
        load_draft_head(*open_pair(spec_of(base), spec_of(both, role="draft")), forest)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DsbdError, match=r"pip install 'dsbd\[adapters\]'"):
        Checkpoint.open(spec_of(both))


def test_an_adapter_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a revision, too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = build_decoder("llama")
    base = save_decoder(tmp_path / "base", model)
    adapt(model, tmp_path / "adapter")
    home = tmp_path / "hub" / "models--org--adapter"
    shutil.copytree(tmp_path / "adapter", home / "snapshots" / ("1" * 40))
    (home / "refs").mkdir()
    for name in ("main", "v2"):
        (home / "refs" / name).write_text("1" * 40, encoding="utf-8")
    wanted = answers(f"{base}+{tmp_path / 'adapter'}")
    assert answers(f"{base}+org/adapter") == answers(f"{base}+org/adapter@v2") == wanted
    with pytest.raises(DsbdError, match="'org/adapter@v3' is not in the hub cache"):
        Checkpoint.open(spec_of(f"{base}+org/adapter@v3"))
