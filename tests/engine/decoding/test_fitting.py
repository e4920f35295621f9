"""Prompts that are too long for the positions, and a run that is asked to stop."""

from __future__ import annotations

import pytest

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.encode import BEGINNING
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import PromptTooLongError, UsageError
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, table_pair

VOCABULARY = 12
SAMPLING = SamplingConfig(max_new_tokens=4)


class BeginningCodec(NumberCodec):
    """Begins every text with token 1, as Llama's tokenizer does."""

    def encode(self, prompt: str) -> list[int]:
        return [1, *super().encode(prompt)]


def engine(
    positions: int,
    codec: NumberCodec | None = None,
    draft_positions: int | None = None,
    on_too_long: OnTooLong = "truncate-left",
) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    target.max_positions, draft.max_positions = positions, draft_positions  # type: ignore[misc, assignment]
    codec = codec or NumberCodec(VOCABULARY)
    return Engine(target, draft, codec, MethodConfig(depth=4), on_too_long=on_too_long)


@pytest.mark.parametrize("form", ["prompt", "messages", "prompt_ids"])
@pytest.mark.parametrize(("target", "draft"), [(7, None), (9, 7)])
def test_the_left_of_a_long_prompt_is_dropped(form: str, target: int, draft: int | None) -> None:
    """Guards against one of the ways into the engine that is not cut, or is cut on the wrong side."""
    text = "3 4 5 6 7 8 9"
    sources = {
        "prompt": text,
        "messages": ({"role": "user", "content": text},),
        "prompt_ids": tuple(map(int, text.split())),
    }
    request = Request(id="a", seed=1, sampling=SAMPLING, **{form: sources[form]})  # type: ignore[arg-type]
    [cut] = engine(target, draft_positions=draft).run([request])
    assert (cut.error, cut.prompt_tokens, cut.truncated_tokens) == (None, 3, 4)
    [short] = engine(target).run([Request(id="a", seed=1, prompt="7 8 9", sampling=SAMPLING)])
    assert short.truncated_tokens == 0
    assert cut.hypotheses == short.hypotheses


def test_the_token_that_begins_a_text_is_kept() -> None:
    decoder = engine(7, BeginningCodec(VOCABULARY))
    assert decoder._encoder.encode(Request(id="a", seed=1, prompt="3 4 5 6", sampling=SAMPLING)) == ([1, 5, 6], 2)
    assert decoder._encoder.encode(Request(id="a", seed=1, prompt="3 4", sampling=SAMPLING)) == ([1, 3, 4], 0)
    assert decoder._encoder.encode(Request(id="a", seed=1, prompt_ids=(3, 4, 5, 6), sampling=SAMPLING)) == (
        [4, 5, 6],
        1,
    )


class CountingCodec(NumberCodec):
    """Tells the least number of tokens, or none, and must not be asked for more than a few."""

    bytes_per_token = 3

    def __init__(self, vocabulary: int, *, bounded: bool = True) -> None:
        super().__init__(vocabulary)
        self.bounded = bounded
        self.longest = 0  # text that was tokenized

    def encode(self, prompt: str) -> list[int]:
        assert len(prompt) < 300, "tokenized although its bytes prove it too long"
        self.longest = max(self.longest, len(prompt))
        return super().encode(prompt)

    def least_tokens(self, text: str) -> int:
        return len(text) // 3 if self.bounded else 0


@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(form: str) -> None:
    text = "3 " * 300_000
    sources = {"prompt": text, "messages": ({"role": "user", "content": text},)}
    decoder = engine(9, CountingCodec(VOCABULARY), on_too_long="error")
    [result] = decoder.run([Request(id="a", seed=1, sampling=SAMPLING, **{form: sources[form]})])  # type: ignore[arg-type]
    assert isinstance(result.error, PromptTooLongError)
    assert str(result.error) == (
        "prompt has 200000 tokens or more and max_new_tokens is 4, but the target has 9 positions"
    )
    [answered] = decoder.run([Request(id="b", seed=1, prompt="3 4", sampling=SAMPLING)])
    assert answered.error is None


@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_without_a_bound_of_the_tokenizer_a_text_of_too_many_bytes_is_refused(form: str) -> None:
    text = "3 " * 300_000
    sources = {"prompt": text, "messages": ({"role": "user", "content": text},)}
    codec = CountingCodec(VOCABULARY, bounded=False)
    [result] = engine(9, codec, on_too_long="error").run([Request(sampling=SAMPLING, **{form: sources[form]})])  # type: ignore[arg-type]
    assert isinstance(result.error, PromptTooLongError)
    assert str(result.error) == (
        "prompt has 600000 bytes, more than 3 for each token that fits: the target has 9 positions"
    )
    assert codec.longest == 0


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_where_the_left_is_cut_only_the_end_of_a_text_is_tokenized(form: str, bounded: bool) -> None:
    text = "9 " * 300_000 + "3 4 5 6 7"
    sources = {"prompt": text, "messages": ({"role": "user", "content": text},)}
    codec = CountingCodec(VOCABULARY, bounded=bounded)
    request = Request(sampling=SAMPLING, **{form: sources[form]})  # type: ignore[arg-type]
    ids, dropped = engine(9, codec, on_too_long="truncate-left")._encoder.encode(request)
    assert ids == [3, 4, 5, 6, 7]
    longest = BEGINNING if form == "messages" else 9 * 3  # the first letters tell which token begins every text
    assert codec.longest == longest, "else as many bytes as nine tokens can have"
    assert dropped == (len(text) // 3 - 5 if bounded else 9)


def test_no_room_for_a_prompt_is_an_error_even_so() -> None:
    [result] = engine(4).run([Request(id="a", seed=1, prompt="3 4", sampling=SAMPLING)])
    assert isinstance(result.error, PromptTooLongError)
    assert "4 positions" in str(result.error)


def test_a_stopped_run_hands_out_what_is_done_and_ends() -> None:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    decoder = Engine(target, draft, NumberCodec(VOCABULARY), MethodConfig(depth=4), batch_size=1)
    asked = []

    def source():  # type: ignore[no-untyped-def]
        for index in range(100):
            asked.append(index)
            if index == 3:
                decoder.stop()
            yield Request(id=str(index), seed=index, prompt="3 4", sampling=SAMPLING)

    done = [result.request.id for result in decoder.run(source())]
    assert done == ["0", "1", "2"]
    assert len(asked) < 8
    with pytest.raises(UsageError, match="stopped and answers nothing any more"):
        next(decoder.run([Request(id="a", seed=1, prompt="3", sampling=SAMPLING)]))


def test_steps_of_unfinished_requests_are_counted() -> None:
    """What a display shows while rows run: in the end it is the sum of the results'."""
    decoder, counts, total = engine(64), [], 0
    requests = [
        Request(id=str(n), seed=n, prompt="3 4", sampling=SamplingConfig(max_new_tokens=4 + 8 * n)) for n in range(3)
    ]
    for result in decoder.run(requests):
        total += result.stats.steps
        counts.append((total, decoder.steps))
    assert all(done <= taken for done, taken in counts)
    assert counts[0][0] < counts[0][1], "the longer rows run when the first is done"
    assert counts[-1][0] == counts[-1][1]
