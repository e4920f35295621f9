"""Text that goes out while requests run: only what can no longer change, in whole characters. Host side."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dsbd_cli.answer_forms import Reasoning
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.results import bytes_of, text_of
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import RowError, shorten
from dsbd_cli.requests import Piece, RequestResult


class Pieces:
    """Pieces of text as soon as they are certain, and results as soon as they are done, in no order of requests."""

    held = 0

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # a token of a single byte that is no text by itself
        broken = (token for token, added in enumerate(codec.token_bytes()) if len(added) == 1 and added[0] >= 0x80)
        self._broken = next(broken, None)
        self._common_prefix: dict[int, int] = {}  # slots common to all live beams when a request was last read
        self._sent: dict[int, str] = {}
        self._out: deque[Piece] = deque()

    def progress(self, job: RequestState, tokens: Callable[[], list[int]]) -> None:
        """Take the new text of a running request. The device is read only where the live beams have more in common than
        before."""
        if job.windows is not None:
            # what follows the last complete segment of a window is read again; half a character may be completed
            self._add(job, job.windows.text.rstrip("\N{REPLACEMENT CHARACTER}"))
            return
        if job.common_prefix <= self._common_prefix.get(job.number, len(job.prompt) - 1):
            return
        self._common_prefix[job.number] = job.common_prefix
        sampling = job.request.sampling
        if job.request.chat.reads_calls:
            return  # what is written may be a call
        text = self._whole(tokens(), sampling, job.prompt[len(job.prompt) - job.prefix :], job.reasoning)
        if not sampling.include_stop_str_in_output:
            # a stop string may have begun in what is held back
            text = text[: max(0, len(text) - max((len(stop.encode()) - 1 for stop in sampling.stop), default=0))]
        if job.reasoning is not None:
            text = job.reasoning.certain(text)
        self._add(job, text)

    def _add(self, job: RequestState, text: str) -> None:
        """Send what is new in the text of a request so far."""
        sent = self._sent.get(job.number, "")
        # the text is shorter after out of memory, when the request begins again
        if len(text) > len(sent) and text.startswith(sent):
            self._sent[job.number] = text
            self._out.append(Piece(job.request, text[len(sent) :]))

    def put(self, number: int, result: RequestResult) -> None:
        """Take the last piece: the rest of the best text, and the result."""
        self._common_prefix.pop(number, None)
        sent = self._sent.pop(number, "")
        if result.error is None and not result.text.startswith(sent):
            error = RowError(
                f"{shorten(sent)} was streamed, but the text does not begin with it: it was decoded again after out of "
                "memory, or the tokenizer changed it: answer this request without streaming"
            )
            result = replace(result, hypotheses=(), error=error)
        rest = result.text[len(sent) :] if result.error is None else ""
        self._out.append(Piece(result.request, rest, result))

    def ready(self) -> Iterator[Piece]:
        """Yield all pieces so far."""
        while self._out:
            yield self._out.popleft()

    def _whole(
        self, ids: list[int], sampling: SamplingConfig, prefix: Sequence[int], reasoning: Reasoning | None
    ) -> str:
        """Return the text of as many leading tokens as end with a whole character, whatever tokens follow, up to a stop
        string."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        token_bytes, ends = bytes_of(self._codec, sampling), []
        for count, token in enumerate(ids, 1):
            decoder.decode(token_bytes[token] if token < len(token_bytes) else b"")
            if not decoder.getstate()[0]:
                ends.append(count)
        for end in reversed(ends):
            text = self._codec.decode([*prefix, *ids[:end]])
            # some tokenizers decode a run of byte tokens as a whole: one bad byte more, and none of it is text
            if self._broken is None or self._codec.decode([*prefix, *ids[:end], self._broken]).startswith(text):
                return text_of(ids[:end], sampling, self._codec, prefix, reasoning)
        return ""
