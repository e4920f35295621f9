"""The engine: requests in, results out. Nothing here knows the command line or a file format."""
