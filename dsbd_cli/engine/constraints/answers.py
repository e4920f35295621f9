"""Allowed answers, of a file or of a row: tokenised once and compiled into tries.

A catalogue is a set of answers. Its trie holds every answer's tokens and one end token behind them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import orjson
from numpy.typing import NDArray

from dsbd_cli.engine.constraints.trie import Trie, TrieTable, build_trie
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import InvalidRowError, UsageError, shorten

BATCH = 8192  # texts that are tokenised at a time
# Limits of one answer: more tokens than any target has positions for, and text that is not even tokenised
MOST_TOKENS, MOST_LETTERS = 32_768, 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogueAnswer:
    """One allowed answer: its text, or its tokens.

    Attributes:
        place: where it was given, for errors.
        id: the caller's id of it as JSON, empty where it has none.
    """

    place: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    id: bytes = b""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Compiled answers.

    Attributes:
        trie: trie of their tokens.
        nodes: [A] int64, where the answers end in the trie, ascending. order: [A] int64, the answer of each of `nodes`.
        starts: [A + 1] int64. ids: bytes of all ids; those of answer a are from starts[a] to starts[a + 1].
    """

    trie: Trie
    nodes: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.nodes)

    def id_of(self, tokens: Sequence[int]) -> str | int | None:
        """Return the caller's id of the answer with these tokens, its end token included; None where it has none."""
        node = self.trie.find(tokens)
        assert node is not None, "only answers of the catalogue are decoded"
        answer = int(self.order[np.searchsorted(self.nodes, node)])
        data = self.ids[int(self.starts[answer]) : int(self.starts[answer + 1])].tobytes()
        answer_id: str | int | None = orjson.loads(data) if data else None
        return answer_id


class CatalogueCompiler:
    """A compiler of catalogues for one target. end: the end token that closes an answer."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        ends = [token for token in codec.eos_ids if token < vocab_size]
        if not ends:
            raise UsageError("allow needs a target with an end token, but this one has none")
        self.codec, self.vocab_size, self.end = codec, vocab_size, ends[0]

    def compile(self, answers: Iterable[CatalogueAnswer]) -> Catalogue:
        """Compile these answers into a catalogue. Raises InvalidRowError, which names the place of the answer to
        blame."""
        places: list[str] = []
        ids, starts = bytearray(), array("q", [0])
        tokens, lengths = array("q"), array("q")
        left = iter(answers)
        while some := list(islice(left, BATCH)):
            for answer, its_ids in zip(some, self._tokens(some), strict=True):
                tokens.extend(its_ids)
                lengths.append(len(its_ids))
                ids += answer.id
                starts.append(len(ids))
                places.append(answer.place)
        if not places:
            raise InvalidRowError("allow holds no answer")
        trie = build_trie(np.array(tokens, dtype=np.int64), np.array(lengths, dtype=np.int64), self.vocab_size)
        order = np.argsort(trie.last, kind="stable")
        nodes = trie.last[order]
        if (same := np.flatnonzero(nodes[1:] == nodes[:-1])).size:
            first, second = sorted(order[same[0] : same[0] + 2].tolist())
            raise InvalidRowError(f"{places[second]} has the same tokens as {places[first]}: drop one of them")
        return Catalogue(
            trie, nodes, order, np.array(starts, dtype=np.int64), np.frombuffer(bytes(ids), dtype=np.uint8)
        )

    def _tokens(self, answers: Sequence[CatalogueAnswer]) -> Iterator[list[int]]:
        """Yield the tokens of each answer, with the end token. Raises InvalidRowError."""
        for answer in answers:
            if (size := len(answer.text or "")) > MOST_LETTERS:
                raise InvalidRowError(f"{answer.place} has {size} letters, but an answer may have {MOST_LETTERS}")
        texts = [answer.text for answer in answers if answer.text is not None]
        try:
            encoded = iter(self.codec.encode_pieces(texts)) if texts else iter(())
        except InvalidRowError as error:
            raise InvalidRowError(f"{answers[0].place} or a later one: {error}") from error
        table = self.codec.token_bytes()
        ends = set(self.codec.eos_ids)
        for answer in answers:
            if answer.text is not None:
                ids = next(encoded)
                spelled = b"".join([table[token] for token in ids])
                wanted = answer.text.encode("utf-8", "surrogatepass")
                # some tokenizers begin every text with a space, which their decoder takes away
                if spelled != wanted and spelled.lstrip(b" ") != wanted.lstrip(b" "):
                    raise InvalidRowError(
                        f"{answer.place} is {shorten(answer.text)}, but the target's tokenizer can only say "
                        f"{shorten(spelled.decode(errors='replace'))}"
                    )
            else:
                ids = list(answer.tokens or ())
                ids = ids[:-1] if ids and ids[-1] in ends else ids
            if len(ids) > MOST_TOKENS:
                raise InvalidRowError(f"{answer.place} has {len(ids)} tokens, but an answer may have {MOST_TOKENS}")
            if not ids:
                raise InvalidRowError(f"{answer.place} is empty, but an answer needs one token or more")
            if bad := [token for token in ids if token in ends or not 0 <= token < self.vocab_size]:
                why = "where decoding ends" if bad[0] in ends else f"but the target has {self.vocab_size} ids"
                raise InvalidRowError(f"{answer.place} holds token id {bad[0]}, {why}")
            yield [*ids, self.end]


class RowTries:
    """Tries of the table that are in use: those of the run's catalogues always, a row's own one while the row runs."""

    def __init__(self, table: TrieTable, catalogues: Iterable[Catalogue]) -> None:
        self.table = table
        catalogues = list(catalogues)
        count, size = sum(map(len, catalogues)), sum(catalogue.trie.keys.nbytes for catalogue in catalogues)
        self.about = f"{count} answer{'' if count == 1 else 's'} allowed ({size / 2**20:.1f} MiB)" if count else None
        self._kept = {id(catalogue): table.add(catalogue.trie) for catalogue in catalogues}
        self._own: set[int] = set()

    def begin(self, catalogue: Catalogue) -> int:
        """Return the state in which a row with these answers begins."""
        if (start := self._kept.get(id(catalogue))) is None:
            start = self.table.add(catalogue.trie)
            self._own.add(start)
        return start

    def end(self, start: int) -> None:
        """Remove the trie of a row that is done, unless it is that of a run's catalogue. start: the state in which the
        row began."""
        if start in self._own:
            self._own.remove(start)
            self.table.remove(start)

    def forget(self) -> None:
        """Remove the tries of all rows, because none runs."""
        for start in tuple(self._own):
            self.end(start)
