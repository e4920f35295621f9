"""Shipped models are checked once."""

from tests.loads import shipped_models_are_checked_once  # noqa: F401
