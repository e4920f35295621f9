"""A trie of what transformers' `prefix_allowed_tokens_fn` allows, where that is a finite set of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsbd_cli.engine.constraints.answers import Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import UsageError

MOST_NODES = 100_000  # of one prompt's trie

Allowed = Callable[[int, Tensor], Sequence[int]]


def sequences_of(
    allowed: Allowed, ids: Tensor, eos: Sequence[int], most: int
) -> tuple[list[list[tuple[int, ...]]], int]:
    """Return the sequences that each prompt allows, without their end token, and that token.

    ids: [B, T], as transformers hands them to the function, padding included. most: tokens of a sequence at most, its
    end included. The function is called along every path that it allows. Raises UsageError where these are too many, do
    not end, or end with different tokens.
    """
    every, ends = [], set[int]()
    for row, prompt in enumerate(ids):
        sequences, nodes = list[tuple[int, ...]](), 0
        paths: list[tuple[int, ...]] = [()]
        while paths:
            path = paths.pop()
            tokens = torch.cat((prompt, prompt.new_tensor(path))) if path else prompt
            for token in dict.fromkeys(int(token_id) for token_id in allowed(row, tokens)):
                nodes += 1
                if token in eos:
                    ends.add(token)
                    sequences.append(path)
                elif len(path) + 1 < most:
                    paths.append((*path, token))
                else:
                    raise _refused(f"it allows {most} tokens (max_new_tokens) without an end token")
            if nodes > MOST_NODES:
                raise _refused(f"it allows more than {MOST_NODES} beginnings of a sequence")
        if not sequences or not all(sequences):
            raise _refused("it allows no sequence" if not sequences else "it allows an end token at once")
        every.append(sequences)
    if len(ends) > 1:
        raise _refused(f"its sequences end with different tokens ({', '.join(map(str, sorted(ends)))})")
    return every, ends.pop()


def compiled(
    sequences: list[list[tuple[int, ...]]], codec: TextCodec, vocabulary: int
) -> tuple[list[str], dict[str, Catalogue]]:
    """Return the name of each prompt's catalogue, and the catalogues by name. Equal ones are shared."""
    compiler = CatalogueCompiler(codec, vocabulary)
    names: dict[frozenset[tuple[int, ...]], str] = {}
    made: dict[str, Catalogue] = {}
    chosen = []
    for some in sequences:
        name = names.setdefault(frozenset(some), f"prompt {len(names)}")
        if name not in made:
            made[name] = compiler.compile(
                CatalogueAnswer(f"sequence {index}", tokens=sequence) for index, sequence in enumerate(some)
            )
        chosen.append(name)
    return chosen, made


def _refused(reason: str) -> UsageError:
    return UsageError(
        f"prefix_allowed_tokens_fn is no trie that can be compiled: {reason}; it must allow a finite set of sequences"
    )
