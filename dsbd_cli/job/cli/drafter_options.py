"""Options of the drafters: which one, and what the one chosen may be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dsbd_cli.config import DRAFTERS, MODEL_DRAFTERS, TREES, MethodConfig, TreeName
from dsbd_cli.errors import UsageError
from dsbd_cli.job.cli.declare import option

__all__ = ["DrafterOptions", "drafter_settings"]

DRAFTER = "Drafter"
_METHOD = MethodConfig()


@dataclass(frozen=True)
class DrafterOptions:
    """Who proposes the nodes."""

    drafter: Annotated[
        str | None,
        option(
            DRAFTER,
            "--drafter",
            text=f"{', '.join(DRAFTERS)}; or two as in beam+ngram, the second one that reads text",
            default=_METHOD.drafter,
            metavar="NAME",
        ),
    ] = None
    ngram: Annotated[
        int | None,
        option(DRAFTER, "--ngram", text="ngram: longest suffix looked up", default=_METHOD.ngram, metavar="N"),
    ] = None
    index: Annotated[
        str | None, option(DRAFTER, "--index", text="retrieval: a file that dsbd index made", metavar="FILE")
    ] = None
    branching: Annotated[
        int | None,
        option(DRAFTER, "--branching", text="rsd-c: children per node; 0: as many as fit", default=0, metavar="N"),
    ] = None
    tree: Annotated[
        TreeName | None,
        option(
            DRAFTER,
            "--tree",
            text=f"dynamic-tree: {', '.join(TREES)}; top-k is deterministic",
            default=_METHOD.tree,
            metavar="KIND",
        ),
    ] = None
    tree_threshold: Annotated[
        float | None,
        option(
            DRAFTER,
            "--tree-threshold",
            text="dynamic-tree with --tree threshold: least value of a node",
            default="1 / (D * K)",
            metavar="T",
        ),
    ] = None
    second_drafts: Annotated[
        int | None,
        option(DRAFTER, "--second-drafts", text="of two: nodes per layer of the second", default="K / 4", metavar="N"),
    ] = None
    fusion_top_k: Annotated[
        int | None,
        option(
            DRAFTER,
            "--fusion-top-k",
            text="of two, only the first with the draft model: what is looked up must be among its best N; 0: any",
            default=_METHOD.fusion_top_k,
            metavar="N",
        ),
    ] = None


def drafter_settings(given: DrafterOptions) -> dict[str, object]:
    """The fields of MethodConfig that were given. Raises UsageError for one that could not act."""
    name = given.drafter or _METHOD.drafter
    names = name.split("+")
    acting = {
        "ngram": "ngram" in names,
        "branching": "rsd-c" in names,
        "tree": "dynamic-tree" in names,
        "tree_threshold": "dynamic-tree" in names and given.tree == "threshold",
        "second_drafts": len(names) == 2,
        "fusion_top_k": len(names) == 2 and names[0] in MODEL_DRAFTERS,
        "index": True,  # MethodConfig looks after it
    }
    for field, acts in acting.items():
        if not acts and getattr(given, field) is not None:
            shown = field.replace("_", "-")
            tree = " without --tree threshold" if field == "tree_threshold" and "dynamic-tree" in names else ""
            raise UsageError(f"--{shown} would do nothing, because the drafter is {name}{tree}: drop it")
    found = {field: getattr(given, field) for field in acting if getattr(given, field) is not None}
    return {"drafter": name, **found}
