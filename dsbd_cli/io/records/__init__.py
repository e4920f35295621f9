"""Conversion of input lines to rows, and of results to records."""
