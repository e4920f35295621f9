"""Trial of a grammar: it is compiled in a child process, with limits of memory and time, before this process compiles
it.

llguidance is native code: a grammar that exhausts its stack or the memory would end the process. The child runs this
file as a program, which imports nothing of this package. It reads the grammar's source from its standard input,
compiles it for a vocabulary of bytes and follows it for some bytes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_SECONDS, WALL_SECONDS = 3, 30  # a machine under load gives a child its CPU seconds late
ADDRESS_SPACE = 2 << 30  # bytes
STACK = 4 << 20  # bytes; half of a main thread's, so that what fits into it fits into any thread
BYTES_FOLLOWED = 48
MOST_KNOWN = 4096  # verdicts that are kept
BYTES_END = 256  # the end token of the vocabulary of bytes

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
    command = [sys.executable, "-P", __file__]
    try:
        # a session of its own: a Ctrl-C at the terminal is no fault of the grammar
        done = subprocess.run(
            command,
            input=source.encode(),
            capture_output=True,
            timeout=WALL_SECONDS,
            check=False,
            start_new_session=True,
        )
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


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's clock alone limits it
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def _main() -> None:
    _limit()
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


if __name__ == "__main__":
    _main()
