"""Pictures and sound through the commands: from a file of rows to records, and where rows may read files from."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli.app import run
from tests.helpers.pictures import NEW, draw, save_pictured
from tests.models.transformers_backend.test_pictures import bad_picture, uri

OPTIONS = ["--decode", "search", "--max-new-tokens", str(NEW)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pictured("trocr", tmp_path_factory.mktemp("target") / "trocr"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a picture, a folder inside with another, and one outside."""
    for name in ("in", "in/deep", "inner", "out"):
        (tmp_path / name).mkdir()
        draw(tmp_path / name / "a.png", f"TEXT {name}")
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_reads_pictures(target: str, folder: Path) -> None:
    """Texts of a path, of data and behind a prompt; bad files are errors of their rows, and the others are answered."""
    picture = folder / "in" / "a.png"
    bad_picture(folder / "in", "fifo")
    bad_picture(folder / "in", "huge.png")
    rows = [
        {"image": "a.png"},
        {"image": uri(picture.read_bytes())},
        {"image": "fifo"},
        {"image": str(picture), "prompt": "w50 w61"},
        {"image": "huge.png"},
        {"image": "a.png", "n_best": 2, "token_logprobs": True},
        {"image": "a.png", "audio": "a.wav"},
        {"image": ["a.png"]},
        {"prompt": "w5"},
        {"image": "deep/a.png"},
        {"image": "/9j/" + "ab/" * 1_000_000},
    ]
    lines, out = write(folder / "in" / "rows.jsonl", rows), folder / "out.jsonl"
    options = ["generate", "--target", target, "-i", str(lines), "-o", str(out), *OPTIONS]
    assert run(options) == 3
    written = records(out)
    told = {record["index"]: record["error"]["message"] for record in written if "error" in record}
    assert set(told) == {2, 4, 6, 7, 8, 10}
    assert told[10].endswith("which is no path: contents are written as data:image/png;base64,...")
    assert "line 3: image is '" in told[2]
    assert told[2].endswith("fifo', which is no file")
    assert "exceeds limit" in told[4]
    assert told[6] == "line 7: audio and image are both given: give one of them"
    assert told[7] == "line 8: image is ['a.png'], but must be a non-empty string"
    assert told[8] == "line 9: image is missing: the target reads pictures, and no text alone"
    assert written[0]["text"] == written[1]["text"] == written[5]["text"]
    assert written[0]["usage"]["source_tokens"] == 17
    assert written[3]["usage"]["prompt_tokens"] == 17 + 3
    beams = written[5]["beams"]
    assert len(beams) == 2
    assert sum(logprob for logprob in beams[0]["token_logprobs"]) == pytest.approx(beams[0]["logprob"], abs=1e-4)
    assert run([*options, "--existing", "resume"]) == 3
    assert records(out) == written


OUTSIDE = [
    "../out/a.png",
    "../inner/a.png",
    "{folder}/out/a.png",
    "link.png",
    "linked/a.png",
    "deep/../../out/a.png",
]


@pytest.mark.parametrize("field", ["image", "audio"])
def test_rows_read_files_under_the_folder_of_their_file(target: str, folder: Path, field: str) -> None:
    """Guards .., absolute paths, and links to files and folders; audio goes the same way."""
    (folder / "in" / "link.png").symlink_to(folder / "out" / "a.png")
    (folder / "in" / "linked").symlink_to(folder / "out")
    (folder / "in" / "near.png").symlink_to("deep/a.png")
    names = [name.format(folder=folder) for name in OUTSIDE]
    lines = write(folder / "in" / "rows.jsonl", [{field: name} for name in (*names, "near.png", "a\0b")])
    out = folder / "out.jsonl"
    assert run(["generate", "--target", target, "-i", str(lines), "-o", str(out), *OPTIONS]) == 3
    written = records(out)
    for name, record in zip(names, written, strict=False):
        shown = name if len(name) < 59 else name[:50]
        message = record["error"]["message"]
        assert f"{field} is '{shown}" in message
        assert f"which is not under {folder / 'in'}: rows may read files there alone" in message
    if field == "image":
        assert written[-2]["text"]
    else:
        assert "the target reads pictures: give an image" in written[-2]["error"]["message"]
    assert "which is no path" in written[-1]["error"]["message"]


def test_files_under_names_the_folder(target: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of the rows' folder; on standard input the working folder is the one."""
    rows = [{"image": "a.png"}, {"image": "../in/a.png"}, {"image": str(folder / "in" / "a.png")}]
    lines, out = write(folder / "in" / "rows.jsonl", rows), folder / "out.jsonl"
    options = ["generate", "--target", target, "-o", str(out), "--existing", "overwrite", *OPTIONS]

    def failed() -> list[bool]:
        return ["error" in record for record in records(out)]

    assert run([*options, "-i", str(lines)]) == 0
    assert run([*options, "-i", str(lines), "--files-under", str(folder / "out")]) == 3
    assert failed() == [False, True, True]
    assert run([*options, "-i", str(lines), "--files-under", str(folder)]) == 3
    assert failed() == [True, True, False]
    for name, wanted in (("in", [False, False, False]), ("out", [False, True, True])):
        with monkeypatch.context() as patch:
            patch.chdir(folder / name)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.read_bytes()), encoding="utf-8"))
            run(options)
        assert failed() == wanted


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["generate", "--files-under", "nowhere"], "--files-under is nowhere, which is no folder"),
        (["generate", "--files-under", ".", "--input-format", "text"], "would do nothing, because every line is a"),
        (["bench", "--files-under", "."], "would do nothing, because there is no --input and no --data"),
        (["bench", "--files-under", ".", "--task", "squad", "--data", "x"], "because squad names no files"),
        (["profile", "--files-under", "."], "would do nothing, because there is no --input"),
    ],
)
def test_a_folder_that_cannot_act_is_refused(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_bench_reads_words_of_pictures(target: str, folder: Path) -> None:
    """Ours and transformers' beams give the same words, with prompts of several lengths and none."""
    draw(folder / "in" / "b.png", "another", (200, 50))
    rows = [
        {"image": "a.png"},
        {"image": "b.png", "prompt": "w50 w61"},
        {"image": "deep/a.png"},
        {"image": uri((folder / "in" / "b.png").read_bytes()), "prompt": "w7"},
    ]
    lines, out = write(folder / "in" / "rows.jsonl", rows), folder / "out.jsonl"
    assert run(["generate", "--target", target, "-i", str(lines), "-o", str(out), *OPTIONS]) == 0
    texts = [record["text"] for record in records(out)]
    data = write(
        folder / "in" / "data.jsonl", [{**row, "reference": text} for row, text in zip(rows, texts, strict=True)]
    )
    options = ["bench", "--target", target, "--draft", "none", "--task", "words", "--data", str(data)]
    options += ["--methods", "beam-search,hf-beam-search", "--max-new-tokens", str(NEW), "--rounds", "1"]
    options += ["--records", "4", "--json", str(folder / "found.jsonl")]
    assert run(options) == 0
    measured = [line for line in records(folder / "found.jsonl") if "method" in line]
    assert [line["scores"]["1 - WER"]["value"] for line in measured] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"image": "../out/a.png"}, "which is not under"),
        ({"image": "gone.png"}, "cannot be read: No such file"),
        ({"image": "a.png", "audio": "b.wav"}, "audio and image are both given: give one of them"),
        ({"image": 3}, "image is 3, but must be a non-empty string"),
    ],
)
def test_bench_says_what_it_cannot_read(
    target: str, folder: Path, row: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(folder / "in" / "data.jsonl", [{**row, "reference": "x"}])
    options = ["bench", "--target", target, "--draft", "none", "--task", "words", "--data", str(data)]
    assert run([*options, "--methods", "beam-search", "--max-new-tokens", "4"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_profile_and_doctor_take_a_model_of_pictures(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write(folder / "rows.jsonl", [{"image": "in/a.png"}, {"image": "out/a.png"}])
    options = ["profile", "--target", target, "--draft", "none", "--input", str(lines), "--max-new-tokens", "4"]
    assert run([*options, "--seconds", "1"]) == 0
    capsys.readouterr()
    assert run(["doctor", "--target", target, "--draft", "none"]) == 0
    assert "the target reads image files: no text can be tried on it" in " ".join(capsys.readouterr().out.split())
