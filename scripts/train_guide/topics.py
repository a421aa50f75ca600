"""The tables under topics/: questions as people ask them, and the facts that answer them. A topic is

# FACT + FACT         ids of facts.py, such as `command pull` or `quote pull / interruption`; or `say NAME`
how: verb phrases, put into frames such as "how do i ..."
what: noun phrases, put into frames such as "what is ..."
ask: whole questions
after FACT, FACT: questions that make sense only after the topics with these first facts
say: the answer of a `say` topic: small talk, and what guide is

A line is a pattern of grammar.py. No table states a fact about the program; facts.py reads them from the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from . import grammar, words
from .noise import vary

TOPICS = Path(__file__).with_name("topics")
PARTS = ("command", "flag", "flags", "setting", "slash", "key", "route", "error", "page", "make", "backend", "backends")

HOW = (
    "how (do|can|would|could|should|must) i {}|how (do|can) you {}|how to {}|how do (we|people) {}|how does one {}"
    "|what is the (command|flag|option|key|setting|way|trick|procedure) to {}|{}|{}, please|please {}|{}, how|{}: how"
    "|which (command|setting|option|key) (do i use|should i use|is there|do i need|lets me|helps me) to {}"
    "|what (do|should|must|would|can) i (type|run|enter|do|press|use) to {}|what do i have to (type|do|run) to {}"
    "|i (want|need|would like|am trying|wish|have|would love|plan|am going) to {}|what (brings|lets|helps) me to {}"
    "|(can|could|would|will) you (tell|show|teach) me how to {}|(tell|show|teach) me how to {}|explain how to {}"
    "|is there (a|any|some) (way|command|possibility|option|setting) to {}|is it (possible|easy|allowed) to {}"
    "|(can|may|could) i {}|(can|could) (it|localllm|one|we) {}|what is the (best|easiest|right|quickest) way to {}"
    "|i do not know how to {}|help me {}|help me to {}|what if i (want|need|have) to {}|i forgot how to {}"
    "|i cannot figure out how to {}|do you know how to {}|steps to {}|command to {}|let me {}|any way to {}"
    "|i want to know how to {}|someone told me that i can {}, how|my task is to {}|where do i {}|why can i not {}"
    "|i failed to {}|i am unable to {}|i should {}, what now|suppose i want to {}|say i want to {}|i must {}"
    "|how can i {}|is there (a|any) way to {}|need to {}|want to {}|trying to {}|looking for a way to {}|how exactly do i {}"
    "|what do i (press|use|type) to {}|(wanna|gotta|must) {}|i wonder how to {}|best way to {}|how could one {}|where can i {}"
    "|(which|what) command *|what *|a command that *|is there (something|a command|a way) that *"
    "|how does + work|what about +|tell me about +|is + possible|i need help with +|+|+, how|explain +|how is + done"
    "|what is the (command|procedure|way) for +|is there a command for +|does localllm support +|what do i need for +"
)
WHAT = (
    "what is {}|what are {}|what is {} for|what does {} mean|what is {} good for|explain {}|explain {} to me|{}|{}|{} explained"
    "|tell me about {}|tell me (something|more|a bit) about {}|what do you know about {}|(can|could) you explain {}"
    "|what do you mean by {}|i do not understand {}|describe {}|how does {} work|what about {}|what can you tell me about {}"
    "|i have a question about {}|i read about {}, what is it|what exactly is {}|i want to know about {}|meaning of {}"
    "|what is meant by {}|what is the (meaning|purpose|point|idea|use|role) of {}|why is there {}|define {}|more on {}"
    "|(please|could you) (describe|clarify|define) {}|give me a (short|quick) explanation of {}|{}, what is that"
    "|somebody mentioned {}|i keep reading about {}|what should i know about {}|information on {}|i wonder about {}"
    "|help me understand {}|(what|how) does {} do|in short, what is {}|i have never heard of {}|teach me about {}|about {}"
)
# The most frequent forms. The many others above teach the model to ignore the words around the topic.
PLAIN = {
    "how": "how (do|can|should|would) i {}|how do you {}|how to {}|(can|could) i {}|can (it|you) {}|i (want|need) to {}|is it possible to {}|{}|is there a way to {}",
    "what": "what (is|are) {}|what does {} (do|mean)|what is {} for|explain {}|tell me about {}|{}",
}  # fmt: skip
SLOTS: dict[str, Sequence[str] | Callable[[Random], str]] = {
    "{gb}": "{small} gb|{small}gb|{small} gigs|{small} gigabytes|{small} GB".split("|"),
    "{model}": (
        "qwen|llama|mistral|gemma|phi|qwen3|llama 3|llama 3.1|mistral 7b|gemma 3|phi-3|qwen 2.5|Qwen3-0.6B|Qwen/Qwen3-4B|a llama"
        "|Llama-3.2-1B|a qwen model|qwen3:0.6b|gpt-oss|deepseek|smollm|granite|glm"
    ).split("|"),
    "{nvidia}": (
        "rtx {n}|rtx 4090|rtx 3060|rtx 5090|geforce|gtx 1080|nvidia card|nvidia gpu|nvidia graphics card|a100|h100|h200|tesla t4"
        "|quadro|b200|3060 ti|4070|4070 ti|3080|4060|5080|1080 ti|2070 super|rtx 4060|rtx 3090|geforce rtx 4070|nvidia gpu with {n} gb"
    ).split("|"),
    "{radeon}": "radeon|rx 7900|rx 6800|rx 7900 xtx|amd card|amd gpu|amd graphics card|mi300|vega 64|6700 xt|7800 xt|9070 xt|rocm".split("|"),
    "{arc}": "arc a770|intel arc|intel card|intel gpu|intel graphics|iris xe|arc b580|battlemage|arc".split("|"),
    "{ascend}": "ascend|ascend 910|ascend 910b|huawei card|huawei npu|npu|huawei ascend".split("|"),
    "{mac}": "mac|macbook|macbook air|m1|m2|m3|m4|m1 mac|m3 max|imac|mac studio|apple laptop|mac mini|m4 pro|apple silicon|macos".split("|"),
    "{linux}": "linux|ubuntu|debian|fedora|arch|linux mint|opensuse|red hat|nixos|a linux machine|my linux laptop|ubuntu 24.04".split("|"),
    "{windows}": "windows|wsl|windows 10|windows 11|my windows pc|a windows machine|win 11|my windows laptop".split("|"),
    "{app}": "it|it|this|localllm|localllm|the program|this program|this app|the app|this thing|the software|this tool".split("|"),
    "{p}": "0 0.1 0.2 0.5 0.7 0.8 0.9 0.95 1 1.0 1.2 1.5 0.05".split(),
    "{other}": "ollama|lm studio|llama.cpp|vllm|gpt4all|jan|koboldcpp|llamafile|sglang|mlx-lm|lmstudio".split("|"),
    "{client}": (
        "open webui|vs code|vscode|cursor|continue.dev|zed|jetbrains|emacs|neovim|langchain|llamaindex|librechat|obsidian|aider|cline"
        "|home assistant|n8n|my editor|my ide|another chat program|an openai app|javascript|typescript|node.js|rust|go|java|c#"
    ).split("|"),
    "{person}": (
        "shakespeare|albert einstein|napoleon|cleopatra|mozart|beethoven|bach|picasso|leonardo da vinci|"
        "isaac newton|marie curie|gandhi|lincoln|caesar|aristotle|plato|goethe|darwin|tesla|edison|"
        "columbus|alan turing|ada lovelace|elvis presley|michael jackson|taylor swift|elon musk|bill gates|"
        "steve jobs|the president|the prime minister|the king|the pope|the chancellor|the mayor|messi|"
        "ronaldo|{x}|{x}|{x}|{x}"
    ).split("|"),
    "{subject}": (
        "the roman empire|the french revolution|world war two|the second world war|the middle ages|"
        "ancient egypt|quantum physics|relativity|black holes|photosynthesis|evolution|dna|gravity|"
        "electricity|the big bang|climate change|inflation|democracy|philosophy|buddhism|religion|"
        "economics|the stock market|bitcoin|machine learning|neural networks|transformers|deep learning|"
        "linear algebra|calculus|geometry|chemistry|biology|medicine|vaccines|cancer|the heart|the brain|"
        "dinosaurs|volcanoes|earthquakes|the ocean|the moon|the sun|mars missions|space travel|"
        "football rules|chess openings|cooking|baking bread|wine|coffee brewing|gardening|yoga|meditation|"
        "music theory|mozart|beethoven|the beatles|shakespeare|picasso|einstein|newton|napoleon|"
        "cleopatra|politics|the united nations|the european union|kubernetes|docker|rust|java|sql|html|"
        "javascript|linux kernels|compilers|operating systems|blockchain|encryption|the immune system|"
        "vitamins|diabetes|headaches|sleep|dreams|psychology|love|happiness|the meaning of life|"
        "time travel|taxes|law|insurance|marketing|startups|history|geography|astronomy|poetry|opera|"
        "oil paintings|the bible|the koran|greek myths|roman gods|vikings|samurai|pirates|knights|"
        "castles|the cold war|the moon landing|the industrial revolution|slavery|human rights|"
        "the constitution|elections|presidents|kings and queens|wars|peace|weapons|tanks|submarines|"
        "nuclear reactors|nuclear power|solar panels|wind turbines|batteries|electric cars|trains|"
        "airplanes|rockets|satellites|telescopes|microscopes|string theory|particle physics|atoms|"
        "molecules|acids|metals|crystals|magnetism|heat|light|sound|waves|energy|entropy|statistics|"
        "probability|prime numbers|fractions|integrals|derivatives|matrices|trigonometry|logic|set theory|"
        "game theory|cryptography|algorithms|databases|robots|viruses|bacteria|fungi|cells|genes|blood|"
        "bones|muscles|skin|eyes|teeth|allergies|asthma|flu|a sore throat|stress|depression|diets|"
        "fasting|proteins|pregnancy|babies|children|teenagers|parents|marriage|friendship|schools|"
        "universities|exams|jobs|salaries|pensions|mortgages|loans|credit cards|banks|shares|gold|oil|"
        "trade|tariffs|poverty|hunger|migration|refugees|cities|villages|bridges|skyscrapers|pyramids|"
        "temples|mountains|rivers|lakes|deserts|forests|islands|glaciers|storms|tornadoes|rain|snow|"
        "seasons on mars|leaves|flowers|mushrooms|insects|spiders|sharks|penguins|wolves|horses|birds|"
        "fish|frogs|snakes|sourdough|pizza dough|sushi|beer|whisky|tea|olive oil|spices|knitting|"
        "painting|drawing|photography|guitars|violins|jazz|rock music|hip hop|dance|theatre|films|"
        "actors|superheroes|video games|board games|football|tennis|golf|the olympics|marathons|swimming|"
        "climbing|sailing|fishing|camping|hotels|holidays in portugal|flights|passports|visas|languages|"
        "grammar|latin|sanskrit|emojis|ballet|cinema|architecture|fashion|whales|bees|cats|dogs|trees|"
    ).split("|") + ["{x}"] * 60,
    "{country}": (
        "argentina|australia|austria|belgium|bolivia|brazil|canada|chile|china|colombia|croatia|cuba|"
        "denmark|egypt|estonia|finland|france|germany|ghana|greece|hungary|iceland|india|ireland|"
        "italy|japan|kenya|korea|latvia|mexico|morocco|nepal|norway|pakistan|peru|poland|portugal|"
        "romania|russia|scotland|serbia|spain|sweden|switzerland|thailand|tunisia|turkey|ukraine|"
        "vietnam|{x}|{x}|{x}|{x}|{x}|{x}"
    ).split("|"),
    "{invention}": (
        "the telephone|the light bulb|penicillin|america|the mona lisa|faust|hamlet|the radio|the wheel|"
        "the internet|python|linux|paper|the piano|don quixote|the bible|the car|x-rays|dynamite|google|"
        "the printing press|the {x}|the {x}"
    ).split("|"),
    "{task}": (
        "a poem|an essay|a story|a novel|a song|a letter|an email|a speech|a report|a blog post|"
        "a short story|a haiku|a limerick|a love letter|a recipe|a summary|an article|a fairy tale|"
        "a screenplay|a cover letter|a resume|a business plan|a shopping plan|a lesson plan|a review|"
        "a birthday card|a toast|a rap|a sonnet|a diary entry|a newsletter|a press release|a tweet|"
        "a travel plan"
    ).split("|"),
    "{code}": (
        "a python function|a python script|a program|a sorting algorithm|a web server|a website|"
        "a bash script|a sql query|a regular expression|a game in javascript|a class in java|a c program|"
        "a rust function|quicksort|a binary search|fibonacci in python|a calculator in python|unit tests|"
        "html for a page|a css style|a dockerfile|a recursive function|code|some code|an app|a chatbot"
    ).split("|"),
    "{tongue}": "german french spanish italian chinese japanese latin russian greek dutch".split(),
    "{year}": lambda random: str(random.randrange(1000, 2030)),
    "{city}": words.city,
    "{name}": words.name,
    "{note}": "hello|i am late|see you soon|thank you|call me|happy birthday|buy milk|dinner is ready|the meeting is at {time}".split("|"),
    "{time}": lambda random: f"{random.randrange(24):02d}:{random.choice(['00', '15', '30', '45'])}",
    "{sky}": "sunny cloudy rainy windy snowy clear foggy".split(),
    "{topic}": "recipes prices history pictures shops news facts".split(),
    "{room}": "kitchen|bedroom|bathroom|garage|hall|office|cellar|living room|garden|{x}".split("|"),
    "{ending}": "txt md py json log".split(),
    "{word}": words.thing,
    "{w}": words.english,
    "{Word}": words.made_up,
    "{x}": lambda random: words.made_up(random).lower(),
    "{degrees}": lambda random: str(random.randrange(-40, 121)),
    "{integer}": lambda random: str(random.choice([random.randrange(-40, 121), random.randrange(10_000)])),
    "{small}": lambda random: str(random.randrange(2, 120)),
    "{n}": lambda random: str(random.choice([random.randrange(2, 100), random.randrange(2, 10_000), 8, 16, 24, 32, 64, 1024, 4096, 8080])),
}  # fmt: skip


@dataclass
class Topic:
    parts: list[str]
    file: str
    how: list[str] = field(default_factory=list)
    what: list[str] = field(default_factory=list)
    ask: list[str] = field(default_factory=list)
    after: dict[str, list[str]] = field(default_factory=dict)  # first fact of the previous topic -> questions
    text: str = ""

    @property
    def name(self) -> str:
        return self.parts[0]

    def question(self, random: Random) -> str:
        """A lower-case question; slots such as `{model}` are filled."""
        return filled(vary(self._wording(random), random), random)

    def _wording(self, random: Random) -> str:
        kinds = {kind: lines for kind, lines in (("how", self.how), ("what", self.what), ("ask", self.ask)) if lines}
        weights = {"how": 3, "what": 1, "ask": 4}
        kind = random.choices(list(kinds), [weights[kind] for kind in kinds])[0]
        lines = kinds[kind]
        phrase = grammar.sample(random.choices(lines, [grammar.count(line) ** 0.5 for line in lines])[0], random)
        if kind == "ask" or (kind == "how" and random.random() < 0.12):
            return phrase
        return framed(kind, phrase, random)


def framed(kind: str, phrase: str, random: Random) -> str:
    """A question of the kind `how` or `what` about a phrase."""
    frame = grammar.sample(PLAIN[kind] if random.random() < 0.3 else {"how": HOW, "what": WHAT}[kind], random)
    return complete(frame, phrase)


def complete(frame: str, phrase: str) -> str:
    """The frame with the phrase in place of `{}`, with its gerund for `+`, or with its third person for `*`."""
    verb, space, rest = phrase.partition(" ")
    third = f"{verb}{'es' if verb.endswith(('s', 'x', 'sh', 'ch')) else 's'}{space}{rest}"
    frame = frame.replace("+", _gerund(phrase)) if "+" in frame else frame.replace("*", third)
    return frame.replace("{}", phrase)


def filled(text: str, random: Random) -> str:
    """Replace each slot, such as `{model}`, by one of its values."""
    for slot, values in SLOTS.items():  # numbers last: values of other slots contain them
        while slot in text:
            text = text.replace(slot, values(random) if callable(values) else random.choice(values), 1)
    return text


def _gerund(phrase: str) -> str:
    """The gerund of a phrase: `make a list` becomes `making a list`."""
    verb, space, rest = phrase.partition(" ")
    if verb in ("stop", "set", "get", "put", "run", "cut", "plan", "swap", "begin", "quit", "skip"):
        verb += verb[-1]
    return f"{verb.removesuffix('e')}ing{space}{rest}"


@cache
def load() -> list[Topic]:
    """All topics. Raises ValueError for an unknown key, a topic without questions, and an unknown topic of `after`."""
    topics = [topic for file in sorted(TOPICS.glob("*.txt")) for topic in _parse(file.read_text("utf-8"), file.name)]
    names = {topic.name for topic in topics}
    for topic in topics:
        if not (topic.how or topic.what or topic.ask or topic.after) or not topic.after.keys() <= names:
            raise ValueError(
                f"{topic.file}: {topic.name} has no question, or follows an unknown topic: {[*topic.after]}"
            )
    return topics


def _parse(text: str, file: str) -> list[Topic]:
    topics: list[Topic] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("# "):
            topics.append(Topic(line[2:].strip().split(" + "), file))
            continue
        key, _, value = line.partition(": ")
        kind, _, names = key.partition(" ")
        if kind == "after":
            for name in names.split(", "):
                topics[-1].after.setdefault(name, []).append(value)
        elif kind == "say":
            topics[-1].text = value
        elif kind in ("how", "what", "ask"):
            getattr(topics[-1], kind).append(value)
        else:
            raise ValueError(f"{file}: unknown key {key!r}")
    return topics
