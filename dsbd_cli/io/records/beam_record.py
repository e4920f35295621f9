"""Flat records, one line or table row per beam, which can be joined with other tables by the id."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

import orjson

from dsbd_cli.config.variants import BEAM_COLUMNS
from dsbd_cli.io.records.record_parts import CarriedColumn, MethodRecord, calls_text, row_error
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.requests import RequestResult


def csv_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the CSV lines of a row, one per beam, without the last line end; one line with the error for a failed
    row."""
    carried = _carried(row, method.carried)
    return b"\n".join(
        [
            csv_line(
                [beam.get(name) for name in BEAM_COLUMNS]
                + [None if value is None else _text(value) for value in carried]
            )
            for beam in _beams(row, result)
        ]
    )


def csv_line(cells: Iterable[object]) -> bytes:
    """Return a line of CSV without its line end."""
    text = io.StringIO()
    # with this terminator csv quotes a cell that holds \r or \n
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n").encode()


def parquet_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the same rows as a JSON list, which the writer of the Parquet file puts into columns."""
    columns, values = method.carried, _carried(row, method.carried)
    cells = {
        column.name: value if column.kind is not None or value is None else _text(value)
        for column, value in zip(columns, values, strict=True)
    }
    return orjson.dumps([beam | cells for beam in _beams(row, result)])


def carried_columns(names: Iterable[str], kinds: Mapping[str, str]) -> tuple[CarriedColumn, ...]:
    """Return the columns of an input table that an output table has behind its own. One that has the name of another
    column gets `input_` in front. kinds: types of numbers and booleans, by name."""
    sources, columns = list(names), list[CarriedColumn]()
    taken = {*BEAM_COLUMNS, *sources}
    for source in sources:
        name = source
        while name in BEAM_COLUMNS or (name != source and name in taken):
            name = f"input_{name}"
        taken.add(name)
        columns.append(CarriedColumn(name, source, kinds.get(source)))
    return tuple(columns)


def _carried(row: Row, columns: Sequence[CarriedColumn]) -> list[object]:
    """Return the cells of a row that its table's columns give; None for all of a row that cannot be read."""
    metadata = row.metadata if isinstance(row.metadata, dict) else {}
    return [metadata.get(column.source) for column in columns]


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _beams(row: Row, result: RequestResult | None) -> list[Fields]:
    """Return the fields of every reported beam by BEAM_COLUMNS, best first (rank 1); for a failed row its id and the
    error."""
    error = row_error(row, result)
    if error is not None or result is None:
        return [{"id": row.id, "error": str(error)}]
    return [
        {
            "id": row.id,
            "rank": rank,
            "answer_id": None if beam.answer_id is None else str(beam.answer_id),
            "text": beam.text,
            "logprob": beam.logprob,
            "score": beam.score,
            "reasoning": beam.reasoning,
            "tool_calls": calls_text(beam),
        }
        for rank, beam in enumerate(result.hypotheses, start=1)
    ]
