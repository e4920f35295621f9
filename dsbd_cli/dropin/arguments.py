"""Arguments of transformers' `generate`: refused where our engine does not do the same, and else read as settings of
ours.

Letters: B prompts, T their padded length, W beams, L new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import MOST_BIAS, named_rules, written_rules
from dsbd_cli.errors import UsageError, shorten

# logits processors that are settings of ours, with the attribute that holds the value
WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
PREFIXES = "PrefixConstrainedLogitsProcessor"
LEAST = ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")
# logits processors that are token rules of ours
RULES = (
    *LEAST,
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "LogitNormalization",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)
# logits processors that we refuse, with the argument that makes transformers add them
ARGUMENTS = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "TopHLogitsWarper": "top_h",
}
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
# fields of a generation config that would change what comes back, with the values that change nothing
REFUSED: dict[str, tuple[object, ...]] = {
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "output_logits": (False, None),
    "num_beam_groups": (1, None),
    "diversity_penalty": (0.0, None),
    "penalty_alpha": (0.0, None),
    "dola_layers": (None,),
    "token_healing": (False, None),
    "constraints": (None,),
    "force_words_ids": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "watermarking_config": (None,),
    "low_memory": (False, None),
    "typical_p": (1.0, None),
    "guidance_scale": (1.0, None),
}
WITHOUT_EFFECT = ("use_cache", "logits_to_keep", "cache_position", "position_ids", "attention_mask", "past_key_values")


def check_arguments(config: Any, criteria: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse what our engine does not do. Raises UsageError."""
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise UsageError(f"{name} is {shorten(value)}, which is not supported: drop it")
    for criterion in criteria:
        if (name := type(criterion).__name__) not in CRITERIA:
            names = ", ".join(CRITERIA)
            raise UsageError(f"stopping_criteria has {name}, which is not supported: give one of {names}, or drop it")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UsageError("past_key_values holds tokens, but every prompt is read from its beginning: drop it")
    for name, value in model_kwargs.items():
        if name not in WITHOUT_EFFECT and value is not None:
            raise UsageError(f"{name} is given to the model, which is not supported: drop it")


@dataclass(frozen=True, slots=True)
class Ends:
    """Conditions that end a text.

    Attributes:
        length: of a prompt and its new tokens at most. tokens: end tokens. strings: stop strings.
    """

    length: int
    tokens: tuple[int, ...]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, config: Any, criteria: Any, stop: Sequence[str]) -> Ends:
        """Read a generation config and the prepared stopping criteria. stop: further stop strings. Raises
        UsageError."""
        ends: dict[str, Any] = {
            type(criterion).__name__: criterion for criterion in criteria
        }  # one of a kind, as transformers leaves it
        length, most = ends["MaxLengthCriteria"].max_length, config.max_length
        if length > most:
            raise UsageError(f"stopping_criteria has MaxLengthCriteria({length}), but max_length is {most}: raise that")
        tokens = _token_ids(ends["EosTokenCriteria"].eos_token_id) if "EosTokenCriteria" in ends else ()
        strings = ends["StopStringCriteria"].stop_strings if "StopStringCriteria" in ends else ()
        return cls(int(length), tokens, tuple(dict.fromkeys((*stop, *strings))))


def prompts_of(ids: Tensor, mask: Tensor | None, positions: Tensor | None, copies: int) -> list[tuple[int, ...]]:
    """Return the prompts without their padding, which must be on the left. Raises UsageError."""
    if mask is None:
        mask = torch.ones_like(ids)
    attended = mask.to(torch.int64)
    if (attended.diff(dim=1) < 0).any() or (attended[:, -1] == 0).any():
        raise UsageError("attention_mask hides tokens behind others: pad on the left (tokenizer.padding_side = 'left')")
    if positions is not None:
        seen, rows = attended.bool(), len(ids) * copies
        lengths = positions.expand(rows, -1)[::copies] if len(positions) in (1, rows) else None
        if lengths is None or (lengths[seen] != (attended.cumsum(1) - 1)[seen]).any():
            raise UsageError(
                "position_ids do not count the tokens of a prompt from 0, which is not supported: drop them"
            )
    return [tuple(row[keep].tolist()) for row, keep in zip(ids, attended.bool(), strict=True)]


def _warps(processors: Any, drawn: bool) -> dict[str, float | int]:
    """Return sampling settings of the prepared logits processors. Raises UsageError for one that is none of ours."""
    warps: dict[str, float | int] = {"top_k": 0}
    seen: set[str] = set()
    for processor in processors:
        name = type(processor).__name__
        if name in seen:
            raise UsageError(f"logits_processor has two of {name}, and only one is supported: drop one")
        seen.add(name)
        if name in WARPERS and drawn:
            warps[WARPERS[name]] = getattr(processor, WARPERS[name])
        elif name != PREFIXES and name not in RULES:
            asked = f", which {ARGUMENTS[name]} asks for," if name in ARGUMENTS else ""
            raise UsageError(f"logits_processor has {name}{asked} and it is not supported: drop it")
    return warps


def rules_of(processors: Any, ids: Tensor, mask: Tensor | None, config: Any, ends: Ends) -> str:
    """Return the token rules of the prepared logits processors. ids, mask: [B, T] or more rows. Raises UsageError."""
    rules: dict[str, object] = {}
    least = 0
    for processor in processors:
        name, begin = type(processor).__name__, ids.shape[1]
        if name in LEAST:
            least = max(least, _least(processor, begin, ends))
        elif name == "RepetitionPenaltyLogitsProcessor":
            _check_ignored(processor.prompt_ignore_length, mask)
            rules["repetition_penalty"] = processor.penalty
        elif name == "NoRepeatNGramLogitsProcessor":
            rules["no_repeat_ngram_size"] = processor.ngram_size
        elif name == "NoBadWordsLogitsProcessor":
            rules["bad_words_ids"] = [list(word) for word in processor.sequence_bias]
        elif name == "SequenceBiasLogitsProcessor":
            if any(len(word) > 1 for word in processor.sequence_bias):
                raise UsageError("sequence_bias has a sequence of several tokens, which is not supported: drop it")
            if strong := [bias for bias in processor.sequence_bias.values() if not -MOST_BIAS <= bias <= MOST_BIAS]:
                raise UsageError(
                    f"sequence_bias has {strong[0]}, but must be from {-MOST_BIAS:g} to {MOST_BIAS:g}: give tokens "
                    "that never come as suppress_tokens"
                )
            rules["logit_bias"] = {word[0]: bias for word, bias in processor.sequence_bias.items()}
        elif name == "SuppressTokensLogitsProcessor":
            rules["suppress_tokens"] = list(_token_ids(processor.suppress_tokens))
        elif name == "SuppressTokensAtBeginLogitsProcessor":
            # behind a forced first token they are about the second one, in transformers and here
            _check_place(name, processor.begin_index, begin + ("forced_bos_token_id" in rules))
            rules["begin_suppress_tokens"] = list(_token_ids(processor.begin_suppress_tokens))
        elif name == "ForcedBOSTokenLogitsProcessor" and begin == 1:  # it does nothing behind a longer prompt
            rules["forced_bos_token_id"] = int(processor.bos_token_id)
        elif name == "ForcedEOSTokenLogitsProcessor" and ends.length == config.max_length:  # else it is not reached
            _check_place(name, processor.max_length, ends.length)
            if len(forced := _token_ids(processor.eos_token_id)) > 1:
                raise UsageError(f"forced_eos_token_id is {list(forced)}, but only one token is supported: give one")
            rules["forced_eos_token_id"] = forced[0]
        elif name == "LogitNormalization":
            if any(type(other).__name__ == PREFIXES for other in processors):
                raise UsageError("renormalize_logits does not go with prefix_allowed_tokens_fn here: drop one of them")
            rules["renormalize_logits"] = True
    return f"none,{written_rules({'min_new_tokens': least, **rules})}"


def _least(processor: Any, begin: int, ends: Ends) -> int:
    """Return the fewest new tokens that a processor asks for. begin: T, as transformers' lengths count the padding.
    Raises UsageError."""
    name, skipped = type(processor).__name__, getattr(processor, "prompt_length_to_skip", begin)
    if set(_token_ids(processor.eos_token_id)) != set(ends.tokens) or skipped != begin:
        raise UsageError(
            f"logits_processor has {name} with other end tokens or another prompt: give "
            f"{'min_length' if name == LEAST[0] else 'min_new_tokens'} and eos_token_id instead"
        )
    return int(processor.min_length - begin if name == LEAST[0] else processor.min_new_tokens)


def _check_place(name: str, position: int, wanted: int) -> None:
    """Refuse a processor that acts at another place than the argument of `generate` would. Raises UsageError."""
    if position != wanted:
        raise UsageError(f"logits_processor has {name} for another place: give the argument of generate instead")


def _check_ignored(ignored: Any, mask: Tensor | None) -> None:
    """Refuse a repetition penalty that ignores anything but the padding of the prompts. Raises UsageError."""
    padding: Any = 0 if mask is None else (mask != 0).int().argmax(dim=1)
    if (ignored is None and mask is not None) or (ignored is not None and (torch.as_tensor(ignored) != padding).any()):
        raise UsageError(
            "logits_processor has a RepetitionPenaltyLogitsProcessor whose prompt_ignore_length is not the padding of "
            "the prompts, which is not supported: give repetition_penalty"
        )


def check_not_synced(synced: object) -> None:
    """Refuse GPUs that wait for each other. Raises UsageError."""
    if synced:
        raise UsageError(f"synced_gpus is {shorten(synced)}, which is not supported: drop it")


def sampling_of(config: Any, processors: Any, new: int, rules: str, stop: tuple[str, ...]) -> SamplingConfig:
    """Return the settings of one request. new: L, tokens at most. rules: of rules_of. stop: stop strings."""
    beams, drawn = int(config.num_beams or 1), bool(config.do_sample)
    single = drawn and beams == 1
    forced = "forced_eos_token_id" in named_rules(rules)  # the last token, which nothing competes with
    return SamplingConfig(
        **_warps(processors, drawn),  # type: ignore[arg-type]
        # A single sample ends with the first end token that is drawn. In our last step that end would compete with the
        # beam that goes on. So the last step is one more than was asked for, and generate.py removes its token.
        max_new_tokens=new + (single and not forced),
        stop=stop,
        token_rules=rules,
        length_penalty=float(1.0 if config.length_penalty is None else config.length_penalty),
        early_stopping=True if single else _early(config.early_stopping),
        n_best=int(config.num_return_sequences or 1) if beams > 1 else 1,
        token_logprobs=bool(config.output_scores) and beams > 1,
    )


def _early(value: object) -> bool | Literal["never"]:
    if value not in (True, False, None, "never"):
        raise UsageError(f"early_stopping is {shorten(value)}, but must be True, False or 'never'")
    return "never" if value == "never" else bool(value)


def method_of(beams: int, drawn: bool, drafts: bool) -> MethodConfig:
    """Return the method. drawn: with sampling. drafts: with an assistant."""
    rule = "coupled" if drawn else "search"
    options: dict[str, object] = {} if drafts else {"depth": 0}
    if drawn:
        options["warp_scope"] = "beam"
    return MethodConfig(rule=rule, num_beams=beams, **options)  # type: ignore[arg-type]


def end_tokens(config: Any) -> tuple[int, ...]:
    """Return the end tokens of a generation config."""
    return () if config.eos_token_id is None else _token_ids(config.eos_token_id)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Return one id, a list of them or a tensor as a tuple."""
    return tuple(torch.as_tensor(value, dtype=torch.int64).flatten().tolist())
