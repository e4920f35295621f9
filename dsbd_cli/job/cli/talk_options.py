"""Options of what is said on standard error. None means not given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dsbd_cli.job.cli.declare import flag

__all__ = ["TalkOptions"]

TALK = "Messages"


@dataclass(frozen=True)
class TalkOptions:
    """What is said on standard error."""

    quiet: Annotated[
        bool | None, flag(TALK, "--quiet", "-q", text="nothing on standard error but errors that end the run")
    ] = None
    verbose: Annotated[bool | None, flag(TALK, "--verbose", "-v", text="settings, failed rows and a summary")] = None
    log_json: Annotated[bool | None, flag(TALK, "--log-json", text="JSON lines on standard error, one a minute")] = None
    debug: Annotated[bool | None, flag(TALK, "--debug", text="show the traceback of an error; also DSBD_DEBUG=1")] = (
        None
    )
