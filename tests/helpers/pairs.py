"""Tiny random encoder-decoder models of many architectures, built in code, and transformers' beams of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from tests.helpers.tiny import V

COUNTED = {
    "vocab_size": V,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
DISTANT = {
    "vocab_size": V,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
SPEECH = {name: value for name, value in COUNTED.items() if name != "max_position_embeddings"}
SINGLE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARSE = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64}

# name -> (config class, settings)
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5Config", DISTANT),
    "flan-t5": ("T5Config", {**DISTANT, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5Config", DISTANT),
    "umt5": ("UMT5Config", DISTANT),
    "marian": ("MarianConfig", {**COUNTED, "decoder_vocab_size": V}),
    "bart": ("BartConfig", COUNTED),
    "mbart": ("MBartConfig", COUNTED),
    "m2m100": ("M2M100Config", COUNTED),
    "pegasus": ("PegasusConfig", COUNTED),
    "blenderbot": ("BlenderbotConfig", COUNTED),
    "plbart": ("PLBartConfig", COUNTED),
}
WHISPER = (
    "WhisperConfig",
    {
        **SPEECH,
        "max_source_positions": 30,
        "max_target_positions": 64,
        "num_mel_bins": 8,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
)
FIT: dict[str, tuple[str, dict[str, Any]]] = {
    **TEXT,
    "switch": ("SwitchTransformersConfig", {**DISTANT, **SPARSE}),
    "longt5": ("LongT5Config", {**DISTANT, "local_radius": 4}),
    "pegasus-x": ("PegasusXConfig", {**COUNTED, "num_global_tokens": 4, "block_size": 8}),
    "blenderbot-small": ("BlenderbotSmallConfig", COUNTED),
    "mvp": ("MvpConfig", COUNTED),
    "led": (
        "LEDConfig",
        {
            **COUNTED,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 8,
        },
    ),
    "bigbird-pegasus": ("BigBirdPegasusConfig", {**COUNTED, "attention_type": "original_full"}),
    "t5gemma": ("T5GemmaConfig", {}),
    "whisper": WHISPER,
    "moonshine": (
        "MoonshineConfig",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "intermediate_size": 48,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
    ),
    "speech2text": (
        "Speech2TextConfig",
        {
            **SPEECH,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "num_conv_layers": 2,
            "conv_kernel_sizes": (3, 3),
        },
    ),
}
UNFIT: dict[str, tuple[str, dict[str, Any]]] = {
    "nllb-moe": (
        "NllbMoeConfig",
        {**COUNTED, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64},
    ),
    "prophetnet": (
        "ProphetNetConfig",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
            "ngram": 2,
        },
    ),
    "fsmt": ("FSMTConfig", {**COUNTED, "langs": ["en", "de"], "src_vocab_size": V, "tgt_vocab_size": V}),
}


# Length penalty and early stopping: a row's own, so that all of them share one engine.
ENDINGS = ((1.0, False), (0.0, True), (2.0, True), (0.0, False), (2.0, False), (1.0, True))


def build_pair(name: str, *, seed: int = 0, scale: float = 1.0, **changes: Any) -> Any:
    """A random model in evaluation mode, with weights large enough that a wrong mask or position shows."""
    kind, settings = {**FIT, **UNFIT}[name]
    if name == "t5gemma":
        part = transformers.T5GemmaModuleConfig(**SINGLE)
        config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=V, **changes)
        config.decoder_start_token_id = 2
    else:
        config = getattr(transformers, kind)(**{**settings, **changes})
    torch.manual_seed(seed)
    speech = kind in ("WhisperConfig", "MoonshineConfig", "Speech2TextConfig")
    auto = transformers.AutoModelForSpeechSeq2Seq if speech else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config).eval()
    for label, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed_positions" not in label:
            parameter.data.normal_(0, 0.15 * scale)
        elif "embed_positions" in label and parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    start = model.config.decoder_start_token_id
    model.generation_config.decoder_start_token_id = 2 if start is None else start
    return model.requires_grad_(False)


def perturbed(model: Any, noise: float) -> Any:
    """A copy whose weights have moved a little, for a draft."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    torch.manual_seed(9)
    for parameter in copy.parameters():
        if parameter.dim() > 1:
            parameter.data.add_(torch.randn_like(parameter) * parameter.std() * noise)
    return copy.requires_grad_(False)


class NumberTokenizer:
    """Text is numbers, one a word."""

    def __init__(self) -> None:
        self.all_special_ids: list[int] = []
        self.added_tokens_decoder: dict[int, Any] = {}
        self.special_tokens_map: dict[str, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {f" {index}": index for index in range(V)}

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f" {ids}"

    def __call__(self, text: Any, **kwargs: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [[int(word) for word in line.split()] for line in text]}
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return " ".join(map(str, ids))


def pair_codec(model: Any, eos: tuple[int, ...]) -> Seq2SeqCodec:
    """Sources and answers as numbers."""
    return Seq2SeqCodec(NumberTokenizer(), eos, model.generation_config.decoder_start_token_id, model)


def beams(model: Any, source: Tensor, wanted: int, eos: list[int], new: int, **settings: Any) -> list[Any]:
    """(ids up to and with the end token, score) of transformers' beams, best first."""
    return batch_beams(model, [source.tolist()], wanted, eos, new, **settings)[0]


def batch_beams(
    model: Any, sources: list[list[int]], wanted: int, eos: list[int], new: int, **settings: Any
) -> list[list[Any]]:
    """`beams` of several sources, in one call."""
    config = model.generation_config
    config.eos_token_id, config.num_beams, config.max_length = eos, None, None
    config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
    width = max(map(len, sources))
    rows = [source + [config.pad_token_id] * (width - len(source)) for source in sources]
    out = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(
            [[position < len(source) for position in range(width)] for source in sources]
        ).long(),
        num_beams=wanted,
        num_return_sequences=wanted,
        do_sample=False,
        max_new_tokens=new,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    scores = out.sequences_scores.tolist() if wanted > 1 else [0.0] * len(sources)
    beams = []
    for row, score in zip(out.sequences[:, 1:].tolist(), scores, strict=True):
        end = next((position + 1 for position, token in enumerate(row) if token in eos), min(len(row), new))
        beams.append((row[:end], score))
    return [beams[start : start + wanted] for start in range(0, len(beams), wanted)]
