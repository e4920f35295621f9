"""The interface of every comparator: prompts in, delivered tokens out, and their log-probabilities under our target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsbd_cli.answer_forms import Reasoning
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.results import text_of
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import Request

Asked = Sequence[int] | Request  # token ids, or speech or a picture


@dataclass(frozen=True, slots=True)
class Delivered:
    """One answer.

    Attributes:
        token_ids: the new tokens up to and with the end token.
        text: as a reader gets it: special tokens left out, cut before a stop string.
        kv_bytes: this prompt's share of the keys and values that its batch held at the end, padding included; None
            where the other code does not give access to its cache.
        ranked: token ids of all returned sequences, best first.
        scores: what they are ranked by; empty where the settings do not ask for it.
    """

    token_ids: tuple[int, ...]
    text: str
    kv_bytes: int | None
    ranked: tuple[tuple[int, ...], ...] = ()
    scores: tuple[float, ...] = ()


class PeerSettings(Protocol):
    """Settings that a comparator reads. config.PeerConfig has them; it makes comparators, so it is in a higher
    layer."""

    @property
    def kind(self) -> str: ...

    @property
    def whose(self) -> str: ...

    @property
    def num_beams(self) -> int: ...

    @property
    def samples(self) -> bool: ...

    @property
    def max_batch(self) -> int | None: ...

    @property
    def scores(self) -> bool: ...


class Peer:
    """One comparator over a loaded target. A subclass answers a batch."""

    def __init__(
        self, config: PeerSettings, target: BaseForestModel, codec: HFCodec, sampling: SamplingConfig, batch_size: int
    ) -> None:
        """sampling: for all prompts; greedy and beam search do not read its temperature and cuts."""
        self.config, self.stopped = config, False
        self.batch_size = min(batch_size, config.max_batch or batch_size)
        self._target, self._codec, self._sampling = target, codec, sampling

    def stop(self) -> None:
        """End soon. Answers that are under way come out cut, or not at all."""
        self.stopped = True

    def run(self, prompts: Sequence[Asked], seed: int) -> Iterator[Delivered]:
        """Answer tokenised prompts, speech or pictures, in order. Raises ModelError for what cannot be answered."""
        for start in range(0, len(prompts), self.batch_size):
            if not self.stopped:
                yield from self._batch(prompts[start : start + self.batch_size])

    def _batch(self, prompts: Sequence[Asked]) -> Iterator[Delivered]:
        raise NotImplementedError

    def text(self, ids: tuple[int, ...]) -> str:
        """Return the text as a reader gets it, without the end token and cut before a stop string."""
        body = ids[:-1] if ids and ids[-1] in self._codec.eos_ids else ids
        text, marks = text_of(list(body), self._sampling, self._codec), self._codec.form.reasoning
        if marks is None:
            return text
        # as in our records, of which scores see the answer alone; the mark that begins it may stand in the prompt
        return Reasoning(marks, any(end in text for end in marks.ends)).split(text)[1]

    def logprob(self, prompt: Asked, answer: Delivered) -> float:
        """Return an answer's raw target log-probability (nats) after its prompt, by a forward of its own; not for
        timing."""
        encoder_input, begin = self._encoded_prompt(prompt)
        return sequence_logprob(self._target, encoder_input, answer.token_ids, begin)

    def _encoded_prompt(self, prompt: Asked) -> tuple[Tensor, Sequence[int]]:
        """Return a prompt [T] int64, or features, and the first tokens of answers of an encoder-decoder model."""
        assert not isinstance(prompt, Request), "speech and pictures are refused or read by the subclass"
        return torch.tensor(prompt), ()


def delivered(row: Sequence[int], eos: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens up to and with the first end token."""
    end = next((index + 1 for index, token in enumerate(row) if token in eos), len(row))
    return tuple(row[:end])


@torch.inference_mode()
def sequence_logprob(model: BaseForestModel, prompt: Tensor, answer: Sequence[int], begin: Sequence[int] = ()) -> float:
    """Return the sum of log p(token | before) over the answer, in nats, from one plain forward.

    prompt: [T] int64; for an encoder-decoder model the encoder input, token ids or features. begin: the tokens that
    answers of an encoder-decoder model begin with.
    """
    if not answer:
        return 0.0
    if isinstance(model, Seq2SeqForestModel):
        tokens = torch.tensor([[*begin, *answer]], device=model.device)
        logits = model.plain(tokens, prompt)[0, len(begin) - 1 : -1].float()
    else:
        tokens = torch.tensor([[*prompt.tolist(), *answer]], device=model.device)
        logits = model.plain(tokens)[0, len(prompt) - 1 : -1].float()  # [n, V]
    chosen = torch.tensor(answer, device=logits.device)
    return float(logits.log_softmax(-1).gather(-1, chosen[:, None]).double().sum())
