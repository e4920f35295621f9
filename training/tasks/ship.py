"""Write the records that the package ships: `python -m training.tasks.ship`."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from itertools import islice

from dsbd_cli.lab.tasks.record import RECORDS
from training.tasks import GENERATORS

SEED = 0
COUNTS = {"dev": 200, "test": 500}


def content(name: str, split: str) -> bytes:
    """One JSON line per record."""
    records = islice(GENERATORS[name].records(split, SEED), COUNTS[split])
    lines = [json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) + "\n" for record in records]
    return "".join(lines).encode()


def main() -> None:
    """Write a file per task and split."""
    RECORDS.mkdir(exist_ok=True)
    for name in GENERATORS:
        for split in COUNTS:
            path = RECORDS / f"{name}-{split}.jsonl.gz"
            path.write_bytes(gzip.compress(content(name, split), 9, mtime=0))


if __name__ == "__main__":
    main()
