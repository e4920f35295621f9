"""Lines and documents that any process of the suite writes, and rows that it reads, held against their JSON schemas.

All that is written passes through a method of `Contract`, and all rows through `RowReader.read`. Both are
wrapped as soon as their modules are imported. What does not fit goes to a file, into which tests/conftest.py looks
after every test: an exception could end as a failed row that nobody reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS_FILE = "TESTS_FAULTS_FILE"  # name of the variable that names the file
MOST_FAULTS = 5


class _Watch(MetaPathFinder):
    """Finds the modules as they are found anyway, and wraps what they define."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        wrap = WRAPPED.get(name)
        spec = None if wrap is None else PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or wrap is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            wrap(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Watch this process from here on; modules that are imported already, too. A second call changes nothing."""
    if any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watch())
    for name, wrap in WRAPPED.items():
        if name in sys.modules:
            wrap(sys.modules[name])


def _wrap_contracts(module: ModuleType) -> None:
    def checked(write: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(write)
        def written(contract: Any, fields: object) -> Any:
            text = write(contract, fields)
            if not (isinstance(fields, dict) and "$schema" in fields):  # dsbd schema itself
                line = text if isinstance(text, bytes) else text.encode()
                _check(contract.name, line, _parsed(line))
            return text

        return written

    module.Contract.line = checked(module.Contract.line)
    module.Contract.text_line = checked(module.Contract.text_line)
    module.Contract.page = checked(module.Contract.page)


def _wrap_reader(module: ModuleType) -> None:
    read = module.RowReader.read

    @wraps(read)
    def checked(reader: Any, line: Any, *, index: int, number: int) -> Any:
        row = read(reader, line, index=index, number=number)
        if row.error is None:
            text = module.readable(line)
            fields = _parsed(text)
            if not module.parsed_row(fields).unused:
                _check("input", text, fields)
        return row

    module.RowReader.read = checked


WRAPPED = {
    "dsbd_cli.io.schemas.contracts": _wrap_contracts,
    "dsbd_cli.io.records.reader": _wrap_reader,
}


def _parsed(line: bytes) -> Any:
    """Return what a line holds that is known to be JSON."""
    import orjson  # not before the process has imported what it watches

    return orjson.loads(line)


@cache
def _validator(name: str) -> Any:
    import jsonschema_rs

    from dsbd_cli.io.schemas.contracts import CONTRACTS

    return jsonschema_rs.validator_for(CONTRACTS[name].schema())


def faults(name: str, value: object) -> list[str]:
    """Return where what a line holds does not fit its schema, and why; of several forms that it may have, for each."""
    if _validator(name).is_valid(value):
        return []
    messages: list[str] = []
    errors = list(_validator(name).iter_errors(value))
    while errors and len(messages) < MOST_FAULTS:
        error = errors.pop(0)
        forms = getattr(error.kind, "context", None)
        if forms:
            errors += [error for form in forms for error in form]
        else:
            messages.append(f"{'.'.join(map(str, error.instance_path)) or 'line'}: {error.message[:300]}")
    return messages


def _check(name: str, text: bytes, value: object) -> None:
    """Note what does not fit. value: what the text holds."""
    messages = faults(name, value)
    if messages and FAULTS_FILE in os.environ:
        shown = text[:300].decode(errors="replace")
        with Path(os.environ[FAULTS_FILE]).open("a", encoding="utf-8") as stream:
            stream.write(f"not as `dsbd schema {name}` says: {'; '.join(messages)}\n    {shown}\n")
