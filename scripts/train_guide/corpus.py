"""Mixes topics and skills into conversations. The same seed gives the same conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from . import intents
from .dialogue import Exchange, Message
from .facts import Facts
from .grammar import sample, typed
from .noise import vary
from .skills import arithmetic, beyond, lists, memory, obey, reference, structured, toolcalls

HELDOUT = Path(__file__).with_name("heldout.jsonl")
DEVELOPMENT = Path(__file__).with_name("development.jsonl")
MAX_CHARACTERS = 6000  # characters of one conversation; at most 2048 tokens

Conversation = Exchange


@cache
def reserved() -> frozenset[str]:
    """The normalised questions of the examination, which no conversation may contain."""
    turns = [turn for file in (HELDOUT, DEVELOPMENT) for turn in questions(file)]
    return frozenset(normalised(turn) for turn in turns)


def questions(file: Path) -> list[str]:
    """The last user turn of each line. The examination checks the answer to this turn."""
    dialogues = [json.loads(line)["turns"] for line in file.read_text("utf-8").splitlines()]
    return [[turn for turn in turns if isinstance(turn, str)][-1] for turns in dialogues]


def normalised(text: str) -> str:
    """The text without case, punctuation and spacing. Questions with equal results count as the same question."""
    return " ".join(re.findall(r"\w+", text.lower()))


def conversations(seed: int, shard: int, count: int, facts: Facts) -> Iterator[Conversation]:
    """`count` conversations of one shard. Shards of one seed are independent of each other."""
    random = Random(f"{seed}/{shard}")
    done = 0
    while done < count:
        conversation = _conversation(random, facts)
        turns = [message["content"] for message in conversation.messages if message["role"] == "user"]
        if sum(len(str(message)) for message in conversation.messages) > MAX_CHARACTERS:
            continue
        if any(normalised(turn) in reserved() for turn in turns):
            continue
        done += 1
        yield conversation


def _conversation(random: Random, facts: Facts) -> Conversation:
    kinds = {
        "intent": 34,
        "follow-up": 8,
        "reference": 9,
        "arithmetic": 9,
        "lists": 7,
        "structured": 9,
        "tools": 11,
        "beyond": 9,
        "obey": 6,
        "say": 2,
        "mix": 18,
    }
    kind = random.choices(list(kinds), list(kinds.values()))[0]
    if kind == "tools":
        return toolcalls.make(random)
    if kind == "obey":
        return obey.make(random)
    if kind == "mix":
        exchange = _mix(random, facts)
    elif kind == "follow-up":
        exchange = _chain(random)
    else:
        exchange = _single(kind, random, facts)
    if random.random() < 0.3:
        exchange.system = obey.inert(random)
    return exchange


def _single(kind: str, random: Random, facts: Facts) -> Exchange:
    if kind == "reference":
        return reference.make(random, facts)
    if kind == "intent":
        return _ask(random.choice(list(intents.load().values())), random)
    skills = {
        "arithmetic": arithmetic.make,
        "lists": lists.make,
        "structured": structured.make,
        "beyond": beyond.make,
        "say": memory.make,
    }
    return skills[kind](random)


def _ask(intent: intents.Intent, random: Random) -> Exchange:
    return Exchange.of(typed(intent.question(random), random), intent.answer(random), intent.name)


@cache
def _followers() -> dict[str, list[intents.Intent]]:
    """Intent → the intents with a question that may follow it."""
    followers: dict[str, list[intents.Intent]] = {}
    for intent in intents.load().values():
        for name in intent.after:
            followers.setdefault(name, []).append(intent)
    return followers


def _follow(name: str, random: Random) -> Exchange:
    intent = random.choice(_followers()[name])
    text = sample(random.choice(intent.after[name]), random)
    text = intents.filled(vary(text, random), random)
    return Exchange.of(typed(text, random, bare=True), intent.answer(random), intent.name)


def _chain(random: Random) -> Exchange:
    """A question and one or more questions that follow it."""
    exchange = _ask(intents.load()[random.choice(list(_followers()))], random)
    messages = list(exchange.messages)
    name = exchange.name
    while name in _followers() and len(messages) < 8:
        exchange = _follow(name, random)
        messages += exchange.messages
        name = exchange.name
        if random.random() < 0.5:
            break
    return Exchange(messages)


def _mix(random: Random, facts: Facts) -> Exchange:
    """A conversation of many turns in any order. The user tells facts and asks for them later."""
    turns = random.randrange(2, 8) if random.random() < 0.85 else random.randrange(8, 36)
    messages: list[Message] = []
    values: dict[int, str] = {}  # facts that the user told: index of the fact → value
    name = ""
    single = ["intent", "intent", "reference", "arithmetic", "lists", "structured", "beyond", "say"]
    for _ in range(turns):
        draw = random.random()
        if draw < 0.16:
            index = random.randrange(len(memory.FACTS))
            values[index] = memory.FACTS[index].value(random)
            messages += memory.told(memory.FACTS[index], values[index], random)
        elif draw < 0.34:
            if values and random.random() < 0.85:
                index = random.choice(list(values))
            else:
                index = random.randrange(len(memory.FACTS))
            messages += memory.asked(memory.FACTS[index], values.get(index), random)
        elif draw < 0.39 and messages and len(messages[-1]["content"]) + len(messages[-2]["content"]) < 300:
            messages += memory.echo(messages[-2]["content"], messages[-1]["content"], random)
        elif draw < 0.6 and name in _followers():
            exchange = _follow(name, random)
            messages += exchange.messages
            name = exchange.name
        else:
            exchange = _single(random.choice(single), random, facts)
            messages += exchange.messages
            name = exchange.name or name
    return Exchange(messages)


def with_system(conversation: Conversation) -> list[Message]:
    """The messages of a conversation, after its system prompt if it has one."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return [*system, *conversation.messages]
