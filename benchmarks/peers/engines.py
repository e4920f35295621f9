"""CTranslate2 and llama.cpp on the target's own weights, as methods of bench: same prompts, as token ids, same limits.

CTranslate2 converts the checkpoint's folder, in a process of its own and into a temporary folder. llama.cpp reads the
GGUF file that --target names; what it hands out is text, whose tokens it counts itself.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypedDict, cast

import torch

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import ModelError
from dsbd_cli.lab.bench.methods import BEAMS, Method
from dsbd_cli.lab.peers.base import Asked, Delivered, Peer, delivered
from dsbd_cli.lab.peers.config import PeerConfig, PeerName
from dsbd_cli.models.checkpoints.registry import resolve
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import Request

__all__ = ["METHODS", "CTranslateConfig", "CTranslatePeer", "LlamaConfig", "LlamaPeer", "SeparatePeer", "convert"]

LAST = 200  # characters of another program's message
NO_TOKEN = "<|no such token|>"


class _Result(Protocol):
    """What is used of CTranslate2's."""

    sequences_ids: list[list[int]]


class _Generator(Protocol):
    def generate_batch(self, start_tokens: list[list[str]], **options: object) -> list[_Result]: ...


class _Choice(TypedDict):
    """What is used of llama.cpp's answers."""

    text: str
    finish_reason: str


class _Server(Protocol):
    def handle_completions(self, request: dict[str, object]) -> dict[str, object]: ...


class SeparatePeer(Peer):
    """A comparator that loads the weights a second time, in a form of its own."""

    def __init__(
        self, config: PeerConfig, target: BaseForestModel, codec: HFCodec, sampling: SamplingConfig, batch_size: int
    ) -> None:
        """Raises ModelError for what neither can do."""
        super().__init__(config, target, codec, sampling, batch_size)
        if sampling.stop or sampling.token_rules or sampling.own_rules or sampling.bad_words:
            unsupported = "stop strings" if sampling.stop else "token rules"
            raise ModelError(f"{config.whose} takes no {unsupported}: leave it out of --methods")

    def _batch(self, prompts: Sequence[Asked]) -> Iterator[Delivered]:
        ids = [prompt for prompt in prompts if not isinstance(prompt, Request)]
        if len(ids) < len(prompts):
            raise ModelError(f"{self.config.whose} is given no speech and no pictures: leave it out of --methods")
        return self._answers(ids)

    def _answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[Delivered]:
        raise NotImplementedError


class CTranslatePeer(SeparatePeer):
    """CTranslate2, greedy or beam search."""

    def __init__(
        self,
        config: CTranslateConfig,
        model_path: Path,
        target: BaseForestModel,
        codec: HFCodec,
        sampling: SamplingConfig,
        batch_size: int,
    ) -> None:
        """model_path: the checkpoint's folder. Raises ModelError where CTranslate2 cannot convert it."""
        super().__init__(config, target, codec, sampling, batch_size)
        self._generator = _generator(model_path, config.dtype, torch.get_num_threads())

    def _answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[Delivered]:
        asked, ends = self._sampling, list(self._codec.eos_ids)
        results = self._generator.generate_batch(
            [[self._codec.tokenizer.convert_ids_to_tokens(token) for token in prompt] for prompt in prompts],
            beam_size=self.config.num_beams,
            num_hypotheses=asked.n_best if self.config.num_beams > 1 else 1,
            length_penalty=asked.length_penalty,
            max_length=asked.max_new_tokens,
            end_token=ends or None,
            return_end_token=True,
            include_prompt_in_result=False,
        )
        for result in results:
            ranked = tuple(delivered(ids, ends) for ids in result.sequences_ids)
            yield Delivered(ranked[0], self.text(ranked[0]), None, ranked)


@functools.lru_cache(maxsize=4)
def _generator(model_path: Path, dtype: str, threads: int) -> _Generator:
    """Greedy and beam search share one."""
    import ctranslate2

    with tempfile.TemporaryDirectory(prefix="dsbd-ctranslate2-") as folder:
        made = convert(model_path, Path(folder), dtype)
        generator = ctranslate2.Generator(str(made), device="cpu", compute_type=dtype, intra_threads=threads)
        return cast("_Generator", generator)


def convert(model_path: Path, folder: Path, dtype: str) -> Path:
    """The checkpoint in CTranslate2's format, in a new folder below `folder`. Raises ModelError."""
    made = folder / "ctranslate2"
    command = [sys.executable, "-m", "ctranslate2.converters.transformers", "--model", str(model_path)]
    done = subprocess.run(
        [*command, "--output_dir", str(made), "--quantization", dtype], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = " ".join((done.stderr.strip().splitlines() or ["no message"])[-1].split())[:LAST]
        raise ModelError(f"CTranslate2 cannot convert {model_path} ({said}): leave it out of --methods")
    # it refuses a tokenizer without begin or unknown tokens
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config = {name: NO_TOKEN if value is None else value for name, value in config.items()}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


class LlamaPeer(SeparatePeer):
    """llama.cpp's server inside this process, greedy, one prompt at a time. It keeps the last prompt, and reads what
    differs in the next one."""

    def __init__(
        self,
        config: PeerConfig,
        model_path: Path,
        target: BaseForestModel,
        codec: HFCodec,
        sampling: SamplingConfig,
        room: int,
    ) -> None:
        """model_path: a GGUF file. room: tokens of the longest prompt with its answer, and one more."""
        super().__init__(config, target, codec, sampling, 1)
        self._server = _server(model_path, room, torch.get_num_threads())

    def _answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[Delivered]:
        for prompt in prompts:
            reply = self._server.handle_completions(
                {
                    "prompt": list(prompt),
                    "n_predict": self._sampling.max_new_tokens,
                    "temperature": 0.0,
                    "cache_prompt": True,
                }
            )
            if "choices" not in reply:
                said = " ".join(str(reply).split())[:LAST]
                raise ModelError(f"llama.cpp fails: {said}: leave it out of --methods, or give shorter prompts")
            choice = cast("list[_Choice]", reply["choices"])[0]
            ended = choice["finish_reason"] == "stop"
            (body,) = self._codec.encode_pieces([choice["text"]])
            ids = (*body, *(self._codec.eos_ids[:1] if ended else ()))
            yield Delivered(ids, choice["text"], None, (ids,))


@functools.lru_cache(maxsize=1)
def _server(model_path: Path, room: int, threads: int) -> _Server:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model_path)
    params.n_ctx, params.n_parallel, params.verbosity = room, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return cast("_Server", xllamacpp.Server(params))


@dataclass(frozen=True, slots=True)
class CTranslateConfig(PeerConfig):
    """One of CTranslate2's methods. dtype: that it computes in."""

    dtype: Literal["float32", "int8"] = "float32"

    whose: ClassVar[str] = "CTranslate2"
    does: ClassVar[tuple[PeerName, ...]] = ("greedy", "beam-search")

    def peer(self, pair: Engine, sampling: SamplingConfig, batch_size: int, longest: int) -> Peer:
        """Make the comparator; see PeerConfig.peer."""
        model_path, target, codec = _taken(pair, "folder", "ctranslate2")
        return CTranslatePeer(self, model_path, target, codec, sampling, batch_size)


@dataclass(frozen=True, slots=True)
class LlamaConfig(PeerConfig):
    """llama.cpp's greedy decoding."""

    whose: ClassVar[str] = "llama.cpp"
    does: ClassVar[tuple[PeerName, ...]] = ("greedy",)

    @property
    def max_batch(self) -> int | None:
        """Sequences that it can decode together."""
        return 1

    def peer(self, pair: Engine, sampling: SamplingConfig, batch_size: int, longest: int) -> Peer:
        """Make the comparator; see PeerConfig.peer."""
        model_path, target, codec = _taken(pair, "file", "xllamacpp")
        room = longest + sampling.max_new_tokens + 1  # it ends an answer one token before the room is full
        return LlamaPeer(self, model_path, target, codec, sampling, room)


FORMS = {"folder": "a folder of safetensors", "file": "a GGUF file"}


def _taken(pair: Engine, kind: str, package: str) -> tuple[Path, BaseForestModel, HFCodec]:
    """Where the target's file or folder lies, and the loaded target. Raises ModelError where it is none that the other
    engine takes, or where its package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ModelError(f"it needs a package: pip install {package}")
    target, codec = pair.target, pair.codec
    if not isinstance(target, BaseForestModel) or not isinstance(codec, HFCodec):
        raise ModelError("the target is no transformers model; leave it out of --methods")
    if pair.catalogues or isinstance(target, Seq2SeqForestModel) or target.device.type != "cpu":
        why = "--allow" if pair.catalogues else "a target with an encoder, or on a GPU"
        raise ModelError(f"it does not go with {why}: leave it out of --methods")
    assert pair.info is not None
    resolved = resolve(pair.info.target)
    if resolved.kind != kind:
        raise ModelError(f"it reads {FORMS[kind]}, but --target is {pair.info.target}: leave it out of --methods")
    return Path(resolved.path), target, codec


METHODS: dict[str, Method] = {
    "ct2-greedy": Method(peer=CTranslateConfig("greedy")),
    "ct2-beam-search": Method(axes=BEAMS, peer=CTranslateConfig("beam-search")),
    "ct2-int8-greedy": Method(peer=CTranslateConfig("greedy", dtype="int8")),
    "ct2-int8-beam-search": Method(axes=BEAMS, peer=CTranslateConfig("beam-search", dtype="int8")),
    "llama-cpp-greedy": Method(peer=LlamaConfig("greedy")),
}
