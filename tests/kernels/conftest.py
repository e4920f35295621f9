"""Kernels run in triton's interpreter here, unless there is a GPU (see tests/conftest.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
