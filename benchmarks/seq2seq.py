"""Encoder-decoder models: beams of transformers beside ours, interleaved, and how well words are spelled in phonemes.

    python -m benchmarks.seq2seq --shape opus-mt --num-beams 4,5                    # random weights: speed alone
    python -m benchmarks.seq2seq --shape opus-mt --num-beams 4 --ctranslate2 float32 int8
    python -m benchmarks.seq2seq --target T --draft D --data test.jsonl             # checkpoints of your own
    python -m benchmarks.seq2seq --target R/target --data R/test.jsonl --num-beams 1,4,10 --batch-size 1 --new-tokens 60
    python -m benchmarks.seq2seq --target G/target --draft G/draft --data G/test.jsonl --num-beams 1,4,8

The fourth is a copy task (training/reactions.py). A line of the data is `{"prompt": ..}`, and `phonemes`, a list of
right answers, where errors are to be counted (see training/grapheme_phoneme.py). Random weights know no draft that is
worth anything, so a shape is run without one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

import dsbd_cli
from benchmarks.common import markdown_table, numbers, publish
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.lab.peers.config import PeerConfig
from dsbd_cli.lab.peers.transformers_generate import TransformersPeer

# model class, config class, vocabulary, width, layers, heads, width of the inner layer
SHAPES: dict[str, tuple[Any, Any, int, int, int, int, int]] = {
    "tiny": (MarianMTModel, MarianConfig, 200, 64, 2, 2, 128),
    "opus-mt": (MarianMTModel, MarianConfig, 58101, 512, 6, 8, 2048),
    "nllb-600m": (M2M100ForConditionalGeneration, M2M100Config, 256206, 1024, 12, 16, 4096),
}
# ids of tokens that end, fill up and are unknown, and of the first word. M2M100's positions begin behind the id that
# fills up, and CTranslate2 takes it to be 1
SPECIAL: dict[Any, tuple[int, int, int, int]] = {
    MarianMTModel: (0, -1, 1, 2),
    M2M100ForConditionalGeneration: (2, 1, 3, 4),
}


def make_shape(name: str, folder: Path) -> None:
    """A checkpoint of this shape with random weights, whose tokens are numbers."""
    kind, config, vocabulary, width, layers, heads, inner = SHAPES[name]
    torch.manual_seed(0)
    end, pad, unknown, _ = (token % vocabulary for token in SPECIAL[kind])
    model = kind(
        config(
            vocab_size=vocabulary,
            d_model=width,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=inner,
            decoder_ffn_dim=inner,
            max_position_embeddings=512,
            pad_token_id=pad,
            bos_token_id=end,
            eos_token_id=end,
            decoder_start_token_id=pad if kind is MarianMTModel else end,
            forced_eos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(vocabulary)}
    for word, index in (("</s>", end), ("<unk>", unknown), ("<pad>", pad)):
        del words[f"w{index}"]
        words[word] = index
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="</s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def read(path: Path, count: int) -> list[dict[str, Any]]:
    """The first lines of the data."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def errors(said: list[str], rows: list[dict[str, Any]]) -> float:
    """Phoneme error rate: edits to the nearest right answer, over the phonemes of that answer."""
    import jiwer

    wrong = total = 0
    for text, row in zip(said, rows, strict=True):
        alignments = [jiwer.process_words(right, text) for right in row["phonemes"]]
        counts = [
            (alignment.substitutions + alignment.deletions + alignment.insertions, len(alignment.references[0]))
            for alignment in alignments
        ]
        edits, length = min(counts, key=lambda pair: pair[0] / pair[1])
        wrong, total = wrong + edits, total + length
    return wrong / total


class ConvertedPair:
    """The same weights in CTranslate2's format, float32 or int8, on as many threads as torch has."""

    def __init__(
        self, checkpoint: str, tokenizer: Any, kind: str, beams: int, batch_size: int, new_tokens: int
    ) -> None:
        """Raises ModuleNotFoundError where ctranslate2 is not installed."""
        import ctranslate2

        with tempfile.TemporaryDirectory(prefix="dsbd-ctranslate2-") as folder:
            ctranslate2.converters.TransformersConverter(checkpoint).convert(folder, quantization=kind, force=True)
            self._translator = ctranslate2.Translator(
                folder, device="cpu", compute_type=kind, intra_threads=torch.get_num_threads(), inter_threads=1
            )
        self._tokenizer = tokenizer
        self._settings = {"beam_size": beams, "max_batch_size": batch_size, "max_decoding_length": new_tokens}

    def __call__(self, rows: list[dict[str, Any]]) -> tuple[list[str], int]:
        """Texts, and tokens of them."""
        ids = [self._tokenizer(row["prompt"])["input_ids"] for row in rows]
        tokens = [self._tokenizer.convert_ids_to_tokens(prompt) for prompt in ids]
        answers = [result.hypotheses[0] for result in self._translator.translate_batch(tokens, **self._settings)]
        kept = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}  # as our codec has it
        said = [self._tokenizer.decode(self._tokenizer.convert_tokens_to_ids(answer), **kept) for answer in answers]
        return said, sum(map(len, answers))


class Ours:
    """Our engine with one method."""

    def __init__(self, loaded: Engine, method: MethodConfig, batch_size: int, sampling: SamplingConfig) -> None:
        draft = loaded.draft if method.needs_draft else None
        self.engine = loaded.replace(draft=draft, method=method, batch_size=batch_size)
        self.sampling = sampling
        self.steps_per_call = 0.0

    def __call__(self, rows: list[dict[str, Any]]) -> tuple[list[str], int]:
        """Texts, and tokens of them."""
        results = self.engine.generate([Request(row["prompt"], sampling=self.sampling) for row in rows])
        self.steps_per_call = statistics.fmean(result.stats.steps_per_call for result in results)
        return [result.text for result in results], sum(result.hypotheses[0].num_tokens for result in results)


def runners(loaded: Engine, beams: int, options: argparse.Namespace) -> dict[str, Callable[..., tuple[list[str], int]]]:
    """The methods that are compared."""
    sampling = SamplingConfig(max_new_tokens=options.new_tokens)
    size, target, codec = options.batch_size, loaded.target, loaded.codec
    peer = TransformersPeer(
        PeerConfig("beam-search" if beams > 1 else "greedy", beams), target, None, codec, sampling, size
    )  # type: ignore[arg-type]

    def theirs(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
        results = list(peer.run([codec.encode(row["prompt"]) for row in rows], 0))
        return [result.text for result in results], sum(len(result.token_ids) for result in results)

    drafted = {"depth": options.depth, "drafts_per_layer": options.drafts_per_layer}
    drafted = {name: value for name, value in drafted.items() if value is not None}
    methods: dict[str, MethodConfig] = {"no draft": MethodConfig(rule=options.rule, num_beams=beams, depth=0)}
    if loaded.draft is not None:
        methods["draft"] = MethodConfig(rule=options.rule, num_beams=beams, **drafted)
    if not options.shape:
        methods["ngram"] = MethodConfig(rule=options.rule, num_beams=beams, drafter="ngram", **drafted)
    made: dict[str, Callable[..., tuple[list[str], int]]] = {"transformers": theirs} if not options.alone else {}
    for kind in options.ctranslate2:
        made[f"CTranslate2, {kind}"] = ConvertedPair(
            options.checkpoint, codec.tokenizer, kind, beams, size, options.new_tokens
        )  # type: ignore[attr-defined]
    return made | {f"dsbd, {name}": Ours(loaded, method, size, sampling) for name, method in methods.items()}


def measure(
    loaded: Engine, rows: list[dict[str, Any]], beams: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One line per method: seconds of each round, tokens and, where it is known, errors."""
    methods = runners(loaded, beams, options)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    said: dict[str, tuple[list[str], int]] = {}
    for run in methods.values():
        run(rows[:2])
    for _ in range(options.rounds):
        for name, run in methods.items():
            start = time.perf_counter()
            said[name] = run(rows)
            seconds[name].append(time.perf_counter() - start)
    lines = []
    for name, run in methods.items():
        texts, tokens = said[name]
        lines.append(
            {
                "method": name,
                "beams": beams,
                "seconds": seconds[name],
                "tokens": tokens,
                "same_texts": sum(a == b for a, b in zip(texts, next(iter(said.values()))[0], strict=True)),
                "steps_per_call": run.steps_per_call if isinstance(run, Ours) else 1.0,
                "per": errors(texts, rows) if all("phonemes" in row for row in rows) else None,
            }
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Parse the options, measure every number of beams and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", choices=tuple(SHAPES))
    source.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--data", type=Path, help="JSON lines with prompt; needed with --target")
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--num-beams", type=numbers, default=[4, 5])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--source-tokens", type=int, default=25, help="of a shape")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--depth", type=int, help="drafted layers; by default what measures fastest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--ctranslate2", nargs="+", default=[], choices=("float32", "int8"), help="compare with it, in these types"
    )
    parser.add_argument("--drafts-per-layer", type=int)
    parser.add_argument("--rule", choices=("search", "coupled"), default="search", help="coupled: with --alone")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--name", default="seq2seq")
    options = parser.parse_args()
    if options.rule != "search" and not options.alone:
        parser.error("--rule coupled samples, so its texts are none of transformers': add --alone")
    with tempfile.TemporaryDirectory(prefix="dsbd-seq2seq-") as folder:
        if options.shape:
            make_shape(options.shape, Path(folder))
            generator = torch.Generator().manual_seed(1)
            size = (options.records, options.source_tokens)
            first, last = SPECIAL[SHAPES[options.shape][0]][3], SHAPES[options.shape][2]
            ids = torch.randint(first, last, size, generator=generator).tolist()
            rows = [{"prompt": " ".join(f"w{token}" for token in row)} for row in ids]
        else:
            if options.data is None:
                parser.error("--target needs --data")
            rows = read(options.data, options.records)
        options.checkpoint = options.target or folder
        spec = ModelSpec(options.checkpoint, dtype=options.dtype)
        loaded = dsbd_cli.load(spec, options.draft)
        runs = [line for beams in options.num_beams for line in measure(loaded, rows, beams, options)]
    table = [
        {
            "method": run["method"],
            "beams": str(run["beams"]),
            "median seconds": f"{statistics.median(run['seconds']):.2f}",
            "from, to": f"{min(run['seconds']):.2f}, {max(run['seconds']):.2f}",
            "tokens/s": f"{run['tokens'] / statistics.median(run['seconds']):.0f}",
            "steps per call": f"{run['steps_per_call']:.2f}",
            "phoneme errors": "" if run["per"] is None else f"{100 * run['per']:.1f} %",
            "texts as the first": f"{run['same_texts']} of {len(rows)}",
        }
        for run in runs
    ]
    title = (
        f"Encoder-decoder beams: {options.shape or options.target}, {options.dtype}, batches of {options.batch_size}"
    )
    runs = [{**vars(options), **run, "data": str(options.data)} for run in runs]
    publish(options.name, runs, title, "", markdown_table(table))


if __name__ == "__main__":
    main()
