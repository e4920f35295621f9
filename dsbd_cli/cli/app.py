"""The command `dsbd`, and the one place where an error becomes a line on standard error and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from dsbd_cli._version import __version__
from dsbd_cli.cli.commands.bench import bench
from dsbd_cli.cli.commands.demo import demo
from dsbd_cli.cli.commands.distill import distill
from dsbd_cli.cli.commands.doctor import doctor
from dsbd_cli.cli.commands.generate import generate
from dsbd_cli.cli.commands.index import index
from dsbd_cli.cli.commands.lists import app as models_app
from dsbd_cli.cli.commands.lists import schema
from dsbd_cli.cli.commands.merge import merge
from dsbd_cli.cli.commands.pick import pick
from dsbd_cli.cli.commands.profile import profile
from dsbd_cli.cli.commands.trim import trim_draft
from dsbd_cli.cli.options.declare import Command, Group
from dsbd_cli.cli.run.messages import error_line, say, set_style
from dsbd_cli.cli.run.signals import StoppedError
from dsbd_cli.config.checking import check_processor
from dsbd_cli.errors import DsbdError, OutputError, UsageError, denial
from dsbd_cli.io.lines.jsonl import OUTPUT_CLOSED, ClosedOutputError

INTERRUPTED = 130
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # without a file name: standard output cannot be written
DEBUG = "--debug"
STOPPED = "stopped before there was a result"

app = typer.Typer(name="dsbd", cls=Group, pretty_exceptions_enable=False)
for command in (demo, generate, pick, merge, bench, profile, doctor, index, distill, trim_draft, schema):
    app.command(command.__name__.replace("_", "-"), cls=Command)(command)
app.add_typer(models_app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsbd {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="show the version", callback=_version, is_eager=True, metavar=""),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="show the traceback of an error; also DSBD_DEBUG=1", metavar="")
    ] = False,
) -> None:
    """Beam search and beam sampling from language models, sped up by a draft model, with unchanged output.

    Exit codes: 0 all rows answered, 1 the run failed, 2 wrong usage, 3 some rows failed, 129, 130 or 143 stopped, 141
    nobody reads the records any more.
    """
    check_processor()
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are caught here and printed."""
    set_style()
    try:
        code = typer.main.get_command(app).main(
            [word for word in arguments if word != DEBUG],  # it may stand anywhere
            prog_name="dsbd",
            standalone_mode=False,
            obj=list(arguments),
        )
        if code == INTERRUPTED:  # the parser has caught a KeyboardInterrupt
            say(STOPPED, level="error")
        return code if isinstance(code, int) else 0
    except ClosedOutputError:
        _drop_output()
        return OUTPUT_CLOSED
    except BrokenPipeError:
        _drop_output()
        return 0
    except SystemExit as ended:
        # the parser exits like this if nobody reads its text any more
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        _drop_output()
        return 0
    except DsbdError as error:
        if isinstance(error, OutputError):
            _drop_output()
        return _report(str(error), error.exit_code, arguments)
    except typer.TyperException as error:
        hint = f" ({_help(error, arguments)})" if error.exit_code == 2 else ""
        return _report(f"{error.format_message().rstrip('.')}{hint}", error.exit_code, arguments)
    except StoppedError as stopped:
        if stopped.early:
            say(STOPPED, level="error")
        return stopped.exit_code
    except (KeyboardInterrupt, typer.Abort):
        say(STOPPED, level="error")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in UNWRITTEN:
            _drop_output()
            return _report(f"cannot write standard output: {error.strerror}", 1, arguments)
        if (line := denial(error)) is not None:
            return _report(line, UsageError.exit_code, arguments)
        detail = f"{type(error).__name__}: {error}".rstrip(": ")
        return _report(f"{detail} (unexpected; dsbd --debug shows the traceback)", 1, arguments)


def _help(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Return a hint that names the page with the options, or with the commands."""
    context = getattr(error, "ctx", None)  # of the command that was reached, if any
    if context is not None and context.parent is not None:
        return f"{context.command_path} --help lists the options"
    names = {item.name for item in app.registered_commands} | {item.name for item in app.registered_groups}
    command = next((word for word in arguments if not word.startswith("-")), None)
    return f"dsbd {command} --help lists the options" if command in names else "dsbd --help lists the commands"


def _report(message: str, code: int, arguments: Sequence[str]) -> int:
    if DEBUG in arguments or os.environ.get("DSBD_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
    error_line(message)
    return code


def _drop_output() -> None:
    """Point standard output at the null device, because the interpreter flushes it at its end and would fail once
    more."""
    with contextlib.suppress(OSError, AttributeError):
        number = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def main() -> NoReturn:
    """Run the command line of this process. All that it prints is UTF-8, as its files are, whatever the locale is.
    Names of files keep their bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.exit(run(sys.argv[1:]))
