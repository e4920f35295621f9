"""Random engines and batches in one process: every row must get, to the bit, what it gets alone.

    python -m benchmarks.fuzz --minutes 60                     a line per difference, and one line at the end
    python -m benchmarks.fuzz --seed 7 --configurations 20     so many, from this seed

A configuration is a tiny random model (family, dtype, int8, int4 or a quantised file as it is), a method (rule, beams,
drafter, depth), a batch size, one or two threads, and rows with settings, constraints and prompts of their own, some of
which begin alike. Rows outnumber the batch, so that places are taken again; in some configurations the target runs out
of memory on the way. Tokens, scores, log-probabilities and what is recorded of tokens are compared with those of a
second engine, which has its own copy of the model, drafts nothing and takes one row at a time.

Models and engines live on and serve later configurations: what outlives a run is looked for, too. So a difference may
need the configurations before it. Its line has the command that runs them all, and says whether the batch, and the row
alone, still give the same when they are asked again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.index import CorpusTokens, write_index
from dsbd_cli.engine.protocols import ForestModel, TextCodec
from dsbd_cli.models.checkpoints.checkpoint import open_pair
from dsbd_cli.models.checkpoints.generation import CheckpointSettings
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.decoder.load import DecoderParts, build_decoder
from dsbd_cli.models.decoder.pack import find_outliers, pack_decoder, quantize_decoder
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.pair import load_pair
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.patching import pack, quantize
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import RequestResult
from tests.helpers import pairs
from tests.helpers.checkpoints import byte_level, wrap
from tests.helpers.pairs import build_pair, pair_codec, perturbed
from tests.helpers.quantized_files import ALL_FORMS, write_form
from tests.helpers.tiny import FIT, OWN, RECURRENT, build

__all__ = ["Configuration", "Fuzzer", "RowKind"]

CAUSAL = (
    *("llama", "opt", "gpt2", "qwen2 window", "qwen3", "mistral window", "gemma2 window", "gemma3 window", "gpt-neox"),
    *("phi", "phi3", "phi3 window", "smollm3", "cohere"),
    *OWN,
)
HYBRID = ("mamba2", "qwen3-next", "lfm2", "granite-hybrid", "nemotron-h")
PAIRS = ("t5", "marian", "bart")
FILE = "llama file"  # quantised: GGUF, GPTQ, AWQ or compressed-tensors
FAMILIES = (*CAUSAL, *HYBRID, *PAIRS, FILE, FILE, FILE)
NOISE = 0.05  # of a draft's weights
# Sizes that kernels of int8 and int4 take, too. By the names that families give them.
LARGER = {
    **{"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "n_embd": 64, "ffn_dim": 96, "mamba_n_heads": 16},
    **{"word_embed_proj_dim": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    **{"shared_intermediate_size": 64, "query_pre_attn_scalar": 16, "linear_value_head_dim": 16},
}
WIDE = 1300  # a vocabulary that is searched by blocks
PATTERNS = ("[a-z]{1,6}", "(yes|no|never)", "-?[0-9]{1,4}", "[A-Z][a-z ]{2,9}[.]")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ANSWERS = (("the", "then", "there", "fox", "for"), ("select", "selects", "name", "names", "dog", "dogs", "d"))
DRAFTERS = (
    *(
        "beam",
        "beam",
        "ngram",
        "suffix",
        "suffix",
        "suffix:own",
        "retrieval",
        "grammar",
        "rsd-s",
        "rsd-c",
        "dynamic-tree",
    ),
    *("beam+ngram", "beam+suffix"),
)
Said = tuple[object, ...]


@dataclass(frozen=True)
class RowKind:
    """What may be asked of rows. constrained: by grammars and lists of answers. samples: the rule draws. small: few
    tokens, for many beams. words: tokens that a prompt may have."""

    constrained: bool
    samples: bool
    small: bool
    words: int
    beams: int

    def row(self, dice: random.Random, number: int, beginning: tuple[int, ...]) -> Request:
        """A random request."""
        prompt = beginning if dice.random() < 0.4 else ()
        prompt = (*prompt, *(dice.randrange(6, self.words) for _ in range(dice.choice((1, 2, 5, 17, 40)))))
        bound = dice.choice(("none", "none", "grammar", "allow")) if self.constrained else "none"
        grammar = allow = None
        if bound == "grammar":
            pattern = dice.choice((*PATTERNS, None))
            grammar = Grammar.json_schema(SCHEMA) if pattern is None else Grammar.regex(pattern)
        elif bound == "allow":
            allow = dice.choice(ANSWERS)
        ask: dict[str, Any] = {}
        if self.samples:
            ask["temperature"] = dice.choice((1.0, 1.0, 0.6, 1.5, 0.0))
            ask["top_k"] = dice.choice((50, 50, 20, 3, 0))
            ask["top_p"], ask["min_p"] = dice.choice((1.0, 1.0, 0.9, 0.5)), dice.choice((0.0, 0.0, 0.05))
        if self.constrained and bound == "none" and dice.random() < 0.3:
            ask["stop"] = dice.choice((("e",), (" t", "o")))
        if dice.random() < 0.2:
            ask["token_rules"] = dice.choice(("no_repeat_ngram_size=2", "repetition_penalty=1.3", "min_new_tokens=3"))
        if dice.random() < 0.2:
            ask |= dice.choice(
                (
                    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
                    {"logit_bias": ((7, 2.5), (8, -3.0))},
                    {"bad_words_ids": ((9, 10), (11,), (8, 7, 8))},
                    {"allowed_token_ids": tuple(range(0, self.words, 2))},
                )
            )
        if bound == "none" and dice.random() < 0.3:
            tokens = tuple(dice.randrange(self.words) for _ in range(dice.randint(1, 9)))
            ask |= dice.choice(({"ignore_eos": True}, {"eos_token_id": tokens}, {"stop_token_ids": tokens}))
        if dice.random() < 0.3:
            ask["num_beams"] = dice.randint(1, self.beams)
        if dice.random() < 0.3:
            ask |= {"token_logprobs": True, "top_logprobs": dice.choice((0, 2, 5))}
        sampling = SamplingConfig(
            max_new_tokens=dice.randint(1, 4 if self.small else 20),
            n_best=dice.randint(1, min(ask.get("num_beams", self.beams), 8)),
            length_penalty=dice.choice((1.0, 1.0, 0.0, 0.7, 2.0)),
            early_stopping=dice.choice((True, False, "never")),
            **ask,
        )
        seed = dice.getrandbits(40)
        return Request(id=str(number), prompt_ids=prompt, seed=seed, sampling=sampling, grammar=grammar, allow=allow)


@dataclass(frozen=True)
class Configuration:
    """What is run. quantize: int8, int4, or the form of a quantised file. fails_at: the target's forward that runs out
    of memory, 0 for none."""

    family: str
    dtype: str
    quantize: str | None
    wide: bool
    rule: str
    beams: int
    scope: str
    drafter: str
    depth: int | None
    batch: int
    threads: int
    fails_at: int
    rows: int
    row_seed: int

    @classmethod
    def random(cls, dice: random.Random, families: Sequence[str], most_beams: int) -> Configuration:
        """One of all that go together."""
        family, rule = dice.choice(families), dice.choice(("coupled", "coupled", "search"))
        beams = dice.choice([beams for beams in (1, 2, 3, 4, 4, 5, 8, 10, 13, 32, 64, 256) if beams <= most_beams])
        if beams > 32 and dice.random() < 0.7:  # they take long
            beams = 4
        causal = family in CAUSAL
        drafter = dice.choice(("none", *(DRAFTERS if family not in PAIRS else ("beam", "ngram"))))
        share = dice.random() if causal else 1.0
        quantize = "int8" if share < 0.1 else "int4" if share < 0.15 else None
        if family == FILE:
            quantize = dice.choice(ALL_FORMS)
        return cls(
            family=family,
            dtype=dice.choice(("float32", "bfloat16")),
            quantize=quantize,
            wide=causal and quantize is None and dice.random() < 0.3,
            rule=rule,
            beams=beams,
            scope=dice.choice(("pool", "pool", "beam")) if rule == "coupled" else "pool",
            drafter=drafter,
            depth=0 if drafter == "none" else dice.choice((None, 1, 3, 4)),
            batch=dice.randint(1, 5 if beams <= 32 else 2),
            threads=dice.choice((1, 1, 2)),
            fails_at=dice.randint(2, 30) if dice.random() < 0.2 else 0,
            rows=dice.randint(2, 9 if beams <= 32 else 3),
            row_seed=dice.getrandbits(32),
        )

    @property
    def model(self) -> tuple[str, str, str | None, bool]:
        """What names a model."""
        return self.family, self.dtype, self.quantize, self.wide

    def requests(self) -> list[Request]:
        """The rows."""
        dice = random.Random(self.row_seed)
        paired = self.family in PAIRS
        kind = RowKind(not paired, self.rule == "coupled", self.beams > 32, 90 if paired else 350, self.beams)
        beginning = tuple(dice.randrange(6, kind.words) for _ in range(20 if paired else dice.choice((64, 100, 130))))
        return [kind.row(dice, number, beginning) for number in range(self.rows)]


@dataclass(frozen=True)
class Loaded:
    """A target, its draft, and their codec."""

    target: ForestModel
    draft: ForestModel
    codec: TextCodec


class Fuzzer:
    """Models and engines of one process, by what made them.

    Attributes:
        differences: a line each. rows, unpromised: compared, and left out because the model keeps no bits. refused:
            models that a check at load refuses.
    """

    def __init__(self, folder: Path, *, families: Sequence[str] = FAMILIES, most_beams: int = 256) -> None:
        """folder: an empty folder for checkpoints and an index."""
        self._place, self._families, self._most_beams = folder, families, most_beams
        self._tokenizer = wrap(byte_level())
        self._loaded: dict[object, Loaded] = {}
        self._engines: dict[object, Engine] = {}
        self.differences: list[str] = []
        self.rows = self.unpromised = self.configurations = 0
        self.refused: dict[object, str] = {}

    def run(self, seed: int, number: int) -> None:
        """Configuration `number` of a seed."""
        configuration = Configuration.random(random.Random(f"{seed}:{number}"), self._families, self._most_beams)
        self.configurations += 1
        try:
            engine, _ = self._engine(configuration), self._plain(configuration)
        except Exception as error:
            self.refused[configuration.model] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return
        if engine.exactness != "same-text":
            self.unpromised += 1
            return
        requests = configuration.requests()
        results = self._beside(engine, configuration, requests)
        for request, together in zip(requests, results, strict=True):
            alone = self._plain(replace(configuration, beams=request.sampling.num_beams or configuration.beams))
            same = replace(request, sampling=replace(request.sampling, num_beams=None))
            wanted = self._alone(alone, same)
            self.rows += 1
            if together != wanted:
                again = self._beside(engine, configuration, requests)[int(request.id)]
                alone_again = self._alone(alone, same)
                self._tell(seed, number, configuration, request, (together, wanted, again, alone_again))

    def line(self, seconds: float) -> str:
        """What came of it, in one line."""
        return (
            f"fuzz: {self.configurations} configurations, {self.rows} rows compared, {len(self.differences)} differ; "
            f"{self.unpromised} configurations without a promise of bits, {len(self.refused)} models refused; "
            f"{seconds:.0f} s"
        )

    def _tell(
        self,
        seed: int,
        number: int,
        configuration: Configuration,
        request: Request,
        said: tuple[Said, Said, Said, Said],
    ) -> None:
        beside, wanted, again, alone_again = said
        position = next(
            (i for i, (beam, other) in enumerate(zip(beside, wanted, strict=False)) if beam != other), "length"
        )
        beam, other = (side[position] if isinstance(position, int) else len(side) for side in (beside, wanted))
        other_says = {beside: "the same", wanted: "what is said alone"}
        batch_says = other_says.get(again, "something else")
        asked_again = f"asked again the batch says {batch_says}, the row alone {_same(alone_again, wanted)}"
        line = (
            f"difference: row {request.id} of configuration {number}, hypothesis {position}: {beam} beside others, "
            f"{other} alone; {asked_again}; {configuration}; {request.sampling}; grammar {request.grammar}, allow "
            f"{request.allow}; python -m benchmarks.fuzz --seed {seed} --configurations {number + 1}"
        )
        self.differences.append(line)

    def _beside(self, engine: Engine, configuration: Configuration, requests: Sequence[Request]) -> list[Said]:
        with using(configuration.threads), out_of_memory(engine.target, configuration.fails_at):
            return [said(result) for result in engine.run(requests)]

    def _alone(self, engine: Engine, request: Request) -> Said:
        (result,) = engine.run([request])
        return said(result)

    def _engine(self, configuration: Configuration) -> Engine:
        drafter, settings = configuration.drafter, dict[str, object]()
        if configuration.depth is not None:
            settings["depth"] = configuration.depth
        if drafter != "none":
            settings["drafter"] = drafter
        loaded = self._models(configuration, "beside")
        if "retrieval" in drafter:
            settings["index"] = str(self._index(loaded.codec))
        return self._made(loaded, configuration, settings, configuration.batch, "beside")

    def _plain(self, configuration: Configuration) -> Engine:
        """One row at a time, without drafts, by a model of its own. A row with beams of its own has them here."""
        return self._made(self._models(configuration, "alone"), configuration, {"depth": 0}, 1, "alone")

    def _made(
        self, loaded: Loaded, configuration: Configuration, settings: dict[str, object], batch: int, role: str
    ) -> Engine:
        asked = {"rule": configuration.rule, "num_beams": configuration.beams, "warp_scope": configuration.scope}
        method = MethodConfig.of({**asked, "width": "fixed", **settings})
        key = role, configuration.model, configuration.threads, batch, repr(method)
        if key not in self._engines:
            draft = loaded.draft if method.needs_draft else None
            self._engines[key] = Engine(loaded.target, draft, loaded.codec, method, batch_size=batch)
        return self._engines[key]

    def _models(self, configuration: Configuration, role: str) -> Loaded:
        threads = configuration.threads if role == "beside" else 1
        key = role, threads, configuration.model
        if configuration.model in self.refused:
            raise ValueError(self.refused[configuration.model])
        if key not in self._loaded:
            with using(threads):  # for the check at load
                self._loaded[key] = self._load(configuration)
        return self._loaded[key]

    def _load(self, configuration: Configuration) -> Loaded:
        family, dtype, weights, wide = configuration.model
        if family in PAIRS:
            return _pair(family, getattr(torch, dtype))
        if family == FILE:
            return self._file(str(weights), dtype)
        size = WIDE if wide else len(self._tokenizer)
        if weights is not None:
            return _quantized(family, size, getattr(torch, dtype), weights, self._tokenizer)
        target, draft = (self._folder(family, size, role) for role in ("target", "draft"))
        return _opened(ModelSpec(str(target), dtype=dtype), ModelSpec(str(draft), role="draft", dtype=dtype))

    def _file(self, form: str, dtype: str) -> Loaded:
        """A quantised file, and the same file in int4 for a draft."""
        folder = self._place / form
        if not folder.exists():
            folder.mkdir()
            write_form(folder, form)
        draft = ModelSpec(str(folder), role="draft", dtype=dtype, quantize="int4")
        loaded = _opened(ModelSpec(str(folder), dtype=dtype), draft)
        if not isinstance(loaded.target, DecoderForestModel) or loaded.target.stored_form is None:
            raise ValueError(f"{form} does not run as it is stored")
        return loaded

    def _folder(self, family: str, size: int, role: str) -> Path:
        """A checkpoint; the draft's weights are the target's, moved a little."""
        folder = self._place / f"{family.replace(' ', '-')}-{size}-{role}"
        if not folder.exists():
            model = build(family, vocab_size=size, **_larger(FIT | OWN | RECURRENT, family))
            model = perturbed(model, NOISE) if role == "draft" else model
            model.to(torch.bfloat16).save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        return folder

    def _index(self, codec: TextCodec) -> Path:
        path = self._place / f"corpus-{len(codec.token_bytes())}.idx"
        if not path.exists():
            dice = random.Random(0)
            texts = [[dice.randrange(6, 350) for _ in range(40)] for _ in range(20)]
            with path.open("wb") as stream:
                write_index(stream, CorpusTokens(texts).tokens, codec.token_bytes())
        return path


def _larger(table: dict[str, tuple[str, dict[str, Any]]], family: str) -> dict[str, Any]:
    """Settings of a family in `table` that make its layers as large as LARGER says."""
    return {name: size for name, size in LARGER.items() if name in table[family][1]}


def _opened(target: ModelSpec, draft: ModelSpec) -> Loaded:
    pair = load_pair(*open_pair(target, draft))
    assert isinstance(pair.draft, BaseForestModel)
    return Loaded(pair.target, pair.draft, pair.codec)


def _pair(family: str, dtype: torch.dtype) -> Loaded:
    """A target with an encoder."""
    model = build_pair(family, scale=2.0, **_larger(pairs.FIT, family))
    draft, codec = perturbed(model, NOISE).to(dtype), pair_codec(model, (2, 3, 4))
    pack(model.to(dtype))
    target = Seq2SeqForestModel(model, family)
    _promise(target)
    return Loaded(target, Seq2SeqForestModel(draft, family), codec)


def _quantized(family: str, size: int, dtype: torch.dtype, weights: str, tokenizer: PreTrainedTokenizerFast) -> Loaded:
    """Its linear layers are int8 or int4, however small."""
    model = build(family, vocab_size=size, **_larger(FIT | OWN, family))
    noisy = perturbed(model, NOISE).to(dtype)
    model.to(dtype)
    target: BaseForestModel
    draft: BaseForestModel
    if isinstance(config := decoder_config_of(model.config), DecoderConfig) and not config.wide_rotary:
        target, draft = own, plain = [_decoder(network, config, family, dtype) for network in (model, noisy)]
        outliers = find_outliers(own.decoder, lambda: own.plain(torch.arange(64)[None] % size))
        quantize_decoder(own.decoder, outliers, weights, least=0)
        pack_decoder(plain.decoder, torch.device("cpu"))
    else:
        target = forest = CausalForestModel(model, family)
        quantize(forest.module, forest.calibrate, weights, least=0)
        forest.layers_replaced()
        draft = CausalForestModel(noisy, family)
    _promise(target)
    return Loaded(target, draft, HFCodec(tokenizer, (tokenizer.eos_token_id,)))


def _decoder(network: Any, config: DecoderConfig, family: str, dtype: torch.dtype) -> DecoderForestModel:
    """transformers' model in our own decoder."""
    state, settings = network.state_dict(), CheckpointSettings.of(network.config, {})
    tensors = {name: partial(state.__getitem__, name) for name in state}
    parts = DecoderParts(family, config, tensors, dtype, torch.device("cpu"), settings)
    return build_decoder(parts, lambda: network, frozenset())


def _promise(target: BaseForestModel) -> None:
    """As load_model does."""
    target.keep_recurrent_states_in(torch.float64)
    verdict = check(target)
    target.trust(verdict.varies, verdict.copies)


def said(result: RequestResult) -> Said:
    """What must be equal to the bit."""
    if result.error is not None:
        return (type(result.error).__name__,)
    return tuple(
        (
            beam.token_ids,
            beam.logprob.hex(),
            beam.score.hex(),
            beam.finish_reason,
            beam.valid,
            beam.answer_id,
            beam.tokens,
        )
        for beam in result.hypotheses
    )


def _same(said: Said, other: Said) -> str:
    return "the same" if said == other else "something else"


@contextmanager
def using(threads: int) -> Iterator[None]:
    """So many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def out_of_memory(model: Any, forward: int) -> Iterator[None]:
    """The model's forward of this number runs out of memory once it is done; 0: none does."""
    plain: Callable[..., object] = model.forward
    left = forward

    def failing(*args: object, **more: object) -> object:
        nonlocal left
        result, left = plain(*args, **more), left - 1
        if left == 0:
            raise torch.OutOfMemoryError("simulated")
        return result

    if not forward:
        yield
        return
    model.forward = failing
    try:
        yield
    finally:
        del model.forward


def main() -> None:
    """Fuzz for a time, or so many configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--configurations", type=int)
    parser.add_argument("--most-beams", type=int, default=256)
    parser.add_argument("--families", help="some of them, joined by commas")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    families = chosen.families.split(",") if chosen.families else FAMILIES
    begun, number, told = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(prefix="dsbd-fuzz-") as name:
        fuzzer = Fuzzer(Path(name), families=families, most_beams=chosen.most_beams)
        while time.monotonic() - begun < 60 * chosen.minutes and number != chosen.configurations:
            fuzzer.run(chosen.seed, number)
            number += 1
            for line in fuzzer.differences[told:]:
                print(line, flush=True)
            told = len(fuzzer.differences)
            if number % 50 == 0:
                print(fuzzer.line(time.monotonic() - begun), flush=True)
        for model, reason in fuzzer.refused.items():
            print(f"refused: {model}: {reason}", flush=True)
        print(fuzzer.line(time.monotonic() - begun), flush=True)


if __name__ == "__main__":
    main()
