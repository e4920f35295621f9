"""A checkpoint on this machine: opened once, and handed on to whatever reads a part of it.

A tensor library is imported only for a part that needs it, so that a wrong name fails at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dsbd_cli.config.checking import check_processor
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, ModelNotFoundError, UsageError, one_line, shorten
from dsbd_cli.models.checkpoints import digest
from dsbd_cli.models.checkpoints.adapters import Adapter, misfit, open_adapters, template_in
from dsbd_cli.models.checkpoints.damage import check_checkpoint, check_gguf
from dsbd_cli.models.checkpoints.generation import eos_ids, read_generation
from dsbd_cli.models.checkpoints.gguf.for_transformers import read_by_transformers
from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts, whole_gguf
from dsbd_cli.models.checkpoints.hub import ADAPTER_CONFIG, cached_folder, folder_of, gguf_files
from dsbd_cli.models.checkpoints.registry import Location, expanded, hub_location, parts_of, resolve

if TYPE_CHECKING:
    from dsbd_cli.models.checkpoints.gguf.file import GgufFile
    from dsbd_cli.models.checkpoints.quantized.settings import Quantization
    from dsbd_cli.models.tokenizer import HFCodec

Tensors = Mapping[str, Callable[[], Any]]
"""For the name of each tensor of a checkpoint, a function that reads the tensor, or a QuantizedWeight."""

MOST_IDS = 1 << 24  # of a vocabulary; those of known models have less than a million
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CAPTIONER = "blip"
READ_ONCE = ("config", "gguf", "quantization")  # properties that depend on the files alone


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model, and how it is to be loaded.

    Attributes:
        spec: how the model is to be loaded.
        path: the folder of the files; or the GGUF file, the first of several parts, with config, tokenizer and weights.
        adapters: those that are merged into the weights, in order.
    """

    spec: ModelSpec
    path: Path
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def open(cls, spec: ModelSpec, *, fetch: bool = True) -> Checkpoint:
        """Find the checkpoint of a spec and its adapters. Files of the hub that are not here yet are fetched; without
        `fetch` the small files of the model must be here, and are enough.

        Raises ModelNotFoundError, ModelError for a folder that is no checkpoint, and UsageError for adapters that
        cannot be merged, or for a wrong DSBD_CPU.
        """
        check_processor()
        if not fetch:
            _check_cached_adapters(spec)
        location = resolve(spec.source, spec.role)
        here = None if fetch or location.kind != "hub" else _cached(location, spec)
        adapters = open_adapters(spec)
        return cls(spec, here or _path_of(location, spec), adapters)

    def like(self, **settings: Any) -> Checkpoint:
        """Return the same files, not read again, with other settings of their spec."""
        other = replace(self, spec=replace(self.spec, **settings))
        vars(other).update({name: value for name, value in vars(self).items() if name in READ_ONCE})
        return other

    @property
    def name(self) -> str:
        """The model in messages."""
        return f"{self.spec.role} model {self.spec.source!r}"

    @property
    def is_gguf(self) -> bool:
        """Whether it is in the form of llama.cpp."""
        return self.path.suffix.lower() == ".gguf"

    @property
    def files(self) -> list[Path]:
        """All files, those of adapters too."""
        own = sorted(self.path.iterdir()) if self.path.is_dir() else gguf_parts(self.path)
        return [*own, *(file for adapter in self.adapters for file in sorted(adapter.path.iterdir()))]

    @property
    def folders(self) -> list[Path]:
        """The folder, or the file, of the model, and the folders of its adapters."""
        return [self.path, *(adapter.path for adapter in self.adapters)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights. Copies in other forms beside them do not count."""
        if self.path.is_file():
            return sum(part.stat().st_size for part in gguf_parts(self.path))
        for pattern in (WHOLE, "model-*.safetensors", "*.safetensors", "*.bin"):
            if files := [file for file in self.path.glob(pattern) if file.is_file()]:
                return sum(file.stat().st_size for file in files)
        return 0

    @property
    def plain(self) -> bool:
        """Whether the weights are safetensors files that hold what a forward computes with."""
        return (
            not self.adapters
            and self.path.is_dir()
            and any(self.path.glob("model*.safetensors"))
            and getattr(self.config, "quantization_config", None) is None
            and not self.from_mamba_ssm
        )

    @property
    def direct(self) -> bool:
        """Whether the files hold the tensors of a forward, plain or in a quantised form that is read here."""
        if self.adapters:
            return False
        if self.gguf is not None:
            return self.gguf.reads(self.config.model_type)
        return self.plain or (self.stored_form is not None and any(self.path.glob("model*.safetensors")))

    @cached_property
    def quantization(self) -> Quantization | str | None:
        """How the weights of safetensors files were quantised, or the reason why they are not read here; None for plain
        weights and GGUF."""
        from dsbd_cli.models.checkpoints.quantized.settings import quantization_of

        try:
            settings = json.loads(_text(self.path / "config.json"))
            text = settings.get("text_config") or {}
            named = settings.get("quantization_config") or text.get("quantization_config")
        except (ValueError, AttributeError, RecursionError):  # GGUF, or what reading the config will report
            return None
        return quantization_of(SimpleNamespace(quantization_config=named))

    @property
    def stored_form(self) -> str | None:
        """Name of the form in which the files hold quantised weights that are read here: gptq, awq, compressed-tensors,
        mxfp4, or gguf-q4_k and other types of GGUF. None: plain weights, or a form that is not read."""
        if self.gguf is not None:
            return self.gguf.form
        return None if self.quantization is None or isinstance(self.quantization, str) else self.quantization.method

    @property
    def from_mamba_ssm(self) -> bool:
        """Whether the package mamba_ssm has written it."""
        from dsbd_cli.models.checkpoints.mamba_ssm import stored_config

        return stored_config(self.path) is not None

    @property
    def bringing(self) -> tuple[Adapter, ...]:
        """The adapters whose tokenizer or chat template is used, in order."""
        return tuple(adapter for adapter in self.adapters if adapter.brings) if self.spec.tokenizer is None else ()

    @property
    def generation(self) -> dict[str, Any]:
        """The generation settings. Raises ModelError."""
        return read_generation(self.path)

    def end_tokens(self, model: Any, tokenizer: Any) -> tuple[int, ...]:
        """Return the end tokens of a model of this checkpoint, see `eos_ids`. An adapter that brings a tokenizer has
        been trained to end with its token."""
        return eos_ids(model, tokenizer, own_too=any("tokenizer" in adapter.brings for adapter in self.bringing))

    @property
    def tensors(self) -> Tensors:
        """The tensors of safetensors files, or of a GGUF file under transformers' names. The files are open as long as
        the mapping is held. Raises ModelError."""
        from safetensors import SafetensorError

        if self.gguf is not None:
            return self.gguf.decoder_tensors
        try:
            tensors = read_tensors(self.path)
            if self.quantization is not None and not isinstance(self.quantization, str):
                from dsbd_cli.models.checkpoints.quantized.groupwise import quantized_tensors
                from dsbd_cli.models.checkpoints.quantized.mxfp4 import mxfp4_tensors

                if self.quantization.method == "mxfp4":
                    return mxfp4_tensors(tensors, self.name)
                return quantized_tensors(tensors, self.quantization, self.name)
            return tensors
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(f"{self.name} cannot be loaded: {one_line(error)}") from error

    @property
    def digests(self) -> dict[str, str]:
        """Digests of its files and of its adapters', see `digest.digests`."""
        own = self.spec.tokenizer is None
        return digest.digests(self.path, [(adapter.path, own and bool(adapter.brings)) for adapter in self.adapters])

    @property
    def commit(self) -> str | None:
        """The commit of a model of the hub, which its cache names; None for any other folder."""
        return self.path.name if self.path.parent.name == "snapshots" else None

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The GGUF file, opened and checked once; None for a folder. Raises ModelError."""
        return check_gguf(self.path, self.name) if self.is_gguf else None

    @cached_property
    def config(self) -> Any:
        """Transformers' config, read once, after the files are checked for damage. Raises ModelError, and UsageError
        where a package is missing."""
        if self.is_gguf and importlib.util.find_spec("gguf") is None:
            raise UsageError(f"{self.name} is GGUF, which needs a package: pip install 'dsbd[gguf]'")
        if self.gguf is None:
            check_checkpoint(self.path, self.name)
        from dsbd_cli.models.checkpoints import linearised, mamba_ssm

        if (config := mamba_ssm.read_config(self.path)) is not None:
            return config
        from transformers import AutoConfig

        try:
            with quiet(), read_by_transformers(self.gguf):
                config = AutoConfig.from_pretrained(**self.pretrained)
        except Exception as error:
            settings = self.path / "config.json"
            if '"speculators_model_type"' in _text(settings):
                message = f"{self.name} is a draft head, and no model: it serves as --draft of its target"
                raise ModelError(message) from None
            hint = self._code_hint(settings)
            raise ModelError(f"{self.name}: its config cannot be read: {one_line(error)}{hint}") from error
        named = getattr(config, "architectures", None)
        if not isinstance(named, list | str | None):
            raise ModelError(f"{self.name}: architectures is {shorten(named)}, but must be a list of names")
        config.architectures = [named] if isinstance(named, str) else named
        if self.gguf is not None:
            from dsbd_cli.models.checkpoints.gguf.attention import scale_attention
            from dsbd_cli.models.checkpoints.gguf.experts import set_experts
            from dsbd_cli.models.checkpoints.gguf.rotary import scale_rotary

            set_experts(config, self.gguf)
            scale_attention(config, self.gguf)
            scale_rotary(config, self.gguf)
        linearised.mark(self.path, config)
        if config.model_type == CAPTIONER:  # it has an encoder, and does not say so
            config.is_encoder_decoder = True
        return config

    @cached_property
    def tokenizer(self) -> Any:
        """Its transformers tokenizer, or what its adapters bring in place of it, read once.

        Raises ModelError, also where the vocabulary of an adapter's tokenizer does not fit the checkpoint's.
        """
        with quiet():
            tokenizer = self._tokenizer_at(self.path, self.name)
            for adapter in self.bringing:
                if "tokenizer" not in adapter.brings:
                    tokenizer.chat_template = template_in(adapter)
                    continue
                own = self._tokenizer_at(adapter.path, adapter.name)
                width = self.config.get_text_config(decoder=True).vocab_size
                if fault := misfit(tokenizer.get_vocab(), own.get_vocab(), width):
                    target = self.spec.role == "target"
                    hint = "--set tokenizer=base takes the base's" if target else "load a merged checkpoint"
                    raise ModelError(f"{adapter.name} brings a tokenizer that does not fit: {fault}: {hint}")
                own.chat_template = own.chat_template or tokenizer.chat_template
                tokenizer = own
            return tokenizer

    @property
    def pretrained(self) -> dict[str, Any]:
        """The arguments of transformers' from_pretrained: where it reads, and what it may do."""
        files: dict[str, Any] = {"pretrained_model_name_or_path": self.path}
        if self.is_gguf:
            files = {"pretrained_model_name_or_path": self.path.parent, "gguf_file": self.path.name}
        return files | {"trust_remote_code": self.spec.trust_remote_code, "local_files_only": True}

    @property
    def codec(self) -> HFCodec:
        """The codec of the checkpoint, from its small files alone. Raises ModelError."""
        from dsbd_cli.models.tokenizer import HFCodec

        settings = SimpleNamespace(config=self.config, generation_config=SimpleNamespace(**self.generation))
        return HFCodec(self.tokenizer, self.end_tokens(settings, self.tokenizer))

    def _tokenizer_at(self, path: Path, name: str) -> Any:
        """Return the tokenizer of this checkpoint, or of an adapter. name: of either, for messages."""
        from dsbd_cli.models.checkpoints.mamba_ssm import byte_tokenizer

        if (tokenizer := byte_tokenizer(path)) is not None:
            return tokenizer
        from transformers import AutoTokenizer

        try:
            with read_by_transformers(self.gguf if path == self.path else None):
                tokenizer = AutoTokenizer.from_pretrained(**replace(self, path=path).pretrained)
            last = max(tokenizer.get_vocab().values(), default=0)
        except Exception as error:
            why = f"{one_line(error)}{self._tokenizer_hint(path)}"
            raise ModelError(f"{name}: its tokenizer cannot be loaded: {why}") from error
        if last >= MOST_IDS:  # tables of all ids would fill the memory
            raise ModelError(f"{name}: its tokenizer has the id {last}, but no model has more than {MOST_IDS} ids")
        return tokenizer

    def _tokenizer_hint(self, path: Path) -> str:
        """Return what a user can do about a tokenizer that cannot be loaded; nothing where that is not known."""
        if self.from_mamba_ssm and path == self.path:
            return ": mamba_ssm writes none, so put a tokenizer beside its weights"
        if path.parent.name != "snapshots" or any(path.glob("tokenizer*")):
            return self._code_hint(path / "tokenizer_config.json")
        fetch = f"`hf download {resolve(self.spec.source).path}` fetches the rest"
        return f": the hub cache has its weights alone, {fetch}"

    def _code_hint(self, settings: Path) -> str:
        """Return what a user can do where a file of settings names code that is not trusted; nothing where it names
        none."""
        if self.spec.trust_remote_code or "auto_map" not in _text(settings):
            return ""
        return f" (it brings its own code: --trust-remote-code {self.spec.role} runs it)"


def open_pair(
    target: ModelSpec, draft: ModelSpec | None, *, fetch: bool = True
) -> tuple[Checkpoint, Checkpoint | None]:
    """Open the checkpoints of a target and its draft, which are the same files where the draft is the target's own MTP
    layer."""
    checkpoint = Checkpoint.open(target, fetch=fetch)
    if draft is None:
        return checkpoint, None
    if draft.in_target:
        return checkpoint, replace(checkpoint, spec=draft, adapters=open_adapters(draft))
    return checkpoint, Checkpoint.open(draft, fetch=fetch)


def _path_of(location: Location, spec: ModelSpec) -> Path:
    """Return the path of a checkpoint whose name is resolved. Files of the hub are fetched if they are not here yet."""
    if location.kind == "hub":
        return folder_of(location, spec.role)
    folder, name = Path(location.path), f"{spec.role} model {spec.source!r}"
    if location.kind == "file":
        return whole_gguf(folder, name)
    if files := gguf_files(folder):
        if len(files) == 1:
            return whole_gguf(files[0], name)
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{name} holds {len(files)} GGUF files: give one of {names}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: {folder} holds no config.json, so it is no checkpoint folder")
    return folder


def _cached(location: Location, spec: ModelSpec) -> Path:
    """Return the folder of a hub repository that is here at least with its small files. Raises ModelNotFoundError."""
    folder = cached_folder(location)
    if folder is None:
        raise ModelNotFoundError(
            f"{spec.role} model {spec.source!r} is not on this machine: fetch it, or its small files alone with "
            f"`hf download {location.path} --include '*.json' '*.model' '*.txt'`"
        )
    return folder


def _check_cached_adapters(spec: ModelSpec) -> None:
    """Raise ModelNotFoundError for an adapter of the hub that is not on this machine."""
    for source in (*parts_of(spec.source)[1], *spec.adapters):
        adapter = None if expanded(source).exists() else hub_location(source)
        if adapter is not None and cached_folder(adapter, ADAPTER_CONFIG) is None:
            raise ModelNotFoundError(
                f"{spec.role} adapter {source!r} is not on this machine: fetch it with `hf download {adapter.path}`"
            )


def _text(settings: Path) -> str:
    """Return the text of a file of settings; nothing where it is none."""
    return settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""


def read_tensors(folder: Path) -> Tensors:
    """Return the tensors of a folder's safetensors files, memory-mapped: none is read before it is asked for.

    Raises OSError, SafetensorError and ValueError where the files cannot be read.
    """
    from safetensors import safe_open

    index, whole = folder / INDEX, folder / WHOLE
    if whole.is_file():  # transformers reads no other file either
        files = [whole]
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    tensors: dict[str, Callable[[], Any]] = {}
    for path in files:
        file = safe_open(path, "pt")
        tensors.update({name: partial(file.get_tensor, name) for name in file.keys()})  # noqa: SIM118
    return tensors


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and warnings off stderr, which is for our own messages.

    transformers stays quiet afterwards, because it also warns while it tokenizes and runs.
    """
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    for name in ("huggingface_hub", "accelerate", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
