"""Jobs of benchmarks/suffix.py: text-to-SQL, extraction to JSON, edits of code, and chat. All are the same every time.

The first conversation of each job is one more than the job's rows, to warm up with.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from benchmarks.suffix_functions import EDITS
from dsbd_cli.config.grammars import Grammar
from training.head_prompts import prompts

Messages = list[dict[str, str]]

# table, its columns of text, category, number and date; a second table, its columns of text and number; categories
DATABASES = """customers name city balance joined_on orders product quantity Lisbon Oslo Geneva Krakow Dublin
employees full_name department salary hired_on projects title hours Finance Legal Research Marketing Support
books title genre price published_on loans borrower days History Poetry Crime Travel Science
patients surname ward weight admitted_on treatments drug dose Surgery Cardiology Oncology Neurology Maternity
flights flight_number airline distance departed_on passengers passenger baggage Iberia Finnair Ryanair Alitalia Condor
players nickname team goals born_on matches opponent minutes Rovers United Wanderers Athletic Rangers
machines model factory power installed_on repairs fault cost Leipzig Turin Gdansk Bilbao Malmo
songs title artist duration released_on plays listener seconds Adele Queen Muse Blur Genesis
houses street district rent built_on visits visitor rating Altona Chelsea Trastevere Gracia Montmartre
courses subject faculty credits started_on enrolments student grade Medicine Law Physics Music Economics"""

QUESTIONS = """List the {name} of all {table} whose {kind} is {value}.
How many {table} have a {kind} of {value} and {number} above {n}?
What is the average {number} of {table} with {kind} {value}?
Show {name} and {number} of the {few} {table} with the highest {number} among those whose {kind} is not {value}.
Which {table} have {date} after {day}? Give {name} and {date}.
What is the total {amount} of {child} for {table} whose {kind} is {value}?
List the {part} of all {child} with {amount} of more than {n}.
For each {kind}, how many {table} have {number} below {n}?
Find the {name} of {table} that have at least {few} {child}.
Which {kind} has more than {few} {table}? Sort by the count, largest first.
Give the {name} of {table} whose {number} is between {n} and {m}, ordered by {date}.
What is the latest {date} of {table} with {kind} {value}?
List {name} and {kind} of {table} that have no {child} with {amount} over {n}.
Show the {few} {kind} values with the largest average {number}.
How many {child} belong to {table} with {date} before {day}?
Give {name}, {part} and {amount} for every one of the {child} whose {amount} is less than {n}.
Which {table} have {number} above the average {number} of those whose {kind} is {value}?
For every one of the {table} with {kind} {value}, give the {name} and the total {amount} of its {child}.
List the distinct {part} of {child} of {table} with {number} over {n} and {date} since {day}.
What share of the {table} has {kind} {value}?"""

SHOTS = (
    ("Which hotels are in Vienna? Give name and stars.", "SELECT name, stars FROM hotels WHERE town = 'Vienna';"),
    (
        "Give the name of every hotel and its number of bookings with more than 3 nights.",
        "SELECT h.name, COUNT(*) FROM hotels h JOIN bookings b ON b.hotels_id = h.id WHERE b.nights > 3 GROUP BY h.id;",
    ),
    (
        "What is the average number of stars by town, for hotels opened after 2015-06-30?",
        "SELECT town, AVG(stars) FROM hotels WHERE opened_on > '2015-06-30' GROUP BY town;",
    ),
)

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["person", "order", "event"]},
        "name": {"type": "string", "maxLength": 60},
        "city": {"type": "string", "maxLength": 40},
        "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "contact": {
            "type": "object",
            "properties": {
                "email": {"type": "string", "maxLength": 60},
                "phone": {"type": ["string", "null"], "maxLength": 20},
            },
            "required": ["email", "phone"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {"label": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}},
                "required": ["label", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["kind", "name", "city", "date", "contact", "items"],
    "additionalProperties": False,
}
TEXTS = (
    "{name} moved to {city} on {date}. Write to {email}. At home there are {a} {x} and {b} {y}.",
    "{name} was born in {city} on {date} and owns {a} {x}. The address for letters is {email}, the phone {phone}.",
    "Order of {date}: {name} from {city} wants {a} {x}, {b} {y} and {c} {z}. Confirm to {email}.",
    "Please send {a} {x} and {b} {y} to {name} in {city}. Ordered on {date}; call {phone} or write to {email}.",
    "The {event} takes place in {city} on {date}. Bring {a} {x} and {b} {y}. Questions go to {email}.",
    "On {date} {city} hosts the {event}, with {a} {x}. Tickets: {email} or {phone}.",
)
FIRST = "Ana Bruno Clara David Elena Farid Greta Hugo Ines Jonas Karin Luis Mira Nils Olga Pavel Rosa Sven".split()
LAST = "Almeida Berg Costa Dvorak Eriksen Fischer Garcia Horvat Ivanov Jansen Keller Lopez Moreau Novak".split()
CITIES = "Porto Bergen Lyon Graz Ghent Turku Seville Brno Leeds Padua Tartu Cork".split()
EVENTS = "spring concert;book fair;chess tournament;city marathon;film night;science day;flower market".split(";")
THINGS = "lamps chairs notebooks plants bottles candles blankets mugs tents maps drums kites vases clocks".split()


@dataclass(frozen=True, slots=True)
class Job:
    """Conversations and how they are answered.

    Attributes:
        tokens: new tokens at most, where nothing else is asked for. before: the job that was answered the day before.
    """

    conversations: Callable[[], Iterator[Messages]]
    tokens: int
    grammar: Grammar | None = None
    before: str | None = None


def day(rng: random.Random) -> str:
    """Return a date."""
    return f"{rng.randint(1990, 2025)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def tables(database: str) -> str:
    """Return a line of DATABASES as statements that create its two tables."""
    table, name, kind, number, date, child, part, amount = database.split()[:8]
    return (
        f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {name} TEXT, {kind} TEXT, {number} REAL, {date} DATE);\n"
        f"CREATE TABLE {child} (id INTEGER PRIMARY KEY, {table}_id INTEGER REFERENCES {table}, {part} TEXT, "
        f"{amount} INTEGER);"
    )


def sql(later: int) -> Iterator[Messages]:
    """Yield questions on ten databases in turn, behind three solved ones. later: days, each of which has other names,
    numbers and dates."""
    databases, questions = DATABASES.splitlines(), QUESTIONS.splitlines()
    shown = [(tables("hotels name town stars opened_on bookings guest nights"), *shot) for shot in SHOTS]
    before = [{"role": "system", "content": "Answer with one SQLite statement and nothing else."}]
    for schema, question, answer in shown:
        before += [
            {"role": "user", "content": f"{schema}\n\n{question}"},
            {"role": "assistant", "content": answer},
        ]
    for number in range(len(databases) * len(questions) + 1):
        rng = random.Random(number)
        turn, at = divmod(number, len(databases))
        words = databases[at].split()
        names = [word.replace("_", " ") for word in words[:8]]
        low = rng.randint(3, 90) + 17 * later
        question = questions[(turn + 7 * at) % len(questions)].format(
            **dict(zip("table name kind number date child part amount".split(), names, strict=True)),
            value=words[8 + (rng.randrange(5) + later) % 5],
            n=low,
            m=low + rng.randint(5, 60),
            few=2 + (rng.randrange(8) + later) % 8,
            day=[day(rng) for _ in range(later + 1)][-1],
        )
        yield [*before, {"role": "user", "content": f"{tables(databases[at])}\n\n{question}"}]


def extraction() -> Iterator[Messages]:
    """Yield texts on persons, orders and events, each behind the schema of its record."""
    rng = random.Random(0)
    task = f"Extract the record that the text describes, as JSON under this schema:\n{json.dumps(SCHEMA)}"
    for number in range(101):
        first, last, city = rng.choice(FIRST), rng.choice(LAST), rng.choice(CITIES)
        text = TEXTS[number % len(TEXTS)].format(
            name=f"{first} {last}",
            email=f"{first}.{last}@{city}.example".lower(),
            phone=f"+{rng.randint(30, 49)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}",
            **{"city": city, "date": day(rng), "event": rng.choice(EVENTS)},
            **dict(zip("abc", rng.choices(range(2, 30), k=3), strict=True)),
            **dict(zip("xyz", rng.sample(THINGS, 3), strict=True)),
        )
        yield [{"role": "system", "content": task}, {"role": "user", "content": text}]


def edits() -> Iterator[Messages]:
    """Yield functions with one change to make. A function comes back after all others."""
    asked = [(function, changes[turn]) for turn in range(3) for function, changes in EDITS.items()]
    for function, change in [(asked[-1][0], "Rename the function to `report_by_group`."), *asked]:
        code = inspect.getsource(function)
        text = f"```python\n{code}```\n\n{change} Answer with the whole function and nothing else."
        yield [{"role": "user", "content": text}]


JOBS = {
    "sql": Job(partial(sql, 0), 96),
    "sql-again": Job(partial(sql, 1), 96, before="sql"),
    "json": Job(extraction, 160, Grammar.json_schema(SCHEMA)),
    "edit": Job(edits, 640),
    "chat": Job(lambda: islice(prompts(0), 101), 128),
}
