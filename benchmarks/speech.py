"""A real Whisper beside transformers' own `generate`: texts, texts with times, languages, and the word error rate.

    python -m benchmarks.whisper_weights --from CT2_FOLDER --to WHISPER_FOLDER  # see there
    python -m benchmarks.speech --target WHISPER_FOLDER --sounds DIR
    python -m benchmarks.speech --target WHISPER_FOLDER --sounds DIR --ctranslate2 CT2_FOLDER  # seconds as well

The second compares texts. The third runs dsbd, transformers and CTranslate2 (the folder that the checkpoint was made
from, in float32 and in int8) by turns on the same sounds, and prints the word error rate and the seconds of each. All
begin with the sound file and share the code that reads it and makes its features.

Speaks the sentences below with espeak-ng into DIR, unless their files are there. Prints n of n. Needs the extra `audio`
and jiwer.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

import dsbd_cli
from benchmarks.common import markdown_table, publish
from dsbd_cli import MethodConfig, ModelSpec, Request, RequestResult, SamplingConfig
from dsbd_cli.models.transformers_backend.speech import read_audio

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
    files = [folder / f"{number}.wav" for number in range(count)]
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
        features: torch.Tensor = self._extractor(wave, sampling_rate=rate, return_tensors="pt").input_features
        return features

    @torch.inference_mode()
    def ids(self, features: torch.Tensor, **more: Any) -> list[int]:
        """Token ids, special ones too."""
        asked = {"language": "en", "task": "transcribe", **self._settings, **more}
        ids: list[int] = self.model.generate(features, **asked)[0].tolist()
        return ids

    @torch.inference_mode()
    def language(self, features: torch.Tensor) -> int:
        """The token of the language that it hears."""
        return int(self.model.detect_language(features))


class Converted:
    """The same weights in CTranslate2's format, on as many threads as torch has."""

    def __init__(self, folder: Path, kind: str, stock: Stock, beams: int, new_tokens: int, tokenizer: Any) -> None:
        """kind: float32 or int8. tokenizer: of the checkpoint. Raises ModuleNotFoundError where ctranslate2 is not
        installed."""
        import ctranslate2

        threads = {"intra_threads": torch.get_num_threads(), "inter_threads": 1}
        self._model = ctranslate2.models.Whisper(str(folder), device="cpu", compute_type=kind, **threads)
        self._view: Any = ctranslate2.StorageView.from_array
        self._features, self._tokenizer = stock.features, tokenizer
        self._begin = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
        # its own limit counts the prompt; patience 1 and length penalty 1 are what transformers has
        self._settings = {"beam_size": beams, "max_length": new_tokens + len(self._begin), "length_penalty": 1}

    def __call__(self, files: list[Path]) -> list[str]:
        """Texts."""
        features = torch.cat([self._features(file) for file in files]).numpy()
        results = self._model.generate(self._view(features), [self._begin] * len(files), **self._settings)
        return [self._tokenizer.decode(result.sequences_ids[0], skip_special_tokens=True) for result in results]


def in_turns(options: argparse.Namespace) -> None:
    """Seconds and word error rates of dsbd, transformers and CTranslate2, and the report."""
    files = spoken(options.sounds, options.records)
    stock = Stock(options.target, options.num_beams, options.new_tokens)
    method = MethodConfig(rule="search", num_beams=options.num_beams, depth=0)
    sampling = SamplingConfig(max_new_tokens=options.new_tokens, source_lang="en")
    runners: dict[str, Callable[[list[Path]], list[str]]] = {}
    for kind in options.kinds:
        spec = ModelSpec(
            options.target,
            dtype="float32" if kind == "int8" else kind,
            quantize="int8" if kind == "int8" else None,
        )
        engine = dsbd_cli.load(spec, None, method=method, batch_size=options.batch_size)
        codec: Any = engine.codec

        def ours(some: list[Path], engine: Any = engine) -> list[str]:
            results = engine.generate([Request(audio=str(file), sampling=sampling) for file in some])
            for result in results:
                result.check()
            return [result.text for result in results]

        runners[f"dsbd, {kind}"] = ours
    end = codec.eos_ids[0]

    def theirs(some: list[Path]) -> list[str]:
        return [codec.decode([token for token in stock.ids(stock.features(file)) if token < end]) for file in some]

    runners["transformers, float32"] = theirs
    for kind in ("float32", "int8"):
        runners[f"CTranslate2, {kind}"] = Converted(
            options.ctranslate2, kind, stock, options.num_beams, options.new_tokens, codec.tokenizer
        )
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    said: dict[str, list[str]] = {}
    for run in runners.values():
        run(files[:1])
    for _ in range(options.rounds):
        for name, run in runners.items():
            start, texts = time.perf_counter(), []
            for first in range(0, len(files), options.batch_size):
                texts += run(files[first : first + options.batch_size])
            seconds[name].append(time.perf_counter() - start)
            said[name] = texts
    meant = [words(sentence) for sentence in SENTENCES[: len(files)]]
    runs = [
        {
            "method": name,
            "seconds": seconds[name],
            "word_error_rate": jiwer.wer(meant, [words(text) for text in texts]),
            "texts_as_transformers": sum(
                a.strip() == b.strip() for a, b in zip(texts, said["transformers, float32"], strict=True)
            ),
            "texts": texts,
        }
        for name, texts in said.items()
    ]
    table = markdown_table(
        [
            {
                "method": str(run["method"]),
                "median seconds": f"{statistics.median(seconds[str(run['method'])]):.2f}",
                "from, to": f"{min(seconds[str(run['method'])]):.2f}, {max(seconds[str(run['method'])]):.2f}",
                "word error rate": f"{100 * run['word_error_rate']:.0f} %",
                "texts as transformers": f"{run['texts_as_transformers']} of {len(files)}",
            }
            for run in runs
        ]
    )
    together = f"batches of {options.batch_size} (transformers: one at a time)"
    title = f"Speech: {options.target}, {options.num_beams} beams, {together}"
    publish(options.name, runs, title, f"Seconds are of all {len(files)} files, reading them included.", table)


def main() -> None:
    """Parse the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--sounds", type=Path, required=True)
    parser.add_argument("--num-beams", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--records", type=int, default=len(SENTENCES), choices=range(1, len(SENTENCES) + 1))
    parser.add_argument("--ctranslate2", type=Path, help="folder in its format: compare seconds with it")
    parser.add_argument(
        "--kinds", nargs="+", default=["float32", "int8"], choices=("float32", "bfloat16", "int8"), help="of dsbd"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="speech")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.ctranslate2 is not None:
        in_turns(options)
        return
    files = spoken(options.sounds, options.records)
    method = MethodConfig(rule="search", num_beams=options.num_beams, depth=0)
    engine = dsbd_cli.load(options.target, None, method=method, batch_size=options.batch_size)
    stock, codec = Stock(options.target, options.num_beams, options.new_tokens), engine.codec
    end, times = codec.eos_ids[0], codec.timestamps.first  # type: ignore[attr-defined]

    def ours(**settings: Any) -> list[RequestResult]:
        sampling = SamplingConfig(max_new_tokens=options.new_tokens, **settings)
        results = engine.generate([Request(audio=str(file), sampling=sampling) for file in files])
        for result in results:
            result.check()
        return results

    plain, timed, heard = ours(source_lang="en"), ours(source_lang="en", token_rules="timestamps=1"), ours()
    counts = dict.fromkeys(("texts", "texts with times", "languages", "texts with the language heard"), 0)
    for file, plain_result, timed_result, heard_result in zip(files, plain, timed, heard, strict=True):
        features = stock.features(file)
        text = codec.decode([token for token in stock.ids(features) if token < end])
        ids = [token for token in stock.ids(features, return_timestamps=True) if token < end or token >= times]
        language = codec.tokenizer.convert_ids_to_tokens(stock.language(features)).strip("<|>")
        counts["texts"] += plain_result.text == text
        counts["texts with times"] += [token for token in timed_result.hypotheses[0].token_ids if token != end] == ids
        counts["languages"] += heard_result.language == language
        counts["texts with the language heard"] += heard_result.text == plain_result.text
        print(repr(plain_result.text), heard_result.language, flush=True)
    print(", ".join(f"{name} equal: {count} of {len(files)}" for name, count in counts.items()))
    wrong = jiwer.wer(
        [words(sentence) for sentence in SENTENCES[: len(files)]], [words(result.text) for result in plain]
    )
    print(f"word error rate {100 * wrong:.0f} %, {engine.exactness}")


if __name__ == "__main__":
    main()
