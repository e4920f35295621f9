"""Instructions to train a draft head on: `python -m training.head_prompts --count 2048 > prompts.jsonl`.

Questions on topics, code, SQL, sums, translations and texts to summarise, made from lists. `dsbd distill` holds out
every eighth prompt, 64 at most. These are about topics, tables, tasks and texts that no other prompt names.
--sql SHARE: so many of the prompts are questions of the task sql behind three solved ones, as
`dsbd bench --task sql --shots 3` asks them. They are of its train split, which shares no name with the others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.instruct_prompts import TEMPLATES, TOPICS
from dsbd_cli.cli.commands.trim import HELD_OUT_EVERY, HELD_OUT_MOST
from dsbd_cli.lab.tasks.choose import TASKS as SCORED_TASKS
from dsbd_cli.lab.tasks.dataset import with_shots
from training.tasks.sql import SqlGenerator

KINDS = {"topic": 50, "code": 16, "sql": 14, "text": 8, "translation": 6, "sum": 6}  # shares
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "Go", "C", "Bash")
TASKS = """reverses a string; checks whether a number is prime; merges two sorted lists; counts the words of a text;
finds the largest element of a list; removes duplicates from a list and keeps its order; computes the factorial of n;
reads a CSV file and prints its second column; converts Celsius to Fahrenheit; tests whether a word is a palindrome;
flattens a nested list; returns the n-th Fibonacci number; sorts a dictionary by value; validates an email address;
groups words by their first letter; computes the median of a list; rotates a list by k places; finds all anagrams in a
list of words; parses a date like 2024-03-01; counts the vowels of a text; transposes a matrix; computes the greatest
common divisor; splits a list into chunks of n; finds the second largest number; writes a list of dictionaries as JSON;
caches the results of another function; finds the longest word of a sentence; prints a multiplication table; checks
whether brackets are balanced; replaces tabs by spaces in a file; computes a running average; draws a random password"""
ASK_CODE = """Write a {l} function that {t}.
Show me a {l} function that {t}, with a short example.
In {l}, how would you write a function that {t}?
Write {l} code with tests for a function that {t}."""
TABLES = """orders(id, customer, total, placed_on); employees(id, name, department, salary); flights(number, origin,
destination, minutes); books(isbn, title, author, price); patients(id, name, ward, born); matches(id, home, away,
goals); sensors(id, place, taken_at, reading); invoices(id, client, due, amount); students(id, name, school, grade);
products(sku, name, category, stock); trips(id, driver, km, fare); songs(id, artist, title, plays); tickets(id, agent,
priority, hours); rooms(number, hotel, beds, rate); loans(id, member, book, days); courses(code, teacher, seats)"""
ASK_SQL = """the three rows with the largest last column; how many rows there are per value of the second column; the
average of the last column for each value of the second; all rows whose second column begins with 'A', sorted by the
first; the total of the last column; the values of the second column that occur more than five times; the first column
of all rows whose last column is above its average"""
TEXTS = """The city council voted on Tuesday to close the old bridge for eighteen months while engineers replace its
cables. Shop owners fear for their trade, but the mayor promised a free ferry every ten minutes.

Researchers tracked forty sea turtles for three years and found that most return to within two kilometres of the
beach where they hatched. They seem to use the angle of the magnetic field.

Our quarterly revenue rose by 12 percent to 4.1 million, mostly because of the new subscription plan. Costs rose as
well, since nine people joined support, so profit stayed at 0.6 million.

The museum's new wing opened with a show of early maps. Visitors can touch copies of the engraved plates and print a
small map of their own town. The show runs until May.

After a dry spring the reservoirs stand at 61 percent. The water board asks households to water gardens only after
sunset, and has postponed the cleaning of public fountains.

The team shipped version 2.4 on Friday. It starts twice as fast, fixes the crash on empty files and drops the old
format of settings, which a script converts.

A small bakery in the valley has used the same starter since 1911. Its owner feeds it rye flour at four in the
morning and says that cold water is the secret.

Trains between the two cities will run every half hour from December. The journey becomes nine minutes shorter
because of a new tunnel, whose cost rose from 300 to 410 million.

The school replaced its bells with music. Pupils choose the pieces each week, and teachers report that fewer of them
are late. In a survey 70 percent of the parents were in favour.

In a trial with 230 patients the new drug lowered blood pressure by 9 points on average, against 4 for the standard.
Headaches were a little more common, and two patients stopped."""
ASK_TEXT = """Summarise in one sentence: {x}
Give this text a title: {x}
List the key facts of this text: {x}
Rewrite this for a ten-year-old: {x}
Write three questions that this text answers: {x}"""
SENTENCES = """Where is the nearest station?; I would like a cup of tea, please.; The meeting starts at nine tomorrow.;
My sister lives near the sea.; The bill is not correct.; Thank you for your help.; It will rain in the afternoon.;
How much does this book cost?; We have lost our keys.; The children are playing in the garden.; Can you repeat that?;
The train was late again.; I do not eat meat.; She has worked here for ten years."""
TONGUES = ("French", "Spanish", "German", "Italian", "Portuguese")
SUMS = """A box holds {a} pens. {b} boxes are sold and {c} pens are added. How many pens is that?
A train goes {a} km in {b} minutes. How far does it go in {c} minutes?
What is {a} times {b} plus {c}? Show your work.
Anna has {a} apples, gives {b} away and buys {c}. How many has she now?
{a} people share {c} litres of juice. How much does each get? Explain."""


def parts(text: str, at: str) -> list[str]:
    """The entries of a list."""
    return [" ".join(part.split()) for part in text.split(at) if part.strip()]


LISTS = {
    "topics": parts(TOPICS, ","),
    "tasks": parts(TASKS, ";"),
    "tables": parts(TABLES, ";"),
    "texts": parts(TEXTS, "\n\n"),
    "sentences": parts(SENTENCES, ";"),
}


def instruction(rng: random.Random, lists: dict[str, list[str]]) -> str:
    """One instruction about entries of these lists."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "topic":
        a, b = rng.sample(lists["topics"], 2)
        return rng.choice(TEMPLATES.splitlines()).format(a=a, b=b, A=a[0].upper() + a[1:])
    if kind == "code":
        return rng.choice(ASK_CODE.splitlines()).format(l=rng.choice(LANGUAGES), t=rng.choice(lists["tasks"]))
    if kind == "sql":
        ask = rng.choice(parts(ASK_SQL, ";"))
        return f"Table {rng.choice(lists['tables'])}. Write an SQL query for {ask}."
    if kind == "text":
        return rng.choice(ASK_TEXT.splitlines()).format(x=rng.choice(lists["texts"]))
    if kind == "translation":
        return f'Translate into {rng.choice(TONGUES)}: "{rng.choice(lists["sentences"])}"'
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 30)
    return rng.choice(SUMS.splitlines()).format(a=a, b=b, c=c)


def questions(seed: int) -> Iterator[list[dict[str, str]]]:
    """Conversations of the task sql without end: three solved records, then one of the train split."""
    asked = replace(SCORED_TASKS["sql"], records=lambda: SqlGenerator().records("train", seed))
    for record in with_shots(asked, 3).records():
        yield record.meta["messages"]  # type: ignore[misc]


def prompts(seed: int, sql: float = 0.0) -> Iterator[list[dict[str, str]]]:
    """Different conversations without end. Those that are held out are about entries of their own. sql: share of
    questions behind solved ones."""
    rng = random.Random(seed)
    held, learnt = dict[str, list[str]](), dict[str, list[str]]()
    for name, entries in LISTS.items():
        some = rng.sample(entries, len(entries))
        few = max(2, len(some) // HELD_OUT_EVERY)
        held[name], learnt[name] = some[:few], some[few:]
    seen, number, solved = set[str](), 0, questions(seed)
    while True:
        out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 and number < HELD_OUT_EVERY * HELD_OUT_MOST
        if sql and rng.random() < sql:
            number += 1
            yield next(solved)
            continue
        text = instruction(rng, held if out else learnt)
        if text not in seen:
            seen.add(text)
            number += 1
            yield [{"role": "user", "content": text}]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print JSON lines that `dsbd generate` and `dsbd distill` read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sql", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args(arguments)
    for number, messages in zip(range(options.count), prompts(options.seed, options.sql), strict=False):
        sys.stdout.write(json.dumps({"id": str(number), "messages": messages}) + "\n")


if __name__ == "__main__":
    main()
