"""Kernels run in triton's interpreter here, unless there is a GPU. It must be asked for before a kernel is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
