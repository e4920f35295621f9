"""`python -m dsbd_cli` is `dsbd`."""

from dsbd_cli.cli.app import main

if __name__ == "__main__":
    main()
