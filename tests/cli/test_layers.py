"""Options from the command line, a job file and the environment."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from dsbd_cli.cli.commands.bench import bench
from dsbd_cli.cli.commands.generate import generate
from dsbd_cli.errors import SETTINGS, option_name
from tests.cli.conftest import Outcome

Dsbd = Callable[..., Outcome]


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write


def beams(outcome: Outcome) -> int:
    assert (outcome.code, outcome.err) == (0, "")
    method = outcome.loads[-1]["method"]
    return method.num_beams  # type: ignore[attr-defined, no-any-return]


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment(
    dsbd: Dsbd, job: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job("num-beams = 6\n")
    assert beams(dsbd("generate")) == 4
    monkeypatch.setenv("DSBD_NUM_BEAMS", "5")
    assert beams(dsbd("generate")) == 5
    assert beams(dsbd("generate", "--config", path)) == 6
    assert beams(dsbd("generate", "--config", path, "--num-beams", "7")) == 7
    monkeypatch.setenv("DSBD_CONFIG", path)
    assert beams(dsbd("generate")) == 6


def test_a_switch_can_be_taken_back(dsbd: Dsbd, job: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = job("memory_saving = true\nstop = ['x']\n")

    def saving(*options: str) -> bool:
        outcome = dsbd("generate", *options)
        assert outcome.code == 0
        return outcome.loads[-1]["method"].memory_saving  # type: ignore[attr-defined, no-any-return]

    assert saving("--config", path)
    assert not saving("--config", path, "--set", "memory-saving=false")
    monkeypatch.setenv("DSBD_MEMORY_SAVING", "yes")
    assert saving()
    monkeypatch.setenv("DSBD_MEMORY_SAVING", "0")
    assert not saving()


def test_settings_are_words_of_the_command_line(
    dsbd: Dsbd, job: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--set wins over the file, the file over the environment; the last one of a name counts; - and _ are alike."""

    def scope(*options: str) -> str:
        outcome = dsbd("generate", *options)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.loads[-1]["method"].warp_scope  # type: ignore[attr-defined, no-any-return]

    path = job("warp-scope = 'beam'\n")
    assert scope() == "pool"
    assert scope("--config", path) == "beam"
    assert scope("--config", path, "--set", "warp_scope=pool") == "pool"
    assert scope("--set", "warp-scope=pool", "--set", "min-p=0.1", "--set", "warp-scope=beam") == "beam"
    monkeypatch.setenv("DSBD_WARP_SCOPE", "beam")
    assert scope() == "beam"
    assert scope("--set", "warp-scope=pool") == "pool"


def test_every_setting_is_declared_by_some_command(dsbd: Dsbd) -> None:
    """Guards a name that is no longer declared, and one that is still an option of its own beside --set."""
    groups = [group for command in (generate, bench) for group in command.__dict__["groups"]]
    assert set(SETTINGS) <= {item.name for group in groups for item in fields(group)}
    for name in {item.name for group in generate.__dict__["groups"] for item in fields(group)} & set(SETTINGS):
        typed = "--" + name.replace("_", "-")
        refused = dsbd("generate", typed, "1")
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert f"No such option: {typed} (Possible options: " in refused.err
        assert option_name(name) in refused.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_beam = 3", "num_beam is no option of a job: did you mean num_beams"),
        ("zzz = 3", "zzz is no option of a job: dsbd generate --print-config lists them"),
        ("[models]\na = 1", "models is no option"),
        ("config = 'x'", "config is no option"),
        ("num_beams = '3'", "num_beams is '3', but must be an integer"),
        ("num_beams = true", "num_beams is true, but must be an integer"),
        ("num_beams = 3.5", "num_beams is 3.5, but must be an integer"),
        ("top_p = 'x'", "top_p is 'x', but must be a number"),
        ("memory_saving = 1", "memory_saving is 1, but must be true or false"),
        ("chat = 2", "chat is 2, but must be true or false"),
        ("decode = 'fast'", "decode is 'fast', but must be one of search, sample"),
        ("verify = 'fast'", "--verify is 'fast', but must be one of coupled, "),
        ("target = 3", "target is 3, but must be a string"),
        ("depth = 1.5", "depth is 1.5, but must be an integer or a string"),
        ("stop = [1]", "stop is [1], but must be a string or a list of strings"),
        ("num_beams = 3\nnum-beams = 3", "is given twice"),
        ("num_beams = ", "is not TOML"),
        pytest.param(f"seed = {'9' * 5000}", "a value has too many digits or levels", id="digits"),
        pytest.param(f"stop = {'[' * 3000}", "a value has too many digits or levels", id="levels"),
        ("num_beams = 0", "--num-beams is 0"),
        ("quiet = true\nlog = 'verbose'", "--quiet and --set log=verbose cannot be used together"),
    ],
)
def test_a_wrong_file_is_refused_with_one_line(dsbd: Dsbd, job: Callable[[str], str], text: str, message: str) -> None:
    outcome = dsbd("generate", "--config", job(text))
    assert (outcome.code, outcome.loads) == (2, [])
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_empty_list_is_no_value(dsbd: Dsbd, job: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job file takes back what the environment gives."""
    monkeypatch.setenv("DSBD_STOP", "x")
    outcome = dsbd("generate", "--config", job("stop = []"), "--print-config")
    assert outcome.code == 0, outcome.err
    assert "\nstop = " not in outcome.out
    assert '\nstop = ["x"]' in dsbd("generate", "--print-config").out


def test_a_file_may_begin_with_a_byte_order_mark(dsbd: Dsbd, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbfnum_beams = 3\n")
    outcome = dsbd("generate", "--config", str(tmp_path / "job.toml"))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.loads[-1]["method"].num_beams == 3  # type: ignore[attr-defined]


def test_text_that_is_not_utf8_is_refused_and_paths_are_not(dsbd: Dsbd, tmp_path: Path) -> None:
    half = "\udcff"
    for words, name in (
        (("generate", "--stop", half), "--stop"),
        (("generate", "--target", half), "--target"),
        (("generate", "--set", f"index={half}"), None),
        (("demo", "--prompt", half), "--prompt"),
        (("pick", "--by", "vote", "--answer-regex", half), "--answer-regex"),
    ):
        refused = dsbd(*words)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert name is None or f"{name} is '\\udcff', which is not UTF-8" in refused.err
    output = str(tmp_path / f"{half}.jsonl")
    assert dsbd("generate", "-o", output).code == 0
    refused = dsbd("generate", "-o", output, "--print-config")
    assert refused.code == 2
    assert "cannot be written to a job file, because it is not UTF-8" in refused.err


def test_wrong_variables(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, message in (
        ("DSBD_TOP_P", "much", "DSBD_TOP_P is 'much', but must be a number"),
        ("DSBD_CHAT", "2", "DSBD_CHAT is '2', but must be true or false"),
        ("DSBD_MEMORY_SAVING", "maybe", "DSBD_MEMORY_SAVING is 'maybe', but must be true or false"),
        ("DSBD_DECODE", "fast", "DSBD_DECODE is 'fast', but must be one of search, sample"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            refused = dsbd("generate")
            assert refused.code == 2
            assert message in refused.err


def test_a_misspelt_variable_is_refused_and_the_nearest_option_named(
    dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, name, message in (
        ("generate", "DSBD_NUM_BEAMZ", "dsbd generate has no such option: did you mean DSBD_NUM_BEAMS?"),
        ("bench", "DSBD_NUM_BEAMZ", "dsbd bench has no such option: did you mean DSBD_NUM_BEAMS?"),
        ("generate --print-config", "DSBD_NUM_BEAMZ", "did you mean DSBD_NUM_BEAMS?"),
        ("generate", "DSBD_8", "dsbd generate has no such option: unset it"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            refused = dsbd(*command.split())
        assert (refused.code, refused.out, refused.loads) == (2, "", [])
        assert refused.err.startswith(f"dsbd: error: the variable {name} is set, but ")
        assert message in refused.err
        assert refused.err.count("\n") == 1


def test_variables_that_other_parts_read_are_no_options(
    dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSBD_MODELS_FILE", str(tmp_path / "models.toml"))
    monkeypatch.setenv("_DSBD_COMPLETE_ARGS", "dsbd ")
    monkeypatch.setenv("DSBD_DEBUG", "0")
    assert beams(dsbd("generate")) == 4
    assert "--nope" in dsbd("bench", "--nope").err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--decode", "search", "--n-best", "2", "--set", "early-stopping=true"],
        ["--stop", 'a"\\b\n\x7f', "--stop", "é🙂", "--top-p", "0.5", "--temperature", "1e-3", "--input-format", "auto"],
        ["--input", "my prompts.jsonl", "--output-format", "openai", "--set", "max-errors=3", "--quiet"],
    ],
)
def test_what_is_printed_is_accepted_and_means_the_same(
    dsbd: Dsbd, job: Callable[[str], str], options: list[str]
) -> None:
    printed = dsbd("generate", "--print-config", *options)
    assert (printed.code, printed.err, printed.loads) == (0, "", [])
    again = dsbd("generate", "--print-config", "--config", job(printed.out))
    assert again.out == printed.out
    assert all(line.startswith("#") or " = " in line for line in printed.out.splitlines() if line)


def test_print_config_refuses_what_a_run_would_refuse(dsbd: Dsbd) -> None:
    assert dsbd("generate", "--print-config", "--top-p", "2").code == 2


def test_every_option_can_stand_in_a_file(dsbd: Dsbd, job: Callable[[str], str]) -> None:
    """Guards against an option of a type that the file cannot hold."""
    groups = generate.__dict__["groups"]
    types = {name: kind for group in groups for name, kind in typing.get_type_hints(group).items()}
    values: dict[object, object] = {int: 1, float: 0.5, bool: True, str: "'x'", Path: "'x'", list[str]: ["x"]}
    printed = dsbd("generate", "--print-config").out
    for name, kind in types.items():
        if name in ("config", "print_config", "dry_run", "target"):
            continue
        [plain] = [variant for variant in typing.get_args(kind) if variant is not type(None)]
        value = f"'{typing.get_args(plain)[0]}'" if typing.get_origin(plain) is typing.Literal else values[plain]
        read = dsbd("generate", "--print-config", "--config", job(f"{name} = {str(value).lower()}"))
        assert read.code == 0 or not read.err.startswith("dsbd: error: --config"), (name, read.err)
        assert f"# {name}: " in printed
