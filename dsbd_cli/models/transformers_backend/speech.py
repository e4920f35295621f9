"""A codec of speech for Whisper: a file becomes features, and language and task become tokens. Needs the extra
`audio`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import Timestamps, TokenRules, asked_rules, named_rules
from dsbd_cli.engine.protocols import EncoderRequest
from dsbd_cli.errors import InvalidRowError, PromptTooLongError, UsageError, shorten
from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from dsbd_cli.models.transformers_backend.row_files import open_file, shown
from dsbd_cli.models.transformers_backend.speech_windows import SpeechWindows, log_mel
from dsbd_cli.requests import Request, Segment

MOST_SECONDS = 4 * 3600  # they take 0.9 GB while they are read; their features, until the row is done, 0.5 to 0.7 GB
MOST_BYTES = 1 << 32  # of a file: 4 GiB
MOST_SAMPLES = 1 << 31  # of all channels: 4 hours of 3 channels at 48 kHz
BLOCK = 1 << 20  # samples of all channels that are read at a time
LOUDEST = 2.0**31  # 1 is full scale; the power of what is larger would overflow


def read_audio(path: str, rate: int, seconds: float) -> Tensor:
    """Return a sound file as one channel at `rate` samples per second: [samples] float32.

    Raises PromptTooLongError for one longer than `seconds`, InvalidRowError for one that cannot be read and UsageError
    where the extra is not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise UsageError(f"rows with audio need the extra audio ({error}): pip install 'dsbd[audio]'") from None
    name = shown(path)
    with open_file("audio", path, MOST_BYTES) as opened, soundfile.SoundFile(opened) as file:
        own, samples = file.samplerate, file.frames * file.channels
        if own < 1:
            raise InvalidRowError(f"audio is {name}, which has {own} samples per second")
        if (length := file.frames / own) > seconds:
            raise PromptTooLongError(
                f"audio is {name}, {length:.1f} seconds long, but must have at most {seconds:g}: cut it"
            )
        if samples > MOST_SAMPLES:
            raise InvalidRowError(f"audio is {name}, which has {samples} samples, but must have at most {MOST_SAMPLES}")
        stream = soxr.ResampleStream(own, rate, 1, dtype="float32")
        wave, count = torch.empty(file.frames * rate // own + rate), 0
        ended = False
        while not ended:
            block = file.read(max(1, BLOCK // file.channels), dtype="float32", always_2d=True).mean(1)
            if not (abs(block) <= LOUDEST).all():  # true for NaN, too
                raise InvalidRowError(f"audio is {name}, whose samples are not all finite numbers")
            ended = not len(block)
            part = torch.from_numpy(stream.resample_chunk(block, last=ended))
            wave[count : count + len(part)] = part
            count += len(part)
    if not count:
        raise InvalidRowError(f"audio is {name}, which holds no sound")
    return wave[:count]


class WhisperCodec(Seq2SeqCodec):
    """A codec that turns sound files into features, and gives the tokens that the decoder begins with: start, language,
    task, and whether times follow."""

    reads = "audio"

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...], start: int, model: Any, extractor: Any) -> None:
        super().__init__(tokenizer, eos_ids, start, model)
        self._model, self._extractor = model, extractor
        vocabulary = tokenizer.get_vocab()
        settings = model.generation_config
        marks = getattr(settings, "lang_to_id", None) or {
            word: token for word, token in vocabulary.items() if word.startswith("<|") and 6 <= len(word) <= 7
        }
        self._languages: dict[str, int] = {word.strip("<|>").lower(): token for word, token in marks.items()}
        multilingual = getattr(settings, "is_multilingual", None)
        self._multilingual = len(self._languages) > 1 if multilingual is None else bool(multilingual)
        self._marks = {name: vocabulary.get(f"<|{name}|>") for name in ("transcribe", "translate", "notimestamps")}
        self.timestamps = self._times(settings)
        if self.timestamps is not None:
            self._no_text = range(self.timestamps.first, model.config.vocab_size)

    def encoder_input(self, request: Request) -> EncoderRequest:
        """Return the features of the file and the decoder's prompt. Raises RowError."""
        request.check_source(self.reads)
        assert request.audio is not None
        asked, extractor, times = request.sampling, self._extractor, self.timestamps
        timed = asked_rules(asked.token_rules, TokenRules(), default="none").timestamps
        if timed:
            _refuse(asked, ("prefix", "stop"), "timestamps")
        spoken, wanted = asked.source_lang, asked.target_lang
        if spoken is None and self._multilingual and wanted is not None and _code(wanted) != "en":
            # what is not translated into English is written down as it was spoken
            spoken = wanted if _code(wanted) in self._languages else None
        unheard = spoken is None and self._multilingual
        if unheard and not self._languages:
            raise InvalidRowError("source_lang is missing, and the target has no tokens to guess it by")
        first_spoken = next(iter(self._languages)) if unheard else spoken
        begin = self._prompt(first_spoken, wanted, timed=timed)
        rate = extractor.sampling_rate
        wave = read_audio(request.audio, rate, extractor.chunk_length if times is None else MOST_SECONDS)
        windows = None
        if times is not None and len(wave) // extractor.hop_length > extractor.nb_max_frames:
            windows = self._windows(wave, times, request)
            timed, begin = True, self._prompt(first_spoken, wanted, timed=True)
        features = (
            extractor(wave.numpy(), sampling_rate=rate, return_tensors="pt").input_features[0]
            if windows is None
            else windows.present()
        )
        made = replace(self._joined(features, begin, None, asked), windows=windows)
        if not unheard:
            return made

        def listen(logits: Tensor) -> tuple[list[int], str]:
            heard = self._heard(logits)
            return [*self._prompt(heard, wanted, timed=timed), *made.prompt[len(begin) :]], heard

        return replace(made, listen=listen)

    def _windows(self, wave: Tensor, times: Timestamps, request: Request) -> SpeechWindows:
        """Return the windows of a sound that is longer than one. Raises InvalidRowError for settings that go with one
        window alone."""
        asked, extractor = request.sampling, self._extractor
        reason = f"audio of more than {extractor.chunk_length:g} seconds"
        if named_rules(asked.token_rules).get("timestamps") is False:
            raise InvalidRowError(f"token_rules: timestamps is 0, but {reason} is read by its times: drop it")
        _refuse(asked, ("prefix", "stop", "include_stop_str_in_output"), reason)
        if asked.n_best > 1:
            raise InvalidRowError(f"n_best is {asked.n_best}, but {reason} has one text: drop it")
        decode = partial(self.decode, skip_special_tokens=asked.skip_special_tokens)
        size = extractor.nb_max_frames
        stride = size // self._model.config.max_source_positions
        return SpeechWindows(log_mel(wave, extractor), size, stride, times, decode, shown(request.audio or ""))

    def begin(self, asked: SamplingConfig) -> tuple[int | None, int]:
        """Return no forced token and the first token, because `encoder_input` gives all tokens that an answer begins
        with."""
        return None, self._start

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        """Return the bytes that each id adds, as other codecs do; a time adds nothing to the text."""
        if self._bytes is None and self.timestamps is not None:
            first = self.timestamps.first
            self._bytes = [b"" if token >= first else spelled for token, spelled in enumerate(super().token_bytes())]
        return super().token_bytes(skip_special_tokens=skip_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of generated ids, without times, and with special tokens or without them."""
        kept = [token for token in ids if token not in self._no_text]
        return super().decode(kept, skip_special_tokens=skip_special_tokens)

    def segments(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[Segment, ...]:
        """Return the text between each two times. The last part has no end where the answer was cut before it."""
        times = self.timestamps
        assert times is not None, "checked when the request was read"
        hidden = self.eos_ids if skip_special_tokens else ()
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        segments: list[Segment] = []
        start, text = 0.0, list[int]()
        for token in ids:
            if token < times.first:
                text += [] if token in hidden else [token]
                continue
            now = round((token - times.first) * times.seconds, 3)
            if text:
                segments.append(Segment(start, now, decode(text)))
                text = []
            start = now
        return (*segments, Segment(start, None, decode(text))) if text else tuple(segments)

    def _times(self, settings: Any) -> Timestamps | None:
        """Return the tokens of times that the checkpoint's generation settings or its vocabulary name; None where they
        name none."""
        no_times = getattr(settings, "no_timestamps_token_id", None) or self._marks["notimestamps"]
        if no_times is None or no_times + 1 >= self._model.config.vocab_size:
            return None
        seconds = self._extractor.chunk_length / self._model.config.max_source_positions
        return Timestamps(
            no_times + 1, seconds, getattr(settings, "max_initial_timestamp_index", None), self.eos_ids[0]
        )

    def _heard(self, logits: Tensor) -> str:
        """Return the likeliest language of speech, as transformers' detect_language does. logits: [V], behind the first
        token."""
        names = sorted(self._languages, key=self._languages.__getitem__)
        return names[int(logits[[self._languages[name] for name in names]].argmax())]

    def _prompt(self, spoken: str | None, wanted: str | None, *, timed: bool) -> list[int]:
        """Return the tokens before the text: the language spoken, whether it is to be translated into English, and
        whether times come with it."""
        begin = [self._start]
        if not self._multilingual:
            for name, value in (("source_lang", spoken), ("target_lang", wanted)):
                if value not in (None, "en"):
                    raise InvalidRowError(f"{name} is {shorten(value)}, but the target knows English alone: drop it")
            return begin if timed else self._timeless(begin)
        assert spoken is not None, "named, or heard"
        language = self._languages.get(_code(spoken))
        if language is None:
            raise InvalidRowError(
                f"source_lang is {shorten(spoken)}, which the target does not know: give a code as en"
            )
        if wanted is not None and _code(wanted) not in ("en", _code(spoken)):
            raise InvalidRowError(
                f"target_lang is {shorten(wanted)}, but the target translates into English (en) alone"
            )
        task = "transcribe" if wanted is None or _code(wanted) == _code(spoken) else "translate"
        begin.append(language)
        if (token := self._marks[task]) is not None:
            begin.append(token)
        return begin if timed else self._timeless(begin)

    def _timeless(self, begin: list[int]) -> list[int]:
        token = self._marks["notimestamps"]
        return begin if token is None else [*begin, token]


def _refuse(asked: SamplingConfig, names: Sequence[str], reason: str) -> None:
    """Raise InvalidRowError where one of these settings is not its default."""
    for name in names:
        if value := getattr(asked, name):
            shown_value = shorten(list(value) if name == "stop" else value)
            raise InvalidRowError(f"{name} is {shown_value}, which does not go with {reason}: drop one")


def _code(language: str) -> str:
    """Return a language's code: en for English, english or en."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE.get(language.lower(), language.lower())
