"""CTranslate2 as comparator: the same weights, converted. It searches beams, and samples with one beam."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.outcome import Outcome, Runner, delivered
from benchmarks.peers.engines import convert

__all__ = ["Converted"]


class Converted:
    """A model in CTranslate2's format, in a temporary folder. Raises ModuleNotFoundError where it is not installed."""

    def __init__(self, model: Any, tokenizer: Any, dtype: str) -> None:
        import ctranslate2

        # it computes in bfloat16 on few processors; where it does not, in float32
        self.dtype = dtype if dtype in ctranslate2.get_supported_compute_types("cpu") else "float32"
        self._folder = tempfile.TemporaryDirectory(prefix="dsbd-ctranslate2-")
        source = Path(self._folder.name, "hf")
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        made = convert(source, Path(self._folder.name), self.dtype)
        self._tokenizer = tokenizer
        self._generator = ctranslate2.Generator(str(made), device="cpu", compute_type=self.dtype)

    def runner(self, prompts: list[list[int]], eos: tuple[int, ...], beams: int, batch_size: int, new: int) -> Runner:
        """Beam search with `beams` beams; with one beam, sampling from the 50 best tokens."""
        tokens = [self._tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts]
        ends = self._tokenizer.convert_ids_to_tokens(list(eos))
        settings = {"beam_size": beams} if beams > 1 else {"beam_size": 1, "sampling_topk": 50}

        def run() -> Outcome:
            count = 0
            start = time.perf_counter()
            for first in range(0, len(tokens), batch_size):
                results = self._generator.generate_batch(
                    tokens[first : first + batch_size],
                    max_length=new,
                    include_prompt_in_result=False,
                    end_token=ends,
                    return_end_token=True,
                    **settings,
                )
                count += sum(delivered(result.sequences_ids[0], eos) for result in results)
            return Outcome(time.perf_counter() - start, count)

        return run
