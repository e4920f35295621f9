"""Draw docs/iteration.svg, one iteration as an animation, from the trace docs/site/iteration.json; and its end as
docs/iteration-still.svg, because browsers do not tell a picture that motion is not wanted.

`python docs/site/iteration_picture.py` draws. With `--trace` it first runs the built-in pair and writes the trace: the
iteration's line as `dsbd generate --set stats=FILE` writes it, and the forest as `dsbd profile --show` shows it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path

TRACE = Path(__file__).parent / "iteration.json"
PICTURE = Path(__file__).parents[1] / "iteration.svg"
STILL = PICTURE.with_name("iteration-still.svg")

RECORD, ITERATION = 1, 2  # of the shipped SQL test set, from 0; of the answer, from 1
BEAMS, DRAFTS, DEPTH = 3, 6, 3

WIDTH, TOP, ROW, BOX = 560, 96, 78, 32  # pixels; BOX is a node's height
CYCLE = 15.0  # seconds of one turn
DRAFTED, CALLED, VERIFIED, COMMITTED = 0.8, 4.2, 6.4, 11.0  # when a phase begins
EACH_DRAFT, EACH_VERIFY = 1.0, 1.4  # seconds a layer
LEGEND = (
    ("accepted", "drafted, and chosen by the target"),
    ("completed", "chosen, not drafted"),
    ("rejected", "rejected"),
)
MARKS = {"accepted": "✓", "completed": "+", "rejected": "✗", "dead": "✗"}

STYLE = """
svg { --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --line: #afb8c1; --box: #f6f8fa;
  --accepted: #dafbe1; --accepted-line: #1a7f37; --completed: #fff8c5; --completed-line: #9a6700;
  --rejected: #ffebe9; --rejected-line: #cf222e; --call: #0969da; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --soft: #9198a1; --paper: #161b22; --line: #4d5560; --box: #21262d;
    --accepted: #12381f; --accepted-line: #3fb950; --completed: #3b2e07; --completed-line: #d29922;
    --rejected: #3c1618; --rejected-line: #f85149; --call: #58a6ff; } }
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink);
  text-anchor: middle; }
.caption { font-size: 16px; font-weight: 600; }
.label { font-size: 12px; text-anchor: start; fill: var(--soft); paint-order: stroke;
  stroke: var(--paper); stroke-width: 4px; }
.token { font-size: 13px; }
.mark { font-size: 14px; font-weight: 700; paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.box { fill: var(--box); stroke: var(--line); }
.edge { fill: none; stroke: var(--line); stroke-width: 1.5; }
.call { fill: var(--call); }
"""


@dataclass(frozen=True)
class Node:
    """A node with its place in the picture: the middle of its box."""

    token: str
    layer: int
    parent: int | None
    state: str
    kept: bool
    x: float
    y: float


def main() -> None:
    """Write the picture, and with --trace the trace before it."""
    if "--trace" in sys.argv[1:]:
        TRACE.write_text(json.dumps(trace(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


def pictures() -> dict[Path, str]:
    """Both files, from the trace as it stands."""
    traced = json.loads(TRACE.read_text(encoding="utf-8"))
    return {PICTURE: draw(traced, moves=True), STILL: draw(traced, moves=False)}


def trace() -> dict[str, object]:
    """Run the built-in pair. Returns the iteration's line of the statistics and its forest."""
    from dsbd_cli import MethodConfig, ModelSpec, Request, load
    from dsbd_cli.lab.profiling.snapshot import Snapshot
    from dsbd_cli.lab.tasks.record import shipped

    method = MethodConfig(rule="search", num_beams=BEAMS, drafts_per_layer=DRAFTS, depth=DEPTH)
    engine = load(ModelSpec("builtin:target", dtype="float32"), method=method, batch_size=1, log_steps=True)
    record = next(islice(shipped("sql", "test"), RECORD, None))
    snapshot = Snapshot(1, ITERATION)
    engine.observe(snapshot)
    log = engine.generate(Request(record.prompt, id=record.id, seed=1)).stats.step_log
    names = [piece.decode("utf-8", "replace") for piece in engine.codec.token_bytes()]
    step = log[ITERATION - 1]
    forest = snapshot.shown(record.id, "search", step.steps, names)
    timeless = {name: value for name, value in dataclasses.asdict(step).items() if not name.endswith("_s")}
    return {"prompt": record.prompt, "step": timeless, "forest": dataclasses.asdict(forest)}


def placed(forest: dict) -> list[Node]:
    """The nodes with their places: layers from top to bottom, children in the order of their parents."""
    nodes, verified = forest["nodes"], forest["verified"]
    layers = [[at for at, node in enumerate(nodes) if node["layer"] == layer] for layer in range(forest["depth"] + 2)]
    live = [at for at in layers[verified] if nodes[at]["state"] in ("accepted", "completed")]
    kept = set(live)
    for at in sorted(range(len(nodes)), reverse=True):
        if at in kept and nodes[at]["parent"] is not None:
            kept.add(nodes[at]["parent"])
    place: dict[int, tuple[float, float]] = {}
    for layer, members in enumerate(layers):
        step = WIDTH / max(len(members), 1)
        members.sort(key=lambda at: (place[nodes[at]["parent"]][0] if layer else 0, at))
        place |= {at: ((number + 0.5) * step, TOP + ROW * layer + 34) for number, at in enumerate(members)}
    return [
        Node(one["token"], one["layer"], one["parent"], one["state"], at in kept, *place[at])
        for at, one in enumerate(nodes)
    ]


def draw(traced: dict, *, moves: bool) -> str:
    """The picture as SVG. One that does not move shows the end."""
    forest, step = traced["forest"], traced["step"]
    nodes = placed(forest)
    verified, depth = forest["verified"], forest["depth"]
    rows = max(node.layer for node in nodes) + 1
    height = TOP + ROW * rows + 30
    drafted = sum(layer["drafted"] for layer in step["layers"])
    captions = (
        (0.0, f"1  Draft: the draft model proposes {drafted} tokens in {depth} layers"),
        (CALLED, f"2  One call of the target reads all {step['nodes']} nodes"),
        (VERIFIED, f"3  Verify layer by layer: the target's best {forest['num_beams']} pass"),
        (COMMITTED, f"4  Commit: {forest['num_beams']} beams live on, {verified} steps from one call"),
    )
    motion = Motion(moves)
    call = motion.named([(0, 0), (CALLED, 0), (CALLED + 0.6, 0.28), (CALLED + 1.4, 0.28), (CALLED + 2.0, 0)])
    body = [
        '<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>',
        *_captions(captions, motion),
        f'<rect class="call {call}" x="4" y="{TOP - 2}" width="{WIDTH - 8}" height="{ROW * rows}" rx="8"/>',
        *(_edge(nodes[node.parent], node, motion) for node in nodes if node.parent is not None),
        *(f'<g class="{motion.named(_fate(node))}">{_box(node, motion)}</g>' for node in nodes),
        *(_label(layer, depth) for layer in range(rows)),
        *_legend(height - 14),
    ]
    tokens = ", ".join(f"{node.token.strip()!r}" for node in nodes if node.layer == verified and node.kept)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
            "<title>One iteration: draft a forest, verify it layer by layer, commit</title>",
            f"<desc>{escape('; '.join(text for _, text in captions))}. The beams end with {escape(tokens)}.</desc>",
            f"<style>{STYLE}{motion.css()}</style>",
            *body,
            "</svg>",
            "",
        ]
    )


class Motion:
    """Opacity over time: elements with the same course share a class."""

    def __init__(self, moves: bool) -> None:
        self._moves = moves
        self._courses: dict[tuple[tuple[float, float], ...], str] = {}

    def named(self, course: list[tuple[float, float]]) -> str:
        """The class whose opacity goes through (second, opacity), and stands at the last one."""
        return self._courses.setdefault(tuple(course), f"m{len(self._courses)}")

    def css(self) -> str:
        """The courses of a picture that moves, or where they end."""
        rules = []
        for course, name in self._courses.items():
            last = course[-1][1]
            turn = f" animation: {name} {CYCLE:g}s infinite;" if self._moves else ""
            rules.append(f".{name} {{ opacity: {last:g};{turn} }}")
            if self._moves:
                frames = " ".join(f"{100 * at / CYCLE:.1f}% {{ opacity: {opacity:g} }}" for at, opacity in course)
                end = f"97% {{ opacity: {last:g} }} 100% {{ opacity: {course[0][1]:g} }}"
                rules.append(f"@keyframes {name} {{ {frames} {end} }}")
        still = ["@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }"] if self._moves else []
        return "\n".join([*rules, *still, ""])


def _captions(captions: tuple[tuple[float, str], ...], motion: Motion) -> Iterator[str]:
    ends = [begin for begin, _ in captions[1:]]
    for number, (begin, text) in enumerate(captions):
        course = [(0.0, 1.0)] if number == 0 else [(0.0, 0.0), (begin, 0.0), (begin + 0.4, 1.0)]
        if number < len(ends):
            course += [(ends[number], 1.0), (ends[number] + 0.4, 0.0)]
        yield f'<text class="caption {motion.named(course)}" x="{WIDTH / 2:g}" y="44">{escape(text)}</text>'


def _label(layer: int, depth: int) -> str:
    name = "live beams" if layer == 0 else f"layer {layer}" if layer <= depth else "bonus layer"
    return f'<text class="label" x="10" y="{TOP + ROW * layer + 12}">{name}</text>'


def _legend(y: float) -> Iterator[str]:
    at = 10.0
    for state, meaning in LEGEND:
        mark = f'<tspan style="fill: var(--{state}-line); font-weight: 700">{MARKS[state]}</tspan>'
        yield f'<text class="label" x="{at:g}" y="{y:g}">{mark} {meaning}</text>'
        at += 7.4 * len(meaning) + 34


def _shown_at(node: Node) -> float:
    """The second at which a node appears: with the draft of its layer, or where the target draws it."""
    if node.state == "completed":
        return _verified_at(node) + 0.5
    return DRAFTED + EACH_DRAFT * (node.layer - 1) if node.layer else 0.0


def _verified_at(node: Node) -> float:
    return VERIFIED + EACH_VERIFY * (node.layer - 1)


def _fate(node: Node) -> list[tuple[float, float]]:
    """Opacity of a node and its edge: it appears, pales where it is rejected, and goes where nothing of it stays."""
    begin = _shown_at(node)
    course = [(0.0, 1.0)] if node.layer == 0 else [(0.0, 0.0), (begin, 0.0), (begin + 0.4, 1.0)]
    if node.state in ("rejected", "dead", "unreached"):
        course += [(_verified_at(node) + 0.4, 1.0), (_verified_at(node) + 0.9, 0.5)]
    if not node.kept:
        course += [(COMMITTED + 0.4, course[-1][1]), (COMMITTED + 1.2, 0.3)]
    return course


def _edge(parent: Node, node: Node, motion: Motion) -> str:
    top, bottom = parent.y + BOX / 2, node.y - BOX / 2
    middle = (top + bottom) / 2
    points = f"M{parent.x:.1f} {top:g} C{parent.x:.1f} {middle:g} {node.x:.1f} {middle:g} {node.x:.1f} {bottom:g}"
    return f'<path class="edge {motion.named(_fate(node))}" d="{points}"/>'


def _box(node: Node, motion: Motion) -> str:
    """A node: its box, over it the colour of the verdict, and its token."""
    text = node.token.strip() or "␣"
    wide = max(34.0, 8.0 * len(text) + 12)
    place = f'x="{node.x - wide / 2:.1f}" y="{node.y - BOX / 2:g}" width="{wide:.1f}" height="{BOX}" rx="6"'
    corner = f'x="{node.x + wide / 2 - 1:.1f}" y="{node.y - BOX / 2 + 3:g}"'
    parts = [f'<rect class="box" {place}/>']
    if node.state in MARKS:
        kind = "rejected" if node.state == "dead" else node.state
        colour = f"fill: var(--{kind}); stroke: var(--{kind}-line)"
        at = _verified_at(node)
        verdict = motion.named([(0.0, 0.0), (at, 0.0), (at + 0.4, 1.0)])
        mark = f'<text class="mark" {corner} style="fill: var(--{kind}-line)">{MARKS[node.state]}</text>'
        parts.append(f'<g class="{verdict}"><rect {place} style="{colour}"/>{mark}</g>')
    parts.append(f'<text class="token" x="{node.x:.1f}" y="{node.y + 4.5:g}">{escape(text)}</text>')
    return "".join(parts)


if __name__ == "__main__":
    main()
