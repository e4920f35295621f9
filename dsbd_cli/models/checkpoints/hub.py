"""Find the folder of a named model: for hub ids in the local cache first, by the network only when files are missing.

The hub's library, which takes a while to import, is imported for hub ids only.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, ModelNotFoundError, UsageError, one_line
from dsbd_cli.models.checkpoints.gguf_parts import gguf_parts, whole_gguf
from dsbd_cli.models.checkpoints.registry import Location, expanded, hub_location, parts_of, resolve

CONNECT_TIMEOUT_S = 2.0

_COMMON = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
_SAFE = ["model.safetensors", "model-*.safetensors"]
_PICKLE = ["pytorch_model.bin", "pytorch_model-*.bin"]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_ADAPTER_TEXT = [*_VOCABULARIES, TOKENIZER_CONFIG, CHAT_TEMPLATE, "*tokens*.json", "merges.txt"]


def locate(spec: ModelSpec) -> Path:
    """Return the folder with the checkpoint's files, or its GGUF file, the first of several parts. Files of the hub are
    fetched if they are not here yet.

    Its adapters are looked for, too. No tensor library is imported, so that a wrong name fails at once.
    """
    location = resolve(spec.source, spec.role)
    locate_adapters(spec)
    if location.kind == "hub":
        return folder_of(location, spec.role)
    folder = Path(location.path)
    shown_name = f"{spec.role} model {spec.source!r}"
    if location.kind == "file":
        return whole_gguf(folder, shown_name)
    if files := gguf_files(folder):
        if len(files) == 1:
            return whole_gguf(files[0], shown_name)
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{shown_name} holds {len(files)} GGUF files: give one of {names}")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{spec.role} model {spec.source!r}: {folder} holds no config.json, so it is no checkpoint folder"
        )
    return folder


def stored_bytes(place: Path) -> int:
    """Return the bytes of the weights in a checkpoint folder or in all parts of a GGUF file. Copies in other forms
    beside them do not count."""
    if place.is_file():
        return sum(part.stat().st_size for part in gguf_parts(place))
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors", "*.bin"):
        if files := [file for file in place.glob(pattern) if file.is_file()]:
            return sum(file.stat().st_size for file in files)
    return 0


def locate_adapters(spec: ModelSpec) -> list[Path]:
    """Return the folders of a model's adapters, which are fetched from the hub if they are not here yet.

    Raises ModelNotFoundError, ModelError for a folder that holds none, UsageError where adapters cannot be merged, or
    the base's tokenizer is asked for and no adapter brings another.
    """
    named = (*parts_of(spec.source)[1], *spec.adapters)
    folders = [_adapter_folder(source, f"{spec.role} adapter {source!r}") for source in named]
    if spec.tokenizer is not None and not any(map(brought, folders)):
        reason = f"no adapter of {spec.source} brings a tokenizer or a chat template: drop it"
        raise UsageError(f"tokenizer is {spec.tokenizer}, but {reason}", field="tokenizer", value=spec.tokenizer)
    if not folders:
        return []
    for field, value in (("device_map", spec.device_map), ("tensor_parallel", spec.tensor_parallel)):
        if value not in (None, 1):
            reason = "adapters are merged on one device: drop it, or load a merged checkpoint"
            raise UsageError(f"{field} is {value}, but {reason}", field=field, value=value)
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{spec.role} model {spec.source!r} has an adapter, which needs: pip install 'dsbd[adapters]'")
    return folders


def brought(folder: Path) -> tuple[str, ...]:
    """Return what an adapter brings beside its weights, in words: a tokenizer, a chat template, both or neither. A
    folder of a whole checkpoint has its own."""
    if has_weights(folder):
        return ()
    settings = folder / TOKENIZER_CONFIG
    has = {
        "tokenizer": any(any(folder.glob(pattern)) for pattern in _VOCABULARIES),
        "chat template": (folder / CHAT_TEMPLATE).is_file()
        or (settings.is_file() and b'"chat_template"' in settings.read_bytes()),
    }
    return tuple(name for name, there in has.items() if there)


def _adapter_folder(source: str, name: str) -> Path:
    folder = expanded(source)
    if not folder.exists() and (location := hub_location(source)) is not None:
        folder = _hub_folder(location, name, ADAPTER_CONFIG, [[ADAPTER_CONFIG, ADAPTER_WEIGHTS, *_ADAPTER_TEXT]])
    if not folder.is_dir():
        raise ModelNotFoundError(f"{name}: there is no such folder")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{name}: {folder} holds no {ADAPTER_CONFIG}, so it is no adapter of peft")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        hint = ": adapter_model.bin is a pickle, save it as safetensors" if any(folder.glob("*.bin")) else ""
        raise ModelError(f"{name}: {folder} holds no {ADAPTER_WEIGHTS}{hint}")
    return folder


def folder_of(location: Location, role: str) -> Path:
    """Return the folder with the files of a hub repository, which are downloaded if they are not all cached.

    Raises ModelNotFoundError within seconds when they are not cached and the hub cannot be reached.
    """
    name = f"{role} model {shown(location)!r}"
    folder = _hub_folder(location, name, "config.json", [[*_COMMON, *_SAFE], [*_COMMON, *_PICKLE]])
    if "gguf" in location.path.lower() and not has_weights(folder):
        raise ModelNotFoundError(
            f"{name} holds GGUF files: download the one you want (`hf download {location.path} FILE`, or all parts of "
            f"one: `hf download {location.path} --include 'NAME-*-of-*.gguf'`) and give it"
        )
    return folder


def shown(location: Location) -> str:
    """Return a hub id with its revision, if it has one."""
    return location.path if location.revision is None else f"{location.path}@{location.revision}"


def _hub_folder(location: Location, name: str, config: str, patterns: list[list[str]]) -> Path:
    """Return the folder of a repository, from the cache where its files are there. patterns: those of the files to
    fetch, and further ones for where the first bring no weights."""
    from huggingface_hub import constants

    cached = cached_folder(location, config)
    whole = has_weights if config != ADAPTER_CONFIG else (lambda folder: (folder / ADAPTER_WEIGHTS).is_file())
    if cached is not None and whole(cached):
        return cached
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{name} is not in the hub cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set: "
            "download it first, or give a folder"
        )
    if not reachable(constants.ENDPOINT):
        raise ModelNotFoundError(
            f"{name} is not in the hub cache ({constants.HF_HUB_CACHE}) and {constants.ENDPOINT} "
            "cannot be reached: connect, set HF_HOME to where it was downloaded, or give a folder"
        )
    return _download(location, name, patterns)


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder without other weights; of one in parts the first, which may be missing."""
    others = (path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    return [] if any(others) else sorted({gguf_parts(file)[0] for file in folder.glob("*.gguf")})


def cached_folder(location: Location, config: str = "config.json") -> Path | None:
    """Return the snapshot folder of a repository whose config is in the local hub cache; None where it is not."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cache = constants.HF_HUB_CACHE
        found = try_to_load_from_cache(location.path, config, cache_dir=cache, revision=location.revision)
    except HFValidationError:
        raise ModelNotFoundError(f"{location.path!r} is not a possible hub id") from None
    return Path(found).parent if isinstance(found, str) else None


def has_weights(folder: Path) -> bool:
    """Return whether weights (of either format) are here with all their shards. A damaged index counts as here, because
    the load then names its fault."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return True
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file() and all((folder / shard).is_file() for shard in _shards(index)):
            return True
    return False


def _shards(index: Path) -> set[str]:
    """Return the files that an index names; none where it is damaged."""
    try:
        return set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _contact(endpoint: str) -> tuple[str, int]:
    """Return host and port of the endpoint, or of its proxy. Raises ValueError for an address that is none."""
    url = urlsplit(endpoint)
    host, scheme = url.hostname or "", url.scheme or "https"
    port = url.port or (80 if scheme == "http" else 443)
    proxy = getproxies().get(scheme)
    if proxy and not proxy_bypass(host):
        via = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = via.hostname or host, via.port or port
    return host, port


def reachable(endpoint: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Return whether a connection to the endpoint (or to its proxy) opens in time, name look-up included. An address
    that is none is not reachable."""
    try:
        host, port = _contact(endpoint)
    except ValueError:
        return False
    opened = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            opened.set()
        except OSError:
            pass

    attempt = threading.Thread(target=connect, daemon=True)  # a name look-up cannot be given a timeout otherwise
    attempt.start()
    attempt.join(timeout_s)
    return opened.is_set()


def _download(location: Location, name: str, patterns: list[list[str]]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, revision = location.path, location.revision
    try:
        for wanted in patterns:
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
            if any(folder.glob("*.safetensors")):
                break
    except GatedRepoError:
        raise ModelNotFoundError(
            f"{name} is gated: accept its licence on {constants.ENDPOINT}/{repo}, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(f"{name} is not on {constants.ENDPOINT}, or is private: check the id") from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{name}: the repository has no revision {revision!r}") from None
    except Exception as error:  # of the hub, the network's library or the disk
        reason = one_line(error)
        raise ModelNotFoundError(f"{name} could not be downloaded: {reason}") from error
    return folder
