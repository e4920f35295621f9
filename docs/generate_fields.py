"""Write what is made from the table of request fields, or with `--check` fail if it is not current.

    python docs/generate_fields.py [--check]

That is the tables of sample_inputs/README.md between its marks, and the fields of a row in the JSON schema of rows.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from dsbd_cli.io.records.request_fields import (
    CONTAINERS,
    FIELDS,
    HONOURED,
    REFUSED,
    REFUSED_IN_RESPONSES,
    RESPONSES,
    WITHOUT_EFFECT,
    RefusedField,
    RequestField,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "sample_inputs" / "README.md"
SCHEMA = ROOT / "dsbd_cli" / "io" / "schemas" / "input.json"
BEGIN, END = "<!-- fields: made by docs/generate_fields.py -->", "<!-- end of fields -->"
NOT_SUPPORTED = "not supported: only a value that changes nothing"
NOT_USED = "not used: it says nothing about the text"
PLACED = ("id", "metadata", "logprobs")  # fields whose place or values depend on the form
WIDTH = 120
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


# The page


def page() -> str:
    """The page with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{rest[rest.index(END) :]}"


def tables() -> str:
    """The tables of all fields as markdown."""
    parts = []
    for heading, fields in HONOURED.items():
        rows = [f"| {_names(one)} | {_values(one.schema)} | {one.text} |" for one in fields]
        parts += [f"\n### {heading}\n", "| field, other names | value | meaning |", "|---|---|---|", *rows]
    objects = ", ".join(f"`{name}`" for name in CONTAINERS)
    parts += ["", f"All of these may also stand inside an object {objects}.", "\n### Not supported\n"]
    parts += ["| field | unless it is | |", "|---|---|---|"]
    parts += [f"| `{name}` | {_neutral(one)} | {one.use} |" for name, one in REFUSED.items()]
    idle = ", ".join(f"`{name}`" for name in sorted(WITHOUT_EFFECT))
    parts += ["\n### Without effect on the text\n", f"{idle}.", "\n### In the body of `/v1/responses`\n"]
    parts += ["| field | value | meaning |", "|---|---|---|"]
    parts += [f"| `{one.name}` | {_values(one.schema)} | {one.text} |" for one in RESPONSES]
    parts += [f"| `{name}` | | not supported: {one.use} |" for name, one in REFUSED_IN_RESPONSES.items()]
    return "\n".join(parts) + "\n"


def _names(field: RequestField) -> str:
    return ", ".join(f"`{name}`" for name in (field.name, *field.aliases))


def _neutral(refused: RefusedField) -> str:
    shown = dict.fromkeys(json.dumps(value).removesuffix(".0") for value in refused.neutral)
    return " or ".join(f"`{value}`" for value in shown)


def _values(schema: Any) -> str:
    """What values a schema takes, in words."""
    if "anyOf" in schema:
        return " or ".join(_values(one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" if isinstance(value, str) else json.dumps(value) for value in values)
    kind = "object" if "$ref" in schema else schema.get("type", "any JSON")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_plural(_values(schema['items']))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_plural(_values(schema['additionalProperties']))}"
    above, least, most = schema.get("exclusiveMinimum"), schema.get("minimum"), schema.get("maximum")
    if above is not None:
        return f"{kind} above {above:g} to {most:g}"
    if least is None:
        return str(kind)
    bounded = most is not None and most < 2**31 - 1
    if most == 2**63 - 1:
        return f"{kind} from {least:g} to 2^63 - 1"
    if kind == "number":
        return f"number from {least:g} to {most:g}"
    return f"{kind} from {least} to {most}" if bounded else f"{kind} from {least}"


def _plural(values: str) -> str:
    word, _, rest = values.partition(" ")
    return f"{word}s {rest}".rstrip()


# The schema


def schema() -> str:
    """The schema of rows with its fields made anew."""
    document = json.loads(SCHEMA.read_text(encoding="utf-8"))
    parts = document["$defs"]
    parts["asked"]["properties"] = _asked()
    parts["response"]["properties"]["body"]["properties"] = {
        "metadata": {"description": "given back in the row's record"},
        "logprobs": {"type": ["boolean", "null"], "description": "token_logprobs"},
        **{one.name: _property(one) for one in RESPONSES},
        **{name: _refused(one) for name, one in REFUSED_IN_RESPONSES.items()},
    }
    return _laid_out(document, 0) + "\n"


def _asked() -> dict[str, Any]:
    """Properties of a row, of a body or of an object in one, by name."""
    found: dict[str, Any] = {}
    for one in FIELDS.values():
        if one.name not in PLACED:
            found[one.name] = _property(one)
            found |= {alias: _property(one, alias=True) for alias in one.aliases}
    found |= {name: {"$ref": "#/$defs/holder"} for name in CONTAINERS}
    found |= {name: _refused(one) for name, one in REFUSED.items()}
    return found | {name: {"description": NOT_USED} for name in sorted(WITHOUT_EFFECT)}


def _property(field: RequestField, *, alias: bool = False) -> dict[str, Any]:
    """The schema of a field, which may be null."""
    told = field.name if alias else LINK.sub(r"\1", field.text).replace("`", "")
    return {**_nullable(field.schema), "description": told}


def _nullable(schema: Any) -> dict[str, Any]:
    if not schema:
        return {}
    if "anyOf" in schema:
        first, *others = schema["anyOf"]
        if "type" in first:
            return {"anyOf": [_nullable(first), *others]}
        return {"anyOf": [first, *others, {"type": "null"}]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "$ref" in schema or schema["type"] == "array":
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*kinds, "null"]}


def _refused(refused: RefusedField) -> dict[str, Any]:
    values = {json.dumps(value).removesuffix(".0"): value for value in reversed(refused.neutral)}  # 0.0 is 0 to JSON
    return {"enum": [*reversed(values.values()), None], "description": NOT_SUPPORTED}


def _laid_out(value: Any, indent: int) -> str:
    """JSON, in which what fits into a line stands on one."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, list | dict) or not value or len(line) + indent + 30 <= WIDTH:
        return line
    inner = indent + 2
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {_laid_out(one, inner)}" for name, one in value.items()]
    else:
        items = [_laid_out(one, inner) for one in value]
    joined = f",\n{' ' * inner}".join(items)
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n{' ' * inner}{joined}\n{' ' * indent}{right}"


def main() -> None:
    """Write both files, or with --check fail if one differs."""
    for path, text in {PAGE: page(), SCHEMA: schema()}.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what the table of request fields says: run make docs")


if __name__ == "__main__":
    main()
