"""Kernels run on the GPU where there is one, else in triton's interpreter on the CPU."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
