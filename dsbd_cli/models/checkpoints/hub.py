"""Names -> a folder on disk: for hub ids the local cache first, the network only when files are missing.

The hub's library, which takes a while to import, is imported for hub ids only.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, ModelNotFoundError
from dsbd_cli.models.checkpoints.registry import resolve

CONNECT_TIMEOUT_S = 2.0

_COMMON = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
_SAFE = ["model.safetensors", "model-*.safetensors"]
_PICKLE = ["pytorch_model.bin", "pytorch_model-*.bin"]


def locate(spec: ModelSpec) -> Path:
    """Folder with the checkpoint's files, fetched from the hub if they are not here yet, or a GGUF file. Imports no
    tensor library, so that a wrong name is told at once."""
    location = resolve(spec.source, spec.role)
    if location.kind == "hub":
        return folder_of(location.path, spec.role)
    folder = Path(location.path)
    if location.kind == "file":
        return folder
    if files := gguf_files(folder):
        if len(files) == 1:
            return files[0]
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(
            f"{spec.role} model {spec.source!r} holds {len(files)} GGUF files: give one of {names}"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{spec.role} model {spec.source!r}: {folder} holds no config.json, so it is no checkpoint folder"
        )
    return folder


def folder_of(repo: str, role: str) -> Path:
    """Folder with the files of a hub repository, downloaded if they are not all cached.

    Raises ModelNotFoundError within seconds when they are not cached and the hub cannot be reached.
    """
    from huggingface_hub import constants

    cached = cached_folder(repo)
    if cached is not None and has_weights(cached):
        return cached
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{role} model {repo!r} is not in the hub cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set: "
            "download it first, or give a folder"
        )
    if not reachable(constants.ENDPOINT):
        raise ModelNotFoundError(
            f"{role} model {repo!r} is not in the hub cache ({constants.HF_HUB_CACHE}) and {constants.ENDPOINT} "
            "cannot be reached: connect, set HF_HOME to where it was downloaded, or give a folder"
        )
    return _download(repo, role)


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder without other weights."""
    others = (path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    return [] if any(others) else sorted(folder.glob("*.gguf"))


def cached_folder(repo: str) -> Path | None:
    """Snapshot folder of a repository whose config is in the local hub cache."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repo, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except HFValidationError:
        raise ModelNotFoundError(f"{repo!r} is not a possible hub id") from None
    return Path(config).parent if isinstance(config, str) else None


def has_weights(folder: Path) -> bool:
    """Whether weights (of either format) are here with all their shards."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return True
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / shard).is_file() for shard in shards)
    return False


def reachable(endpoint: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether a connection to the endpoint (or to the proxy that serves it) opens in time, name look-up included."""
    url = urlsplit(endpoint)
    host, scheme = url.hostname or "", url.scheme or "https"
    port = url.port or (80 if scheme == "http" else 443)
    proxy = getproxies().get(scheme)
    if proxy and not proxy_bypass(host):
        via = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = via.hostname or host, via.port or port
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


def _download(repo: str, role: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(repo, allow_patterns=[*_COMMON, *_SAFE]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo, allow_patterns=[*_COMMON, *_PICKLE]))
    except GatedRepoError:
        raise ModelNotFoundError(
            f"{role} model {repo!r} is gated: accept its licence on {constants.ENDPOINT}/{repo}, "
            "then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{role} model {repo!r} is not on {constants.ENDPOINT}, or is private: check the id"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelNotFoundError(f"{role} model {repo!r} could not be downloaded: {reason}") from error
    if "gguf" in repo.lower() and not has_weights(folder):
        raise ModelNotFoundError(
            f"{role} model {repo!r} holds GGUF files: download the one you want (`hf download {repo} FILE`) and give it"
        )
    return folder
