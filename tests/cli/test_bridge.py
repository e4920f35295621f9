"""dsbd generate --drafter bridge on checkpoints with different tokenizers, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli.app import run
from tests.cli.conftest import of_rule
from tests.helpers.bridged import EMOJI, bytes_only
from tests.helpers.bytes import byte_mamba
from tests.helpers.checkpoints import byte_level, save, wrap

SAMPLES = Path(__file__).parents[2] / "sample_inputs" / "prompts.jsonl"
PROMPTS = ["The quick br", "naïve ca", EMOJI[:3], EMOJI + " ", "def f(x):\n"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A byte-level target and a subword draft."""
    folder = tmp_path_factory.mktemp("bridge")
    names = []
    for seed, (name, make) in enumerate((("target", bytes_only), ("draft", byte_level))):
        tokenizer = wrap(make())
        names.append(str(save(folder / name, tokenizer=tokenizer, vocab_size=len(tokenizer), seed=seed)))
    return names[0], names[1]


def generate(pair: tuple[str, str], folder: Path, *options: str, draft: str | None = None, code: int = 0) -> Any:
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"id": str(n), "prompt": p}) for n, p in enumerate(PROMPTS)))
    models = ["--target", pair[0], "--draft", draft or pair[1], "--dtype", "float32", "--device", "cpu"]
    output = folder / "out.jsonl"
    files = ["-i", str(folder / "in.jsonl"), "-o", str(output), "--existing", "overwrite"]
    assert run(["generate", *models, *files, "--max-new-tokens", "9", "--num-beams", "2", *options]) == code
    return [json.loads(line) for line in output.read_text().splitlines()] if code == 0 else None


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_same_text_as_without_a_draft(
    pair: tuple[str, str], rule: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the whole way from two folders: which tokenizer is whose, and what the record says of the method."""
    plain = generate(pair, tmp_path, *of_rule(rule), draft="none")
    for batch in ("1", "3"):
        records = generate(pair, tmp_path, *of_rule(rule), "--drafter", "bridge", "--batch-size", batch)
        assert [row["text"] for row in records] == [row["text"] for row in plain]
        assert {row["method"]["drafter"] for row in records} == {"bridge"}
        assert all(row["stats"]["draft_calls"] > 0 for row in records)
        said = "records say same-law, not same-text" in capfd.readouterr().err
        assert {row["exactness"] for row in records} == {"same-law" if said else "same-text"}


def test_a_recurrent_byte_level_target(tmp_path: Path) -> None:
    """A target that carries states from byte to byte, and a subword draft of attention. Guards the whole way of a
    recurrent model from its folder, with several beams."""
    target, draft = wrap(bytes_only()), wrap(byte_level())
    made = (
        str(save(tmp_path / "target", "mamba", tokenizer=target, vocab_size=len(target))),
        str(save(tmp_path / "draft", tokenizer=draft, vocab_size=len(draft), seed=1)),
    )
    plain = generate(made, tmp_path, *of_rule("search"), draft="none")
    records = generate(made, tmp_path, *of_rule("search"), "--drafter", "bridge", "--batch-size", "3")
    assert [row["text"] for row in records] == [row["text"] for row in plain]
    assert all(row["stats"]["draft_calls"] > 0 for row in records)


def test_mambabyte(tmp_path: Path) -> None:
    """A byte-level Mamba as it is published, with the built-in subword draft. Guards the whole way: its config, names
    of weights, bytes for tokens, states, several bytes per call. The target has learnt what the draft says."""
    lines = [line for line in SAMPLES.read_text().splitlines() if '"sql-' in line][:3]
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("\n".join(lines))

    def answers(*options: str) -> list[Any]:
        output = tmp_path / "out.jsonl"
        files = ["-i", str(prompts), "-o", str(output), "--existing", "overwrite", "--num-beams", "1"]
        assert run(["generate", *files, "--max-new-tokens", "32", *options]) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    told = answers("--target", "builtin:draft", "--draft", "none", "--decode", "search")
    texts = [(json.loads(line)["prompt"], row["text"]) for line, row in zip(lines, told, strict=True)]
    folder = byte_mamba(tmp_path / "mambabyte", texts)
    target = ("--target", str(folder), "--seed", "4")
    plain = answers(*target, "--draft", "none")
    assert [row["text"] for row in plain] == [text.encode()[:32].decode() for _, text in texts]
    records = answers(*target, "--draft", "builtin:draft", "--drafter", "bridge", "--depth", "6", "--batch-size", "3")
    assert [row["text"] for row in records] == [row["text"] for row in plain]
    assert sum(row["stats"]["steps"] for row in records) > 4 * sum(row["stats"]["target_calls"] for row in records)


def test_rejection_answers(pair: tuple[str, str], tmp_path: Path) -> None:
    records = generate(pair, tmp_path, "--verify", "rejection", "--drafter", "bridge")
    assert {row["exactness"] for row in records} == {"same-law"}


def test_refusals(pair: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the way to the bridge: the error of a pair that does not fit names it."""
    generate(pair, tmp_path, code=1)
    assert "or --drafter bridge, which drafts through text" in capfd.readouterr().err
    for options, message in (
        (["--drafter", "bridge+ngram"], "fuses with none"),
        (["--drafter", "bridge", "--verify", "with-replacement"], "which only drafter beam gives"),
        (["--drafter", "bridge", "--set", "width=threshold"], "use width fixed"),
    ):
        generate(pair, tmp_path, *options, code=2)
        assert message in capfd.readouterr().err
