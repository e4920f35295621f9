"""transformers' own `generate` on the same weights, as transformers loads them: same prompts, same limits.

Prompts of one batch are padded on the left, encoder inputs on the right. Only delivered tokens count: those of the
returned (best) sequence up to and with its end token, never the padding behind it. A module that our engine uses too
has transformers' stock attention while it generates here. A module whose weights we have packed is loaded a second
time.

Shape letters: B prompts of a batch, T tokens of the longest prompt, n new tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import OF_REQUESTS, TokenRules
from dsbd_cli.engine.constraints.answers import Catalogue
from dsbd_cli.engine.constraints.trie import Trie
from dsbd_cli.engine.protocols import EncoderRequest
from dsbd_cli.errors import ModelError
from dsbd_cli.lab.peers.base import Asked, Delivered, Peer, PeerSettings, delivered
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.attention import NAME as GROUPED
from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import Request


class _Generating(Protocol):
    """The part of a PreTrainedModel that is used."""

    stock_attention: str
    config: object

    def set_attn_implementation(self, name: str) -> None: ...

    def generate(self, inputs: Tensor, **options: object) -> object: ...


class _Generated(Protocol):
    """The part of generate's result that is used."""

    past_key_values: object
    sequences: Tensor
    sequences_scores: Tensor


Generate = Callable[..., _Generated]


class _Halt(StoppingCriteria):
    """A criterion that ends all sequences once a peer is stopped."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return torch.full((input_ids.shape[0],), self._peer.stopped, dtype=torch.bool, device=input_ids.device)


class TransformersPeer(Peer):
    """A comparator that runs transformers' generate over loaded models."""

    def __init__(
        self,
        config: PeerSettings,
        target: BaseForestModel,
        draft: BaseForestModel | None,
        codec: HFCodec,
        sampling: SamplingConfig,
        batch_size: int,
        catalogue: Catalogue | None = None,
    ) -> None:
        """draft: needed by `assisted` only. catalogue: the allowed answers, enforced by `prefix_allowed_tokens_fn`."""
        super().__init__(config, target, codec, sampling, batch_size)
        self._module = cast("_Generating", target.stock())
        self._assistant = draft.stock() if draft is not None and config.kind == "assisted" else None
        assert self._assistant is not None or config.kind != "assisted", "assisted generation needs a draft"
        self._catalogue = catalogue
        self._rules = self._token_rules()
        self._settings = self._generation_config()

    def run(self, prompts: Sequence[Asked], seed: int) -> Iterator[Delivered]:
        """Yield the answers to tokenised prompts, speech or pictures, in order. Torch's global random state is
        restored."""
        with stock_attention(self._module), _seeded(seed, self._target.device):
            yield from super().run(prompts, seed)

    def _read(self, source: Request) -> EncoderRequest:
        """Return the features of speech or a picture, and the tokens that the decoder begins with."""
        assert isinstance(self._codec, Seq2SeqCodec)
        asked = self._codec.encoder_input(replace(source, sampling=self._sampling))
        return asked if asked.listen is None else self._in_language(asked, asked.listen)

    def _in_language(self, asked: EncoderRequest, listen: Callable[[Tensor], tuple[list[int], str]]) -> EncoderRequest:
        """Return the request with the language that the model detects, as transformers' detect_language does."""
        assert isinstance(self._target, Seq2SeqForestModel)
        start = torch.tensor([asked.prompt[:1]], device=self._target.device)
        logits = self._target.plain(start, asked.encoder_input)[0, -1]
        return replace(asked, prompt=listen(logits)[0], listen=None)

    def _token_rules(self) -> TokenRules:
        """Return the token rules that our engine would apply. Raises ModelError for one that transformers has not."""
        default = "checkpoint" if isinstance(self._codec, Seq2SeqCodec) else "none"
        rules = self._sampling.rules(self._target.token_rules, default).within(self._target.vocab_size)
        if unknown := [
            name for name in rules.acting if name in OF_REQUESTS and name not in ("logit_bias", "timestamps")
        ]:
            raise ModelError(f"transformers' generate has no {unknown[0]}: leave it out of --methods")
        return rules

    def _generation_config(self) -> GenerationConfig:
        asked, eos = self._sampling, list(self._codec.eos_ids)
        chosen: dict[str, object] = {"do_sample": self.config.samples, "num_beams": self.config.num_beams}
        if self.config.samples:
            chosen |= {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
            chosen |= {"min_p": asked.min_p} if asked.min_p else {}
        if self.config.num_beams > 1:
            chosen |= {"length_penalty": asked.length_penalty, "early_stopping": asked.early_stopping}
            chosen |= {"num_return_sequences": asked.n_best}
        chosen |= {name: value for name, value in self._rules.acting.items() if name not in OF_REQUESTS}
        if bias := self._rules.logit_bias:
            chosen["sequence_bias"] = [[[token], number] for token, number in bias]
        if isinstance(self._codec, Seq2SeqCodec):
            forced, start = self._codec.begin(self._sampling)
            chosen["decoder_start_token_id"] = start
            chosen |= {} if forced is None else {"forced_bos_token_id": forced}
        return GenerationConfig(
            max_new_tokens=asked.max_new_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            stop_strings=list(asked.stop) or None,
            return_dict_in_generate=True,
            output_scores=self.config.scores,
            **chosen,
        )

    def _batch(self, prompts: Sequence[Asked]) -> Iterator[Delivered]:
        sources = [self._read(request) for request in prompts if isinstance(request, Request)]
        if not sources:
            texts = [text for text in prompts if not isinstance(text, Request)]
            yield from self._answers(len(texts), *self._padded(texts))
        # padding would change what the model reads, so only inputs of one shape share a batch
        for _, alike in itertools.groupby(sources, key=lambda source: (source.encoder_input.shape, len(source.prompt))):
            together = list(alike)
            yield from self._answers(len(together), *self._stacked(together), whole=True)

    def _answers(
        self, count: int, inputs: Tensor, first_new: int, options: dict[str, object], *, whole: bool = False
    ) -> Iterator[Delivered]:
        """Yield answers to `count` inputs [B, ...]. first_new: index of the first new token in the returned sequences.

        whole: call transformers' generate without what a model class has put around it.
        """
        if self._assistant is not None:
            options["assistant_model"] = self._assistant
        if self._sampling.stop:
            options["tokenizer"] = self._codec.tokenizer
        if self._catalogue is not None:
            options["prefix_allowed_tokens_fn"] = partial(self._allowed, self._catalogue.trie, first_new)
        # Whisper and BLIP override generate, and choose the decoder's first tokens in ways of their own
        plain = partial(cast("Generate", GenerationMixin.generate), self._module)
        generate = plain if whole else cast("Generate", self._module.generate)
        out = generate(
            inputs.to(self._target.device),
            generation_config=self._settings,
            stopping_criteria=StoppingCriteriaList([_Halt(self)]),
            **options,
        )
        cache_bytes = _cache_bytes(out.past_key_values) if self._assistant is None else None
        rows = out.sequences[:, first_new:].tolist()
        scores = out.sequences_scores.tolist() if self.config.scores else []
        each = len(rows) // count
        for start in range(0, len(rows), each):
            part = slice(start, start + each)
            ranked = tuple(delivered(row, self._codec.eos_ids) for row in rows[part])
            kv_bytes = None if cache_bytes is None else cache_bytes // count
            yield Delivered(ranked[0], self.text(ranked[0]), kv_bytes, ranked, tuple(scores[part]))

    def _stacked(self, sources: Sequence[EncoderRequest]) -> tuple[Tensor, int, dict[str, object]]:
        """Return features [B, ...] of one shape, how many tokens answers begin with, and options of generate."""
        begin = torch.tensor([source.prompt for source in sources], device=self._target.device)
        options: dict[str, object] = {"decoder_input_ids": begin}
        assert isinstance(self._codec, Seq2SeqCodec)
        if self._rules.timestamps and (times := self._codec.timestamps) is not None:
            config = GenerationConfig(
                eos_token_id=times.end, no_timestamps_token_id=times.first - 1, max_initial_timestamp_index=times.latest
            )
            options["logits_processor"] = LogitsProcessorList(
                [WhisperTimeStampLogitsProcessor(config, begin_index=begin.shape[1])]
            )
        features = torch.stack([source.encoder_input for source in sources]).to(self._target.weights_dtype)
        return features, begin.shape[1], options

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, int, dict[str, object]]:
        """Return tokens [B, T], the index where answers begin in the returned sequences, and options of generate."""
        width = max(map(len, prompts))
        tokens = torch.zeros((len(prompts), width), dtype=torch.int64)  # [B, T]
        mask = torch.zeros_like(tokens)
        has_encoder = isinstance(self._target, Seq2SeqForestModel)
        for row, prompt in enumerate(prompts):
            columns = slice(0, len(prompt)) if has_encoder else slice(width - len(prompt), width)
            tokens[row, columns] = torch.tensor(prompt)
            mask[row, columns] = 1
        return tokens, 1 if has_encoder else width, {"attention_mask": mask.to(self._target.device)}

    def _allowed(self, trie: Trie, width: int, row: int, ids: Tensor) -> list[int]:
        """Return the tokens that may follow; the end token for a sequence that has ended or is no allowed answer."""
        node = trie.find(ids[width:].tolist())
        return (trie.children(node) if node is not None else []) or [self._codec.eos_ids[0]]

    def _encoded_prompt(self, prompt: Asked) -> tuple[Tensor, Sequence[int]]:
        if isinstance(prompt, Request):
            asked = self._read(prompt)
            return asked.encoder_input, asked.prompt
        return torch.tensor(prompt), [self._settings.decoder_start_token_id or 0]


def _cache_bytes(cache: object) -> int:
    """Return the bytes of all keys and values in a transformers cache, those of cross-attention included."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    caches = [cache, *(part for part in parts if part is not None)]
    layers = [layer for cache in caches for layer in getattr(cache, "layers", ())]
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextlib.contextmanager
def stock_attention(module: _Generating) -> Iterator[None]:
    """Give a module that was switched to our attention transformers' own for the block. Others stay as they are."""
    ours = getattr(module.config, "_attn_implementation", None) == GROUPED
    if ours:
        module.set_attn_implementation(module.stock_attention)
    try:
        yield
    finally:
        if ours:
            module.set_attn_implementation(GROUPED)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, which transformers draws from, and restore them after the block."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
