"""One target over several processes (tensor parallelism), of which this one, rank 0, drives.

Every rank holds a slice of each layer, loaded by transformers (`DistributedConfig`), and its slice of the cache. The
others are processes that rank 0 starts on its machine; they sit in `serve` and do what rank 0 does: the same calls of
the same adapter, in the same order, so that the sums over ranks inside a layer meet. Draft, trees and rules live on
rank 0 alone.

A command is a small object over gloo, then its tensors. Nothing is read back from a device for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError, UnsupportedModelError, UsageError
from dsbd_cli.models.adapted.causal import CausalForestModel
from dsbd_cli.models.cache import ForestCache
from dsbd_cli.models.checkpoints.hub import locate
from dsbd_cli.models.checkpoints.loader import load, load_config
from dsbd_cli.models.recurrent.states import StateCache

TIMEOUT = timedelta(hours=2)  # of a collective: weights load at different speeds
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank belongs. folder: what all ranks of one model share, a file store among it."""

    spec: ModelSpec
    rank: int
    folder: str


def check_ranks(spec: ModelSpec) -> None:
    """Raises UsageError or UnsupportedModelError for a model that cannot be split into `spec.tensor_parallel` parts."""
    count = spec.tensor_parallel
    if spec.device_map is not None or spec.device not in ("auto", "cpu", "cuda"):
        place = spec.device_map or spec.device
        raise UsageError(
            f"tensor_parallel is {count}, but the model is to lie on {place}: drop one of them",
            field="tensor_parallel",
            value=count,
        )
    gpus = torch.cuda.device_count()
    if spec.device != "cpu" and 0 < gpus < count:
        raise UsageError(
            f"tensor_parallel is {count}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible",
            field="tensor_parallel",
            value=count,
        )
    config: Any = load_config(locate(spec), spec)
    text = config.get_text_config(decoder=True)
    name = f"{spec.role} model {spec.source!r}"
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or groups % count:
        raise UnsupportedModelError(
            f"{name} has {groups} key-value heads and {heads} heads, which {count} ranks cannot share evenly: "
            "choose a --set tensor-parallel that divides both"
        )
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(f"{name} is a {text.model_type}, which transformers has no plan to split")


class Ranks:
    """The other ranks of a model, and the way to them. One model of a process can be split."""

    def __init__(self, spec: ModelSpec) -> None:
        """Starts the ranks and joins them. Raises ModelError where one ends."""
        if dist.is_initialized():
            raise UsageError("tensor_parallel: this process has a torch.distributed group already: load in another one")
        self.broken = self._joined = False
        self._folder = Path(tempfile.mkdtemp(prefix="dsbd-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, spec.tensor_parallel):
                self._processes.append(self._start(RankPlace(spec, rank, str(self._folder))))
            for process in self._processes:
                assert process.stdout is not None
                if process.stdout.readline() != b"ready\n":
                    raise self.error("did not start")
            self._joined = True
            join(RankPlace(spec, 0, str(self._folder)))
        except BaseException:
            self.close()
            raise

    def _start(self, place: RankPlace) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)  # some are of this process alone, under Ray
        environment = {**os.environ, "PYTHONPATH": paths, **_variables(place)}
        with (self._folder / f"{place.rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for rank 0
            )
        assert process.stdin is not None
        pickle.dump(place, process.stdin)
        process.stdin.flush()  # and stays open: its end tells the rank that we are gone
        return process

    def error(self, what: str) -> ModelError:
        """Why the ranks cannot go on: the last line of the first that has ended."""
        self.broken = True
        for rank, process in enumerate(self._processes, start=1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if (code := process.wait(timeout=2)) < 0:
                    return ModelError(f"rank {rank} of the target {what}: it was killed by signal {-code}")
                if code:
                    log = (self._folder / f"{rank}.log").read_text(errors="replace")
                    lines = [line.removeprefix(f"[rank{rank}]:").strip() for line in log.splitlines()]
                    messages = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)] or [
                        "no message"
                    ]
                    return ModelError(f"rank {rank} of the target {what}: {messages[-1][:200]}")
        return ModelError(f"the ranks of the target {what}: lower --batch-size if memory was short")

    def tell(self, name: str, *arguments: object) -> None:
        """Let every other rank call this method of its adapter with these arguments, tensors among them."""
        if self.broken:
            raise ModelError("the ranks of the target have ended: load it again")
        tensors: list[Tensor] = []
        plain = [_packed(argument, tensors) for argument in arguments]
        shapes: list[Shape] = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        try:
            dist.broadcast_object_list([(name, plain, shapes)], src=0, device=torch.device("cpu"))
            for tensor in tensors:
                dist.broadcast(_sendable(tensor.contiguous()), src=0)
        except RuntimeError as error:
            raise self.error("does not hear any more") from error

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        self.broken = True
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()
        self._joined = False
        shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class ShardedForestModel(CausalForestModel):
    """Rank 0's slice of a model, whose every call is told to the other ranks first."""

    def __init__(self, model: Any, name: str, ranks: Ranks) -> None:
        self._ranks: Ranks | None = None
        super().__init__(model, name)  # its first forward is also that of the others' constructors
        self._ranks = ranks

    @property
    def capturable(self) -> bool:
        """No: a replayed graph would tell the other ranks nothing."""
        return False

    def stock(self) -> nn.Module:
        """Raises UsageError: transformers' own loop would run on rank 0 alone."""
        raise UsageError("a target with tensor_parallel cannot be compared with transformers' generate: load it whole")

    def close(self) -> None:
        """End the other ranks; the model is of no use afterwards."""
        if self._ranks is not None:
            self._ranks.close()

    def _tell(self, name: str, *arguments: object) -> None:
        if self._ranks is not None:
            self._ranks.tell(name, *arguments)

    def _new_cache(self, device: torch.device) -> ForestCache:
        cache = super()._new_cache(device)
        if isinstance(cache, StateCache):
            raise UnsupportedModelError(
                f"{self.architecture} has recurrent layers, which tensor_parallel does not split"
            )
        return cache

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """On all ranks."""
        self._tell("reserve", rows, slots, window)
        super().reserve(rows, slots, window)

    def release(self) -> None:
        """On all ranks."""
        self._tell("release")
        super().release()

    def select_rows(self, rows: Tensor) -> None:
        """On all ranks."""
        self._tell("select_rows", rows)
        super().select_rows(rows)

    def clear(self, row: int, start: int = 0) -> None:
        """On all ranks."""
        self._tell("clear", row, start)
        super().clear(row, start)

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """On all ranks."""
        self._tell("copy_prefixes", copies)
        super().copy_prefixes(copies)

    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """On all ranks."""
        self._tell("move", src_slots, dst_slots, common_prefix)
        super().move(src_slots, dst_slots, common_prefix)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """On all ranks; every rank has the logits, rank 0 gives them back."""
        self._tell("forward", batch, logits)
        with self._together():
            return super().forward(batch, logits=logits)

    def plain(self, tokens: Tensor) -> Tensor:
        """On all ranks."""
        self._tell("plain", tokens)
        with self._together():
            return super().plain(tokens)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """A forward that fails here leaves the other ranks in the middle of theirs: nothing can follow."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self._ranks is None:
                raise
            raise self._ranks.error(f"failed in a forward ({type(error).__name__})") from error


def load_slice(spec: ModelSpec) -> tuple[Any, Any]:
    """This rank's slice of a model, and the tokenizer. All ranks call it at once."""
    from transformers.distributed.configuration_utils import DistributedConfig

    # embeddings in slices would look up tokens by a boolean mask, which reads the host in every forward
    plan = {"model.embed_tokens": "replicate"}
    if load_config(locate(spec), spec).get_text_config(decoder=True).tie_word_embeddings:
        plan["lm_head"] = "replicate"  # it is the same matrix
    return load(spec, distributed_config=DistributedConfig(tp_size=spec.tensor_parallel, tp_plan=plan))


def join(place: RankPlace) -> None:
    """Enter the group of all ranks: tensors of a processor go by gloo, of a GPU by NCCL."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one machine
    os.environ |= _variables(place)
    gpus = place.spec.device != "cpu" and torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(place.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        init_method=f"file://{place.folder}/store",
        rank=place.rank,
        world_size=place.spec.tensor_parallel,
        timeout=TIMEOUT,
    )


def serve(forest: CausalForestModel) -> NoReturn:
    """Serve as a rank: call what rank 0 calls, until that is gone."""
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        name, plain, shapes = box[0]
        tensors = []
        for shape, dtype in shapes:
            tensors.append(torch.empty(shape, dtype=dtype, device=forest.device))
            dist.broadcast(_sendable(tensors[-1]), src=0)
        arguments = [_unpacked(argument, tensors) for argument in plain]
        if name == "forward":
            forest.forward(arguments[0], logits=arguments[1])
        else:
            getattr(forest, name)(*arguments)


@dataclass(frozen=True, slots=True)
class _TensorStub:
    """Stands for a tensor that is sent apart. place: in the order of sending."""

    place: int


def _packed(argument: object, tensors: list[Tensor]) -> object:
    """The argument without its tensors, which are added to `tensors`."""
    if isinstance(argument, Tensor):
        tensors.append(argument)
        return _TensorStub(len(tensors) - 1)
    if isinstance(argument, ForestInput):
        return {item.name: _packed(getattr(argument, item.name), tensors) for item in fields(argument)}
    return argument


def _unpacked(argument: Any, tensors: list[Tensor]) -> Any:
    if isinstance(argument, _TensorStub):
        return tensors[argument.place]
    if isinstance(argument, dict):
        return ForestInput(**{name: _unpacked(value, tensors) for name, value in argument.items()})
    return argument


def _sendable(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend sends."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _variables(place: RankPlace) -> dict[str, str]:
    """Return the environment variables that transformers reads to bind a rank to its device."""
    rank = str(place.rank)
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(place.spec.tensor_parallel)}


def _end_with_rank_0() -> None:
    """A thread that ends this process when rank 0 is gone, whatever it waits for."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held
        continue
    os._exit(0)


def main() -> NoReturn:
    """A rank above 0, as rank 0 starts it."""
    place: RankPlace = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    join(place)
    model, _ = load_slice(place.spec)
    serve(CausalForestModel(model, place.spec.source))
