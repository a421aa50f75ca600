"""Varies a question: synonyms, missing, swapped or random words, and a sentence of small talk before it.

A small model that sees a question in only one wording learns the wording. With many variants, it learns which words
matter.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random

from . import words
from .grammar import sample

THESAURUS = Path(__file__).with_name("thesaurus.txt")
STOPWORDS = frozenset(
    "a an the of to do does i is are it in on for with my me you can could how what which that this there be please".split()
)
BEFORE = (
    "(i have|i own|i bought|we have|there is) (a|an) (old|new|small|big|cheap|second|borrowed) (laptop|thinkpad|server|pc|desktop|mini pc|workstation)"
    "|(i am|we are) (a student|a beginner|a developer|writing a thesis|working on a project|at work|on a train|in a hurry|preparing a demo|a small team)"
    "|my (boss|colleague|friend|brother|teacher|son|neighbour|customer) (asked me|wants to know|told me about this|is curious|needs it)"
    "|(yesterday|today|last week|this morning) (i installed localllm|i read the manual|everything was fine|i tried something|it worked)"
    "|i (read|looked at|searched) (the docs|the manual|everywhere) (but found nothing|and am lost|already)"
    "|(i have|there is) (something|one thing) (i do not get|i want to ask|on my mind|unclear to me)"
    "|i (just started|am not an expert|never used this before|tried everything|have little time|am confused|am stuck|have no idea)"
    "|(ok|fine|good|right|interesting|understood|great), (next topic|moving on|one more|let us go on|another question)"
    "|(here is|this is) (my question|what i want|the situation|what i need)|(be honest|be quick|keep it short|in simple words|step by step)"
)


@cache
def _thesaurus() -> dict[str, list[str]]:
    lines = [line.split(":") for line in THESAURUS.read_text("utf-8").splitlines() if line.strip()]
    return {key.strip(): [word.strip() for word in rest.split(",")] for key, rest in lines}


@cache
def _vocabulary() -> list[str]:
    """All words of the thesaurus, to put a word where it does not belong."""
    words_used = {word for line in _thesaurus().values() for phrase in line for word in phrase.split()}
    return sorted(words_used | set(_thesaurus()))


def _random_word(random: Random) -> str:
    return words.made_up(random).lower() if random.random() < 0.6 else random.choice(_vocabulary())


def reword(text: str, random: Random) -> str:
    """Replace some words by synonyms."""
    table = _thesaurus()
    result = [random.choice(table[w]) if w in table and random.random() < 0.35 else w for w in text.split(" ")]
    return " ".join(result)


def disturb(text: str, random: Random) -> str:
    """Remove, replace, add or swap some words. Words that look like code stay."""
    result: list[str] = []
    for word in text.split(" "):
        draw = random.random()
        plain = re.fullmatch(r"[a-z']+,?", word) is not None
        if plain and draw < (0.10 if word in STOPWORDS else 0.03):
            continue
        if plain and draw > (0.96 if word in STOPWORDS else 0.98):
            word = _random_word(random)
        result.append(word)
        if draw > 0.3 and draw < 0.335:
            result.append(_random_word(random))
        if plain and 0.4 < draw < 0.42 and len(result) > 1:
            result[-1], result[-2] = result[-2], result[-1]
    return " ".join(result) or text


def telegraph(text: str, random: Random) -> str:
    """Some of the words, as in a search box."""
    result = [word for word in text.split(" ") if random.random() < (0.45 if word in STOPWORDS else 0.88)]
    if random.random() < 0.25:
        random.shuffle(result)
    return " ".join(result) or text


def vary(text: str, random: Random) -> str:
    """A question with random variations, possibly with none."""
    if random.random() < 0.65:
        text = reword(text, random)
    draw = random.random()
    if draw < 0.2:
        text = telegraph(text, random)
    elif draw < 0.5:
        text = disturb(text, random)
    if random.random() < 0.07:
        text = sample(BEFORE, random) + random.choice([". ", ", ", ". ", "; ", " - "]) + text
    return text
