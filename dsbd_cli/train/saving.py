"""A head in training on disk: checkpoints from which training goes on, and the folder that is published."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, OutputError, one_line, writing
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.train.draft_head import DraftHeadStudent
from dsbd_cli.train.trim import stored_dtype

MOMENTS = "optimizer.safetensors"


def save_draft_head(
    head: DraftHeadStudent, folder: Path, dtype: str, moments: Mapping[str, Tensor] | None = None
) -> None:
    """Write the head. What is in `folder` is replaced as a whole, or stays. moments: tensors of the optimizer, from
    which training goes on. Raises OutputError."""
    recover(folder)
    unfinished, backup = folder.with_name(f".{folder.name}.unfinished"), _backup_path(folder)
    try:
        for path in (unfinished, backup):
            shutil.rmtree(path, ignore_errors=True)
        unfinished.mkdir(parents=True)
        head.write(unfinished, dtype)
        if moments is not None:
            save_file({name: tensor.contiguous().cpu() for name, tensor in moments.items()}, unfinished / MOMENTS)
        if folder.exists():
            folder.replace(backup)
        unfinished.replace(folder)
        shutil.rmtree(backup, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OutputError):  # where the second rename failed, the first one is undone
            recover(folder)


def publish_draft_head(head: DraftHeadStudent, spec: ModelSpec, folder: Path) -> None:
    """Write the trained head into `folder`, next to what it holds, in the dtype of the target of `spec`. The config
    comes last, because without it the folder is no checkpoint. Raises OutputError."""
    whole = folder / ".draft"
    text = Checkpoint.open(spec).config.get_text_config(decoder=True)
    save_draft_head(head, whole, stored_dtype(text))
    with writing(folder):
        for path in sorted(whole.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)
        whole.rmdir()


def recover(folder: Path) -> None:
    """Restore what `folder` held where `save_draft_head` was killed between its two renames. Raises OutputError."""
    with writing(folder):
        if not folder.exists() and _backup_path(folder).exists():
            _backup_path(folder).replace(folder)


def _backup_path(folder: Path) -> Path:
    """Return the name that `folder` has while another one takes its place."""
    return folder.with_name(f".{folder.name}.before")


def read_moments(folder: Path) -> dict[str, Tensor]:
    """Read the optimizer's tensors of a checkpoint. Raises ModelError where they are missing or damaged."""
    try:
        return load_file(folder / MOMENTS)
    except (OSError, SafetensorError) as error:
        reason = one_line(error)
        raise ModelError(f"{folder / MOMENTS} cannot be read ({reason}): remove {folder} to begin anew") from None
