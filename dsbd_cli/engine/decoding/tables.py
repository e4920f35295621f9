"""Tables on the device that say what the rows' answers may hold and where they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from dsbd_cli.engine.constraints.answers import Catalogue, RowTries
from dsbd_cli.engine.constraints.grammar import GrammarCompiler, GrammarTable
from dsbd_cli.engine.constraints.legal import Constraint
from dsbd_cli.engine.constraints.stops import StopTable
from dsbd_cli.engine.constraints.token_rules import RuleTable
from dsbd_cli.engine.constraints.trie import TrieTable
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.protocols import TextCodec


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Stop strings and end tokens, allowed answers, token rules and grammars of the rows, one table of each for all.

    Attributes:
        endings: the checkpoint's end tokens and the automaton of `stops`.
    """

    stops: StopTable
    tries: RowTries
    rules: RuleTable
    grammars: GrammarTable
    endings: Endings

    @classmethod
    def empty(
        cls,
        codec: TextCodec,
        vocab_size: int,
        catalogues: Mapping[str, Catalogue],
        device: torch.device,
    ) -> RequestTables:
        """Return tables without rows."""
        eos = {token for token in codec.eos_ids if token < vocab_size}
        special = partial(codec.token_bytes, skip_special_tokens=False)
        stops = StopTable(codec.token_bytes(), vocab_size, device, eos, special)
        return cls(
            stops=stops,
            tries=RowTries(TrieTable(vocab_size, device), catalogues.values()),
            rules=RuleTable(stops.eos, getattr(codec, "timestamps", None)),
            grammars=GrammarTable(GrammarCompiler(codec, vocab_size), device),
            endings=Endings(stops),
        )

    @property
    def constraints(self) -> list[Constraint]:
        """All constraints that may limit the tokens after a path."""
        return [self.rules, self.tries.table, self.grammars]
