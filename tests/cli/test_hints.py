"""A usage error says where the options of this very command are listed."""

from __future__ import annotations

import pytest

from dsbd_cli.cli import app

CASES = {
    "generate --nope": "dsbd generate --help lists the options",
    "bench --nope": "dsbd bench --help lists the options",
    "profile --nope": "dsbd profile --help lists the options",
    "doctor --nope": "dsbd doctor --help lists the options",
    "models add one": "dsbd models add --help lists the options",
    "index": "dsbd index --help lists the options",
    "models nope": "dsbd models --help lists the options",
    "nope": "dsbd --help lists the commands",
    "--nope": "dsbd --help lists the commands",
}


@pytest.mark.parametrize(("words", "hint"), CASES.items(), ids=list(CASES))
def test_hint(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(words.split()) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
