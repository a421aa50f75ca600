"""Answers that are JSON and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from .. import intents, words
from ..dialogue import Exchange
from ..grammar import sample, typed
from .lists import SERIES, SETS

AS_JSON = (
    "(answer|reply|respond|give me the answer|write it|return it|output it) (as|in) [valid] json|as json|in json|json only"
    "|answer (only with|with only) json|i need json|give me json|return [only] json|use json|output json|format it as json|json please"
)
ARRAY = "as a json (list|array)|in a json (list|array)|as json|in json|as an array in json|in json format"
TURN = (
    "(turn|convert|put|make|write|transform|change|parse) (this|the following|that) (into|to|in|as) [a] json [object]"
    "|(make|create|build|write|give me) [a] json [object] (from|of|for|with|out of) (this|the following)"
    "|i want json for this|please (convert|turn|make) [this] (to|into) json|as a json object [please]|as json [please]|json please|return that as json|put it into json"
    "|(extract|get) the (fields|values|data) [of this] as json|(to json|json|as json|json object for)"
)


def make(random: Random) -> Exchange:
    return random.choices([_fields, _asked_keys, _array, _command, _yes_no, _sum], [5, 5, 3, 2, 1, 2])[0](random)


def _price(random: Random) -> float | int:
    return random.choice([random.randrange(1, 200), random.randrange(1, 50) + random.choice([0.5, 0.25, 0.75, 0.99])])


VALUES: dict[str, Callable[[Random], Any]] = {
    "name": words.name,
    "age": lambda random: random.randrange(2, 99),
    "city": words.city,
    "country": lambda random: random.choice(words.COUNTRIES),
    "job": lambda random: random.choice(words.JOBS),
    "colour": lambda random: random.choice(words.COLOURS),
    "color": lambda random: random.choice(words.COLOURS),
    "animal": lambda random: random.choice(words.ANIMALS),
    "fruit": lambda random: random.choice(words.FRUITS),
    "price": _price,
    "count": lambda random: random.randrange(1, 100),
    "quantity": lambda random: random.randrange(1, 30),
    "title": lambda random: f"{words.made_up(random)} {words.made_up(random)}",
    "product": lambda random: random.choice(words.THINGS),
    "item": lambda random: random.choice(words.THINGS),
    "year": lambda random: random.randrange(1900, 2030),
    "size": lambda random: random.choice(["small", "medium", "large", random.randrange(30, 50)]),
    "active": lambda random: random.random() < 0.5,
    "email": lambda random: f"{words.name(random).lower()}@{words.made_up(random).lower()}.{random.choice(['org', 'com', 'net'])}",
    "id": lambda random: random.randrange(1, 10000),
    "pet": lambda random: random.choice(words.ANIMALS),
    "food": lambda random: random.choice(words.FOODS),
    "language": lambda random: random.choice(["English", "German", "Python", "French", "Rust", "Spanish"]),
    "team": words.made_up,
    "status": lambda random: random.choice(["open", "closed", "done", "new", "ready"]),
}  # fmt: skip


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields(random: Random) -> Exchange:
    """`turn this into JSON: name Tom, age 31`"""
    keys = random.sample(list(VALUES), random.randrange(1, 5))
    if random.random() < 0.15:
        keys[-1] = words.made_up(random).lower()
    values = {key: VALUES.get(key, lambda random: random.randrange(100))(random) for key in keys}
    link = random.choice([" ", " ", ": ", " is ", "=", " = "])
    comma = random.choice([", ", ", ", "; ", " and "])
    listed = comma.join(f"{key}{link}{_text(value)}" for key, value in values.items())
    if random.random() < 0.75:
        question = (
            typed(sample(TURN, random), random, bare=True).rstrip("?!. ")
            + random.choice([": ", ": ", " ", "\n"])
            + listed
        )
    else:
        question = listed + random.choice([". ", ", ", "\n"]) + typed(sample(AS_JSON, random), random, bare=True)
    return Exchange.of(question, json.dumps(values))


SENTENCES: list[tuple[str, list[str]]] = [
    ("{name} is {age} years old", ["name", "age"]),
    ("{name} is {age}", ["name", "age"]),
    ("{name} lives in {city}", ["name", "city"]),
    ("{name} is a {job} from {city}", ["name", "job", "city"]),
    ("{name} is a {job}", ["name", "job"]),
    ("{name}, {age}, lives in {city}", ["name", "age", "city"]),
    ("{name} works as a {job} in {city} and is {age} years old", ["name", "job", "city", "age"]),
    ("{name} bought {quantity} {product}", ["name", "quantity", "product"]),
    ("the {product} costs {price} euros", ["product", "price"]),
    ("{quantity} {item} cost {price} dollars", ["quantity", "item", "price"]),
    ("my name is {name} and i live in {city}", ["name", "city"]),
    ("my name is {name} and i am {age}", ["name", "age"]),
    ("i am {name}, {age} years old, from {country}", ["name", "age", "country"]),
    ("{name} has a {colour} {item}", ["name", "colour", "item"]),
    ("{name} has a {pet} and likes {food}", ["name", "pet", "food"]),
    ("the book {title} came out in {year}", ["title", "year"]),
    ("{city} is in {country}", ["city", "country"]),
    ("{name} likes {colour} and eats {fruit}", ["name", "colour", "fruit"]),
    ("write to {name} at {email}", ["name", "email"]),
    ("ticket {id} is {status}", ["id", "status"]),
]
KEYS = (
    "(answer|reply|respond|write|return|give me the data) (as|in) json with [the] (keys|fields) {keys}"
    "|(extract|get|give me|return|find) [the] {keys} as json|json with {keys}|extract {keys} (into|to|as) [a] json [object]"
    "|make [a] json [object] with [the] (keys|fields) {keys}|give [a] json [object] with {keys}"
)


def _asked_keys(random: Random) -> Exchange:
    """`extract name and age as JSON: Tom is 31 years old`"""
    pattern, fields = random.choice(SENTENCES)
    values = {key: VALUES[key](random) for key in fields}
    sentence = pattern.format(**{key: _text(value) for key, value in values.items()})
    asked = random.sample(fields, random.randrange(1, len(fields) + 1)) if random.random() < 0.3 else fields
    keys = ", ".join(asked[:-1]) + random.choice([" and ", ", ", " and "]) + asked[-1] if len(asked) > 1 else asked[0]
    if random.random() < 0.25:
        asked, order = fields, sample(TURN, random)
    else:
        order = sample(KEYS, random).replace("{keys}", keys)
    order = typed(order, random, exact=True, bare=True).rstrip("?!. ")
    sentence = sentence if random.random() < 0.5 else sentence[0].upper() + sentence[1:] + "."
    question = f"{order}{random.choice([': ', chr(10), '. '])}{sentence}"
    if random.random() < 0.2:
        question = f"{sentence.rstrip('.')}. {order}."
    return Exchange.of(question, json.dumps({key: values[key] for key in asked}))


def _array(random: Random) -> Exchange:
    if random.random() < 0.4:
        items = random.sample(random.choice([words.NAMES, words.CITIES, words.FRUITS, words.COLOURS, words.ANIMALS, words.THINGS]),
                              random.randrange(2, 6))  # fmt: skip
        if random.random() < 0.3:
            items = [words.made_up(random) for _ in items]
        question = typed(
            sample(f"(write|put|give|return|turn) (these|this|the following) {ARRAY}|{ARRAY}", random),
            random,
            bare=True,
        )
        return Exchange.of(
            question.rstrip("?!. ") + ": " + random.choice([", ", ", ", " "]).join(items), json.dumps(items)
        )
    names, items = random.choice([*SETS, *[(names, items) for names, _, items in SERIES]])
    number = random.randrange(2, min(len(items), 7) + 1)
    from .arithmetic import WORDS

    shown = WORDS[number] if random.random() < 0.7 else str(number)
    question = sample(f"(list|name|give me|write|return) {shown} {names} ({ARRAY})|({ARRAY}) {shown} {names}"
                      f"|a json (list|array) (of|with) {shown} {names}|i (want|need) {shown} {names} ({ARRAY})|{shown} {names}, ({ARRAY}|json array only|json list)", random)  # fmt: skip
    return Exchange.of(typed(question, random, exact=True), json.dumps(items[:number]))


def _command(random: Random) -> Exchange:
    """The command for something, as {"command": ...}."""
    intent = random.choice([intent for intent in intents.load().values() if intent.command and intent.how])
    verb = intents.filled(sample(random.choice(intent.how), random), random)
    question = random.choice(
        [f"how do i {verb}", f"which command do i use to {verb}", f"what is the command to {verb}", f"how to {verb}"]
    )
    order = sample(
        f"({AS_JSON}) with the key command|{AS_JSON}, key command|{AS_JSON} like " + '{"command": ...}', random
    )
    text = typed(question, random, bare=True) + random.choice([" ", ". ", "\n"]) + order[0].upper() + order[1:]
    return Exchange.of(text, json.dumps({"command": intent.command}))


def _yes_no(random: Random) -> Exchange:
    n, divisor = random.randrange(100), random.choice(["even", "odd"])
    question = f"is {n} {divisor}? " + sample(f"{AS_JSON} with the key answer and true or false", random)
    return Exchange.of(
        typed(question, random, exact=True, bare=True), json.dumps({"answer": (n % 2 == 0) == (divisor == "even")})
    )


def _sum(random: Random) -> Exchange:
    a, b = random.randrange(50), random.randrange(50)
    sign, result = random.choice([("+", a + b), ("plus", a + b)])
    key = random.choice(["answer", "result", "sum"])
    question = sample(f"(what is|how much is|calculate|compute) {a} {sign} {b}", random)
    order = sample(
        f"({AS_JSON}) (with the key {key}|under the key {key}|, key {key}|with the field {key})", random
    ).replace(" ,", ",")
    if random.random() < 0.3:
        return Exchange.of(f"{question} and {order}", json.dumps({key: result}))
    return Exchange.of(
        f"{typed(question, random, exact=True, bare=True).rstrip('?!. ')}? {order[0].upper()}{order[1:]}.",
        json.dumps({key: result}),
    )
