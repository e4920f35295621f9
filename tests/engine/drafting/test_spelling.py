"""Texts between two vocabularies: cuts, segments, alignment."""

from __future__ import annotations

import random

import pytest

from dsbd_cli.engine.drafting.bridge.token_bytes import Spelling, split_word, standing_suffix, valid_prefix

TEXT = "naïve 東京 🙂👩‍👩‍👧 e\u0301a\u0308 Grüße, ok\n\tx"
PIECES = [b"", b"a", b"b", b"ab", b"abc", b" ", b" a", b" ab", b"\xf0\x9f", b"\x99\x82", b"\xf0", b"\xff", b"\xff\xff"]


def test_cuts_leave_whole_characters() -> None:
    """Guards half characters: a text with characters of all lengths, cut anywhere."""
    data = TEXT.encode()
    for end in range(len(data) + 1):
        cut = valid_prefix(data[:end])
        data[:cut].decode()
        assert end - cut < 4
        assert (end == cut) == (data[:end].decode(errors="ignore").encode() == data[:end])
    assert valid_prefix(b"\x80\x80\x80\x80\x80") == 5  # nothing that could be finished


def test_the_standing_suffix_is_text_but_for_its_end() -> None:
    data = TEXT.encode() * 3
    for end in range(len(data) + 1):
        for rubbish in (b"", b"\xff", b"\x99\x82", b"\xf0\x9f\xf0"):
            suffix = standing_suffix(rubbish + data[:end])
            assert (rubbish + data[:end]).endswith(suffix)
            suffix[: valid_prefix(suffix)].decode()
            assert len(suffix) >= min(end, 25)
    assert standing_suffix(b"abc\xff") == b""
    assert standing_suffix(b"ab\xffcd\xf0\x9f") == b"cd\xf0\x9f"


def test_the_last_word_is_open() -> None:
    assert split_word(b"The qui") == (b"The", b" qui")
    assert split_word(b"The  ") == (b"The", b"  ")
    assert split_word(b"The") == (b"", b"The")
    assert split_word(b"") == (b"", b"")
    before, word = split_word(("x " + "東" * 20).encode())
    assert before + word == ("x " + "東" * 20).encode()
    assert word == ("東" * 8).encode()


def test_tokens_that_agree() -> None:
    """Against the definition, for every beginning of every two pieces; 0xFF has no successor."""
    spelling = Spelling(PIECES)
    for first in PIECES:
        for second in PIECES:
            for pending in {(first + second)[:length] for length in range(1, 7)} - {b""}:
                expected = {
                    i
                    for i, piece in enumerate(PIECES)
                    if piece and (piece.startswith(pending) or pending.startswith(piece))
                }
                tokens = spelling.continuing(pending).tolist()
                assert set(tokens) == expected
                assert len(tokens) == len(expected)


def test_segments_are_the_shortest() -> None:
    spelling = Spelling(PIECES)
    assert spelling.segment(b"abcab") == [4, 3]
    assert spelling.segment(b" abab") == [7, 3]
    assert spelling.segment(b"abx") == [3]
    assert spelling.segment("🙂".encode()) == [8, 9]
    assert spelling.segment(b"") == []


@pytest.mark.parametrize("seed", range(20))
def test_aligned_tokens_spell_the_text(seed: int) -> None:
    """Guards tokens that do not follow what stands: whatever the tokenizer makes of the whole, the tokens spell the new
    bytes exactly, and where it has a border there, they are its own."""
    rng = random.Random(seed)
    table = [b"", *(bytes([byte]) for byte in range(256)), b"ab", b"abc", b"bc", b" a", b" ab", "ü".encode(), b"ca"]
    spelling = Spelling(table)
    for _ in range(200):
        whole = "".join(rng.choices("abc ü", k=12)).encode()
        encoded, position = [], 0
        while position < len(whole):  # some tokenizer: random pieces that fit
            fitting = [i for i, piece in enumerate(table) if piece and whole[position:].startswith(piece)]
            encoded.append(rng.choice(fitting))
            position += len(table[encoded[-1]])
        border = rng.randrange(len(whole) + 1)
        tokens = spelling.align(whole[:border], whole[border:], encoded)
        assert spelling.spell(tokens) == whole[border:]
        begins = [len(spelling.spell(encoded[:number])) for number in range(len(encoded) + 1)]
        if border in begins:
            assert tokens == encoded[begins.index(border) :]
        spaced = [table.index(b" "), *encoded]  # as tokenizers that begin with a space
        if not whole.startswith(b" "):
            assert spelling.align(whole[:border], whole[border:], spaced) == tokens
        assert spelling.spell(spelling.align(whole[:border], whole[border:], [1, 1])) == whole[border:]
        assert spelling.spell(spelling.align(whole[:border], whole[border:], [0, *encoded, 0])) == whole[border:]
