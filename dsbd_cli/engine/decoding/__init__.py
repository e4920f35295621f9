"""Decoding: requests in, batches of rows, results out."""
