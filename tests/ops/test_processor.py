"""The processor that kernels are chosen by. Guards a larger one than is here, a wrong word that is ignored, and a
machine whose path no test runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli.app import run
from dsbd_cli.config import checking
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import UsageError
from dsbd_cli.models import verdicts
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.ops import processor
from dsbd_cli.ops.processor import VARIABLE, Processor, current
from tests.helpers.checkpoints import save

ROOT = Path(__file__).parents[2]
AVX512 = "f16c fma avx avx2 avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = f"{AVX512} avx_vnni avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8"
NAMES = {
    "": ["base"],
    "avx avx2": ["base"],
    "fma avx avx2": ["base"],
    "f16c fma avx avx2": ["base", "avx2"],
    "f16c fma avx avx2 avx_vnni": ["base", "avx2", "avx2_vnni"],
    AVX512: ["base", "avx2", "avx512"],
    f"{AVX512} avx512_vnni avx512_bf16": ["base", "avx2", "avx512", "avx512_vnni", "avx512_bf16"],
    AMX: [str(processor) for processor in Processor],
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes this another machine."""

    def become(flags: str, vendor: str = "GenuineIntel", family: int = 6) -> None:
        facts = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: {flags}\nbugs\t\t:\n\n"
        (tmp_path / "cpuinfo").write_text(facts)
        monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
        forget()

    def forget() -> None:
        processor._facts.cache_clear()
        current.cache_clear()

    for name in (VARIABLE, "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")  # what a test sets is put back
        monkeypatch.delenv(name)
    yield become
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("flags", NAMES)
def test_a_machine_is_the_largest_that_it_can_be(flags: str, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(flags)
    assert [str(processor) for processor in processor.possible()] == NAMES[flags]
    assert str(current()) == NAMES[flags][-1]
    assert "ATEN_CPU_CAPABILITY" not in os.environ
    monkeypatch.setenv(VARIABLE, "base")
    machine(flags)
    assert current() == Processor.BASE
    assert ("ATEN_CPU_CAPABILITY" in os.environ) == (len(NAMES[flags]) > 1)


def test_who_made_it(machine: Any) -> None:
    for vendor, family, on_amd in (("GenuineIntel", 6, False), ("AuthenticAMD", 21, False), ("AuthenticAMD", 25, True)):
        machine(AMX.replace(" amx_tile", ""), vendor, family)
        assert processor.on_amd() == on_amd
        assert processor.bfloat16_tile() == ("bfloat16" if on_amd else "widened")


@pytest.mark.parametrize("word", ["amx", "avx2_vnni", "AVX2", "haswell"])
def test_what_it_cannot_be_is_an_error_in_one_line(
    word: str, machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, word)
    machine(AVX512)
    assert run(["schema"]) == 2
    said = f"DSBD_CPU is {word!r}, but must be one of base, avx2, avx512 on this processor"
    assert capsys.readouterr().err.endswith(f"{said}\n")
    with pytest.raises(UsageError, match=said):  # for whatever opens a checkpoint
        Checkpoint.open(ModelSpec("t"))


def test_commands_do_not_look_at_the_processor(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an import of llvmlite for a page of help, on systems without /proc/cpuinfo."""
    monkeypatch.setattr(checking, "current", lambda: pytest.fail("asked"))
    assert run(["schema"]) == 0


@pytest.mark.skipif(current() == Processor.BASE, reason="no kernel runs on this processor")
@pytest.mark.parametrize("variable", ["NUMBA_ENABLE_AVX=0", "NUMBA_CPU_NAME=generic", "NUMBA_CPU_FEATURES=+avx"])
def test_a_numba_that_compiles_for_less_is_not_asked(variable: str, tmp_path: Path) -> None:
    """Guards a process that LLVM ends: kernels stand aside with one line."""
    name, value = variable.split("=")
    code = (
        "import torch; from dsbd_cli.ops.select import ops_for; "
        "print(*ops_for(torch.device('cpu'), torch.float32, ('linear', 'log_total')).by('numba'))"
    )
    environment = {**os.environ, name: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    less = f"NUMBA_CPU_NAME, NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX allows less than {current()}: set DSBD_CPU, too"
    (line,) = (line for line in done.stderr.splitlines() if "sums over the vocabulary" in line)
    assert (
        line
        == f"torch computes the sums over the vocabulary, because the kernels cannot be loaded (RuntimeError: {less})"
    )


def test_verdicts_belong_to_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for kind in Processor:
        monkeypatch.setattr(verdicts, "current", lambda kind=kind: kind)
        digests.add(verdicts.fingerprint(ModelSpec("t"), []))
    assert len(digests) == len(Processor)


def generated(folder: Path, target: Path, word: str) -> tuple[list[list[str]], dict[str, Any]]:
    """The texts of all beams, and what the summary says of the device, under DSBD_CPU."""
    (folder / word).mkdir()
    lines, summary = folder / word / "lines.jsonl", folder / word / "summary.json"
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("1 2 3", "9 8 7 6 5", "4"))
    options = "--dtype float32 --device cpu --decode search --num-beams 3 --depth 2 --n-best 3 --max-new-tokens 12 -q"
    files = ["--target", str(target), "--draft", str(target), "-o", str(lines), "--set", f"summary={summary}"]
    done = subprocess.run(
        [sys.executable, "-m", "dsbd_cli", "generate", *files, *options.split()],
        cwd=ROOT, env={**os.environ, VARIABLE: word}, input=rows, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    return [[beam["text"] for beam in record["beams"]] for record in records], json.loads(summary.read_text())["device"]


@pytest.mark.skipif(Processor.AVX2 not in processor.possible(), reason="this processor has no AVX2")
def test_texts_of_the_kernels_for_avx2_are_those_of_torch(tmp_path: Path) -> None:
    target = save(tmp_path / "target", hidden_size=256, intermediate_size=192, head_dim=64)
    (ours, device), (plain, other) = (generated(tmp_path, target, word) for word in ("avx2", "base"))
    assert ours == plain
    assert [len(texts) for texts in ours] == [3, 3, 3]
    assert (device["processor"], other["processor"]) == ("avx2", "base")
    kernels = {operation["op"] for operation in device["ops"] if operation["backend"] == "numba"}
    assert {"norm", "program", "path_attention"} <= kernels
    assert all(operation["backend"] == "torch" for operation in other["ops"])
