"""Longrope: a text has the rotary factors that its prompt asks for, as in transformers, whatever is beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.cli.app import run
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import PromptTooLongError
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.requests import RequestResult
from tests.models.decoders import V, build_decoder, first_layers, save_decoder

SWITCH, NEW = 256, 8


@pytest.fixture(scope="module")
def theirs() -> Any:
    return build_decoder("phi3 longrope")


@pytest.fixture(scope="module")
def folders(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its draft."""
    folder = tmp_path_factory.mktemp("longrope")
    return save_decoder(folder / "target", theirs), save_decoder(folder / "draft", first_layers(theirs, 2))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(5, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(folders: tuple[Path, Path], *, drafts: bool, **settings: Any) -> Engine:
    target, draft = (
        ModelSpec(str(folder), role, dtype="float32") for folder, role in zip(folders, ("target", "draft"), strict=True)
    )  # type: ignore[arg-type]
    method = MethodConfig(rule="search", num_beams=3, depth=3 if drafts else 0)
    engine = load(target, draft if drafts else None, method=method, **settings)
    assert isinstance(engine, Engine)
    assert engine.exactness == "same-text"
    return engine


def answers(engine: Engine, prompts: list[list[int]], new: int = NEW) -> list[RequestResult]:
    sampling = SamplingConfig(max_new_tokens=new, n_best=3, ignore_eos=True)
    return [*engine.run([Request(prompt_ids=tuple(prompt), sampling=sampling) for prompt in prompts])]


@pytest.mark.parametrize("drafts", [False, True])
def test_short_and_long_texts_side_by_side_are_those_of_transformers(
    drafts: bool, theirs: Any, folders: tuple[Path, Path]
) -> None:
    """Rows are taken again by texts of the other kind. Some prompts begin alike: their beginnings are copied, but not
    from a text of the other kind."""
    long = tokens(400)
    prompts = [long[:200], long[:300], tokens(257, 1), long[: SWITCH - NEW], long, tokens(9, 2), long[:320], long[:150]]
    results = answers(engine_of(folders, drafts=drafts, batch_size=3), prompts)
    assert sum(result.stats.prompt_tokens_reused > 0 for result in results) >= 2
    for prompt, result in zip(prompts, results, strict=True):
        wanted = theirs.generate(
            torch.tensor([prompt]), do_sample=False, num_beams=3, num_return_sequences=3, max_new_tokens=NEW,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        assert [list(beam.token_ids) for beam in result.hypotheses] == wanted[:, len(prompt) :].tolist()


def test_a_long_text_has_the_bits_that_it_has_alone(folders: tuple[Path, Path]) -> None:
    prompts = [tokens(300), tokens(30, 1), tokens(280, 2), tokens(100, 3)]
    together = answers(engine_of(folders, drafts=True, batch_size=4), prompts)
    engine = engine_of(folders, drafts=False, batch_size=1)
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = answers(engine, [prompt])
        assert [beam.logprob.hex() for beam in result.hypotheses] == [beam.logprob.hex() for beam in alone.hypotheses]


def test_logits_of_short_and_long_texts(theirs: Any, folders: tuple[Path, Path]) -> None:
    target: Any = engine_of(folders, drafts=False).target
    for count in (SWITCH, SWITCH + 1):
        ids = torch.tensor([tokens(count)])
        with torch.inference_mode():
            wanted = theirs(input_ids=ids, use_cache=False).logits
        assert float((target.plain(ids) - wanted).abs().max() / wanted.std()) <= 1e-5


def test_a_text_that_would_change_its_factors_says_why(folders: tuple[Path, Path]) -> None:
    engine = engine_of(folders, drafts=False)
    fits, crosses, beyond = answers(engine, [tokens(SWITCH - NEW), tokens(SWITCH - NEW + 1), tokens(512 - NEW + 1)])
    assert fits.error is None
    assert isinstance(crosses.error, PromptTooLongError)
    assert str(crosses.error) == (
        f"prompt has {SWITCH - NEW + 1} tokens and max_new_tokens is {NEW}, but the target has other rotary factors "
        f"(longrope) in texts whose prompt has more than {SWITCH} tokens, and a text keeps those that it begins with"
    )
    assert "but the target has 512 positions" in str(beyond.error)


def test_a_prompt_is_cut_to_what_keeps_its_factors(folders: tuple[Path, Path]) -> None:
    engine = engine_of(folders, drafts=False, on_too_long="truncate-left")
    prompt = tokens(SWITCH - 2)
    cut, whole = answers(engine, [prompt, prompt[NEW - 2 :]])
    assert cut.error is None
    assert cut.prompt_tokens == SWITCH - NEW
    assert [beam.token_ids for beam in cut.hypotheses] == [beam.token_ids for beam in whole.hypotheses]


def test_a_dry_run_knows_both_limits(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "rows.jsonl"
    words = ["7 " * count for count in (100, 252, 300)]
    lines.write_text("".join(f'{{"prompt": "{text.strip()}"}}\n' for text in words))
    assert run(["generate", "--target", str(folders[0]), "-i", str(lines), "--dry-run", "--max-new-tokens", "8"]) == 3
    said = capsys.readouterr().out
    assert "to answer        2" in said
    assert "other rotary factors (longrope)" in said


def test_a_config_that_went_through_json(theirs: Any) -> None:
    """Guards lists in place of tuples, and factors that a later load would have lost."""
    for model in (theirs, build_decoder("ministral3 growing"), build_decoder("granite 4")):
        config = decoder_config_of(model.config)
        assert isinstance(config, DecoderConfig)
        assert DecoderConfig.from_json(json.loads(json.dumps(asdict(config)))) == config
