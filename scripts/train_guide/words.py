"""Words for dialogues: people, places and things. There are many, so that the model learns to copy and not the words."""

from __future__ import annotations

from random import Random

NAMES = """Ada Alan Alice Amir Ana Andrea Anna Anton Aria Arthur Asha Ben Bianca Bob Boris Bruno Carla Carlos Carol Chen
Chloe Clara Dana Daniel David Diego Dora Dmitri Edgar Elena Eli Elsa Emil Emma Erik Esther Eva Farah Felix Fiona Frank
Frida George Gita Grace Greta Hana Hans Harry Hassan Heidi Helen Henry Hiro Hugo Ida Igor Ines Ingrid Irene Isaac Ivan
Jack Jakob James Jana Jane Joan Johanna John Jonas Jose Julia Kai Karen Karl Kenji Kira Kofi Lara Laura Lea Leo Lena Liam
Lina Lisa Louis Luca Lucy Maja Marco Maria Mark Marta Mary Max Maya Mia Mila Mina Mohamed Nadia Nico Nina Noah Nora Olga
Omar Oscar Otto Paul Paula Pavel Petra Pia Priya Rachel Raj Rita Robert Rosa Sam Sara Simon Sofia Sven Tara Theo Thomas
Tim Tina Tom Uma Ursula Vera Victor Wanda Xenia Yara Yusuf Zara Zoe""".split()
CITIES = """Amsterdam Athens Austin Bangkok Barcelona Basel Beijing Berlin Bergen Bern Bogota Bologna Boston Bremen Brussels
Cairo Chicago Cologne Dakar Delhi Denver Dublin Edinburgh Florence Frankfurt Geneva Genoa Graz Hamburg Hanoi Havana
Helsinki Istanbul Jakarta Kyiv Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon Madrid Manila Miami Milan Moscow
Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa Oxford Paris Porto Prague Quito Riga Rome Seattle Seoul Sofia Sydney
Tallinn Tokyo Toronto Tunis Turin Utrecht Venice Vienna Vilnius Warsaw Zagreb Zurich""".split()
THINGS = """apple banana cherry kiwi lemon mango orange pear plum melon dog cat horse cow mouse rabbit fox wolf lion tiger
frog eagle owl duck book lamp chair table pen bicycle phone laptop camera jacket shirt cup bottle clock guitar umbrella
ticket coffee tea bread cheese chocolate""".split()
STARTS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w y z".split()
MIDDLES = "a e i o u ai ei ou ia eo".split()
ENDS = "n r l s t x m nd rk lla na ro vi dan mir del ton".split()


def made_up(random: Random) -> str:
    """A capitalised random word that does not exist."""
    word = random.choice(STARTS) + random.choice(MIDDLES)
    if random.random() < 0.6:
        word += random.choice(STARTS) + random.choice(MIDDLES)
    return (word + random.choice(ENDS)).capitalize()


def name(random: Random) -> str:
    return made_up(random) if random.random() < 0.4 else random.choice(NAMES)


def city(random: Random) -> str:
    return made_up(random) if random.random() < 0.2 else random.choice(CITIES)


def thing(random: Random) -> str:
    return made_up(random).lower() if random.random() < 0.4 else random.choice(THINGS)
