"""The interpreter's own product: the sums are right, and a row of it has the same bits in any company. And what it does
not notice."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl

from dsbd_cli.ops import triton as kernels
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
    product = dot(None, a, b, d, None, None).data
    assert product.dtype == np.float32
    assert np.allclose(product, a.data.astype(np.float64) @ b.data + d.data, rtol=1e-6, atol=1e-5)
    for count in (1, 2, 7, 64):
        few = [SimpleNamespace(data=tensor.data[..., :count, :], dtype=tensor.dtype) for tensor in (a, d)]
        assert np.array_equal(dot(None, few[0], b, few[1], None, None).data, product[..., :count, :])


def test_what_is_not_specialized_is_an_argument() -> None:
    """Guards a kernel that is compiled anew for each kind of number, because triton ignores a name it does not know."""
    texts = [file.read_text(encoding="utf-8") for file in Path(kernels.__file__).parent.glob("*.py")]
    functions = [
        function for text in texts for function in ast.walk(ast.parse(text)) if isinstance(function, ast.FunctionDef)
    ]
    named = 0
    for function in functions:
        arguments = {node.arg for node in function.args.args}
        for option in (
            node for made in function.decorator_list if isinstance(made, ast.Call) for node in made.keywords
        ):
            if option.arg == "do_not_specialize":
                named += 1
                assert set(ast.literal_eval(option.value)) <= arguments, function.name
    assert named >= 8
