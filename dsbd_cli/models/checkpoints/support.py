"""The table of how each type of model of transformers runs here, as it was tried by `python -m benchmarks.support`.

No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

TABLE = Path(__file__).with_name("support.tsv")


@dataclass(frozen=True, slots=True)
class Support:
    """How a type of model runs.

    Attributes:
        type: what a config calls `model_type`, with @ and a word where it is a variant of the type.
        reads: text, encoder-decoder, or images or sound (which is tried with text alone).
        runs: decoder (our own), adapted (by the Transformers backend), refused, crash, or not tried.
        exactness: same-text or same-law; empty where it does not run.
        beams: for how many prompts all beams are those of transformers; empty where that was not compared.
        why: the reason why it does not run on our own decoder, or at all.
    """

    type: str
    reads: str
    runs: str
    exactness: str = ""
    beams: str = ""
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the fields, in order."""
        return astuple(self)


def read_table() -> list[Support]:
    """Return all rows, by type."""
    _, _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Support(*line.split("\t")) for line in lines]


def tried_with() -> str:
    """Return the version of transformers whose types the table has."""
    return TABLE.read_text(encoding="utf-8").splitlines()[0].rpartition(" ")[2]


def write_table(rows: Sequence[Support], version: str) -> None:
    """Write all rows. version: of transformers."""
    heading = [f"# transformers {version}", "\t".join(field.name for field in fields(Support))]
    lines = ["\t".join(cell.replace("\t", " ") for cell in row.cells()) for row in rows]
    TABLE.write_text("\n".join([*heading, *lines]) + "\n", encoding="utf-8")
