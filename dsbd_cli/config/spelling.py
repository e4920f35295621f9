"""Spelling of variants on the command line and in job files: `ngram:4`, `fuzzy:0.2,divergence=js`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dsbd_cli.config.checking import require
from dsbd_cli.config.variant import Setting, Value, Variant, spelled, spelling
from dsbd_cli.config.variants import DRAFTERS, FUSION, RULES, WIDTHS, check_drafter_name, drafting_variants
from dsbd_cli.errors import KINDS, UsageError, option_name, shorten


def parse(
    option: str, text: str, variants: Mapping[str, Variant], *, complete: bool = True
) -> tuple[str, dict[str, Value]]:
    """Return the name of `NAME[:SETTINGS]` and its settings by field. option: the option that gave it, for messages.
    complete: required settings must be there. Raises UsageError."""
    name, _, settings = text.partition(":")
    require(name in variants, option, name, f"one of {', '.join(variants)}")
    typed = f"{option}={text}" if option.startswith("--set ") else f"{option} {text}"
    return name, _settings(typed, variants[name].usage, variants[name].settings, settings, complete)


def parse_settings(option: str, text: str, settings: Sequence[Setting[object]]) -> dict[str, Value]:
    """Return the settings of `FIRST[,NAME=...]` by field. option: the option that gave them, for messages. Raises
    UsageError."""
    return _settings(f"{option} {text}", spelling(settings), settings, text, complete=True)


def parse_drafter(text: str, option: str = "--drafter", *, complete: bool = True) -> tuple[str, dict[str, Value]]:
    """Return the name of `A[:SETTINGS]` or `A[:SETTINGS]+B[:SETTINGS]` and its settings by field. Settings that belong
    to the two together are spelled with the second. See parse. Raises UsageError."""
    parts = _parts(text)
    name = "+".join(part.partition(":")[0] for part in parts)
    check_drafter_name(name)
    drafters = drafting_variants(name)
    values: dict[str, Value] = {}
    for index, part in enumerate(parts):
        settings, usage = drafters[index].settings, drafters[index].usage
        if index == 1:  # settings of the two together are spelled with the second
            settings += drafters[2].settings
            usage = f"{drafters[0].name}+{spelled(drafters[1].name, settings)}"
        values |= _settings(f"{option} {text}", usage, settings, part.partition(":")[2], complete)
    return name, values


def _parts(text: str) -> list[str]:
    """Return the drafters of a spelling. A + inside the settings, as in a file's name, does not split."""
    parts: list[str] = []
    for part in text.split("+"):
        if parts and ":" in parts[-1] and part.partition(":")[0] not in DRAFTERS:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def _settings(
    where: str, usage: str, settings: Sequence[Setting[object]], text: str, complete: bool
) -> dict[str, Value]:
    """Return the settings of a text by field. where: what was typed, for messages. Raises UsageError."""
    table = {setting.name: setting for setting in settings}
    values: dict[str, Value] = {}
    # a comma that no name follows belongs to the value, which is then a file's name or wrong
    names = "|".join(map(re.escape, table)) if settings and settings[0].is_file else "[a-z-]+"
    for index, piece in enumerate(re.split(rf",(?=(?:{names})=)", text) if text else []):
        name, equals, value = piece.partition("=")
        if index == 0 and settings and not (equals and (name in table or not settings[0].is_file)):
            name, value = settings[0].name, piece
        if name not in table:
            what = f"there is no setting {shorten(name)}" if settings else "it has no settings"
            raise UsageError(f"{where}: {what}: it is spelled {usage}")
        setting = table[name]
        if setting.field in values:
            raise UsageError(f"{where}: {name} is given twice: it is spelled {usage}")
        read = setting.read(value)
        if read is None or not setting.fits(read):
            kind = f"{KINDS[setting.kind]}, " if read is None else ""
            shown = f"{read:g}" if isinstance(read, float) else shorten(value if read is None else read)
            raise UsageError(f"{where}: {name} is {shown}, but must be {kind}{setting.expected}: it is spelled {usage}")
        values[setting.field] = read
    for setting in settings:
        if complete and setting.required and setting.field not in values:
            raise UsageError(f"{where}: {setting.name} is missing: it is spelled {usage}")
    return values


def spell(variant: Variant, settings: Mapping[str, object]) -> str:
    """Return the spelling of a variant with these settings by field. Defaults are left out."""
    words = []
    for index, setting in enumerate(variant.settings):
        value = settings.get(setting.field)
        if value is not None and value != setting.default:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(shown if index == 0 else f"{setting.name}={shown}")
    return ":".join([variant.name, *([",".join(words)] if words else [])])


def help_lines(variants: Iterable[Variant]) -> str:
    """Return each variant with its settings on a line of its own."""
    return "".join(f"\n\n{variant.help}" for variant in variants)


def typed_names(options: Iterable[str]) -> dict[str, str]:
    """Name each field as on a command line that has these options: `--depth`, or `min of --set width`."""
    options = list(options)
    owners: dict[str, tuple[Variant, ...]] = {
        "verify": tuple(RULES.values()),
        "width": tuple(WIDTHS.values()),
        "drafter": (*DRAFTERS.values(), FUSION),
    }
    names = {
        setting.field: f"{setting.name} of {option_name(option)}"
        for option, variants in owners.items()
        if option in options
        for variant in variants
        for setting in variant.settings
    }
    return {**names, **{name: option_name(name) for name in options}}
