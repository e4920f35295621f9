"""`dsbd_cli.generate`, which takes the place of a transformers model's `generate`.

    out = model.generate(**inputs, num_beams=4)                                      # before
    out = dsbd_cli.generate(model, **inputs, num_beams=4)                            # after
    out = model.generate(**inputs, num_beams=4, custom_generate=dsbd_cli.generate)   # or so

transformers itself settles defaults, lengths, masks and processors, then it calls `_decode` here. What our engine does
not do in the same way is refused by name, never ignored.

Letters: B prompts, T their padded length, W beams, n returned sequences, L new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.dropin.live import borrow_models, forest_of
from dsbd_cli.dropin.prefixes import compiled, sequences_of
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import NumericalError, UsageError, shorten
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import Hypothesis, Request, derive_seed

# logits processors that are settings of ours, with the attribute that holds the value
WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
PREFIXES = "PrefixConstrainedLogitsProcessor"
# logits processors that are token rules of ours
RULES = (
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
)
# logits processors that we refuse, with the argument that makes transformers add them
ARGUMENTS = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "LogitNormalization": "renormalize_logits",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "TopHLogitsWarper": "top_h",
}
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
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
    "stop_strings": (None,),
    "prompt_lookup_num_tokens": (None,),
    "watermarking_config": (None,),
    "low_memory": (False, None),
    "typical_p": (1.0, None),
    "guidance_scale": (1.0, None),
}
WITHOUT_EFFECT = ("use_cache", "logits_to_keep", "cache_position", "position_ids", "attention_mask", "past_key_values")


def generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> Any:
    """Run transformers' `model.generate` with our engine: same arguments, same results.

    Supported are num_beams, num_return_sequences, do_sample, temperature, top_k, top_p, min_p, length_penalty,
    early_stopping, max_new_tokens (max_length), eos_token_id, pad_token_id, stop_strings (with tokenizer),
    assistant_model (as our draft, with any number of beams), prefix_allowed_tokens_fn (where it allows a finite set of
    sequences), repetition_penalty, no_repeat_ngram_size, min_length, min_new_tokens, output_scores and
    return_dict_in_generate. Padding is no text: n-grams do not count it, while in transformers they do.

    Without sampling the sequences are transformers' own, token for token, except for rounding. With sampling, one beam
    has transformers' distribution. Several beams draw without replacement with warp_scope beam, see docs/algorithm.md.
    The seed of the run comes from torch's global generator.

    Returns sequences [B * n, T + L]. With return_dict_in_generate it returns transformers' output class, which holds
    `sequences`. With output_scores this also holds, for one beam, `scores`: L tensors [B * n, V], which cost one
    forward more. For several beams it holds `sequences_scores` [B * n] and `beam_indices` [B * n, L]; `scores` over the
    whole vocabulary are not kept.

    Weights are read in place. Afterwards the model is as before: mode, attention, buffers. Raises UsageError for what
    is not supported, UnsupportedModelError for models that cannot hold a tree.
    """
    prepared = hasattr(generation_config, "_eos_token_tensor") and isinstance(stopping_criteria, StoppingCriteriaList)
    if prepared:  # transformers calls us, as its custom_generate
        assert inputs is not None
        caller = sys._getframe(1).f_locals  # local variables of its generate, which does not pass the assistant on
        if caller.get("streamer") is not None:
            raise UsageError("streamer is given, but is not supported: use Engine.stream")
        _check_not_synced(caller.get("synced_gpus"))
        assistant_model = assistant_model if assistant_model is not None else caller.get("assistant_model")
        return _decode(
            model, inputs, logits_processor, stopping_criteria, generation_config,
            assistant=assistant_model, tokenizer=tokenizer, stop=(), **options,
        )  # fmt: skip
    for name in ("custom_generate", "streamer", "negative_prompt_ids", "assistant_tokenizer"):
        if options.pop(name, None) is not None:
            raise UsageError(f"{name} is given, but is not supported: drop it")
    _check_not_synced(options.pop("synced_gpus", None))
    stop = options.pop("stop_strings", None)
    for config in (generation_config, model.generation_config):
        stop = getattr(config, "stop_strings", None) if stop is None else stop
    if stop is not None:
        options["stop_strings"] = None  # our engine ends the texts; an argument overrides both configs
    stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if stop and tokenizer is None:
        raise UsageError("stop_strings is given, but tokenizer is not: give the model's tokenizer too")
    return model.generate(
        inputs,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        custom_generate=partial(_decode, assistant=assistant_model, tokenizer=tokenizer, stop=stop),
        **options,
    )


def _decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    assistant: Any,
    tokenizer: Any,
    stop: tuple[str, ...],
    **model_kwargs: Any,
) -> Any:
    """Decode what transformers has prepared. input_ids: [B * max(W, n), T], every prompt repeated max(W, n) times."""
    config = generation_config
    _check(config, stopping_criteria, model_kwargs)
    beams, wanted = int(config.num_beams or 1), int(config.num_return_sequences or 1)
    copies = max(beams, wanted)
    ids = input_ids[::copies]
    mask = model_kwargs.get("attention_mask")
    prompts = _prompts(ids, None if mask is None else mask[::copies], model_kwargs.get("position_ids"), copies)
    new = int(config.max_length) - ids.shape[1]
    eos, sequences = _ends(config), None
    sampling = _sampling(config, logits_processor, new)
    sampling = replace(sampling, stop=stop, token_rules=_rules(logits_processor, ids, mask, eos))
    prefixes = next((one for one in logits_processor if type(one).__name__ == PREFIXES), None)
    if prefixes is not None:
        sequences, end = sequences_of(prefixes._prefix_allowed_tokens_fn, ids, eos, new)
        eos = (end, *(token for token in eos if token != end))
    seed = int(torch.randint(2**62, (1,)))
    with borrow_models(*([model] if assistant is None else [model, assistant])):
        target = forest_of(model, "model")
        draft = None
        if assistant is not None:
            draft = forest_of(assistant, "assistant_model")
            draft.fit_width(target.vocab_size)
        codec: TextCodec = HFCodec(tokenizer, eos) if stop else _Ids(eos, target.vocab_size)
        names, catalogues = None, None
        if sequences is not None:
            names, catalogues = compiled(sequences, codec, target.vocab_size)
        limits = [one.max_positions for one in (target, draft) if one is not None and one.max_positions is not None]
        if ids.shape[1] + new in limits:  # the model has no position for one more token
            sampling = replace(sampling, max_new_tokens=new)
        requests = [
            Request(
                prompt_ids=prompt,
                id=f"{row}-{place}",
                seed=derive_seed(seed, f"{row}-{place}"),
                sampling=sampling,
                allow=None if names is None else names[row],
            )
            for row, prompt in enumerate(prompts)
            for place in range(wanted if beams == 1 else 1)  # samples of one beam are requests of their own
        ]
        method = _method(beams, bool(config.do_sample), assistant is not None)
        engine = Engine(
            target, draft, codec, method, batch_size=len(requests), cuda_graphs=False, catalogues=catalogues
        )
        results = engine.generate(requests)
    found = [tuple(_truncated(one, new) for one in result.hypotheses) for result in results]
    if too_few := next((one for one in found if len(one) < sampling.n_best), None):
        raise NumericalError(f"{len(too_few)} sequences have a finite score, fewer than num_return_sequences {wanted}")
    out = _output(ids.repeat_interleave(wanted, 0), [one for some in found for one in some], config, beams, wanted)
    if beams == 1 and config.output_scores and config.return_dict_in_generate:
        out.scores = _scores(model, out.sequences, mask, logits_processor, ids.shape[1])
    return out


def _sampling(config: Any, processors: Any, new: int) -> SamplingConfig:
    """Return the settings of one request. new: L, tokens at most."""
    beams, drawn = int(config.num_beams or 1), bool(config.do_sample)
    single = drawn and beams == 1
    return SamplingConfig(
        **_warps(processors, drawn),  # type: ignore[arg-type]
        # A single sample ends with the first end token that is drawn. In our last step that end would compete with the
        # beam that goes on. So the last step is one more than was asked for, and `_truncated` removes its token.
        max_new_tokens=new + single,
        length_penalty=float(1.0 if config.length_penalty is None else config.length_penalty),
        early_stopping=_early(config.early_stopping) or single,
        n_best=int(config.num_return_sequences or 1) if beams > 1 else 1,
        token_logprobs=bool(config.output_scores) and beams > 1,
    )


def _truncated(one: Hypothesis, most: int) -> Hypothesis:
    """Return the hypothesis with `most` tokens at most. Only a single sample that has not ended before has more."""
    return one if one.num_tokens <= most else replace(one, token_ids=one.token_ids[:most])


def _check(config: Any, criteria: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse what our engine does not do. Raises UsageError."""
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise UsageError(f"{name} is {shorten(value)}, which is not supported: drop it")
    for one in criteria:
        name = type(one).__name__
        if name not in CRITERIA:
            raise UsageError(f"stopping_criteria has {name}, which is not supported: drop it")
        if name == "MaxLengthCriteria" and one.max_length != config.max_length:
            raise UsageError(f"stopping_criteria has MaxLengthCriteria({one.max_length}): give max_length instead")
        if name == "EosTokenCriteria" and set(_token_ids(one.eos_token_id)) != set(_ends(config)):
            raise UsageError("stopping_criteria has EosTokenCriteria with other ids: give eos_token_id instead")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UsageError("past_key_values holds tokens, but every prompt is read from its beginning: drop it")
    for name, value in model_kwargs.items():
        if name not in WITHOUT_EFFECT and value is not None:
            raise UsageError(f"{name} is given to the model, which is not supported: drop it")


def _prompts(ids: Tensor, mask: Tensor | None, positions: Tensor | None, copies: int) -> list[tuple[int, ...]]:
    """Return the prompts without their padding, which must be on the left. Raises UsageError."""
    if mask is None:
        mask = torch.ones_like(ids)
    attended = mask.to(torch.int64)
    if (attended.diff(dim=1) < 0).any() or (attended[:, -1] == 0).any():
        raise UsageError("attention_mask hides tokens behind others: pad on the left (tokenizer.padding_side = 'left')")
    if positions is not None:
        seen = attended.bool()
        given_positions = (
            positions.expand(len(ids) * copies, -1)[::copies] if positions.shape[0] in (1, len(ids) * copies) else None
        )
        if given_positions is None or (given_positions[seen] != (attended.cumsum(1) - 1)[seen]).any():
            raise UsageError(
                "position_ids do not count the tokens of a prompt from 0, which is not supported: drop them"
            )
    return [tuple(row[keep].tolist()) for row, keep in zip(ids, attended.bool(), strict=True)]


def _warps(processors: Any, drawn: bool) -> dict[str, float | int]:
    """Return sampling settings of the prepared logits processors. Raises UsageError for one that is none of ours."""
    found: dict[str, float | int] = {"top_k": 0}
    seen: set[str] = set()
    for one in processors:
        name = type(one).__name__
        if name in seen:
            raise UsageError(f"logits_processor has two of {name}, and only one is supported: drop one")
        seen.add(name)
        if name in WARPERS and drawn:
            found[WARPERS[name]] = getattr(one, WARPERS[name])
        elif name != PREFIXES and name not in RULES:
            asked = f", which {ARGUMENTS[name]} asks for," if name in ARGUMENTS else ""
            raise UsageError(f"logits_processor has {name}{asked} and it is not supported: drop it")
    return found


def _rules(processors: Any, ids: Tensor, mask: Tensor | None, eos: tuple[int, ...]) -> str:
    """Return the token rules of the prepared logits processors. ids, mask: [B, T] or more rows. eos: end tokens of the
    config. Raises UsageError."""
    rules = {"min_new_tokens": 0}
    for one in processors:
        name = type(one).__name__
        if name == "RepetitionPenaltyLogitsProcessor":
            _check_ignored(one.prompt_ignore_length, mask)
            rules["repetition_penalty"] = one.penalty
        elif name == "NoRepeatNGramLogitsProcessor":
            rules["no_repeat_ngram_size"] = one.ngram_size
        elif name in RULES:  # transformers' lengths count the padding
            skipped = getattr(one, "prompt_length_to_skip", ids.shape[1])
            if set(_token_ids(one.eos_token_id)) != set(eos) or skipped != ids.shape[1]:
                raise UsageError(
                    f"logits_processor has {name} with other end tokens or another prompt: give "
                    f"{'min_length' if name.startswith('MinLength') else 'min_new_tokens'} instead"
                )
            least = one.min_length - ids.shape[1] if name.startswith("MinLength") else one.min_new_tokens
            rules["min_new_tokens"] = max(rules["min_new_tokens"], least)
    return "none" + "".join(f",{name}={value}" for name, value in rules.items())


def _check_ignored(ignored: Any, mask: Tensor | None) -> None:
    """Refuse a repetition penalty that ignores anything but the padding of the prompts. Raises UsageError."""
    padding: Any = 0 if mask is None else (mask != 0).int().argmax(dim=1)
    if (ignored is None and mask is not None) or (ignored is not None and (torch.as_tensor(ignored) != padding).any()):
        raise UsageError(
            "logits_processor has a RepetitionPenaltyLogitsProcessor whose prompt_ignore_length is not the padding of "
            "the prompts, which is not supported: give repetition_penalty"
        )


def _check_not_synced(synced: object) -> None:
    if synced:
        raise UsageError(f"synced_gpus is {shorten(synced)}, which is not supported: drop it")


def _scores(model: Any, sequences: Tensor, mask: Tensor | None, processors: Any, begin: int) -> tuple[Tensor, ...]:
    """Return what transformers' own loop keeps for one beam: for every new token the processed logits, [B * n, V]
    float32.

    sequences: [B * n, T + L]; mask: [B * n, T]; begin: T. The logits come from one forward over the whole sequences.
    """
    new = sequences.shape[1] - begin
    attended = sequences.new_ones(len(sequences), begin) if mask is None else mask.to(sequences)
    attended = torch.nn.functional.pad(attended, (0, new), value=1)
    given: dict[str, Any] = {"attention_mask": attended}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = (attended.cumsum(1) - 1).clamp(min=0)
    with borrow_models(model), torch.no_grad():
        logits = model(sequences, use_cache=False, **given).logits
    return tuple(
        processors(sequences[:, :end], logits[:, end - 1].to(torch.float32, copy=True))
        for end in range(begin, begin + new)
    )


def _early(value: object) -> bool:
    if value not in (True, False, None):
        raise UsageError(f"early_stopping is {shorten(value)}, but must be True or False")
    return bool(value)


def _method(beams: int, drawn: bool, drafts: bool) -> MethodConfig:
    rule = "coupled" if drawn else "search"
    options: dict[str, object] = {} if drafts else {"depth": 0}
    if drawn:
        options["warp_scope"] = "beam"
    return MethodConfig(rule=rule, num_beams=beams, **options)  # type: ignore[arg-type]


class _Ids:
    """A codec without a tokenizer, for token ids alone."""

    def __init__(self, eos_ids: tuple[int, ...], vocabulary: int) -> None:
        self.eos_ids, self._vocabulary = eos_ids, vocabulary

    def encode(self, text: object) -> NoReturn:
        raise UsageError("this engine has no tokenizer: give prompt_ids")

    encode_pieces = encode_chat = encode

    def decode(self, ids: list[int]) -> str:
        return ""

    def token_bytes(self) -> list[bytes]:
        return [b""] * self._vocabulary


def _ends(config: Any) -> tuple[int, ...]:
    return () if config.eos_token_id is None else _token_ids(config.eos_token_id)


def _token_ids(given: Any) -> tuple[int, ...]:
    """Return one id, a list of them or a tensor as a tuple."""
    return tuple(torch.as_tensor(given, dtype=torch.int64).flatten().tolist())


def _output(prompts: Any, found: Sequence[Hypothesis], config: Any, beams: int, wanted: int) -> Any:
    """Return the sequences as transformers lays them out, padded on the right."""
    length = max(one.num_tokens for one in found)
    new = prompts.new_full((len(found), length), _fill(config, beams))
    for row, one in enumerate(found):
        new[row, : one.num_tokens] = torch.tensor(one.token_ids)
    sequences: Any = torch.cat((prompts, new), 1)
    if not config.return_dict_in_generate:
        return sequences
    if beams == 1:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    if not config.output_scores:
        return GenerateBeamDecoderOnlyOutput(sequences=sequences)
    indices: Any = torch.full((len(found), length), -1, dtype=torch.int32)
    for row, one in enumerate(found):
        assert one.tokens is not None
        first = row // wanted * beams
        indices[row, : one.num_tokens] = torch.tensor([first + token.beam for token in one.tokens], dtype=torch.int32)
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,
        sequences_scores=torch.tensor([one.score for one in found], device=prompts.device),
        beam_indices=indices.to(prompts.device),
    )


def _fill(config: Any, beams: int) -> int:
    """Return the token that fills a sequence up after its end. For several beams it is the first end token where the
    padding token is 0, as in transformers."""
    pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
    eos = next(iter(_ends(config)), None)
    if beams > 1:
        return -1 if eos is None else pad or eos
    return 0 if pad is None else pad
