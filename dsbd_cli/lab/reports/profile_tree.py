"""The forest of one iteration as a tree in the terminal. Symbol and colour show what became of a node."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from dsbd_cli.config.variants import RULES
from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.profile_data import ShownForest, ShownNode
from dsbd_cli.lab.reports.units import DASH

# symbol, style, and what it means; the order of the legend
SYMBOLS: dict[str, tuple[str, str, str]] = {
    "root": ("●", "bold", "live beam"),
    "accepted": ("✓", "green", "accepted draft"),
    "completed": ("+", "yellow", "completed: drawn by the exact distribution, not drafted"),
    "finished": ("■", "magenta", "finished: ends its text"),
    "rejected": ("✗", "red", "rejected draft"),
    "dead": ("·", "dim", "dead: its parent is not live"),
    "unreached": ("○", "dim", "not reached: verification ended above"),
}


def forest_tree(forest: ShownForest) -> RenderableType:
    """Return title, legend and one tree per live beam. Children stand in draw order."""
    counted = {state: sum(node.state == state for node in forest.nodes) for state in SYMBOLS}
    title = Text(
        f"Iteration {forest.iteration} of prompt {forest.prompt_id}: rule {forest.rule}, D={forest.depth}; "
        f"this target call yielded {plural(forest.verified, 'step')}"
    )
    legend = Text()
    for state, (symbol, style, meaning) in SYMBOLS.items():
        if counted[state]:
            legend.append(f"{symbol} {meaning} ({counted[state]})", style=style)
            legend.append("\n")
    distribution = "probability of the path" if not RULES[forest.rule].samples else "share of the step's pool"
    legend.append(f"P target, Q draft: {distribution}; - where it is not defined")
    trees: dict[int, Tree] = {}
    roots = []
    for index, node in enumerate(forest.nodes):
        if node.parent is None:
            trees[index] = Tree(_label(node), guide_style="dim")
            roots.append(trees[index])
        else:
            trees[index] = trees[node.parent].add(_label(node))
    return Group(title, Text(), *roots, Text(), legend)


def _label(node: ShownNode) -> Text:
    symbol, style, _ = SYMBOLS[node.state]
    label = Text(f"{symbol} ", style=style)
    label.append(_visible(node.token), style=style)
    if node.parent is not None:
        label.append(f"  P {_number(node.p)}", style="dim" if node.p is None else "")
        if node.state != "completed":
            label.append(f"  Q {_number(node.q)}", style="dim" if node.q is None else "")
    if node.proposer is not None:
        label.append(f"  {node.proposer}", style="dim")
    return label


def _visible(token: str) -> str:
    """Return the token in quotes, with line ends and other unprintable characters escaped."""
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token) + "'"


def _number(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.3f}" if value == 0 or value >= 0.0005 else f"{value:.0e}"
