"""Write tiny checkpoints for `.ci/wheel-test extras` into the current folder: an adapter of ./model, a GGUF file, a
Whisper with a second of sound, and a TrOCR with a picture. `python checkpoints.py CLONE`: only libraries of the
environment are imported."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import peft
import soundfile
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
WORDS, BINS, SECONDS, RATE = 60, 8, 1, 16000
END, START, ENGLISH, TRANSCRIBE, TIMELESS = range(WORDS, WORDS + len(SPECIAL))
IDS = {"pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START}


def adapter() -> None:
    """A LoRA adapter with random weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    wanted = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, wanted).save_pretrained("adapter")


def save_tokenizer(folder: str) -> None:
    """A word per token, and Whisper's special tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{index}": index for index in range(WORDS)}, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0]).save_pretrained(folder)


def whisper() -> None:
    """A random model with its tokenizer and feature extractor, and a sound file."""
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    config = transformers.WhisperConfig(
        **sizes,
        **IDS,
        vocab_size=WORDS + len(SPECIAL),
        d_model=32,
        num_mel_bins=BINS,
        max_source_positions=50 * SECONDS,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained("whisper")
    settings = Path("whisper/generation_config.json")
    more = {
        "decoder_start_token_id": START,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH},
        "task_to_id": {"transcribe": TRANSCRIBE},
        "no_timestamps_token_id": TIMELESS,
    }
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **more}))
    save_tokenizer("whisper")
    transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS).save_pretrained("whisper")
    rate = 44100  # another one than the model's, so that it is resampled
    soundfile.write("sound.wav", [0.5 * math.sin(2 * math.pi * 440 * at / rate) for at in range(rate // 2)], rate)


def trocr() -> None:
    """A random model with its tokenizer and image processor, and a picture."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**layers, image_size=32, patch_size=8),
        transformers.TrOCRConfig(
            **IDS,
            vocab_size=WORDS + len(SPECIAL),
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            cross_attention_hidden_size=32,
        ),
    )
    model = transformers.VisionEncoderDecoderModel(config)
    model.generation_config = transformers.GenerationConfig(**IDS)
    model.save_pretrained("trocr")
    save_tokenizer("trocr")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained("trocr")
    picture = Image.new("RGB", (120, 60), "white")
    ImageDraw.Draw(picture).text((4, 20), "HELLO 42", fill="black")
    picture.save("picture.png")


def main() -> None:
    """Write all of them."""
    adapter()
    gguf = runpy.run_path(str(Path(sys.argv[1]) / "tests" / "helpers" / "tiny_gguf.py"))
    gguf["write_gguf"](gguf["tiny_qwen2"](), Path("tiny.gguf"))
    whisper()
    trocr()


if __name__ == "__main__":
    main()
