"""Kernels of an iteration as operators: their tensors are found by the names that ops/layout.py declares.

Operators of torch.library take lists of tensors, so each is wrapped in a function that takes them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.layout import KernelTensors, Tensors


def operator(takes: KernelTensors, numbers: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a function of a kernel's tensors as the operator of the kernel.

    numbers: the further arguments, as in a schema of torch.library.
    """
    names = [tensor.name for tensor in takes.tensors if tensor.owner != "own"]  # no kernel of a GPU has rows' own W
    as_they_are = takes.writes | takes.apart

    def made(function: Callable[..., None]) -> Callable[..., None]:
        def run(tensors: list[Tensor], *arguments: Any) -> None:
            function(dict(zip(names, tensors, strict=False)), *arguments)  # the last ones may be missing

        schema = f"(Tensor(a!)[] tensors, {numbers}) -> ()"
        name = f"dsbd::{takes.kernel}"
        registered = torch.library.custom_op(name, run, mutates_args=("tensors",), schema=schema)
        registered.register_fake(lambda *arguments: None)

        def call(tensors: Tensors, *arguments: Any) -> None:
            values = {name: tensors[name] for name in names if name in tensors}
            registered([v if name in as_they_are else v.contiguous() for name, v in values.items()], *arguments)

        call.__doc__ = function.__doc__
        return call

    return made


def launch(kernel: Any, tensors: Tensors, numbers: Mapping[str, int], **options: Any) -> None:
    """Launch a kernel with a program per request. Its parameters are names of tensors and numbers. options: its
    constants, and options of triton."""
    values = {**numbers, **tensors}
    with torch.cuda.device_of(next(iter(tensors.values()))):
        kernel[(numbers["rows"],)](**{name: values[name] for name in kernel.arg_names if name in values}, **options)
