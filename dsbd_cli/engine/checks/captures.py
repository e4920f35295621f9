"""Check at load that captured iterations give the results of plain ones, on the models and the device at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.protocols import EncoderDecoderModel
from dsbd_cli.errors import RowError, UnsupportedModelError, one_line
from dsbd_cli.requests import Request, RequestResult

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine

ROWS = 2
TOKENS = 24  # some eight iterations; the third of a shape is the first that is replayed
DEPTH = 2
CLOSE = 1e-3  # tolerance of log-probabilities, relative and absolute


def prove_captures(engine: Engine) -> None:
    """Check an engine that captures iterations. Where captures cannot be trusted, switch it to plain iterations, with a
    note for the user. Captures that the user asked for are not tried: if one fails in a run, that is an error."""
    graphs = engine.stepper.graphs
    if graphs is None or graphs.required:
        return
    fault = captured_otherwise(engine)
    if fault is not None:
        engine.stepper.graphs = None
        line = f"iterations run plainly, without CUDA graphs: {fault}"
        if engine.info is not None:
            engine.info = replace(engine.info, notes=(*engine.info.notes, line))
        else:
            engine.tell(line)


def captured_otherwise(engine: Engine) -> str | None:
    """Return what is wrong with captured iterations of these models and this method. Return None where a few short
    requests give the same tokens and, up to CLOSE, the same log-probabilities with and without them.

    Two engines of fixed depth are made for this, so that both run the same shapes. They use the kernels of this engine.
    """
    method, kernels = engine.method, bool(engine.stepper.ops.by("triton"))
    if method.depth:
        method = replace(method, depth=min(method.depth, DEPTH), adaptive_depth=False)
    runs: list[list[RequestResult]] = []
    for wanted in (False, None):
        trial = engine.replace(
            method=method, batch_size=ROWS, info=None, cuda_graphs=wanted, kernels=kernels, catalogues=None
        )
        trial.one_root = False  # captured iterations begin with W roots, too
        trial.tell = lambda line: None
        try:
            runs.append(trial.generate(_requests(trial)))
        except RowError as error:
            return f"they cannot be tried on this target ({error})"
        except RuntimeError as error:
            if wanted is False:  # a plain iteration
                raise
            reason = one_line(error)
            if not _answers(engine.target.device):
                raise UnsupportedModelError(
                    f"the GPU answers nothing any more after captured iterations were tried ({reason}): leave graphs "
                    "out, with --set gpu=kernels"
                ) from error
            return f"a captured iteration fails ({reason})"
        graphs = trial.stepper.graphs
        if graphs is not None and graphs.failed is not None:
            return f"a capture fails ({graphs.failed})"
    return _difference(*runs)


def _answers(device: torch.device) -> bool:
    """Return whether a GPU still computes, because after some errors it does nothing more for its process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _requests(engine: Engine) -> Sequence[Request]:
    sampling = SamplingConfig(max_new_tokens=TOKENS)
    if isinstance(engine.target, EncoderDecoderModel):
        return [Request(f"A sentence with the number {row}.", sampling=sampling, seed=row) for row in range(ROWS)]
    size = engine.target.vocab_size
    return [
        Request(
            prompt_ids=tuple((7 * position + 11 * row) % size for position in range(1, 9)), sampling=sampling, seed=row
        )
        for row in range(ROWS)
    ]


def _difference(plain: Sequence[RequestResult], captured: Sequence[RequestResult]) -> str | None:
    for left, other in zip(plain, captured, strict=True):
        mine, theirs = left.hypotheses, other.hypotheses
        if [each.token_ids for each in mine] != [each.token_ids for each in theirs]:
            return "a captured iteration gives other tokens than a plain one"
        if not all(
            math.isclose(a.logprob, b.logprob, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in zip(mine, theirs, strict=True)
        ):
            return "a captured iteration gives other log-probabilities than a plain one"
    return None
