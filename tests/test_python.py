"""dsbd from Python: what a script meets first. Guards: errors that come late or name nothing, an engine that stays
locked, defaults that are not the command's."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsbd_cli
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, RequestResult, SamplingConfig, UsageError, loading
from dsbd_cli.cli.app import run as command
from dsbd_cli.cli.options.options import DeviceOptions, MethodOptions, PairOptions, RowOptions, SamplingOptions
from dsbd_cli.cli.options.settings import run_settings
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.spelling import parse
from dsbd_cli.config.variants import RULES
from dsbd_cli.errors import InvalidRowError, ModelNotFoundError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.requests import EngineInfo, derive_seed
from tests.helpers.toys import NumberCodec, table_pair

ROOT = Path(__file__).parents[1]
SHORT = SamplingConfig(max_new_tokens=6)


def make(**method: object) -> Engine:
    target, draft = table_pair(1, 12, 0.5)
    config = MethodConfig.of({"depth": 2, **method})
    return Engine(target, draft, NumberCodec(12, (2,)), config, batch_size=3)


WRONG: dict[str, Callable[[], object]] = {
    "stop is 5, but must be a non-empty string or a list of them": lambda: SamplingConfig(stop=5),
    "stop is ['a', 3], but must be a non-empty string or a list of them": lambda: SamplingConfig(stop=["a", 3]),  # type: ignore[arg-type,list-item]
    "stop is '', but must be a non-empty string or a list of them": lambda: SamplingConfig(stop=""),
    "top_k is 2.5, but must be an integer": lambda: SamplingConfig(top_k=2.5),
    "n_best is true, but must be an integer": lambda: SamplingConfig(n_best=True),
    "temperature is 'hot', but must be a number": lambda: SamplingConfig(temperature="hot"),
    "temperature is 1e-300, but must be 0, or from 1e-38 to 1000000": lambda: SamplingConfig(temperature=1e-300),
    "temperature is 1000000000": lambda: SamplingConfig(temperature=10**400),
    "early_stopping is 1, but must be true or false": lambda: SamplingConfig(early_stopping=1),
    "id is 5, but must be a string": lambda: Request("p", id=5, seed=1),
    "seed is 'z', but must be an integer": lambda: Request("p", seed="z"),
    "seed is an integer of 16610 bits, but must be an integer": lambda: Request("p", seed=10**5000),
    f"seed is {2**63}, but must be an integer from 0 to 2**63 - 1": lambda: Request("p", seed=2**63),
    "prompt is 5, but must be a string or None": lambda: Request(5),
    "prompt_ids is ['a'], but must be a list of integers or None": lambda: Request(prompt_ids=("a",)),
    "messages is [{'role': 5}], but must be a list of objects with role": lambda: Request(messages=({"role": 5},)),
    "messages is [], but must be a non-empty list of objects": lambda: Request(messages=[]),
    "a request has none of them, but must have exactly one of prompt": lambda: Request(id="a"),
    "a request has prompt and prompt_ids, but must": lambda: Request("p", prompt_ids=(1,)),
    "sampling is {}, but must be a SamplingConfig": lambda: Request("p", sampling={}),
    "rule is 'best', but must be one of coupled, rejection": lambda: MethodConfig(rule="best"),
    "num_beams is '4', but must be an integer": lambda: MethodConfig(num_beams="4"),
    "depth is 'auto', but must be an integer": lambda: MethodConfig(depth="auto"),
    "settings is ['ngram'], but must be a table of settings": lambda: MethodConfig(settings=("ngram",)),
    "settings is {1: 2, 'ngram': 3}, but must be a table": lambda: MethodConfig(settings={1: 2, "ngram": 3}),
    "source is null, but must be a string": lambda: ModelSpec(None),
    "quantize is 'int8', but dtype is float16": lambda: ModelSpec("a", quantize="int8", dtype="float16"),
    "method is 'search', but must be a MethodConfig or None": lambda: dsbd_cli.load(method="search"),
    "batch_size is 0, but must be 1 or more": lambda: dsbd_cli.load(batch_size=0),
    "threads is 1000000000, but must be between 1 and 1024": lambda: dsbd_cli.load(threads=10**9),
    "on_too_long is 'cut', but must be one of error, truncate-left": lambda: dsbd_cli.load(on_too_long="cut"),
    "index nowhere cannot be read: No such file": lambda: dsbd_cli.load(
        "no-model", None, method=MethodConfig(drafter="retrieval:nowhere")
    ),
    "target is 5, but must be a name or a path": lambda: dsbd_cli.load(5),
    "draft is 5, but must be a name or a path": lambda: dsbd_cli.load(draft=5),
    "allow is 5, but must be a name or a path": lambda: dsbd_cli.load(allow=5),
    "allow is 's.json', a grammar and no list of answers": lambda: dsbd_cli.load(allow="s.json"),
    "allow is 'regex:a|b', a grammar and no list of answers": lambda: dsbd_cli.load(allow="regex:a|b"),
    "text is 5, but must be a string": lambda: Grammar.regex(5),
    "kind is 'bnf', but must be one of json_schema, regex, lark": lambda: Grammar("bnf", "x"),
    "but must be JSON: Object of type set is not": lambda: Grammar.json_schema({"const": {1, 2}}),
    "log_steps is 'x', but must be true or false": lambda: make().replace(log_steps="x"),
    "on_too_long is 'truncate_left', but must be": lambda: make().replace(on_too_long="truncate_left"),
}


@pytest.mark.parametrize(("message", "call"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_value_is_told_in_one_line_when_it_is_given(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_error_shows_one_short_line_of_any_value() -> None:
    with pytest.raises(UsageError) as caught:
        SamplingConfig(stop=type("Odd", (), {"__repr__": lambda _: "x\n" * 1000})())
    assert len(str(caught.value)) < 120
    assert "\n" not in str(caught.value)


def test_one_string_is_one_stop_string_and_a_list_will_do() -> None:
    assert SamplingConfig(stop="ZC").stop == ("ZC",)
    assert SamplingConfig(stop=["a", "b"]).stop == ("a", "b")
    assert Request(prompt_ids=[1, 2]).prompt_ids == (1, 2)


# The engine


@pytest.mark.parametrize("wrong", [Request("1 2"), "1 2", {"a": "1"}, 5, None], ids=repr)
def test_what_is_no_list_of_requests_is_refused_at_once(wrong: object) -> None:
    engine = make()
    for call in (engine.run, engine.stream):
        with pytest.raises(UsageError, match="but must be a list, or an iterator, of requests or prompts"):
            call(wrong)  # type: ignore[operator]
    assert engine.generate("1 2").text


def test_an_item_that_is_no_request_ends_the_run_and_frees_the_engine() -> None:
    engine = make()
    with pytest.raises(UsageError, match=r"requests\[1\] is 7, but must be a Request or a prompt"):
        list(engine.run(["1 2", 7]))  # type: ignore[list-item]
    assert engine.generate("1 2").text


def test_an_engine_is_free_after_any_end_of_a_run() -> None:
    engine = make()

    def source() -> Iterator[Request]:
        yield Request("1 2", sampling=SHORT)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(engine.run(source()))
    next(engine.run(["1 2"] * 9))  # dropped
    circle: list[object] = [engine.run(["1 2"] * 9)]
    next(circle[0])  # type: ignore[call-overload]
    circle.append(circle)
    del circle  # dropped too, but only the collector sees it
    engine.run(["1 2"])  # never begun
    kept = engine.run(["1 2"] * 9)
    next(kept)
    with pytest.raises(UsageError, match="close"):
        engine.generate("1 2")
    kept.close()  # type: ignore[attr-defined]
    assert engine.generate("1 2").text


def test_strings_are_prompts_and_are_named_by_their_place() -> None:
    engine = make()
    results = list(engine.run(["1 2", "3 4", Request("5", id="own"), Request("5", seed=3)], seed=9))
    names = [(result.request.id, result.request.seed) for result in results]
    expected = ["0", "1", "own"]
    assert names == [*((name, derive_seed(9, name)) for name in expected), ("3", 3)]
    requests = [Request(text, id=name, seed=seed, sampling=SamplingConfig()) for text, (name, seed) in
             zip(["1 2", "3 4", "5", "5"], names, strict=True)]  # fmt: skip
    assert [result.hypotheses for result in engine.run(requests)] == [result.hypotheses for result in results]


def test_a_request_that_has_failed_before_keeps_its_place() -> None:
    """Guards input order, which the engine alone keeps: the command hands in the rows that it cannot read."""
    broken = [InvalidRowError("line 1"), InvalidRowError("line 4")]
    results = list(make().run([broken[0], "1 2", "3 4", broken[1], "5 6"], seed=9))
    assert [result.error for result in results] == [broken[0], None, None, broken[1], None]
    assert [result.request.id for result in results] == ["0", "1", "2", "3", "4"]
    assert results[1].hypotheses == make().generate(Request("1 2", id="1"), seed=9).hypotheses


def test_generate_gives_what_was_asked_for_or_raises() -> None:
    engine = make()
    result = engine.generate("1 2", seed=4)
    assert isinstance(result, RequestResult)
    assert result.text == result.hypotheses[0].text
    several = engine.generate(["1 2", "3 4"], seed=4)
    assert [result.request.id for result in several] == ["0", "1"]
    assert several[0].text == result.text
    assert engine.generate(Request("1 2", sampling=SHORT)).hypotheses[0].num_tokens <= 6
    with pytest.raises(InvalidRowError, match="request 1: prompt is empty"):
        engine.generate(["1 2", ""])
    [failed] = engine.run([""])
    with pytest.raises(InvalidRowError, match="request 0: prompt is empty"):
        _ = failed.text
    engine.stop()
    for answers in (engine.run, engine.stream, engine.generate):
        with pytest.raises(UsageError, match="stopped"):
            list(answers(["1 2"]))  # type: ignore[operator]


# Loading


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("the weights were loaded")


def test_contradictions_are_told_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsbd_cli.models.pair.load_pair", refuse)
    for method, message in (
        (MethodConfig(depth=3), "draft is None, but depth is 3, which needs a draft model"),
        (MethodConfig(adaptive_depth=True), "draft is None, but adaptive_depth is True"),
        (MethodConfig(width="threshold"), "draft is None, but width is threshold"),
        (MethodConfig(drafts_per_layer=9), "draft is None, but drafts_per_layer is 9"),
        (MethodConfig(drafter="rsd-c"), "draft is None, but drafter rsd-c runs a draft model"),
        (MethodConfig(rule="fuzzy:0.1"), "draft is None, but rule fuzzy compares with a draft model"),
    ):
        with pytest.raises(UsageError, match=message):
            dsbd_cli.load(draft=None, method=method)
    for method, message in (
        (MethodConfig(depth=0), "draft is 'builtin:draft', but depth 0 drafts nothing: give draft None"),
        (MethodConfig(drafter="ngram"), "draft is 'builtin:draft', but drafter ngram uses no draft model"),
    ):
        with pytest.raises(UsageError, match=message):
            dsbd_cli.load(method=method)
    with pytest.raises(ModelNotFoundError):
        dsbd_cli.load("no-such-model")


def test_without_a_draft_a_method_that_asks_for_none_looks_up_or_is_plain_decoding() -> None:
    """Where the text cannot depend on drafts, and the host may read in an iteration."""
    engine = dsbd_cli.load(draft=None, method=MethodConfig(num_beams=3))
    assert engine.method == MethodConfig(num_beams=3, drafter="suffix")
    target, _ = table_pair(1, 12, 0.5)
    for rule, settings in (("rejection", {}), ("coupled", {"memory_saving": True}), ("search", {"depth": 0})):
        plain = Engine(target, None, NumberCodec(12), MethodConfig(rule=rule, **settings))
        assert plain.method == MethodConfig(rule=rule, **{**settings, "depth": 0})
    greedy = MethodConfig(rule="search", num_beams=1)
    assert Engine(target, None, NumberCodec(12), greedy).method.drafter == "suffix"
    target.invariant = False
    info = EngineInfo("toy", None, "float32", "cpu")
    engine = Engine(target, None, NumberCodec(12), greedy, info=info)
    assert engine.method.depth == 0
    assert engine.info is not None
    assert not engine.info.drafts


def test_a_spec_says_how_to_load_and_the_draft_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def note(*models: Checkpoint | None, bridged: bool) -> None:
        seen.extend(None if model is None else model.spec for model in models)
        raise InterruptedError

    monkeypatch.setattr("dsbd_cli.models.pair.load_pair", note)
    spec = ModelSpec("builtin:target", dtype="bfloat16", device="cpu")
    for draft in ("builtin:draft", ModelSpec("builtin:draft", dtype="float32")):
        with pytest.raises(InterruptedError):
            loading.load(spec, draft)
    named, own = ModelSpec("builtin:draft", "draft", "bfloat16", "cpu"), ModelSpec("builtin:draft", "draft", "float32")
    with pytest.raises(InterruptedError):
        loading.load(ModelSpec("builtin:target", "draft", "bfloat16", "cpu"), None)
    assert seen == [spec, named, spec, own, spec, None], "the place of an argument is its role"


def test_a_named_target_has_no_draft_unless_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []

    def note(target: Checkpoint, draft: Checkpoint | None, *, bridged: bool) -> None:
        seen.append(None if draft is None else draft.spec.source)
        raise InterruptedError

    monkeypatch.setattr("dsbd_cli.models.pair.load_pair", note)
    (tmp_path / "config.json").write_text("{}")
    target, builtin = str(tmp_path), ModelSpec("builtin:target", dtype="bfloat16")
    for models in ((), (target,), (ModelSpec(target),), (target, "builtin:draft"), (builtin,), (builtin, None)):
        with pytest.raises(InterruptedError):
            loading.load(*models)
    assert seen == ["builtin:draft", None, None, "builtin:draft", "builtin:draft", None]
    with pytest.raises(
        UsageError, match="draft is None, but depth is 3, which needs a draft model: give one, or drafter suffix"
    ):
        loading.load(target, method=MethodConfig(depth=3))


OPTIONS = [
    MethodOptions(),
    MethodOptions(num_beams=6),
    MethodOptions(decode="search"),
    MethodOptions(verify="rejection"),
    MethodOptions(verify="with-replacement"),
    MethodOptions(verify="coupled", width="threshold"),
    MethodOptions(memory_saving=True),
    MethodOptions(verify="fuzzy:0.2"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("draft", [None, "none"])
def test_the_defaults_are_those_of_the_command(options: MethodOptions, draft: str | None) -> None:
    if draft == "none" and (options.verify == "fuzzy:0.2" or options.width):
        pytest.skip("refused by both")
    settings = run_settings(PairOptions(draft=draft), options, SamplingOptions(), DeviceOptions(), RowOptions())
    defaults = {name: value for name, value in vars(options).items() if value is not None}
    name, fields = parse("--verify", defaults.pop("verify", "coupled"), RULES)
    rule = defaults.pop("decode", name)
    assert (
        MethodConfig.of({"rule": rule, **fields, **defaults}).fit_draft(settings.draft and settings.draft.source)
        == settings.method
    )


def test_the_text_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["question: what did Kivel paint\nanswer:\n", "sql:\n", "passage: Nesen sold an organ.\n"]
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
        patch.setattr(sys, "stdout", output)
        assert command(["generate", "--seed", "5", "--max-new-tokens", "12", "--quiet"]) == 0
    buffer = output.buffer
    assert isinstance(buffer, io.BytesIO)
    written = [json.loads(line) for line in buffer.getvalue().splitlines()]
    sampling = SamplingConfig(max_new_tokens=12)
    results = list(dsbd_cli.load().run([Request(prompt, sampling=sampling) for prompt in prompts], seed=5))
    answers = [(result.request.id, result.request.seed, result.text) for result in results]
    assert answers == [(line["id"], line["seed"], line["text"]) for line in written]


def readme_samples() -> list[str]:
    """The Python of README.md, block by block."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)


def test_the_readme_snippets_run() -> None:
    [sample] = readme_samples()
    exec(compile(sample, "README.md", "exec"), {"print": lambda *_, **__: None})


ACCEPTED = """
from dsbd_cli import MethodConfig, Request, SamplingConfig

SamplingConfig(stop="\\n"), SamplingConfig(stop=["a", "b"]), SamplingConfig(stop=("a",))
Request("a", id=None, seed=None), Request(messages=[{"role": "user", "content": "a"}]), Request(prompt_ids=[1, 2])
Request("a", allow=["yes", "no"]), Request("a", allow="films")
MethodConfig(depth=None, width=None, settings={"min_width": 2, "chance": None})
"""
REFUSED = """
from dsbd_cli import Request, SamplingConfig

SamplingConfig(stop=5)
Request(5)
Request("a", seed="z")
"""


def test_types_accept_what_is_accepted_in_the_readme_and_the_examples(tmp_path: Path) -> None:
    """Guards users who check their own code. Libraries count for nothing here, so that no hundred thousand lines of
    theirs are read."""
    from mypy import api

    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nfollow_imports = silent\nmypy_path = {ROOT}\n"
        "[mypy-torch.*,transformers.*,numpy.*,numba.*,triton.*,huggingface_hub.*,tokenizers.*,safetensors.*]\n"
        "follow_imports = skip\n"
    )
    samples = {"readme.py": "\n".join(readme_samples()), "accepted.py": ACCEPTED, "refused.py": REFUSED}
    for name, text in samples.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [*map(str, sorted((ROOT / "examples").glob("*.py"))), *(str(tmp_path / name) for name in samples)]
    cache = ["--cache-dir", str(tmp_path / "cache"), "--config-file", str(tmp_path / "mypy.ini")]
    said, crashed, _ = api.run([*cache, *files])
    assert crashed == ""
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert [line.rsplit("[")[-1] for line in errors] == ["arg-type]"] * 3, said
    assert all("refused.py" in line for line in errors), said
