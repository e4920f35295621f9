"""Runs over several processes: one engine in each of several Ray workers, behind the interface of one engine.

window: which row is where. worker: an engine in its process. workers, cluster, quiet: Ray. data: `Answer`, a worker for
Ray Data.
"""

from __future__ import annotations

from dsbd_cli.scale.data import Answer

__all__ = ["Answer"]
