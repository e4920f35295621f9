"""Options of work in several processes, and what they mean. None means not given."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dsbd_cli.errors import UsageError, shorten
from dsbd_cli.job.cli.declare import option
from dsbd_cli.job.cli.options import DeviceOptions

if TYPE_CHECKING:
    from dsbd_cli.scale.pool import PoolConfig

__all__ = ["ScaleOptions", "pool_config"]

SCALE = "Several processes"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ScaleOptions:
    """Several processes on one input."""

    workers: Annotated[
        str | None,
        option(
            SCALE,
            "--workers",
            text="answer in N worker processes on Ray (needs dsbd[ray]); 4..32: begin with 4 and take up to 32 as "
            "they come; auto: as many as the GPUs allow",
            metavar="N",
        ),
    ] = None
    ray: Annotated[
        str | None,
        option(
            SCALE,
            "--ray",
            text="work on a Ray that runs: auto, or HOST:PORT (default: start one here, and stop it in the end)",
            metavar="ADDRESS",
        ),
    ] = None
    gpus_per_worker: Annotated[
        int | None,
        option(
            SCALE,
            "--gpus-per-worker",
            text="GPUs that each worker gets (default: as many as --tensor-parallel says, where there are any)",
            metavar="G",
        ),
    ] = None
    worker_timeout: Annotated[
        float | None,
        option(
            SCALE,
            "--worker-timeout",
            text="seconds without a sign of life after which a worker is replaced",
            default=f"{TIMEOUT_S:.0f}",
            metavar="S",
        ),
    ] = None
    order: Annotated[
        Literal["input", "done"] | None,
        option(
            SCALE,
            "--order",
            text="input: records in the order of the rows; done: each as soon as it is ready, `index` says where it "
            "belongs",
            default="input",
            metavar="HOW",
        ),
    ] = None
    shard: Annotated[
        str | None,
        option(
            SCALE,
            "--shard",
            text="answer only rows I, I + N, I + 2N, ..., into FILE.I-of-N, for dsbd merge; auto: I and N of Slurm, "
            "torchrun or SkyPilot; auto/N: I of Kubernetes",
            metavar="I/N",
        ),
    ] = None


def pool_config(scale: ScaleOptions, devices: DeviceOptions) -> PoolConfig | None:
    """What --workers and its companions ask for; None without them. Raises UsageError."""
    if scale.workers is None:
        companions = {
            "--ray": scale.ray,
            "--gpus-per-worker": scale.gpus_per_worker,
            "--worker-timeout": scale.worker_timeout,
        }
        for name, value in companions.items():
            if value is not None:
                raise UsageError(f"{name} would do nothing without --workers: drop it, or say how many workers")
        return None
    least, most = _numbers(scale.workers)
    if devices.batch_size == "auto":
        raise UsageError(
            "--batch-size auto cannot be used with --workers, which fill batches of a known size: give one"
        )
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--workers needs Ray, which is not installed: pip install 'dsbd[ray]'")
    if scale.ray is not None and (scale.ray.startswith("ray://") or not scale.ray):
        raise UsageError(
            f"--ray is {scale.ray!r}, but must be auto or HOST:PORT: the command has to run inside the cluster, "
            "as with ray job submit"
        )
    if scale.worker_timeout is not None and not scale.worker_timeout >= 1:
        raise UsageError(f"--worker-timeout is {scale.worker_timeout:g}, but must be 1 second or more")
    if scale.gpus_per_worker is not None and scale.gpus_per_worker < 0:
        raise UsageError(f"--gpus-per-worker is {scale.gpus_per_worker}, but must be 0 or more")
    from dsbd_cli.scale.pool import PoolConfig

    processes = devices.tensor_parallel or 1
    return PoolConfig(least, most, scale.ray, _gpus(scale, devices), processes, scale.worker_timeout or TIMEOUT_S)


def _numbers(given: str) -> tuple[int, int | None]:
    """Least and most workers of `8`, `4..32` or `auto`."""
    if given == "auto":
        return 1, None
    first, dots, last = given.partition("..")
    try:
        least, most = int(first), int(last if dots else first)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise UsageError(f"--workers is {shorten(given)}, but must be a number from 1, a range such as 4..32, or auto")
    return least, most


def _gpus(scale: ScaleOptions, devices: DeviceOptions) -> int | None:
    """GPUs of each worker; None: one where there are any."""
    place, given = devices.device, scale.gpus_per_worker
    if place == "cpu":
        if given:
            raise UsageError(f"--gpus-per-worker {given} would do nothing with --device cpu: drop one of them")
        return 0
    if place is not None and place.startswith("cuda:"):
        raise UsageError(f"--device is {place}, but each worker has GPUs of its own, counted from 0: drop it")
    if given is not None and given < (devices.tensor_parallel or 1):
        raise UsageError(
            f"--gpus-per-worker is {given}, but --tensor-parallel is {devices.tensor_parallel}: give as many or more"
        )
    return given
