"""Small sums. Digits are single tokens; anything larger is declined rather than guessed."""

from __future__ import annotations

from random import Random

from .. import words
from ..dialogue import Exchange
from ..grammar import sample, typed

WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
ASK = (
    "(what is|how much is|calculate|compute|work out|please calculate|can you calculate|what does|tell me|solve|add up|"
    "what do i get for|what is the result of|do you know what|i need|quick math:|the sum|what about|and) {}|{}|{} is|{} ="
    "|{} equals|what is {} equal to|how much does {} make|what do you get for {}|{} makes what|can you do {}"
)
PLUS = ["{} + {}", "{}+{}", "{} plus {}", "the sum of {} and {}", "{} and {} together", "{} added to {}"]
MINUS = ["{} - {}", "{}-{}", "{} minus {}", "{} take away {}", "{} less {}"]
TIMES = ["{} * {}", "{}*{}", "{} times {}", "{} x {}", "{} multiplied by {}", "the product of {} and {}", "{} × {}"]
OVER = ["{} / {}", "{}/{}", "{} divided by {}", "{} : {}"]
TOO_LARGE = (
    "That sum is too large for a tiny model like me. I do whole numbers below 1000; a larger model may do better: "
    "`localllm pull org/repo`."
)


def make(random: Random) -> Exchange:
    return random.choices([_sum, _story, _compare, _shortcut, _too_large], [14, 2, 2, 2, 1])[0](random)


def _number(value: int, random: Random, spelled: bool) -> str:
    return WORDS[value] if spelled and value <= 20 else str(value)


def _pair(random: Random) -> tuple[str, int, int, int]:
    """Operator, operands and result, all whole and not negative."""
    sign = random.choice("++--*/")
    top = random.choice([10, 20, 100, 100, 100, 1000])
    if sign == "+":
        a, b = random.randrange(top), random.randrange(top)
        return sign, a, b, a + b
    if sign == "-":
        a, b = sorted((random.randrange(top), random.randrange(top)), reverse=True)
        return sign, a, b, a - b
    a, b = random.choice([(random.randrange(13), random.randrange(13)), (random.randrange(21), random.randrange(21)),
                          (random.randrange(11), random.randrange(100))])  # fmt: skip
    if random.random() < 0.5:
        a, b = b, a
    return ("*", a, b, a * b) if sign == "*" or b == 0 else ("/", a * b, b, a)


SIGNS = {"+": (PLUS, "+"), "-": (MINUS, "-"), "*": (TIMES, "×"), "/": (OVER, "/")}


ORDERS = {
    "+": "add {a} (to|and|plus) {b}|if i add {a} and {b}, what (comes out|do i get|is it)|{a} and {b} makes what|put {a} and {b} together|add up {a} and {b}"
    "|(give me|i need|what is) the sum of {a} and {b}|how much do {a} and {b} make|i have {a} and get {b}, what is the total",
    "-": "subtract {b} from {a}|take {b} [away] from {a}|what is left of {a} (after removing|when i remove|without|minus) {b}|remove {b} from {a}"
    "|(give me|what is) the difference (of|between) {a} and {b}|how much is {a} without {b}|{a} reduced by {b}|deduct {b} from {a}",
    "*": "multiply {a} (by|and|with|times) {b}|what do (i|you) get when (i|you) multiply {a} (by|and|with) {b}|(give me|what is) the product of {a} and {b}"
    "|{a} multiplied by {b}|how much is {a} times {b}",
    "/": "divide {a} by {b}|(how many times|how often) does {b} (go|fit) into {a}|split {a} (by|into) {b} [parts]|{a} over {b}|what is {a} (split|divided) by {b}",
}


def _sum(random: Random) -> Exchange:
    sign, a, b, result = _pair(random)
    forms, shown = SIGNS[sign]
    spelled = random.random() < 0.2
    form = random.choice([form for form in forms if not spelled or form[0] == "t" or " " in form])
    term = form.format(_number(a, random, spelled), _number(b, random, spelled))
    question = sample(ASK, random).replace("{}", term)
    if random.random() < 0.3:
        question = sample(ORDERS[sign], random)
        question = question.replace("{a}", _number(a, random, spelled)).replace("{b}", _number(b, random, spelled))
    return Exchange.of(typed(question, random, exact=True), f"{a} {shown} {b} = {result}.")


def _story(random: Random) -> Exchange:
    a, b = random.randrange(2, 50), random.randrange(1, 50)
    thing = random.choice([*words.FRUITS, "book", "coin", "marble", "pen", "card", "stamp"])
    things = thing[:-1] + "ies" if thing.endswith("y") else thing + ("es" if thing.endswith("ch") else "s")
    who = random.choice(["i", words.name(random)])
    have, get, give = ("have", "get", "give away") if who == "i" else ("has", "gets", "gives away")
    pronoun = "i" if who == "i" else "there"
    end = f"how many {things} " + (f"do {pronoun} have" if who == "i" else "are there") + random.choice(["", " now"])
    if random.random() < 0.5:
        question, answer = f"{who} {have} {a} {things} and {get} {b} more, {end}", f"{a} + {b} = {a + b} {things}."
    else:
        a, b = max(a, b), min(a, b)
        question, answer = f"{who} {have} {a} {things} and {give} {b}, {end}", f"{a} - {b} = {a - b} {things}."
    return Exchange.of(typed(question, random, exact=True, bare=True), answer)


def _compare(random: Random) -> Exchange:
    a, b = random.sample(range(random.choice([10, 100, 1000])), 2)
    larger = random.random() < 0.5
    word = random.choice(["larger", "bigger", "greater", "more"] if larger else ["smaller", "less"])
    question = sample(
        random.choice(["(what|which) is {word}, {a} or {b}", "which number is {word}: {a} or {b}", "is {a} {word} than {b}"])
        .replace("{word}", word).replace("{a}", str(a)).replace("{b}", str(b)),
        random,
    )  # fmt: skip
    result = max(a, b) if larger else min(a, b)
    if question.startswith("is "):
        holds = a == result
        shown = "larger" if larger else "smaller"
        answer = f"{'Yes' if holds else 'No'}, {a} is {'' if holds else 'not '}{shown} than {b}."
    else:
        answer = f"{result} is {'larger' if larger else 'smaller'} than {a + b - result}."
    return Exchange.of(typed(question, random, exact=True), answer)


def _shortcut(random: Random) -> Exchange:
    n = random.randrange(1, 100)
    kind = random.choice(["double", "half", "square", "next", "before", "even"])
    if kind == "double":
        question, answer = (
            f"(what is|) (double|twice|two times) {n}|double {n}|can you double {n}|{n} doubled",
            f"2 × {n} = {2 * n}.",
        )
    elif kind == "half":
        question, answer = (
            f"(what is|) half of {2 * n}|(what is|) the half of {2 * n}|halve {2 * n}|half of {2 * n} is",
            f"{2 * n} / 2 = {n}.",
        )
    elif kind == "square":
        n = n % 20 + 1
        question, answer = (
            f"(what is|) (the square of {n}|{n} squared|square of {n})|square {n}",
            f"{n} × {n} = {n * n}.",
        )
    elif kind == "next":
        question, answer = (
            f"(what|which) number (comes after|follows|is after) {n}|(the|) next number after {n}",
            f"{n + 1} comes after {n}.",
        )
    elif kind == "before":
        question, answer = (
            f"(what|which) number (comes before|precedes|is before) {n}|(the|) number before {n}",
            f"{n - 1} comes before {n}.",
        )
    else:
        question, answer = (
            f"is {n} (even|odd|even or odd|an even number|an odd number)",
            (f"{n} is {'odd' if n % 2 else 'even'}."),
        )
    return Exchange.of(typed(sample(question, random), random, exact=True), answer)


def _too_large(random: Random) -> Exchange:
    a, b = random.randrange(1000, 10 ** random.randrange(4, 9)), random.randrange(2, 10 ** random.randrange(2, 7))
    if random.random() < 0.5:
        a, b = b, a
    term = random.choice([*PLUS, *MINUS, *TIMES, *OVER]).format(a, b)
    if random.random() < 0.2:
        n = random.randrange(10, 5000)
        term = random.choice(
            [f"the square root of {n}", f"{n} percent of {a}", f"{n} to the power of {b}", f"{n / 10} * 3.7"]
        )
    return Exchange.of(typed(sample(ASK, random).replace("{}", term), random, exact=True), TOO_LARGE)
