"""200 JSON schemas x 4 hypotheses: what stopped is valid by the package jsonschema, which knows nothing of llguidance.

Guards: a schema that is followed only in part, an end before the text is whole, text that its tokens do not spell. No
randomness beyond fixed seeds.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.requests import Request
from tests.helpers.schemas import schemas
from tests.helpers.toy import HashModel

PIECES = ['{"', '": ', '", "', ", ", "[]", "true", "null", "ame", "12", "-", "größe", "名", "前", "слово", "😀"]
TOKENS = [b"", *[bytes([byte]) for byte in range(32, 127)], *[piece.encode() for piece in PIECES]]
TOKENS += [bytes([byte]) for byte in range(128, 248) if byte not in (0xC0, 0xC1)]


class Bytes:
    """A codec of single bytes and a few longer tokens; token 0 ends."""

    eos_ids = (0,)

    def encode(self, prompt: str) -> list[int]:
        return [TOKENS.index(bytes([byte])) for byte in prompt.encode()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(TOKENS[token] for token in ids).decode(errors="replace")

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return TOKENS


@pytest.mark.parametrize(
    "method",
    [
        {"rule": "coupled", "drafter": "grammar"},
        {"rule": "search", "depth": 3},
        {"rule": "rejection", "depth": 3, "width": "fixed"},
        {"rule": "coupled", "depth": 0},
    ],
    ids=["coupled-grammar", "search", "rejection", "plain"],
)
def test_what_stopped_is_valid(method: dict[str, Any]) -> None:
    made = schemas(200)[:: 1 if method.get("drafter") else 8]
    target, draft = HashModel(len(TOKENS), 1), HashModel(len(TOKENS), 1, noise=0.5)
    config = MethodConfig.of({"num_beams": 4, **method})
    engine = Engine(target, draft if config.needs_draft else None, Bytes(), config, batch_size=20)
    sampling = SamplingConfig(max_new_tokens=200, n_best=4, temperature=1.0)
    asked = [
        Request("a", seed=seed, sampling=sampling, grammar=Grammar.json_schema(schema))
        for seed, schema in enumerate(made)
    ]
    stopped = 0
    for schema, result in zip(made, engine.run(asked), strict=True):
        assert result.error is None, (schema, result.error)
        for beam in result.hypotheses:
            assert beam.valid or beam.finish_reason == "length"
            if beam.valid:
                stopped += 1
                Draft202012Validator(schema).validate(json.loads(beam.text))
    assert stopped > 3 * len(made)
