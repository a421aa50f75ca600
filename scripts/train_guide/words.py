"""Words for dialogues: people, places and things. There are many, so that the model learns to copy and not the words."""

from __future__ import annotations

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

COUNTRIES = """Argentina Australia Austria Belgium Bolivia Brazil Canada Chile China Colombia Croatia Cuba Denmark Egypt
Estonia Finland France Germany Ghana Greece Hungary Iceland India Indonesia Iran Ireland Israel Italy Japan Kenya Korea
Latvia Lithuania Mexico Morocco Nepal Norway Pakistan Peru Poland Portugal Romania Russia Scotland Serbia Spain Sweden
Switzerland Thailand Tunisia Turkey Ukraine Uruguay Vietnam""".split()

JOBS = """teacher doctor nurse baker painter plumber engineer lawyer farmer driver student pilot writer carpenter cook
designer gardener librarian musician programmer sailor scientist tailor waiter""".split()

COLOURS = "red orange yellow green blue purple pink brown black white grey turquoise violet".split()
ANIMALS = """dog cat horse cow sheep goat pig mouse rabbit fox wolf bear lion tiger elephant monkey snake frog eagle owl
duck hen parrot turtle whale""".split()
FRUITS = "apple banana cherry grape kiwi lemon mango orange peach pear plum melon strawberry".split()
THINGS = """book lamp chair table pen bicycle phone laptop keyboard camera jacket shirt shoes cup bottle backpack clock
guitar umbrella ticket coffee tea bread cheese chocolate""".split()
FOODS = "pizza pasta rice soup salad bread curry sushi noodles pancakes cake cheese chocolate".split()
TASKS = """(call|email|visit|meet) (mum|dad|the dentist|the bank|my boss|anna|the plumber)
(buy|get|order) (milk|bread|stamps|flowers|a present|new shoes|coffee)
(water the plants|feed the cat|walk the dog|clean the kitchen|do the dishes|take out the trash|pay the rent)
(write|finish|send) the (report|letter|invoice|slides|essay)""".splitlines()

STARTS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w y z".split()
MIDDLES = "a e i o u ai ei ou ia eo".split()
ENDS = "n r l s t x m nd rk lla na ro vi dan mir del ton".split()


NAME_ENDS = "ty ia ine son elle wick ette ora ena ika ius ander ert olf ild kia lie ney ford berg mann ova ski ez ito ura ush een".split()


def made_up(random: Random) -> str:
    """A capitalised random word that does not exist."""
    word = random.choice(STARTS) + random.choice(MIDDLES)
    if random.random() < 0.6:
        word += random.choice(STARTS) + random.choice(MIDDLES)
    return (word + random.choice(ENDS)).capitalize()


def name(random: Random) -> str:
    draw = random.random()
    if draw < 0.3:
        return made_up(random)
    if draw < 0.55:
        return (random.choice(NAMES)[: random.randrange(2, 6)] + random.choice(NAME_ENDS)).capitalize()
    return random.choice(NAMES)


def city(random: Random) -> str:
    return made_up(random) if random.random() < 0.2 else random.choice(CITIES)
