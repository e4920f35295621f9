"""Pictures: tiny random models of each family on disk, from a file to texts.

Guards: another first token or prompt, a source of other pixels, places or masks, a file that ends a run.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import dsbd_cli
from dsbd_cli import MethodConfig, Request, RequestResult, SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import InvalidRowError, ModelError, PairError, UsageError
from dsbd_cli.models.transformers_backend import pictures, row_files
from dsbd_cli.models.transformers_backend.pictures import read_picture
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from tests.helpers.pairs import perturbed
from tests.helpers.pictures import END, NEW, PICTURED, START, draw, draw_five, save_pictured

BEAMS = 4
WORDS = "w50 w61"  # a prompt, and its tokens
WORD_IDS = [50, 61]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return draw_five(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoint folders by name, each written once."""
    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: save_pictured(name, folder / name))


@pytest.fixture
def family(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    return saved(request.param)


@pytest.fixture(scope="module")
def trocr(saved: Callable[[str], Path]) -> Path:
    return saved("trocr")


DRAFTED = [name for name in PICTURED if name not in ("nougat", "vit-bert")]  # donut's model; gpt2's way to positions


def stock_beams(
    model: Any, folder: Path, pictures: list[dict[str, Any]], prompt: list[int]
) -> list[list[tuple[list[int], float]]]:
    """Beams and scores of transformers' own generate, of each picture alone; BLIP's is its own."""
    beams = []
    for inputs in pictures:
        if folder.name == "blip":  # which puts its own first token, and drops the last
            begin = {"input_ids": torch.tensor([[START, *prompt, 3]])}
        else:
            first = [] if prompt and folder.name in ("donut", "nougat", "swin") else [START]
            begin = {"decoder_input_ids": torch.tensor([[*first, *prompt]])}
        out = model.generate(
            **inputs,
            **begin,
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            do_sample=False,
            max_new_tokens=NEW,
            output_scores=True,
            return_dict_in_generate=True,
        )
        start = begin.popitem()[1].shape[1] - (folder.name == "blip")
        ends = [END] if folder.name == "blip" else model.generation_config.eos_token_id
        rows = []
        for row in out.sequences[:, start:].tolist():
            end = next((position + 1 for position, token in enumerate(row) if token in ends), len(row))
            rows.append(row[:end])
        beams.append(list(zip(rows, out.sequences_scores.tolist(), strict=True)))
    return beams


def good(files: list[Path]) -> Request:
    """A row that can be answered."""
    return Request(image=str(files[0]), sampling=SamplingConfig(max_new_tokens=NEW))


def requests_of(files: list[Path], **asked: Any) -> list[Request]:
    prompt = asked.pop("prompt", None)
    sampling = SamplingConfig(**{"max_new_tokens": NEW, "n_best": BEAMS, **asked})
    return [Request(prompt, image=str(file), sampling=sampling) for file in files]


def outcomes(results: Iterable[RequestResult]) -> list[Any]:
    """Ids, log-probabilities and texts of all hypotheses, to the last bit."""
    facts = []
    for result in results:
        result.check()
        facts.append([(beam.token_ids, beam.logprob, beam.text) for beam in result.hypotheses])
    return facts


@pytest.mark.parametrize("family", PICTURED, indirect=True)
def test_a_family_is_transformers_beam_search(family: Path, files: list[Path]) -> None:
    """Every hypothesis and score, with prompts and without, in a batch of 5; without prompts one by one, too."""
    engine = dsbd_cli.load(str(family), None, method=MethodConfig(rule="search", num_beams=BEAMS))
    auto: Any = transformers.AutoModelForImageTextToText
    stock = auto.from_pretrained(family).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(family, backend="pil")
    read = [dict(processor(Image.open(file).convert("RGB"), return_tensors="pt")) for file in files]
    seen = set()
    for prompt, ids, sizes in ((None, [], (1, 5)), (WORDS, WORD_IDS, (5,))):
        want = stock_beams(stock, family, read, ids)
        for size in sizes:
            results = list(engine.replace(batch_size=size).run(requests_of(files, prompt=prompt)))
            for beams, result in zip(want, results, strict=True):
                result.check()
                assert [list(beam.token_ids) for beam in result.hypotheses] == [tokens for tokens, _ in beams]
                assert [beam.score for beam in result.hypotheses] == pytest.approx([s for _, s in beams], abs=2e-4)
                seen.add(result.hypotheses[0].token_ids)
    assert len(seen) > 2, "pictures that make no difference test nothing"
    assert engine.exactness == "same-text"


@pytest.mark.parametrize("family", DRAFTED, indirect=True)
def test_drafts_leave_texts_as_they_are(family: Path, files: list[Path]) -> None:
    """Of the same family and by n-grams, sampling and searching, to the last bit."""
    engine = dsbd_cli.load(str(family), None)
    target: Any = engine.target
    draft = Seq2SeqForestModel(perturbed(target.stock(), 0.03), "draft")
    for rule in ("coupled", "search"):
        want = outcomes(engine.replace(method=MethodConfig(rule=rule, depth=0)).run(requests_of(files)))
        steps = {"steps_per_call": 0.0}
        for small, drafter in ((draft, "beam"), (None, "ngram")):
            method = MethodConfig(rule=rule, depth=3, drafts_per_layer=10, drafter=drafter)
            drafting = Engine(target, small, engine.codec, method, batch_size=3)
            results = list(drafting.run(requests_of(files)))
            assert outcomes(results) == want
            steps[drafter] = sum(result.stats.steps - result.stats.target_calls for result in results)
        assert steps["beam"] > 0


@pytest.mark.parametrize("family", ["trocr", "swin", "blip", "pix2struct"], indirect=True)
def test_memory_goes_by_places_and_not_by_pixels(family: Path, files: list[Path]) -> None:
    """Guards estimates of a picture's width or of all its numbers; then what a record says."""
    engine = dsbd_cli.load(str(family), None)
    target: Any = engine.target
    sizes = []
    for file in files:
        source = engine.codec.encoder_input(Request(image=str(file))).encoder_input  # type: ignore[attr-defined]
        target.reserve(1, 2)
        target.encode([0], [source])
        places = target._cross.lengths[0]
        assert target.encoder_places(source) == places
        assert target.encoder_bytes(source) == places * target._cross.bytes_per_place > 0
        (result,) = engine.run([Request(image=str(file), sampling=SamplingConfig(max_new_tokens=2))])
        assert result.source_tokens == places
        target.release()
        sizes.append(places)
    assert (len(set(sizes)) > 1) == (family.name in ("swin", "pix2struct"))


def test_layers_of_trocr_attend_by_our_function_only_where_they_say_the_same(trocr: Path) -> None:
    """Guards a later TrOCR that adds something to its scores."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(trocr).eval()
    kind: Any = type(model.decoder.model.decoder.layers[0].self_attn)
    assert kind.__name__ == "TrOCRAttention"
    ours = Seq2SeqForestModel(model, "trocr")
    layers = [module for module in model.modules() if type(module) is kind]
    assert all("forward" in vars(layer) for layer in layers)
    assert ours.device.type == "cpu"
    other = transformers.AutoModelForImageTextToText.from_pretrained(trocr).eval()
    for layer in other.modules():
        if type(layer) is kind:
            layer.scaling *= 2  # our function goes by the size of a head
    Seq2SeqForestModel(other, "trocr")
    assert not any("forward" in vars(module) for module in other.modules() if type(module) is kind)


# What is read


def png_head(width: int, height: int) -> bytes:
    """A PNG that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def frames() -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (9, 9)).save(held, "TIFF", save_all=True, append_images=[Image.new("RGB", (9, 9), "red")])
    return held.getvalue()


def small_png() -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (40, 30), "teal").save(held, "PNG")
    return held.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
BAD_PICTURES = {
    "text.png": (b"this is no picture at all\n", "cannot identify image file"),
    "empty.png": (b"", "cannot identify image file"),
    "torn.png": (small_png()[:60], "cannot be read"),
    "torn.jpg": (None, "cannot be read: image file is truncated"),
    "huge.png": (png_head(50_000, 50_000), "cannot be read: Image size .2500000000 pixels. exceeds limit"),
    "large.png": (png_head(9_000, 9_000), "which has 9000 x 9000 pixels, but may have 67108864 in all"),
    "none.png": (png_head(0, 9), "cannot be read"),
    "pages.tiff": (frames(), "has several pages or frames: give one"),
    "script.eps": (EPS, "cannot identify image file"),
    "gone.png": (None, "cannot be read: No such file"),
    "a\0b.png": (None, "cannot be read"),
    "fifo": (None, "which is no file"),
    "folder": (None, "which is no file"),
    "zero": (None, "which is no file"),
}


def bad_picture(folder: Path, name: str) -> Path:
    """Make one of BAD_PICTURES."""
    path, data = folder / name, BAD_PICTURES[name][0]
    if data is not None:
        path.write_bytes(data)
    elif name == "torn.jpg":
        whole = draw(folder / "whole.jpg", "a text").read_bytes()
        path.write_bytes(whole[: len(whole) - 200])
    elif name == "fifo":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    elif name == "zero":
        path.symlink_to("/dev/zero")
    return path


@pytest.fixture(scope="module")
def engine(trocr: Path) -> Engine:
    return dsbd_cli.load(str(trocr), None, method=MethodConfig(num_beams=2))


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_file_is_an_error_of_its_row(engine: Engine, tmp_path: Path, files: list[Path], name: str) -> None:
    """Guards a named pipe that nobody writes to, /dev/zero, programs that pillow starts, and bombs."""
    path = bad_picture(tmp_path, name)
    results = list(engine.run([Request(image=str(path)), good(files)]))
    with pytest.raises(InvalidRowError, match="image is .*" + BAD_PICTURES[name][1]):
        results[0].check()
    assert results[1].text


def uri(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (uri(b"no picture"), "cannot identify image file"),
        ("data:image/png;base64,@@@", "cannot be read: .*base64"),
        ("data:image/png,abc", r"must be written as data:image/png;base64"),
        ("data:" + "x" * 1000 + ";base64,aaaa", r"must be written as data:image/png;base64"),
        (uri(png_head(50_000, 50_000)), "exceeds limit"),
        (uri(bytes(30_000)), "must have at most 20000 bytes"),
    ],
)
def test_bad_data_are_an_error_of_their_row(
    image: str, told: str, engine: Engine, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MOST_BYTES", 20_000)
    results = list(engine.run([Request(image=image), good(files)]))
    with pytest.raises(InvalidRowError, match=told):
        results[0].check()
    assert len(str(results[0].error)) < 300
    assert results[1].text


def test_a_file_has_a_largest_size(
    engine: Engine, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, most = tmp_path / "x.png", files[0].stat().st_size
    path.write_bytes(small_png() + bytes(most))
    monkeypatch.setattr(row_files, "MOST_BYTES", most)
    results = list(engine.run([Request(image=str(path)), good(files)]))
    with pytest.raises(InvalidRowError, match=rf"which has .* bytes, but must have at most {most}"):
        results[0].check()
    assert results[1].text


def test_data_are_the_picture_in_the_file(engine: Engine, files: list[Path]) -> None:
    path = files[0]
    of_file, of_data = engine.run(
        [
            Request(image=image, id="a", sampling=SamplingConfig(max_new_tokens=NEW))
            for image in (str(path), uri(path.read_bytes(), "data:;base64,"))
        ]
    )
    assert of_file.hypotheses == of_data.hypotheses


def test_pictures_are_read_upright_and_in_rgb(tmp_path: Path) -> None:
    """As transformers' load_image: a camera's turn is undone."""
    picture = Image.new("RGB", (40, 20), "white")
    picture.putpixel((0, 0), (200, 0, 0))
    tags = Image.Exif()
    tags[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "turned.png", exif=tags)
    upright = read_picture(str(tmp_path / "turned.png"))
    assert (upright.size, upright.mode) == ((20, 40), "RGB")
    assert upright.getpixel((19, 0)) == (200, 0, 0)
    stock = transformers.image_utils.load_image(str(tmp_path / "turned.png"))
    assert np.array_equal(np.asarray(upright), np.asarray(stock))


@pytest.mark.parametrize("name", ["donut", "nougat"])
def test_thin_pictures_are_not_blown_up(name: str, tmp_path: Path) -> None:
    """Guards gigabytes: 2 x 40000 pixels, or a page with one thin line, scaled until the short side has 32."""
    folder = save_pictured(name, tmp_path / name)
    sides = {"height": 400, "width": 600}
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "size": sides}))
    engine = dsbd_cli.load(str(folder), None)
    page = Image.new("RGB", (3000, 900), "white")
    if name == "nougat":  # which crops the page to the line
        page.paste("black", (0, 400, 3000, 401))
    else:
        page = page.resize((30_000, 2))
    page.save(tmp_path / "thin.png")
    draw(tmp_path / "plain.png", "a text")
    rows = [
        Request(image=str(tmp_path / name), sampling=SamplingConfig(max_new_tokens=2))
        for name in ("thin.png", "plain.png")
    ]
    thin, plain = engine.run(rows)
    assert "would be scaled until its short side has 400: cut it" in str(thin.error)
    assert plain.error is None


# What a row may ask for


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"prompt": "w5"}, "image is missing: the target reads pictures, and no text alone"),
        ({"audio": "x.wav"}, "audio is 'x.wav', but the target reads pictures: give an image"),
        ({"image": "FILE", "sampling": {"source_lang": "en"}}, "source_lang is 'en', but the target reads pictures"),
        ({"image": "FILE", "sampling": {"target_lang": "en"}}, "target_lang is 'en', but the target reads pictures"),
        ({"image": "FILE", "prompt": "w5 " * 60}, "make .*decoder has 64 positions"),
        ({"image": "FILE", "prompt": "w5 " * 60_000}, "prompt has 180000 bytes, .* the target's decoder takes 64"),
        ({"image": "FILE", "sampling": {"token_rules": "timestamps=1"}}, "the target has no tokens of times"),
    ],
)
def test_rows_that_cannot_be_read_say_why(engine: Engine, files: list[Path], asked: Any, told: str) -> None:
    asked = {name: str(files[0]) if value == "FILE" else value for name, value in asked.items()}
    sampling = SamplingConfig(**{"max_new_tokens": NEW, **asked.pop("sampling", {})})
    results = list(engine.run([Request(**asked, sampling=sampling), good(files)]))
    with pytest.raises(dsbd_cli.RowError, match=told):
        results[0].check()
    assert results[1].text


def test_a_request_has_one_source() -> None:
    for fields in ({"image": "a", "audio": "b"}, {"image": "a", "messages": [{"role": "user", "content": "b"}]}):
        with pytest.raises(UsageError, match="exactly one of prompt, messages, prompt_ids, audio and image"):
            Request(**fields)  # type: ignore[arg-type]
    assert Request("w5", image="a.png").prompt == "w5"


def test_tags_stay_in_the_text(tmp_path: Path, files: list[Path]) -> None:
    """Donut answers in tokens as <s_total>, which are special and no text to other codecs; the end token is none."""
    folder = save_pictured("donut", tmp_path / "donut")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    word = "<s_total>"
    tokenizer.add_special_tokens({"additional_special_tokens": [word]}, replace_extra_special_tokens=False)
    tag = tokenizer.convert_tokens_to_ids(word)
    path = folder / "model.safetensors"
    held = load_file(path)
    for name in [name for name, tensor in held.items() if tensor.shape[:1] == (97,)]:
        held[name] = torch.cat((held[name], held[name][30:31].expand(tag - 96, -1)))  # as likely as w30
    save_file(held, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["decoder"]["vocab_size"] = tag + 1
    (folder / "config.json").write_text(json.dumps(config))
    settings["eos_token_id"] = END
    settings["suppress_tokens"] = [token for token in range(97) if token not in (40, END)]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(folder)
    engine = dsbd_cli.load(str(folder), None, method=MethodConfig(rule="search", num_beams=BEAMS))
    sampling = SamplingConfig(max_new_tokens=4, n_best=BEAMS)
    (result,) = engine.run([Request(word, image=str(files[0]), sampling=sampling)])
    beam = next(beam for beam in result.hypotheses if tag in beam.token_ids)
    assert beam.text.count(word) == beam.token_ids.count(tag)
    assert result.prompt_tokens == result.source_tokens + 1  # type: ignore[operator]
    assert engine.codec.token_bytes()[tag] == word.encode()
    assert engine.codec.token_bytes()[END] == b""


# What is refused


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def blip_vqa(folder: Path) -> None:
    change(save_pictured("blip", folder) / "config.json", architectures=["BlipForQuestionAnswering"])


def drawn_questions(folder: Path) -> None:
    change(save_pictured("pix2struct", folder) / "config.json", is_vqa=True)


def udop(folder: Path) -> None:
    config = transformers.UdopConfig(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    transformers.UdopForConditionalGeneration(config).save_pretrained(folder)


def no_processor(folder: Path) -> None:
    (save_pictured("trocr", folder) / "preprocessor_config.json").unlink()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (blip_vqa, r"is a BlipForQuestionAnswering, but of BLIP the captioning models alone are run"),
        (drawn_questions, r"answers questions \(is_vqa\), which Pix2Struct draws into the picture"),
        (udop, r"is a udop, which has an encoder of another kind: with an encoder only Pix2Struct, Vision"),
        (no_processor, r"its image processor cannot be loaded"),
    ],
)
def test_models_that_are_not_run_say_why(make: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    make(tmp_path / "model")
    with pytest.raises(ModelError, match=told) as caught:
        dsbd_cli.load(str(tmp_path / "model"), None)
    assert "\n" not in str(caught.value)


def test_a_model_of_pictures_needs_pillow(trocr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else find_spec(name, *rest)
    )
    with pytest.raises(UsageError, match=r"pip install 'dsbd\[image\]'"):
        dsbd_cli.load(str(trocr), None)


@pytest.mark.parametrize(
    ("name", "size", "told"),
    [
        ("trocr", {"height": 16, "width": 32}, "makes 3 x 16 x 32 numbers, but its encoder takes 3 x 32 x 32"),
        ("swin", {"height": 40, "width": 40}, "but its encoder takes a side of 32 or more"),
    ],
)
def test_pictures_of_a_size_that_the_encoder_does_not_take(
    name: str, size: dict[str, int], told: str, tmp_path: Path, files: list[Path]
) -> None:
    """Guards an error of the encoder in the middle of a run."""
    folder = save_pictured(name, tmp_path / name)
    change(folder / "preprocessor_config.json", size=size)
    (result,) = dsbd_cli.load(str(folder), None).run([good(files[1:])])
    with pytest.raises(InvalidRowError, match=told):
        result.check()


def test_other_targets_refuse_pictures(files: list[Path]) -> None:
    engine = dsbd_cli.load()
    results = list(engine.run([good(files), Request("sql:", sampling=SamplingConfig(max_new_tokens=4))]))
    assert "but the target reads text: give a prompt" in str(results[0].error)
    assert results[1].error is None


def test_a_draft_by_name(trocr: Path, saved: Callable[[str], Path], files: list[Path]) -> None:
    """Its encoder is the target's, which reads each picture for both; a draft of other pictures is refused."""
    alone = dsbd_cli.load(str(trocr), None, method=MethodConfig(num_beams=3))
    pair = dsbd_cli.load(str(trocr), str(trocr), method=MethodConfig(num_beams=3, depth=2))
    asked = requests_of(files, n_best=3)
    assert outcomes(pair.run(asked)) == outcomes(alone.run(asked))
    with pytest.raises(PairError, match="read sources of different forms"):
        dsbd_cli.load(str(trocr), str(saved("pix2struct")))
