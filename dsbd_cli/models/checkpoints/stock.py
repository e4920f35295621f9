"""Attention of a model that transformers loads, and checks of what it has loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.errors import ModelError


def attention_of(config: Any) -> str | None:
    """Return the attention implementation: eager where scores are capped, because sdpa would leave the cap out.
    Otherwise None, with which transformers takes sdpa where the architecture has it."""
    text = config.get_text_config(decoder=True)
    return "eager" if getattr(text, "attn_logit_softcapping", None) is not None else None


def check_report(report: dict[str, Any], name: str, elsewhere: set[str]) -> None:
    """Raise ModelError for weights that are missing or have another shape. transformers would draw them at random, and
    the text would be noise without any warning.

    elsewhere: names of weights that come from another file.
    """
    if keys := sorted(set(map(str, report.get("missing_keys") or ())) - elsewhere):
        shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        raise ModelError(f"{name}: {len(keys)} weights are missing ({shown}): get the files again")
    if others := sorted(key for key in report.get("mismatched_keys") or () if key[0] not in elsewhere):
        stored, wanted = (" x ".join(map(str, shape)) for shape in others[0][1:])
        raise ModelError(
            f"{name}: its config does not fit its weights: {others[0][0]} is {stored}, but must be {wanted} "
            f"({len(others)} such weights)"
        )


def check_numbers(tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Check that no tensor holds NaN."""
    for tensor, values in tensors:
        if not values.is_floating_point() or values.dtype.itemsize == 1 or values.is_meta or not values.numel():
            continue
        # the sum is NaN where a number is NaN, but also where infinities cancel, so that the numbers are then counted
        if bool(torch.isnan(values.detach().sum())) and (count := int(values.detach().isnan().sum())):
            raise ModelError(f"{name}: {count} of {values.numel()} numbers in {tensor} are NaN: get the files again")
