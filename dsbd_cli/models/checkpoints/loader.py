"""Load a transformers model and tokenizer from a ModelSpec, ready for inference. The network is used only where
needed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import operator
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, UsageError, one_line, shorten
from dsbd_cli.models.checkpoints.adapters import (
    adapter_name,
    adapters_bring,
    bringing,
    merge_adapters,
    misfit,
    template_in,
)
from dsbd_cli.models.checkpoints.damage import check_checkpoint, check_gguf, check_numbers, unsafe_pickle
from dsbd_cli.models.checkpoints.gguf_parts import reading_parts
from dsbd_cli.models.checkpoints.head import head_keys, install, read_head
from dsbd_cli.models.checkpoints.hub import brought, locate, stored_bytes
from dsbd_cli.models.checkpoints.linearised import mark, unread
from dsbd_cli.models.checkpoints.mamba_ssm import KEY_MAPPING, byte_tokenizer, read_config
from dsbd_cli.models.checkpoints.placement import check_device_map, device_map_of, device_of, placement
from dsbd_cli.models.checkpoints.registry import resolve
from dsbd_cli.ops.interface import LEAST_WEIGHTS
from dsbd_cli.ops.select import int8_missing, packing_works

Checkpoint = tuple[Any, Any]

SMALL_BYTES = 64 << 20  # with dtype auto, weights of up to this size are float32 on a CPU

MOST_IDS = 1 << 24  # of a vocabulary; those of known models have less than a million

NOWHERE = ".no-adapter"  # a folder that no checkpoint has

COMPRESSED = "compressed-tensors"

CAPTIONER = "blip"
PICTURE_MODELS = (CAPTIONER, "pix2struct", "vision-encoder-decoder")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(spec: ModelSpec, config: Any = None, **more: Any) -> Checkpoint:
    """Return model and tokenizer of a spec, weights frozen, in evaluation mode, nothing printed. config: takes the
    place of the checkpoint's own, for a part of its layers. more: arguments for transformers.

    dtype auto is the checkpoint's own on CUDA. On the CPU it is float32, which rounds no weight, except for a large
    bfloat16 checkpoint where the processor multiplies bfloat16 itself: there half the bytes are half the time. Raises
    ModelNotFoundError, ModelError (unfit files, missing weights), UnsupportedModelError (no causal language model) and
    UsageError (device).
    """
    with quiet():
        model = load_network(spec, config, **more)
        return model, load_tokenizer(locate(spec), spec)


def load_network(spec: ModelSpec, config: Any = None, kind: Any = None, **more: Any) -> Any:
    """Return the model of `load` without its tokenizer. kind: the transformers class that loads it, where it is not to
    generate."""
    placed = more or placement(spec)
    with quiet():
        folder = locate(spec)
        config = config or load_config(folder, spec)
        check_quantize(spec, config)
        check_pictures(spec, config)
        # transformers draws progress bars while it unpacks these, whatever its settings are
        draws_bars = is_gguf(folder) or _method_of(config) == COMPRESSED
        with contextlib.redirect_stderr(io.StringIO()) if draws_bars else contextlib.nullcontext():
            model = merge_adapters(_model(folder, spec, config, kind or _class(config), placed), spec)
    model.eval()
    model.requires_grad_(False)
    return model


def import_decoder_code(config: Any) -> None:
    """Import the module of transformers that `load_network` will need for a decoder. This takes a second or two."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with contextlib.suppress(Exception):  # `load_network` raises the error
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def eos_ids(model: Any, tokenizer: Any, spec: ModelSpec | None = None) -> tuple[int, ...]:
    """Return the tokens that end a text: the generation settings' if they name any, else the config's, else the
    tokenizer's. The tokenizer's own comes first, if it is one of them, and is one of them where an adapter of `spec`
    brings the tokenizer. Raises ModelError for what is no token id."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None and found != []:
            own = getattr(tokenizer, "eos_token_id", None)
            try:
                ids = [operator.index(token) for token in (found if isinstance(found, (list, tuple)) else [found])]
            except TypeError:
                wanted = "but must be a token id or a list of them"
                raise ModelError(f"eos_token_id of the checkpoint is {shorten(found)}, {wanted}") from None
            if spec is not None and own is not None and adapters_bring(spec, "tokenizer"):
                ids.append(own)
            known = dict.fromkeys(token for token in ids if token >= 0)  # a number below 0 stands for no token
            return tuple(sorted(known, key=lambda token: token != own))
    return ()


def load_tokenizer(folder: Path, spec: ModelSpec) -> Any:
    """Return the tokenizer of a checkpoint folder or a GGUF file, or what its adapters bring in place of it.

    Raises ModelError, also where the vocabulary of an adapter's tokenizer does not fit the checkpoint's.
    """
    tokenizer = _tokenizer_in(folder, spec)
    for adapter in bringing(spec):
        name = adapter_name(adapter, spec)
        if "tokenizer" not in brought(adapter):
            tokenizer.chat_template = template_in(adapter, name)
            continue
        own = _tokenizer_in(adapter, spec, name)
        known = tokenizer.get_vocab()
        width = load_config(folder, spec).get_text_config(decoder=True).vocab_size
        if fault := misfit(known, own.get_vocab(), width):
            hint = "--set tokenizer=base takes the base's" if spec.role == "target" else "load a merged checkpoint"
            raise ModelError(f"{name} brings a tokenizer that does not fit: {fault}: {hint}")
        own.chat_template = own.chat_template or tokenizer.chat_template
        tokenizer = own
    return tokenizer


def _tokenizer_in(folder: Path, spec: ModelSpec, name: str = "") -> Any:
    """Return the tokenizer in a folder or a GGUF file. name: of an adapter, for messages; else it is the model's."""
    if (tokenizer := byte_tokenizer(folder)) is not None:
        return tokenizer
    from transformers import AutoTokenizer

    try:
        with reading_parts(folder):
            tokenizer = AutoTokenizer.from_pretrained(**_source(folder), **_local(spec))
        last = max(tokenizer.get_vocab().values(), default=0)
    except Exception as error:
        why = f"{one_line(error)}{_tokenizer_hint(folder, spec)}"
        raise ModelError(f"{name or _name(spec)}: its tokenizer cannot be loaded: {why}") from error
    if last >= MOST_IDS:  # tables of all ids would fill the memory
        raise ModelError(
            f"{name or _name(spec)}: its tokenizer has the id {last}, but no model has more than {MOST_IDS} ids"
        )
    return tokenizer


def _tokenizer_hint(folder: Path, spec: ModelSpec) -> str:
    """Return what a user can do about a tokenizer that cannot be loaded; nothing where that is not known."""
    if read_config(folder) is not None:
        return ": mamba_ssm writes none, so put a tokenizer beside its weights"
    if folder.parent.name != "snapshots" or any(folder.glob("tokenizer*")):
        return _remote_code_hint(folder / "tokenizer_config.json", spec)
    return f": the hub cache has its weights alone, `hf download {resolve(spec.source).path}` fetches the rest"


def load_config(folder: Path, spec: ModelSpec) -> Any:
    """Return the config in a checkpoint folder or a GGUF file."""
    from transformers import AutoConfig

    if is_gguf(folder) and importlib.util.find_spec("gguf") is None:
        raise UsageError(f"{_name(spec)} is GGUF, which needs a package: pip install 'dsbd[gguf]'")
    if is_gguf(folder):
        check_gguf(folder, _name(spec))
    else:
        check_checkpoint(folder, _name(spec))
    if (config := read_config(folder)) is not None:
        return config
    try:
        with reading_parts(folder):
            config = AutoConfig.from_pretrained(**_source(folder), **_local(spec))
    except Exception as error:
        settings = folder / "config.json"
        if '"speculators_model_type"' in _text(settings):
            raise ModelError(
                f"{_name(spec)} is a draft head, and no model: it serves as --draft of its target"
            ) from None
        hint = _remote_code_hint(settings, spec)
        raise ModelError(f"{_name(spec)}: its config cannot be read: {one_line(error)}{hint}") from error
    named = getattr(config, "architectures", None)
    if not isinstance(named, list | str | None):
        raise ModelError(f"{_name(spec)}: architectures is {shorten(named)}, but must be a list of names")
    config.architectures = [named] if isinstance(named, str) else named
    mark(folder, config)
    if config.model_type == CAPTIONER:  # it has an encoder, and does not say so
        config.is_encoder_decoder = True
    return config


def _text(settings: Path) -> str:
    """Return the text of a file of settings; nothing where it is none."""
    return settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""


def _remote_code_hint(settings: Path, spec: ModelSpec) -> str:
    """Return what a user can do where a file of settings names code that is not trusted; nothing where it names
    none."""
    if spec.trust_remote_code or "auto_map" not in _text(settings):
        return ""
    return f" (it brings its own code: --trust-remote-code {spec.role} runs it)"


def _model(folder: Path, spec: ModelSpec, config: Any, kind: Any, placed: dict[str, Any]) -> Any:
    if not is_gguf(folder) and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"{_name(spec)}: {folder} holds no weights (*.safetensors, *.bin)")
    head = read_head(folder)
    try:
        with reading_parts(folder):
            loaded: Any = kind.from_pretrained(
                **_source(folder),
                **_local(spec),
                config=config,
                dtype=dtype_of(spec, config, folder),
                attn_implementation=_attention(config),
                weights_only=True,  # a .bin file cannot run code
                adapter_kwargs={"subfolder": NOWHERE},  # an adapter is merged where it is named, and only there
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_report names them
                **_dequantised(folder, config),
                **_renamed(folder),
                **placed,
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"{_name(spec)} does not fit in memory: {one_line(error)}") from error
    except Exception as error:
        if (refused := unsafe_pickle(folder, error, _name(spec))) is not None:
            raise refused from None
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModelError(
                f"{_name(spec)} is a {config.model_type}, which is neither a causal language model nor an "
                f"encoder-decoder one{_picture_hint(config)}"
            ) from None
        raise ModelError(f"{_name(spec)} cannot be loaded: {one_line(error)}") from error
    model, report = loaded
    check_device_map(model, spec)
    if config.model_type == CAPTIONER:
        model.begin_as_blip()
    _check_report(report, spec, set() if head is None else head_keys(model))
    if lost := unread(config, map(str, report.get("unexpected_keys") or ())):
        raise UnsupportedModelError(
            f"{_name(spec)} has {lost[0]}, a weight of linear attention, in a pickled file without an index, where "
            "such weights are not looked for: convert it to safetensors"
        )
    check_numbers(model.named_parameters(), _name(spec))
    if head is not None:
        install(model, head, _name(spec))
    return model


def _class(config: Any) -> Any:
    """Return the transformers class that loads the checkpoint."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    if config.model_type == CAPTIONER:
        from dsbd_cli.models.checkpoints.captioner import BlipCaptioner

        return BlipCaptioner
    if config.model_type in PICTURE_MODELS:
        return transformers.AutoModelForImageTextToText
    if getattr(config, "linear_group_size", None):
        from dsbd_cli.models.recurrent.linearised_model import LinearisedLlama

        return LinearisedLlama
    if not getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForCausalLM
    if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def _picture_hint(config: Any) -> str:
    """Return what a refusal adds for a model that looks at pictures; nothing for any other model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return ": with images only VisionEncoderDecoder, Pix2Struct and BLIP's captioner are run" if known else ""


def check_pictures(spec: ModelSpec, config: Any) -> None:
    """Refuse BLIP's other tasks, and Pix2Struct where it draws questions into the picture. Raises
    UnsupportedModelError."""
    named = (getattr(config, "architectures", None) or [""])[0]
    if config.model_type == CAPTIONER and named not in ("", "BlipForConditionalGeneration", "BlipCaptioner"):
        raise UnsupportedModelError(f"{_name(spec)} is a {named}, but of BLIP the captioning models alone are run")
    if getattr(config, "is_vqa", False):
        raise UnsupportedModelError(
            f"{_name(spec)} answers questions (is_vqa), which Pix2Struct draws into the picture with a font that is no "
            "part of the checkpoint: use one that captions or reads"
        )


def load_preprocessor(folder: Path, spec: ModelSpec, *, pictures: bool) -> Any:
    """Load the part of a checkpoint that turns files into an encoder's input: its feature extractor, for audio, or its
    image processor.

    Raises ModelError where it cannot be loaded, UsageError where pillow is not installed.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    name = "image processor" if pictures else "feature extractor"
    if pictures and importlib.util.find_spec("PIL") is None:
        raise UsageError(f"{_name(spec)} reads pictures, which needs the extra image: pip install 'dsbd[image]'")
    try:
        if pictures:  # pillow's pixels, whether torchvision is installed or not
            return AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{_name(spec)}: its {name} cannot be loaded: {one_line(error)}") from error


def is_gguf(place: Path) -> bool:
    """Return whether a checkpoint is in the form of llama.cpp: a file, maybe the first of several parts, with config,
    tokenizer and weights."""
    return place.suffix.lower() == ".gguf"


def _source(place: Path) -> dict[str, Any]:
    """Return the arguments that tell transformers' from_pretrained where to read."""
    if not is_gguf(place):
        return {"pretrained_model_name_or_path": place}
    return {"pretrained_model_name_or_path": place.parent, "gguf_file": place.name}


def check_quantize(spec: ModelSpec, config: Any) -> None:
    """Raise UsageError where int8 is asked for and not possible: it needs plain weights on the CPU."""
    if spec.quantize is None:
        return
    if spec.device_map is not None or device_of(spec).type != "cpu":
        reason: str | None = f"int8 runs on the CPU only: drop it, or place the {spec.role} there (--device cpu)"
    elif getattr(config, "quantization_config", None) is not None:
        reason = f"{_name(spec)} is quantised already: drop it"
    else:
        reason = int8_missing()  # last: it may have to compile kernels
    if reason is not None:
        raise _unquantizable(spec, reason)


def too_small(spec: ModelSpec, name: str) -> UsageError:
    """Return the error of a model whose products are all too small for int8."""
    return _unquantizable(spec, f"{name} has no linear layer of {LEAST_WEIGHTS} weights or more: drop it")


def _unquantizable(spec: ModelSpec, reason: str) -> UsageError:
    return UsageError(f"quantize is {spec.quantize}, but {reason}", field="quantize", value=spec.quantize)


def is_plain(place: Path, config: Any) -> bool:
    """Return whether the weights are safetensors files that hold what a forward computes with."""
    return (
        place.is_dir()
        and any(place.glob("model*.safetensors"))
        and getattr(config, "quantization_config", None) is None
        and read_config(place) is None
    )


def _local(spec: ModelSpec) -> dict[str, Any]:
    return {"trust_remote_code": spec.trust_remote_code, "local_files_only": True}


def _dequantised(place: Path, config: Any) -> dict[str, Any]:
    """Return the arguments that make plain weights of the blocks of GGUF and compressed-tensors, because the packed
    layers and the check of invariance need plain weights."""
    if is_gguf(place):
        from transformers import GgufConfig

        return {"quantization_config": GgufConfig(dequantize=True)}
    if _method_of(config) != COMPRESSED:
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(run_compressed=False)}


def _method_of(config: Any) -> str | None:
    """Return the method by which a checkpoint was quantised; None where it was not."""
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)


def _renamed(folder: Path) -> dict[str, Any]:
    """Return the argument that maps weight names of mamba_ssm to those of transformers; nothing for other
    checkpoints."""
    return {} if read_config(folder) is None else {"key_mapping": KEY_MAPPING}


def _check_report(report: dict[str, Any], spec: ModelSpec, elsewhere: set[str]) -> None:
    """Raise ModelError for weights that are missing or have another shape. transformers would draw them at random, and
    the text would be noise without any warning.

    elsewhere: names of weights that come from another file.
    """
    if keys := sorted(set(map(str, report.get("missing_keys") or ())) - elsewhere):
        shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        raise ModelError(f"{_name(spec)}: {len(keys)} weights are missing ({shown}): get the files again")
    if others := sorted(key for key in report.get("mismatched_keys") or () if key[0] not in elsewhere):
        found, wanted = (" x ".join(map(str, shape)) for shape in others[0][1:])
        raise ModelError(
            f"{_name(spec)}: its config does not fit its weights: {others[0][0]} is {found}, but must be {wanted} "
            f"({len(others)} such weights)"
        )


def dtype_of(spec: ModelSpec, config: Any, folder: Path) -> Any:
    """Return the dtype to compute in: `torch.dtype`, or "auto" where the checkpoint decides."""
    if spec.dtype != "auto":
        return _DTYPES[spec.dtype]
    if getattr(config, "quantization_config", None) is not None:
        return "auto"
    stored = getattr(config.get_text_config(decoder=True), "dtype", None)
    if stored in (torch.float64, "float64"):  # nothing here computes in it
        return torch.float32
    places = spec.device if spec.device_map is None else device_map_of(spec)
    named = set(places.values()) if isinstance(places, dict) else {places}
    if not named <= {"cpu", "disk"} and torch.cuda.is_available():
        return "auto"
    if is_gguf(folder):  # its blocks of four to eight bits are no finer than bfloat16
        large, stored = stored_bytes(folder) > SMALL_BYTES // 4, torch.bfloat16
    else:
        large = stored_bytes(folder) > SMALL_BYTES
    halves = large and stored in (torch.bfloat16, "bfloat16") and packing_works(torch.bfloat16)
    return torch.bfloat16 if halves else torch.float32


def _attention(config: Any) -> str | None:
    """Return the attention implementation: eager where scores are capped, because sdpa would leave the cap out.
    Otherwise None, with which transformers takes sdpa where the architecture has it."""
    text = config.get_text_config(decoder=True)
    return "eager" if getattr(text, "attn_logit_softcapping", None) is not None else None


def _name(spec: ModelSpec) -> str:
    return f"{spec.role} model {spec.source!r}"


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
