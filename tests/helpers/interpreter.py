"""Products of triton's interpreter whose bits do not depend on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from triton.runtime import interpreter


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Multiply a [..., m, k] by b [..., k, n], element by element, and add d [..., m, n].

    triton's own takes numpy's matmul. Its BLAS has float32 kernels for some processors in which the bits of a row
    depend on the number of rows.
    """
    sums = np.zeros(d.data.shape, np.float64)
    for step in range(a.data.shape[-1]):
        sums += a.data[..., :, step, None].astype(np.float64) * b.data[..., None, step, :]
    return interpreter.TensorHandle(sums.astype(d.data.dtype) + d.data, d.dtype.scalar)


@pytest.fixture(scope="session", autouse=True)
def own_products() -> Iterator[None]:
    """Put `dot` in the interpreter's place, for all tests of the folder or file that imports this."""
    with patch.object(interpreter.InterpreterBuilder, "create_dot", dot):
        yield
