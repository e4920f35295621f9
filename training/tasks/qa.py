"""Questions about passages of made-up people, each with the span that answers it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.tasks.generator import Drawn, Generator
from training.tasks.qa_facts import ROLES, THINGS, VERBS, Fact, make_fact, make_person, tell


@dataclass(frozen=True, slots=True)
class _Passage:
    """A passage, the facts that it tells, and what each fact says was done."""

    text: str
    facts: tuple[Fact, ...]
    deeds: tuple[str, ...]


def _make_passage(split: str, rng: random.Random, level: int) -> _Passage:
    """One fact at level 0, two at level 1; at level 2 one or two, and some people have roles that stand for names."""
    taken: set[str] = set()
    count = (1, 2, rng.choice((1, 2)))[level]
    verbs = rng.sample(tuple(VERBS), count)
    nouns = rng.sample(THINGS, count)
    if level > 1 and rng.random() < 0.2:
        nouns[-1] = nouns[0]
    elif level > 1 and rng.random() < 0.2:
        verbs[-1] = verbs[0]
    sentences, facts, deeds = [], [], []
    for verb, noun, role in zip(verbs, nouns, rng.sample(ROLES, count), strict=True):
        known_role = level > 1 and rng.random() < 0.6
        person = make_person(split, rng, taken, role if known_role else "")
        if known_role:
            sentences.append(f"{person.name} was a {person.role}.")
        fact = make_fact(split, rng, taken, person, verb, noun)
        sentence, deed = tell(fact, rng, known_role and rng.random() < 0.4)
        sentences.append(sentence)
        facts.append(fact)
        deeds.append(deed)
    return _Passage(" ".join(sentences), tuple(facts), tuple(deeds))


def _name_person(fact: Fact, rng: random.Random) -> str:
    """The fact's person by name, or by role where it is known."""
    return f"the {fact.person.role}" if fact.person.role and rng.random() < 0.3 else fact.person.name


def _name_thing(fact: Fact, others: list[Fact]) -> str:
    """The fact's thing by its noun where that is enough, else in full."""
    alone = all(other.noun != fact.noun for other in others)
    return f"the {fact.noun}" if alone else fact.thing


def clear(asked: str, fact: Fact, others: list[Fact]) -> bool:
    """Whether the words of a question of this kind point to one fact."""
    rivals = [other for other in others if other.verb == fact.verb]
    if asked == "what":
        return all(other.person != fact.person for other in rivals)
    return all(other.thing != fact.thing for other in others)


def _ask_deed(fact: Fact, deed: str, rng: random.Random) -> tuple[str, str]:
    """A question about all that a person did."""
    hint = f" in {fact.town}" if fact.town else f" {fact.time}"
    return f"what did {_name_person(fact, rng)} do{hint if rng.random() < 0.5 else ''}", deed


def ask(passage: _Passage, rng: random.Random) -> tuple[str, str]:
    """A question and the span that answers it."""
    while True:
        index = rng.randrange(len(passage.facts))
        fact = passage.facts[index]
        others = [other for other in passage.facts if other is not fact]
        parts = [kind for kind in ("place", "time", "reason") if _answer_of(kind, fact)]
        asked = rng.choice(["deed", "deed", "what", "what", "who", *parts])
        if asked == "deed":
            return _ask_deed(fact, passage.deeds[index], rng)
        if not clear(asked, fact, others) or (asked == "who" and not fact.helper and rng.random() < 0.5):
            continue
        return _word_question(asked, fact, others, rng), _answer_of(asked, fact)


def _answer_of(asked: str, fact: Fact) -> str:
    """The span that answers a question of this kind."""
    spans = {"who": fact.actors, "what": fact.thing, "place": fact.place, "time": fact.time, "reason": fact.reason}
    return spans[asked]


def _word_question(asked: str, fact: Fact, others: list[Fact], rng: random.Random) -> str:
    """A question about one part of a fact, active or passive, with the fact's verb or another."""
    base, synonym, synonym_past = VERBS[fact.verb]
    other_word = rng.random() < 0.25
    verb, past = (synonym, synonym_past) if other_word else (base, fact.verb)
    if asked == "who":
        return f"who {past} {_name_thing(fact, others)}"
    actor = _name_person(fact, rng)
    passive = rng.random() < 0.6
    if asked == "what":
        return f"what was {past} by {actor}" if passive else f"what did {actor} {verb}"
    word = {"place": "where", "time": "when", "reason": "why"}[asked]
    thing = _name_thing(fact, others)
    if passive:
        return f"{word} was {thing} {past}"
    return f"{word} did {actor} {verb} {thing}"


class QaGenerator(Generator):
    """Records of task qa."""

    name = "qa"

    def draw(self, split: str, rng: random.Random, size: int, level: int) -> list[Drawn]:
        """Questions about one passage."""
        passage = _make_passage(split, rng, level)
        pairs = [ask(passage, rng) for _ in range(size)]
        return [(f"passage: {passage.text}\nquestion: {question}\nanswer:", answer, {}) for question, answer in pairs]
