"""Records: input lines to rows, rows and results to output lines.

In   `RowReader.read` and `read_text`: JSON rows, lines of an OpenAI batch file, plain text.
Out  `native_record` (dsbd.output/1), `openai_record` (an OpenAI batch output line), `text_record`; `step_records`
     (dsbd.step/1, one per iteration).
"""

from __future__ import annotations

from dsbd_cli.job.records.forms import ROW_FIELDS
from dsbd_cli.job.records.native import native_record, step_records, text_record
from dsbd_cli.job.records.openai import openai_record
from dsbd_cli.job.records.output import MethodRecord, fingerprint_difference, row_error, run_fingerprint
from dsbd_cli.job.records.reader import RowReader
from dsbd_cli.job.records.row import LongLine, Row

__all__ = [
    "ROW_FIELDS",
    "LongLine",
    "MethodRecord",
    "Row",
    "RowReader",
    "fingerprint_difference",
    "native_record",
    "openai_record",
    "row_error",
    "run_fingerprint",
    "step_records",
    "text_record",
]
