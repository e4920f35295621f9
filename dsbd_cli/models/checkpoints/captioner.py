"""BLIP's captioner as an encoder-decoder model. In transformers it only has a `generate` of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import BlipForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput


class BlipCaptioner(BlipForConditionalGeneration):
    """BLIP's vision model and its text decoder, called as other encoder-decoder models are."""

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the vision model."""
        encoder: nn.Module = self.vision_model
        return encoder

    def begin_as_blip(self) -> None:
        """Set the first and the last token to those of BLIP's own `generate`, whatever the generation settings are."""
        text: Any = self.config.text_config
        settings = self.generation_config
        settings.decoder_start_token_id, settings.eos_token_id = text.bos_token_id, text.sep_token_id
        settings.pad_token_id = text.pad_token_id

    def forward(
        self,
        pixel_values: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Return the logits of answers [B, T] to pictures [B, C, H, W], or to the output of the vision model."""
        if encoder_outputs is None:
            encoder_outputs = self.vision_model(pixel_values=pixel_values)
        output = self.text_decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        return Seq2SeqLMOutput(logits=output.logits, past_key_values=output.past_key_values)
