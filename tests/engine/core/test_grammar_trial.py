"""Grammars that are compiled in a child process first: which, what becomes of the child, and that signals are heard."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsbd_cli.config import child as child_module
from dsbd_cli.config import grammars
from dsbd_cli.config.child import trial_fault
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.errors import UsageError

PRIMES = (7, 11, 13, 17, 19, 23)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that would be tried in a child."""
    sources: list[str] = []
    monkeypatch.setattr(grammars, "trial_fault", sources.append)
    return sources


@pytest.fixture
def nothing_known() -> Iterator[None]:
    child_module._known.clear()
    yield
    child_module._known.clear()


def test_a_schema_that_explodes_is_an_error(nothing_known: None) -> None:
    """The states of its number are the product of six primes. The child comes to an end, this process goes on."""
    grammar = Grammar.json_schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]})
    with pytest.raises(UsageError, match="to compile it takes more than"):
        grammar.source()


CHEAP = [
    Grammar.json_object(),
    Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 99}}}),
    Grammar.json_schema({"$defs": {"A": {"type": "object"}}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}),
    Grammar.regex("[a-z]{1,20}@[a-z]+"),
    Grammar.lark('start: "a" ("b" | "c")+'),
]
COSTLY = [
    Grammar.json_schema({"type": "integer", "multipleOf": 7}),
    Grammar.json_schema({"type": "string", "maxLength": 100_000}),
    Grammar.json_schema({"type": "string", "pattern": "(a|b)*"}),
    Grammar.json_schema({"enum": ["a" * 30_000]}),
    Grammar.regex("((a{1,90}){1,90}){1,90}"),
    Grammar.regex("a" * 300),
    Grammar.lark("start: /a/ & /b/"),
]


@pytest.mark.parametrize("grammar", CHEAP, ids=str)
def test_an_ordinary_grammar_needs_no_child(grammar: Grammar, tried: list[str]) -> None:
    grammar.source()
    assert tried == []


@pytest.mark.parametrize("index", range(len(COSTLY)))
def test_one_that_may_cost_much_is_tried(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "trial_fault", lambda source: "it was tried")
    with pytest.raises(UsageError, match="it was tried"):
        COSTLY[index].source()


def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    path = tmp_path / "child.py"
    path.write_text(f"import os, signal, sys, time\n{program}\n")
    monkeypatch.setattr(child_module, "__file__", str(path))


ENDINGS = [
    ("pass", None),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "more than the stack holds"),
    ("os.abort()", "GiB of memory"),
    ("os.kill(os.getpid(), signal.SIGXCPU)", "of processor time"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "of processor time"),
    ("sys.exit('something else')", "ended with 1: something else"),
]


@pytest.mark.parametrize(("program", "told"), ENDINGS)
def test_how_a_child_ends_is_told(
    program: str, told: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_known: None
) -> None:
    child(monkeypatch, tmp_path, program)
    fault = trial_fault("source")
    assert fault is None if told is None else told in str(fault)


def test_each_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_known: None) -> None:
    child(monkeypatch, tmp_path, f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    for source in ("a", "b", "a", "b"):
        assert trial_fault(source) is None
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_signal_is_heard_while_a_child_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_known: None
) -> None:
    """The child ends when the handler has run, and not before."""
    heard = tmp_path / "heard"
    child(
        monkeypatch,
        tmp_path,
        f"os.kill(os.getppid(), signal.SIGTERM)\nwhile not os.path.exists({str(heard)!r}): time.sleep(0.01)",
    )
    before = signal.signal(signal.SIGTERM, lambda *_: heard.touch())
    try:
        assert trial_fault("source") is None
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard.exists()


def test_the_child_imports_nothing_of_this_package() -> None:
    source = Path(child_module.__file__).read_text()
    assert "import dsbd_cli" not in source
    assert "from dsbd_cli" not in source
    assert os.path.basename(child_module.__file__) == "child.py"
