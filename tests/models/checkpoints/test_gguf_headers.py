"""Headers of GGUF files: what they say, and what is said of damaged ones."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_cli import ModelError
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.formats import GgufWeight
from dsbd_cli.models.checkpoints.gguf.header import MOST_ENTRIES, MOST_ITEMS, TYPES
from tests.helpers.raw_gguf import ARCHITECTURE, entry, info, numbers, random_blocks, raw_gguf, text, texts
from tests.helpers.tiny_gguf import WORDS, tiny_qwen2, write_gguf

NAME = "target model 'x'"
KINDS = {kind: number for number, kind in TYPES.items()}
Q4_0 = random_blocks("Q4_0", 2, 64).tobytes()  # 72 bytes
F32 = np.arange(8, dtype=np.float32).tobytes()


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile.open(path, NAME)


def test_a_file_of_llama_cpps_writer(tmp_path: Path) -> None:
    original = tiny_qwen2()
    write_gguf(original, tmp_path / "tiny.gguf", dtype=np.float16)
    file = GgufFile.open(tmp_path / "tiny.gguf", NAME)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert file.architecture == "qwen2"
    assert file.metadata["tokenizer.ggml.tokens"][:59] == WORDS[:59]
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert [*file.metadata] == keys
    for key in keys:
        ours, theirs = file.metadata[key], reader.fields[key].contents()
        assert (ours if isinstance(ours, str | int | float) else [*ours]) == theirs
        assert [*file.types[key]] == reader.fields[key].types
    assert [*file.tensors] == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.offset, ours.size, ours.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
        assert [*ours.shape] == [*map(int, reversed(tensor.shape))]
    for name in ("blk.1.ffn_up.weight", "blk.1.ffn_norm.weight"):
        read = file.read(name)
        assert isinstance(read, torch.Tensor)
        assert read.dtype == (torch.float32 if "norm" in name else torch.float16)
        theirs = "post_attention_layernorm" if "norm" in name else "mlp.up_proj"
        assert torch.equal(read, original.state_dict()[f"model.layers.1.{theirs}.weight"].to(read.dtype))


def test_values_of_all_types(tmp_path: Path) -> None:
    scalars = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 1 << 31), 5: ("i", -70000),
               6: ("f", 0.5), 7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -(1 << 40)), 12: ("d", 0.1)}  # fmt: skip
    metadata = [ARCHITECTURE, entry("a.texts", 9, texts("é", "", "b c"))]
    for kind, (layout, value) in scalars.items():
        metadata += [entry(f"a.{kind}", kind, struct.pack(f"<{layout}", value))]
        metadata += [entry(f"a.{kind}s", 9, numbers(kind, layout, value, value))]
    for version in (2, 3):
        file = opened(tmp_path / "x.gguf", raw_gguf(metadata, version=version))
        assert file.metadata["a.texts"] == ["é", "", "b c"]
        for kind, (_, value) in scalars.items():
            assert file.metadata[f"a.{kind}"] == value
            assert [*file.metadata[f"a.{kind}s"]] == [value, value]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_plain_numbers(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}[kind]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(stored)
    content = values.view(torch.uint8).numpy().tobytes()
    file = opened(tmp_path / "x.gguf", raw_gguf(tensors=[info("w", shape[::-1], KINDS[kind], 0)], data=content))
    read = file.read("w")
    assert isinstance(read, torch.Tensor)
    assert read.dtype == (torch.float32 if len(shape) == 1 or kind == "F64" else stored)
    assert torch.equal(read, values.to(read.dtype))


def test_blocks_of_one_two_and_three_dimensions(tmp_path: Path) -> None:
    data = random_blocks("Q8_0", 4, 32)
    values = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0))
    files = []
    for dims in ((32, 4), (128,), (32, 2, 2)):
        content = raw_gguf(tensors=[info("w", dims, 8, 0)], data=data.tobytes())
        files.append(opened(tmp_path / "x.gguf", content).read("w"))
    assert isinstance(files[1], torch.Tensor)
    assert torch.equal(files[1], values.flatten())
    for read in (files[0], files[2]):  # of two experts: one below the other
        assert isinstance(read, GgufWeight)
        assert torch.equal(read.dequantize(), values)


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    metadata = [ARCHITECTURE, entry("general.alignment", 4, struct.pack("<I", 128))]
    tensors = [info("v", (8,), 0, 128), info("w", (64, 2), 2, 0)]
    content = raw_gguf(metadata, tensors, Q4_0.ljust(128, b"\0") + F32, alignment=128)
    file = opened(tmp_path / "x.gguf", content)
    assert torch.equal(torch.as_tensor(file.read("v")), torch.arange(8.0))


W = info("w", (64, 2), 2, 0)


def with_array(*items: bytes, count: int | None = None) -> bytes:
    """A file with an array of texts."""
    return raw_gguf([ARCHITECTURE, entry("k", 9, texts(*items, count=count))])


def with_tensor(dims: tuple[int, ...], kind: str | int, offset: int = 0, size: int = 96) -> bytes:
    """A file with a tensor. size: of the data."""
    number = kind if isinstance(kind, int) else KINDS[kind]
    return raw_gguf(tensors=[info("w", dims, number, offset)], data=bytes(size))


def aligned(kind: int, value: bytes) -> bytes:
    return raw_gguf([ARCHITECTURE, entry("general.alignment", kind, value)])


def with_tensors(other: bytes) -> bytes:
    """A file with a tensor in 72 bytes, and another one."""
    return raw_gguf(tensors=[W, other], data=bytes(128))


DAMAGED = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\3\0", "is cut short or damaged: byte 4 goes beyond its 6 bytes"),
    "magic": (raw_gguf(magic=b"GGUX"), "is no GGUF file"),
    "version 1": (raw_gguf(version=1), "is GGUF of version 1, which is not read"),
    "version 4": (raw_gguf(version=4), "is GGUF of version 4, which is not read"),
    "big-endian": (raw_gguf(version=3 << 24), "is GGUF of version 3, .*big-endian"),
    "many tensors": (raw_gguf(counts=(1 << 62, 1)), f"it has {1 << 62} tensors, more than {MOST_ENTRIES}"),
    "many entries": (raw_gguf(counts=(0, 1 << 62)), f"it has {1 << 62} entries of metadata, more than {MOST_ENTRIES}"),
    "tensors missing": (raw_gguf(counts=(9, 1), alignment=1), "is cut short or damaged"),
    "long key": (raw_gguf([struct.pack("<Q", 1 << 63)]), "a key goes beyond its"),
    "key in Latin-1": (raw_gguf([entry(b"\xe9", 4, bytes(4))]), "a text that is not UTF-8 .a key"),
    "no architecture": (raw_gguf([]), "names no architecture"),
    "number as architecture": (raw_gguf([entry("general.architecture", 4, bytes(4))]), "names no architecture"),
    "a key twice": (raw_gguf([ARCHITECTURE] * 2), "has the key 'general.architecture' a second time"),
    "unknown type": (raw_gguf([entry("k", 13, b"")]), "the unknown type 13 for 'k'"),
    "array of arrays": (raw_gguf([entry("k", 9, numbers(9, "I", 1))]), "items of type 9 for 'k'"),
    "long array": (with_array(count=1 << 60), f"'k' has {1 << 60} items, more than {MOST_ITEMS}"),
    "array cut short": (with_array(b"a", count=1 << 20), "'k' goes beyond its"),
    "numbers cut short": (raw_gguf([entry("k", 9, struct.pack("<IQ", 4, 1 << 20))]), "'k' goes beyond its"),
    "text cut short": (raw_gguf([entry("k", 8, struct.pack("<Q", 1 << 63))]), "'k' goes beyond its"),
    "item cut short": (
        raw_gguf([ARCHITECTURE, entry("k", 9, struct.pack("<IQQ", 8, 1, 1 << 63))]),
        "'k' goes beyond its",
    ),
    "items in Latin-1": (with_array(b"a", b"\xe9"), "a text that is not UTF-8 .'k'"),
    "alignment 0": (aligned(4, bytes(4)), "has the alignment 0"),
    "alignment 48": (aligned(4, struct.pack("<I", 48)), "has the alignment 48"),
    "alignment of a text": (aligned(8, text("32")), "has the alignment '32'"),
    "no dimensions": (with_tensor((), "F32"), "'w' has 0 dimensions"),
    "five dimensions": (with_tensor((1,) * 5, "F32"), "'w' has 5 dimensions"),
    "2^32 dimensions": (raw_gguf(tensors=[text("w") + b"\xff" * 4]), f"'w' has {2**32 - 1} dimensions"),
    "a dimension of 0": (with_tensor((32, 0), "Q4_0"), "'w' is 0 x 32"),
    "huge dimensions": (with_tensor((1 << 63,) * 4, "F32"), "is cut short: 'w' ends"),
    "odd rows": (with_tensor((48, 2), "Q4_0"), "rows of 48 numbers, but blocks of Q4_0 have 32"),
    "off its alignment": (with_tensor((64, 2), "Q4_0", 8), "'w' off its alignment of 32"),
    "no data": (with_tensor((64, 2), "Q4_0", size=0), "is cut short: 'w' ends at byte"),
    "data cut short": (with_tensor((64, 2), "Q4_0", size=71), "is cut short: 'w' ends at byte"),
    "far offset": (with_tensor((64, 2), "Q4_0", 1 << 62), "is cut short: 'w' ends at byte"),
    "the same place": (with_tensors(info("v", (8,), 0, 64)), "has 'v' where another tensor is"),
    "a tensor twice": (with_tensors(info("w", (8,), 0, 96)), "has 'w' a second time"),
    "IQ2_XXS": (with_tensor((256, 1), "IQ2_XXS"), "'w' in IQ2_XXS, which is not read: get it as Q4_K_M"),
    "type 99": (with_tensor((256, 1), 99), "'w' in type 99, which is not read"),
    "part 2 of 3": (
        raw_gguf([ARCHITECTURE, entry("split.no", 2, b"\1\0"), entry("split.count", 2, b"\3\0")]),
        "is part 2 of 3: name it, and the others beside it, as in x-00002-of-00003.gguf",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_told_in_a_line(tmp_path: Path, damage: str) -> None:
    content, told = DAMAGED[damage]
    with pytest.raises(ModelError, match=told) as caught:
        opened(tmp_path / "x.gguf", content)
    assert str(caught.value).startswith(f"{NAME}: x.gguf ")
    assert "\n" not in str(caught.value)


def split(number: int, count: int, tensors: int, *names: str) -> bytes:
    """A part of a file."""
    metadata = [
        ARCHITECTURE,
        entry("split.no", 2, struct.pack("<H", number)),
        entry("split.count", 2, struct.pack("<H", count)),
        entry("split.tensors.count", 5, struct.pack("<i", tensors)),
    ]
    infos = [info(name, (8,), 0, 32 * place) for place, name in enumerate(names)]
    return raw_gguf(metadata, infos, F32 * len(names))


def test_parts(tmp_path: Path) -> None:
    first, second = tmp_path / "x-00001-of-00002.gguf", tmp_path / "x-00002-of-00002.gguf"
    first.write_bytes(split(0, 2, 3, "u", "v"))
    second.write_bytes(split(1, 2, 3, "w"))
    for path in (first, second):
        file = GgufFile.open(path, NAME)
        assert file.path == first
        assert [tensor.file for tensor in file.tensors.values()] == [first, first, second]
        assert torch.equal(torch.as_tensor(file.read("w")), torch.arange(8.0))
    for content, told in (
        (split(1, 3, 3, "w"), "x-00002-of-00002.gguf is of 3 parts, but its name says 2"),
        (split(0, 2, 3, "w"), "x-00002-of-00002.gguf is another part than its name says"),
        (raw_gguf(), "x-00002-of-00002.gguf is another part than its name says"),
        (split(1, 2, 3), "its parts hold 2 tensors, but should hold 3"),
        (split(1, 2, 3, "v"), "x-00002-of-00002.gguf has 'v' a second time"),
    ):
        second.write_bytes(content)
        with pytest.raises(ModelError, match=told) as caught:
            GgufFile.open(first, NAME)
        assert str(caught.value).startswith(f"{NAME}: ")


def test_a_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    whole = raw_gguf([ARCHITECTURE, entry("k", 9, texts("a", "b"))], [W, info("v", (8,), 0, 96)], Q4_0.ljust(96) + F32)
    opened(tmp_path / "x.gguf", whole)
    for length in range(len(whole)):
        with pytest.raises(ModelError):
            opened(tmp_path / "x.gguf", whole[:length])


def test_numbers_that_are_none_are_told(tmp_path: Path) -> None:
    for kind, number in (("F32", np.nan), ("F16", np.inf)):
        data = np.array([1, number], dtype=np.float32 if kind == "F32" else np.float16).tobytes()
        file = opened(tmp_path / "x.gguf", raw_gguf(tensors=[info("norm.weight", (2,), KINDS[kind], 0)], data=data))
        with pytest.raises(ModelError, match=f"^{NAME}: x.gguf has numbers in norm.weight that are NaN or infinite"):
            file.read("norm.weight")
    content = raw_gguf(tensors=[info("bias", (32,), 8, 0)], data=np.float16(np.nan).tobytes() + bytes(32))
    with pytest.raises(ModelError, match="scales in bias that are NaN"):
        opened(tmp_path / "x.gguf", content).read("bias")


def test_a_file_that_has_shrunk_or_gone_since(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    file = opened(path, raw_gguf(tensors=[W], data=Q4_0))
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"x\.gguf cannot be read"):
        file.read("w")
    path.unlink()
    for action in (lambda: file.read("w"), lambda: GgufFile.open(path, NAME)):
        with pytest.raises(ModelError, match=r"x\.gguf cannot be read"):
            action()


def sound() -> bytes:
    """A file with all there is to damage."""
    metadata = [
        ARCHITECTURE,
        entry("general.alignment", 4, struct.pack("<I", 32)),
        entry("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        entry("tokenizer.ggml.tokens", 9, texts(*map(chr, range(33, 60)), "日本")),
        entry("tokenizer.ggml.scores", 9, numbers(6, "f", *range(28))),
        entry("tokenizer.ggml.token_type", 9, numbers(5, "i", *[1] * 28)),
    ]
    tensors, data = [], b""
    for kind in ("Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "F32", "BF16"):
        content = random_blocks(kind, 2, 256).tobytes() if kind not in ("F32", "BF16") else bytes(2048)
        tensors.append(info(f"blk.0.{kind}.weight", (256, 2), KINDS[kind], len(data)))
        data += content + bytes(-len(content) % 32)
    return raw_gguf(metadata, tensors, data)


def fault(path: Path, content: bytes) -> str | None:
    """What is said of a file when all of it is read; None: nothing."""
    try:
        file = opened(path, content)
        for name in file.tensors:
            read = file.read(name)
            if isinstance(read, GgufWeight):
                read.check()
                assert bool(read.dequantize().isfinite().all())
    except ModelError as error:
        return str(error)
    return None


SOUND = sound()
HEADER = SOUND.index(b"blk.0.BF16") + 60
HUGE = [0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("flip"), st.integers(0, HEADER), st.integers(1, 255)),
            st.tuples(st.just("huge"), st.integers(0, HEADER), st.sampled_from(HUGE)),
            st.tuples(st.just("cut"), st.integers(0, len(SOUND)), st.just(0)),
            st.tuples(st.just("drop"), st.integers(0, HEADER), st.integers(1, 40)),
            st.tuples(st.just("insert"), st.integers(0, HEADER), st.integers(0, 2**32)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_damage_leads_to_more_than_a_line(
    tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[str, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(SOUND)
    for damage, at, value in damages:
        if damage == "flip":
            content[at : at + 1] = bytes(byte ^ value for byte in content[at : at + 1])
        elif damage == "huge":
            content[at : at + 8] = value.to_bytes(8, "little")
        elif damage == "cut":
            del content[at:]
        elif damage == "drop":
            del content[at : at + value]
        else:
            content[at:at] = random.Random(value).randbytes(value % 50)
    tracemalloc.start()
    try:
        told = fault(path, bytes(content))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "the file has a few kilobytes"
    finally:
        tracemalloc.stop()
    assert told is None or ("\n" not in told and len(told) < 500)


def test_the_sound_file_is_sound(tmp_path: Path) -> None:
    assert fault(tmp_path / "sound.gguf", SOUND) is None
