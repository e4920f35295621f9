"""`dsbd profile` from end to end on a toy pair, and what it refuses before anything is measured."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsbd_cli.cli.commands import profile as command
from dsbd_cli.cli.commands.profile import PromptOptions, _renderer, given_options, option_words
from dsbd_cli.cli.options.options import DeviceOptions, MethodOptions, PairOptions, RowOptions, SamplingOptions
from dsbd_cli.cli.options.settings import run_settings
from dsbd_cli.config.variants import MIN_WIDTH
from dsbd_cli.engine.drafting.index import CorpusTokens, write_index
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import OutputError
from dsbd_cli.lab.profiling.budget import Budget
from dsbd_cli.lab.reports import units
from dsbd_cli.lab.reports.profile_data import NO_DRAFT, ForestSize
from tests.helpers.toys import NumberCodec, TableLM
from tests.lab.profiling.conftest import VOCABULARY, Outcome

Dsbd = Callable[..., Outcome]
FEW = ("--repeats", "1", "--num-beams", "2", "--drafts-per-layer", "3", "--depth", "2", "--top-k", "0")
PARTS = ("tokens/s", "draft", "target", "verify", "floor", "peak", "Recommended for these prompts")


def test_a_whole_profile(dsbd: Dsbd, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = dsbd("profile", "--input", str(prompts), *FEW, "--show", "2", "--json", str(path))
    assert (done.code, done.faults) == (0, [])
    for part in PARTS:
        assert part in done.out
    assert re.search(r"Iteration 2 of prompt row 0: rule \w+, D=\d+; this target call yielded \d steps?\n", done.out)
    profile = json.loads(path.read_text())
    assert profile["schema"] == "dsbd.profile/1"
    assert profile["command"].startswith("dsbd profile --input")
    assert profile["machine"]["versions"]["dsbd"]
    phases = profile["now"]["phases"]
    assert [phase["name"] for phase in phases] == [
        "tokenise", "prefill", "draft", "target", "verify", "compact", "detokenise", "write", "other",
    ]  # fmt: skip
    assert sum(phase["share"] for phase in phases) == pytest.approx(1.0)
    assert all(phase["total_s"] > 0 for phase in phases)
    assert {run["setting"]["depth"] for run in (profile["now"], *profile["tried"])} == {0, 1, 2, 4}
    assert all(run["forward"]["seconds"] > 0 for run in (profile["now"], *profile["tried"]))
    assert all(run["peak_memory_bytes"] for run in (profile["now"], *profile["tried"]))
    assert [rate["depth"] for rate in profile["acceptance"]] == [1, 2]
    assert profile["forest"]["iteration"] == 2
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_numbers_that_cannot_be_written_in_the_end_are_printed(
    dsbd: Dsbd, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OutputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(command, "write_atomically", full)
    done = dsbd("profile", "--input", str(prompts), *FEW, "--records", "1", "--json", str(tmp_path / "x.json"), "-q")
    assert done.code == 1
    assert "x.json: No space left on device" in done.err
    assert done.out.startswith("dsbd generate ")


def test_files_may_have_any_bytes(dsbd: Dsbd, prompts: Path, tmp_path: Path) -> None:
    named = prompts.rename(prompts.with_name("x\udcff.jsonl"))
    path = tmp_path / "p.json"
    done = dsbd("profile", "--input", str(named), *FEW, "--records", "1", "--json", str(path), "-q")
    assert done.code == 0
    profile = json.loads(path.read_text())
    assert "x\ufffd.jsonl" in profile["command"]
    assert "x\ufffd.jsonl" in profile["recommended_command"]


def test_without_a_draft_and_with_threshold_width(dsbd: Dsbd, prompts: Path) -> None:
    done = dsbd("profile", "--input", str(prompts), "--records", "2", "--repeats", "1", "--draft", "none")
    assert (done.code, done.faults) == (0, [])
    assert "--draft none" in done.out
    wide = ("--set", "width=threshold:min=2", "--verify", "rejection")
    done = dsbd("profile", "--input", str(prompts), *FEW, *wide)
    assert (done.code, done.faults) == (0, [])
    assert "D=4 K=3 W_min=2" in done.out


def test_the_forest_of_two_drafters_says_who_proposed(dsbd: Dsbd, prompts: Path, tmp_path: Path) -> None:
    """The second drafter's nodes stand past the first one's distribution: they have no Q."""
    written = tmp_path / "p.json"
    prompts.write_text(json.dumps({"prompt": " ".join(str(token) for token in [*range(VOCABULARY)] * 2)}) + "\n")
    two = ("--records", "1", "--drafter", "beam+ngram:top-k=0", "--show", "2", "--json", str(written))
    done = dsbd("profile", "--input", str(prompts), *FEW, *two)
    assert (done.code, done.faults) == (0, [])
    nodes = json.loads(written.read_text())["forest"]["nodes"]
    drafted = [node for node in nodes if node["parent"] is not None and node["proposer"] is not None]
    assert {node["proposer"] for node in drafted} == {"beam", "ngram"}
    assert all((node["q"] is None) == (node["proposer"] == "ngram") for node in drafted)
    assert all(node["proposer"] is None for node in nodes if node["state"] in ("root", "completed"))
    assert "  ngram" in done.out
    rates = json.loads(written.read_text())["drafters"]
    assert [rate["name"] for rate in rates] == ["beam", "ngram"]
    assert all(0 <= rate["accepted"] <= rate["drafted"] for rate in rates)
    assert min(rates[0]["accepted"], rates[1]["drafted"]) > 0
    said = " ".join(done.out.split())
    assert f"beam {rates[0]['accepted']} of {rates[0]['drafted']} nodes" in said
    assert "…" not in done.out


@pytest.mark.parametrize("tree", ["greedy", "top-k"])
def test_the_head_says_how_a_dynamic_tree_is_chosen(dsbd: Dsbd, prompts: Path, tree: str) -> None:
    options = ("--records", "1", "--drafter", f"dynamic-tree:{tree}", "--verify", "rejection")
    done = dsbd("profile", "--input", str(prompts), *FEW, *options)
    assert (done.code, done.faults) == (0, [])
    assert f"dynamic-tree ({tree}) D=2 K=3" in done.out


def test_without_a_draft_no_phase_is_called_draft(dsbd: Dsbd, prompts: Path, tmp_path: Path) -> None:
    written = tmp_path / "p.json"
    plain = ("--records", "1", "--repeats", "1", "--draft", "none")
    done = dsbd("profile", "--input", str(prompts), *plain, "--json", str(written))
    assert done.code == 0
    names = [phase["name"] for phase in json.loads(written.read_text())["now"]["phases"]]
    assert "draft" not in names
    assert {"target", "verify", "other"} < set(names)


def test_quiet_prints_the_command_alone(dsbd: Dsbd, prompts: Path) -> None:
    done = dsbd("profile", "--input", str(prompts), *FEW, "--quiet", "--records", "1")
    assert (done.code, done.err) == (0, "")
    (line,) = done.out.splitlines()
    assert shlex.split(line)[:2] == ["dsbd", "generate"]
    assert shlex.split(line)[-2:] == ["--input", str(prompts)]


@pytest.fixture
def unloadable(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(sys.modules["dsbd_cli.loading"], "load", fail)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chat",), "--chat would do nothing, because there is no --input: drop it"),
        (("--repeats", "0"), "--repeats is 0, but must be 1 or more"),
        (("--show", "0"), "--show is 0, but must be 1 or more"),
        (("--seconds", "0"), "--seconds is 0, but must be above 0"),
        (("--seconds", "nan"), "--seconds is nan, but must be above 0"),
        (("--records", "0"), "--records is 0, but must be 1 or more"),
        (("--existing", "overwrite"), "--existing overwrite replaces"),
        (("--quiet", "--show", "1"), "drop one, or add --json"),
        (("--json", "{old}"), "exists: name another file, or replace it with --existing overwrite"),
        (("--json", "{old}", "--existing", "overwrite", "--input", "{old}"), "is the input: name another file"),
        (("--json", "{old}", "--existing", "overwrite", "--target", "{old}"), "is the input: name another file"),
        (("--json", "{old}", "--existing", "overwrite", "--drafter", "retrieval:{old}"), "is the input: name another"),
        (("--json", "-"), "--json needs a file, but - is standard output"),
        (("--json", "{folder}"), "is a folder"),
        (("--json", "{folder}/none/p.json"), "does not exist"),
        (("--input", "{folder}/none.jsonl"), "cannot be read"),
        (("--input", "{old}", "--task", "sql"), "--input and --task cannot be used together"),
        (("--input", "{old}"), "line 2: "),
        (("--input", "{empty}"), "holds no prompt"),
        (("--draft", "none", "--set", "width=threshold:min=2"), "--set width=threshold:min=2 would do nothing"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    dsbd: Dsbd, tmp_path: Path, unloadable: None, arguments: tuple[str, ...], message: str
) -> None:
    old, empty = tmp_path / "old.jsonl", tmp_path / "empty.jsonl"
    old.write_text('{"prompt": "1"}\n{"prompt": 1}\n')
    empty.write_text("\n")
    filled = [word.format(old=old, folder=tmp_path, empty=empty) for word in arguments]
    done = dsbd("profile", *filled)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert old.read_text().startswith('{"prompt": "1"}')


def test_the_fixture_above_works(dsbd: Dsbd, prompts: Path, unloadable: None) -> None:
    assert "a model was loaded" in dsbd("profile", "--input", str(prompts)).err


def test_an_iteration_that_there_is_not(dsbd: Dsbd, prompts: Path) -> None:
    done = dsbd("profile", "--input", str(prompts), *FEW, "--show", "500")
    assert done.code == 2
    assert "--show 500: the first prompt (row 0) took" in done.err


def test_a_prompt_that_cannot_be_decoded(dsbd: Dsbd, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "x", "prompt": "99"}\n')
    done = dsbd("profile", "--input", str(path), *FEW)
    assert done.code == 1
    assert "the prompt with id 'x' cannot be profiled: prompt holds token id 99" in done.err
    written = tmp_path / "p.json"
    path.write_text('{"id": "x", "prompt": "99"}\n{"id": "y", "prompt": "1"}\n')
    done = dsbd("profile", "--input", str(path), *FEW, "--json", str(written))
    why = "prompt holds token id 99, but the target has 12 ids"
    said = f"dsbd: warning: left out, because they cannot be answered: 1 prompt, the first with id 'x': {why}"
    assert (done.code, done.faults) == (0, [said])
    assert json.loads(written.read_text())["prompts"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_before_anything_is_measured_end_it_with_one_line(
    dsbd: Dsbd, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def swallowed(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(number)
        except Exception:  # as libraries do around their imports
            raise ModuleNotFoundError from None

    monkeypatch.setattr(sys.modules["dsbd_cli.loading"], "load", swallowed)
    done = dsbd("profile", "--input", str(prompts), "--json", str(tmp_path / "p.json"))
    assert (done.code, done.out) == (code, "")
    assert done.faults == ["dsbd: stopped before there was a result"]
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("part", "there", "missing"),
    [
        ("timing the run", ("tokens/s", ">*D=2 K=3"), "no draft "),
        ("timing a run of D=4 K=3", ("tokens/s", "no draft ", "D=1 K=3"), "D=4 K=3"),
        ("round 1 of 1: no draft", ("no draft ", "D=2 K=6", "peak"), "never"),
    ],
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_print_what_is_measured_until_then(
    dsbd: Dsbd,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    there: tuple[str, ...],
    missing: str,
    number: int,
    code: int,
) -> None:
    plain = Budget.tell

    def tell(self: Budget, what: str, expected_s: float = 0.0) -> None:
        plain(self, what, expected_s)
        if what.startswith(part):
            signal.raise_signal(number)

    monkeypatch.setattr(Budget, "tell", tell)
    written = tmp_path / "p.json"
    done = dsbd("profile", "--input", str(prompts), *FEW, "--json", str(written))
    assert done.code == code
    assert all(words in done.out for words in there)
    assert missing not in done.out
    assert "- stopped early: this is what was measured until then" in done.out
    assert json.loads(written.read_text())["complete"] is False


def test_a_signal_before_the_first_run_is_over_leaves_what_was_said(
    dsbd: Dsbd, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Budget.tell

    def tell(self: Budget, what: str, expected_s: float = 0.0) -> None:
        plain(self, what, expected_s)
        if what == "warming up":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Budget, "tell", tell)
    done = dsbd("profile", "--input", str(prompts), *FEW)
    assert (done.code, done.out) == (130, "")
    assert "dsbd: measured: one forward of the target: " in done.err
    assert "stopped before there was a result" not in done.err


def test_a_signal_while_a_run_is_made_ends_that_run(dsbd: Dsbd, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a signal that a run would only see when it is over."""
    forwards = []
    plain = TableLM.forward

    def forward(self: TableLM, batch: ForestInput, *, logits: bool = True) -> object:
        forwards.append(1)
        if len(forwards) == 30:
            signal.raise_signal(signal.SIGINT)
        return plain(self, batch, logits=logits)

    monkeypatch.setattr(TableLM, "forward", forward)
    done = dsbd("profile", "--input", str(prompts), *FEW)
    assert (done.code, len(forwards) < 40) == (130, True)
    assert "stopped early" in done.out


def test_what_is_measured_is_said_in_plain_lines(dsbd: Dsbd, prompts: Path) -> None:
    done = dsbd("profile", "--input", str(prompts), *FEW, "--records", "1")
    lines = [line for line in done.err.splitlines() if not line.startswith("dsbd: measured: ")]
    measured = [line.removeprefix("dsbd: measured: ") for line in done.err.splitlines() if line not in lines]
    assert [line.partition(": ")[0] for line in measured[:4]] == [
        "one forward of the target", "one forward of the draft", "D=2 K=3", "no draft",
    ]  # fmt: skip
    assert measured[2].endswith(" tokens/s, the first run")
    assert lines[:4] == [
        "dsbd: loading the models",
        "dsbd: timing one forward",
        "dsbd: warming up",
        "dsbd: timing the run without a draft",
    ]
    assert "dsbd: round 1 of 1: no draft" in lines
    assert dsbd("profile", "--input", str(prompts), *FEW, "--records", "1", "--quiet").err == ""


@pytest.mark.parametrize(
    ("method_options", "setting"),
    [
        (MethodOptions(verify="coupled", memory_saving=True), ForestSize(3, 12)),
        (MethodOptions(verify="rejection", width="threshold:min=1"), ForestSize(3, 12, 2)),
        (MethodOptions(verify="rejection", width="threshold:0.5,min=1", depth="2"), NO_DRAFT),
        (MethodOptions(num_beams=6, drafts_per_layer=9), NO_DRAFT),
    ],
)
def test_the_recommended_command_is_one_that_generate_takes(method_options: MethodOptions, setting: ForestSize) -> None:
    """Guards against options that contradict each other, and against a setting that is lost on the way."""
    words = shlex.split(
        _renderer(
            given_options(PairOptions(), method_options),
            PromptOptions(input=Path("my prompts.jsonl"), files_under=Path("my files")),
        )(setting)
    )
    assert words[:2] == ["dsbd", "generate"]
    assert words[-4:] == ["--files-under", "my files", "--input", "my prompts.jsonl"]
    pairs = list(zip(*[iter(words[2:])] * 2, strict=True))
    options, settings = dict(pairs), dict(value.split("=", 1) for name, value in pairs if name == "--set")
    method = MethodOptions(
        verify=options.get("--verify"),
        num_beams=int(options["--num-beams"]) if "--num-beams" in options else None,
        drafts_per_layer=int(options["--drafts-per-layer"]) if "--drafts-per-layer" in options else None,
        depth=options.get("--depth"),
        width=settings.get("width"),
    )
    pair = PairOptions(draft=options.get("--draft"))
    parsed = run_settings(pair, method, SamplingOptions(), DeviceOptions(), RowOptions()).method
    assert parsed.depth == setting.depth
    if setting.depth:
        assert parsed.drafts_per_layer == setting.drafts_per_layer
        assert setting.min_width is None or (parsed.width, parsed.value(MIN_WIDTH)) == ("threshold", setting.min_width)
    assert parsed.rule == (method_options.verify or "coupled")
    assert settings.get("memory-saving") == ("true" if method_options.memory_saving else None)


@pytest.mark.parametrize(
    ("groups", "setting", "words"),
    [
        (
            (MethodOptions(num_beams=4, verify="coupled"), SamplingOptions(top_k=50, seed=0)),
            NO_DRAFT,
            "--depth 0 --draft none",
        ),
        (
            (PairOptions(draft="builtin:draft"), DeviceOptions(dtype="auto", batch_size="8")),
            ForestSize(2, 8),
            "--depth 2",
        ),
        ((MethodOptions(num_beams=8),), ForestSize(4, 16), "--num-beams 8 --depth 4"),
        ((MethodOptions(verify="rejection", width="threshold"),), ForestSize(4, 8, 1), "--verify rejection"),
        (
            (MethodOptions(verify="rejection"), SamplingOptions(temperature=0.5), DeviceOptions(dtype="float32")),
            ForestSize(4, 12, 2),
            "--drafts-per-layer 12 --verify rejection --set width=threshold:min=2 --temperature 0.5 --dtype float32",
        ),
        ((MethodOptions(warp_scope="beam", memory_saving=False),), ForestSize(4, 8), "--depth 4 --set warp-scope=beam"),
        (
            (PairOptions(target="x", draft="y"), DeviceOptions(trust_remote_code="both")),
            NO_DRAFT,
            "--target x --trust-remote-code target --depth 0",
        ),
        (
            (PairOptions(target="x", draft="y"), DeviceOptions(trust_remote_code="draft")),
            NO_DRAFT,
            "--target x --depth 0",
        ),
    ],
)
def test_the_recommended_command_leaves_defaults_out(
    groups: tuple[object, ...], setting: ForestSize, words: str
) -> None:
    kinds = {type(group) for group in groups}
    whole = given_options(*groups, *[kind() for kind in (PairOptions, MethodOptions) if kind not in kinds])
    assert _renderer(whole, PromptOptions())(setting) == f"dsbd generate {words} --input prompts.jsonl"
    as_chat = PromptOptions(input=Path("x.jsonl"), chat=True)
    assert _renderer(whole, as_chat)(setting) == f"dsbd generate {words} --chat --input x.jsonl"


def test_words_of_options() -> None:
    options = MethodOptions(num_beams=3, memory_saving=False, decode="search")
    assert option_words(given_options(replace(options, depth="2", decode=None))) == [
        "--num-beams",
        "3",
        "--depth",
        "2",
        "--set",
        "memory-saving=false",
    ]


def test_numbers_are_shown_with_units_that_suit_them() -> None:
    assert [units.seconds_text(x) for x in (0.0, 2e-6, 0.0123, 3.456, 1234.5)] == [
        "0 µs", "2 µs", "12.3 ms", "3.46 s", "1234 s",
    ]  # fmt: skip
    assert [units.bytes_text(x) for x in (None, 12, 2048, 3 << 20, 5 << 30)] == [
        "–", "12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        "--drafter rsd-s",
        "--drafter beam+ngram:share=1",
        "--verify fuzzy:0.3",
        "--verify rejection --set memory-saving=true",
    ],
)
def test_other_drafters_and_rules(dsbd: Dsbd, prompts: Path, options: str) -> None:
    """Guards options of drafting that are carried into the run without a draft, or into its command."""
    done = dsbd("profile", "--input", str(prompts), *FEW, "--quiet", *options.split())
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("dsbd generate ")
    if "--draft none" in done.out:
        assert "--drafter" not in done.out
        assert "fuzzy" not in done.out


def test_lookups_are_profiled_without_a_draft_model(dsbd: Dsbd, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    few = ("--repeats", "1", "--num-beams", "2", "--drafts-per-layer", "3", "--top-k", "0", "--draft", "none")
    done = dsbd("profile", "--input", str(prompts), *few, "--drafter", "ngram", "--show", "1", "--json", str(path))
    assert (done.code, done.faults) == (0, [])
    for part in PARTS:
        assert part in done.out
    said = " ".join(done.out.split())
    assert "drafter ngram runs no draft model: its phase draft is look-ups" in said
    assert "ngram D=4 K=3" in said
    profile = json.loads(path.read_text())
    assert (profile["draft"], profile["drafter"]) == (None, "ngram")
    phases = {phase["name"]: phase["total_s"] for phase in profile["now"]["phases"]}
    assert phases["draft"] > 0
    assert sum(rate["reached"] for rate in profile["acceptance"]) > 0


def test_retrieval_is_profiled_with_its_index(dsbd: Dsbd, prompts: Path, tmp_path: Path) -> None:
    corpus, path = CorpusTokens(), tmp_path / "x.index"
    corpus.extend(list(range(VOCABULARY)) * 4)
    corpus.end_document()
    with path.open("wb") as stream:
        write_index(stream, corpus.tokens, NumberCodec(VOCABULARY, (3,)).token_bytes())
    words = ("--drafter", f"retrieval:{path}+ngram")
    done = dsbd("profile", "--input", str(prompts), *FEW, *words)
    assert (done.code, done.faults) == (0, [])
    assert "drafter retrieval+ngram runs no draft model" in done.out


def test_a_bridge_is_profiled_and_says_that_it_reads_the_host(dsbd: Dsbd, tmp_path: Path) -> None:
    texts, path = tmp_path / "texts.jsonl", tmp_path / "p.json"
    texts.write_text('{"prompt": "the quick brown", "max_new_tokens": 8}\n')
    few = ("--repeats", "1", "--num-beams", "2", "--drafts-per-layer", "3", "--depth", "2")
    done = dsbd("profile", "--input", str(texts), *few, "--drafter", "bridge", "--json", str(path))
    assert (done.code, done.faults) == (0, [])
    assert all(part in done.out for part in PARTS)
    said = " ".join(done.out.split())
    assert "drafter bridge reads the host in its phase draft by design" in said
    assert re.search(r"its draft runs \d+\.\d forwards an iteration", said)
    profile = json.loads(path.read_text())
    phases = profile["now"]["phases"]
    assert sum(phase["share"] for phase in phases) == pytest.approx(1.0)
    assert all(phase["total_s"] >= 0 for phase in phases)


def test_depth_auto_is_refused_with_the_reason(dsbd: Dsbd) -> None:
    done = dsbd("profile", "--depth", "auto")
    assert done.code == 2
    assert "takes another D and K from iteration to iteration" in done.err
    assert len(done.err.splitlines()) == 1
