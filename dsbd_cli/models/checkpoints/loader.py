"""A checkpoint as transformers' model, ready for inference; the dtype and the devices that its spec asks for."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, UsageError, one_line, shorten
from dsbd_cli.models.checkpoints.adapters import merge_adapters
from dsbd_cli.models.checkpoints.checkpoint import CAPTIONER, Checkpoint, quiet
from dsbd_cli.models.checkpoints.gguf.for_transformers import read_by_transformers
from dsbd_cli.models.checkpoints.linearised import unread
from dsbd_cli.models.checkpoints.lm_head import install, lm_head_keys, read_trimmed_lm_head
from dsbd_cli.models.checkpoints.mamba_ssm import KEY_MAPPING
from dsbd_cli.models.checkpoints.stock import attention_of, check_numbers, check_report
from dsbd_cli.models.checkpoints.text_part import other_parts
from dsbd_cli.ops.interface import LEAST_WEIGHTS
from dsbd_cli.ops.select import packing_works, quantize_missing

SMALL_BYTES = 64 << 20  # with dtype auto, weights of up to this size are float32 on a CPU
NOWHERE = ".no-adapter"  # a folder that no checkpoint has
COMPRESSED = "compressed-tensors"
PICTURE_MODELS = (CAPTIONER, "pix2struct", "vision-encoder-decoder")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(checkpoint: Checkpoint, config: Any = None, **more: Any) -> tuple[Any, Any]:
    """Return model and tokenizer of a checkpoint, weights frozen, in evaluation mode, nothing printed.

    config: takes the place of the checkpoint's own, for a part of its layers. more: arguments for transformers.

    dtype auto is the checkpoint's own on CUDA. On the CPU it is float32, which rounds no weight, except for a large
    bfloat16 checkpoint where the processor multiplies bfloat16 itself: there half the bytes are half the time. Raises
    ModelError (unfit files, missing weights), UnsupportedModelError (no causal language model) and UsageError (device).
    """
    return load_network(checkpoint, config, **more), checkpoint.tokenizer


def load_network(checkpoint: Checkpoint, config: Any = None, kind: Any = None, **more: Any) -> Any:
    """Return the model of `load` without its tokenizer. kind: the transformers class that loads it, where it is not to
    generate."""
    placed = more or placement(checkpoint.spec)
    with quiet():
        config = config or checkpoint.config
        check_quantize(checkpoint, config)
        check_pictures(checkpoint, config)
        # transformers draws progress bars while it unpacks these, whatever its settings are
        draws_bars = checkpoint.is_gguf or _method_of(config) == COMPRESSED
        with contextlib.redirect_stderr(io.StringIO()) if draws_bars else contextlib.nullcontext():
            if not more and _dequantised_here(checkpoint, config, kind):
                model = _dequantised_model(checkpoint, config)
            else:
                model = _model(checkpoint, config, kind or _class(config), placed)
            model = merge_adapters(model, checkpoint.adapters)
    model.eval()
    model.requires_grad_(False)
    return model


def import_decoder_code(config: Any) -> None:
    """Import the module of transformers that `load_network` will need for a decoder. This takes a second or two."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with contextlib.suppress(Exception):  # `load_network` raises the error
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _model(checkpoint: Checkpoint, config: Any, kind: Any, placed: dict[str, Any]) -> Any:
    folder, name = checkpoint.path, checkpoint.name
    if not checkpoint.is_gguf and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"{name}: {folder} holds no weights (*.safetensors, *.bin)")
    lm_head = read_trimmed_lm_head(folder)
    try:
        text = config.get_text_config(decoder=True)
        sizes = (getattr(text, name, None) for name in ("num_hidden_layers", "vocab_size"))
        with read_by_transformers(checkpoint.gguf, *sizes):
            loaded: Any = kind.from_pretrained(
                **checkpoint.pretrained,
                config=config,
                dtype=dtype_of(checkpoint, config),
                attn_implementation=attention_of(config),
                weights_only=True,  # a .bin file cannot run code
                adapter_kwargs={"subfolder": NOWHERE},  # an adapter is merged where it is named, and only there
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_report names them
                **_dequantised(checkpoint, config),
                **({"key_mapping": KEY_MAPPING} if checkpoint.from_mamba_ssm else {}),
                **placed,
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"{name} does not fit in memory: {one_line(error)}") from error
    except Exception as error:
        if (refused := unsafe_pickle(folder, error, name)) is not None:
            raise refused from None
        if "Unrecognized configuration class" in str(error):
            kind = f"{name} is a {config.model_type}"
            if getattr(config, "is_encoder_decoder", False):
                others = "with an encoder only Pix2Struct, VisionEncoderDecoder, and models of text or speech are run"
                raise UnsupportedModelError(f"{kind}, which has an encoder of another kind: {others}") from None
            raise UnsupportedModelError(
                f"{kind}, which is neither a causal language model nor an encoder-decoder one"
            ) from None
        if (quantization := checkpoint.quantization) is not None:
            here = "weights are read for causal language models of transformers' own, on one device"
            reason = quantization if isinstance(quantization, str) else f"its {quantization.method} {here}"
            raise ModelError(f"{name} cannot be loaded: {one_line(error)}; {reason}") from error
        raise ModelError(f"{name} cannot be loaded: {one_line(error)}") from error
    model, report = loaded
    check_device_map(model, checkpoint.spec)
    if config.model_type == CAPTIONER:
        model.begin_as_blip()
    check_report(report, name, set() if lm_head is None else lm_head_keys(model))
    if lost := unread(config, map(str, report.get("unexpected_keys") or ())):
        raise UnsupportedModelError(
            f"{name} has {lost[0]}, a weight of linear attention, in a pickled file without an index, where "
            "such weights are not looked for: convert it to safetensors"
        )
    check_numbers(model.named_parameters(), name)
    if lm_head is not None:
        install(model, lm_head, name)
    return model


def _dequantised_here(checkpoint: Checkpoint, config: Any, kind: Any) -> bool:
    """Return whether our readers dequantise the weights: those of GPTQ, AWQ and compressed-tensors in a causal language
    model on one device. kind: see `load_network`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = kind or _class(config)
    return (
        checkpoint.quantization is not None
        and not isinstance(checkpoint.quantization, str)
        and checkpoint.spec.device_map is None
        and read_trimmed_lm_head(checkpoint.path) is None
        and (
            (kind is transformers.AutoModelForCausalLM and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING)
            or kind is transformers.AutoModelForMultimodalLM
        )
    )


def _dequantised_model(checkpoint: Checkpoint, config: Any) -> Any:
    """Return a model whose plain weights our readers have made."""
    from dsbd_cli.models.checkpoints.quantized.stock_part import stock_part

    text, dtype = config.get_text_config(decoder=True), dtype_of(checkpoint, config)
    if dtype == "auto":
        dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    try:
        model = stock_part(config, checkpoint.tensors, dtype, text.num_hidden_layers, sys.maxsize, checkpoint.name)
        check_numbers(model.named_parameters(), checkpoint.name)
        return model.to(device_of(checkpoint.spec))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(f"{checkpoint.name} does not fit in memory: {one_line(error)}") from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{checkpoint.name} cannot be loaded: {one_line(error)}") from error


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
    if other_parts(config):
        return transformers.AutoModelForMultimodalLM
    if not getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForCausalLM
    if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def check_pictures(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse BLIP's other tasks, and Pix2Struct where it draws questions into the picture. Raises
    UnsupportedModelError."""
    named = (getattr(config, "architectures", None) or [""])[0]
    if config.model_type == CAPTIONER and named not in ("", "BlipForConditionalGeneration", "BlipCaptioner"):
        raise UnsupportedModelError(f"{checkpoint.name} is a {named}, but of BLIP the captioning models alone are run")
    if getattr(config, "is_vqa", False):
        raise UnsupportedModelError(
            f"{checkpoint.name} answers questions (is_vqa), which Pix2Struct draws into the picture with a font that "
            "is no part of the checkpoint: use one that captions or reads"
        )


def load_preprocessor(checkpoint: Checkpoint, *, pictures: bool) -> Any:
    """Load the part of a checkpoint that turns files into an encoder's input: its feature extractor, for audio, or its
    image processor.

    Raises ModelError where it cannot be loaded, UsageError where pillow is not installed.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    part = "image processor" if pictures else "feature extractor"
    if pictures and importlib.util.find_spec("PIL") is None:
        raise UsageError(f"{checkpoint.name} reads pictures, which needs the extra image: pip install 'dsbd[image]'")
    try:
        if pictures:  # pillow's pixels, whether torchvision is installed or not
            return AutoImageProcessor.from_pretrained(checkpoint.path, local_files_only=True, backend="pil")
        return AutoFeatureExtractor.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{checkpoint.name}: its {part} cannot be loaded: {one_line(error)}") from error


def check_quantize(checkpoint: Checkpoint, config: Any, *, experts: bool = False) -> None:
    """Raise UsageError where int8 or int4 is asked for and not possible: they run on the CPU. experts: our decoder runs
    the model, which has a mixture of experts."""
    spec = checkpoint.spec
    if not spec.quantizes:
        return
    if spec.device_map is not None or device_of(spec).type != "cpu":
        reason: str | None = (
            f"{spec.quantize} runs on the CPU only: drop it, or place the {spec.role} there (--device cpu)"
        )
    elif getattr(config, "quantization_config", None) is not None and not checkpoint.direct:
        reason = f"{checkpoint.name} is quantised already: drop it"
    else:
        reason = quantize_missing(str(spec.quantize), experts=experts)  # last: it may have to compile kernels
    if reason is not None:
        raise _unquantizable(spec, reason)


def check_dequantized(target: Checkpoint, draft: Checkpoint | None) -> None:
    """Raise UsageError where `none` is asked for, and nothing of a pair is quantised."""
    pair = [target] if draft is None else [target, draft]
    asked = [checkpoint for checkpoint in pair if checkpoint.spec.quantize == "none"]
    if asked and all(checkpoint.stored_form is None for checkpoint in asked):
        names, verb = " and ".join(checkpoint.name for checkpoint in asked), "is" if len(asked) == 1 else "are"
        reason = f"{names} {verb} not quantised, or not in a form that is read here: drop it"
        raise _unquantizable(asked[0].spec, reason)


def too_small(spec: ModelSpec, name: str) -> UsageError:
    """Return the error of a model whose products are all too small to quantize, or those that int4 quantizes."""
    reason = f"{name} has no linear layer of {LEAST_WEIGHTS} weights or more"
    if spec.quantize == "int4":
        reason += " but queries, keys and values and the LM head, which int4 leaves to int8: take int8, or"
    else:
        reason += ":"
    return _unquantizable(spec, f"{reason} drop it")


def _unquantizable(spec: ModelSpec, reason: str) -> UsageError:
    return UsageError(f"quantize is {spec.quantize}, but {reason}", field="quantize", value=spec.quantize)


def _dequantised(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """Return the arguments that make plain weights of the blocks of GGUF and compressed-tensors, because the packed
    layers and the check of invariance need plain weights."""
    if checkpoint.is_gguf:
        from transformers import GgufConfig

        return {"quantization_config": GgufConfig(dequantize=True)}
    if _method_of(config) != COMPRESSED:
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(run_compressed=False)}


def _method_of(config: Any) -> str | None:
    """Return the method by which a checkpoint was quantised; None where it was not."""
    settings = getattr(config, "quantization_config", None)
    return settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)


def dtype_of(checkpoint: Checkpoint, config: Any) -> Any:
    """Return the dtype to compute in: `torch.dtype`, or "auto" where the checkpoint decides."""
    spec = checkpoint.spec
    if spec.dtype != "auto":
        return _DTYPES[spec.dtype]
    quantised = checkpoint.stored_form is not None
    if getattr(config, "quantization_config", None) is not None and not quantised:
        return "auto"
    stored = getattr(config.get_text_config(decoder=True), "dtype", None)
    if stored in (torch.float64, "float64"):  # nothing here computes in it
        return torch.float32
    places = spec.device if spec.device_map is None else device_map_of(spec)
    named = set(places.values()) if isinstance(places, dict) else {places}
    if not named <= {"cpu", "disk"} and torch.cuda.is_available():
        return "auto"
    if checkpoint.is_gguf or quantised:  # its levels of four to eight bits are no finer than bfloat16
        large, stored = checkpoint.weight_bytes > SMALL_BYTES // 4, torch.bfloat16
    else:
        large = checkpoint.weight_bytes > SMALL_BYTES
    halves = large and stored in (torch.bfloat16, "bfloat16") and packing_works(torch.bfloat16)
    return torch.bfloat16 if halves else torch.float32


def unsafe_pickle(folder: Path, error: BaseException, name: str) -> ModelError | None:
    """Return the error to raise for a pickle that torch refuses; None where `error` is about something else.

    torch's own text advises to load it all the same.
    """
    if "weights_only" not in str(error) or any(folder.glob("*.safetensors")):
        return None
    names = ", ".join(sorted(file.name for file in folder.glob("*.bin"))[:3])
    return ModelError(
        f"{name}: {names} is a pickle of more than tensors, which could run code and is not loaded: get the weights "
        "as safetensors"
    )


def placement(spec: ModelSpec) -> dict[str, Any]:
    """Return the keyword arguments that put the weights where the spec wants them."""
    if spec.device_map is not None:
        return {"device_map": device_map_of(spec)}
    device = device_of(spec)
    return {} if device.type == "cpu" else {"device_map": {"": str(device)}}


def device_of(spec: ModelSpec) -> torch.device:
    """Return the device that a spec without a device map names. Raises UsageError where it is not there."""
    if spec.device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return _device(spec, spec.device)


def _device(spec: ModelSpec, name: str) -> torch.device:
    """Return the CPU or the CUDA device of this name. Raises UsageError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"{spec.role} device {name!r} is not a device: use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"{spec.role} device {name!r} is not there: {count} CUDA devices are visible")
    return device


def device_map_of(spec: ModelSpec) -> Any:
    """Return the device map of a spec: a name that accelerate knows, or a device for each module. Raises UsageError."""
    text = spec.device_map or ""
    if not text.startswith("{"):
        return text
    try:
        devices = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{spec.role} device map {shorten(text)} is not JSON: {error}") from None
    if not devices:
        raise UsageError(f"{spec.role} device map {text!r} is empty: name at least one module, '' for all")
    for module, device in devices.items():
        if type(device) not in (int, str):
            raise UsageError(
                f"{spec.role} device map {text!r} puts {module!r} on {shorten(device)}, which is no device"
            )
        if device != "disk":
            _device(spec, f"cuda:{device}" if type(device) is int else device)
    return devices


def check_device_map(model: Any, spec: ModelSpec) -> None:
    """Refuse a device map with a name that no module has: it would have no effect. Raises UsageError."""
    places = device_map_of(spec)
    parts = (model.named_modules, model.named_parameters, model.named_buffers)
    names = {name for named in parts for name, _ in named(remove_duplicate=False)}
    unknown = [] if not isinstance(places, dict) else [name for name in places if name not in names]
    if unknown:
        raise UsageError(
            f"{spec.role} device map {spec.device_map!r} names {shorten(unknown[0])}, but the model has no such module"
        )
