"""The variants are said once: names, defaults and spelling agree with what reads them."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import pytest

from dsbd_cli import variants
from dsbd_cli.config import FuzzyConfig, MethodConfig
from dsbd_cli.engine import drafting, verify
from dsbd_cli.errors import UsageError
from dsbd_cli.job.cli import app
from dsbd_cli.variants import DRAFTERS, FUSION, RULES, SAMPLING_RULES, WIDTHS, Variant, parse, parse_drafter, spell

EVERY = (*RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION)
FIELDS = {item.name: item for item in dataclasses.fields(MethodConfig)}


def test_names_are_those_of_the_types_and_of_the_engine() -> None:
    assert get_args(variants.RuleName) == tuple(RULES)
    assert get_args(variants.WidthName) == tuple(WIDTHS)
    assert set(drafting.DRAFTERS) == set(DRAFTERS)
    assert {*verify.RULES, "fuzzy"} == set(RULES)
    choices = {setting.field: setting.choices for one in EVERY for setting in one.settings}
    assert choices["tree"] == get_args(variants.TreeName)
    assert choices["divergence"] == get_args(variants.DivergenceName)
    assert choices["fallback"] == get_args(variants.FallbackName)
    assert choices["fuzzy_law"] == get_args(variants.FuzzyLawName)


@pytest.mark.parametrize("variant", EVERY, ids=lambda one: one.name)
def test_every_setting_is_a_field_with_the_same_default(variant: Variant) -> None:
    for setting in variant.settings:
        assert FIELDS[setting.field].default in (None, setting.default)
        assert setting.default is None or setting.fits(setting.default)
    assert FuzzyConfig(0.1) == MethodConfig(rule="fuzzy", fuzzy_threshold=0.1).fuzzy


@pytest.mark.parametrize(
    "text",
    ["fixed", "threshold", "threshold:0.5", "threshold:min=2", "threshold:0.5,min=2"],
)
def test_what_is_spelled_is_read_again(text: str) -> None:
    name, fields = parse("--width", text, WIDTHS)
    assert spell(WIDTHS[name], fields) == text
    assert spell(WIDTHS[name], {**fields, "min_width": 1, "fusion_top_k": 3}).count("min") == 0, "defaults are left out"


def test_a_rule_is_read_with_all_its_settings() -> None:
    name, fields = parse("--verify", "fuzzy:0.2,law=warped,divergence=js", SAMPLING_RULES)
    assert (name, fields) == ("fuzzy", {"fuzzy_threshold": 0.2, "fuzzy_law": "warped", "divergence": "js"})
    assert spell(RULES[name], fields) == "fuzzy:0.2,divergence=js,law=warped"


@pytest.mark.parametrize("text", ["ngram:x", "beam+", "+ngram", "", "ngram:longest", "retrieval:", "beam+ngram:1,x=2"])
def test_a_wrong_spelling_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$"):
        parse_drafter(text)


def test_nothing_behind_the_colon_is_nothing() -> None:
    assert parse_drafter("ngram:") == ("ngram", {})


def test_the_page_shows_every_variant_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", "--help"]) == 0
    text = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    for one in (*SAMPLING_RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION):
        assert re.sub(r"\s+", "", one.help) in text
        assert all(f"{setting.name}:" in one.help for setting in one.settings)
    main = text.split("Mainoptions")[1].split("Inputandoutput")[0]
    assert len(set(re.findall(r"--[a-z]+(?:-[a-z]+)*", main))) >= 10
