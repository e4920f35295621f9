"""The kernels of a layer compile for the GPUs in use, at the shapes in use, without spills."""

from __future__ import annotations

from tests.kernels.compiled import Case, compile_all

MODULE = "dsbd_cli.kernels.layers"
SHARED = 48 << 10  # bytes that a kernel has without asking


def cases() -> list[Case]:
    found: list[Case] = []
    for kind in ("*bf16", "*fp32"):
        for padded, warps in ((1024, 4), (4096, 8), (8192, 16)):
            signature = {
                **dict.fromkeys(("x", "more", "weight", "out", "summed"), kind), "width": "i32", "eps": "fp32"
            }  # fmt: skip
            found.append((MODULE, "norm_kernel", signature, {"ADDS": True, "ONE_MORE": False, "P": padded}, warps))
        found.append((MODULE, "gated_kernel", {"both": kind, "out": kind, "width": "i32"}, {"BLOCK": 1024}, 4))
        signature = {
            **dict.fromkeys(("both", "cos", "sin", "out", "keys", "values"), kind),
            "slots": "*i64", "nodes": "i32", "angle_row": "i32",
        }  # fmt: skip
        found.append((MODULE, "rotate_kernel", signature, {"QUERIES": 32, "KEYS": 8, "HALF": 64, "P": 64}, 1))
    return found


def test_no_kernel_spills() -> None:
    found = compile_all(cases())
    assert len(found) == 2 * len(cases())
    assert [one for one in found if one["spills"] or int(str(one["shared"])) > SHARED] == []
