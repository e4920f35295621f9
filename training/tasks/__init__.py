"""Generators of the records of the built-in tasks. The package ships the first ones of seed 0 (training.tasks.ship)."""

from training.tasks.generator import SPLITS, Generator
from training.tasks.qa import QaGenerator
from training.tasks.sql import SqlGenerator

GENERATORS: dict[str, Generator] = {generator.name: generator for generator in (SqlGenerator(), QaGenerator())}

__all__ = ["GENERATORS", "SPLITS", "Generator", "QaGenerator", "SqlGenerator"]
