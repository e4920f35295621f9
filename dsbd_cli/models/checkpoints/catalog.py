"""Names of models, which of them are on this machine, and whether two of them fit together."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import constants

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import DsbdError, OutputError, UsageError, is_utf8
from dsbd_cli.io.lines.replace import replacing
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts
from dsbd_cli.models.checkpoints.hub import cached_folder, gguf_files, has_weights, shown
from dsbd_cli.models.checkpoints.registry import (
    ALIASES,
    BUILTIN,
    parts_of,
    resolve,
    user_aliases,
    user_file,
)

if TYPE_CHECKING:
    from dsbd_cli.models.tokenizer import HFCodec

NO_LIMIT = 1 << 40

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"^\[models\][ \t]*(#.*)?$", re.MULTILINE)

State = Literal["here", "partly here", "absent"]
Origin = Literal["built-in", "yours", "ours", "hub cache"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A name, where it leads, whether the files are on this machine, and whose name it is."""

    name: str
    source: str
    state: State
    origin: Origin


def listed() -> list[CatalogEntry]:
    """Return the built-in pair, the user's names, ours, and what else is in the hub cache. Nothing is loaded or
    fetched."""
    own = user_aliases()
    entries = [CatalogEntry(name, "shipped with dsbd", _state(name), "built-in") for name in BUILTIN]
    entries += [CatalogEntry(name, source, _state(source), "yours") for name, source in sorted(own.items())]
    entries += [
        CatalogEntry(name, source, _state(source), "ours")
        for name, source in sorted(ALIASES.items())
        if name not in own
    ]
    named = {entry.source for entry in entries}
    cache = Path(constants.HF_HUB_CACHE)
    for folder in sorted(cache.glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if repo not in named and _state(repo) != "absent":
            entries.append(CatalogEntry(repo, repo, _state(repo), "hub cache"))
    return entries


def _state(source: str) -> State:
    try:
        location = resolve(source)
        folder = cached_folder(location) if location.kind == "hub" else Path(location.path)
        if folder is None:
            return "absent"
        if files := [folder] if folder.is_file() else gguf_files(folder):
            return "here" if all(part.is_file() for file in files for part in gguf_parts(file)) else "partly here"
        if not (folder / "config.json").is_file():
            return "absent"
        return "here" if has_weights(folder) else "partly here"
    except (DsbdError, OSError):  # also a folder that may not be entered
        return "absent"


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit of two models: number of tokens that both name alike, and positions that both have (None: no limit)."""

    tokens: int
    positions: int | None
    notes: tuple[str, ...]


def fit(large: Checkpoint, small: Checkpoint) -> Fit:
    """Check whether a small model can draft for a large one, as far as tokenizers and configs tell; no weights are
    loaded.

    Raises PairError where they do not fit, UnsupportedModelError for a trimmed target, ModelError for damaged files.
    """
    from dsbd_cli.models.checkpoints.lm_head import lm_head_rows, trimmed_target
    from dsbd_cli.models.checkpoints.vocabulary import check_pair

    ours, theirs = large.codec, small.codec
    our_text, their_text = (checkpoint.config.get_text_config(decoder=True) for checkpoint in (large, small))
    our_limit, their_limit = (getattr(text, "max_position_embeddings", None) for text in (our_text, their_text))
    if lm_head_rows(large.path) is not None:
        raise trimmed_target(large.spec)
    notes = check_pair(ours, theirs, our_text.vocab_size, their_text.vocab_size)
    if (rows := lm_head_rows(small.path)) is not None:
        notes += (f"the draft is trimmed: its head has {rows} rows, and it proposes no other tokens",)
    limits = [limit for limit in (our_limit, their_limit) if limit is not None]
    if our_limit != their_limit:
        notes += (f"positions differ: {our_limit} in the target, {their_limit} in the draft; the fewer count",)
    shared = ours.vocabulary.items() & theirs.vocabulary.items()
    return Fit(len(shared), min(limits, default=None), notes)


def tokenizer_of(spec: ModelSpec) -> HFCodec:
    """Return the codec of a checkpoint for texts of any length, from its small files alone."""
    codec = Checkpoint.open(spec, fetch=False).codec
    tokenizer: Any = codec.tokenizer
    tokenizer.model_max_length = NO_LIMIT  # no model runs these texts, so none can be too long for one
    return codec


def add_name(name: str, source: str) -> Path:
    """Write a name into the user's models file, and leave the rest of the file as it is. Returns the file.

    Raises UsageError for a name that is taken or impossible, ModelNotFoundError for a source that leads nowhere.
    """
    if name.startswith("builtin") or not _NAME.fullmatch(name):
        raise UsageError(f"NAME is {name!r}, but must be letters, digits and . _ + - (and not begin with builtin)")
    path = user_file()
    if path.is_symlink():  # a link stays a link
        path = path.resolve()
    if str(path).startswith("~"):
        raise UsageError(
            f"{path} cannot be written, because there is no such home folder: name a file in DSBD_MODELS_FILE"
        )
    if path.exists() and not path.is_file():  # such as /dev/null, which a file would take the place of
        raise UsageError(f"{path} is no ordinary file, so that nothing can be added to it")
    made = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # a file that DSBD_MODELS_FILE names must be there to be read
        with replacing(path) as stream:  # locked, so that of two commands at once neither loses its name
            path_or_id = _place(name, source, path)
            text = _with_line(path.read_text(encoding="utf-8"), name, path_or_id)
            if _table(text).get(name) != path_or_id:
                raise UsageError(f"{path} is written in a way that nothing can be added to: add {name} by hand")
            os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode))
            buffered = BufferedWriter(stream)
            buffered.write(text.encode())
            buffered.detach()
        stream.close()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    except DsbdError:
        if made and path.is_file() and not path.stat().st_size:  # another command may have written to it
            path.unlink()
        raise
    return path


def _place(name: str, source: str, path: Path) -> str:
    """Return the meaning of the new name: a hub id with its revision, or the absolute path of a folder or a GGUF file.

    Raises UsageError where the name is there already or would mean itself, or the path is not UTF-8.
    """
    own = user_aliases()
    if name in own:
        raise UsageError(f"{name} is there already and means {own[name]}: change it in {path}")
    if name == source:
        raise UsageError(f"{name} would mean itself: name a folder or a hub id")
    if parts_of(source)[1]:
        raise UsageError(f"{source} has an adapter, but a name stands for a model alone: NAME+ADAPTER uses it")
    location = resolve(source, "target")
    path_or_id = shown(location) if location.kind == "hub" else str(Path(location.path).resolve())
    if not is_utf8(path_or_id):
        raise UsageError(f"SOURCE is {path_or_id!r}, whose name is not UTF-8, as {path} must be: rename the folder")
    return path_or_id


def _table(text: str) -> dict[str, object]:
    try:
        table = tomllib.loads(text).get("models")
    except tomllib.TOMLDecodeError:
        return {}
    return table if isinstance(table, dict) else {}


def _with_line(text: str, name: str, source: str) -> str:
    key = name if _BARE_KEY.fullmatch(name) else json.dumps(name)
    line = f"{key} = {json.dumps(source, ensure_ascii=False)}\n"
    if header := _HEADER.search(text):
        begin, rest = text[: header.end()], text[header.end() :].removeprefix("\n")
        return f"{begin}\n{line}{rest}"
    gap = "\n" if text else ""
    return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{gap}[models]\n{line}"
