"""Drafts with a smaller LM head: written, loaded, refused, and without effect on the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.logits import DraftLogits, lm_head_ids
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError, OutputError, UnsupportedModelError, UsageError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.checkpoints.lm_head import LM_HEAD_FILE
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import load_pair
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.requests import Request
from dsbd_cli.train.trim import choose_ids, count_texts, trim
from tests.helpers.checkpoints import numbers, save
from tests.helpers.tiny import FIT, V

COUNTS = Counter({5: 9, 7: 4, 11: 4, 90: 1})


def spec(folder: Path, role: Any = "draft") -> ModelSpec:
    return ModelSpec(str(folder), role, dtype="float32", device="cpu")


def one_forward(model: CausalForestModel, tokens: list[int]) -> torch.Tensor:
    count = len(tokens)
    model.reserve(1, count + 1)
    index = torch.arange(count)
    mask = (index[None, :] <= index[:, None])[None]
    logits = model.forward(ForestInput(torch.tensor([tokens]), index[None], index[None], mask, index[None]))
    model.release()
    assert logits is not None
    return DraftLogits.of(logits[0], lm_head_ids(model, model.vocab_size), model.vocab_size).wide()


FAMILIES = ["llama", "gpt2", "opt", "phi", "gptj", "gpt-neox", "gemma2 window", "cohere", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_kept_logits_are_the_full_heads(family: str, tied: bool, tmp_path: Path) -> None:
    """Guards rows that stand for other ids, a head still tied to the embedding table, a bias left behind, input ids
    that went through the map: kept columns are the full draft's, all others -inf."""
    full = save(tmp_path / "full", family, tie_word_embeddings=tied)
    report = trim(spec(full), tmp_path / "small", COUNTS, size=12, end_tokens=(40,))
    before = load_model(Checkpoint.open(spec(full))).model
    after, codec, _ = load_model(Checkpoint.open(spec(tmp_path / "small")))
    tokens = [1, 5, 96, 33, 90]
    expected, logits = one_forward(before, tokens), one_forward(after, tokens)
    kept = torch.isfinite(logits).all(0).nonzero().flatten().tolist()
    assert set(kept) >= {0, 1, 2, 5, 7, 11, 40, 90}  # special ids, end tokens, the counted ones
    assert (len(kept), report.kept, report.vocab_size) == (12, 12, V)
    assert torch.equal(logits[:, kept], expected[:, kept])
    assert after.vocab_size == V
    assert codec.eos_ids == (2,)
    with safe_open(tmp_path / "small" / LM_HEAD_FILE, "pt") as file:
        assert file.get_tensor("ids").tolist() == kept
        assert file.get_tensor("weight").dtype == torch.bfloat16  # the checkpoint's own
    assert all(family in FIT for family in FAMILIES)


def test_the_written_head_is_small(tmp_path: Path) -> None:
    """Guards a folder that still holds the full head."""
    full = save(tmp_path / "full", tie_word_embeddings=False)
    report = trim(spec(full), tmp_path / "small", COUNTS, size=10)
    before = (full / "model.safetensors").stat().st_size
    after = sum(path.stat().st_size for path in (tmp_path / "small").glob("*.safetensors"))
    saved = report.head_bytes_before - report.head_bytes_after
    assert saved == (V - 10) * 32 * 2
    assert before - after > 0.8 * saved
    assert {path.name for path in full.iterdir()} <= {path.name for path in (tmp_path / "small").iterdir()}


def outputs(pair: Any, rule: str, **method: Any) -> list[list[tuple[int, ...]]]:
    config = MethodConfig.of(
        {"rule": rule, "num_beams": 3, "drafts_per_layer": 6, "depth": 3 if pair.draft else 0, **method}
    )
    engine = Engine(pair.target, pair.draft, pair.codec, config, batch_size=4)
    requests = (
        Request(
            id=str(i), seed=i, prompt_ids=(1, 5, 7 + i), sampling=SamplingConfig(max_new_tokens=8, top_k=5, n_best=3)
        )
        for i in range(6)
    )
    results = list(engine.run(requests))
    if pair.draft:
        assert sum(result.stats.accepted for result in results) > 0
    return [[beam.token_ids for beam in result.hypotheses] for result in results]


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_the_text_is_the_full_drafts(rule: str, tmp_path: Path) -> None:
    """Guards exactness: with the full draft, the trimmed one and none the same texts. The draft is the target itself,
    so a trimmed head loses nodes but not all."""
    folder = save(tmp_path / "full")
    trim(spec(folder), tmp_path / "small", Counter(dict.fromkeys(range(60), 1)), size=60)
    target = spec(folder, "target")
    plain = outputs(load_pair(Checkpoint.open(target), None), rule)
    assert outputs(load_pair(*open_pair(target, spec(folder))), rule) == plain
    assert outputs(load_pair(*open_pair(target, spec(tmp_path / "small"))), rule) == plain


def test_rejection_keeps_the_targets_distribution(tmp_path: Path) -> None:
    """Guards Q: were the full draft's distribution recorded for the trimmed one's nodes, the first token's distribution
    would be off.

    4000 requests, 3 kept ids of 6 probable ones; chi-squared with 5 degrees of freedom, false alarms below 1e-5."""
    folder = save(tmp_path / "full")
    pair = load_pair(Checkpoint.open(spec(folder, "target")), None)
    first = torch.log_softmax(one_forward(pair.target, [1, 5])[-1], -1)
    best = first.topk(6)
    wanted = best.values.softmax(0)
    trim(spec(folder), tmp_path / "small", Counter({int(i): 1 for i in best.indices[[0, 2, 5]]}), size=6)
    drafted = load_pair(*open_pair(spec(folder, "target"), spec(tmp_path / "small")))
    config = MethodConfig(rule="rejection", num_beams=1, drafts_per_layer=3, depth=1, width="fixed")
    engine = Engine(drafted.target, drafted.draft, drafted.codec, config, batch_size=500)
    sampling = SamplingConfig(max_new_tokens=1, top_k=6)
    results = list(engine.run(Request(id=str(i), seed=i, prompt_ids=(1, 5), sampling=sampling) for i in range(4000)))
    counts = Counter(result.hypotheses[0].token_ids[0] for result in results)
    expected = {int(token): 4000 * float(p) for token, p in zip(best.indices, wanted, strict=True)}
    assert counts.keys() <= expected.keys()
    assert sum(result.stats.accepted for result in results) > 400
    assert sum((counts[token] - count) ** 2 / count for token, count in expected.items()) < 31


def test_choice_of_ids() -> None:
    """Guards the order: what is always kept, then the frequent, then low ids; coverage counts what is kept anyway."""
    assert choose_ids(COUNTS, [0, 2], 97, size=4, coverage=None) == [0, 2, 5, 7]
    assert choose_ids(COUNTS, [0, 200], 97, size=7, coverage=None) == [0, 1, 2, 5, 7, 11, 90]
    assert choose_ids(COUNTS, [0], 97, size=None, coverage=0.9) == [0, 5, 7, 11]
    assert choose_ids(COUNTS, [90], 97, size=None, coverage=0.5) == [5, 90]
    assert choose_ids(COUNTS, [], 97, size=None, coverage=1.0) == [5, 7, 11, 90]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 97}, "--size is 97, but the draft has only 97 logits"),
        ({"size": 3}, "--size is 3, but 4 special and end tokens"),
        ({"coverage": 0.0}, "--coverage is 0.0, but must be above 0"),
        ({"coverage": 1.5}, "--coverage is 1.5"),
        ({"size": 9, "coverage": 0.5}, "give one of them"),
        ({}, "--size or --coverage is missing"),
        ({"size": 0}, "--size is 0, but must be 1 or more"),
    ],
)
def test_sizes_that_make_no_sense(settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        trim(spec(checkpoint), tmp_path / "small", COUNTS, end_tokens=(40,), **settings)


def test_nothing_to_choose_from() -> None:
    with pytest.raises(UsageError, match="no tokens were counted"):
        choose_ids(Counter({200: 4}), [0], 97, size=5, coverage=None)
    with pytest.raises(UsageError, match="keeps all 4 tokens"):
        choose_ids(Counter({1: 1, 2: 1, 3: 1}), [0], 4, size=None, coverage=1.0)


def test_counts_are_of_the_drafts_tokens(checkpoint: Path) -> None:
    assert count_texts(spec(checkpoint), ["w5 w7 w5", "", "w90"]) == Counter({5: 2, 7: 1, 90: 1})


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    with safe_open(folder / LM_HEAD_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = dict(file.metadata())
    change(tensors, about)
    save_file(tensors, folder / LM_HEAD_FILE, metadata=about)


def swap(tensors: dict[str, Any], about: dict[str, str]) -> None:
    tensors["ids"] = tensors["ids"].clone()
    tensors["ids"][5] += 1


def newer(tensors: dict[str, Any], about: dict[str, str]) -> None:
    about["format"] = "dsbd.head/2"


def without_ids(tensors: dict[str, Any], about: dict[str, str]) -> None:
    del tensors["ids"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "is damaged .*not what was written"),
        (newer, "'dsbd.head/2', but this version reads dsbd.head/1"),
        (without_ids, "ids or weight is missing"),
    ],
)
def test_a_damaged_map_is_told(change: Any, message: str, tmp_path: Path) -> None:
    """Guards a map that would send every row to a wrong token: nothing would fail, only acceptance would be gone."""
    trim(spec(save(tmp_path / "full")), tmp_path / "small", COUNTS, size=12)
    rewrite(tmp_path / "small", change)
    with pytest.raises(ModelError, match=message):
        load_model(Checkpoint.open(spec(tmp_path / "small")))


def test_a_file_cut_short_and_a_foreign_head(tmp_path: Path) -> None:
    trim(spec(save(tmp_path / "full")), tmp_path / "small", COUNTS, size=12)
    other = save(tmp_path / "other", hidden_size=64)
    (other / LM_HEAD_FILE).write_bytes((tmp_path / "small" / LM_HEAD_FILE).read_bytes())
    with pytest.raises(ModelError, match=r"is for a head of 97 x 32, but the model's is 97 x 64"):
        load_model(Checkpoint.open(spec(other)))
    data = (tmp_path / "small" / LM_HEAD_FILE).read_bytes()
    (tmp_path / "small" / LM_HEAD_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="is damaged"):
        load_model(Checkpoint.open(spec(tmp_path / "small")))


def test_refusals(tmp_path: Path) -> None:
    """Guards a second trimming, which would count what is gone, a target without tokens, and somebody's folder."""
    full = save(tmp_path / "full", tokenizer=numbers())
    trim(spec(full), tmp_path / "small", COUNTS, size=12)
    with pytest.raises(UsageError, match="trimmed already"):
        trim(spec(tmp_path / "small"), tmp_path / "again", COUNTS, size=10)
    with pytest.raises(UnsupportedModelError, match="only a draft may lack tokens"):
        load_model(Checkpoint.open(spec(tmp_path / "small", "target")))
    with pytest.raises(UsageError, match="exists: name a new folder"):
        trim(spec(full), tmp_path / "small", COUNTS, size=10)
    with pytest.raises(UsageError, match="does not exist"):
        trim(spec(full), tmp_path / "no" / "small", COUNTS, size=10)
    with pytest.raises(UsageError, match="--size is 97"):
        trim(spec(full), tmp_path / "wide", COUNTS, size=97)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "small"]


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has an error of its own for it."""

    def fail(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    full = save(tmp_path / "full", "llama")
    monkeypatch.setattr("dsbd_cli.train.trim.write_lm_head", fail)
    with pytest.raises(OutputError, match=r"cannot write .*small: .*No space left"):
        trim(spec(full), tmp_path / "small", COUNTS, size=12)
    assert not list(tmp_path.glob("*small*"))
