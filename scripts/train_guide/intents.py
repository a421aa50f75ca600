"""The tables under topics/: what people ask and what is said to it.

# name
run: the command that does it, where there is one
how: verb phrases, put into frames such as "how do i ..."
what: noun phrases, put into frames such as "what is ..."
ask: whole questions
after NAME NAME: questions that make sense after those only
say: the answer, one line of it
say-or: another whole answer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from . import grammar

TOPICS = Path(__file__).with_name("topics")

HOW = (
    "how (do|can|would|could|should|might|must) i {}|how (do|can) you {}|how to {}|how do (we|people) {}|how does one {}"
    "|what is the command to {}|which command (do i use|should i use|is there|is used|do i need) to {}"
    "|what (do|should|must) i (type|run|enter|do) to {}|what do i have to (type|do|run) to {}"
    "|i (want|need|would like|am trying|wish|have) to {}|i would like to {}, how"
    "|(can|could|would) you (tell|show) me how to {}|(tell|show) me how to {}|explain how to {}|please explain how to {}"
    "|is there a (way|command|possibility) to {}|is it possible to {}|(can|may|could) i {}|what is the (best|easiest|right) way to {}"
    "|i do not know how to {}|help me {}|help me to {}|what if i want to {}|what about when i want to {}|{}"
    "|i cannot figure out how to {}|do you know how to {}|steps to {}|command to {}|let me {}"
    "|how would i go about it if i wanted to {}|what would i type if i wanted to {}|any way to {}|i want to know how to {}"
)
WHAT = (
    "what is {}|what are {}|what is {} for|what does {} mean|what is {} good for|explain {}|explain {} to me|{}"
    "|tell me about {}|tell me (something|more) about {}|what do you know about {}|(can|could) you explain {}"
    "|what do you mean by {}|i do not understand {}|describe {}|how does {} work|what about {}|what can you tell me about {}"
    "|i have a question about {}|i read about {}, what is it|what exactly is {}|i want to know about {}|meaning of {}"
)


@dataclass
class Intent:
    name: str
    topic: str
    how: list[str] = field(default_factory=list)
    what: list[str] = field(default_factory=list)
    ask: list[str] = field(default_factory=list)
    after: dict[str, list[str]] = field(default_factory=dict)  # intent that came before -> questions
    answers: list[str] = field(default_factory=list)
    command: str = ""

    def question(self, random: Random) -> str:
        """A lower-case question of this intent."""
        kinds = [kind for kind in ("how", "what", "ask") if getattr(self, kind)]
        weights = {"how": 3, "what": 1, "ask": 3}
        kind = random.choices(kinds, [weights[kind] for kind in kinds])[0]
        lines: list[str] = getattr(self, kind)
        phrase = grammar.sample(random.choices(lines, [grammar.count(line) ** 0.5 for line in lines])[0], random)
        if kind == "ask":
            return phrase
        return random.choice(_frames(kind)).replace("{}", phrase)

    def answer(self, random: Random) -> str:
        return random.choice(self.answers)


@cache
def _frames(kind: str) -> list[str]:
    """Every frame of a kind, spelled out once."""
    found: list[str] = []
    for pattern in _split(HOW if kind == "how" else WHAT):
        random = Random(0)
        found += sorted({grammar.sample(pattern, random) for _ in range(8 * grammar.count(pattern))})
    return found


def _split(pattern: str) -> list[str]:
    """The alternatives at the top level of a pattern."""
    parts, depth, start = [], 0, 0
    for at, mark in enumerate(pattern):
        depth += (mark == "(") - (mark == ")")
        if mark == "|" and depth == 0:
            parts.append(pattern[start:at])
            start = at + 1
    return [*parts, pattern[start:]]


def parse(text: str, topic: str) -> list[Intent]:
    """The intents of one table. Raises ValueError for an unknown key or an intent without an answer."""
    intents: list[Intent] = []
    for line in text.splitlines():
        if line.startswith("# "):
            intents.append(Intent(line[2:].strip(), topic))
            continue
        if not line.strip():
            continue
        head, _, rest = line.partition(":")
        key, *names = head.split()
        rest = rest.removeprefix(" ")
        intent = intents[-1]
        if key in ("how", "what", "ask"):
            getattr(intent, key).append(rest)
        elif key == "after":
            for name in names:
                intent.after.setdefault(name, []).append(rest)
        elif key == "say":
            intent.answers[-1:] = [f"{intent.answers[-1]}\n{rest}" if intent.answers else rest]
        elif key == "say-or":
            intent.answers.append(rest)
        elif key == "run":
            intent.command = rest
        else:
            raise ValueError(f"{topic}: unknown key {head!r}")
    for intent in intents:
        if not intent.answers or not (intent.how or intent.what or intent.ask):
            raise ValueError(f"{topic}: {intent.name} lacks a question or an answer")
    return intents


@cache
def load() -> dict[str, Intent]:
    """Every intent of every table by name. Raises ValueError for a name used twice or an unknown one after `after`."""
    intents: dict[str, Intent] = {}
    for file in sorted(TOPICS.glob("*.txt")):
        for intent in parse(file.read_text("utf-8"), file.stem):
            if intent.name in intents:
                raise ValueError(f"{file.name}: {intent.name} is there already")
            intents[intent.name] = intent
    for intent in intents.values():
        for name in intent.after:
            if name not in intents:
                raise ValueError(f"{intent.name}: after unknown {name}")
    return intents
