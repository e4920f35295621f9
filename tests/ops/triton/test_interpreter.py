"""The interpreter's own product: the sums are right, and a row of it has the same bits in any company."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl

from tests.helpers.interpreter import dot


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrices", "stacks"])
def test_a_row_of_a_product_does_not_go_by_the_number_of_rows(lead: tuple[int, ...]) -> None:
    """Guards products by a library, whose kernels go by the processor and by the number of rows."""
    generator = np.random.default_rng(4)
    rows, inner, outer = 67, 96, 40
    a, b, d = (
        SimpleNamespace(data=generator.standard_normal((*lead, *shape)).astype(np.float32), dtype=SimpleNamespace())
        for shape in ((rows, inner), (inner, outer), (rows, outer))
    )
    d.dtype.scalar = tl.float32
    found = dot(None, a, b, d, None, None).data
    assert found.dtype == np.float32
    assert np.allclose(found, a.data.astype(np.float64) @ b.data + d.data, rtol=1e-6, atol=1e-5)
    for count in (1, 2, 7, 64):
        few = [SimpleNamespace(data=one.data[..., :count, :], dtype=one.dtype) for one in (a, d)]
        assert np.array_equal(dot(None, few[0], b, few[1], None, None).data, found[..., :count, :])
