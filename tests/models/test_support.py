"""The table of how types of models run: it has the types of the installed transformers, and its column `runs` says of
our own decoder what the decoder says of the same configs."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.support import OTHERS, TRIED, tiny_config, types
from dsbd_cli.models.checkpoints import support
from dsbd_cli.models.checkpoints.support import Support, read_table, tried_with, write_table
from dsbd_cli.models.decoder.families import FAMILIES, decoder_config_of

AGAIN = "python -m benchmarks.support"
ROWS = {row.type: row for row in read_table()}


@pytest.mark.skipif(tried_with() != transformers.__version__, reason="the table is of another transformers")
def test_all_types_of_transformers_are_there() -> None:
    variants = {name for name in OTHERS if "@" in name}
    assert ROWS.keys() == types().keys() | variants, AGAIN
    assert [*ROWS] == sorted(ROWS)
    assert {row.runs for row in ROWS.values()} <= {"decoder", "adapted", "refused", "crash", "not tried"}
    assert all(
        row.exactness in ("same-text", "same-law") for row in ROWS.values() if row.runs in ("decoder", "adapted")
    )


@pytest.mark.skipif(tried_with() != transformers.__version__, reason="the table is of another transformers")
@pytest.mark.parametrize("reads", ["text", "images or sound"])
def test_our_own_decoder_runs_the_types_that_it_knows(reads: str) -> None:
    """Guards a table that was not made again after a family was added, or its settings changed."""
    run = {kind: row for kind, row in ROWS.items() if row.reads == reads and row.runs in ("decoder", "adapted")}
    known = [kind for kind, row in run.items() if not row.why.startswith(TRIED)]
    ours = {kind for kind in known if not isinstance(decoder_config_of(tiny_config(kind)), str)}
    differ = sorted(ours ^ {kind for kind in known if ROWS[kind].runs == "decoder"})
    assert not differ, f"{AGAIN} {' '.join(differ)}"


def test_every_family_of_our_own_decoder_is_tried() -> None:
    parts = {
        tiny_config(kind).get_text_config(decoder=True).model_type
        for kind, row in ROWS.items()
        if row.runs == "decoder"
    }
    assert parts == FAMILIES


def test_a_table_is_read_as_it_was_written(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Support("a", "text", "decoder", "same-text", "3/3"), Support("b@c", "text", "refused", why="its d is e")]
    monkeypatch.setattr(support, "TABLE", tmp_path / "table.tsv")  # type: ignore[operator]
    write_table(rows, "5.0")
    assert read_table() == rows
    assert tried_with() == "5.0"
