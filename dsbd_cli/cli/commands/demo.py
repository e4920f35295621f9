"""`dsbd demo`: one prompt with its four beams, by dsbd and by transformers, on one screen."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import typer

from dsbd_cli.cli.options.declare import grouped, option
from dsbd_cli.cli.options.options import MAIN, PIPED, DeviceOptions, MethodOptions, PairOptions, SamplingOptions
from dsbd_cli.cli.options.settings import fixed_depth, run_settings
from dsbd_cli.cli.run.messages import talking, visible
from dsbd_cli.cli.run.signals import StopSignals
from dsbd_cli.config.model import BUILTIN_TARGET
from dsbd_cli.errors import RowError, UsageError, plural
from dsbd_cli.lab.tasks.record import shipped
from dsbd_cli.models.checkpoints.hub import locate

if TYPE_CHECKING:
    from dsbd_cli.lab.bench.beside import Beam, BesideTransformers, TimedBeams
    from dsbd_cli.lab.reports.screen import Screen

BEAMS = 4
SHOWN_TASKS = (("sql", 5), ("qa", 3))  # data sets that the built-in target knows, and the number of their prompts
OWN_PROMPT = "List three uses of a paper clip:"
BUILTIN_TOKENS, OWN_TOKENS = 64, 24


@dataclass(frozen=True)
class DemoOptions:
    """Options of `dsbd demo`: the prompt."""

    prompt: str | None = option(
        MAIN,
        "what the target goes on from; one with a chat template is given it as a message of a user",
        default="eight questions for the built-in target, of which one is shown; else one on paper clips",
        metavar="TEXT",
    )


@partial(grouped, elsewhere=PIPED)
def demo(pair: PairOptions, wanted: DemoOptions) -> None:
    """Show on one screen a prompt, its four beams by dsbd, and the same model's beams by transformers.

    Both run in float32, where the beams are the same, and each holds a copy of the target in memory.

    A draft proposes four layers of tokens in every iteration. A score is logprob / num_tokens, in nats.

    Exit codes: 0 all beams are the same, 1 some are not.
    """
    method = fixed_depth(pair, MethodOptions(num_beams=BEAMS, decode="search"))
    settings = run_settings(pair, method, SamplingOptions(), DeviceOptions(dtype="float32"))
    builtin = settings.target.source == BUILTIN_TARGET
    prompts = _prompts(builtin) if wanted.prompt is None else [wanted.prompt]
    tokens = BUILTIN_TOKENS if builtin else OWN_TOKENS
    with StopSignals():
        for model in settings.models:
            if not model.in_target:
                locate(model)  # a wrong name is told before torch is imported
        with talking() as talk:
            talk.now("importing torch")
            from dsbd_cli.lab.bench.beside import BesideTransformers
            from dsbd_cli.lab.reports.screen import Screen

            talk.now("loading the models (the first time compiles kernels and checks the target)")
            beside = BesideTransformers(settings.target, settings.draft, settings.method, tokens)
            talk.now("answering")
            try:
                ours = [beside.ours(prompt) for prompt in prompts]
            except RowError as error:
                if wanted.prompt is None:
                    raise
                raise UsageError(f"--prompt cannot be answered: {str(error).removeprefix('request demo: ')}") from None
        screen = Screen(sys.stdout)
        _show_prompt(screen, beside, prompts[0])
        _show_ours(screen, ours[0])
        with talking() as talk:
            talk.now("loading the target into transformers")
            beside.load_theirs()
            talk.now("answering by transformers")
            theirs = [beside.theirs(prompt) for prompt in prompts]
    _show_theirs(screen, ours[0], theirs[0])
    same = [_same(beams, other) for beams, other in zip(ours, theirs, strict=True)]
    if len(prompts) > 1:
        _show_others(screen, ours[1:], theirs[1:], sum(same[1:]))
    _show_next(screen, pair.target, chat=beside.chat)
    if not all(same):
        raise typer.Exit(1)


def _prompts(builtin: bool) -> list[str]:
    """Return the prompts used where none is given: those of sample_inputs/prompts.jsonl for the built-in target."""
    if not builtin:
        return [OWN_PROMPT]
    return [record.prompt for task, count in SHOWN_TASKS for record in islice(shipped(task, "test"), count)]


def _same(beams: TimedBeams, other: TimedBeams) -> bool:
    return [beam.token_ids for beam in beams.beams] == [beam.token_ids for beam in other.beams]


def _show_prompt(screen: Screen, beside: BesideTransformers, prompt: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    screen.print(Text("Prompt", "bold"))
    for line in prompt.splitlines():
        screen.print(Padding(Text(visible(line)), (0, 0, 0, 2), expand=False))
    info = beside.info
    assert info is not None
    draft = f"draft {info.draft}" if info.draft else "no draft"
    screen.print(Text(f"  to {info.target}{' as a chat' if beside.chat else ''}, {draft}, {info.dtype}", "dim"))


def _show_ours(screen: Screen, answer: TimedBeams) -> None:
    stats = answer.stats
    assert stats is not None
    calls = f"{plural(stats.steps, 'step')} in {plural(stats.target_calls, 'target call')}"
    _show_beams(
        screen,
        f"dsbd, {BEAMS} beams: {answer.seconds:.2f} s",
        f"{calls}, {stats.steps_per_call:.2f} steps per call",
        answer.beams,
        [_on_one_line(beam.text) for beam in answer.beams],
    )


def _show_theirs(screen: Screen, ours: TimedBeams, theirs: TimedBeams) -> None:
    """Show transformers' beams. A beam that is also among ours is named by its rank, any other with its text."""
    ranks = {beam.token_ids: rank for rank, beam in enumerate(ours.beams)}
    texts = []
    for rank, beam in enumerate(theirs.beams):
        same = ranks.get(beam.token_ids)
        if same is None:
            texts.append(_on_one_line(beam.text))
        else:
            texts.append("the same beam" if same == rank else f"beam {same + 1} of above")
    _show_beams(
        screen,
        f"transformers, {BEAMS} beams: {theirs.seconds:.2f} s",
        f"{theirs.seconds / ours.seconds:.1f} times as long",
        theirs.beams,
        texts,
    )


def _show_others(screen: Screen, ours: Sequence[TimedBeams], theirs: Sequence[TimedBeams], same: int) -> None:
    seconds = [sum(answer.seconds for answer in answers) for answers in (ours, theirs)]
    screen.print(
        f"\n{len(ours)} more prompts: dsbd {seconds[0]:.2f} s, transformers {seconds[1]:.2f} s, "
        f"the same beams for {same} of {len(ours)}"
    )


def _show_beams(screen: Screen, title: str, remark: str, beams: Sequence[Beam], texts: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    screen.print()
    screen.print(Text.assemble((title, "bold"), f"; {remark}"))
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1))
    for rank, beam in enumerate(beams):
        table.add_column(Text(f"{rank + 1}  score {beam.score:.4f}"), ratio=1, overflow="fold")
    table.add_row(*map(Text, texts))
    screen.print(table)


def _on_one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _show_next(screen: Screen, target: str | None, *, chat: bool) -> None:
    """Show which commands to type next, with the target's name where the user gave one."""
    from rich.text import Text

    model, as_chat = "MODEL" if target is None else shlex.quote(target), " --chat" if chat else ""
    again = ("", "a folder, a hub id, a GGUF") if target is None else (" --prompt TEXT", "another prompt")
    lines = (
        (f"dsbd demo --target {model}{again[0]}", again[1]),
        (f"dsbd generate --target {model}{as_chat} -i prompts.jsonl", 'each line {"prompt": "..."}'),
        (f"dsbd bench --target {model}{as_chat} --input prompts.jsonl", "which method pays there"),
        ("dsbd --help", "every command"),
    )
    screen.print()
    screen.print(Text("Type next", "bold"))
    width = max(len(command) for command, _ in lines)
    for command, meaning in lines:
        screen.say(f"  {command:{width}}  {meaning}")
