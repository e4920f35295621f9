"""Names of models and where their files are. No torch, no network: a wrong name fails before anything is loaded."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsbd_cli.errors import ModelNotFoundError, UsageError

ALIASES: dict[str, str] = {
    # pairs of the paper
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-68m": "JackFram/llama-68m",
    "llama-160m": "JackFram/llama-160m",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "opt-13b": "facebook/opt-13b",
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-1.3b": "facebook/opt-1.3b",
    "opt-125m": "facebook/opt-125m",
    "llama-7b": "huggyllama/llama-7b",
    # pairs that need no licence click and fit on one small GPU
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "gemma-3-270m": "google/gemma-3-270m",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-1.4b": "EleutherAI/pythia-1.4b",
    "pythia-6.9b": "EleutherAI/pythia-6.9b",
    "gpt2": "openai-community/gpt2",
    "gpt2-xl": "openai-community/gpt2-xl",
}

BUILTIN: tuple[str, ...] = ("builtin:target", "builtin:draft")

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w][\w./-]*))?")


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a model: `path` is a folder or a GGUF file that exists, or an id on the hub.

    Attributes:
        revision: a branch, tag or commit on the hub; None: its main branch.
    """

    kind: Literal["folder", "file", "hub"]
    path: str
    revision: str | None = None


def user_file() -> Path:
    """Return the TOML file with the user's own names; it need not exist unless $DSBD_MODELS_FILE names it."""
    if named := os.environ.get("DSBD_MODELS_FILE"):
        return expanded(named)
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return expanded(home) / "dsbd" / "models.toml"


def expanded(path: str) -> Path:
    """Return a path with the home folder in place of its ~. Where there is no such folder, the path stays as it is."""
    return Path(os.path.expanduser(path))


def user_aliases() -> dict[str, str]:
    """Return the table [models] of the user's file: name = "org/name" or a folder (./ and ../ count from the file).

    Raises UsageError when the file is not TOML, has a line outside of a table, or the table is not one of strings.
    """
    path = user_file()
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if os.environ.get("DSBD_MODELS_FILE"):
            raise UsageError(f"DSBD_MODELS_FILE names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise UsageError(f"models file {path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"models file {path} cannot be read as TOML: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"models file {path} cannot be read: a value has too many digits or levels") from None
    if loose := [name for name, value in whole.items() if name != "models" and not isinstance(value, dict)]:
        raise UsageError(f"models file {path}: {loose[0]} stands outside of the table [models]: put it there")
    table = whole.get("models", {})
    if not isinstance(table, dict) or not all(isinstance(source, str) for source in table.values()):
        raise UsageError(f'models file {path}: [models] must hold lines of the form name = "org/name" or "./folder"')
    return {name: _from_file(source, path.parent) for name, source in table.items()}


def _from_file(source: str, folder: Path) -> str:
    return str((folder / source).resolve()) if source.startswith(("./", "../")) else source


def known_names() -> list[str]:
    """Return every name that resolves without being a folder or a hub id, sorted."""
    return sorted({*BUILTIN, *ALIASES, *user_aliases()})


def parts_of(source: str) -> tuple[str, tuple[str, ...]]:
    """Split `model+adapter+adapter` into the model and its adapters. A known name or an existing path that holds a + is
    not split."""
    if "+" not in source or source in ALIASES or source in user_aliases() or expanded(source).exists():
        return source, ()
    model, *adapters = source.split("+")
    return model, tuple(adapters)


def resolve(source: str, role: str = "target") -> Location:
    """Return where the model of `source` is. In this order it may be one of the shipped pair, one of the user's names,
    one of our names, an existing folder or GGUF file, or a hub id. `@revision` may follow a hub id and its name.

    Raises ModelNotFoundError (naming the role) for a folder that is missing and for a name that is not known.
    """
    source, adapters = parts_of(source)
    if not source and not adapters:
        raise ModelNotFoundError(f"{role} model '' has no name")
    if not all((source, *adapters)):
        raise ModelNotFoundError(f"{role} model {'+'.join((source, *adapters))!r} has an empty name beside a +")
    if source.startswith("builtin:"):
        return _builtin(source, role)
    names = {**ALIASES, **user_aliases()}
    name, at, revision = source.partition("@")
    named = f"{names[name]}@{revision}" if at and source not in names and name in names else names.get(source)
    path_or_id = source if named is None else named
    shown = repr(source) if named is None else f"{source!r} (which means {named!r})"
    folder = expanded(path_or_id)
    if folder.is_dir():
        return Location("folder", str(folder))
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        return Location("file", str(folder))
    if folder.exists():
        raise ModelNotFoundError(
            f"{role} model {shown} is a file: give the folder that holds config.json, or a file that ends in .gguf"
        )
    if hub := hub_location(path_or_id):
        return hub
    if _looks_like_path(path_or_id) or folder.suffix.lower() == ".gguf":
        what = "file" if folder.suffix.lower() == ".gguf" else "folder"
        raise ModelNotFoundError(f"{role} model {shown}: there is no such {what}")
    raise ModelNotFoundError(f"{role} model {shown} is not known{_near(source)}")


def hub_location(source: str) -> Location | None:
    """Return the place of a hub id with its revision; None for a source that is no hub id."""
    if _looks_like_path(source.partition("@")[0]) or not (match := _HUB_ID.fullmatch(source)):
        return None
    return None if source.lower().endswith(".gguf") else Location("hub", match[1], match[2])


def _builtin(source: str, role: str) -> Location:
    if source not in BUILTIN:
        raise ModelNotFoundError(f"{role} model {source!r} is not known; the shipped pair is {' and '.join(BUILTIN)}")
    folder = Path(__file__).parents[1] / "builtin" / source.removeprefix("builtin:")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{role} model {source!r} is not in this installation ({folder}): install dsbd again")
    return Location("folder", str(folder))


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or (os.sep != "/" and os.sep in source)


def _near(source: str) -> str:
    names = known_names()
    lowered = {name.lower(): name for name in names}
    near = [lowered[name] for name in difflib.get_close_matches(source.lower(), lowered, n=3, cutoff=0.5)]
    hint = "give a name, a folder or a hub id of the form org/name"
    return f"; did you mean {', '.join(near)}? ({hint})" if near else f": {hint}"
