"""Options of work in several processes, and the settings that they give. None means not given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from dsbd_cli.cli.options.declare import option
from dsbd_cli.cli.options.options import DeviceOptions
from dsbd_cli.config.spelling import parse_settings
from dsbd_cli.config.variant import Setting, spelling
from dsbd_cli.errors import UsageError, require_package, shorten

if TYPE_CHECKING:
    from dsbd_cli.scale.workers import PoolConfig

T = TypeVar("T")

SCALE = "Several processes"
NUMBER: Setting[str | None] = Setting(
    field="number",
    default=None,
    text="N; 4..32: begin with 4 and take up to 32 as they come; auto: as many as the GPUs allow",
    required=True,
)
RAY: Setting[str | None] = Setting(
    field="ray",
    default=None,
    text="auto or HOST:PORT, a Ray that runs",
    shown="start one here, and stop it in the end",
)
GPUS: Setting[int | None] = Setting(
    field="gpus",
    kind=int,
    default=None,
    text="of each worker",
    shown="as many as --set tensor-parallel says, where there are any",
    least=1,
)
TIMEOUT: Setting[float] = Setting(
    field="timeout",
    kind=float,
    default=600.0,
    text="seconds without a sign of life after which a worker is replaced",
    least=1,
)
WORKERS = (NUMBER, RAY, GPUS, TIMEOUT)


@dataclass(frozen=True)
class ScaleOptions:
    """Options of several processes that answer one input."""

    workers: str | None = option(
        SCALE,
        f"answer in worker processes on Ray (needs the extra ray): {spelling(WORKERS)}"
        + "".join(f"; {setting.name}: {setting.help}" for setting in WORKERS),
        metavar="N",
    )
    order: Literal["input", "done"] | None = option(
        SCALE,
        "input: records in the order of the rows; done: each as soon as it is ready, `index` says where it belongs",
        default="input",
        metavar="HOW",
    )
    shard: str | None = option(
        SCALE,
        "answer only rows I, I + N, I + 2N, ..., into FILE.I-of-N, for dsbd merge; auto: I and N of Slurm, "
        "torchrun or SkyPilot; auto/N: I of Kubernetes",
        metavar="I/N",
    )


def pool_config(scale: ScaleOptions, devices: DeviceOptions) -> PoolConfig | None:
    """Return the settings of the workers that the options ask for; None without --workers. Raises UsageError."""
    if scale.workers is None:
        return None
    settings = parse_settings("--workers", scale.workers, WORKERS)

    def value(setting: Setting[T]) -> T:
        return settings.get(setting.field, setting.default)  # type: ignore[return-value]

    least, most = _worker_range(value(NUMBER) or "")
    if devices.batch_size == "auto":
        raise UsageError(
            "--batch-size auto cannot be used with --workers, which fill batches of a known size: give one"
        )
    require_package("--workers", "ray", "ray")
    address = value(RAY)
    if address is not None and address.startswith("ray://"):
        raise UsageError(
            f"--workers: ray is {address}, but must be auto or HOST:PORT: the command has to run inside the cluster, "
            "as with ray job submit"
        )
    from dsbd_cli.scale.workers import PoolConfig

    gpus, processes = _gpus(value(GPUS), devices), devices.tensor_parallel or 1
    return PoolConfig(least, most, address, gpus, processes, timeout_s=value(TIMEOUT))


def _worker_range(text: str) -> tuple[int, int | None]:
    """Return the least and the most workers of `8`, `4..32` or `auto`. The most is None for auto. Raises UsageError."""
    if text == "auto":
        return 1, None
    first, dots, last = text.partition("..")
    try:
        least, most = int(first), int(last if dots else first)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise UsageError(f"--workers is {shorten(text)}, but must be a number from 1, a range such as 4..32, or auto")
    return least, most


def _gpus(gpus: int | None, devices: DeviceOptions) -> int | None:
    """Return the GPUs of each worker, 0 with --device cpu; None: one for each process of a worker, if there are GPUs.

    Raises UsageError.
    """
    device = devices.device
    if device == "cpu":
        if gpus is not None:
            raise UsageError(f"--workers: gpus={gpus} would do nothing with --device cpu: drop one of them")
        return 0
    if device is not None and device.startswith("cuda:"):
        raise UsageError(f"--device is {device}, but each worker has GPUs of its own, counted from 0: drop it")
    if gpus is not None and gpus < (devices.tensor_parallel or 1):
        raise UsageError(
            f"--workers: gpus is {gpus}, but --set tensor-parallel is {devices.tensor_parallel}: give as many or more"
        )
    return gpus
