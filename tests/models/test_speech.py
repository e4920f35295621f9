"""Speech: a tiny random Whisper with its tokenizer and feature extractor on disk, from a sound file to texts.

Guards: another language or task token, a rule of the suppress lists that acts at another place, features of another
length, a file that ends a run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationMixin,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import dsbd_cli
from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.models.speech import read_audio
from dsbd_cli.errors import PromptTooLongError
from tests.models.pairs import build_pair

SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"]
SPECIAL += ["<|notimestamps|>"]
WORDS = 60
END, START, EN, DE, TRANSCRIBE, TRANSLATE, TIMELESS = range(WORDS, WORDS + len(SPECIAL))
SECONDS = 1
NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    model = build_pair("whisper", scale=3.0, max_source_positions=50 * SECONDS, eos_token_id=END)
    config = model.generation_config
    config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = START, END, END
    config.suppress_tokens = [3, 4, START, EN, DE, TRANSCRIBE, TRANSLATE, TIMELESS, *range(TIMELESS + 1, 97)]
    config.begin_suppress_tokens = [7, END]
    more = {
        "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
        "_from_model_config": False,
        "is_multilingual": True,
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": TIMELESS,
    }
    model.save_pretrained(path)
    # as real checkpoints have them; save_pretrained leaves out what it does not know
    settings = path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **more}))
    words = {f"Ġw{index}": index for index in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(path)
    WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Chirps of different lengths, rates and channels."""
    folder = tmp_path_factory.mktemp("sounds")
    paths = []
    for place, (rate, seconds, channels) in enumerate(((16000, 0.5, 1), (44100, 0.9, 2), (8000, 1.0, 1))):
        time = torch.arange(int(rate * seconds)) / rate
        wave = torch.sin(2 * math.pi * (200 + 300 * place) * time * (1 + time)) * 0.5
        paths.append(folder / f"{place}.wav")
        soundfile.write(paths[-1], wave.unsqueeze(1).repeat(1, channels).numpy(), rate)
    return paths


@pytest.fixture(scope="module")
def engine(folder: Path) -> dsbd_cli.Engine:
    return dsbd_cli.load(str(folder), None, method=MethodConfig(rule="search", num_beams=5))


def stock_beams(engine: dsbd_cli.Engine, path: Path, prompt: list[int]) -> list[list[int]]:
    """All beams of transformers' ordinary beam search behind Whisper's prompt."""
    model: Any = engine.target.module  # type: ignore[attr-defined]
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)
    wave = read_audio(str(path), 16000, SECONDS).numpy()
    features = extractor(wave, sampling_rate=16000, return_tensors="pt").input_features
    out = GenerationMixin.generate(
        model,
        features,
        decoder_input_ids=torch.tensor([prompt]),
        num_beams=5,
        num_return_sequences=5,
        do_sample=False,
        max_new_tokens=NEW,
    )
    rows = out[:, len(prompt) :].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


PROMPTS = {
    ("en", None): [START, EN, TRANSCRIBE, TIMELESS],
    ("german", "de"): [START, DE, TRANSCRIBE, TIMELESS],
    ("de", "en"): [START, DE, TRANSLATE, TIMELESS],
}


@pytest.mark.parametrize("languages", PROMPTS)
def test_speech_is_transformers_beam_search(
    engine: dsbd_cli.Engine, sounds: list[Path], languages: tuple[str, str | None]
) -> None:
    sampling = SamplingConfig(max_new_tokens=NEW, n_best=5, source_lang=languages[0], target_lang=languages[1])
    results = list(engine.run([Request(audio=str(path), sampling=sampling) for path in sounds]))
    for path, result in zip(sounds, results, strict=True):
        result.check()
        want = stock_beams(engine, path, PROMPTS[languages])
        assert [list(one.token_ids) for one in result.hypotheses] == want
        assert result.source_tokens == 100 * SECONDS
        assert result.token_rules["begin_suppress_tokens"] == [7, END]
    assert len({result.text for result in results}) > 1


def test_whispers_own_generate_gives_the_same_text(engine: dsbd_cli.Engine, sounds: list[Path], folder: Path) -> None:
    """Its generate has ways of its own to the prompt and the lists."""
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)
    wave = read_audio(str(sounds[0]), 16000, SECONDS).numpy()
    features = extractor(wave, sampling_rate=16000, return_tensors="pt").input_features
    out = model.generate(
        features,
        language="de",
        task="transcribe",
        num_beams=5,
        max_new_tokens=NEW,
        do_sample=False,
    )
    sampling = SamplingConfig(max_new_tokens=NEW, source_lang="de")
    (result,) = engine.run([Request(audio=str(sounds[0]), sampling=sampling)])
    own = [token for token in result.hypotheses[0].token_ids if token != END]
    assert [token for token in out[0].tolist() if token < WORDS] == own


@pytest.mark.parametrize(
    ("audio", "sampling", "told"),
    [
        ("gone.wav", {"source_lang": "en"}, "cannot be read"),
        (None, {}, "source_lang (or language) is missing"),
        (None, {"source_lang": "xx"}, "source_lang is 'xx', which the target does not know"),
        (None, {"source_lang": "en", "target_lang": "de"}, "translates into English (en) alone"),
        ("text", {}, "audio is missing: the target writes down speech"),
    ],
)
def test_rows_that_cannot_be_heard_say_why(
    engine: dsbd_cli.Engine, sounds: list[Path], audio: str | None, sampling: dict[str, str], told: str
) -> None:
    asked = SamplingConfig(max_new_tokens=NEW, **sampling)  # type: ignore[arg-type]
    request = (
        Request("w1", sampling=asked) if audio == "text" else Request(audio=audio or str(sounds[0]), sampling=asked)
    )
    (result,) = engine.run([request])
    assert result.error is not None
    assert told in str(result.error)


def test_longer_audio_names_the_limit(engine: dsbd_cli.Engine, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", torch.zeros(24000).numpy(), 16000)
    asked = SamplingConfig(max_new_tokens=NEW, source_lang="en")
    (result,) = engine.run([Request(audio=str(tmp_path / "long.wav"), sampling=asked)])
    assert isinstance(result.error, PromptTooLongError)
    assert "1.5 seconds long, but the target takes 1: cut it" in str(result.error)
