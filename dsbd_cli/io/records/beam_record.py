"""Flat records, one line or table row per beam, which can be joined with other tables by the id."""

from __future__ import annotations

import csv
import io

import orjson

from dsbd_cli.config.variants import BEAM_COLUMNS
from dsbd_cli.io.records.record_parts import MethodRecord, calls_text, row_error
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.requests import RequestResult


def csv_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the CSV lines of a row, one per beam, without the last line end; one line with the error for a failed
    row."""
    text = io.StringIO()
    # with this terminator csv quotes a cell that holds \r or \n
    writer = csv.DictWriter(text, BEAM_COLUMNS, lineterminator="\r\n")
    lines = []
    for beam in _beams(row, result):
        writer.writerow(beam)
        lines.append(text.getvalue().removesuffix("\r\n"))
        text.seek(0)
        text.truncate()
    return "\n".join(lines).encode()


def parquet_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the same rows as a JSON list, which the writer of the Parquet file puts into columns."""
    return orjson.dumps(_beams(row, result))


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
