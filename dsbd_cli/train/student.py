"""A draft in training: made from a target, kept in checkpoints, written as an ordinary model folder.

A student is the target's own first layers, or a small Llama that reads and writes the target's tokens, or a draft head.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, OutputError, UnsupportedModelError, UsageError, one_line, writing
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.checkpoints.registry import parts_of
from dsbd_cli.models.decoder.load import spec_or_reason
from dsbd_cli.train.head import HeadStudent
from dsbd_cli.train.run_record import Form
from dsbd_cli.train.trim import copy_beside, stored_dtype

SHARE_OF_LAYERS = 4  # the draft has the target's layers divided by this number
LLAMA_LAYERS = 2
VOCABULARY, LEAST_VOCABULARY = 8192, 64  # tokens of a head: by default, and at least
HEAD_DIMS = (64, 32, 16)
MOMENTS = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class StudentShape:
    """Sizes of a draft. layers: number of its layers. hidden_size: of a small Llama; None: the target's own first
    layers, or a head. vocab: tokens of a draft head; None: a model."""

    layers: int
    hidden_size: int | None
    vocab: int | None = None

    @property
    def form(self) -> Form:
        """Form of the draft: a head or a model."""
        return "model" if self.vocab is None else "head"


def student_shape(
    spec: ModelSpec,
    layers: int | None,
    hidden_size: int | None,
    form: Form | None = None,
    vocab: int | None = None,
) -> StudentShape:
    """Work out the draft to be made of the target of `spec`, from its config alone.

    layers None: a quarter of the target's layers, or two of a Llama. form None: a head where the target is a standard
    decoder and neither layers nor hidden_size is given, else a model. vocab: tokens of a head; None: VOCABULARY.

    Raises UsageError for sizes that make no draft of it, UnsupportedModelError and ModelError for a target that no
    draft is made of.
    """
    target = Checkpoint.open(spec)
    config = target.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"target model {spec.source!r} has an encoder: drafts are made of decoder-only targets alone"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"target model {spec.source!r} is quantized, and quantized layers cannot be trained: "
            "distil from the original; its draft serves both"
        )
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    known = spec_or_reason(target)
    sized = layers is not None or hidden_size is not None
    if form is None:
        form = "model" if sized or isinstance(known, str) else "head"
    if form == "head":
        if isinstance(known, str):
            raise UnsupportedModelError(
                f"--form head begins as a layer of a standard decoder, but {known}: give --form model"
            )
        if sized:
            given = "--layers" if layers is not None else "--hidden-size"
            raise UsageError(f"{given} would do nothing, because a head is one layer of the target's width: drop it")
        if vocab is not None and vocab < LEAST_VOCABULARY:
            raise UsageError(f"--vocab is {vocab}, but must be {LEAST_VOCABULARY} or more")
        return StudentShape(1, None, min(vocab or VOCABULARY, known.vocabulary))
    if vocab is not None:
        raise UsageError("--vocab would do nothing, because --form model keeps all tokens: trim the draft afterwards")
    if layers is not None and layers < 1:
        raise UsageError(f"--layers is {layers}, but must be 1 or more")
    if hidden_size is None:
        if total < 2:
            raise UsageError(f"the target has {total} layer, so no draft can be cut from it: give --hidden-size")
        wanted = max(1, total // SHARE_OF_LAYERS) if layers is None else layers
        if wanted >= total:
            raise UsageError(f"--layers is {wanted}, but the target has {total}: a draft of its own layers has fewer")
        return StudentShape(wanted, None)
    step = HEAD_DIMS[-1]
    if hidden_size < step or hidden_size % step or hidden_size > text.hidden_size:
        raise UsageError(
            f"--hidden-size is {hidden_size}, but must be a multiple of {step}, at most the target's {text.hidden_size}"
        )
    return StudentShape(LLAMA_LAYERS if layers is None else layers, hidden_size)


def new_student(spec: ModelSpec, shape: StudentShape, seed: int) -> nn.Module:
    """Make an untrained draft of the target, in float32 on the device of `spec`, with every weight to be trained. For a
    target with adapters it begins as the base model."""
    plain = _in_float32(spec, parts_of(spec.source)[0])
    config = _cut_config(Checkpoint.open(spec).config, shape.layers if not shape.hidden_size else 1)
    model, _ = load(Checkpoint.open(plain), config)
    return _trainable(model if shape.hidden_size is None else _small_llama(model, shape, seed))


def load_student(folder: Path, spec: ModelSpec) -> nn.Module:
    """Load the model that `save_student` has written, in float32. Raises ModelError where the files are damaged."""
    return _trainable(load(Checkpoint.open(_in_float32(spec, str(folder))))[0])


def _in_float32(spec: ModelSpec, source: str) -> ModelSpec:
    """Return how to load another checkpoint whole, in float32, on the device of `spec`."""
    return replace(spec, source=source, adapters=(), role="draft", dtype="float32", device_map=None, tensor_parallel=1)


def save_student(
    student: nn.Module, spec: ModelSpec, folder: Path, dtype: str, moments: Mapping[str, Tensor] | None = None
) -> None:
    """Write the student with its target's tokenizer, as transformers reads it. What is in `folder` is replaced as a
    whole, or stays. moments: tensors of the optimizer, from which training goes on. Raises OutputError."""
    recover(folder)
    unfinished, backup = folder.with_name(f".{folder.name}.unfinished"), _backup_path(folder)
    try:
        for path in (unfinished, backup):
            shutil.rmtree(path, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(student, spec, unfinished, dtype)
        if moments is not None:
            save_file({name: tensor.contiguous().cpu() for name, tensor in moments.items()}, unfinished / MOMENTS)
        if folder.exists():
            folder.replace(backup)
        unfinished.replace(folder)
        shutil.rmtree(backup, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OutputError):  # where the second rename failed, the first one is undone
            recover(folder)


def publish_student(student: nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Write the trained student into `folder`, next to what it holds, in the target's dtype. The config comes last,
    because without it the folder is no checkpoint. Raises OutputError."""
    whole = folder / ".draft"
    text = Checkpoint.open(spec).config.get_text_config(decoder=True)
    save_student(student, spec, whole, stored_dtype(text))
    with writing(folder):
        for path in sorted(whole.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)
        whole.rmdir()


def recover(folder: Path) -> None:
    """Restore what `folder` held where `save_student` was killed between its two renames. Raises OutputError."""
    with writing(folder):
        if not folder.exists() and _backup_path(folder).exists():
            _backup_path(folder).replace(folder)


def _backup_path(folder: Path) -> Path:
    """Return the name that `folder` has while another one takes its place."""
    return folder.with_name(f".{folder.name}.before")


def read_moments(folder: Path) -> dict[str, Tensor]:
    """Read the optimizer's tensors of a checkpoint. Raises ModelError where they are missing or damaged."""
    try:
        return load_file(folder / MOMENTS)
    except (OSError, SafetensorError) as error:
        reason = one_line(error)
        raise ModelError(f"{folder / MOMENTS} cannot be read ({reason}): remove {folder} to begin anew") from None


def _trainable(model: Any) -> nn.Module:
    """Make all weights trainable, in evaluation mode. That leaves out dropout, whose noise would differ after a
    resume."""
    student: nn.Module = model.eval().requires_grad_(True)
    return student


def _cut_config(config: Any, layers: int) -> Any:
    """Return the config of the first layers. Lists with one entry for each layer are cut to as many entries."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total and not name.startswith("_"):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def _small_llama(target: Any, shape: StudentShape, seed: int) -> Any:
    """Make a random Llama with the target's embeddings, projected on their first principal components, not centred."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert shape.hidden_size is not None
    text, size = target.config.get_text_config(decoder=True), shape.hidden_size
    table = target.get_input_embeddings().weight.detach().float()
    head_dim = next(width for width in HEAD_DIMS if size % width == 0)
    config = LlamaConfig(
        vocab_size=table.shape[0],
        hidden_size=size,
        intermediate_size=-(-size * 8 // 3 // 64) * 64,
        num_hidden_layers=shape.layers,
        num_attention_heads=size // head_dim,
        num_key_value_heads=size // head_dim,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        tie_word_embeddings=True,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(table.device)
    model.generation_config = copy.deepcopy(target.generation_config)
    axes = torch.linalg.eigh(table.double().T @ table.double()).eigenvectors[:, -size:].float()
    projected = table @ axes
    model.get_input_embeddings().weight.data.copy_(projected * (config.initializer_range / projected.std()))
    return model


def _write(student: Any, spec: ModelSpec, folder: Path, dtype: str) -> None:
    if isinstance(student, HeadStudent):
        student.write(folder, dtype)  # it reads and writes the target's tokens, and needs no tokenizer
        return
    kind: torch.dtype = getattr(torch, dtype)
    # tied weights are one tensor before and after
    made: dict[int, Tensor] = {}
    state = {
        name: made.setdefault(id(tensor), tensor.detach().to(kind) if tensor.is_floating_point() else tensor)
        for name, tensor in student.state_dict(keep_vars=True).items()
    }
    student.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    target = Checkpoint.open(spec)
    if target.is_gguf:
        target.tokenizer.save_pretrained(folder)
        return
    copy_beside(target.path, folder)
