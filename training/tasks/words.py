"""Name material, split by hash so that dev and test names never occur in training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache

NUMBER_NOUNS = (
    "age price weight height year score rank capacity budget length salary speed depth width "
    "distance rating duration balance population temperature area volume profit fee count level size "
    "power points pages"
).split()

TEXT_NOUNS = (
    "city country color title style brand region status category owner material language "
    "shape type code street director theme format sponsor club label model origin leader "
    "partner manager school faction nickname"
).split()

SYNONYMS = {
    "price": "cost",
    "weight": "mass",
    "height": "tallness",
    "score": "mark",
    "salary": "pay",
    "length": "extent",
    "duration": "running time",
    "profit": "gain",
    "fee": "charge",
    "capacity": "room",
    "speed": "pace",
    "size": "bulk",
    "city": "town",
    "country": "nation",
    "color": "hue",
    "category": "class",
    "owner": "holder",
    "language": "tongue",
    "street": "road",
    "leader": "head",
    "manager": "boss",
    "region": "district",
    "nickname": "short name",
    "sponsor": "backer",
}

COLUMN_MODIFIERS = (
    "home first last main local final early late current former public private "
    "annual monthly daily net gross official regional second upper lower inner outer base peak"
).split()

TABLE_NOUNS = (
    "singer concert teacher student bridge museum airport flight hotel guest player team contest film actor "
    "book author shop client parcel farm animal ship captain river lake park tree garden train station "
    "driver race painting gallery doctor patient hospital bank account loan course camp tower castle "
    "factory machine worker village festival band song album chef recipe menu pilot rocket planet robot"
).split()

TABLE_MODIFIERS = (
    "night city royal old small grand winter summer north south east west red blue green gold silver "
    "state harbor island mountain desert forest school street space river ocean junior senior"
).split()

SYLLABLES = (
    "ba be bo da de do fa fe ga go ha ho ja jo ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe "
    "ra re ri ro sa se so ta te ti to va ve vo za ze zo"
).split()

ENDINGS = (
    "ban bel bor dan del dor fen gan gor kan kel lan len lin lor man mar mel mor nan nel nor ran rel ren rin "
    "ros san sel sen son tan tel ten tor van vel ven vik vin zan zel zen zor"
).split()


@cache
def split_of(name: str) -> str:
    """The split that owns a name: eight tenths train, one tenth dev, one tenth test."""
    bucket = hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % 10
    return ("dev", "test")[bucket] if bucket < 2 else "train"


def draw_name(split: str, make: Callable[[], str], taken: set[str]) -> str:
    """The first name from `make` that the split owns and that shares no word with `taken`; its words become taken."""
    while True:
        name = make()
        words = name.split("_")
        if taken.isdisjoint(words) and split_of(name) == split:
            taken.update(words)
            return name


def compound(rng: random.Random, modifiers: Sequence[str], nouns: Sequence[str]) -> str:
    """A name of two words, modifier_noun."""
    return f"{rng.choice(modifiers)}_{rng.choice(nouns)}"


def spell(rng: random.Random) -> str:
    """A made-up proper name of two or three syllables."""
    middle = rng.choice(SYLLABLES) if rng.random() < 0.15 else ""
    return (rng.choice(SYLLABLES) + middle + rng.choice(ENDINGS)).capitalize()


def proper_name(split: str, rng: random.Random, taken: set[str]) -> str:
    """A made-up proper name that the split owns."""
    return draw_name(split, lambda: spell(rng), taken)


def spoken(name: str, rng: random.Random, synonym: float) -> str:
    """A column or table name as a question says it; its last word is a synonym with chance `synonym`."""
    words = name.split("_")
    if words[-1] in SYNONYMS and rng.random() < synonym:
        words[-1] = SYNONYMS[words[-1]]
    return " ".join(words)


def plural(noun: str) -> str:
    """The plural of a spoken table name."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("ch", "sh", "s", "x")):
        return noun + "es"
    return noun + "s"
