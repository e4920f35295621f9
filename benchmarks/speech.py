"""A real Whisper beside transformers' own `generate`: texts, texts with times, languages, and the word error rate.

    python -m benchmarks.whisper_weights --from CT2_FOLDER --to WHISPER_FOLDER  # see there
    python -m benchmarks.speech --target WHISPER_FOLDER --sounds DIR

Speaks the sentences below with espeak-ng into DIR, unless their files are there. Prints n of n. Needs the extra `audio`
and jiwer.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import jiwer
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

import dsbd_cli
from dsbd_cli import MethodConfig, Request, RequestResult, SamplingConfig
from dsbd_cli.engine.models.speech import read_audio

SENTENCES = (
    "The weather was fine this morning, and we walked along the river.",
    "Please send the report to the office before five o'clock.",
    "Seven of the nine trains were late because of the snow.",
    "She bought three apples, two lemons and a loaf of bread.",
    "The museum opens at ten and closes at six in the evening.",
    "My brother lives in a small town near the mountains.",
    "We need more time to finish the work that we have started.",
    "Can you tell me where the nearest station is?",
)


def spoken(folder: Path, count: int) -> list[Path]:
    """Files of the first sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{place}.wav" for place in range(count)]
    for file, sentence in zip(files, SENTENCES, strict=False):
        if not file.exists():
            subprocess.run(["espeak-ng", "-w", str(file), sentence], check=True)
    return files


def words(text: str) -> str:
    """Without case and punctuation."""
    return " ".join("".join(letter for letter in text.lower() if letter.isalnum() or letter in " '").split())


class Stock:
    """transformers' own long-form `generate`, which detects languages and sets times by itself."""

    def __init__(self, folder: str, beams: int, new_tokens: int) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self._extractor: Any = WhisperFeatureExtractor.from_pretrained(folder)
        self._settings = {"num_beams": beams, "max_new_tokens": new_tokens, "do_sample": False}

    def features(self, file: Path) -> torch.Tensor:
        """[1, bins, frames] float32."""
        rate = self._extractor.sampling_rate
        wave = read_audio(str(file), rate, self._extractor.chunk_length).numpy()
        found: torch.Tensor = self._extractor(wave, sampling_rate=rate, return_tensors="pt").input_features
        return found

    @torch.inference_mode()
    def ids(self, features: torch.Tensor, **more: Any) -> list[int]:
        """Token ids, special ones too."""
        asked = {"language": "en", "task": "transcribe", **self._settings, **more}
        found: list[int] = self.model.generate(features, **asked)[0].tolist()
        return found

    @torch.inference_mode()
    def language(self, features: torch.Tensor) -> int:
        """The token of the language that it hears."""
        return int(self.model.detect_language(features))


def main() -> None:
    """Parse the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--sounds", type=Path, required=True)
    parser.add_argument("--num-beams", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--records", type=int, default=len(SENTENCES), choices=range(1, len(SENTENCES) + 1))
    options = parser.parse_args()
    files = spoken(options.sounds, options.records)
    method = MethodConfig(rule="search", num_beams=options.num_beams, depth=0)
    engine = dsbd_cli.load(options.target, None, method=method, batch_size=options.batch_size)
    stock, codec = Stock(options.target, options.num_beams, options.new_tokens), engine.codec
    end, times = codec.eos_ids[0], codec.timestamps.first  # type: ignore[attr-defined]

    def ours(**settings: Any) -> list[RequestResult]:
        sampling = SamplingConfig(max_new_tokens=options.new_tokens, **settings)
        found = engine.generate([Request(audio=str(file), sampling=sampling) for file in files])
        for result in found:
            result.check()
        return found

    plain, timed, heard = ours(source_lang="en"), ours(source_lang="en", token_rules="timestamps=1"), ours()
    counts = dict.fromkeys(("texts", "texts with times", "languages", "texts with the language heard"), 0)
    for file, one, two, three in zip(files, plain, timed, heard, strict=True):
        features = stock.features(file)
        text = codec.decode([token for token in stock.ids(features) if token < end])
        ids = [token for token in stock.ids(features, return_timestamps=True) if token < end or token >= times]
        language = codec.tokenizer.convert_ids_to_tokens(stock.language(features)).strip("<|>")
        counts["texts"] += one.text == text
        counts["texts with times"] += [token for token in two.hypotheses[0].token_ids if token != end] == ids
        counts["languages"] += three.language == language
        counts["texts with the language heard"] += three.text == one.text
        print(repr(one.text), three.language, flush=True)
    print(", ".join(f"{name} equal: {count} of {len(files)}" for name, count in counts.items()))
    wrong = jiwer.wer([words(one) for one in SENTENCES[: len(files)]], [words(one.text) for one in plain])
    print(f"word error rate {100 * wrong:.0f} %, {engine.exactness}")


if __name__ == "__main__":
    main()
