"""What is told of a Ray of others, by sockets that stand in for its processes."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path

import pytest

from dsbd_cli.scale import cluster


def test_dead_servers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raylet's death is told at once. The GCS server may be silent for some time, and come back."""
    monkeypatch.setattr(cluster, "PROBE_S", 0.0)
    monkeypatch.setattr(cluster, "PATIENCE_S", float("inf"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        raylet, gcs = stack.enter_context(socket.socket(socket.AF_UNIX)), socket.create_server(("127.0.0.1", 0))
        path, port = str(Path(folder) / "raylet"), gcs.getsockname()[1]
        raylet.bind(path)
        raylet.listen()
        deaths = stack.enter_context(contextlib.closing(cluster._deaths_of_others(path, f"127.0.0.1:{port}")))
        assert next(deaths) is None
        gcs.close()
        assert next(deaths) is None
        monkeypatch.setattr(cluster, "PATIENCE_S", 0.0)
        silent = next(deaths)
        assert silent is not None
        assert silent.startswith(f"Ray's GCS server at 127.0.0.1:{port} has not answered for ")
        monkeypatch.setattr(cluster, "PATIENCE_S", float("inf"))
        assert next(deaths) is None
        raylet.accept()[0].close()
        assert next(deaths) == "the raylet of this machine has died"
