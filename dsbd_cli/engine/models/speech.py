"""Speech for Whisper: a file to features, and the tokens that say language and task. Needs the extra `audio`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsbd_cli.engine.core.protocols import SourceRequest
from dsbd_cli.engine.models.sources import Seq2SeqCodec
from dsbd_cli.errors import InvalidRowError, PromptTooLongError, UsageError, shorten
from dsbd_cli.requests import Request

__all__ = ["WhisperCodec", "read_audio"]


def read_audio(path: str, rate: int, seconds: float) -> Tensor:
    """A sound file as one channel at `rate` samples per second: [samples] float32.

    Raises PromptTooLongError for one longer than `seconds`, InvalidRowError for one that cannot be read and UsageError
    where the extra is not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise UsageError(f"rows with audio need the extra audio ({error}): pip install 'dsbd[audio]'") from None
    try:
        with soundfile.SoundFile(path) as file:
            length, own = file.frames / file.samplerate, file.samplerate
            if length > seconds:
                raise PromptTooLongError(
                    f"audio is {shorten(path)}, {length:.1f} seconds long, but the target takes {seconds:g}: cut it"
                )
            wave = file.read(dtype="float32", always_2d=True).mean(1)
    except (OSError, RuntimeError) as error:  # soundfile's own errors are RuntimeErrors
        said = " ".join(str(error).split())[:120]
        raise InvalidRowError(f"audio is {shorten(path)}, which cannot be read: {said}") from None
    if not len(wave):
        raise InvalidRowError(f"audio is {shorten(path)}, which holds no sound")
    return torch.from_numpy(soxr.resample(wave, own, rate))


class WhisperCodec(Seq2SeqCodec):
    """Sound files to features, and what the decoder begins with: start, language, task, no timestamps."""

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...], start: int, model: Any, extractor: Any) -> None:
        super().__init__(tokenizer, eos_ids, start, model)
        self._extractor = extractor
        vocabulary = tokenizer.get_vocab()
        settings = model.generation_config
        self._languages: dict[str, int] = dict(getattr(settings, "lang_to_id", None) or {}) or {
            word: token for word, token in vocabulary.items() if word.startswith("<|") and 6 <= len(word) <= 7
        }
        multilingual = getattr(settings, "is_multilingual", None)
        self._multilingual = len(self._languages) > 1 if multilingual is None else bool(multilingual)
        self._marks = {name: vocabulary.get(f"<|{name}|>") for name in ("transcribe", "translate", "notimestamps")}

    def source(self, request: Request) -> SourceRequest:
        """Features of the file and the decoder's prompt. Raises RowError."""
        if request.audio is None:
            raise InvalidRowError("audio is missing: the target writes down speech, and reads no text")
        begin = self._prompt(request.sampling.source_lang, request.sampling.target_lang)
        extractor = self._extractor
        wave = read_audio(request.audio, extractor.sampling_rate, extractor.chunk_length)
        features = extractor(wave.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features[0]
        return self._joined(features, begin, None, request.sampling)

    def _prompt(self, spoken: str | None, wanted: str | None) -> list[int]:
        """Tokens before the text: the language spoken, and whether it is to be translated into English."""
        begin = [self._start]
        if not self._multilingual:
            for name, value in (("source_lang", spoken), ("target_lang", wanted)):
                if value not in (None, "en"):
                    raise InvalidRowError(f"{name} is {shorten(value)}, but the target knows English alone: drop it")
            return self._timeless(begin)
        if spoken is None:
            raise InvalidRowError("source_lang (or language) is missing: give the language spoken, such as en")
        language = self._languages.get(f"<|{_code(spoken)}|>")
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
        return self._timeless(begin)

    def _timeless(self, begin: list[int]) -> list[int]:
        token = self._marks["notimestamps"]
        return begin if token is None else [*begin, token]


def _code(language: str) -> str:
    """en for English, english or en."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE.get(language.lower(), language.lower())
