"""Sound that is longer than what Whisper's encoder takes: its features, and the windows in which they are read.

The windows are those of transformers' sequential long-form `generate`: each begins where the last complete segment of
the one before it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.token_rules import Timestamps
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.requests import Segment

MOST_WINDOWS = 30  # for each length of a window: a sound's windows advance by a second on average, or more


def log_mel(wave: Tensor, extractor: Any) -> Tensor:
    """Return the features of a whole sound as WhisperFeatureExtractor computes them, but block by block, because its
    spectrum takes many times the memory of its features.

    wave: [samples] float32, more than one block. Returns [bins, frames] float32.
    """
    hop, half, size = extractor.hop_length, extractor.n_fft // 2, extractor.nb_max_frames
    taper = torch.hann_window(extractor.n_fft)
    filters = torch.from_numpy(extractor.mel_filters).to(torch.float32).T
    frames = len(wave) // hop
    features = torch.empty(len(filters), frames)
    for start in range(0, frames, size):
        end = min(start + size, frames)
        first, last = start * hop - half, (end - 1) * hop + half  # samples; outside the sound it is mirrored
        mirrored = max(-first, 0), max(last - len(wave), 0)
        block = torch.nn.functional.pad(wave[None, max(first, 0) : last], mirrored, mode="reflect")[0]
        spectrum = torch.stft(block, extractor.n_fft, hop, window=taper, center=False, return_complex=True)
        features[:, start:end] = torch.clamp(filters @ (spectrum.abs() ** 2), min=1e-10).log10()
    return torch.maximum(features, features.max() - 8.0).add_(4.0).div_(4.0)


class SpeechWindows:
    """Windows of a sound, one after the other, and what was said in those that are answered.

    Attributes:
        segments: of the answered windows, without what follows the last complete segment of a window: the next window
            reads that again.
    """

    def __init__(
        self,
        features: Tensor,
        size: int,
        stride: int,
        times: Timestamps,
        decode: Callable[[list[int]], str],
        name: str,
    ) -> None:
        """features: [bins, frames] of the whole sound. size: frames of a window. stride: frames from one time to the
        next. decode: returns the text of tokens, without times. name: of the file, for messages."""
        self._features, self._size, self._stride, self._times = features, size, stride, times
        self._decode, self._name = decode, name
        self._start = 0  # frame at which the present window begins
        self._count = 1
        self._tokens: list[int] = []
        self.segments: tuple[Segment, ...] = ()

    @cached_property
    def text(self) -> str:
        """Text of all segments so far."""
        return self._decode(self._tokens)

    def present(self) -> Tensor:
        """Return the present window, [bins, size]; behind the end of the sound it holds zeros."""
        window = self._features[:, self._start : self._start + self._size]
        return torch.nn.functional.pad(window, (0, self._size - window.shape[1])).clone()

    def advance(self, ids: Sequence[int]) -> Tensor | None:
        """Take the answer to the present window, without its end token, and return the next window; None at the end of
        the sound. Raises InvalidRowError where there were too many windows."""
        frames, total = self._features.shape[1] - self._start, self._features.shape[1]
        vars(self).pop("text", None)
        self._start += self._read(list(ids), min(frames, self._size))
        if self._start >= total:
            return None
        self._count += 1
        if self._count > (most := MOST_WINDOWS * -(-total // self._size)):
            covered, length = (self._times.seconds * frame / self._stride for frame in (self._start, total))
            raise InvalidRowError(
                f"audio is {self._name}, of which {most} windows cover only {covered:.1f} of {length:.1f} seconds, "
                "because the times of the answers hardly advance: cut it"
            )
        return self.present()

    def _read(self, ids: list[int], frames: int) -> int:
        """Add the segments of an answer, as WhisperForConditionalGeneration does, and return after how many frames of
        the present window the next one begins. frames: of the present window, without the zeros behind the sound."""
        first = self._times.first
        timed = [token >= first for token in ids]
        cuts = [place for place in range(1, len(ids)) if timed[place - 1] and timed[place]]
        if not cuts:  # the whole answer is one segment
            last = next((token for token in reversed(ids) if token >= first), first)
            self._add(ids, 0, last - first if last > first else frames // self._stride)
            return frames
        said_all = timed[-2:] == [False, True]  # a time alone at the end: no speech follows it
        cuts = [*cuts, len(ids)] if said_all else cuts
        for start, end in zip([0, *cuts], cuts, strict=False):
            self._add(ids[start:end], ids[start] - first, ids[end - 1] - first)
        return frames if said_all else (ids[cuts[-1] - 1] - first) * self._stride

    def _add(self, ids: list[int], start: int, end: int) -> None:
        """Add a segment. start, end: steps of time after the beginning of the present window."""
        self._tokens += ids
        if text := self._decode(ids):
            begin, finish = (self._times.seconds * (self._start / self._stride + step) for step in (start, end))
            self.segments += (Segment(round(begin, 3), round(finish, 3), text),)
