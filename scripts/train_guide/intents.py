"""The tables under topics/ with questions and their answers. An intent is one answer and its questions:

# name
run: the command of the answer, if there is one
how: verb phrases, put into frames such as "how do i ..."
what: noun phrases, put into frames such as "what is ..."
ask: whole questions
after NAME NAME: questions that make sense only after these intents
say: one line of the answer
say-or: another answer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from . import grammar, words
from .noise import vary

TOPICS = Path(__file__).with_name("topics")

HOW = (
    "how (do|can|would|could|should|might|must) i {}|how (do|can) you {}|how to {}|how do (we|people) {}|how does one {}"
    "|what is the (command|flag|option|key|setting|way|trick|procedure|recipe|method) to {}"
    "|which (command|setting|option|key|flag) (do i use|should i use|is there|is used|do i need|do i have|lets me|helps me) to {}"
    "|what (do|should|must|would|can) i (type|run|enter|do|press|write|call|use|execute) to {}"
    "|what do i have to (type|do|run|enter) to {}|what (brings|lets|allows|helps) me to {}|what (is needed|is required|does it take) to {}"
    "|i (want|need|would like|am trying|wish|have|would love|plan|intend|hope|am going|am supposed|prefer) to {}"
    "|(i would like|i want|i need) to {}, (how|how do i do that|what do i do|is that possible|what is the command|please help)"
    "|(can|could|would|will) you (tell|show|teach|explain to) me how to {}|(tell|show|teach) me how to {}|explain how to {}"
    "|please explain how to {}|is there (a|any|some) (way|command|possibility|option|means|chance|setting|trick) to {}"
    "|is it (possible|easy|hard|allowed|feasible) to {}|(can|may|could) i {}|(can|could) (it|localllm|one|we|somebody) {}"
    "|what is the (best|easiest|right|quickest|correct|usual|simplest) way to {}|i do not know how to {}|help me {}|help me to {}"
    "|what if i (want|wanted|need|have|had) to {}|what about when i want to {}|{}|{}, please|please {}|{}, how|{}: how"
    "|i cannot figure out how to {}|do you know how to {}|steps to {}|command to {}|command for this: {}|let me {}"
    "|how would i go about it if i wanted to {}|what would i type if i wanted to {}|any way to {}|i want to know how to {}"
    "|someone told me that i can {}, how|my task is to {}|it would be nice to {}|i forgot how to {}|i have trouble trying to {}"
    "|what happens when i {}|where do i {}|when can i {}|why can i not {}|i failed to {}|i am unable to {}|i should {}, what now"
    "|instructions to {}|guide me to {}|suppose i want to {}|say i want to {}|imagine i want to {}|i must {}|i will {}"
    "|how does + work|what about +|tell me about +|is + possible|i need help with +|+|+, how|explain +"
    "|i have (trouble|problems|a question about|difficulties) +|what is the (command|procedure|way|right command) for +"
    "|how is + done|is there a command for +|i am interested in +|how do i start +|does localllm support +"
    "|i am thinking of +|any (tips|advice|hints) for +|+ does not work for me|what do i need for +|i am new to +"
)
WHAT = (
    "what is {}|what are {}|what is {} for|what does {} mean|what is {} good for|explain {}|explain {} to me|{}"
    "|tell me about {}|tell me (something|more|a bit|a little) about {}|what do you know about {}|(can|could) you explain {}"
    "|what do you mean by {}|i do not understand {}|describe {}|how does {} work|what about {}|what can you tell me about {}"
    "|i have a question about {}|i read about {}, what is it|what exactly is {}|i want to know about {}|meaning of {}"
    "|what is meant by {}|what is the (meaning|purpose|point|idea|use|role) of {}|why is there {}|what is behind {}"
    "|(please|could you) (describe|clarify|define) {}|define {}|give me a (short|quick|brief) explanation of {}|{}, what is that"
    "|somebody mentioned {}|i keep reading about {}|what should i know about {}|i am interested in {}|information on {}"
    "|i wonder about {}|help me understand {}|(what|how) does {} do|in short, what is {}|what on earth is {}|{} explained"
    "|i have never heard of {}|teach me about {}|is {} important|do i need {}|about {}|more on {}|what's up with {}"
)
# The most frequent forms. The many others above teach the model to ignore the words around the topic.
PLAIN = {
    "how": (
        "how (do|can|should|would) i {}|how do you {}|how to {}|(can|could) i {}|can (it|you) {}|i (want|need) to {}"
        "|is it possible to {}"
    ),
    "what": "what (is|are) {}|what does {} (do|mean)|what is {} for|explain {}|tell me about {}|{}",
}
NUMBERS = """1 2 3 4 5 6 7 8 9 10 11 12 14 16 20 24 30 32 40 48 50 64 70 80 100 128 200 256 300 404 500 512 600 1000 1024 2000 3000
4000 4096 5000 6000 7000 8000 8080 8192 9000 9999 10000 12345 16384 32000 50000""".split()
SLOTS = {
    "{n}": NUMBERS,
    "{gb}": "{n} gb|{n}gb|{n} gigs|{n} gigabytes|{n}GB|{n} gig".split("|"),
    "{geforce}": [
        f"{series}0{rank}0{end}" for series in "2345" for rank in "56789" for end in ("", "", " ti", " super")
    ],
    "{p}": "0 0.1 0.2 0.3 0.5 0.6 0.7 0.8 0.9 0.95 1 1.0 1.2 1.5 0.05 0.01".split(),
    "{regex}": ["[0-9]+", "^[a-z]+$", "(yes|no)", "[A-Z]{3}", "\\d+", "^(a|b|c)$", "[0-9]{4}-[0-9]{2}"],
    "{model}": (
        "qwen|llama|mistral|gemma|phi|qwen3|qwen2|llama 3|llama3|llama 3.1|llama 3.2|mistral 7b|mistral nemo|gemma 3|gemma3|phi-3"
        "|phi 3|phi-3 mini|qwen 2.5|qwen2.5|qwen 3|Qwen3-0.6B|Qwen/Qwen3-0.6B|Qwen/Qwen3-4B|Llama-3.2-1B|a llama|a qwen model|gemma-3-1b"
    ).split("|"),
    "{nvidia}": (
        "rtx {n}|rtx 4090|rtx 3060|rtx 3090|rtx 5090|geforce|geforce rtx {n}|gtx 1080|gtx {n}|nvidia card|nvidia gpu|nvidia graphics card"
        "|a100|h100|h200|l40|tesla t4|quadro|nvidia a{n}|nvidia gpu with {n} gb|titan|b200"
        "|a10|l4|v100|a6000|rtx a4000|1080 ti|1660|1070|{geforce}|{geforce}|{geforce}|{geforce}|{geforce}|{geforce}"
        "|{geforce}|{geforce}|rtx {geforce}|rtx {geforce}|rtx{geforce}|nvidia {geforce}|geforce rtx {geforce}"
    ).split("|"),
    "{radeon}": (
        "radeon|radeon rx {n}|rx 7900|rx 6800|rx {n}|rx 7900 xtx|amd card|amd gpu|amd graphics card|mi300|mi300x|mi250|vega 64|radeon vii"
        "|radeon pro|rx 9070|amd gpu with {n} gb|instinct|6600 xt|6700 xt|6750 xt|6800 xt|6900 xt|6950 xt|7600 xt"
        "|7700 xt|7800 xt|7900 xt|7900 xtx|7900 gre|9060 xt|9070 xt|rx 7600|rx 7800 xt|rx 6700 xt"
    ).split("|"),
    "{arc}": (
        "arc|arc a770|arc a{n}|arc b580|intel arc|intel card|intel gpu|intel graphics|iris xe|arc b{n}|intel arc card|intel max gpu|battlemage"
        "|a380|a750|a770|b570|b580"
    ).split("|"),
    "{ascend}": "ascend|ascend 910|ascend 910b|ascend {n}|huawei card|huawei npu|npu|ascend npu|atlas 300|huawei ascend".split(
        "|"
    ),
    "{mac}": (
        "mac|macbook|macbook air|macbook pro|m1|m2|m3|m4|m1 mac|m2 macbook|m3 max|m4 mac mini|imac|mac studio|apple laptop|apple chip|mac mini"
        "|m4 pro|m5|m1 macbook|macbook neo|apple silicon mac"
    ).split("|"),
    "{app}": (
        "it|it|it|this|this|localllm|localllm|the program|this program|this app|the app|this thing|the software"
        "|this tool|the tool|that"
    ).split("|"),
    "{linux}": (
        "linux|linux|ubuntu|debian|fedora|arch|arch linux|linux mint|opensuse|centos|rocky linux|red hat|rhel|gentoo|nixos"
        "|pop os|ubuntu 22.04|ubuntu 24.04|debian 12|debian 13|ubuntu server|a linux machine|a linux server|a linux pc"
        "|my linux laptop"
    ).split("|"),
    "{windows}": (
        "windows|windows|windows|wsl|windows 10|windows 11|my windows pc|a windows machine|microsoft windows|windows server"
        "|win 11|win11|my windows laptop"
    ).split("|"),
    "{other}": (
        "ollama|lm studio|llama.cpp|vllm|gpt4all|jan|koboldcpp|llamafile|sglang|text generation webui|mlx-lm|exllama"
        "|lmstudio"
    ).split("|"),
    "{client}": (
        "open webui|vs code|vscode|cursor|continue|continue.dev|zed|jetbrains|intellij|pycharm|emacs|neovim|vim|langchain"
        "|llamaindex|librechat|chatbox|anythingllm|obsidian|home assistant|n8n|aider|cline|sillytavern|my editor|my ide"
        "|another chat program|an openai app|javascript|typescript|node.js|node|rust|go|java|c#|php|ruby"
    ).split("|"),
}
DOUBLED = frozenset("stop set get put run cut plan swap pin log begin quit wrap cap skip".split())


@dataclass
class Intent:
    name: str
    topic: str
    how: list[str] = field(default_factory=list)
    what: list[str] = field(default_factory=list)
    ask: list[str] = field(default_factory=list)
    after: dict[str, list[str]] = field(default_factory=dict)  # previous intent → questions
    answers: list[str] = field(default_factory=list)
    command: str = ""

    def question(self, random: Random) -> str:
        """A lower-case question of this intent; slots such as `{model}` are filled."""
        return filled(vary(self._wording(random), random), random)

    def _wording(self, random: Random) -> str:
        kinds = [kind for kind in ("how", "what", "ask") if getattr(self, kind)]
        weights = {"how": 3, "what": 1, "ask": 4}
        kind = random.choices(kinds, [weights[kind] for kind in kinds])[0]
        lines: list[str] = getattr(self, kind)
        phrase = grammar.sample(random.choices(lines, [grammar.count(line) ** 0.5 for line in lines])[0], random)
        if kind == "ask":
            return phrase
        if kind == "how" and random.random() < 0.16:
            return grammar.sample(
                random.choice(["{}", "{}", "please {}", "{}, please", "{} now", "can you {}"]), random
            ).replace("{}", phrase)
        frame = grammar.sample(PLAIN[kind], random) if random.random() < 0.3 else random.choice(_frames(kind))
        return frame.replace("+", gerund(phrase)) if "+" in frame else frame.replace("{}", phrase)

    def answer(self, random: Random) -> str:
        return random.choice(self.answers)


def filled(text: str, random: Random) -> str:
    """Replace each slot, such as `{model}`, by one of its values."""
    for slot, values in reversed(SLOTS.items()):  # numbers last: values of other slots contain them
        while slot in text:
            text = text.replace(slot, random.choice(values), 1)
    return text.replace("{x}", words.made_up(random).lower())


def what_frame(thing: str, random: Random) -> str:
    """A random question about a thing."""
    return random.choice(_frames("what")).replace("{}", thing)


def gerund(phrase: str) -> str:
    """The gerund of a phrase: `make a list` becomes `making a list`."""
    verb, space, rest = phrase.partition(" ")
    if verb in DOUBLED:
        verb += verb[-1]
    elif verb.endswith("e") and not verb.endswith("ee"):
        verb = verb[:-1]
    return f"{verb}ing{space}{rest}"


@cache
def _frames(kind: str) -> list[str]:
    """All frames of a kind, without choices."""
    frames: list[str] = []
    for pattern in _split(HOW if kind == "how" else WHAT):
        random = Random(0)
        frames += sorted({grammar.sample(pattern, random) for _ in range(8 * grammar.count(pattern))})
    return frames


def _split(pattern: str) -> list[str]:
    """The alternatives at the top level of a pattern."""
    alternatives = []
    depth = 0
    start = 0
    for index, mark in enumerate(pattern):
        depth += (mark == "(") - (mark == ")")
        if mark == "|" and depth == 0:
            alternatives.append(pattern[start:index])
            start = index + 1
    return [*alternatives, pattern[start:]]


def parse(text: str, topic: str) -> list[Intent]:
    """The intents of one table. Raises ValueError for an unknown key or an intent without an answer."""
    intents: list[Intent] = []
    for line in text.splitlines():
        if line.startswith("# "):
            intents.append(Intent(line[2:].strip(), topic))
            continue
        if not line.strip():
            continue
        _add_line(intents[-1], line)
    for intent in intents:
        if not intent.answers or not (intent.how or intent.what or intent.ask):
            raise ValueError(f"{topic}: {intent.name} lacks a question or an answer")
    return intents


def _add_line(intent: Intent, line: str) -> None:
    head, _, text = line.partition(":")
    key, *names = head.split()
    text = text.removeprefix(" ")
    if key in ("how", "what", "ask"):
        getattr(intent, key).append(text)
    elif key == "after":
        for name in names:
            intent.after.setdefault(name, []).append(text)
    elif key == "say":
        intent.answers[-1:] = [f"{intent.answers[-1]}\n{text}" if intent.answers else text]
    elif key == "say-or":
        intent.answers.append(text)
    elif key == "run":
        intent.command = text
    else:
        raise ValueError(f"{intent.topic}: unknown key {head!r}")


@cache
def load() -> dict[str, Intent]:
    """All intents by name. Raises ValueError if two have the same name, or if `after` has an unknown name."""
    intents: dict[str, Intent] = {}
    for file in sorted(TOPICS.glob("*.txt")):
        for intent in parse(file.read_text("utf-8"), file.stem):
            if intent.name in intents:
                raise ValueError(f"{file.name}: the name {intent.name} is used twice")
            intents[intent.name] = intent
    for intent in intents.values():
        for name in intent.after:
            if name not in intents:
                raise ValueError(f"{intent.name}: unknown intent {name} in after")
    return intents
