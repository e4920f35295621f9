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

from dsbd_cli.answer_forms import NO_FORM, AnswerForm, ReasoningMarks
from dsbd_cli.dropin.arguments import (
    PREFIXES,
    Ends,
    check_arguments,
    check_not_synced,
    end_tokens,
    method_of,
    prompts_of,
    rules_of,
    sampling_of,
)
from dsbd_cli.dropin.live import borrow_models, forest_of
from dsbd_cli.dropin.prefixes import compiled, sequences_of
from dsbd_cli.dropin.streamed import Streamed
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import NumericalError, UsageError
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import Hypothesis, Request, RequestResult, derive_seed


def generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    think_end_token: str | int | None = None,
    **options: Any,
) -> Any:
    """Run transformers' `model.generate` with our engine: same arguments, same results.

    Supported are num_beams, num_return_sequences, do_sample, temperature, top_k, top_p, min_p, length_penalty,
    early_stopping, max_new_tokens (max_length), eos_token_id, pad_token_id, stop_strings (with tokenizer),
    assistant_model (as our draft, with any number of beams), prefix_allowed_tokens_fn (where it allows a finite set of
    sequences), repetition_penalty, no_repeat_ngram_size, min_length, min_new_tokens, bad_words_ids, sequence_bias (of
    single tokens), suppress_tokens, begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id (one token),
    renormalize_logits, stopping_criteria (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria), streamer (with one
    beam), output_scores and return_dict_in_generate. Padding is no text: n-grams and bad words do not count it, while
    in transformers they do.

    Without sampling the sequences are transformers' own, token for token, except for rounding. With sampling, one beam
    has transformers' distribution. Several beams draw without replacement with warp_scope beam, see docs/algorithm.md.
    The seed of the run comes from torch's global generator.

    Returns sequences [B * n, T + L]. With return_dict_in_generate it returns transformers' output class, which holds
    `sequences`. With output_scores this also holds, for one beam, `scores`: L tensors [B * n, V], which cost one
    forward more. For several beams it holds `sequences_scores` [B * n], `beam_indices` [B * n, L] and `scores`: L
    tensors [B * W, V] with the values of the tokens of `sequences`, which is all that compute_transition_scores reads.
    All other values are NaN, because they are not kept.

    think_end_token: with stop_strings, the token or text that ends the reasoning of a model; they end a text behind it
    alone. transformers has no such argument: its stop strings end the reasoning, too.

    Weights are read in place. Afterwards the model is as before: mode, attention, buffers. Raises UsageError for what
    is not supported, UnsupportedModelError for models that cannot hold a tree.
    """
    prepared = hasattr(generation_config, "_eos_token_tensor") and isinstance(stopping_criteria, StoppingCriteriaList)
    if prepared:  # transformers calls us, as its custom_generate
        assert inputs is not None
        caller = sys._getframe(1).f_locals  # local variables of its generate, which does not pass the assistant on
        check_not_synced(caller.get("synced_gpus"))
        assistant_model = assistant_model if assistant_model is not None else caller.get("assistant_model")
        return _decode(
            model, inputs, logits_processor, stopping_criteria, generation_config,
            assistant=assistant_model, tokenizer=tokenizer, stop=(), streamed=caller.get("streamer"),
            think_end_token=think_end_token, **options,
        )  # fmt: skip
    for name in ("custom_generate", "negative_prompt_ids", "assistant_tokenizer"):
        if options.pop(name, None) is not None:
            raise UsageError(f"{name} is given, but is not supported: drop it")
    check_not_synced(options.pop("synced_gpus", None))
    stop = options.pop("stop_strings", None)
    for config in (generation_config, model.generation_config):
        stop = getattr(config, "stop_strings", None) if stop is None else stop
    if stop is not None:
        options["stop_strings"] = None  # our engine ends the texts; an argument overrides both configs
    stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    decode = partial(
        _decode,
        assistant=assistant_model,
        tokenizer=tokenizer,
        stop=stop,
        streamed=options.get("streamer"),
        think_end_token=think_end_token,
    )
    return model.generate(
        inputs,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        custom_generate=decode,
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
    streamed: Any,
    think_end_token: str | int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode what transformers has prepared. input_ids: [B * max(W, n), T], every prompt repeated max(W, n) times.
    streamed: a streamer, or None."""
    config = generation_config
    check_arguments(config, stopping_criteria, model_kwargs)
    beams, wanted = int(config.num_beams or 1), int(config.num_return_sequences or 1)
    copies = max(beams, wanted)
    ids = input_ids[::copies]
    mask = model_kwargs.get("attention_mask")
    prompts = prompts_of(ids, None if mask is None else mask[::copies], model_kwargs.get("position_ids"), copies)
    ends = Ends.of(config, stopping_criteria, stop)
    new, eos, sequences = ends.length - ids.shape[1], ends.tokens, None
    if new < 1:
        raise UsageError(f"stopping_criteria has MaxLengthCriteria({ends.length}), no more than a prompt has: raise it")
    if ends.strings and tokenizer is None:
        raise UsageError("stop strings are given, but tokenizer is not: give the model's tokenizer too")
    if think_end_token is not None and not ends.strings:
        raise UsageError("think_end_token is given, but no stop_strings, which would wait for it: drop it")
    if streamed is not None and beams > 1:
        raise UsageError(f"streamer is given, but num_beams is {beams}, and only one beam can be streamed: drop it")
    rules = rules_of(logits_processor, ids, mask, config, ends)
    sampling = sampling_of(config, logits_processor, new, rules, ends.strings)
    prefixes = next((processor for processor in logits_processor if type(processor).__name__ == PREFIXES), None)
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
        codec: TextCodec = _Ids(eos, target.vocab_size)
        if ends.strings:
            codec = HFCodec(tokenizer, eos)
            codec.form = form_ending(codec, think_end_token)
        names, catalogues = None, None
        if sequences is not None:
            names, catalogues = compiled(sequences, codec, target.vocab_size)
        limits = [
            model.max_positions for model in (target, draft) if model is not None and model.max_positions is not None
        ]
        if ids.shape[1] + new in limits:  # the model has no position for one more token
            sampling = replace(sampling, max_new_tokens=new)
        requests = [
            Request(
                prompt_ids=prompt,
                id=f"{row}-{number}",
                seed=derive_seed(seed, f"{row}-{number}"),
                sampling=sampling,
                allow=None if names is None else names[row],
            )
            for row, prompt in enumerate(prompts)
            for number in range(wanted if beams == 1 else 1)  # samples of one beam are requests of their own
        ]
        method = method_of(beams, bool(config.do_sample), assistant is not None)
        engine = Engine(
            target, draft, codec, method, batch_size=len(requests), cuda_graphs=False, catalogues=catalogues
        )
        results = engine.generate(requests) if streamed is None else _streamed(engine, requests, streamed, config, new)
    outputs = [tuple(_truncated(beam, new) for beam in result.hypotheses) for result in results]
    if too_few := next((output for output in outputs if len(output) < sampling.n_best), None):
        raise NumericalError(f"{len(too_few)} sequences have a finite score, fewer than num_return_sequences {wanted}")
    texts = [beam for some in outputs for beam in some]
    out = _output(ids.repeat_interleave(wanted, 0), texts, config, beams, wanted, target.vocab_size)
    if beams == 1 and config.output_scores and config.return_dict_in_generate:
        out.scores = _scores(model, out.sequences, mask, logits_processor, ids.shape[1])
    return out


def _streamed(engine: Engine, requests: Sequence[Request], streamer: Any, config: Any, new: int) -> list[RequestResult]:
    """Return the results of all requests. Their tokens go to the streamer meanwhile."""
    results = list(engine.run_into(Streamed(streamer, len(requests), new, _fill(config, 1)), requests))
    for result in results:
        result.check()
    streamer.end()
    return results


def _truncated(beam: Hypothesis, most: int) -> Hypothesis:
    """Return the hypothesis with `most` tokens at most. Only a single sample that has not ended before has more."""
    return beam if beam.num_tokens <= most else replace(beam, token_ids=beam.token_ids[:most])


def _scores(model: Any, sequences: Tensor, mask: Tensor | None, processors: Any, begin: int) -> tuple[Tensor, ...]:
    """Return what transformers' own loop keeps for one beam: for every new token the processed logits, [B * n, V]
    float32.

    sequences: [B * n, T + L]; mask: [B * n, T]; begin: T. The logits come from one forward over the whole sequences.
    """
    new = sequences.shape[1] - begin
    attended = sequences.new_ones(len(sequences), begin) if mask is None else mask.to(sequences)
    attended = torch.nn.functional.pad(attended, (0, new), value=1)
    inputs: dict[str, Any] = {"attention_mask": attended}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (attended.cumsum(1) - 1).clamp(min=0)
    with borrow_models(model), torch.no_grad():
        logits = model(sequences, use_cache=False, **inputs).logits
    return tuple(
        processors(sequences[:, :end], logits[:, end - 1].to(torch.float32, copy=True))
        for end in range(begin, begin + new)
    )


def form_ending(codec: HFCodec, think_end_token: str | int | None) -> AnswerForm:
    """Return the form of answers whose reasoning ends with this token or text; None: they are one text, as in
    transformers. Where the tokenizer knows this mark, it knows what the reasoning begins with, too; else all answers
    begin in their reasoning."""
    if think_end_token is None:
        return NO_FORM
    end = think_end_token
    if isinstance(end, int):
        end = str(codec.tokenizer.decode([end], skip_special_tokens=False))
    marks = codec.form.reasoning
    if marks is not None and end.removesuffix(marks.message) in marks.ends:
        return codec.form
    ids = {token.content: index for index, token in codec.added_tokens.items()}
    return AnswerForm(ReasoningMarks("", (end,)), tokens={end: ids[end]} if end in ids else {})


class _Ids:
    """A codec without a tokenizer, for token ids alone."""

    def __init__(self, eos_ids: tuple[int, ...], vocabulary: int) -> None:
        self.eos_ids, self._vocabulary = eos_ids, vocabulary

    def encode(self, *text: object) -> NoReturn:
        raise UsageError("this engine has no tokenizer: give prompt_ids")

    encode_pieces = render_chat = encode

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return [b""] * self._vocabulary


def _output(
    prompts: Any, beams_of_rows: Sequence[Hypothesis], config: Any, beams: int, wanted: int, vocabulary: int
) -> Any:
    """Return the sequences as transformers lays them out, padded on the right. vocabulary: V."""
    length = max(beam.num_tokens for beam in beams_of_rows)
    new = prompts.new_full((len(beams_of_rows), length), _fill(config, beams))
    for row, beam in enumerate(beams_of_rows):
        new[row, : beam.num_tokens] = torch.tensor(beam.token_ids)
    sequences: Any = torch.cat((prompts, new), 1)
    if not config.return_dict_in_generate:
        return sequences
    if beams == 1:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    if not config.output_scores:
        return GenerateBeamDecoderOnlyOutput(sequences=sequences)
    indices: Any = torch.full((len(beams_of_rows), length), -1, dtype=torch.int32)
    scores = torch.full((length, len(beams_of_rows) // wanted * beams, vocabulary), torch.nan)
    for row, beam in enumerate(beams_of_rows):
        assert beam.tokens is not None
        first = row // wanted * beams
        indices[row, : beam.num_tokens] = torch.tensor([first + token.beam for token in beam.tokens], dtype=torch.int32)
        for position, token in enumerate(beam.tokens):
            scores[position, first + token.beam, token.token_id] = token.logprob
    return GenerateBeamDecoderOnlyOutput(
        sequences=sequences,
        sequences_scores=torch.tensor([beam.score for beam in beams_of_rows], device=prompts.device),
        scores=tuple(scores.to(prompts.device)),
        beam_indices=indices.to(prompts.device),
    )


def _fill(config: Any, beams: int) -> int:
    """Return the token that fills a sequence up after its end. For several beams it is the first end token where the
    padding token is 0, as in transformers."""
    pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
    eos = next(iter(end_tokens(config)), None)
    if beams > 1:
        return -1 if eos is None else pad or eos
    return 0 if pad is None else pad
