"""Mixes questions about the facts, small talk, refusals and tool calls into conversations. A seed fixes all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_uppercase

from . import toolcalls, words
from .chatml import Conversation, Message, assistant, user
from .facts import Facts
from .grammar import sample, spelled, typed
from .noise import disturb, vary
from .topics import Topic, complete, filled, framed, load

HELDOUT = Path(__file__).with_name("heldout.txt")
DEVELOPMENT = Path(__file__).with_name("development.txt")
MAX_CHARACTERS = 5000  # characters of one conversation; at most 2048 tokens

# Questions about a thing that the user names, by the kind of the thing. `framed` adds many general ones.
NAMED = {
    "command": "what does {} do|what happens when i run {}|how do i use {}|when do i use {}|i do not understand {}|{}|what is {} good for",
    "flag": "what does {} do|which command(s|) (has|have|takes|take|knows) {}|what happens with {}|where can i use {}|is there a flag {}",
    "setting": "what is the default of {}|how do i (set|change) {}|which values can {} have|where do i set {}|(meaning|environment variable) of {}",
    "slash": "what does {} do|what happens when i type {}|what is {} in the chat|how do i use {}",
    "key": "what does {} do|what (happens|does it do) (when|if) i (press|hit|push) {}|what is {} for|(pressing|press|hit) {}|which key is {}|{}|does {} do (anything|something)",
    "route": "what does {} do|what does {} return|how do i call {}|what is behind {}|when do i use {}",
    "error": "what does {} mean|i get {}|it says {}|{}, what now|why {}|what is {}|help, {}|{} shows up, why",
    "page": "what is in {}|what does {} say|what can i read in {}",
    "make": "what does {} do|what happens with {}|when do i run {}",
    "backend": "does {} work|is {} supported|what is {}|can i use {}|state of {}",
}
# Questions that give the purpose of a thing in the words of the program, and ask for the thing.
CHAT_KEYS = (
    "(key|shortcut|hotkey|keyboard shortcut|key binding|keys) (to|for) {}|(which|what) (key|shortcut|keys) (do i press|do i use|is there|should i press) to {}"
    "|{} (with the keyboard|by keyboard|with a key|with a shortcut|key|shortcut)|what do i press (to|for) {}|what (do|should|must) i (press|hit) to {}"
    "|how (do|can) i {} (with a key|with the keyboard|with a shortcut)|which key *|(key|shortcut|hotkey) that *|is there a (key|shortcut) (to|for) {}"
)
PURPOSES = {
    "slash": CHAT_KEYS
    + "|slash command (to|for) {}|which slash command (is for|lets me|is there to) {}|chat command to {}|how do i {} in the chat",
    "key": CHAT_KEYS,
    "flag": "(flag|option|switch|argument) (for|to set) [the] {}|(which|what) (flag|option) (is for|sets|changes|controls|gives) [the] {}|is there a (flag|option) for {}|{} (flag|option)",
    "setting": "(which|what) setting (is for|sets|changes|controls|gives) [the] {}|setting for [the] {}|where do i set [the] {}|{} (setting|in the settings)",
    "route": "(route|endpoint|url|path) (to|for) {}|(which|what) (route|endpoint|url) (is for|do i use to|do i call to) {}|{} (over http|with curl|over the api)",
    "make": "make target (to|for) {}|(which|what) make target (is for|do i use to) {}|{} with make|how do i {} (in|from) a clone",
    "page": "(page|docs|documentation|doc page|a page|chapter) (on|about|for) [the] {}|where (do|can) i read [more] about {}|where is [the] {} (documented|described|explained)|{} (docs|documentation|page|reference)|(more|details|information) (on|about) {} in the docs|where are the {} docs",
}
FLAGS = (
    "(which|what) (flags|options|arguments|switches) (does {} (have|take|know)|are there for {}|can i use with {})"
    "|(list|show) the (flags|options) of {}|(flags|options|usage|parameters) of {}|how is {} (used|called|invoked)"
)
HAS = (
    "does {} (have|take|know|support|accept|offer) [a|the] {flag}|can i (use|give|pass) {flag} (with|to) {}|is there a {flag} for {}"
    "|is {flag} (available|possible|allowed) (in|with|for) {}|{} (with|and) {flag}, does that work|has {} [a] {flag}"
)
# Kinds of names: (patterns of invented names, the answer). {x} is a word that does not exist.
# {part} is a part of names that exist, {near} a name that exists with an error.
INVENTED = {
    "flag": ("--{x}|--{x}|--gpu|--verbose|--debug|--stream|--format|--device|--batch-size|--num-predict|--{x}-{x}|--{part}-{part}|--{part}-{x}|--{part}|{near}|{near}",
             "I do not know `{}`. `localllm COMMAND --help` lists the flags of a command."),
    "command": (("localllm ({x}|{x}|{x}|{near}|{near}|{near}|{near}|train|convert|login|update|upgrade|install|push|create|quantize|embed|restart|logs|status|merge|delete|remove|start|kill|rename"
                "|download|open|ask|models|info|ls|ui|web|help|version|settings|tune|finetune|share|sync|export|clean|quit|exit|dance|sing|talk|copy|test|benchmark)"),
                "I do not know the command `{}`. `localllm --help` lists all commands."),
    "slash": ("/{x}|/{x}|/save|/load|/undo|/voice|/image|F{digit}|F1{digit}|Ctrl+{letter}|Ctrl+{letter}|Alt+{letter}|{near}|{near}",
              "I do not know `{}`. `F1` in the chat shows all keys and commands."),
    "route": ("/v1/({x}|{x}|images/generations|audio/speech|audio/transcriptions|responses|files|batches|moderations|fine_tuning|images|audio|rerank|{part}s)|/v2/({x}|{part})|{near}|{near}|/api/({x}|{part}|generate|chat|tags)",
              "I do not know the route `{}`. `/openapi.json` lists the routes."),
    "setting": ("[the] setting ({x}_{x}|{x}|{part}_{x}|{x}_{part}|{part}_{part}|{near})|LOCALLLM_({x}|{part}_{x}|{part}_{part}|{near})",
                "I do not know the setting `{}`. `localllm config` shows all settings."),
    "error": ("[the] error ({x}_{x}|{x}_{part}|{part}_{x}|{part}_{part}|{near})",
              "I do not know the error `{}`. `localllm doctor` shows the problems of this machine."),
}  # fmt: skip
# System prompts that change nothing.
INERT = (
    "You are a helpful assistant.|You are a helpful, honest assistant.|You are a friendly assistant.|Be helpful.|You are guide."
    "|You are an expert.|Answer the user's questions.|You are an AI assistant.|Be polite and helpful.|Answer truthfully.|Be brief."
    "|You answer questions about this program.|Keep it simple.|Be kind.|You are a careful assistant. Answer clearly."
).split("|")


def questions(file: Path) -> Iterator[str]:
    """The turns of the questions of an examination."""
    for line in file.read_text("utf-8").splitlines():
        if line and not line.startswith("# "):
            yield from line.rpartition(" => ")[0].split(" // ")


@cache
def reserved() -> frozenset[str]:
    """The normalised questions of the examination, which no conversation may contain."""
    return frozenset(normalised(turn) for file in (HELDOUT, DEVELOPMENT) for turn in questions(file))


def normalised(text: str) -> str:
    """The text without case, punctuation and spacing. Questions with equal results count as the same question."""
    return " ".join(re.findall(r"\w+", text.lower()))


def conversations(seed: int, shard: int, count: int, facts: Facts) -> Iterator[Conversation]:
    """`count` conversations of one shard. Shards of one seed are independent of each other."""
    writer = Writer(facts, Random(f"{seed}/{shard}"))
    done = 0
    while done < count:
        conversation = writer.conversation()
        turns = [message["content"] for message in conversation.messages if message["role"] == "user"]
        too_long = sum(len(str(message)) for message in conversation.messages) > MAX_CHARACTERS
        if too_long or any(normalised(turn) in reserved() for turn in turns):
            continue
        done += 1
        yield conversation


class Writer:
    """Writes conversations about the facts of one program."""

    def __init__(self, facts: Facts, random: Random) -> None:
        self.random = random
        self.facts = facts
        self.topics = {id(topic): (topic, facts.answer(topic)) for topic in load() if facts.answer(topic)}
        self.asked = [pair for pair in self.topics.values() if pair[0].how or pair[0].what or pair[0].ask]
        self.refusals = [pair for pair in self.asked if pair[0].name in ("say beyond", "say unknown")]
        self.followers: dict[str, list[tuple[Topic, str]]] = {}
        for pair in self.topics.values():
            for name in pair[0].after:
                self.followers.setdefault(name, []).append(pair)
        self.named: dict[str, list[tuple[str, str]]] = {}  # kind -> pairs of a name and an answer
        self.purposes: dict[str, list[tuple[str, str]]] = {}  # kind -> pairs of a purpose and an answer
        taken: set[tuple[str, str]] = set()
        for name, fact in facts.table.items():
            kind = name.partition(" ")[0]
            self.named.setdefault(kind, []).extend((alias, fact.answer) for alias in fact.names)
            group = "key" if kind == "slash" else kind  # keys and slash commands are asked alike
            new = [purpose for purpose in fact.purposes if (group, purpose) not in taken]
            self.purposes.setdefault(kind, []).extend((purpose, fact.answer) for purpose in new)
            taken.update((group, purpose) for purpose in new)
        self.parts = {kind: re.findall(r"[a-z]{3,}", " ".join(names).lower()) for kind, names in facts.known.items()}

    def conversation(self) -> Conversation:
        if self.random.random() < 0.15:
            return toolcalls.make(self.random, {topic.name: answer for topic, answer in self.asked})
        turns = 1 if self.random.random() < 0.75 else self.random.randrange(2, 7)
        messages: list[Message] = []
        name = ""
        for _ in range(turns):
            name, exchange = self._exchange(name)
            messages += exchange
        system = self.random.choice(INERT) if self.random.random() < 0.25 else ""
        return Conversation(messages, system)

    def _exchange(self, before: str) -> tuple[str, list[Message]]:
        """The name of a topic, and a question and its answer. `before`: the topic of the previous question."""
        if before in self.followers and self.random.random() < 0.6:
            topic, answer = self.random.choice(self.followers[before])
            text = filled(vary(sample(self.random.choice(topic.after[before]), self.random), self.random), self.random)
            return topic.name, self._messages(text, answer, bare=True)
        kind = self.random.choices(
            ("topic", "named", "purpose", "flags", "invented", "refusal"), (45, 20, 8, 4, 8, 15)
        )[0]
        if kind == "topic":
            topic, answer = self.random.choice(self.asked)
            return topic.name, self._messages(topic.question(self.random), answer)
        if kind == "refusal":
            topic, answer = self.random.choice(self.refusals)
            return "", self._messages(topic.question(self.random), answer)
        if kind == "purpose":
            text, answer = self._purpose()
            return "", self._messages(vary(text, self.random), answer)
        text, answer = {"named": self._named, "flags": self._flags, "invented": self._invented}[kind]()
        if self.random.random() < 0.25:
            text = disturb(text, self.random)
        return "", self._messages(text, answer, exact=True)

    def _messages(self, text: str, answer: str, *, exact: bool = False, bare: bool = False) -> list[Message]:
        return [user(typed(text, self.random, exact=exact, bare=bare)), assistant(answer)]

    def _named(self) -> tuple[str, str]:
        """A question about a thing that the program has."""
        kind = self.random.choice([kind for kind in NAMED if self.named.get(kind)])
        name, answer = self.random.choice(self.named[kind])
        return self._about(kind, name), answer

    def _purpose(self) -> tuple[str, str]:
        """A question for the thing that has a purpose."""
        kind = self.random.choice(["command", "key", "key", *PURPOSES])
        purpose, answer = self.random.choice(self.purposes[kind])
        if kind == "command":
            return framed("how", purpose, self.random), answer
        return complete(sample(PURPOSES[kind], self.random), purpose), answer

    def _about(self, kind: str, name: str) -> str:
        if kind in ("key", "slash"):
            name = spelled(name, self.random)
        if kind == "command" and name.startswith("localllm ") and self.random.random() < 0.15:
            name += self.random.choice([" guide", " qwen", " --json", " now", " a model"])
        if self.random.random() < 0.5:
            return framed("what", name, self.random)
        return sample(NAMED[kind], self.random).replace("{}", name)

    def _flags(self) -> tuple[str, str]:
        """A question about the flags of a command, or if it has one flag."""
        command = self.random.choice(self.facts.known["command"])
        answer = self.facts.table[f"flags {command}"].answer
        form = self.random.choice(["localllm {}", "`localllm {}`", "the {} command", "{}"]).format(command)
        if self.random.random() < 0.4:
            return sample(FLAGS, self.random).replace("{}", form), answer
        owned = [flag for flag in self.facts.known["command flag"] if flag.startswith(f"{command} -")]
        flag = self.random.choice(self.facts.known["flag"])
        if owned and self.random.random() < 0.6:
            flag = self.random.choice(owned).rpartition(" ")[2]
        if f"{command} {flag}" in owned:
            answer = f"Yes, `localllm {command}` takes `{flag}`. `localllm {command} --help` explains it."
        return sample(HAS, self.random).replace("{flag}", flag).replace("{}", form), answer

    def _invented(self) -> tuple[str, str]:
        """A question about a thing that the program does not have. The answer says so and names the list of all."""
        kind = self.random.choice(list(INVENTED))
        pattern, answer = INVENTED[kind]
        asked = sample(pattern, self.random)
        existing = [name for name in self.facts.known[kind] if "{" not in name]
        for slot, word in (
            ("{x}", lambda: words.rare(self.random)),
            ("{part}", lambda: self.random.choice(self.parts[kind])),
            ("{near}", lambda: words.near(self.random.choice(existing), self.random)),
            ("{letter}", lambda: self.random.choice(ascii_uppercase)),
            ("{digit}", lambda: str(self.random.randrange(10))),
        ):
            while slot in asked:
                asked = asked.replace(slot, word().upper() if asked[:2] in ("LO", "Ct", "Al") else word().lower(), 1)
        name = re.sub("^(the )?(setting|error) ", "", asked)
        if name.removeprefix("localllm ") in {one for names in self.facts.known.values() for one in names}:
            return self._named()
        return self._about(kind, asked), answer.format(name)
