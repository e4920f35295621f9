"""BLIP's captioner as an encoder-decoder model: transformers gives it a `generate` of its own, and no seam."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import BlipForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput


class BlipCaptioner(BlipForConditionalGeneration):
    """BLIP's vision model and its text decoder, called as other encoder-decoder models are."""

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the vision model."""
        found: nn.Module = self.vision_model
        return found

    def begin_as_blip(self) -> None:
        """Name the first and the last token as BLIP's own `generate` does, whatever the generation settings say."""
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
        """Logits of answers [B, T] to pictures [B, C, H, W], or to what the vision model made of them."""
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
