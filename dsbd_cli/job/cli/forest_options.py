"""Options of the method for commands that measure one forest, where `--depth auto` has no place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dsbd_cli.config import DEFAULT_DEPTH
from dsbd_cli.job.cli.declare import option
from dsbd_cli.job.cli.options import METHOD, MethodOptions

__all__ = ["ForestOptions"]


@dataclass(frozen=True)
class ForestOptions(MethodOptions):
    """How beams are drafted and verified, with as many layers in every iteration."""

    depth: Annotated[
        str | None,
        option(METHOD, "--depth", text="D, drafted layers", default=DEFAULT_DEPTH, metavar="D"),
    ] = None
