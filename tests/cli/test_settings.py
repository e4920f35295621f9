"""Options either act or are refused, with one line that says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import pytest

from dsbd_cli.cli.options.options import DeviceOptions, MethodOptions, PairOptions, SamplingOptions
from dsbd_cli.cli.options.settings import fixed_depth, run_settings
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import UsageError, shown_names
from tests.cli.conftest import Outcome, of_rule

Dsbd = Callable[..., Outcome]

REFUSED = {
    "--verify rejection --temperature 0": "--temperature is 0, which rejection does not take: use coupled, or search",
    "--temperature -1": "--temperature is -1.0",
    "--temperature nan": "--temperature is nan",
    "--top-p 2": "--top-p is 2.0",
    "--max-new-tokens 0": "--max-new-tokens is 0",
    "--num-beams 0": "--num-beams is 0",
    "--seed -1": "--seed is -1, but must be an integer from 0 to 2**63 - 1",
    "--draft none --trust-remote-code both": "--trust-remote-code is both, but there is no draft model",
    "--trust-remote-code all": "--trust-remote-code",
    "--n-best 5": "--n-best is 5, but num_beams is 4: lower it, or raise that",
    "--batch-size 0": "--batch-size is 0",
    "--drafts-per-layer 3": "--drafts-per-layer is 3, but a layer needs 4",
    "--set width=fixed:2": "--set width=fixed:2: it has no settings: it is spelled fixed",
    "--set width=threshold:2": "chance is 2, but must be above 0 and at most 1",
    "--set width=threshold:0.7,0.8": "chance is '0.7,0.8', but must be a number, above 0 and at most 1",
    "--set width=threshold:min=5": "min of --set width is 5, but must be between 1 and 4 (num_beams)",
    "--set width=threshold:least=2": "there is no setting 'least': it is spelled threshold[:CHANCE[,min=...]]",
    "--set width=wide": "--set width is 'wide', but must be one of fixed, threshold",
    "--decode search --temperature 2": "--temperature would do nothing, because --decode search",
    "--decode search --top-k 5 --top-p 0.5": "--top-k, --top-p would do nothing",
    "--decode search --set min-p=0.1": "--set min-p would do nothing",
    "--decode search --seed 3": "--seed would do nothing",
    "--decode search --set warp-scope=beam": "--set warp-scope would do nothing",
    "--decode search --set width=threshold": "--set width=threshold would do nothing",
    "--decode search --verify coupled": "--verify coupled would do nothing, because --decode search",
    "--decode beam": "--decode is 'beam', but must be one of search, sample",
    "--verify search": "--verify is 'search', but must be one of coupled, rejection, with-replacement, fuzzy",
    "--draft none --depth 3": "--depth 3 needs a draft",
    "--draft none --depth auto": "--depth auto needs a draft",
    "--depth deep": "--depth is 'deep', but must be a number or auto",
    "--depth -1": "--depth is -1, but must be 1 or more: --draft none --depth 0 drafts nothing",
    "--output-format=": "--output-format is '', but must be one of native, openai",
    "--drafter=": "--drafter is '', but must be one of beam, rsd-c",
    "--batch-size many": "--batch-size is 'many', but must be a number or auto",
    "--draft none --drafts-per-layer 8": "--drafts-per-layer would do nothing, because there is no draft",
    "--draft none --set width=threshold": "--set width=threshold would do nothing",
    "--draft none --verify rejection --set width=threshold:min=2": "--set width=threshold:min=2 would do nothing",
    "--draft none --device cpu,cuda": "cuda in --device cpu,cuda would do nothing, because there is no draft",
    "--depth 0": "--depth is 0, but must be 1 or more: --draft none --depth 0 drafts nothing",
    "--num-beams 99999999999999999999": "--num-beams is 99999999999999999999, but must be at most 2147483647",
    "--depth 99999999999999999999": "--depth is 99999999999999999999, but must be at most 2147483647",
    "--draft none --drafter ngram --depth 0": "--depth is 0, but must be 1 or more",
    "--drafter suffix:cache=x --draft none --workers 2": "cache=x would be written by several processes",
    "--drafter suffix:x,cache=x --draft none": "it would replace the source: name another file",
    "--target t --depth 3": "--target t has no draft: name one with --draft, or --drafter suffix",
    "--target t --drafter rsd-c": "--drafter rsd-c needs a draft model, but --target t has no draft: name one with",
    "--target t --verify fuzzy:0.1": "--verify fuzzy:0.1 compares the target with a draft model, but --target t has no",
    "--num-beams 1 --set memory-saving=true": "--set memory-saving keeps one beam of several",
    "--device cpu,": "--device is 'cpu,', but must be one device, or the target's and the draft's with a comma",
    "--quiet --set log=verbose": "--quiet and --set log=verbose cannot be used together",
    "--input no-such-file": "--input no-such-file cannot be read: No such file",
    "--input .": "--input . cannot be read",
    "--existing overwrite": "--existing overwrite replaces --output, --set stats and --set summary, but none is given",
    "--output .": "--output . is a folder",
    "--output no-such-folder/x": "the folder no-such-folder does not exist",
    "--set stats=-": "--set stats needs a file",
    "--set summary=-": "--set summary needs a file",
    "--output x --set summary=x": "--output and --set summary are both x",
    "--existing resume": "--existing resume needs the file to go on with",
    "--existing retry": "--existing retry needs the file to go on with",
    "--existing resume --output -": "--existing resume needs the file to go on with",
    "--existing resume --output /dev/null": "--existing resume: /dev/null is no ordinary file",
    "--n-best 3 --output-format text": "--n-best would do nothing, because --output-format text writes the best text",
    "--set token-logprobs=true --output-format csv": "--set token-logprobs would do nothing, because --output-format",
    "--existing resume --output x --output-format text": "--existing resume cannot go on with --output-format text",
    "--existing resume --output x.gz": "--existing resume cannot go on with x.gz",
    "--existing resume --output x --set stats=s.zst": "--existing resume cannot go on with s.zst",
    "--existing append --output x": "--existing is 'append', but must be one of error, overwrite, resume, retry",
    "--set max-errors=0": "--set max-errors is 0, but must be 1 or more",
    "--input-format json": "--input-format is 'json', but must be one of auto, strict, text",
    "--output-format xml": "--output-format is 'xml', but must be one of native",
    "--set on-too-long=cut": "--set on-too-long is 'cut', but must be one of error, truncate-left",
    "--config no-such-file": "--config no-such-file cannot be read: No such file",
    "--output x --set stats=x": "--output and --set stats are both x",
    "--set summary=x.json.zst": "--set summary x.json.zst is not compressed: name it without .zst",
    "--input README.md --output README.md --existing overwrite": "--output README.md is the input",
    "--verify fuzzy": "--verify fuzzy: threshold is missing: it is spelled fuzzy:THRESHOLD[,divergence=...,",
    "--verify fuzzy:-1": "--verify fuzzy:-1: threshold is -1, but must be 0 or more",
    "--verify fuzzy:inf": "threshold is inf, but must be 0 or more",
    "--verify fuzzy:0.1,divergence=l2": "divergence is 'l2', but must be one of kl, kl_reversed, js, js_authors, tv",
    "--verify fuzzy:0.1,law=raw,law=raw": "law is given twice",
    "--verify coupled:strict": "--verify coupled:strict: it has no settings: it is spelled coupled",
    "--verify fuzzy:0.1 --draft none": "--verify fuzzy:0.1 compares the target with a draft model, but --draft is none",
    "--draft none --drafter ngram+bridge": "--drafter is 'ngram+bridge', but bridge",
    "--draft none --drafter ngram+beam": "--drafter is 'ngram+beam', but must be beam+ngram",
    "--draft none --drafter beam+ngram": "--drafter beam+ngram needs a draft model, but --draft is none",
    "--verify fuzzy:0.1 --drafter rsd-c": "--drafter is 'rsd-c', but rule fuzzy",
    "--verify fuzzy:0.1 --set width=threshold": "--set width is 'threshold', but rule fuzzy",
    "--verify fuzzy:0.1 --set warp-scope=beam": "--set warp-scope is 'beam', but rule fuzzy",
    "--verify fast": "--verify is 'fast', but must be one of coupled, ",
    "--num-beams four": "--num-beams is 'four', but must be an integer",
    "--temperature warm": "--temperature is 'warm', but must be a number",
    "--drafter retrieval": "--drafter retrieval: index is missing: it is spelled retrieval:INDEX",
    "--verify rejection --set width=threshold --drafter ngram": "--set width is 'threshold', but it estimates",
    "--no-such-option": "No such option: --no-such-option",
    "--set warp-skope=beam": "--set warp-skope: dsbd generate has no such setting: did you mean --set warp-scope?",
    "--set zzz=1": "--set zzz: dsbd generate has no such setting: dsbd generate --help lists the settings",
    "--set num_beams=3": "--set num-beams: dsbd generate has no such setting: did you mean --num-beams",
    "--set warp-scope": "--set warp-scope has no value: it is spelled --set warp-scope=VALUE",
    "--set min-p --input x": "--set min-p has no value",
    "--set --input x": "--set --input: dsbd generate has no such setting: did you mean --input",
    "--set": "requires an argument",
    "--set warp-scope=all": "--set warp-scope is 'all', but must be one of pool, beam",
    "--set memory-saving=perhaps": "--set memory-saving is 'perhaps', but must be true or false",
    "--set min-p=much": "--set min-p is 'much', but must be a number",
    "--set min-p=2": "--set min-p is 2.0, but must be",
    "--set tensor-parallel=two": "--set tensor-parallel is 'two', but must be an integer",
    "--set tensor-parallel=0": "--set tensor-parallel is 0, but must be",
    "--stop x " * 17: "error: --stop is a list of 17 strings, but must be of at most 16",
    f"--stop {'x' * 257}": "257 bytes in all, but must be at most 256",
    "file.jsonl": "file.jsonl stands without an option: --input FILE names what is read",
    "file(1) (2)": "error: file(1) (2) stands without an option",
}


@pytest.mark.parametrize(("options", "message"), REFUSED.items(), ids=list(REFUSED))
def test_refused(dsbd: Dsbd, options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    outcome = dsbd("generate", *options.split())
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("dsbd: error: ")
    assert outcome.err.count("\n") == 1
    assert (outcome.out, outcome.loads) == ("", [])
    assert (tmp_path / "README.md").read_text() == "x"


# options -> draft, and fields of the method
SETTLED: list[tuple[str, str | None, dict[str, object]]] = [
    ("", "builtin:draft", {"rule": "coupled", "num_beams": 4, "drafts_per_layer": 8, "depth": 8, "width": "fixed"}),
    ("", "builtin:draft", {"adaptive_depth": True}),
    ("--decode search", "builtin:draft", {"adaptive_depth": True}),
    ("--verify rejection", "builtin:draft", {"adaptive_depth": False, "depth": 4}),
    ("--set width=threshold", "builtin:draft", {"adaptive_depth": False, "depth": 4}),
    ("--set memory-saving=true", "builtin:draft", {"adaptive_depth": False, "depth": 4}),
    ("--draft none --num-beams 1", None, {"adaptive_depth": True, "drafter": "suffix", "depth": 16}),
    ("--draft none", None, {"adaptive_depth": True, "drafter": "suffix", "depth": 16}),
    ("--draft none --verify rejection", None, {"adaptive_depth": False, "depth": 0}),
    ("--draft none --depth 0", None, {"adaptive_depth": False, "depth": 0}),
    ("--num-beams 6", "builtin:draft", {"drafts_per_layer": 12}),
    ("--num-beams 6 --drafts-per-layer 7", "builtin:draft", {"drafts_per_layer": 7}),
    ("--decode search", "builtin:draft", {"width": "fixed"}),
    ("--verify rejection", "builtin:draft", {"width": "threshold", "width_threshold": 0.7, "min_width": 1}),
    ("--verify with-replacement --set width=threshold:min=2", "builtin:draft", {"width": "threshold", "min_width": 2}),
    ("--verify rejection --set width=fixed", "builtin:draft", {"width": "fixed"}),
    ("--set width=threshold:0.9", "builtin:draft", {"width": "threshold", "width_threshold": 0.9}),
    (
        "--verify fuzzy:0.4,divergence=js_authors,fallback=strict,law=warped",
        "builtin:draft",
        {"fuzzy_threshold": 0.4, "divergence": "js_authors", "fallback": "strict", "fuzzy_law": "warped"},
    ),
    ("--draft none", None, {"depth": 16, "width": "fixed"}),
    ("--draft none --set memory-saving=true", None, {"depth": 0}),
    ("--depth auto", "builtin:draft", {"depth": 8, "adaptive_depth": True, "drafts_per_layer": 8}),
    ("--depth 3", "builtin:draft", {"depth": 3, "adaptive_depth": False}),
    ("--draft none --target t", None, {"depth": 16}),
    ("--target t --num-beams 1", None, {"drafter": "suffix", "adaptive_depth": True, "width": "fixed"}),
    ("--target t --verify rejection", None, {"depth": 0, "width": "fixed"}),
    ("--target t --drafter ngram", None, {"depth": 8, "adaptive_depth": True}),
    ("--draft none --verify rejection", None, {"depth": 0, "width": "fixed"}),
    ("--target builtin:target --depth 2", "builtin:draft", {"depth": 2}),
    ("--set memory-saving=true --set warp-scope=beam", "builtin:draft", {"memory_saving": True, "warp_scope": "beam"}),
]


@pytest.mark.parametrize(("options", "draft", "fields"), SETTLED, ids=[case[0] or "defaults" for case in SETTLED])
def test_settled(dsbd: Dsbd, options: str, draft: str | None, fields: dict[str, object]) -> None:
    outcome = dsbd("generate", *options.split())
    assert (outcome.code, outcome.err) == (0, "")
    [call] = outcome.loads
    asked = call["draft"]
    assert (asked.source if isinstance(asked, ModelSpec) else asked) == draft
    method = call["method"]
    resolved = {**asdict(method), **method.resolved}
    assert {name: resolved[name] for name in fields} == fields


@pytest.mark.parametrize(("source", "wanted"), [(None, ""), ("target", "t"), ("draft", "d"), ("both", "td")])
def test_code_runs_of_the_models_that_are_named(source: Literal["target", "draft", "both"] | None, wanted: str) -> None:
    settings = run_settings(
        PairOptions("t", "d"), MethodOptions(), SamplingOptions(), DeviceOptions(trust_remote_code=source)
    )
    assert "".join(model.source for model in settings.models if model.trust_remote_code) == wanted
    assert not ModelSpec("t", trust_remote_code=True).of_draft("d").trust_remote_code


def test_a_named_target_without_a_draft_is_profiled_as_it_is() -> None:
    """Its forest is the roots alone, as with --draft none."""
    plain = fixed_depth(PairOptions(target="t"), MethodOptions())
    settings = run_settings(PairOptions(target="t"), plain, SamplingOptions(), DeviceOptions())
    assert (settings.draft, settings.method.depth) == (None, 0)


def test_what_does_not_act_is_null_in_the_record(dsbd: Dsbd) -> None:
    [plain] = dsbd("generate", "--draft", "none", "--set", "memory-saving=true", lines=[{"prompt": "a"}]).records
    assert plain["method"] == {
        "rule": "coupled",
        "num_beams": 4,
        "drafts_per_layer": None,
        "depth": 0,
        "width": "fixed",
        "width_threshold": None,
        "min_width": None,
        "warp_scope": "pool",
        "memory_saving": True,
        "drafter": None,
        "target": "builtin:target",
        "draft": None,
        "quantize": None,
        "threads": None,
    }
    [fuzzy] = dsbd("generate", "--verify", "fuzzy:0.2", lines=[{"prompt": "a"}]).records
    assert fuzzy["exactness"] == "lossy"
    names = ("fuzzy_threshold", "divergence", "fallback", "fuzzy_law")
    assert [fuzzy["method"][name] for name in names] == [0.2, "kl", "target", "raw"]
    [dynamic] = dsbd("generate", "--verify", "rejection", lines=[{"prompt": "a"}]).records
    assert dynamic["method"]["width_threshold"] == 0.7
    assert dynamic["exactness"] == "dynamic-width"


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_temperature_0_is_taken(dsbd: Dsbd, rule: str) -> None:
    assert dsbd("generate", *of_rule(rule), "--temperature", "0").code == 0
    if rule == "search":
        assert dsbd("generate", *of_rule(rule), "--temperature", "1").code == 2


def fault(make: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        make()
    return caught.value


def test_an_error_knows_its_field_and_the_command_line_names_the_option() -> None:
    error = fault(lambda: MethodConfig(num_beams=0))
    assert (error.field, error.value, error.expected) == ("num_beams", 0, "1 or more")
    assert str(error) == "num_beams is 0, but must be 1 or more"
    assert error.typed({"num_beams": "--num-beams", "depth": "--depth"}) == "--num-beams is 0, but must be 1 or more"
    assert error.typed({"depth": "--depth"}) == str(error), "no option of this command"
    assert UsageError("depth is mentioned").typed({"depth": "--depth"}) == "depth is mentioned"
    other = fault(lambda: MethodConfig(rule="search", warp_scope="beam"))
    assert (other.field, other.value) == ("warp_scope", "beam")


def test_a_list_of_names_in_a_message_is_bounded() -> None:
    """Guards records of a megabyte each, where a file has thousands of catalogues."""
    assert shown_names(["a", "b"]) == "a, b"
    assert shown_names([f"{number}" * 99 for number in range(1000)]).endswith(", .. (1000 in all)")
    assert len(shown_names([f"{number}" * 99 for number in range(1000)])) < 600


def test_values_are_shown_in_plain_words() -> None:
    assert str(fault(lambda: SamplingConfig(stop=("a", "")))).startswith("stop is ['a', ''], but must be")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate -o", "--output"),
        ("generate --input README.md --existing overwrite -o", "--output"),
        ("generate --set stats=", "--set stats"),
        ("pick --by score -o", "--output"),
        ("index README.md -o", "--output"),
        ("merge README.md -o", "--output"),
        ("bench --json", "--json"),
        ("profile --json", "--json"),
    ],
)
def test_an_output_in_a_folder_that_may_not_be_entered(
    dsbd: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, option: str
) -> None:
    (tmp_path / "README.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    stat = os.stat

    def denied(path: str | Path, *rest: object, **how: object) -> os.stat_result:
        if str(path) == "closed/x":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *rest, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", denied)
    words = f"{command}closed/x" if command.endswith("=") else f"{command} closed/x"
    outcome = dsbd(*words.split())
    assert (outcome.code, outcome.err) == (2, f"dsbd: error: {option} closed/x cannot be used: Permission denied\n")
