"""Generation settings of a checkpoint, as far as they change a text."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsbd_cli.config.token_rules import LEAST_PENALTY, LISTS, MOST_PENALTY, NAMES, OF_REQUESTS, TokenRules
from dsbd_cli.errors import MOST_INTEGER, ModelError, shorten

# Settings that transformers' beam search acts on and that are not supported here, with the values that do nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None,),
    "diversity_penalty": (None, 0, 0.0),
    "num_beam_groups": (None, 1),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "stop_strings": (None,),
}
# Settings that options of a run replace here, with transformers' usual values.
SEARCH = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Settings of a decoder's checkpoint, without its weights.

    Attributes:
        architecture: name of the model's class. eos: the config's end tokens. generation: its generation settings.
    """

    architecture: str
    eos: Any
    generation: Mapping[str, Any]

    @classmethod
    def of(cls, config: Any, generation: Mapping[str, Any]) -> CheckpointSettings:
        """Read a transformers config."""
        named = getattr(config, "architectures", None) or [config.model_type]
        return cls(str(named[0]), getattr(config.get_text_config(decoder=True), "eos_token_id", None), generation)

    @property
    def generation_config(self) -> Any:
        """The generation settings as attributes of an object."""
        return SimpleNamespace(**self.generation)

    @property
    def config(self) -> Any:
        """A stand-in for the config, with the fields that are read in addition to a DecoderConfig."""
        config = SimpleNamespace(eos_token_id=self.eos, is_encoder_decoder=False)
        config.get_text_config = lambda decoder: config
        return config


def read_generation(folder: Path) -> dict[str, Any]:
    """Return the generation settings of a checkpoint folder. Raises ModelError."""
    file = folder / "generation_config.json"
    return read_settings(file) if file.is_file() else {}


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a JSON file of a checkpoint. Raises ModelError."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{file} is no object of settings")
    return settings


def positions_of(config: Any, *, switching: bool = False) -> int | None:
    """Return the number of positions that a (text) config allows; None where it is unbounded. switching: the model
    chooses factors of longrope for each row by itself."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    if kept := getattr(config, "keep_window_size", None):
        # past so many tokens Doge leaves out those of the least weight, and words that return weigh the same
        limit = min(limit or kept, kept)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and not switching:
        # past this length transformers changes the frequencies of the whole batch, whatever the others' lengths
        limit = rope.get("original_max_position_embeddings") or limit
    return int(limit) if limit and limit > 0 else None


def eos_ids(model: Any, tokenizer: Any, *, own_too: bool = False) -> tuple[int, ...]:
    """Return the tokens that end a text: the generation settings' if they name any, else the config's, else the
    tokenizer's. The tokenizer's own comes first, if it is one of them.

    own_too: it is one of them in any case. Raises ModelError for what is no token id.
    """
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer):
        ids_of_source = getattr(source, "eos_token_id", None)
        if ids_of_source is not None and ids_of_source != []:
            own = getattr(tokenizer, "eos_token_id", None)
            try:
                ids = [
                    operator.index(token)
                    for token in (ids_of_source if isinstance(ids_of_source, (list, tuple)) else [ids_of_source])
                ]
            except TypeError:
                wanted = "but must be a token id or a list of them"
                raise ModelError(f"eos_token_id of the checkpoint is {shorten(ids_of_source)}, {wanted}") from None
            if own_too and own is not None:
                ids.append(own)
            valid = dict.fromkeys(token for token in ids if token >= 0)  # a number below 0 stands for no token
            return tuple(sorted(valid, key=lambda token: token != own))
    return ()


def checkpoint_rules(model: Any) -> TokenRules:
    """Return the token rules of a transformers model's generation settings. Raises ModelError for values that are
    none."""
    config = getattr(model, "generation_config", None)
    rules: dict[str, Any] = {}
    for name in NAMES:
        value: Any = getattr(config, name, None)
        if value is None or name in OF_REQUESTS:
            continue
        try:
            if name == "bad_words_ids":
                words = [tuple(map(operator.index, word)) for word in value]
                value = tuple(word for word in words if word and min(word) >= 0)
            elif name in LISTS:
                value = tuple(token for token in map(operator.index, value) if token >= 0)
            elif name == "renormalize_logits":
                value = bool(value)
            elif name == "repetition_penalty":
                value = float(value)
                if not LEAST_PENALTY <= value <= MOST_PENALTY:
                    raise ValueError
            elif isinstance(value, list | tuple):  # several last tokens: see unsupported_settings
                value = operator.index(value[0]) if len(value) == 1 else None
            else:  # a number below 0 asks for nothing, a larger one than MOST_INTEGER for no more than that
                value = min(operator.index(value), MOST_INTEGER)
                value = None if value < 0 else value
        except (TypeError, ValueError):
            shown = shorten(getattr(config, name))
            raise ModelError(f"generation settings of the checkpoint: {name} is {shown}, which it cannot be") from None
        if value is not None:
            rules[name] = value
    return TokenRules(**rules)


def unsupported_settings(model: Any) -> tuple[str, ...]:
    """Return `name value` of each setting that changes a text under transformers and has no effect here."""
    config = getattr(model, "generation_config", None)
    unsupported = [
        f"{name} {shorten(value)}"
        for name, idle in UNSUPPORTED.items()
        if (value := getattr(config, name, None)) not in idle and value is not None
    ]
    last = getattr(config, "forced_eos_token_id", None)
    if isinstance(last, list | tuple) and len(last) > 1:
        unsupported.append(f"forced_eos_token_id {list(last)}")
    return tuple(unsupported)


def settings_notes(model: Any) -> tuple[str, ...]:
    """Return what a user of a target should know of its generation settings, one sentence each. Raises ModelError for
    token rules that are none."""
    notes, rules = [], checkpoint_rules(model).acting
    if unsupported := unsupported_settings(model):
        notes.append(
            f"the target's generation settings ask for {', '.join(unsupported)}, which is not supported and not done"
        )
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if has_encoder and (search := checkpoint_search(model)):
        asked = ", ".join(f"{name} {value}" for name, value in search.items())
        notes.append(f"the target's generation settings ask for {asked}: options of the run decide, not they")
    if not has_encoder and rules:
        asked = ", ".join(f"{name} {value}" for name, value in rules.items())
        notes.append(f"the target's generation settings ask for {asked}: not done without --set token-rules=checkpoint")
    return tuple(notes)


def checkpoint_search(model: Any) -> dict[str, object]:
    """Return the number of beams, length penalty and early stopping that the checkpoint asks for, where they are not
    usual."""
    config = getattr(model, "generation_config", None)
    search = {name: getattr(config, name, None) for name in SEARCH}
    return {name: value for name, value in search.items() if value is not None and value != SEARCH[name]}
