"""Short lists everybody knows: all of one, some of one, what comes next, how many, and counting."""

from __future__ import annotations

from random import Random

from .. import words
from ..dialogue import Exchange
from ..grammar import sample, typed
from .arithmetic import WORDS

# name, one item, items, whether their order means something
SERIES: list[tuple[str, str, list[str]]] = [
    ("(days of the week|weekdays|days in a week|days)", "day",
     "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()),
    ("(months of the year|months|months in a year)", "month",
     "January February March April May June July August September October November December".split()),
    ("(planets|planets of the solar system|planets in the solar system|planets of our solar system)", "planet",
     "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()),
    ("(seasons|seasons of the year)", "season", "spring summer autumn winter".split()),
    ("(colours of the rainbow|rainbow colours|colors of the rainbow|rainbow colors)", "rainbow colour",
     "red orange yellow green blue indigo violet".split()),
]  # fmt: skip
SETS: list[tuple[str, list[str]]] = [
    ("(colours|colors)", words.COLOURS),
    ("(primary colours|primary colors)", "red yellow blue".split()),
    ("(animals|kinds of animals)", words.ANIMALS),
    ("(fruits|kinds of fruit|fruit)", words.FRUITS),
    ("(vegetables|kinds of vegetables)", "carrot potato tomato onion pepper cabbage spinach cucumber leek bean".split()),
    ("(continents)", "Africa,Antarctica,Asia,Australia,Europe,North America,South America".split(",")),
    ("(oceans|the oceans)", "Atlantic,Pacific,Indian,Arctic,Southern".split(",")),
    ("(vowels)", "a e i o u".split()),
    ("(programming languages|coding languages|computer languages)", "Python C Java Rust Go JavaScript Ruby Haskell Swift Lisp".split()),
    ("(countries|nations)", "Italy Japan Brazil Kenya Canada India Norway Peru Egypt Spain".split()),
    ("(capitals|capital cities|cities|big cities)", "Paris Tokyo London Rome Cairo Berlin Madrid Lima Oslo Vienna".split()),
    ("(musical instruments|instruments)", "piano guitar violin flute drum trumpet cello harp clarinet organ".split()),
    ("(sports|kinds of sport)", "football tennis swimming running cycling hockey golf rowing skiing judo".split()),
    ("(the senses|senses|human senses)", "sight hearing smell taste touch".split()),
    ("(metals)", "iron copper gold silver zinc tin lead nickel".split()),
    ("(shapes|geometric shapes)", "circle square triangle rectangle oval hexagon".split()),
    ("(trees|kinds of trees)", "oak pine birch maple beech ash willow fir".split()),
    ("(flowers|kinds of flowers)", "rose tulip lily daisy violet iris poppy sunflower".split()),
    ("(birds|kinds of birds)", "eagle owl robin sparrow duck swan crow parrot".split()),
    ("(body parts|parts of the body)", "head arm hand leg foot knee shoulder back".split()),
    ("(european countries|countries in europe)", "France Germany Italy Spain Poland Sweden Greece Portugal".split()),
    ("(drinks)", "water tea coffee milk juice lemonade".split()),
    ("(clothes|pieces of clothing)", "shirt trousers jacket hat socks shoes dress scarf".split()),
    ("(operating systems)", "Linux Windows macOS FreeBSD Android".split()),
    ("(backends of localllm|localllm backends)", "cuda hip npu xpu mlx cpu llamacpp".split()),
]  # fmt: skip
OPPOSITES = dict(
    pair.split("-")
    for pair in (
        "hot-cold big-small up-down left-right day-night black-white fast-slow old-new early-late open-closed full-empty "
        "high-low rich-poor hard-soft wet-dry light-dark long-short loud-quiet happy-sad good-bad strong-weak true-false "
        "first-last inside-outside near-far thick-thin heavy-light easy-difficult buy-sell start-stop push-pull yes-no "
        "above-below before-after love-hate win-lose clean-dirty"
    ).split()
)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VERB = "(list|name|give me|tell me|write down|enumerate|show me|can you list|can you name|please list|could you name|i need|say|mention|write|i want|come up with|can you come up with|please name|think of|i would like to hear|let me hear|give|show|recite|what are some examples of)"


def make(random: Random) -> Exchange:
    return random.choices([_some, _all, _next, _how_many, _count, _opposite, _letter], [8, 4, 4, 1, 2, 2, 1])[0](random)


def written(items: list[str], style: str) -> str:
    if style == "bullets":
        return "\n".join(f"- {item}" for item in items)
    if style == "numbers":
        return "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1))
    return ", ".join(items)


STYLES = {
    "plain": ["", "", "", "", " separated by commas", " in one line"],
    "bullets": [
        " as a bulleted list",
        " as bullet points",
        " as a list with bullets",
        " with bullets",
        " in bullet points",
    ],
    "numbers": [" as a numbered list", " as an ordered list", " with numbers", " numbered"],
}


def _styled(question: str, items: list[str], random: Random) -> Exchange:
    style = random.choices(list(STYLES), [4, 1, 1])[0]
    question += random.choice(STYLES[style])
    return Exchange.of(typed(question, random, exact=True), written(items, style))


def _some(random: Random) -> Exchange:
    names, items = random.choice([*SETS, *[(names, items) for names, _, items in SERIES]])
    number = random.randrange(2, min(len(items), 7) + 1)
    shown = WORDS[number] if random.random() < 0.7 else str(number)
    ask = sample(f"({VERB}|what are|) {shown} [different|random|common] {names}", random)
    return _styled(ask, items[:number], random)


def _all(random: Random) -> Exchange:
    names, _, items = random.choice(SERIES)
    ask = sample(
        f"{VERB} [all|all the|the] {names}|what are [all|] the {names}|which {names} (are there|exist|do you know)|(the|all|all the) {names}|recite the {names}|which are the {names}",
        random,
    )
    return _styled(ask, items, random)


def _next(random: Random) -> Exchange:
    _, one, items = random.choice(SERIES)
    at = random.randrange(len(items))
    later = random.random() < 0.6
    item, other = items[at], items[(at + (1 if later else -1)) % len(items)]
    word = random.choice(
        ["after", "comes after", "follows", "is after", "comes right after", "comes next after", "is next after"]
        if later
        else ["comes before", "is before", "precedes", "comes right before", "is right before"]
    )
    if word == "after":
        word = "comes after"
    question = f"(which|what) {one} {word} {item}|(what is|tell me|) the {one} (after|before) {item}"
    question = question.replace("(after|before)", "after" if later else "before")
    return Exchange.of(
        typed(sample(question, random), random, exact=True), f"{other} comes {'after' if later else 'before'} {item}."
    )


def _how_many(random: Random) -> Exchange:
    names, _, items = random.choice(SERIES)
    question = sample(
        f"how many {names} are there|what is the number of {names}|how many {names} (exist|does a year have|are in it)|the number of {names}",
        random,
    )
    return Exchange.of(typed(question, random), f"There are {len(items)}: {', '.join(items)}.")


def _count(random: Random) -> Exchange:
    first = random.choice([1, 1, 1, random.randrange(1, 20)])
    last = first + random.randrange(2, 12)
    if random.random() < 0.2:
        question, numbers = f"count [down|backwards] (from {last} to {first})", range(last, first - 1, -1)
        question = f"count (down|backwards) from {last} to {first}"
    elif first == 1 and random.random() < 0.5:
        question, numbers = f"(count|please count|can you count) [up] to {last}", range(1, last + 1)
    else:
        question, numbers = (
            f"(count|please count|can you count|list the numbers) from {first} to {last}",
            range(first, last + 1),
        )
    return Exchange.of(typed(sample(question, random), random, exact=True), ", ".join(map(str, numbers)))


def _opposite(random: Random) -> Exchange:
    word, other = random.choice(list(OPPOSITES.items()))
    question = sample(
        f"(what is|tell me|) the opposite of {word}|what is the antonym of {word}|which word is the opposite of {word}|opposite of {word}|the (reverse|contrary) of {word}|what is the (reverse|contrary) of {word}",
        random,
    )
    return Exchange.of(typed(question, random, exact=True), f"The opposite of {word} is {other}.")


def _letter(random: Random) -> Exchange:
    at = random.randrange(25)
    a, b = ALPHABET[at], ALPHABET[at + 1]
    if random.random() < 0.7:
        question, answer = (
            f"(which|what) letter (comes after|follows|is after|stands after) {a}|(the|) letter after {a}",
            f"{b} comes after {a}.",
        )
    else:
        question, answer = (
            f"(which|what) letter (comes before|is before|precedes|stands before) {b}|(the|) letter before {b}",
            f"{a} comes before {b}.",
        )
    return Exchange.of(typed(sample(question, random), random, exact=True), answer)
