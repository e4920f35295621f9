"""Show answers beside their prompts: `dsbd generate < prompts.jsonl | python show.py prompts.jsonl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Read records on standard input, prompts from the file named; print each pair as it comes."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in sys.stdin:
        record = json.loads(line)
        sys.stdout.write(f"\n── {record['id']}\n{rows[record['index']]['prompt'].rstrip()}\n")
        if "error" in record:
            sys.stdout.write(f"error: {record['error']['message']}\n")
            continue
        stats = record["stats"]
        sys.stdout.write(
            f"→ {record['text'].strip()}\n"
            f"  logprob {record['logprob']:.3f}, {record['num_tokens']} tokens, "
            f"{stats['steps_per_call']:.2f} steps per target call\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
