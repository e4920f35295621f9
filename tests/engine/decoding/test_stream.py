"""Streamed text can no longer change: its pieces, joined, are the best text that `run` gives. Guards: half a character,
half a stop string, tokens that only the live beams share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsbd_cli import Engine, MethodConfig, Piece, Request, SamplingConfig
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import InvalidRowError, RowError
from dsbd_cli.requests import derive_seed
from tests.helpers.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 12
PARTS = (b"a", b"b", b"", b"\xc3", b"\xa9", b"\xe4\xb8", b"\xad", b"bc", b" ", b"\xff", b"ca", b"\xf0\x9f\x98\x80")


class BytesCodec(NumberCodec):
    """Tokens are bytes, half characters among them; what is no UTF-8 is replaced, as byte-level tokenizers do."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(PARTS[token] for token in ids).decode("utf-8", "replace")

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return list(PARTS)


class FallbackCodec(BytesCodec):
    """A run of byte tokens with one bad byte in it is all replaced, as byte fallback does."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text, run = "", b""
        for token in [*ids, None]:
            part = b"" if token is None else PARTS[token]
            if token is not None and len(part) == 1 and part >= b"\x80":
                run += part
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run, text = b"", text + part.decode("utf-8", "replace")
        return text


def make(codec: NumberCodec, noise: float = 0.5, batch_size: int = 5, target: Any = None, **method: Any) -> Engine:
    big, small = table_pair(3, VOCABULARY, noise, ends={2: -1.0})
    config = MethodConfig.of({"num_beams": 3, "depth": 3, **method})
    return Engine(target or big, small if config.needs_draft else None, codec, config, batch_size=batch_size)


def requests(count: int = 12, **sampling: Any) -> list[Request]:
    return [
        Request(prompt_ids=(i % 5, i % 7), sampling=SamplingConfig(**{"max_new_tokens": 14, **sampling}))
        for i in range(count)
    ]


def joined(pieces: Sequence[Piece]) -> dict[str, str]:
    texts: dict[str, str] = defaultdict(str)
    for piece in pieces:
        texts[piece.request.id] += piece.text
    return texts


METHODS: list[dict[str, Any]] = [
    {"rule": "coupled"},
    {"rule": "coupled", "num_beams": 1},
    {"rule": "coupled", "depth": 0},
    {"rule": "coupled", "width": "threshold", "drafter": "beam"},
    {"rule": "coupled", "memory_saving": True},
    {"rule": "rejection", "width": "fixed"},
    {"rule": "rejection", "width": "threshold"},
    {"rule": "with-replacement", "width": "threshold"},
    {"rule": "search"},
    {"rule": "search", "num_beams": 1, "depth": 0},
    {"rule": "fuzzy", "fuzzy_threshold": 0.5},
    {"rule": "coupled", "drafter": "ngram"},
    {"rule": "rejection", "drafter": "beam+ngram"},
    {"rule": "coupled", "drafter": "rsd-s"},
]
ENDS: list[dict[str, Any]] = [
    {},
    {"stop": "ab"},
    {"stop": ("bca", "caa", "b b"), "n_best": 2},
    {"early_stopping": True, "n_best": 3},
    {"length_penalty": 0.0, "stop": "é"},
]
CODECS = [BytesCodec, FallbackCodec]


@pytest.mark.parametrize(
    ("method", "codec"),
    [*((method, BytesCodec) for method in METHODS), *((method, FallbackCodec) for method in METHODS[::4])],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(map(str, value.values())),
)
def test_the_pieces_joined_are_the_best_text(method: dict[str, Any], codec: type[BytesCodec]) -> None:
    several = 0
    most = method.get("num_beams", 3)
    # rows without stop strings run apart, because one with them changes the code of all; the others share their batches
    for ends in (ENDS[:1], ENDS[1:]):
        asked = [
            replace(request, id=f"{seed} {index}", seed=derive_seed(seed, str(index)))
            for seed, end in enumerate(ends)
            for index, request in enumerate(requests(**{**end, "n_best": min(end.get("n_best", 1), most)}))
        ]
        words = codec(VOCABULARY, (2,))
        plain = list(make(words, batch_size=len(asked), **method).run(asked))
        pieces = list(make(words, batch_size=5 * len(ends), **method).stream(asked))
        results = {piece.request.id: piece.result for piece in pieces if piece.result is not None}
        assert len(results) == len(plain) == 12 * len(ends)
        for expected in plain:
            result = results[expected.request.id]
            assert result is not None
            assert result.hypotheses == expected.hypotheses
        assert joined(pieces) == {result.request.id: result.text for result in plain}
        # a piece without a result is never empty, and nothing follows a result
        done = set[str]()
        for piece in pieces:
            assert piece.request.id not in done
            assert piece.text or piece.result is not None
            done |= {piece.request.id} if piece.result is not None else set()
        several += sum(piece.result is None for piece in pieces)
    assert several, "nothing was streamed before its request was done"


def test_one_beam_streams_every_token() -> None:
    """Without a draft an iteration is a token, which goes out in the same iteration."""
    engine = make(NumberCodec(VOCABULARY), num_beams=1, depth=0)
    pieces = list(engine.stream(requests(1, max_new_tokens=9)))
    assert len(pieces) == 9
    assert all(len(piece.text.split()) == 1 for piece in pieces)


def test_a_finished_hypothesis_holds_back_what_it_does_not_share() -> None:
    """The best text in the end is not one that the live beams of an earlier iteration led to."""
    target, draft = table_pair(3, VOCABULARY, 0.5, ends={2: 2.5})
    draft_backlog = 0
    for rule in ("coupled", "search", "rejection"):
        method = MethodConfig(rule=rule, num_beams=3, depth=2)
        engine = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method)
        for seed in range(6):
            asked = requests(20, max_new_tokens=12, n_best=3)
            pieces = list(engine.stream(asked, seed=seed))
            results = [piece.result for piece in pieces if piece.result is not None]
            assert joined(pieces) == {result.request.id: result.text for result in results}
            draft_backlog += sum(len(result.hypotheses[0].token_ids) < 6 < result.stats.steps for result in results)
    assert draft_backlog, "no early hypothesis won late"


class Failing(TableLM):
    """Runs out of memory once, after some forwards."""

    left = 12

    def forward(self, batch: ForestInput, *, logits: bool = True) -> torch.Tensor | None:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError
        return super().forward(batch, logits=logits)


def test_out_of_memory_says_nothing_twice() -> None:
    codec = BytesCodec(VOCABULARY, (2,))
    expected = {result.request.id: result.text for result in make(codec).run(requests())}
    table, _ = table_pair(3, VOCABULARY, 0.5, ends={2: -1.0})
    target = Failing(table.table)
    pieces = list(make(codec, target=target).stream(requests()))
    assert target.left < 0
    assert joined(pieces) == expected


def test_text_that_a_second_decoding_takes_back_is_an_error() -> None:
    class Fickle(NumberCodec):
        """Another text once there are many tokens."""

        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return super().decode(ids) if len(ids) < 8 else "other"

    engine = make(Fickle(VOCABULARY), num_beams=1, depth=0)
    *_, last = engine.stream(requests(1))
    assert last.result is not None
    assert last.text == ""
    with pytest.raises(RowError, match="was streamed, but the text does not begin with it"):
        _ = last.result.text


def test_a_row_that_fails_ends_with_its_error_and_the_others_go_on() -> None:
    engine = make(NumberCodec(VOCABULARY, (2,)))
    good = requests(2)
    pieces = list(engine.stream([good[0], Request(""), good[1]]))
    ends = {piece.request.id: piece.result for piece in pieces if piece.result is not None}
    assert isinstance(ends["1"].error, InvalidRowError)
    assert ends["0"].text
    assert ends["2"].text


@pytest.mark.parametrize("codec", CODECS)
def test_a_byte_that_spoils_the_character_before_it(codec: type[BytesCodec]) -> None:
    """a, both bytes of é, a byte that is no text: with byte fallback it takes the é back."""
    table = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY)
    for last, token in ((0, 3), (3, 4), (4, 9), (9, 0)):
        table[:, last, token] = 50.0
    engine = make(codec(VOCABULARY), target=TableLM(table), rule="search", num_beams=1, depth=0)
    request = Request(prompt_ids=(0,), sampling=SamplingConfig(max_new_tokens=8))
    pieces = list(engine.stream([request]))
    [result] = engine.run([request])
    assert "".join(piece.text for piece in pieces) == result.text
    assert len(pieces) > 2
