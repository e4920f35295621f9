"""Answers by our engine and by transformers' beam search on the same weights, for people to compare."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.lab.bench.prepare import Prompt, encode_record
from dsbd_cli.lab.peers.base import Peer
from dsbd_cli.lab.peers.config import PeerConfig
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.loading import load
from dsbd_cli.stats import RequestStats

WARM_UP = "Once"  # a prompt that is never timed, so that no cache holds anything of a timed one


@dataclass(frozen=True, slots=True)
class Beam:
    """One beam of an answer. score: the value that beams are ranked by, logprob / num_tokens in nats."""

    text: str
    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class TimedBeams:
    """Beams of one prompt, best first. seconds: from the prompt's token ids to the beams. stats: counters of our
    engine; None for transformers."""

    beams: tuple[Beam, ...]
    seconds: float
    stats: RequestStats | None = None


class BesideTransformers:
    """A loaded target, on which both our engine and transformers decode prompts. Each of the two answers another prompt
    before its first timed one."""

    def __init__(self, target: ModelSpec, draft: ModelSpec | None, method: MethodConfig, max_new_tokens: int) -> None:
        """Load the models. Raises what `load` raises."""
        self._engine = load(target, draft, method=method, batch_size=1)
        self._sampling = SamplingConfig(max_new_tokens=max_new_tokens, n_best=method.num_beams)
        self._peer: Peer | None = None
        self.info = self._engine.info
        self._ours(self._encoded(WARM_UP), replace(self._sampling, max_new_tokens=2))

    @property
    def chat(self) -> bool:
        """Whether prompts go through the target's chat template, each as one message of a user."""
        return self.info is not None and self.info.chat

    def ours(self, prompt: str) -> TimedBeams:
        """Answer a prompt with our engine. Raises UsageError or RowError for a prompt that cannot be answered."""
        return self._ours(self._encoded(prompt), self._sampling)

    def load_theirs(self) -> None:
        """Load a copy of the target for transformers. Raises ModelError where transformers does not take the target."""
        list(self._beam_search(replace(self._sampling, max_new_tokens=2)).run([self._encoded(WARM_UP).ids], 0))
        self._peer = self._beam_search(self._sampling)

    def theirs(self, prompt: str) -> TimedBeams:
        """Answer a prompt with transformers' `generate(num_beams=W, do_sample=False)`. Call `load_theirs` first."""
        assert self._peer is not None
        ids = self._encoded(prompt).ids
        start = time.perf_counter()
        (delivered,) = self._peer.run([ids], 0)
        seconds = time.perf_counter() - start
        ranked = zip(delivered.ranked, delivered.scores, strict=True)
        return TimedBeams(
            tuple(Beam(self._peer.text(ids_of_beam), ids_of_beam, score) for ids_of_beam, score in ranked), seconds
        )

    def _encoded(self, text: str) -> Prompt:
        meta = {"messages": [{"role": "user", "content": text}]} if self.chat else {}
        record = TaskRecord("demo", text, "", meta)
        return Prompt(record, tuple(encode_record(record, self._engine.codec, self._sampling)[0]))

    def _ours(self, prompt: Prompt, sampling: SamplingConfig) -> TimedBeams:
        start = time.perf_counter()
        result = self._engine.generate(prompt.request(prompt.record.id, 0, sampling))
        seconds = time.perf_counter() - start
        beams = tuple(Beam(beam.text, beam.token_ids, beam.score) for beam in result.hypotheses)
        return TimedBeams(beams, seconds, result.stats)

    def _beam_search(self, sampling: SamplingConfig) -> Peer:
        config = PeerConfig("beam-search", self._engine.method.num_beams, scores=True)
        return config.peer(self._engine, sampling, 1, 0)
