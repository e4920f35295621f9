"""`python -m dsbd_cli` is `dsbd`."""

from dsbd_cli.job.cli.app import main

if __name__ == "__main__":
    main()
