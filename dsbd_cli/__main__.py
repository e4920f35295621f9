"""Entry point of `dsbd` and of `python -m dsbd_cli`. It imports little at first, so that Ctrl-C prints one line from
the start."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the script `dsbd`."""
    try:
        from dsbd_cli.config.variants import find_extensions
        from dsbd_cli.errors import UsageError
        from dsbd_cli.threads import wait_without_spinning

        wait_without_spinning()
        try:
            find_extensions()
        except UsageError as error:
            sys.stderr.write(f"dsbd: error: {error}\n")
            sys.exit(2)
        from dsbd_cli.cli import app
    except KeyboardInterrupt:
        sys.stderr.write("dsbd: stopped before there was a result\n")
        sys.exit(130)
    app.main()


if __name__ == "__main__":
    main()
