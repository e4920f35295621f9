"""Inside an iteration nothing is read back to the host: no drafter asks a tensor for a number, or for a shape that
depends on its values. On a GPU the engine gives the texts of the CPU with every drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.ngram import NgramDrafter
from dsbd_cli.engine.drafting.paths import PathDrafter
from dsbd_cli.requests import Request
from tests.engine.drafting.test_lookup import make_context
from tests.engine.drafting.test_trees import Grown, make
from tests.helpers.toy import HashModel
from tests.helpers.toys import NumberCodec

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "is_nonzero")


class NoReads(TorchDispatchMode):
    """Raises on every operator that waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if name == "index" else []
        if name in READS or masks:
            raise AssertionError(f"{name} reads from the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: bool(x > 0), lambda x: x[x > 0], lambda x: x.nonzero()])
def test_reads_are_seen(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="reads from the device"), NoReads():
        read(torch.ones(1))


TEXTS = [[[1, 2, 1, 2, 1]], [[3, 4, 3, 4, 3], [3, 4, 3, 4, 4]]]


def test_lookups_read_nothing() -> None:
    context, drafter = make_context(TEXTS, 3, 4, 3), NgramDrafter(4, recalls=False)
    with NoReads():
        forest = PathDrafter.propose(drafter, context)
    assert forest.flat.valid.sum() > 3


def test_what_ngram_remembers_is_not_read() -> None:
    contexts, drafter = [make_context(TEXTS, 3, 4, 3) for _ in range(2)], NgramDrafter(4, recalls=True)
    for context in contexts:
        context.iteration += 1
    with NoReads():
        forest = drafter.propose(contexts[0])
        logprobs = torch.zeros(*forest.flat.token.shape, 40).log_softmax(-1)
        drafter.learn(forest, Candidates(torch.arange(40).expand(logprobs.shape), logprobs, full=True))
        drafter.select(torch.tensor([1, 0]))
        drafter.select(torch.tensor([1, 0]))
        again = drafter.propose(contexts[1])
    assert again.flat.valid.sum() > forest.flat.valid.sum()  # known distributions have more tokens than places


@pytest.mark.parametrize("name", ["rsd-c", "rsd-s", "greedy", "top-k"])
def test_trees_read_nothing(name: str) -> None:
    drafter = make(name)
    with NoReads():
        Grown(drafter, 6, 3)


NAMES = ["beam", "rsd-c", "rsd-s", "dynamic-tree", "ngram", "beam+ngram", "suffix", "beam+suffix"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("drafter", NAMES)
def test_texts_on_a_gpu_are_those_of_the_cpu(drafter: str) -> None:
    def texts(device: str) -> list[tuple[int, ...]]:
        method = MethodConfig(drafter=drafter, rule="search", num_beams=3, depth=3)
        models = [HashModel(40, 1, noise=noise, device=device) for noise in (0.0, 0.3)]
        draft = models[1] if method.needs_draft else None
        engine = Engine(models[0], draft, NumberCodec(40, (2,)), method, batch_size=4)
        sampling = SamplingConfig(max_new_tokens=12)
        requests = [Request(id=str(i), seed=i, prompt_ids=(i, 3, 4, i, 3), sampling=sampling) for i in range(6)]
        return [hypothesis.token_ids for result in engine.run(requests) for hypothesis in result.hypotheses]

    assert texts("cuda") == texts("cpu")
