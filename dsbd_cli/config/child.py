"""Work that may exhaust memory, time or the stack, and is done in a child process with limits of these first.

llguidance is native code: a grammar that exhausts its stack or the memory would end the process. So a grammar is
compiled in a child for a vocabulary of bytes, and followed for some bytes. A schema of others may make the check of a
text take very long, so that some texts are checked in a child. The child runs this file as a program, which imports
nothing of this package.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonschema_rs import Validator
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_SECONDS, WALL_SECONDS = 3, 30  # a machine under load gives a child its CPU seconds late
ADDRESS_SPACE = 2 << 30  # bytes
STACK = 4 << 20  # bytes; half of a main thread's, so that what fits into it fits into any thread
BYTES_FOLLOWED = 48
MOST_KNOWN = 4096  # verdicts that are kept
BYTES_END = 256  # the end token of the vocabulary of bytes
GRAMMAR, TEXTS = "grammar", "texts"  # what a child does: compile a grammar, check texts under a schema
NOT_IN_7 = frozenset(  # keywords that draft 7 would ignore
    "dependentRequired dependentSchemas maxContains minContains prefixItems unevaluatedItems".split()
)

_known: dict[bytes, str | None] = {}


def trial_fault(source: str) -> str | None:
    """Return why a child could not compile this grammar. Return None where it could, or where llguidance refused the
    grammar, which it can then do in this process. Each grammar is tried once. Signals are handled meanwhile."""
    key = hashlib.blake2b(source.encode(), digest_size=16).digest()
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = _tried(source)
    return _known[key]


def _tried(source: str) -> str | None:
    try:
        done = _run_child(GRAMMAR, source.encode())
    except subprocess.TimeoutExpired:
        return f"it was not compiled within {WALL_SECONDS} s"
    if done.returncode == 0:
        return None
    if done.returncode in (-24, -9):  # SIGXCPU, SIGKILL
        return f"to compile it takes more than {CPU_SECONDS} s of processor time, or more memory than there is"
    if done.returncode in (-6, -11):  # SIGABRT, SIGSEGV: no memory, no stack
        return f"to compile it takes more than {ADDRESS_SPACE >> 30} GiB of memory, or more than the stack holds"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"the process that tried to compile it ended with {done.returncode}: {lines[-1][:200] if lines else ''}"


def _run_child(task: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run this file as a program. Raises TimeoutExpired."""
    # a session of its own: a Ctrl-C at the terminal is no fault of what is given
    return subprocess.run(
        [sys.executable, "-P", __file__, task],
        input=given,
        capture_output=True,
        timeout=WALL_SECONDS,
        check=False,
        start_new_session=True,
    )


def parser_limits() -> LLParserLimits:
    """Return limits of what a grammar may take, first to be compiled and then for each token. llguidance reports where
    one is passed."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=100_000,  # 1 to 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def byte_tokenizer() -> LLTokenizer:
    """Return a vocabulary of the 256 bytes and an end token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id, bos_token_id = BYTES_END, None
        special_token_ids = [BYTES_END]  # noqa: RUF012
        tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return LLTokenizer(TokenizerWrapper(Bytes()), eos_token=[BYTES_END])


def _try(source: str) -> None:
    """Compile the grammar and follow it, each time with another of the bytes that may come next."""
    from llguidance import LLMatcher

    limits = parser_limits()
    if LLMatcher.validate_grammar_with_warnings(source, limits=limits)[0]:
        return
    matcher = LLMatcher(byte_tokenizer(), source, log_level=0, limits=limits)
    for turn in range(BYTES_FOLLOWED):
        following = [] if matcher.is_error() else _bytes_of(matcher)
        if not following:
            return
        matcher.consume_token(following[turn % len(following)])


def _bytes_of(matcher: LLMatcher) -> list[int]:
    """Return the bytes that may follow, ascending."""
    mask = matcher.compute_bitmask()
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]


def validator(schema: object) -> Validator:
    """Return a validator of a schema: of the draft that it names, else of 2020-12, or of 7 where it is none of that.
    Nothing is fetched. Raises ValueError for a schema that belongs to neither."""
    from jsonschema_rs import Draft7Validator, ReferencingError, ValidationError, validator_for

    first: Exception | None = None
    for make in (validator_for, *(() if NOT_IN_7 & _keys(schema) else (Draft7Validator,))):
        try:
            made: Validator = make(schema, validate_formats=True, retriever=_retrieve)
        except (ValidationError, ReferencingError, ValueError, TypeError) as error:
            first = first or error
        else:
            return made
    raise ValueError(str(first).partition("\n")[0])


def _keys(node: object) -> set[str]:
    """Return all keys of an object and of those in it."""
    if isinstance(node, list):
        return set().union(*map(_keys, node))
    return set(node).union(*map(_keys, node.values())) if isinstance(node, dict) else set()


def _retrieve(address: str) -> object:
    raise ValueError(f"{address} is outside of the schema")


def holds(by: Validator, text: bytes) -> bool:
    """Return whether a text is JSON that is valid. What cannot be read, or takes too much, is not."""
    try:
        return by.is_valid(json.loads(text))
    except (ValueError, RecursionError):
        return False


def checked_in_child(schema: object, texts: Sequence[str]) -> list[bool]:
    """Return for each text whether it is valid under the schema. One that takes too long is not."""
    try:
        done = _run_child(TEXTS, "\n".join(map(json.dumps, (schema, *texts))).encode()).stdout
    except subprocess.TimeoutExpired as error:
        done = error.stdout or b""
    return [done[index : index + 1] == b"1" for index in range(len(texts))]


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's clock alone limits it
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def _compile_grammar() -> None:
    """Read the source of a grammar, and try it."""
    source = sys.stdin.buffer.read().decode()
    faults: list[BaseException] = []

    def work() -> None:
        try:
            _try(source)
        except BaseException as error:  # the exit status tells the parent
            faults.append(error)

    threading.stack_size(STACK)
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    if faults:
        raise SystemExit(f"{type(faults[0]).__name__}: {faults[0]}")


def _check_texts() -> None:
    """Read a schema and texts, a line of JSON each; write whether each is valid, as 0 and 1."""
    schema, *texts = (json.loads(line) for line in sys.stdin.buffer)
    by = validator(schema)
    for text in texts:
        sys.stdout.write("1" if holds(by, text.encode("utf-8", "surrogateescape")) else "0")
        sys.stdout.flush()


if __name__ == "__main__":
    _limit()
    {GRAMMAR: _compile_grammar, TEXTS: _check_texts}[sys.argv[1]]()
