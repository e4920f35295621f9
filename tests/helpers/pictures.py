"""Tiny random models that read pictures, with tokenizer and image processor on disk, and pictures to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw

from tests.helpers.checkpoints import numbers
from tests.helpers.tiny import V

NEW = 9
END, START = 2, 6
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
DECODER = {
    "vocab_size": V,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": END,
}
BERT = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
CROSSING = ("encoder_attn", "cross", "encoder_decoder_attention", "embeddings")
T5 = {"d_kv": 8, "d_ff": 48, "hidden_size": 32, "num_layers": 2, "num_heads": 4}


def _swin() -> Any:
    return transformers.DonutSwinConfig(
        image_size=[32, 48], patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, hidden_size=32
    )


def _pair(encoder: Any, decoder: Any) -> Any:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.VisionEncoderDecoderModel(config)


def _trocr() -> Any:
    settings = {**DECODER, "cross_attention_hidden_size": 32}
    return _pair(transformers.ViTConfig(**VIT), transformers.TrOCRConfig(**settings))


def _mbart() -> Any:
    return _pair(_swin(), transformers.MBartConfig(**DECODER))


def _bert() -> Any:
    """The encoder is wider than the decoder, as in no published checkpoint of the families above."""
    return _pair(transformers.ViTConfig(**{**VIT, "hidden_size": 48}), transformers.BertConfig(**BERT))


def _gpt2() -> Any:
    settings = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return _pair(transformers.ViTConfig(**VIT), transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=END))


def _blip() -> Any:
    text = {**BERT, "encoder_hidden_size": 32, "bos_token_id": START, "eos_token_id": 3, "sep_token_id": END}
    return transformers.BlipForConditionalGeneration(transformers.BlipConfig(text_config=text, vision_config=VIT))


def _pix2struct() -> Any:
    text = {
        **T5,
        "vocab_size": V,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "decoder_start_token_id": START,
        "pad_token_id": 1,
        "eos_token_id": END,
    }
    vision = {**T5, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_embed_hidden_size": 48, "seq_len": 64}
    return transformers.Pix2StructForConditionalGeneration(
        transformers.Pix2StructConfig(text_config=text, vision_config=vision)
    )


def _fixed() -> Any:
    return transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})


def _padded() -> Any:
    return transformers.DonutImageProcessorPil(size={"height": 32, "width": 48})


def _cropped() -> Any:
    return transformers.NougatImageProcessorPil(size={"height": 32, "width": 48})


def _unpadded() -> Any:
    """Pictures of several sizes, so that sources have several lengths."""
    return transformers.DonutImageProcessorPil(size={"height": 250, "width": 250}, do_pad=False)


def _patches() -> Any:
    return transformers.Pix2StructImageProcessorPil(patch_size={"height": 4, "width": 4}, max_patches=20)


# name -> model, image processor
PICTURED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "trocr": (_trocr, _fixed),
    "donut": (_mbart, _padded),
    "nougat": (_mbart, _cropped),
    "swin": (_mbart, _unpadded),
    "vit-bert": (_bert, _fixed),
    "vit-gpt2": (_gpt2, _fixed),
    "blip": (_blip, _fixed),
    "pix2struct": (_pix2struct, _patches),
}


def save_pictured(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint whose weights are large enough that a wrong mask or position shows."""
    make, processor = PICTURED[name]
    torch.manual_seed(seed)
    model = make().eval()
    for label, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 1.0 if any(part in label for part in CROSSING) else 0.4)
    settings = model.generation_config
    settings.decoder_start_token_id, settings.bos_token_id, settings.pad_token_id = START, START, 1
    settings.eos_token_id = [END, *range(10, 20)]  # so that some answers end
    model.save_pretrained(folder)
    if name == "blip":  # whose first and last token stand elsewhere
        (folder / "generation_config.json").unlink()
    numbers().save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def draw(path: Path, text: str, size: tuple[int, int] = (120, 60), mode: str = "RGB") -> Path:
    """Write a picture with a text."""
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    pen.text((4, size[1] // 3), text, fill="black")
    pen.line((0, 2, size[0], 2 + sum(map(ord, text)) % 9), fill=(90, 20 * len(text) % 255, 40), width=3)
    picture.convert(mode).save(path)
    return path


def draw_five(folder: Path) -> list[Path]:
    """Pictures of different sizes, forms and modes."""
    return [
        draw(folder / "a.png", "HELLO 42"),
        draw(folder / "b.jpg", "a long line", (300, 40)),
        draw(folder / "c.png", "tall", (50, 140), "L"),
        draw(folder / "d.bmp", "x", (64, 64)),
        draw(folder / "e.png", "alpha", (90, 50), "RGBA"),
    ]
