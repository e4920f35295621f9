"""Print the sample prompts, the first test records of seed 0: `python -m training.samples`."""

from __future__ import annotations

import json
from itertools import islice

from training.tasks import GENERATORS

COUNTS = {"sql": 5, "qa": 3}
SEED = 0


def main() -> None:
    """One JSON line per record."""
    for name, count in COUNTS.items():
        for record in islice(GENERATORS[name].records("test", SEED), count):
            print(json.dumps({"id": record.id, "prompt": record.prompt}))


if __name__ == "__main__":
    main()
