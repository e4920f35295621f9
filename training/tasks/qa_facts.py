"""Facts about made-up people and the sentences that tell them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.tasks.words import proper_name

VERBS = {
    "built": ("build", "put up", "put up"),
    "bought": ("buy", "purchase", "purchased"),
    "sold": ("sell", "part with", "parted with"),
    "repaired": ("repair", "fix", "fixed"),
    "opened": ("open", "unlock", "unlocked"),
    "found": ("find", "discover", "discovered"),
    "painted": ("paint", "decorate", "decorated"),
    "lost": ("lose", "mislay", "mislaid"),
    "closed": ("close", "shut", "shut"),
    "cleaned": ("clean", "wash", "washed"),
    "measured": ("measure", "survey", "surveyed"),
    "moved": ("move", "shift", "shifted"),
}

SIZES = "small large narrow tall heavy broken ancient modern empty round square plain".split()
COLORS = "red blue green white black grey brown yellow golden silver".split()
MATERIALS = "stone wooden iron glass brick copper clay paper leather marble".split()
THINGS = (
    "lighthouse mill bridge tower boat cart clock chapel kiln barn well gate wagon furnace organ "
    "statue cabin lantern fountain chest mirror ladder map drum"
).split()
PARTS = "bells wheels doors windows chains steps lamps ropes shelves handles stripes arches".split()
NUMBERS = "two three four five six seven eight nine ten twelve".split()
NEAR = "beside behind near under above opposite inside outside".split()
SPOTS = "harbour market forest station garden quarry orchard school hospital castle square canal cemetery".split()
RUINS = "road wall roof fence dam pier tunnel crop".split()
LANDS = "village island city coast valley mountain kingdom parish".split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
WEATHERS = "cold hot wet dry cloudy windy".split()
PERIODS = "early late long short last first".split()
SEASONS = "spring summer autumn winter".split()
ROLES = (
    "baker pilot teacher painter doctor sailor farmer lawyer miller weaver hunter singer potter "
    "banker surgeon jeweller tailor carpenter"
).split()
CAUSES = "flood fire storm gale war landslide drought frost".split()
HARMS = "destroyed damaged blocked ruined buried weakened".split()
AIMS = "guide warn shelter feed please teach protect honour".split()
GROUPS = "sailors children travellers soldiers farmers visitors workers pilgrims".split()


@dataclass(frozen=True, slots=True)
class _Person:
    """A person with a role that later sentences may use instead of the name."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One event; `helper` is empty or a second person's name."""

    person: _Person
    helper: str
    verb: str
    thing: str
    noun: str
    place: str
    town: str
    time: str
    reason: str

    @property
    def actors(self) -> str:
        """The people of the event as the sentence names them."""
        return f"{self.person.name} and {self.helper}" if self.helper else self.person.name


def make_person(split: str, rng: random.Random, taken: set[str], role: str) -> _Person:
    """A person with a made-up name."""
    return _Person(proper_name(split, rng, taken), role)


def _make_thing(rng: random.Random, noun: str) -> str:
    """An object with an adjective or two and, half the time, its parts."""
    kinds = [rng.choice(pool) for pool in (SIZES, COLORS, MATERIALS) if rng.random() < 0.55]
    first = (kinds or [noun])[0]
    article = "an" if first[0] in "aeiou" else "a"
    parts = f" with {rng.choice(NUMBERS)} {rng.choice(PARTS)}" if rng.random() < 0.5 else ""
    return " ".join([article, *kinds, noun]) + parts


def _make_place(rng: random.Random, town: str) -> str:
    """A spot in a town, or the town alone."""
    if rng.random() < 0.25:
        return f"in {town}"
    return f"{rng.choice(NEAR)} the {rng.choice(SPOTS)} in {town}"


def _make_time(rng: random.Random) -> str:
    """A date, a day or a season."""
    draw = rng.random()
    if draw < 0.5:
        return f"on {rng.randint(1, 28)} {rng.choice(MONTHS)}"
    if draw < 0.75:
        return f"on a {rng.choice(WEATHERS)} {rng.choice(DAYS)} in {rng.choice(MONTHS)}"
    return f"in the {rng.choice(PERIODS)} {rng.choice(SEASONS)}"


def _make_reason(rng: random.Random) -> str:
    """A cause or an aim."""
    if rng.random() < 0.6:
        return f"because the {rng.choice(RUINS)} had been {rng.choice(HARMS)} by a {rng.choice(CAUSES)}"
    return f"to {rng.choice(AIMS)} the {rng.choice(GROUPS)} of the {rng.choice(LANDS)}"


def make_fact(split: str, rng: random.Random, taken: set[str], person: _Person, verb: str, noun: str) -> Fact:
    """An event of a person with two of place, time and reason."""
    town = proper_name(split, rng, taken)
    helper = make_person(split, rng, taken, "").name if rng.random() < 0.25 else ""
    absent = rng.choice(("place", "time", "reason", "reason"))
    return Fact(
        person,
        helper,
        verb,
        _make_thing(rng, noun),
        noun,
        "" if absent == "place" else _make_place(rng, town),
        "" if absent == "place" else town,
        "" if absent == "time" else _make_time(rng),
        "" if absent == "reason" else _make_reason(rng),
    )


def tell(fact: Fact, rng: random.Random, by_role: bool) -> tuple[str, str]:
    """The fact as a sentence, and what it says was done; the place or the time may come first.

    A role never stands in for a person who has a helper, so that the pair of names is always a span.
    """
    by_role = by_role and not fact.helper
    who = f"the {fact.person.role}" if by_role else fact.actors
    circumstances = [part for part in (fact.place, fact.time) if part]
    rng.shuffle(circumstances)
    lead = ""
    if len(circumstances) == 2 and rng.random() < 0.4:
        lead = circumstances.pop(0) + ", "
        lead = lead[0].upper() + lead[1:]
    elif by_role:
        who = who[0].upper() + who[1:]
    tail = "".join(f" {part}" for part in (*circumstances, fact.reason) if part)
    deed = f"{fact.verb} {fact.thing}{tail}"
    return f"{lead}{who} {deed}.", deed
