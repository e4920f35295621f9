"""The processor of this machine, as far as the choice of kernels depends on it. Nothing else reads its flags.

DSBD_CPU names a smaller one, such as `avx2`: the kernels, numba, torch and oneDNN then do what they do there. No torch
and no numba here.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from enum import IntEnum
from pathlib import Path

VARIABLE = "DSBD_CPU"
CPUINFO = Path("/proc/cpuinfo")
ZEN = 23  # family of AMD's first Zen
ON_ARM = platform.machine().lower() in ("arm64", "aarch64")


class Processor(IntEnum):
    """A processor, by the instructions that our kernels use. A larger one has all that a smaller one has, but for
    AVX2_VNNI, which only some have. An ARM is BASE."""

    BASE, AVX2, AVX2_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, AMX = range(7)

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def instructions(self) -> frozenset[str]:
        """The instruction sets that it needs, by LLVM's names without signs."""
        return _DETAILS[self][0]


_AVX2 = frozenset({"avx", "avx2", "f16c", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512vnni"}
_BF16 = _VNNI | {"avx512bf16"}
# instruction sets; the name in ATEN_CPU_CAPABILITY of torch, and in ONEDNN_MAX_CPU_ISA
_DETAILS = {
    Processor.BASE: (frozenset[str](), "default", "SSE41"),
    Processor.AVX2: (_AVX2, "avx2", "AVX2"),
    Processor.AVX2_VNNI: (_AVX2 | {"avxvnni"}, "avx2", "AVX2_VNNI"),
    Processor.AVX512: (_AVX512, "avx512", "AVX512_CORE"),
    Processor.AVX512_VNNI: (_VNNI, "avx512", "AVX512_CORE_VNNI"),
    Processor.AVX512_BF16: (_BF16, "avx512", "AVX512_CORE_BF16"),
    Processor.AMX: (_BF16 | {"amxtile", "amxbf16", "amxint8"}, "avx512", "AVX512_CORE_AMX"),
}


def plain(flag: str) -> str:
    """Return the name of an instruction set without its signs, in which Linux (amx_tile) and LLVM (amx-tile) differ."""
    return re.sub("[-_]", "", flag)


@functools.cache
def _facts() -> tuple[frozenset[str], bool]:
    """Return the instruction sets of this machine, and whether it is a Zen of AMD."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        try:
            from llvmlite import binding

            present = [flag for flag, here in binding.get_host_cpu_features().items() if here]
            return frozenset(map(plain, present)), binding.get_host_cpu_name().startswith("znver")
        except Exception:  # of llvmlite or the system
            return frozenset(), False
    values = dict(re.findall(r"^(.+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE))
    family = values.get("cpu family", "")
    on_amd = values.get("vendor_id") == "AuthenticAMD" and family.isdigit() and int(family) >= ZEN
    return frozenset(map(plain, values.get("flags", "").split())), on_amd


def instructions() -> frozenset[str]:
    """Return all instruction sets of this machine, whatever DSBD_CPU says."""
    return _facts()[0]


def on_amd() -> bool:
    """Return whether this machine's processor is a Zen of AMD, with AVX-512 (Zen 4 and later) or older."""
    return _facts()[1]


def possible() -> list[Processor]:
    """Return the processors that DSBD_CPU may name here, in order. The last one is this machine's."""
    return [processor for processor in Processor if processor.instructions <= instructions()]


@functools.cache
def current() -> Processor:
    """Return the processor that kernels are chosen and compiled for. Raises ValueError for a wrong DSBD_CPU.

    Where that names a smaller one, the first call tells torch and oneDNN, unless the user has. They look at it when
    they first compute something.
    """
    *_, largest = processors = possible()
    names = [*map(str, processors)]
    word = os.environ.get(VARIABLE) or str(largest)
    if word not in names:
        raise ValueError(f"{VARIABLE} is {word[:40]!r}, but must be one of {', '.join(names)} on this processor")
    chosen = processors[names.index(word)]
    if chosen != largest:
        _, of_torch, of_onednn = _DETAILS[chosen]
        os.environ.setdefault("ATEN_CPU_CAPABILITY", of_torch)
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", of_onednn)
    return chosen


def bfloat16_tile() -> str | None:
    """Return the kind of tile that multiplies bfloat16 here; None where torch does it.

    Matrix units are fastest. AVX-512 BF16 multiplies pairs; an Emerald Rapids does that at half its rate of float32. So
    on other processors than AMD's, and where the instruction is missing, each number is widened to float32 first.
    """
    if current() in (Processor.BASE, Processor.AMX):
        return "amx" if current() == Processor.AMX else None
    return "bfloat16" if current() == Processor.AVX512_BF16 and on_amd() else "widened"


def int8_tile() -> str | None:
    """Return the kind of tile that multiplies int8 here; None where torch does it. All compute the same integers."""
    if current() in (Processor.BASE, Processor.AMX):
        return "amx" if current() == Processor.AMX else None
    if current() >= Processor.AVX512_VNNI:
        return "dpbusd"
    return "half_dpbusd" if current() == Processor.AVX2_VNNI else "signs"
