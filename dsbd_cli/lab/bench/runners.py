"""Runners of our engine and of others' code: they take windows of prompts, return answers, and share the models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.variant import Exactness
from dsbd_cli.config.variants import SUFFIX
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import ModelError, UsageError, one_line
from dsbd_cli.lab.bench.methods import METHODS
from dsbd_cli.lab.bench.prepare import BenchConfig, Prompt
from dsbd_cli.lab.bench.sweep import SweepSetting
from dsbd_cli.lab.peers.base import Asked, Delivered, Peer
from dsbd_cli.pick.candidate_rows import Candidate, CandidateRow
from dsbd_cli.pick.choosers import ByRisk, ByScore, ByVote, Chooser, Weights
from dsbd_cli.requests import Request, RequestResult, derive_seed
from dsbd_cli.stats import RequestStats


@dataclass(frozen=True, slots=True)
class BestAnswer:
    """The best text of one prompt.

    Attributes:
        tokens: number of delivered tokens, the end token included.
        logprob: under the raw target, in nats; None where it is not computed yet.
        stats: counters; None for others' code.
        kv_bytes: peak of this request in all caches; None where it is not known.
        error: which record has no text, and why.
        ranked: all answers, best first, each by its id, or by its text where it has none.
    """

    text: str
    tokens: int
    logprob: float | None
    stats: RequestStats | None
    kv_bytes: int | None
    error: str | None = None
    ranked: tuple[str, ...] = ()


class EngineRunner:
    """A runner of our engine on the pair's models. Its answer is the best beam, or one of several candidates chosen as
    by `dsbd pick`. Candidates are beams of one row or samples of several rows.

    Counters are those of all rows of a prompt. Caches are released after each window, so that the memory measured for a
    method is its own.
    """

    def __init__(self, pair: Engine, setting: SweepSetting, bench: BenchConfig, changes: Mapping[str, object]) -> None:
        """changes: sampling fields that are set for every prompt."""
        method, entry = setting.config, METHODS[setting.method]
        assert isinstance(method, MethodConfig)
        self._pick, self._seed, self._grammar = entry.pick, bench.seed, bench.grammar
        self._samples = method.num_beams if entry.independent else None
        if entry.independent:
            # a sample ends with the first end token that it draws
            method = replace(method, num_beams=1)
            changes = {**changes, "n_best": 1, "early_stopping": True}
        elif entry.pick is not None:
            changes = {**changes, "n_best": method.num_beams}
        self._sampling, self._changes, self.batch_size = bench.sampling, changes, bench.batch_size
        weights: Weights = "uniform" if entry.independent else "probability"
        self._chooser: Chooser = ByScore()
        if entry.pick == "vote":
            self._chooser = ByVote(weights=weights)
        elif entry.pick == "mbr":
            self._chooser = ByRisk(weights=weights)
        draft = pair.draft if method.needs_draft else None
        self._engine = pair.replace(draft=draft, method=method, batch_size=bench.batch_size, log_steps=True)
        self._slot_bytes = sum(model.kv_bytes_per_slot() for model in self._engine.models)
        self._stopped = False

    @property
    def exactness(self) -> Exactness | None:
        """Exactness of the engine."""
        return self._engine.exactness

    def run(self, prompts: Sequence[Prompt]) -> list[BestAnswer]:
        """Answer the prompts in order. After `stop` there are fewer answers."""
        samples_per_prompt = self._samples or 1
        requests = [request for prompt in prompts for request in self._requests(prompt)]
        results: list[RequestResult] = []
        if SUFFIX in self._engine.method.drafter_names:  # it would look up what it has answered in an earlier round
            self._engine = self._engine.replace()
        try:
            results += self._engine.run(requests)
        except UsageError:  # raised where a signal has stopped the engine before it began
            if not self._stopped:
                raise
        for model in self._engine.models:
            model.release()
        return [
            self._answer(prompt, results[samples_per_prompt * index : samples_per_prompt * (index + 1)])
            for index, prompt in enumerate(prompts)
            if len(results) >= samples_per_prompt * (index + 1)
        ]

    def _requests(self, prompt: Prompt) -> Iterator[Request]:
        """Yield the prompt's one request, or one for each independent sample."""
        sampling, name = prompt.sampling(self._sampling, self._changes), prompt.record.id
        if self._samples is None:
            yield prompt.request(name, prompt.seed(self._seed), sampling, self._grammar)
            return
        own = prompt.record.request
        for number in range(self._samples):
            sample = f"{name}/{number}"
            seed = derive_seed(self._seed if own is None else own.seed, sample)
            yield prompt.request(sample, seed, sampling, self._grammar)

    def logprobs(self, prompts: Sequence[Prompt], answers: Sequence[BestAnswer]) -> list[float]:
        """Return the log-probabilities of the answers, which the engine has already summed up."""
        return [answer.logprob or 0.0 for answer in answers]

    def stop(self) -> None:
        """End for good after the current iteration."""
        self._stopped = True
        self._engine.stop()

    def _answer(self, prompt: Prompt, results: list[RequestResult]) -> BestAnswer:
        stats = RequestStats.total(result.stats for result in results)
        kv_bytes = sum(result.stats.kv_peak_slots for result in results) * self._slot_bytes
        beams = [beam for result in results for beam in result.hypotheses]
        if not beams:
            return BestAnswer("", 0, None, stats, kv_bytes, f"record {prompt.record.id}: {results[0].error}")
        best = beams[0]
        if self._pick is None:
            ranked = tuple(_named(beam.answer_id, beam.text) for beam in beams)
            return BestAnswer(best.text, best.num_tokens, best.logprob, stats, kv_bytes, ranked=ranked)
        if self._pick == "exec":
            assert prompt.runs is not None, "checked before the run"
            best = next((beam for beam in beams if prompt.runs(beam.text)), best)
        else:
            candidates = tuple(Candidate(beam.text, beam.logprob, beam.score, {}) for beam in beams)
            best = beams[self._chooser.choose(CandidateRow(0, 0, prompt.record.id, "", candidates)).beam]
        return BestAnswer(best.text, best.num_tokens, best.logprob, stats, kv_bytes)


class PeerRunner:
    """A runner of the code of others. It has a comparator for each sampling that prompts ask for, which answers those
    prompts together."""

    exactness: Exactness | None = None  # that of other code is not known

    def __init__(
        self, pair: Engine, setting: SweepSetting, bench: BenchConfig, changes: Mapping[str, object], longest: int
    ) -> None:
        """changes: as in EngineRunner. longest: tokens of the longest prompt. Raises ModelError where the other code
        does not take the target."""
        self._setting, self._pair, self._bench, self._longest, self._changes = setting, pair, bench, longest, changes
        self._catalogue = pair.catalogues.get("")
        self._ends = frozenset() if self._catalogue is None else frozenset(self._catalogue.nodes.tolist())
        self._peers: dict[SamplingConfig, Peer] = {}
        self._delivered: list[tuple[Peer, Delivered]] = []
        self._stopped = False
        self.batch_size = self._peer(replace(bench.sampling, **changes)).batch_size  # type: ignore[arg-type]

    def run(self, prompts: Sequence[Prompt]) -> list[BestAnswer]:
        """Answer the prompts in order. Returns no answers for a window during which `stop` was called."""
        groups: dict[SamplingConfig, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(prompt.sampling(self._bench.sampling, self._changes), []).append(index)
        delivered: dict[int, tuple[Peer, Delivered]] = {}
        for sampling, places in groups.items():
            peer, together = self._peer(sampling), [prompts[index] for index in places]
            delivered |= {
                index: (peer, answer) for index, answer in zip(places, self._deliver(peer, together), strict=False)
            }
        if self._stopped:
            return []
        self._delivered = [delivered[index] for index in range(len(prompts))]
        return [
            BestAnswer(
                answer.text,
                len(answer.token_ids),
                None,
                None,
                answer.kv_bytes,
                ranked=tuple(self._name(peer, ids) for ids in answer.ranked),
            )
            for peer, answer in self._delivered
        ]

    def _peer(self, sampling: SamplingConfig) -> Peer:
        """Return the comparator for this sampling, made at first use. Raises ModelError."""
        config, bench = self._setting.config, self._bench
        assert not isinstance(config, MethodConfig)
        if sampling not in self._peers:
            try:
                self._peers[sampling] = config.peer(self._pair, sampling, bench.batch_size, self._longest)
            except ModelError as error:
                raise ModelError(f"{self._setting.method}: {error}") from None
        return self._peers[sampling]

    def _deliver(self, peer: Peer, prompts: Sequence[Prompt]) -> list[Delivered]:
        """Answer prompts with one comparator; after `stop` there are fewer answers. Raises ModelError."""
        peer.stopped |= self._stopped
        name = self._setting.name
        try:
            return list(peer.run(_peer_inputs(prompts), derive_seed(self._bench.seed, prompts[0].record.id)))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        except Exception as error:  # other code may raise any error for a model that it cannot decode
            reason = one_line(error)
            raise ModelError(
                f"{name}: {peer.config.whose} fails ({type(error).__name__}: {reason}): leave it out of --methods"
            ) from error

    def _name(self, peer: Peer, ids: tuple[int, ...]) -> str:
        """Name an answer in a ranking. Where there are too few answers, transformers fills up with sequences that have
        no id. Their text names them."""
        catalogue, answer_id = self._catalogue, None
        if catalogue is not None and catalogue.trie.find(ids) in self._ends:
            answer_id = catalogue.id_of(ids)
        return _named(answer_id, peer.text(ids))

    def logprobs(self, prompts: Sequence[Prompt], answers: Sequence[BestAnswer]) -> list[float]:
        """Return the log-probabilities of the last window's answers, by one plain forward of the target for each."""
        both = zip(_peer_inputs(prompts), self._delivered, strict=True)
        return [peer.logprob(asked, answer) for asked, (peer, answer) in both]

    def stop(self) -> None:
        """End after the current token."""
        self._stopped = True
        for peer in list(self._peers.values()):
            peer.stop()


def _peer_inputs(prompts: Sequence[Prompt]) -> list[Asked]:
    return [prompt.source or prompt.ids for prompt in prompts]


def _named(answer_id: str | int | None, text: str) -> str:
    """Return the name of an answer in a ranking: its id, or its text where it has none."""
    return text.strip() if answer_id is None else str(answer_id)


Runner = EngineRunner | PeerRunner


def make_runner(pair: Engine, setting: SweepSetting, bench: BenchConfig, longest: int = 0) -> Runner:
    """Make the runner of a setting. longest: tokens of the longest prompt. Raises ModelError where another code does
    not take the target."""
    ranked = any(dataset.ranks is not None for dataset in bench.datasets)  # a ranking needs all hypotheses
    changes = {"n_best": setting.config.num_beams} if ranked else {}
    if isinstance(setting.config, MethodConfig):
        return EngineRunner(pair, setting, bench, changes)
    assert bench.grammar is None, "checked by the command"
    return PeerRunner(pair, setting, bench, changes, longest)
