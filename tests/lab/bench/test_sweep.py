"""Names and lists of values to settings; what cannot be is refused or left out with a reason."""

from __future__ import annotations

import pytest

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.errors import UsageError
from dsbd_cli.lab.bench.methods import AXES, DEFAULT_METHODS, METHODS
from dsbd_cli.lab.bench.sweep import choose_methods, plan, read_values
from dsbd_cli.lab.peers.config import PeerConfig
from dsbd_cli.lab.reports.bench_data import BASELINES


def test_every_method_of_the_table_can_be_made_with_the_defaults() -> None:
    settings = plan(list(METHODS), {}).settings
    assert [setting.method for setting in settings] == list(METHODS)
    assert {setting.label for setting in settings} == {""}
    by_name = {setting.method: setting.config for setting in settings}
    assert by_name["dsbd-coupled"] == MethodConfig(depth=4)
    assert by_name["beam-sampling"] == MethodConfig(depth=0)
    assert by_name["speculative"] == MethodConfig(
        rule="rejection", num_beams=1, drafts_per_layer=1, depth=4, width="fixed"
    )
    assert by_name["hf-beam-search"] == PeerConfig("beam-search", MethodConfig().num_beams)
    assert by_name["hf-greedy"] == PeerConfig("greedy")


def test_records_hold_the_settings_of_a_method_and_nothing_else() -> None:
    [setting] = plan(["dsbd-rejection"], {}).settings
    fields = setting.fields()
    assert list(fields)[:6] == ["rule", "num_beams", "drafts_per_layer", "depth", "width", "warp_scope"]
    [wide] = plan(["dsbd-rejection-threshold"], {"width_threshold": [0.8]}).settings
    assert wide.fields()["width_threshold"] == 0.8
    assert "width_threshold" not in fields
    assert (fields["depth"], fields["width"], fields["adaptive_depth"]) == (4, "fixed", False)
    assert not [name for name in fields if name.startswith("_")]


def test_all_configs_differ() -> None:
    settings = plan(list(METHODS), {}).settings
    configs = {
        (setting.config, METHODS[setting.method].pick, METHODS[setting.method].independent) for setting in settings
    }
    assert len(configs) == len(METHODS)
    assert set(DEFAULT_METHODS) | set(BASELINES) <= set(METHODS)
    assert {axis for method in METHODS.values() for axis in method.axes} <= set(AXES)


def test_only_drafting_methods_say_so() -> None:
    for setting in plan(list(METHODS), {}).settings:
        assert setting.drafts == METHODS[setting.method].drafts, setting.method
    assert not METHODS["hf-greedy"].drafts
    assert METHODS["hf-assisted"].drafts


def test_a_sweep_is_the_product_of_the_axes_that_act() -> None:
    sweep = {"num_beams": [2, 4], "depth": [2, 3], "width_threshold": [0.7, 0.9]}
    planned = plan(["greedy", "beam-search", "dsbd-coupled", "dsbd-coupled-threshold"], sweep)
    names = [setting.name for setting in planned.settings]
    assert names[:3] == ["greedy", "beam-search W=2", "beam-search W=4"]
    assert names.count("dsbd-coupled W=4 D=3") == 1
    assert len(names) == 1 + 2 + 4 + 8
    assert len(set(names)) == len(names)
    assert planned.settings[-1].config == MethodConfig(width="threshold:0.9", depth=3)


def test_the_number_of_drafts_follows_the_beams_as_in_generate() -> None:
    configs = {s.label: s.config for s in plan(["dsbd-coupled"], {"num_beams": [2, 6]}).settings}
    assert configs["W=2"] == MethodConfig(num_beams=2, drafts_per_layer=8, depth=4)
    assert configs["W=6"] == MethodConfig(num_beams=6, drafts_per_layer=12, depth=4)


def test_points_that_cannot_be_are_left_out_with_the_reason() -> None:
    planned = plan(["dsbd-coupled", "dsbd-memory-saving"], {"num_beams": [1, 6], "drafts_per_layer": [4, 8]})
    assert "dsbd-coupled W=6 K=4" not in [setting.name for setting in planned.settings]
    assert any("dsbd-coupled W=6 K=4" in note and "6 drafted nodes" in note for note in planned.notes)
    assert any("dsbd-memory-saving W=1" in note and "keeps one beam" in note for note in planned.notes)


def test_a_method_with_no_point_left_is_an_error() -> None:
    with pytest.raises(UsageError, match="dsbd-coupled W=6 K=4: --drafts-per-layer is 4"):
        plan(["dsbd-coupled"], {"num_beams": [6], "drafts_per_layer": [4]})
    with pytest.raises(UsageError, match="depth 0 drafts nothing"):
        plan(["dsbd-coupled"], {"depth": [0]})


def test_an_axis_that_acts_on_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="--width-threshold would do nothing"):
        plan(["dsbd-coupled", "greedy"], {"width_threshold": [0.5]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dsbd-couple", "no method 'dsbd-couple': did you mean dsbd-coupled"),
        ("all,greedy,all", "all stands there twice"),
        ("zzz", "no method 'zzz': all, or some of greedy"),
        ("greedy,greedy", "greedy stands there twice"),
        ("greedy,", "no method ''"),
    ],
)
def test_names_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_methods(text)


def test_without_a_draft_only_what_needs_none() -> None:
    names, (said,) = choose_methods("all", draft=False)
    assert names == [name for name, method in METHODS.items() if not method.drafts]
    drafted = [name for name in METHODS if METHODS[name].drafts]
    assert said == f"left out: {', '.join(drafted)}: they need a draft, but there is none: name one with --draft"
    assert choose_methods(None) == (list(DEFAULT_METHODS), ())
    assert choose_methods("all") == (list(METHODS), ())
    with pytest.raises(UsageError, match="dsbd-coupled needs a draft"):
        choose_methods("dsbd-coupled", draft=False)


def test_all_and_others_are_all_of_them() -> None:
    """In the order of the table. Guards `all` beside a name that it covers."""
    assert choose_methods("all,greedy") == choose_methods("all") == (list(METHODS), ())


def test_what_cannot_be_run_is_left_out_or_refused_by_name() -> None:
    planned = plan(["greedy", "hf-greedy", "hf-beam-search"], {"num_beams": [2, 4]})
    peers = planned.settings[1:]
    for methods in (None, "all", "all,greedy"):
        remaining = planned.without(peers, methods, "it is so")
        assert [setting.name for setting in remaining.settings] == ["greedy"]
        assert remaining.notes == (*planned.notes, "left out: hf-greedy, hf-beam-search: it is so")
    with pytest.raises(UsageError, match="hf-beam-search cannot be run, because it is so: leave it out"):
        planned.without(peers, "all, hf-beam-search", "it is so")
    assert planned.without([], "greedy", "it is so") is planned


def test_lists_of_values() -> None:
    assert read_values("--num-beams", "num_beams", "1, 2,4") == [1, 2, 4]
    assert read_values("--width-threshold", "width_threshold", "0.7,0.9") == [0.7, 0.9]
    for text, message in (("1,x", "must be an integer"), ("", "must be an integer"), ("2,2", "twice")):
        with pytest.raises(UsageError, match=message):
            read_values("--num-beams", "num_beams", text)
