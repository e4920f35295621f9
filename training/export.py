"""Write the pair into the package in bfloat16: `python -m training.export --work DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GenerationConfig

from training.scores import load

BUILTIN = Path(__file__).parents[1] / "dsbd_cli" / "models" / "builtin"


def export(source: Path, folder: Path) -> None:
    """A checkpoint with its tokenizer, in bfloat16."""
    model, tokenizer = load(source)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    """Parse the options and export target and draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=BUILTIN)
    options = parser.parse_args()
    export(options.work / "target", options.to / "target")
    export(options.work / "distilled", options.to / "draft")


if __name__ == "__main__":
    main()
