"""The file of a trimmed head: what does not belong together is one line. tests/train/test_trim.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.lm_head import FORMAT, LM_HEAD_FILE, _digest, read_trimmed_lm_head

IDS, ROWS = torch.arange(3, dtype=torch.int32), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("changed", "size", "said"),
    [
        ({"bias": torch.ones(2)}, "9", "the bias is for 2 rows, not for 3"),
        ({"bias": torch.ones(3, 2)}, "9", "the bias is for 6 rows, not for 3"),
        ({"ids": torch.tensor(1)}, "9", r"ids \[\] for rows \[3, 4\] of a vocabulary of '9' tokens"),
        ({"weight": torch.tensor(1.0)}, "9", r"ids \[3\] for rows \[\]"),
        ({}, "x", r"ids \[3\] for rows \[3, 4\] of a vocabulary of 'x' tokens"),
    ],
)
def test_parts_that_do_not_fit_are_one_line(changed: dict[str, Tensor], size: str, said: str, tmp_path: Path) -> None:
    """Guards tracebacks of torch."""
    tensors = {"ids": IDS, "weight": ROWS, **changed}
    about = {"format": FORMAT, "vocab_size": size, "sha256": _digest(tensors)}
    save_file(tensors, tmp_path / LM_HEAD_FILE, about)
    with pytest.raises(ModelError, match=rf"{LM_HEAD_FILE} is damaged \({said}"):
        read_trimmed_lm_head(tmp_path)
