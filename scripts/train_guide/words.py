"""Words for dialogues: people, places and things. There are many, so that the model learns to copy and not the words."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

NAMES = """Ada Alan Alice Amir Ana Andrea Anna Anton Aria Arthur Asha Ben Bianca Bob Boris Bruno Carla Carlos Carol Chen
Chloe Clara Clemens Dana Daniel David Diego Dora Dmitri Edgar Elena Eli Elsa Emil Emma Erik Esther Eva Farah Felix Fiona
Frank Frida George Gita Grace Greta Gustav Hana Hans Harry Hassan Heidi Helen Henry Hiro Hugo Ida Igor Ines Ingrid Irene
Isaac Ivan Jack Jakob James Jana Jane Javier Joan Johanna John Jonas Jose Julia Kai Karen Karl Kenji Kira Kofi Lara Laura
Lea Leo Lena Liam Lina Linus Lisa Louis Luca Lucy Luna Maja Marco Maria Mark Marta Martin Mary Matteo Max Maya Mia Michael
Mila Milan Mina Mira Mohamed Nadia Naomi Nico Nils Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Paula Pavel Pedro Peter
Petra Pia Priya Quentin Rachel Rafael Raj Ravi Rita Robert Robin Rosa Ruth Sam Sara Sasha Selma Simon Sofia Stefan Sven
Tara Theo Thomas Tim Tina Tom Uma Ursula Vera Victor Wanda Walter Willem Xenia Yara Yusuf Zara Zoe""".split()
CITIES = """Amsterdam Athens Austin Bangkok Barcelona Basel Beijing Berlin Bergen Bern Bogota Bologna Boston Bremen Brussels
Bucharest Budapest Cairo Chicago Cologne Copenhagen Dakar Delhi Denver Dresden Dublin Edinburgh Florence Frankfurt Geneva
Genoa Ghent Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyiv Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon
Liverpool London Lyon Madrid Malaga Manila Marseille Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples
Nice Osaka Oslo Ottawa Oxford Palermo Paris Perth Porto Prague Quito Reykjavik Riga Rome Rotterdam Salzburg Santiago
Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Stuttgart Sydney Tallinn Tokyo Toronto Trieste Tunis Turin Utrecht
Valencia Venice Vienna Vilnius Warsaw Zagreb Zurich""".split()
THINGS = """apple banana cherry kiwi lemon mango orange pear plum melon dog cat horse cow mouse rabbit fox wolf lion tiger
frog eagle owl duck book lamp chair table pen bicycle phone laptop camera jacket shirt cup bottle clock guitar umbrella
ticket coffee tea bread cheese chocolate grape peach strawberry sheep goat pig bear elephant monkey snake hen parrot
turtle whale keyboard shoes backpack pizza pasta rice soup salad curry noodles cake bridge window garden river winter""".split()
STARTS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w y z".split()
MIDDLES = "a e i o u ai ei ou ia eo".split()
ENDS = "n r l s t x m nd rk lla na ro vi dan mir del ton".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def made_up(random: Random) -> str:
    """A capitalised random word that does not exist."""
    word = random.choice(STARTS) + random.choice(MIDDLES)
    if random.random() < 0.6:
        word += random.choice(STARTS) + random.choice(MIDDLES)
    return (word + random.choice(ENDS)).capitalize()


def rare(random: Random) -> str:
    """A word that does not exist: made up, random letters and digits, or an English word of no topic."""
    draw = random.random()
    if draw < 0.5:
        return made_up(random).lower()
    if draw < 0.75:
        return random.choice(LETTERS[:26]) + "".join(random.choices(LETTERS, k=random.randrange(2, 10)))
    return english(random)


def near(name: str, random: Random) -> str:
    """A name with one letter more or less in its second half, or with an ending."""
    index = random.randrange(len(name) // 2 + 1, len(name) + 1)
    more = name[:index] + random.choice(LETTERS[:26]) + name[index:]
    return random.choice([name + "s", name + random.choice("2x"), more, name[: index - 1] + name[index:]])


def english(random: Random) -> str:
    """An English word that no topic and no synonym contains: the subject of a question about another thing."""
    return random.choice(_english())


@cache
def _english() -> list[str]:
    folder = Path(__file__).parent
    own = " ".join(file.read_text("utf-8").lower() for file in (folder / "thesaurus.txt", *folder.glob("topics/*.txt")))
    return sorted(set(re.findall(r"\b[a-z]{4,12}\b", " ".join(topics.values()))) - set(re.findall("[a-z]+", own)))


def name(random: Random) -> str:
    return made_up(random) if random.random() < 0.4 else random.choice(NAMES)


def city(random: Random) -> str:
    return rare(random).capitalize() if random.random() < 0.4 else random.choice(CITIES)


def thing(random: Random) -> str:
    return rare(random) if random.random() < 0.5 else random.choice(THINGS)
