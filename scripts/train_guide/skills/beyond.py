"""What a tiny model cannot do: knowledge, long texts, code. It says so and names `localllm pull`."""

from __future__ import annotations

from random import Random

from .. import words
from ..dialogue import Exchange
from ..grammar import sample, typed
from ..intents import what_frame
from ..noise import vary

KNOWLEDGE = (
    "That is beyond me: I am a tiny built-in model. A larger one may know: `localllm pull org/repo`, "
    "for example `localllm pull Qwen/Qwen3-0.6B`."
)
WRITING = (
    "I am too tiny to write that well. Get a larger model with `localllm pull org/repo`, "
    "for example `localllm pull Qwen/Qwen3-0.6B`, and ask it."
)

SUBJECTS = """the roman empire|the french revolution|world war two|the second world war|the middle ages|ancient egypt|quantum physics
relativity|black holes|photosynthesis|evolution|dna|gravity|electricity|the big bang|climate change|inflation|democracy|philosophy
buddhism|religion|economics|the stock market|bitcoin|machine learning|neural networks|transformers|deep learning|linear algebra
calculus|geometry|chemistry|biology|medicine|vaccines|cancer|the heart|the brain|dinosaurs|volcanoes|earthquakes|the ocean|the moon
the sun|mars missions|space travel|football rules|chess openings|cooking|baking bread|wine|coffee brewing|gardening|yoga|meditation
music theory|mozart|beethoven|the beatles|shakespeare|picasso|einstein|newton|napoleon|cleopatra|politics|the united nations
the european union|kubernetes|docker|rust|java|sql|html|javascript|linux kernels|compilers|operating systems|blockchain|encryption
the immune system|vitamins|diabetes|headaches|sleep|dreams|psychology|love|happiness|the meaning of life|time travel|taxes|law
insurance|marketing|startups|history|geography|astronomy|poetry|opera|oil paintings|the bible|the koran|greek myths|roman gods|vikings|samurai|pirates|knights|castles|the cold war|the moon landing
the industrial revolution|slavery|human rights|the constitution|elections|presidents|kings and queens|wars|peace|weapons|tanks|submarines
nuclear reactors|nuclear power|solar panels|wind turbines|batteries|electric cars|trains|airplanes|rockets|satellites|telescopes|microscopes
string theory|particle physics|atoms|molecules|acids|metals|crystals|magnetism|heat|light|sound|waves|energy|entropy|statistics|probability
prime numbers|fractions|integrals|derivatives|matrices|trigonometry|logic|set theory|game theory|cryptography|algorithms|databases|robots
viruses|bacteria|fungi|cells|genes|blood|bones|muscles|skin|eyes|teeth|allergies|asthma|flu|a sore throat|stress|depression|diets|fasting
proteins|pregnancy|babies|children|teenagers|parents|marriage|friendship|schools|universities|exams|jobs|salaries|pensions|mortgages|loans
credit cards|banks|shares|gold|oil|trade|tariffs|poverty|hunger|migration|refugees|cities|villages|bridges|skyscrapers|pyramids|temples
mountains|rivers|lakes|deserts|forests|islands|glaciers|storms|tornadoes|rain|snow|seasons on mars|leaves|flowers|mushrooms|insects|spiders
sharks|penguins|wolves|horses|birds|fish|frogs|snakes|sourdough|pizza dough|sushi|beer|whisky|tea|olive oil|spices|knitting|painting|drawing
photography|guitars|violins|jazz|rock music|hip hop|dance|theatre|films|actors|superheroes|video games|board games|football|tennis|golf|the olympics
marathons|swimming|climbing|sailing|fishing|camping|hotels|holidays in portugal|flights|passports|visas|languages|grammar|latin|sanskrit|emojis|opera|ballet|cinema|architecture|fashion|whales|bees|cats|dogs|trees""".replace(
    "\n", "|"
).split("|")
PEOPLE = """shakespeare|albert einstein|napoleon|cleopatra|mozart|beethoven|bach|picasso|leonardo da vinci|isaac newton|marie curie|gandhi
lincoln|caesar|aristotle|plato|goethe|darwin|tesla|edison|columbus|alan turing|ada lovelace|elvis presley|michael jackson|taylor swift
elon musk|bill gates|steve jobs|the president|the prime minister|the king|the pope|the chancellor|the mayor|messi|ronaldo""".replace(
    "\n", "|"
).split("|")
TASKS = """a poem|an essay|a story|a novel|a song|a letter|an email|a speech|a report|a blog post|a short story|a haiku|a limerick|a love letter
a recipe|a summary|an article|a fairy tale|a screenplay|a cover letter|a resume|a business plan|a shopping plan|a lesson plan|a review
a birthday card|a toast|a rap|a sonnet|a diary entry|a newsletter|a press release|a tweet|a travel plan""".replace(
    "\n", "|"
).split("|")
CODE = """a python function|a python script|a program|a sorting algorithm|a web server|a website|a bash script|a sql query|a regular expression
a game in javascript|a class in java|a c program|a rust function|quicksort|a binary search|fibonacci in python|a calculator in python|unit tests
html for a page|a css style|a dockerfile|a recursive function|code|some code|an app|a chatbot""".replace(
    "\n", "|"
).split("|")

FACTS = (
    "(which|what) year (did|was) (the berlin wall fall|{person} born|{subject} (start|begin|end)|{city} founded|{thing} invented)|in which year was {thing} (invented|made|written)"
    "|should i (refinance my house|take a loan|sell {subject}|buy {subject}|eat {subject}|drink {subject}|study {subject}|move to {city}|quit smoking|call a lawyer)"
    "|(best|cheapest|nicest|fastest|good) (laptop|phone|car|camera|hotel|bike|tv|book|film|restaurant) (under|for|below) {year} (euros|dollars)|(best|good) (hotel|restaurant|museum|beach) in {place}"
    "|(is|are) {subject} (good|bad|healthy|dangerous|safe|expensive|legal|true|toxic) [for me|for the heart|for children|for dogs]|why (do|does) {subject} (exist|matter|happen|hurt|work|smell|fly|sing|purr|burn|fall|grow)"
    "|how (many|much) (calories|sugar|people|water|money|legs|teeth|words|species) (are|is|has|have) [in|there in] {subject}|how (does|do) (a|an|the) ({x} stove|fridge|engine|toaster|radio|{x}|microwave|lock|motor|camera|telephone|{x} machine) work"
    "|what (is|are) (a|an|the) ({x}|neuron|protein|planetoid|galaxy|sonnet|comet|enzyme|tariff|verb|adverb|theorem)|who (directed|produced|starred in|wrote|sang|played) {x}|who is the (ceo|head|founder|owner|boss) of {x}"
    "|which (team|player|country|party|film|actor|singer) won [the {x}|last night|yesterday|in {year}]|(what is|give me) the (plot|ending|moral|author) of {x}|when is (easter|ramadan|the next holiday|the next election|the next full moon)"
    "|(tell me|what do you know) about (the {x} empire|the {x} dynasty|lake {x}|mount {x}|king {x}|{x})|how (tall|high|deep|long|old) is (mount {x}|lake {x}|{x}|{city}|the {x})|what is the capital of {x}"
    "|(give me|tell me|name) (three|five|some|ten) facts (on|about) {subject}|compare {subject} and {subject}|what is the difference between {subject} and {subject}|"
    "what is the (capital|population|currency|language|flag|president|area|highest mountain|national dish|time zone) of {country}"
    "|who is the (president|king|queen|prime minister|chancellor) of {country}|where is {country}|which (languages|language) do people speak in {country}"
    "|what is the capital city of {country}|how many people live in {place}|where is {city}|how far is it from {city} to {city}|how old is {city}"
    "|what can i (see|do|visit|eat) in {place}|which hotels are good in {city}|how do i get to {city}|what is the best restaurant in {city}"
    "|who (was|is) {person}|when was {person} born|when did {person} die|what did {person} (do|write|invent|discover|say)|tell me about {person}"
    "|who (invented|discovered|wrote|painted|composed|built|founded|won) {thing}|when was {thing} (invented|discovered|built|written)"
    "|(explain|describe) {subject}|what is {subject}|tell me (about|something about) {subject}|how does {subject} work|what do you know about {subject}"
    "|why (is|are) {subject} important|what causes {subject}|when did {subject} (begin|start|end)|what is the history of {subject}|teach me {subject}"
    "|give me (facts|five facts|information) about {subject}|can you explain {subject}|i want to learn about {subject}|who knows about {subject}"
    "|how (tall|high|long|deep|heavy|fast|big|far away) is (the eiffel tower|mount everest|the nile|the moon|an elephant|a whale|the sun|light|the earth|the amazon)"
    "|why is the (sky blue|sea salty|grass green|sun hot|moon round)|how many (bones|teeth|stars|cells|people|species) (are there|do we have) [in the body|in the sky|in the world]"
    "|how do (birds fly|planes fly|magnets work|computers work|plants grow|volcanoes erupt|engines work|fish breathe)|what do (bears|cows|whales|bees|owls) eat"
    "|who won the (world cup|election|game|match|championship|race|nobel prize) [yesterday|last year|in 2010|in 1998]|what (is|are) the (latest|) news [today|about {subject}]"
    "|what happened (in {year}|yesterday|in {city} in {year}|today)|what is the (price of gold|bitcoin price|exchange rate|stock price of apple)"
    "|how do i (cook rice|bake a cake|fix a bike|tie a tie|lose weight|learn piano|make pancakes|grow tomatoes|repair a tap|cure a cold|invest money|write a will|boil an egg|change a tyre)"
    "|i have (a headache|a fever|back pain|a cold|a rash), what should i (do|take)|should i (buy shares|sell my house|marry|change my job|see a doctor|learn french)"
    "|what is the (chemical formula|boiling point|atomic number|density|melting point) of (water|gold|iron|salt|oxygen|helium)|what is the speed of (light|sound)|what is (pi|the square root of two|e|infinity)"
    "|translate {word} (to|into) {tongue}|how do you say {word} in {tongue}|what is {word} in {tongue}|what does {word} mean in {tongue}|what does the word {word} mean|define {word}|how do you spell {word}"
    "|(solve|integrate|differentiate) (x squared|the equation|this equation|sin x|x^2 + 3x = 4|2x + 3 = 7)|what is the (derivative|integral) of (x squared|sin x|e^x)"
    "|(who is|what is) the (best|richest|tallest|fastest|oldest|greatest) (person|singer|player|city|country|car|phone|film|book|band) [in the world|ever|of all time]"
    "|recommend (a book|a film|a movie|a restaurant|a song|a series|a hotel|a laptop|a car)|what (film|movie|book|series) should i (watch|read)"
    "|is there life on (mars|venus|other planets)|does god exist|what is the meaning of life|are (ghosts|aliens|angels) real|what is (love|truth|time|art|consciousness)"
    "|who played in (titanic|star wars|casablanca)|who sang (yesterday|imagine|thriller|hello)|what is the plot of (hamlet|faust|titanic|dune|the hobbit)"
)
WRITE = (
    "(write|compose|make|create|draft|generate|give me) [me] {task} [about {subject}|for {name}|about {country}|in the style of shakespeare|about my cat|of 500 words]"
    "|can you (write|compose|make|draft) {task} [about {subject}|for me|for {name}]|i need {task} [about {subject}]|please write {task} [about {subject}]|(help me write|could you write) {task}"
    "|(write|give me|make|program|code|implement|show me|create) [me] {code}|can you (write|program|code) {code}|i need {code}|help me (with|write) {code}|(fix|debug|explain|review|check|improve) (my|this) (code|program|script|function)"
    "|(summarize|summarise|shorten|rewrite|rephrase|proofread|translate|correct|analyse|analyze|review|improve) (this text|this article|my essay|the following text|this|the book|this document|my letter|this page|a long text)"
    "|(can you|could you) (summarize|summarise|translate|rewrite|proofread|correct) (this|a text|texts|my text|an article)|(can you|do you) (code|program|write code|write poems|write stories|write essays|translate|do homework|write python)"
    "|(do|help me with|solve) my (homework|maths homework|assignment|exam|thesis)|plan (a trip to {city}|my week|my holiday|a party|a wedding)|write (an introduction|a conclusion|a paragraph|two pages|a chapter) about {subject}"
)
INVENTED = "the telephone|the light bulb|penicillin|america|the mona lisa|faust|hamlet|the radio|the wheel|the internet|python|linux|paper|the piano|don quixote|the bible|the car|x-rays|dynamite|google|the printing press".split(
    "|"
)


CAPITAL = ("person", "thing", "subject", "x")


def _named(text: str, capital: bool) -> str:
    """As a name, `the ottoman empire` is `the Ottoman Empire`."""
    return " ".join(w if w in ("the", "of", "and") else w.capitalize() for w in text.split(" ")) if capital else text


def make(random: Random) -> Exchange:
    writing = random.random() < 0.35
    question = sample(WRITE if writing else FACTS, random)
    if not writing and random.random() < 0.2:
        question = what_frame("{subject}", random)
    fill = {
        "country": lambda: random.choice(words.COUNTRIES),
        "city": lambda: words.city(random),
        "place": lambda: random.choice([words.city(random), random.choice(words.COUNTRIES)]),
        "person": lambda: random.choice(PEOPLE),
        "thing": lambda: random.choice(INVENTED),
        "subject": lambda: random.choice(SUBJECTS) if random.random() < 0.8 else words.made_up(random).lower(),
        "x": lambda: words.made_up(random).lower(),
        "year": lambda: str(random.randrange(1000, 2030)),
        "word": lambda: random.choice([*words.THINGS, *words.ANIMALS, *words.FRUITS, words.made_up(random).lower()]),
        "tongue": lambda: random.choice(
            "french german spanish italian chinese japanese latin russian greek dutch".split()
        ),
        "task": lambda: random.choice(TASKS),
        "code": lambda: random.choice(CODE),
        "name": lambda: words.name(random),
    }
    capital = random.random() < 0.5
    for key, value in fill.items():
        while f"{{{key}}}" in question:
            question = question.replace(f"{{{key}}}", _named(value(), capital and key in CAPITAL), 1)
    return Exchange.of(typed(vary(question, random), random), WRITING if writing else KNOWLEDGE, name="beyond")
