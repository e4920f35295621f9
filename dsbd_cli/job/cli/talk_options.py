"""Options of what is said on standard error. None means not given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsbd_cli.job.cli.declare import flag, option

__all__ = ["TalkOptions"]

TALK = "Messages"


@dataclass(frozen=True)
class TalkOptions:
    """What is said on standard error."""

    quiet: bool | None = flag(TALK, "nothing on standard error but errors that end the run", "-q")
    log: Literal["brief", "verbose", "json"] | None = option(
        TALK,
        "on standard error, brief: what needs attention and one line a minute; verbose: also settings, failed "
        "rows and a summary; json: the same as JSON lines",
        default="brief",
        metavar="FORM",
    )
