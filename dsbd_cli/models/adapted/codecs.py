"""The codec of an encoder-decoder model: of text, or of speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsbd_cli.errors import ModelError
from dsbd_cli.models.adapted.sources import Seq2SeqCodec
from dsbd_cli.models.tokenizer import HFCodec

__all__ = ["make_source_codec"]


def make_source_codec(model: Any, tokenizer: Any, eos_ids: tuple[int, ...], extractor: Callable[[], Any]) -> HFCodec:
    """The codec of an encoder-decoder model; extractor: loads what turns audio into features. Raises ModelError."""
    start = next(
        (
            value
            for source in (model.generation_config, model.config)
            for name in ("decoder_start_token_id", "bos_token_id")
            if isinstance(value := getattr(source, name, None), int)
        ),
        None,
    )
    if start is None:
        raise ModelError("the checkpoint names no decoder_start_token_id: its answers have no first token")
    if model.config.model_type == "whisper":
        from dsbd_cli.models.adapted.speech import WhisperCodec

        return WhisperCodec(tokenizer, eos_ids, start, model, extractor())
    return Seq2SeqCodec(tokenizer, eos_ids, start, model)
