"""Sound of more than 30 seconds: texts and segments are those of transformers' own long-form `generate`.

Guards: a window that begins elsewhere, a segment that is said twice or lost, features that depend on a window, a row
that is written before all its windows are done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

import dsbd_cli
from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.cli.app import run
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.token_rules import Timestamps
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.iteration.stepper import Stepper
from dsbd_cli.errors import InvalidRowError, PromptTooLongError
from dsbd_cli.models.transformers_backend import speech
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.models.transformers_backend.speech import read_audio
from dsbd_cli.models.transformers_backend.speech_windows import SpeechWindows, log_mel
from dsbd_cli.requests import Segment
from tests.helpers.pairs import build_pair, perturbed
from tests.helpers.whisper import DE, EN, END, FIRST_TIME, STEP, save_whisper

WINDOW = 30  # seconds
PLACES = 1500  # of the encoder
LENGTHS = (31, 60, 75, 200)  # seconds
NEW = (24, 3, 9, 24)  # most tokens of a window: few of them make one segment of it
SMALL = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in (("layers", 1), ("ffn_dim", 16))}
SMALL |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16}
WANTED = SamplingConfig(source_lang="en")

Told = tuple[str, list[tuple[float, float, str]]]  # a text and its segments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long-whisper")
    size = {"vocab_size": FIRST_TIME + PLACES + 1, "max_source_positions": PLACES}
    model = build_pair("whisper", scale=3.0, seed=8, eos_token_id=END, pad_token_id=END, **size, **SMALL)
    model.get_input_embeddings().weight[FIRST_TIME:] *= 0.65  # else nearly all that it says are times
    model.get_input_embeddings().weight[END] *= 1.1
    save_whisper(path, model, WINDOW, PLACES + 1, (3, 4))
    return path


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [hum(tmp_path_factory.mktemp("long"), seconds, number) for number, seconds in enumerate(LENGTHS)]


def hum(folder: Path, seconds: float, number: int = 0, rate: int = 16000) -> Path:
    """A file with a tone that swells and changes its pitch."""
    time = torch.arange(int(seconds * rate)) / rate
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(number))
    tone = torch.sin(2 * math.pi * (200 + 100 * number + 50 * torch.sin(0.7 * time)) * time)
    path = folder / f"{seconds}.wav"
    soundfile.write(path, (0.3 * tone * torch.sin(1.3 * time).abs() + 0.02 * noise).numpy(), rate)
    return path


class Stock:
    """transformers' own model."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(folder)
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self.tokenizer = dsbd_cli.load(str(folder), None).codec
        self.kinds = set[str]()  # of windows: read again from a segment's end, done with a last time, or one segment

    def features(self, path: Path) -> torch.Tensor:
        """[1, bins, frames] of the whole file."""
        wave = read_audio(str(path), 16000, 1000).numpy()
        settings = {"sampling_rate": 16000, "truncation": False, "padding": "longest", "return_tensors": "pt"}
        features: torch.Tensor = self.extractor(wave, **settings).input_features
        return features

    def tell(self, path: Path, beams: int, **settings: Any) -> Told:
        new = NEW[LENGTHS.index(int(path.stem))]
        asked = {"language": "en", "task": "transcribe", "return_timestamps": True, "return_segments": True, **settings}
        out = self.model.generate(self.features(path), num_beams=beams, do_sample=False, max_new_tokens=new, **asked)
        for answer in {tuple(part["result"].tolist()) for part in out["segments"][0]}:
            timed = [token >= FIRST_TIME for token in answer[3:] if token != END]
            paired = (True, True) in pairwise(timed)
            self.kinds.add("done" if paired and timed[-2:] == [False, True] else "again" if paired else "one")
        said = [(float(part["start"]), float(part["end"]), part["tokens"].tolist()) for part in out["segments"][0]]
        segments = [(round(start, 3), round(end, 3), self.tokenizer.decode(ids)) for start, end, ids in said]
        return self.tokenizer.decode(out["sequences"][0].tolist()), [part for part in segments if part[2]]


@pytest.fixture(scope="module")
def stock(folder: Path) -> Stock:
    return Stock(folder)


@pytest.fixture(scope="module")
def told(stock: Stock, sounds: list[Path]) -> dict[int, list[Told]]:
    """What transformers writes of every file, by its number of beams."""
    written = {beams: [stock.tell(path, beams) for path in sounds] for beams in (1, 3)}
    assert stock.kinds == {"again", "done", "one"}
    return written


@pytest.fixture(scope="module")
def engine(folder: Path) -> dsbd_cli.Engine:
    return dsbd_cli.load(str(folder), None, method=MethodConfig(rule="search", num_beams=3), batch_size=3)


def told_by(result: dsbd_cli.RequestResult) -> Told:
    result.check()
    (beam,) = result.hypotheses
    return beam.text, [(part.start, part.end or -1.0, part.text) for part in beam.segments or ()]


def asked(paths: Sequence[Path], sampling: SamplingConfig = WANTED) -> list[Request]:
    news = [NEW[LENGTHS.index(int(path.stem))] for path in paths]
    return [
        Request(audio=str(path), sampling=replace(sampling, max_new_tokens=new))
        for path, new in zip(paths, news, strict=True)
    ]


@pytest.mark.parametrize(("beams", "drafter", "rows"), [(1, None, 1), (3, None, 3), (1, "beam", 2), (3, "beam", 3)])
def test_long_sound_is_transformers_long_form(
    engine: dsbd_cli.Engine,
    sounds: list[Path],
    told: dict[int, list[Told]],
    beams: int,
    drafter: str | None,
    rows: int,
) -> None:
    """Files of different lengths in one batch, one behind the other and side by side."""
    target: Any = engine.target
    draft = None if drafter is None else Seq2SeqForestModel(perturbed(target.stock(), 0.03), "draft")
    depth = 0 if drafter is None else 3
    method = MethodConfig(rule="search", num_beams=beams, depth=depth, drafts_per_layer=6)
    results = list(Engine(target, draft, engine.codec, method, batch_size=rows).run(asked(sounds)))
    assert [told_by(result) for result in results] == told[beams]
    saved = sum(result.stats.steps - result.stats.target_calls for result in results)
    assert saved > 0 if drafter else saved == 0
    for result in results:
        beam = result.hypotheses[0]
        assert beams > 1 or beam.num_tokens == result.stats.steps
        assert beam.score == pytest.approx(beam.logprob / beam.num_tokens)
        assert result.token_rules["timestamps"] is True


def test_the_language_is_heard_in_the_first_window(
    engine: dsbd_cli.Engine, sounds: list[Path], stock: Stock, folder: Path
) -> None:
    """Guards a language that each window hears for itself, and a record that does not name it."""
    heard = {EN: "en", DE: "de"}[int(stock.model.detect_language(stock.features(sounds[0])))]
    (result,) = engine.run(asked(sounds[:1], replace(WANTED, source_lang=None)))
    assert told_by(result) == stock.tell(sounds[0], 3, language=heard)
    assert result.language == heard


def test_features_are_those_of_the_extractor(sounds: list[Path]) -> None:
    for bins, samples in ((80, 16000 * 31), (128, 16000 * 60 + 159), (8, 16000 * 30 + 160), (8, 16000 * 61 + 1)):
        extractor = WhisperFeatureExtractor(feature_size=bins)
        wave = torch.randn(samples, generator=torch.Generator().manual_seed(bins)) * torch.linspace(0, 0.1, samples)
        whole = extractor(
            wave.numpy(), sampling_rate=16000, truncation=False, padding="longest", return_tensors="pt"
        ).input_features[0]
        torch.testing.assert_close(log_mel(wave, extractor), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_files_of_any_rate_are_read_block_by_block(tmp_path: Path, rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hum(tmp_path, 2.5, 1, rate)
    whole = read_audio(str(path), 16000, 30)
    monkeypatch.setattr(speech, "BLOCK", 1000)
    assert torch.equal(read_audio(str(path), 16000, 30), whole)
    assert len(whole) == 40000


TIMES = Timestamps(FIRST_TIME, STEP, None, END)


def windows(frames: int = 7000) -> SpeechWindows:
    return SpeechWindows(
        torch.arange(frames).float().expand(2, -1),
        3000,
        2,
        TIMES,
        lambda ids: "".join(f" {i}" for i in ids if i < 60),
        "x",
    )


def at(seconds: float) -> int:
    """The token of a time."""
    return FIRST_TIME + round(seconds / STEP)


def test_a_window_begins_where_the_last_complete_segment_ended() -> None:
    sound = windows()
    assert sound.present()[0, [0, -1]].tolist() == [0, 2999]
    second = sound.advance([at(0), 1, at(4), at(5), 2, at(12), at(12), 3])
    assert second is not None
    assert second[0, [0, -1]].tolist() == [1200, 4199]
    assert sound.segments == (Segment(0.0, 4.0, " 1"), Segment(5.0, 12.0, " 2"))
    assert sound.text == " 1 2"
    third = sound.advance([at(0.5), 3, at(2), at(2), 4, at(7)])  # no speech after 7 seconds
    assert third is not None
    assert third[0, 0] == 4200
    assert sound.segments[2:] == (Segment(12.5, 14.0, " 3"), Segment(14.0, 19.0, " 4"))
    assert (third[:, 2800:] == 0).all()
    assert sound.advance([at(1), 5, 6]) is None  # cut before it told a second time
    assert sound.segments[4:] == (Segment(42.0, 43.0, " 5 6"),)
    assert sound.text == " 1 2 3 4 5 6"


def test_a_window_without_times_is_one_segment() -> None:
    sound = windows(3100)
    assert sound.advance([at(0), 1, 2]) is not None
    assert sound.advance([]) is None  # silence is no segment
    assert sound.segments == (Segment(0.0, 30.0, " 1 2"),)


def test_windows_that_hardly_advance_are_an_error(
    engine: dsbd_cli.Engine, sounds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a run that reads one file for days, because its model tells times of milliseconds."""
    sound = windows()
    step = [at(0), 1, at(STEP), at(STEP)]
    for _ in range(89):
        assert sound.advance(step) is not None
    with pytest.raises(InvalidRowError, match=r"audio is x, of which 90 windows cover only 1\.8 of 70\.0 seconds"):
        sound.advance(step)
    read = SpeechWindows.advance

    def slow(windows: SpeechWindows, ids: Sequence[int]) -> torch.Tensor | None:
        if windows._features.shape[1] == 6000 and windows.segments:
            raise InvalidRowError("slow")
        return read(windows, ids)

    monkeypatch.setattr(SpeechWindows, "advance", slow)
    results = list(engine.run(asked([sounds[1], sounds[0]])))
    assert str(results[0].error) == "slow"
    assert results[0].stats.steps > NEW[1]
    assert results[1].error is None


def test_sound_that_is_too_long_names_the_limit(
    engine: dsbd_cli.Engine, sounds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "MOST_SECONDS", 40)
    results = list(engine.run(asked(sounds[:2])))
    assert results[0].error is None
    assert isinstance(results[1].error, PromptTooLongError)
    assert "60.0 seconds long, but must have at most 40: cut it" in str(results[1].error)


def test_a_target_without_times_takes_one_window(
    engine: dsbd_cli.Engine, sounds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.codec, "timestamps", None)
    (result,) = engine.run(asked(sounds[:1]))
    assert "31.0 seconds long, but must have at most 30: cut it" in str(result.error)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n_best": 2}, "n_best is 2, but audio of more than 30 seconds has one text"),
        ({"token_rules": "timestamps=0"}, "timestamps is 0, but audio of more than 30 seconds is read by its times"),
        ({"prefix": "w1"}, "prefix is 'w1', which does not go with audio of more than 30 seconds"),
        ({"stop": "w1"}, "stop is ['w1'], which does not go with audio of more than 30 seconds"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output is true, which does not go with audio of"),
        ({"grammar": Grammar("regex", " w1")}, "grammar says how the whole answer reads, but the audio is so long"),
    ],
)
def test_settings_of_one_window_are_refused(
    engine: dsbd_cli.Engine, sounds: list[Path], sampling: dict[str, Any], message: str
) -> None:
    grammar = sampling.pop("grammar", None)
    (request,) = asked(sounds[:1], replace(WANTED, **sampling))
    (result,) = engine.run([replace(request, grammar=grammar)])
    assert message in str(result.error)


def test_windows_draw_by_seeds_of_their_own() -> None:
    """Guards the same noise in every window, by which all windows would begin alike."""
    request = Request(audio="x.wav", id="0", seed=7)
    seeds = [RequestState(0, request, [], answers=(None,) * count).seed for count in range(3)]  # type: ignore[arg-type]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_drawn_texts_do_not_depend_on_other_rows(engine: dsbd_cli.Engine, sounds: list[Path]) -> None:
    coupled = MethodConfig(rule="coupled", num_beams=2)
    results = [list(engine.replace(method=coupled, batch_size=rows).run(asked(sounds[:2]), seed=3)) for rows in (1, 3)]
    assert [told_by(result) for result in results[0]] == [told_by(result) for result in results[1]]


def test_out_of_memory_in_a_later_window_begins_that_window_again(
    engine: dsbd_cli.Engine, sounds: list[Path], told: dict[int, list[Told]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Stepper.step, list[int]()

    def tight(self: Stepper, *args: Any) -> Any:
        calls.append(1)
        if len(calls) in (20, 22, 60):
            raise torch.OutOfMemoryError
        return step(self, *args)

    fresh = engine.replace()
    monkeypatch.setattr(Stepper, "step", tight)
    results = list(fresh.run(asked(sounds[:3])))
    assert [told_by(result) for result in results] == told[3][:3]
    assert fresh.steps == sum(result.stats.steps for result in results)


def test_a_stopped_run_gives_no_part_of_a_file(engine: dsbd_cli.Engine, sounds: list[Path]) -> None:
    fresh, seen = engine.replace(), list[int]()
    step = fresh.stepper.step

    def stopping(*args: Any) -> Any:
        seen.append(1)
        if len(seen) == 30:
            fresh.stop()
        return step(*args)

    fresh.stepper.step = stopping  # type: ignore[method-assign]
    assert list(fresh.run(asked(sounds[3:]))) == []
    assert len(seen) == 30


def test_small_batches_end_for_rows_that_come_later(engine: dsbd_cli.Engine, sounds: list[Path]) -> None:
    """Guards a row that waits until the long files with which a batch began are read to their ends."""
    for first in (sounds[2:3], [sounds[0], sounds[2]]):
        items = iter([*asked(first), None, *asked(sounds[1:2])])
        results = list(engine.run(items, ordered=False))
        assert results[0].request.audio == str(sounds[1])
        assert len(results) == len(first) + 1


def test_streamed_pieces_are_whole_segments(
    engine: dsbd_cli.Engine, sounds: list[Path], told: dict[int, list[Told]]
) -> None:
    pieces = list(engine.stream(asked(sounds)))
    for path, (text, segments) in zip(sounds, told[3], strict=True):
        parts = [piece.text for piece in pieces if piece.request.audio == str(path)]
        assert "".join(parts) == text
        ends = {"".join(said for _, _, said in segments[:count]) for count in range(len(segments) + 1)}
        assert {"".join(parts[: count + 1]) for count in range(len(parts))} <= ends
    assert sum(bool(piece.text) for piece in pieces) > len(sounds)


def test_rows_of_a_run_are_written_whole_and_resumed(
    folder: Path, sounds: list[Path], told: dict[int, list[Told]], tmp_path: Path
) -> None:
    rows, out, steps = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "steps.jsonl"
    (tmp_path / "empty.wav").write_bytes(b"")
    names = [*map(str, sounds[:2]), str(tmp_path / "empty.wav")]
    given = [{"audio": name, "language": "en", "max_tokens": new} for name, new in zip(names, NEW, strict=False)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    options = ["generate", "--target", str(folder), "--draft", "none", "--decode", "search", "--num-beams", "3"]
    options += ["--files-under", "/", "--input", str(rows), "--output", str(out)]
    assert run([*options, "--set", f"stats={steps}"]) == 3
    written = out.read_bytes()
    records = [json.loads(line) for line in written.splitlines()]
    for record, (text, segments) in zip(records[:2], told[3], strict=False):
        assert record["text"] == text
        assert [(part["start"], part["end"], part["text"]) for part in record["segments"]] == segments
        assert record["usage"]["source_tokens"] >= 6000
        assert record["usage"]["completion_tokens"] == record["num_tokens"]
    assert "empty.wav" in records[2]["error"]["message"]
    own = [json.loads(line) for line in steps.read_text().splitlines()]
    numbers = [step["iteration"] for step in own if step["id"] == "0"]
    assert numbers == [*range(1, records[0]["stats"]["target_calls"] + 1)]
    out.write_bytes(written.splitlines(keepends=True)[0])
    assert run([*options, "--existing", "resume"]) == 3
    assert [json.loads(line)["segments"] for line in out.read_bytes().splitlines()[:2]] == [
        record["segments"] for record in records[:2]
    ]


def test_bench_leaves_long_sound_out(
    folder: Path, sounds: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its comparators would read the first window alone."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"audio": str(sounds[0]), "reference": "w1"}) + "\n")
    options = ["bench", "--target", str(folder), "--draft", "none", "--task", "words", "--data", str(data)]
    options += ["--methods", "beam-search", "--max-new-tokens", "24", "--files-under", str(sounds[0].parent)]
    assert run(options) == 2
    assert "the audio of each is too long for the target" in capsys.readouterr().err
