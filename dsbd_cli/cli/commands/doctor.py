"""`dsbd doctor`: a check of every part on this machine, for people and for issue reports."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

from dsbd_cli.cli.options.declare import grouped, switch
from dsbd_cli.cli.options.options import (
    MAIN,
    PIPED,
    DeviceOptions,
    LoadOptions,
    MethodOptions,
    PairOptions,
    SamplingOptions,
)
from dsbd_cli.cli.options.settings import run_settings
from dsbd_cli.cli.run.messages import utc_now
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.io.schemas.contracts import DOCTOR

if TYPE_CHECKING:
    from dsbd_cli.lab.profiling.checkup import Check

COLUMNS = 80
SECONDS = 10.0  # for measuring the speed
STATES = {"ok": "ok", "note": "note", "off": "off", "broken": "BROKEN"}


@dataclass(frozen=True)
class DoctorOptions:
    """Options of how the result is printed."""

    json: bool = switch(MAIN, "print one JSON document in place of the lines")


@partial(grouped, elsewhere=PIPED)
def doctor(pair: PairOptions, loading: LoadOptions, wanted: DoctorOptions) -> None:
    """Try every part on this machine and say what runs how: versions, devices, models, exactness, memory, speed.

    Half a minute with the built-in pair. Nothing is fetched: for a pair that is not on this machine yet, the tokenizers
    and configs are enough to say whether it fits. Paste the output into an issue.

    Exit codes: 0 nothing is broken, 1 something is.
    """
    settings = run_settings(pair, MethodOptions(), SamplingOptions(), DeviceOptions(**vars(loading)))
    from dsbd_cli.lab.profiling.checkup import check_up

    if not wanted.json:
        typer.echo(f"dsbd doctor, {utc_now()}\n")
    results = []
    # libraries turn a KeyboardInterrupt in the middle of an import into errors of their own, which look broken
    with StopSignals() as signals:
        for check in check_up(settings.target, settings.draft, SECONDS):
            if signals.number is not None:
                raise StoppedError(signals.number, early=True)
            results.append(check)
            if not wanted.json:
                typer.echo(_shown(check))
    broken = [check.name for check in results if check.state == "broken"]
    if wanted.json:
        checks = {check.name: dataclasses.asdict(check) for check in results}
        document = {"schema": DOCTOR.id, "date": utc_now(), "broken": broken, "checks": checks}
        typer.echo(DOCTOR.page(document), nl=False)
    elif broken:
        typer.echo(f"\n{len(broken)} of {len(results)} parts broken: {', '.join(broken)}")
    else:
        typer.echo(f"\nnothing broken in {len(results)} parts")
    if broken:
        raise typer.Exit(1)


def _shown(check: Check) -> str:
    label = f"{STATES[check.state]:<8}{check.name:<10}"
    return textwrap.fill(
        check.text,
        COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
