"""The variants are said once: names, defaults and spelling agree with what reads them."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import EntryPoint

import pytest

from dsbd_cli.cli import app
from dsbd_cli.config import variants
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.spelling import parse, parse_drafter, spell
from dsbd_cli.config.variant import Variant
from dsbd_cli.config.variants import DRAFTERS, FORMATS, FUSION, RULES, WIDTHS, sampling_rules
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.errors import UsageError

EVERY = (*RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION)


def test_the_code_of_every_variant_is_there() -> None:
    for rule in RULES.values():
        assert Rule in rule.load().__mro__  # type: ignore[attr-defined]
    for variant in (*DRAFTERS.values(), *FORMATS.values()):
        assert callable(variant.load())


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_every_setting_is_a_field_of_its_own_with_a_default_that_fits(variant: Variant) -> None:
    own = {item.name for item in dataclasses.fields(MethodConfig)}
    for setting in variant.settings:
        assert setting.field not in own
        assert setting.default is None or setting.fits(setting.default)
        assert setting.default is None or MethodConfig().value(setting) == setting.default


@pytest.mark.parametrize(
    "text",
    ["fixed", "threshold", "threshold:0.5", "threshold:min=2", "threshold:0.5,min=2"],
)
def test_what_is_spelled_is_read_again(text: str) -> None:
    name, fields = parse("--width", text, WIDTHS)
    assert spell(WIDTHS[name], fields) == text
    assert spell(WIDTHS[name], {**fields, "min_width": 1, "fusion_top_k": 3}).count("min") == 0, "defaults are left out"


def test_a_rule_is_read_with_all_its_settings() -> None:
    name, fields = parse("--verify", "fuzzy:0.2,law=warped,divergence=js", sampling_rules())
    assert (name, fields) == ("fuzzy", {"fuzzy_threshold": 0.2, "fuzzy_law": "warped", "divergence": "js"})
    assert spell(RULES[name], fields) == "fuzzy:0.2,divergence=js,law=warped"


@pytest.mark.parametrize("text", ["ngram:x", "beam+", "+ngram", "", "ngram:longest", "retrieval:", "beam+ngram:1,x=2"])
def test_a_wrong_spelling_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$"):
        parse_drafter(text)


def test_nothing_behind_the_colon_is_nothing() -> None:
    assert parse_drafter("ngram:") == ("ngram", {})


def test_a_job_file_shows_every_width_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is none of --help, because it is a setting."""
    assert app.run(["generate", "--print-config"]) == 0
    text = re.sub(r"[\s#]+", "", capsys.readouterr().out)
    for variant in WIDTHS.values():
        assert re.sub(r"\s+", "", variant.help) in text
        assert all(f"{setting.name}:" in variant.help for setting in variant.settings)


def test_the_page_shows_every_variant_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", "--help"]) == 0
    text = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    for variant in (*sampling_rules().values(), *DRAFTERS.values(), FUSION):
        assert re.sub(r"\s+", "", variant.help) in text
        assert all(f"{setting.name}:" in variant.help for setting in variant.settings)
    main = text.split("Mainoptions")[1].split("Inputandoutput")[0]
    assert len(set(re.findall(r"--[a-z]+(?:-[a-z]+)*", main))) >= 10


def test_an_extension_that_cannot_be_used_is_named_again_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "entry_points", lambda group: [EntryPoint("offer", "no_such_module:OFFER", group)])
    monkeypatch.setattr(variants, "_extensions_found", False)
    monkeypatch.setattr(variants, "_extension_fault", None)
    for _ in range(2):
        with pytest.raises(UsageError, match="extension offer cannot be used: No module named 'no_such_module'"):
            MethodConfig()
