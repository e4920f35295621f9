"""Files of the hub: from the local cache first, by the network only when some are missing.

The hub's library, which takes a while to import, is imported for hub ids only.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dsbd_cli.errors import ModelNotFoundError, one_line
from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts
from dsbd_cli.models.checkpoints.registry import Location

CONNECT_TIMEOUT_S = 2.0

_COMMON = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
_SAFE = ["model.safetensors", "model-*.safetensors"]
_PICKLE = ["pytorch_model.bin", "pytorch_model-*.bin"]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def folder_of(location: Location, role: str) -> Path:
    """Return the folder with the files of a hub repository, which are downloaded if they are not all cached.

    Raises ModelNotFoundError within seconds when they are not cached and the hub cannot be reached.
    """
    name = f"{role} model {shown(location)!r}"
    folder = hub_folder(location, name, "config.json", [[*_COMMON, *_SAFE], [*_COMMON, *_PICKLE]])
    if "gguf" in location.path.lower() and not has_weights(folder):
        raise ModelNotFoundError(
            f"{name} holds GGUF files: download the one you want (`hf download {location.path} FILE`, or all parts of "
            f"one: `hf download {location.path} --include 'NAME-*-of-*.gguf'`) and give it"
        )
    return folder


def shown(location: Location) -> str:
    """Return a hub id with its revision, if it has one."""
    return location.path if location.revision is None else f"{location.path}@{location.revision}"


def hub_folder(location: Location, name: str, config: str, patterns: list[list[str]]) -> Path:
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
        cached = try_to_load_from_cache(location.path, config, cache_dir=cache, revision=location.revision)
    except HFValidationError:
        raise ModelNotFoundError(f"{location.path!r} is not a possible hub id") from None
    return Path(cached).parent if isinstance(cached, str) else None


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
