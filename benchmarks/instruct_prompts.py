"""Instructions for chat models, made from templates and topics of our own: `python -m benchmarks.instruct_prompts`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator

TOPICS = """rain, tides, the moon, earthquakes, glaciers, volcanoes, deserts, coral reefs, rainforests, honey bees,
migratory birds, whales, spiders, wolves, mushrooms, oak trees, tomatoes, rice, bread, cheese, coffee, tea,
salt, chocolate, olive oil, bicycles, trains, sailing boats, bridges, lighthouses, elevators, clocks, compasses,
maps, telescopes, microscopes, batteries, magnets, lasers, mirrors, paper, glass, steel, concrete, wool, soap,
paint, printing, libraries, museums, markets, elections, taxes, insurance, banks, money, contracts, juries,
hospitals, vaccines, sleep, exercise, memory, dreams, laughter, fear, curiosity, patience, honesty, friendship,
gravity, friction, sound, heat, light, electricity, atoms, cells, blood, bones, lungs, evolution, fractions,
prime numbers, triangles, probability, averages, percentages, algorithms, databases, passwords, backups, email,
search engines, spreadsheets, computer viruses, robots, satellites, rockets, the Roman Empire, ancient Egypt,
the Silk Road, the printing press, the steam engine, the telephone, chess, football, swimming, marathons,
gardening, cooking, painting, poetry, the piano, the violin, dance, theatre, photography, recycling, solar
panels, wind turbines, dams, sewers, public parks, schools, exams, homework, holidays, weddings, job interviews,
meetings, deadlines, budgets, resumes, small talk, moving house, adopting a dog, keeping a cat, camping, hiking,
airports"""

TEMPLATES = """Explain {a} to a ten-year-old in two sentences.
What is the most important thing to know about {a}?
Write a short paragraph about {a}.
List three facts about {a}.
List five words that have to do with {a}.
Why do people care about {a}?
What do {a} and {b} have in common?
Compare {a} with {b} in one sentence.
Write a two-line poem about {a}.
Give me a title for an article about {a}.
Write one question about {a} for a quiz, and its answer.
What is a common mistake that people make about {a}?
How would you begin a talk about {a}?
Write a polite email that asks a colleague for advice on {a}.
Describe {a} without naming it.
What are the advantages and the disadvantages of {a}?
Give a beginner three tips on {a}.
Write a short dialogue between two friends about {a}.
Is there a connection between {a} and {b}? Answer briefly.
Summarise what you know about {a} in one sentence.
Imagine a world without {a}. What would change first?
Rewrite this more simply: "The significance of {a} with respect to {b} can hardly be overstated."
Correct the grammar: "Me and him was talking about {a} when {b} come up."
Turn this into a question: "{A} changed the way people think about {b}."
What would a historian say about {a}?
Name two jobs that have to do with {a}, and say what they do.
Make a plan in three steps to learn more about {a}.
Write the first sentence of a story that begins with {a} and ends with {b}.
Which is older, {a} or {b}? Say why you think so.
Write a Python function that returns a list of strings about {a}."""


def prompts(seed: int) -> Iterator[str]:
    """Different instructions, in random order."""
    topics = [" ".join(topic.split()) for topic in TOPICS.split(",")]
    templates = TEMPLATES.splitlines()
    rng = random.Random(seed)
    seen = set()
    while len(seen) < len(topics) * len(templates):
        a, b = rng.sample(topics, 2)
        text = rng.choice(templates).format(a=a, b=b, A=a[0].upper() + a[1:])
        if text not in seen:
            seen.add(text)
            yield text


def main() -> None:
    """Print JSON lines that `dsbd generate` and `dsbd distill` read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number, text in zip(range(options.count), prompts(options.seed), strict=False):
        row = {"id": str(number), "messages": [{"role": "user", "content": text}]}
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
