"""One target over several processes (tensor parallelism), driven by this process, which is rank 0.

Every rank holds a slice of each layer, loaded by transformers (`DistributedConfig`), and its slice of the cache. The
other ranks are processes that rank 0 starts on its machine. They run `serve` and repeat what rank 0 does: the same
calls of the same adapter, in the same order, so that every rank takes part in the sums inside a layer. Draft, trees and
rules live on rank 0 alone.

A command is sent as a small object over gloo, followed by its tensors. Sending it reads nothing back from a device.
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
from dsbd_cli.models.cache import ForestCache
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.models.transformers_backend.causal import CausalForestModel

TIMEOUT = timedelta(hours=2)  # of a collective: weights load at different speeds
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of a model: the model's spec, the rank's number, and the folder that all ranks share, which holds their
    file store and logs."""

    spec: ModelSpec
    rank: int
    folder: str


def check_ranks(checkpoint: Checkpoint) -> None:
    """Raise UsageError or UnsupportedModelError for a model that cannot be split into `tensor_parallel` parts."""
    spec, name = checkpoint.spec, checkpoint.name
    count = spec.tensor_parallel
    if spec.device_map is not None or spec.device not in ("auto", "cpu", "cuda"):
        device = spec.device_map or spec.device
        raise UsageError(
            f"tensor_parallel is {count}, but the model is to lie on {device}: drop one of them",
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
    text = checkpoint.config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(f"{name} is a {text.model_type}, which transformers has no plan to split")
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or groups % count:
        raise UnsupportedModelError(
            f"{name} has {groups} key-value heads and {heads} heads, which {count} ranks cannot share evenly: "
            "choose a --set tensor-parallel that divides both"
        )


class Ranks:
    """The processes of a model's other ranks, and the exchange with them. A process can split one model only."""

    def __init__(self, spec: ModelSpec) -> None:
        """Start the ranks and join their group. Raises ModelError where a rank ends, UsageError where this process is
        in a group already."""
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

    def _start(self, rank: RankPlace) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)  # under Ray this process alone has some of them
        environment = {**os.environ, "PYTHONPATH": paths, **_variables(rank)}
        with (self._folder / f"{rank.rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for rank 0
            )
        assert process.stdin is not None
        pickle.dump(rank, process.stdin)
        process.stdin.flush()  # and stays open: its end tells the rank that we are gone
        return process

    def error(self, what: str) -> ModelError:
        """Return the error that tells why the ranks cannot go on, with the last message of the first rank that has
        failed."""
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
        """Have every other rank call the method `name` of its model with these arguments, which may hold tensors.
        Raises ModelError where the ranks have ended."""
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
    """Rank 0's slice of a model. Each call is sent to the other ranks before it is made here."""

    def __init__(self, model: Any, name: str, ranks: Ranks) -> None:
        self._ranks: Ranks | None = None
        super().__init__(model, name)  # its first forward is also that of the others' constructors
        self._ranks = ranks

    @property
    def capturable(self) -> bool:
        """False, because a replayed graph would send nothing to the other ranks."""
        return False

    def stock(self) -> nn.Module:
        """Raise UsageError, because transformers' own loop would run on rank 0 alone."""
        raise UsageError("a target with tensor_parallel cannot be compared with transformers' generate: load it whole")

    def close(self) -> None:
        """End the other ranks; the model is of no use afterwards."""
        if self._ranks is not None:
            self._ranks.close()

    def _call_others(self, name: str, *arguments: object) -> None:
        if self._ranks is not None:
            self._ranks.tell(name, *arguments)

    def _new_cache(self, device: torch.device) -> ForestCache:
        cache = super()._new_cache(device)
        if isinstance(cache, RecurrentCache):
            raise UnsupportedModelError(
                f"{self.architecture} has recurrent layers, which tensor_parallel does not split"
            )
        return cache

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Allocate cache memory on all ranks."""
        self._call_others("reserve", rows, slots, window)
        super().reserve(rows, slots, window)

    def release(self) -> None:
        """Free the cache's memory on all ranks."""
        self._call_others("release")
        super().release()

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these cache rows on all ranks."""
        self._call_others("select_rows", rows)
        super().select_rows(rows)

    def clear(self, row: int, start: int = 0) -> None:
        """Zero a cache row on all ranks."""
        self._call_others("clear", row, start)
        super().clear(row, start)

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows on all ranks."""
        self._call_others("copy_prefixes", copies)
        super().copy_prefixes(copies)

    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Copy cache contents slot by slot on all ranks."""
        self._call_others("move", src_slots, dst_slots, common_prefix)
        super().move(src_slots, dst_slots, common_prefix)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Run the forward on all ranks. Every rank has the logits; rank 0 returns them."""
        self._call_others("forward", batch, logits)
        with self._collective():
            return super().forward(batch, logits=logits)

    def plain(self, tokens: Tensor) -> Tensor:
        """Run an ordinary causal forward on all ranks."""
        self._call_others("plain", tokens)
        with self._collective():
            return super().plain(tokens)

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Enclose a forward of all ranks. Where it fails here, the others are left in the middle of theirs and nothing
        can follow, so ModelError is raised."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self._ranks is None:
                raise
            raise self._ranks.error(f"failed in a forward ({type(error).__name__})") from error


def load_slice(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Load this rank's slice of a model, and the tokenizer. All ranks call it at once."""
    from transformers.distributed.configuration_utils import DistributedConfig

    # embeddings in slices would look up tokens by a boolean mask, which reads the host in every forward
    plan = {"model.embed_tokens": "replicate"}
    if checkpoint.config.get_text_config(decoder=True).tie_word_embeddings:
        plan["lm_head"] = "replicate"  # it is the same matrix
    parts = checkpoint.spec.tensor_parallel
    return load(checkpoint, distributed_config=DistributedConfig(tp_size=parts, tp_plan=plan))


def join(rank: RankPlace) -> None:
    """Join the process group of all ranks. Tensors on a CPU are sent by gloo, those on a GPU by NCCL."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one machine
    os.environ |= _variables(rank)
    gpus = rank.spec.device != "cpu" and torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(rank.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        init_method=f"file://{rank.folder}/store",
        rank=rank.rank,
        world_size=rank.spec.tensor_parallel,
        timeout=TIMEOUT,
    )


def serve(forest: CausalForestModel) -> NoReturn:
    """Serve as a rank: repeat the calls of rank 0 until it has ended."""
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
    """Placeholder for a tensor that is sent by itself. place: its number in the order of sending."""

    place: int


def _packed(argument: object, tensors: list[Tensor]) -> object:
    """Return an argument without its tensors, which are appended to `tensors`."""
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
    """Return a view of the same memory in a dtype that every backend sends."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _variables(own_rank: RankPlace) -> dict[str, str]:
    """Return the environment variables that transformers reads to bind a rank to its device."""
    rank = str(own_rank.rank)
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(own_rank.spec.tensor_parallel)}


def _end_with_rank_0() -> None:
    """Wait until rank 0 has ended and then end this process, whatever it waits for. It runs in a thread of its own."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held
        continue
    os._exit(0)


def main() -> NoReturn:
    """Run as a rank above 0, in a process that rank 0 has started."""
    rank: RankPlace = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    join(rank)
    model, _ = load_slice(Checkpoint.open(rank.spec))
    serve(CausalForestModel(model, rank.spec.source))
