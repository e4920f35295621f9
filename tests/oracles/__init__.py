"""Scalar float64 twins of the verification rules: every branch is enumerated."""
