"""The command `jq` as pages use it, made of the package of that name: `jq [-c] [-r] PROGRAM [FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jq


def main() -> None:
    """Write what the program makes of every JSON value of the input, a line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", action="store_true")
    parser.add_argument("-r", action="store_true")
    parser.add_argument("program")
    parser.add_argument("file", nargs="?")
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.file is None else Path(arguments.file).read_text(encoding="utf-8")
    for value in jq.compile(arguments.program).input(text=text):
        raw = arguments.r and isinstance(value, str)
        print(value if raw else json.dumps(value, ensure_ascii=False, indent=None if arguments.c else 2))


if __name__ == "__main__":
    main()
