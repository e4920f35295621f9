"""Construction of the verification rule that a method names. `variants.RULES` says where the code of each is."""

from __future__ import annotations

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import RULES
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.errors import UsageError


def make_rule(method: MethodConfig) -> Rule:
    """Make the rule that a method names. Raises UsageError where its code is missing or is no Rule."""
    kind = RULES[method.rule].load()
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise UsageError(f"rule {method.rule} cannot be used: {RULES[method.rule].make} is no class with base Rule")
    return kind.of(method)
