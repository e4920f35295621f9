"""Speech: a tiny random Whisper with its tokenizer and feature extractor on disk, from a sound file to texts.

Guards: another language or task token, a rule of the suppress lists that acts at another place, features of another
length, a file that ends a run.
"""

from __future__ import annotations

import json
import math
import os
import struct
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import dsbd_cli
from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.cli.app import run
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.models.transformers_backend import speech
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.models.transformers_backend.speech import WhisperCodec, read_audio
from dsbd_cli.requests import Segment
from tests.helpers.pairs import ENDINGS, build_pair, perturbed
from tests.helpers.whisper import DE, EN, END, FIRST_TIME, START, TIMELESS, TRANSCRIBE, TRANSLATE, WORDS, save_whisper

SECONDS = 1
NEW = 10
TIMES = range(FIRST_TIME, FIRST_TIME + 24)  # 0.00, 0.02, .. seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    model = build_pair("whisper", scale=3.0, max_source_positions=50 * SECONDS, eos_token_id=END)
    save_whisper(path, model, SECONDS, len(TIMES), (3, 4, *range(FIRST_TIME, 97)))
    return path


def wave_file(rate: int, channels: int = 1, form: int = 1, bits: int = 16, data: bytes = bytes(400)) -> bytes:
    """A WAV file as its header claims. form: 1 integers, 3 floats."""
    frame = channels * bits // 8
    head = struct.pack("<IHHIIHH", 16, form, channels, rate, rate * frame & 0xFFFFFFFF, frame, bits)
    return b"RIFF%sWAVEfmt %sdata%s" % (struct.pack("<I", 36 + len(data)), head, struct.pack("<I", len(data)) + data)


BAD_SOUNDS = {
    "rate.wav": (wave_file(0), "cannot be read"),
    "fast.wav": (wave_file(0x7FFFFFFF), "holds no sound"),
    "silent.wav": (wave_file(16000, data=b""), "holds no sound"),
    "nan.wav": (wave_file(16000, form=3, bits=32, data=struct.pack("<f", math.nan) * 100), "not all finite numbers"),
    "loud.wav": (wave_file(16000, form=3, bits=32, data=struct.pack("<f", 1e38) * 100), "not all finite numbers"),
    "x.raw": (bytes(400), "cannot be read"),
    "torn.wav": (wave_file(16000)[:30], "cannot be read"),
    "a\0b.wav": (None, "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_SOUNDS)
def test_a_broken_sound_file_is_a_row_error(tmp_path: Path, name: str) -> None:
    """Guards a division by a rate of 0, and errors of libraries that would end the run."""
    data, message = BAD_SOUNDS[name]
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidRowError, match="audio is .*" + message):
        read_audio(str(path), 16000, SECONDS)


def test_a_rate_of_zero_is_a_row_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libsndfile refuses it in WAV files, but not in every format and version."""
    path = tmp_path / "x.wav"
    path.write_bytes(wave_file(16000))
    monkeypatch.setattr(soundfile.SoundFile, "samplerate", 0)
    with pytest.raises(InvalidRowError, match="which has 0 samples per second"):
        read_audio(str(path), 16000, SECONDS)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link"])
def test_only_files_are_read_as_sound(tmp_path: Path, kind: str) -> None:
    """Guards a named pipe that nobody writes to, on which the run would wait for ever, and /dev/zero."""
    path = tmp_path / "x.wav"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    with pytest.raises(InvalidRowError, match="which is no file"):
        read_audio("/dev/zero" if kind == "device" else str(path), 16000, SECONDS)


def test_channels_do_not_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "wide.wav"
    path.write_bytes(wave_file(16000, channels=100, data=bytes(2 * 100 * 20)))
    monkeypatch.setattr(speech, "MOST_SAMPLES", 1999)
    with pytest.raises(InvalidRowError, match="has 2000 samples, but must have at most 1999"):
        read_audio(str(path), 16000, SECONDS)


def chirps(folder: Path, count: int) -> list[Path]:
    """Files of different lengths, rates and channels."""
    paths = []
    for index in range(count):
        rate, seconds, channels = ((16000, 0.5, 1), (44100, 0.9, 2), (8000, 1.0, 1))[index % 3]
        time = torch.arange(int(rate * seconds)) / rate
        wave = torch.sin(2 * math.pi * (200 + 300 * index) * time * (1 + time)) * 0.5
        paths.append(folder / f"{index}.wav")
        soundfile.write(paths[-1], wave.unsqueeze(1).repeat(1, channels).numpy(), rate)
    return paths


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return chirps(tmp_path_factory.mktemp("sounds"), 3)


@pytest.fixture(scope="module")
def engine(folder: Path) -> dsbd_cli.Engine:
    return dsbd_cli.load(str(folder), None, method=MethodConfig(rule="search", num_beams=5))


def features_of(path: Path) -> torch.Tensor:
    """[1, bins, frames], by transformers' extractor."""
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)
    wave = read_audio(str(path), 16000, SECONDS).numpy()
    features: torch.Tensor = extractor(wave, sampling_rate=16000, return_tensors="pt").input_features
    return features


def stock_beams(engine: dsbd_cli.Engine, path: Path, prompt: list[int], **more: Any) -> list[list[int]]:
    """All beams of transformers' ordinary beam search behind Whisper's prompt."""
    return [ids for ids, _ in scored_beams(engine, [path], prompt, **more)[0]]


def scored_beams(
    engine: dsbd_cli.Engine, paths: list[Path], prompt: list[int], **more: Any
) -> list[list[tuple[list[int], float]]]:
    """The beams of several files in one batch, with their scores."""
    model: Any = engine.target.module  # type: ignore[attr-defined]
    out: Any = GenerationMixin.generate(
        model,
        torch.cat([features_of(path) for path in paths]),
        decoder_input_ids=torch.tensor([prompt] * len(paths)),
        num_beams=5,
        num_return_sequences=5,
        do_sample=False,
        max_new_tokens=NEW,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    rows = [row[: row.index(END) + 1] if END in row else row for row in out.sequences[:, len(prompt) :].tolist()]
    beams = list(zip(rows, out.sequences_scores.tolist(), strict=True))
    return [beams[start : start + 5] for start in range(0, len(beams), 5)]


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
        assert [list(beam.token_ids) for beam in result.hypotheses] == want
        assert result.source_tokens == 100 * SECONDS
        assert result.token_rules["begin_suppress_tokens"] == [7, END]
    assert len({result.text for result in results}) > 1


def test_sixteen_files_with_every_ending(engine: dsbd_cli.Engine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every hypothesis and score at W = 5, one row at a time and three, with and without a draft."""
    paths = chirps(tmp_path_factory.mktemp("sixteen"), 16)
    prompt = PROMPTS["en", None]
    want = dict[int, Any]()
    for number, (penalty, early) in enumerate(ENDINGS):
        places = range(number, len(paths), len(ENDINGS))
        settings = {"length_penalty": penalty, "early_stopping": early}
        beams = scored_beams(engine, [paths[index] for index in places], prompt, **settings)
        want |= dict(zip(places, beams, strict=True))
    requests = []
    for index, path in enumerate(paths):
        penalty, early = ENDINGS[index % len(ENDINGS)]
        asked = SamplingConfig(
            max_new_tokens=NEW, n_best=5, source_lang="en", length_penalty=penalty, early_stopping=early
        )
        requests.append(Request(audio=str(path), sampling=asked))
    target: Any = engine.target
    draft = Seq2SeqForestModel(perturbed(target.stock(), 0.03), "draft")
    for small, rows in ((None, 1), (draft, 3)):
        depth = 0 if small is None else 3
        method = MethodConfig(rule="search", num_beams=5, depth=depth, drafts_per_layer=10)
        results = list(Engine(target, small, engine.codec, method, batch_size=rows).run(requests))
        ids = [[list(beam.token_ids) for beam in result.hypotheses] for result in results]
        assert ids == [[tokens for tokens, _ in want[index]] for index in range(len(paths))]
        for index, result in enumerate(results):
            scores = [score for _, score in want[index]]
            assert [beam.score for beam in result.hypotheses] == pytest.approx(scores, abs=2e-4)
    assert sum(result.stats.steps - result.stats.target_calls for result in results) > 0


def test_whispers_own_generate_gives_the_same_text(engine: dsbd_cli.Engine, sounds: list[Path], folder: Path) -> None:
    """Its generate has ways of its own to the prompt and the lists."""
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    out = model.generate(
        features_of(sounds[0]),
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


def test_the_language_is_heard_as_transformers_hears_it(
    engine: dsbd_cli.Engine, sounds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards another argmax, a language of the row before, and a record that does not say what was taken."""
    model: Any = engine.target.module  # type: ignore[attr-defined]
    # many languages, so that sounds as alike as these are taken for different ones
    languages = {f"<|{letter}{letter}|>": token for token, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    monkeypatch.setattr(model.generation_config, "lang_to_id", languages)
    monkeypatch.setattr(engine.codec, "_languages", {name.strip("<|>"): token for name, token in languages.items()})
    asked = SamplingConfig(max_new_tokens=NEW, n_best=5)
    named = [replace(asked, source_lang=code) for code in ("cc", "bb")]
    rows = [(sounds[0], asked), (sounds[1], named[0]), (sounds[1], asked), (sounds[2], asked), (sounds[0], named[1])]
    results = list(engine.run([Request(audio=str(path), sampling=sampling) for path, sampling in rows]))
    ids = [int(model.detect_language(features_of(path))) for path, _ in rows]
    codes = {token: name.strip("<|>") for name, token in languages.items()}
    heard = [codes[token] for token in ids]
    assert [result.language for result in results] == [heard[0], None, heard[2], heard[3], None]
    assert len(set(heard)) > 1, "sounds that make no difference test nothing"
    for (path, sampling), token, result in zip(rows, ids, results, strict=True):
        spoken = token if sampling.source_lang is None else languages[f"<|{sampling.source_lang}|>"]
        want = stock_beams(engine, path, [START, spoken, TRANSCRIBE, TIMELESS])
        assert [list(beam.token_ids) for beam in result.hypotheses] == want


def test_languages_may_be_marked_in_capitals(
    engine: dsbd_cli.Engine, sounds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a language that is heard, and then refused in the middle of a batch."""
    made: Any = engine.codec
    monkeypatch.setattr(made._model.generation_config, "lang_to_id", {"<|EN|>": EN, "<|DE|>": DE})
    codec = WhisperCodec(made._tokenizer, made.eos_ids, made._start, made._model, made._extractor)
    read = codec.encoder_input(Request(audio=str(sounds[0]), sampling=SamplingConfig(max_new_tokens=NEW)))
    assert read.listen is not None
    prompt, heard = read.listen(torch.eye(made._model.config.vocab_size)[DE])
    assert (prompt[1], heard) == (DE, "de")


def test_languages_of_a_batch_are_heard_together_and_survive_out_of_memory(
    engine: dsbd_cli.Engine, sounds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a forward per row, an encoder that reads a source twice, and detection where no handler halves the batch;
    then another language, or none, in the second try."""
    asked = SamplingConfig(max_new_tokens=NEW, n_best=5)
    rows = [sounds[0], sounds[1], sounds[2], sounds[0]]
    alone = [next(iter(engine.run([Request(audio=str(path), sampling=asked)]))) for path in rows]
    heard, forwards, read = Caches.first_logits, list[int](), list[int]()

    def first_logits(caches: Caches, tokens: dict[int, int]) -> torch.Tensor:
        forwards.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError
        return heard(caches, tokens)

    encoder = engine.target.module.get_encoder()  # type: ignore[attr-defined]
    hook = encoder.register_forward_hook(lambda *_: read.append(1))
    monkeypatch.setattr(Caches, "first_logits", first_logits)
    four = engine.replace(batch_size=4)
    results = list(four.run([Request(audio=str(path), sampling=asked) for path in rows]))
    hook.remove()
    assert forwards == [4, 2, 2]
    assert len(read) == 8  # every source in the batch that was too large, and once more
    for expected, result in zip(alone, results, strict=True):
        assert result.error is None
        assert result.language == expected.language is not None
        assert result.hypotheses == expected.hypotheses


def test_speech_wanted_in_another_language_than_english_was_spoken_in_it(
    engine: dsbd_cli.Engine, sounds: list[Path]
) -> None:
    (result,) = engine.run(
        [Request(audio=str(sounds[0]), sampling=SamplingConfig(max_new_tokens=NEW, n_best=5, target_lang="de"))]
    )
    want = stock_beams(engine, sounds[0], PROMPTS["german", "de"])
    assert [list(beam.token_ids) for beam in result.hypotheses] == want
    assert result.language is None  # nothing had to be heard


@pytest.mark.parametrize("latest", [None, 2])
def test_timestamps_are_transformers(
    engine: dsbd_cli.Engine, sounds: list[Path], latest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards every rule of WhisperTimeStampLogitsProcessor, under a draft's nodes too, and times of segments."""
    model: Any = engine.target.module  # type: ignore[attr-defined]
    codec: Any = engine.codec
    settings = model.generation_config
    banned = [token for token in settings.suppress_tokens if token not in TIMES]
    monkeypatch.setattr(settings, "suppress_tokens", banned)
    monkeypatch.setattr(codec, "timestamps", replace(codec.timestamps, latest=latest))
    stock = copy(settings)
    stock.no_timestamps_token_id, stock.max_initial_timestamp_index = TIMELESS, latest
    prompt = [START, EN, TRANSCRIBE]
    want = []
    for path in sounds:
        rule = WhisperTimeStampLogitsProcessor(stock, begin_index=len(prompt))
        want.append(stock_beams(engine, path, prompt, logits_processor=LogitsProcessorList([rule])))
    sampling = SamplingConfig(max_new_tokens=NEW, n_best=5, source_lang="en", token_rules="timestamps=1")
    requests = [Request(audio=str(path), sampling=sampling) for path in sounds]
    for method in (MethodConfig(rule="search", num_beams=5), MethodConfig(rule="search", num_beams=5, drafter="ngram")):
        results = list(Engine(engine.target, None, codec, method, batch_size=2).run(requests))
        assert [[list(beam.token_ids) for beam in result.hypotheses] for result in results] == want
    assert {True, False} == {token in TIMES for beams in want for beam in beams for token in beam[1:]}
    assert results[0].token_rules["timestamps"] is True
    for beam in (beam for result in results for beam in result.hypotheses):
        times = [0.02 * (token - TIMES[0]) for token in beam.token_ids if token in TIMES]
        parts = beam.segments or ()
        told = [time for part in parts for time in (part.start, part.end) if time is not None]
        assert told == sorted(told)
        assert {round(time, 3) for time in told} <= {round(time, 3) for time in times}
        assert "".join(part.text for part in parts) == beam.text
        assert "<|" not in beam.text


@pytest.mark.parametrize("language", ["en", None])
def test_bench_hears_files(
    engine: dsbd_cli.Engine, folder: Path, sounds: list[Path], tmp_path: Path, language: str | None
) -> None:
    """Guards other features, first tokens or texts on either side: both give the words that transformers gives."""
    model: Any = engine.target.module  # type: ignore[attr-defined]
    codec, data, report = engine.codec, tmp_path / "data.jsonl", tmp_path / "found.jsonl"
    said = []
    for path in sounds:
        spoken = EN if language else int(model.detect_language(features_of(path)))
        beams = stock_beams(engine, path, [START, spoken, TRANSCRIBE, TIMELESS])
        said.append(codec.decode([token for token in beams[0] if token != END]))
    rows = [{"audio": str(path), "reference": text} for path, text in zip(sounds, said, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["bench", "--target", str(folder), "--draft", "none", "--task", "words", "--data", str(data)]
    options += ["--methods", "beam-search,hf-beam-search", "--num-beams", "5", "--max-new-tokens", str(NEW)]
    options += ["--set", f"source-lang={language}"] if language else []
    options += ["--records", "3", "--rounds", "1", "--json", str(report), "--files-under", str(sounds[0].parent)]
    assert run(options) == 0
    lines = [line for line in map(json.loads, report.read_text().splitlines()) if "method" in line]
    assert len(lines) == 2
    assert [line["scores"]["1 - WER"]["value"] for line in lines] == [1.0, 1.0]


def test_segments_are_what_stands_between_times(engine: dsbd_cli.Engine) -> None:
    codec: Any = engine.codec
    zero = TIMES[0]
    assert codec.segments([zero, 5, 6, zero + 3, zero + 3, 7, zero + 9, END]) == (
        Segment(0.0, 0.06, " w5 w6"),
        Segment(0.06, 0.18, " w7"),
    )
    assert codec.segments([zero + 1, 5, END]) == (Segment(0.02, None, " w5"),)
    assert codec.segments([zero, zero + 4, END]) == ()


@pytest.mark.parametrize(
    ("audio", "sampling", "told"),
    [
        ("gone.wav", {"source_lang": "en"}, "cannot be read"),
        (None, {"token_rules": "timestamps=1", "prefix": "w1"}, "prefix is 'w1', which does not go with timestamps"),
        (None, {"token_rules": "timestamps=1", "stop": "w1"}, "stop is ['w1'], which does not go with timestamps"),
        (None, {"target_lang": "xx"}, "translates into English (en) alone"),
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
