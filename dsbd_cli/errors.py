"""The exception tree of dsbd.

DsbdError                       exit 1: the run failed
├── UsageError                  exit 2: options or configuration that cannot be used
├── ModelError                  a checkpoint cannot be used (missing, unfit, mismatched)
│   ├── ModelNotFoundError      no such alias, folder or cached hub id
│   ├── UnsupportedModelError   loads, but cannot hold a tree of nodes
│   └── PairError               target and draft do not fit together
├── RowError                    one input row cannot be answered; the others go on (exit 3)
│   ├── InvalidRowError         the row is not valid JSON or has a bad field
│   ├── PromptTooLongError      prompt + new tokens exceed the model's positions
│   ├── NumericalError          the model produced NaN for this row
│   ├── OutOfMemoryRowError     the row does not fit into memory even alone
│   └── WorkerLostError         several workers died while they held the row
├── NoWorkersError              no worker is left, or the Ray that holds them has died
└── OutputError                 a result could not be written

Every message is one line, names the offending value and says what to do.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# messages of errors that are no OutOfMemoryError: of the processor's allocator, the CUDA driver and triton, cuBLAS
NO_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
MAX_SHOWN = 60  # characters of a value in a message
MAX_NAMES = 8  # of a list in a message
MAX_REASON = 200  # characters of another library's message
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)  # the system refuses a name
KINDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false"}
KINDS |= {str: "a string", list: "a list", dict: "an object"}


class _JsonRepr(reprlib.Repr):
    """A repr that writes values as JSON, TOML and the command line do, not as Python does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN
        self.maxlist = self.maxtuple = self.maxdict = 4

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802
        return "null"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 10_000:  # Python refuses to write thousands of digits
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)

    def repr_tuple(self, value: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(value), level)


_json_repr = _JsonRepr()


def one_line(error: BaseException) -> str:
    """Return another library's message as one line of at most MAX_REASON characters, or the error's type if it has
    none. The message of a KeyError is the key alone, so that its type stands before it."""
    kind = "KeyError: " if isinstance(error, KeyError) else ""
    return (kind + " ".join(str(error).split()))[:MAX_REASON] or type(error).__name__


def shorten(value: object) -> str:
    """Return a value as an error message shows it: one line, at most MAX_SHOWN characters. This is cheap for any
    value."""
    text = repr(value[:MAX_SHOWN]) if isinstance(value, str) else " ".join(_json_repr.repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def shown_names(names: Sequence[str]) -> str:
    """Return names as an error message lists them: the first MAX_NAMES, and how many there are if there are more."""
    shown = ", ".join(name[:MAX_SHOWN] for name in names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown}, .. ({len(names)} in all)"


MOST_INTEGER = 2**31 - 1  # of any setting


def shown_name(name: str) -> str:
    """Return a name for a message, shortened and in quotes where it is no word."""
    return name if name.isidentifier() else shorten(name)


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8: half a surrogate pair cannot."""
    return text.isascii() or text.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def as_utf8(text: str) -> str:
    """Return a path or a command line for a report, with U+FFFD for bytes that are not UTF-8."""
    return os.fsencode(text).decode("utf-8", "replace")


# seldom used options, which have no name of their own on the command line: `--set NAME=VALUE`
SETTINGS = (
    "chat_template",
    "chat_template_kwargs",
    "columns",
    "early_stopping",
    "gpu",
    "index",
    "length_penalty",
    "log",
    "max_errors",
    "memory_saving",
    "min_p",
    "numerics",
    "on_too_long",
    "order",
    "prefix",
    "reasoning",
    "require_valid",
    "schema",
    "source_lang",
    "stats",
    "summary",
    "target_lang",
    "tensor_parallel",
    "token_logprobs",
    "token_rules",
    "tokenizer",
    "warp_scope",
    "width",
)


def option_name(field: str) -> str:
    """Return a field's name on the command line: --num-beams for num_beams, --else for else_, --set min-p for min_p."""
    return ("--set " if field in SETTINGS else "--") + field.rstrip("_").replace("_", "-")


def plural(count: object, name: str) -> str:
    """Return a count with its noun: 1 record, 2 records."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


class DsbdError(Exception):
    """Base class of every error that a user can cause. `exit_code` is the exit code of the command."""

    exit_code = 1


class UsageError(DsbdError):
    """Options that are malformed, out of range or contradict each other.

    Where one field is to blame, `field` and `value` hold its name and its value, and the message begins with the
    field's name. `expected` describes an accepted value, where it can be described.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, expected: str | None = None
    ) -> None:
        super().__init__(message)
        assert field is None or message.startswith(field)
        self.field, self.value, self.expected = field, value, expected

    def typed(self, names: Mapping[str, str]) -> str:
        """Return the message with the field's name replaced by the name that the user types. names: typed names, by
        field. The message stays as it is where the field is not among them."""
        if self.field is None or self.field not in names:
            return str(self)
        return names[self.field] + str(self).removeprefix(self.field)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors that occur while a file is read into UsageErrors. what: the file as the user named it, as in `--input
    x.jsonl`. Raises UsageError where it cannot be read, or is not UTF-8 where text is expected."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} cannot be read: it is not UTF-8") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors that occur while a file or a folder is written into OutputErrors."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation. torch's class is known by its name, because torch is not imported
    here."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in NO_MEMORY)


def require_package(wanted_by: str, package: str, extra: str) -> None:
    """Raise UsageError where a package that comes with an extra of this one is missing. wanted_by: what needs it."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{wanted_by} needs {package}: pip install 'dsbd[{extra}]'")


def denial(error: BaseException) -> str | None:
    """Return a line about a file that the system refuses, such as one in a folder that the user may not enter; None
    for other errors."""
    if not isinstance(error, OSError) or error.filename is None or error.errno not in DENIED:
        return None
    return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}"


class ModelError(DsbdError):
    """A checkpoint cannot be used."""


class ModelNotFoundError(ModelError):
    """No alias, folder or cached hub repository has this name."""


class UnsupportedModelError(ModelError):
    """The model cannot verify a forest, because its attention or its positions depend on the slot, not on the depth."""


class PairError(ModelError):
    """Target and draft do not share a vocabulary."""


class RowError(DsbdError):
    """One input row failed; the run goes on and ends with exit code 3."""

    exit_code = 3


class InvalidRowError(RowError):
    """The line is not JSON, or a field has a wrong type, a wrong value or an unknown name."""


class PromptTooLongError(RowError):
    """Prompt plus new tokens do not fit the model's positions."""


class NumericalError(RowError):
    """The model returned NaN or infinite logits for this row."""


class OutOfMemoryRowError(RowError):
    """The row does not fit into the device's memory even alone."""


class WorkerLostError(RowError):
    """Several workers died while they held this row, the last one with no other row."""


class NoWorkersError(DsbdError):
    """No worker is left to answer the rows. Those that are answered stay, and the run can be resumed."""


class OutputError(DsbdError):
    """A record could not be written; what was written before stays valid."""
