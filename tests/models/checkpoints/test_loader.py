"""Loading: offline first, quick failures, nothing on stderr, weights that are really there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, ModelNotFoundError, UnsupportedModelError, UsageError
from dsbd_cli.models.checkpoints import hub, loader
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.generation import eos_ids
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.ops.select import packing_works
from tests.helpers.checkpoints import save

DEAD = "http://127.0.0.1:9"  # nothing listens there


def cache_as(hub_cache: Path, repo: str, checkpoint: Path) -> Path:
    """Lay a checkpoint out as the hub's client does; returns the snapshot folder."""
    home = hub_cache / ("models--" + repo.replace("/", "--"))
    snapshot = home / "snapshots" / ("0" * 40)
    shutil.copytree(checkpoint, snapshot)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    return snapshot


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", DEAD)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def test_a_revision_is_that_of_the_cache(hub_cache: Path, checkpoint: Path) -> None:
    """A tag leads to its own snapshot; one that is not cached is named, and main is not taken for it."""
    cache_as(hub_cache, "org/model", checkpoint)
    home = hub_cache / "models--org--model"
    shutil.copytree(checkpoint, home / "snapshots" / ("1" * 40))
    (home / "refs" / "v1").write_text("1" * 40, encoding="utf-8")
    for source, commit in (("org/model", "0"), ("org/model@v1", "1"), ("org/model@" + "1" * 40, "1")):
        assert Checkpoint.open(ModelSpec(source)).path.name == commit * 40
    with pytest.raises(ModelNotFoundError, match="'org/model@v2' is not in the hub cache"):
        Checkpoint.open(ModelSpec("org/model@v2"))
    with pytest.raises(ModelNotFoundError, match="there is no such folder"):
        Checkpoint.open(ModelSpec(f"{checkpoint}@v1"))


def test_folder_loads_quietly(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards half precision on the CPU, training mode, gradients, and progress bars on stderr."""
    model, tokenizer = load(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu")))
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert len(tokenizer) == 97
    assert capfd.readouterr() == ("", "")


def test_dtype_as_asked(checkpoint: Path) -> None:
    """Guards --dtype."""
    model, _ = load(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu", dtype="bfloat16")))
    assert model.dtype == torch.bfloat16


def test_dtype_auto_on_the_cpu_rounds_nothing(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large bfloat16 weights stay so where the processor has it; wider ones are never made narrower."""
    monkeypatch.setattr(loader, "SMALL_BYTES", 1000)
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        model, tokenizer = load(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu")))
        folder = tmp_path / str(stored)
        model.to(stored).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        kept = stored == torch.bfloat16 and packing_works(torch.bfloat16)
        loaded, _ = load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))
        assert loaded.dtype == (torch.bfloat16 if kept else torch.float32)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        assert load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))[0].dtype == loaded.dtype, (
            "a pickle's bytes count"
        )


def test_nothing_is_computed_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a checkpoint in float64 on a GPU, where others keep their dtype."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for stored, expected in ((torch.float64, torch.float32), ("float64", torch.float32), (torch.float16, "auto")):
        config = LlamaConfig(dtype=stored)
        assert loader.dtype_of(Checkpoint(ModelSpec(str(tmp_path)), tmp_path), config) == expected


@pytest.mark.parametrize("device_map", ["cpu", '{"": "cpu"}', "auto"])
def test_device_map(checkpoint: Path, device_map: str) -> None:
    """Guards accelerate's maps, as a word or as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = load(Checkpoint.open(ModelSpec(str(checkpoint), device_map=device_map)))
    if not torch.cuda.is_available():
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu0"),
        ("device", "cuda:99"),
        ("device", "mps"),
        ("device", "meta"),
        ("device_map", '{"a": '),
        ("device_map", '{"":' * 1000),
        ("device_map", '{"": "gpu0"}'),
        ("device_map", '{"": 99}'),
        ("device_map", '{"": -1}'),
        ("device_map", '{"": ["cpu"]}'),
        ("device_map", '{"": null}'),
        ("device_map", "{}"),
        ("device_map", '{"": "cpu", "a": "cpu"}'),
    ],
)
def test_bad_device(checkpoint: Path, field: str, value: str) -> None:
    """Guards tracebacks from torch for a device that is not there."""
    with pytest.raises(UsageError, match="target device") as caught:
        load(Checkpoint.open(ModelSpec(str(checkpoint), **{field: value})))
    assert len(str(caught.value)) < 200


def test_weights_without_a_tokenizer_in_the_cache(checkpoint: Path, hub_cache: Path) -> None:
    """As a script that loads the model alone leaves them. Guards the library's words, which name no way out."""
    folder = cache_as(hub_cache, "me/bare", checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="the hub cache has its weights alone, `hf download me/bare` fetches the rest"):
        load(Checkpoint.open(ModelSpec("me/bare", device="cpu")))


def test_cached_hub_id_needs_no_network(checkpoint: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards work without a network, HF_HUB_OFFLINE unset: what is in the cache is loaded at once."""
    for name in ("dsbd_cli.models.checkpoints.hub.reachable", "huggingface_hub.snapshot_download"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("the network is not needed"))
    cache_as(hub_cache, "me/tiny", checkpoint)
    model, _ = load(Checkpoint.open(ModelSpec("me/tiny", device="cpu")))
    assert model.config.model_type == "llama"


def test_cached_hub_id_by_environment(checkpoint: Path, tmp_path: Path) -> None:
    """Guards HF_HOME: a fresh process finds the cache there and prints nothing of its own."""
    cache_as(tmp_path / "hub", "me/tiny", checkpoint)
    code = (
        "from dsbd_cli.config.model import ModelSpec; from dsbd_cli.models.checkpoints.checkpoint import Checkpoint;"
        "from dsbd_cli.models.checkpoints.loader import load;"
        "print(load(Checkpoint.open(ModelSpec('me/tiny', device='cpu')))[0].config.model_type)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {**kept, "HF_HOME": str(tmp_path), "HF_ENDPOINT": DEAD}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (out.returncode, out.stdout, out.stderr) == (0, "llama\n", "")


def test_incomplete_cache_is_not_taken(checkpoint: Path, hub_cache: Path) -> None:
    """Guards an interrupted download: missing weights are fetched, or said to be missing, never drawn at random."""
    (cache_as(hub_cache, "me/part", checkpoint) / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="not in the hub cache"):
        load(Checkpoint.open(ModelSpec("me/part", device="cpu")))


def test_an_adapter_in_the_cache_has_its_weights(hub_cache: Path, tmp_path: Path) -> None:
    """Guards a download that ended behind the config: it was never gone on with."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    cache_as(hub_cache, "me/lora", tmp_path / "adapter")
    with pytest.raises(ModelNotFoundError, match="not in the hub cache"):
        Checkpoint.open(ModelSpec("me/base+me/lora"))


def test_a_network_that_drops_is_told_in_one_line(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library lets errors of its network's library pass as they are."""

    class ReadError(Exception):
        pass

    def drop(*_: object, **__: object) -> None:
        raise ReadError("peer closed\nconnection")

    monkeypatch.setattr(hub, "reachable", lambda *_: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", drop)
    said = r"^target model 'me/none' could not be downloaded: peer closed connection$"
    with pytest.raises(ModelNotFoundError, match=said):
        load(Checkpoint.open(ModelSpec("me/none")))


def test_weights_are_here_in_one_format_or_the_other(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").touch()
    assert not hub.has_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert hub.has_weights(tmp_path), "shards are missing, but the other format is whole"


@pytest.mark.parametrize("offline", [True, False])
def test_uncached_offline_fails_fast(hub_cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    """Guards 20 seconds of retries, and a message that does not say which of the two models is meant."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it retries for long"))
    with pytest.raises(ModelNotFoundError, match="draft model 'me/none'") as caught:
        load(Checkpoint.open(ModelSpec("me/none", role="draft")))
    assert "\n" not in str(caught.value)
    assert ("HF_HUB_OFFLINE" in str(caught.value)) == offline


def test_silent_network_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a firewall that drops packets, and a resolver that hangs."""
    monkeypatch.setattr(hub, "getproxies", dict)

    tested = threading.Event()

    def hang(*_: object, **__: object) -> None:
        tested.wait()
        raise TimeoutError  # what outlives the test must end without noise

    monkeypatch.setattr(socket, "create_connection", hang)
    assert not hub.reachable("https://huggingface.co", timeout_s=0.2)
    tested.set()


def test_proxy_is_what_must_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines that reach the hub through a proxy only."""
    asked = []

    class Opened:
        def close(self) -> None:
            pass

    def connect(address: tuple[str, int], timeout: float) -> Opened:
        asked.append(address)
        return Opened()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(hub, "proxy_bypass", lambda host: False)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy.here:3128"})
    assert hub.reachable("https://huggingface.co")
    monkeypatch.setattr(hub, "getproxies", dict)
    assert hub.reachable("https://huggingface.co")
    assert asked == [("proxy.here", 3128), ("huggingface.co", 443)]
    assert not hub.reachable("https://huggingface.co:port"), "guards a traceback for a port that is none"
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy.here:PORT"})
    assert not hub.reachable("https://huggingface.co")


class Runs:
    """What is called when a pickle of it is read without care."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("ran"),)


def test_pickled_weights_are_read_and_run_no_code(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards code execution from a pickle."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pickled"
    shutil.copytree(checkpoint, folder)
    model, _ = load(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu")))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded, _ = load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight)
    torch.save({"lm_head.weight": Runs()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))
    assert not Path("ran").exists()


def test_unfit_folders(checkpoint: Path, tmp_path: Path) -> None:
    """Guards tracebacks from the library for folders that are no checkpoints, in one line each."""
    from safetensors.torch import load_file, save_file

    def copy(name: str) -> Path:
        return Path(shutil.copytree(checkpoint, tmp_path / name))

    (tmp_path / "empty").mkdir()
    (copy("bare") / "model.safetensors").unlink()
    weights = load_file(copy("holes") / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "holes" / "model.safetensors", metadata={"format": "pt"})
    (copy("cut") / "model.safetensors").write_bytes(b"1234")
    (copy("odd") / "config.json").write_text('{"model_type": "nobody-knows"}', encoding="utf-8")
    (copy("mute") / "tokenizer.json").unlink()
    (tmp_path / "mute" / "tokenizer_config.json").unlink()
    said = {
        "empty": "config.json",
        "bare": "no weights",
        "holes": "1 weights are missing",
        "cut": "model.safetensors is cut short",
        "odd": "config cannot be read",
        "mute": "tokenizer cannot be loaded",
    }
    for name, words in said.items():
        with pytest.raises(ModelError, match=f"draft model .*{words}") as caught:
            load(Checkpoint.open(ModelSpec(str(tmp_path / name), role="draft", device="cpu")))
        assert "\n" not in str(caught.value)


def test_names_of_architectures(checkpoint: Path, tmp_path: Path) -> None:
    """Guards a traceback for what is no list; one name alone is taken as such."""
    spec = ModelSpec(str(shutil.copytree(checkpoint, tmp_path / "model")), device="cpu")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": "LlamaForCausalLM"}))
    assert Checkpoint.open(spec).config.architectures == ["LlamaForCausalLM"]
    file.write_text(json.dumps({**config, "architectures": 3}))
    with pytest.raises(ModelError, match="architectures is 3, but must be a list of names"):
        _ = Checkpoint.open(spec).config


def test_a_missing_key_is_told_as_such(checkpoint: Path, tmp_path: Path) -> None:
    """Guards "cannot be loaded: 'foo'"."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "foo"}))
    with pytest.raises(ModelError, match="cannot be loaded: KeyError: 'foo'"):
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))


def test_a_tokenizer_with_code_of_its_own_names_the_option(checkpoint: Path, tmp_path: Path) -> None:
    """Guards the library's words, which are cut before they come to the point."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "tokenizer_class": "X"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_x.py").write_text("raise SystemExit")
    with pytest.raises(ModelError, match=r"it brings its own code: --trust-remote-code target runs it"):
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))


def test_an_id_beyond_all_vocabularies_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Guards gigabytes of tables for a few bytes of a tokenizer.json, at which the process ended."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"]["vocab"]["far"] = 3 * 10**9
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="its tokenizer has the id 3000000000, but no model has more than"):
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))


def test_no_language_model(checkpoint: Path, tmp_path: Path) -> None:
    """Guards encoders and the like."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "clip"))
    (folder / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="vit"):
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))


def test_soft_capping_runs_eager(tmp_path: Path) -> None:
    """Guards Gemma 2, whose capped scores sdpa would leave out."""
    model, _ = load(Checkpoint.open(ModelSpec(str(save(tmp_path / "gemma2", "gemma2 window")), device="cpu")))
    assert model.config._attn_implementation == "eager"


def test_end_tokens(checkpoint: Path) -> None:
    """Guards chat models, which end in one of several tokens that only the generation settings name."""
    model, tokenizer = load(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu")))
    model.generation_config.eos_token_id = [5, 2, 5]
    assert eos_ids(model, tokenizer) == (2, 5), "the tokenizer's own stands first"
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 7
    assert eos_ids(model, tokenizer) == (7,)
    model.config.eos_token_id = None
    assert eos_ids(model, tokenizer) == (tokenizer.eos_token_id,) == (2,)


def test_end_tokens_are_ids(checkpoint: Path) -> None:
    """Guards -1 against being the last token of the vocabulary, and a traceback for what is no id."""
    model, tokenizer = load(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu")))
    model.generation_config.eos_token_id = [2, -1]
    assert eos_ids(model, tokenizer) == (2,)
    for wrong in ("x", ["2"], [None], {}, 2.5):
        model.generation_config.eos_token_id = wrong
        with pytest.raises(ModelError, match=r"eos_token_id of the checkpoint is .*, but must be a token id or a list"):
            eos_ids(model, tokenizer)
