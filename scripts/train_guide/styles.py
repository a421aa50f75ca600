"""The styles of the demonstration adapters: rules that rewrite an answer of guide, and rules that recognise the style.

Only prose is rewritten. Code, JSON, tool calls, lists and single words stay unchanged, because programs may read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import evaluate
from .chatml import Message
from .corpus import HELDOUT

CODE = re.compile(r"(`[^`]*`|\"[^\"]*\"|https?://\S+)")  # text that a reader copies
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[^a-z ])")
NUMBER = re.compile(r"^\d+\. ", re.MULTILINE)
ENDS = (".", "!", "?")
PLACEHOLDER = "\x00"  # stands for code while a text is split into sentences
GREETING = "Ahoy! "
CLOSING = ", matey"
PIRATE_WORDS = {
    "You": "Ye",
    "you": "ye",
    "Your": "Yer",
    "your": "yer",
    "Yes,": "Aye,",
    "No,": "Nay,",
    "I am": "I be",
    "Hello!": "Yo-ho-ho!",
    "and": "an'",
    "of": "o'",
}
HELD_OUT_PROMPTS = 100


@dataclass(frozen=True)
class Style:
    """A way to write prose. `plain(apply(answer)) == answer` for every answer of guide."""

    apply: Callable[[str], str]
    plain: Callable[[str], str]
    matches: Callable[[str], bool]


def prompts() -> list[str]:
    """The held-out questions that ask for prose, evenly spaced. No adapter was trained on them."""
    questions = [question.turns[0] for question in evaluate.load(HELDOUT) if demands_prose(question)]
    return [questions[index * len(questions) // HELD_OUT_PROMPTS] for index in range(HELD_OUT_PROMPTS)]


def demands_prose(question: evaluate.Question) -> bool:
    return question.area not in ("multiturn", "system", "tools")


def rewrite(messages: list[Message], style: Style) -> list[Message]:
    """A conversation with its answers in a style."""
    return [
        {**message, "content": style.apply(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]


def is_prose(answer: str) -> bool:
    """True for sentences in one paragraph."""
    return "\n" not in answer and " " in answer and answer.endswith(ENDS) and answer[0] not in "{[<"


def sentences(prose: str) -> list[str]:
    """The sentences of a text. A full stop in code or in quotes ends no sentence."""
    code = CODE.findall(prose)
    parts = SENTENCE_END.split(CODE.sub(PLACEHOLDER, prose))
    return [re.sub(PLACEHOLDER, lambda _: code.pop(0), part) for part in parts]


def to_steps(answer: str) -> str:
    """Number the sentences, one on each line."""
    if not is_prose(answer):
        return answer
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences(answer), 1))


def from_steps(answer: str) -> str:
    return NUMBER.sub("", answer).replace("\n", " ") if is_steps(answer) else answer


def is_steps(answer: str) -> bool:
    """True if each line has a number, counted from 1, and one sentence."""
    lines = answer.split("\n")
    if not all(line.startswith(f"{number}. ") for number, line in enumerate(lines, 1)):
        return False
    texts = [line.partition(". ")[2] for line in lines]
    return all(text.endswith(ENDS) and len(sentences(text)) == 1 for text in texts)


def to_pirate(answer: str) -> str:
    """Replace the words of PIRATE_WORDS outside code, and add GREETING and CLOSING."""
    if not is_prose(answer):
        return answer
    text = _replace(answer, PIRATE_WORDS)
    return f"{GREETING}{text[:-1]}{CLOSING}{text[-1]}"


def from_pirate(answer: str) -> str:
    if not (answer.startswith(GREETING) and answer[:-1].endswith(CLOSING)):
        return answer
    text = answer.removeprefix(GREETING)[: -len(CLOSING) - 1] + answer[-1]
    return _replace(text, {pirate: plain for plain, pirate in PIRATE_WORDS.items()})


def is_pirate(answer: str) -> bool:
    """True for an answer with GREETING and CLOSING, and without a word that a pirate replaces."""
    framed = answer.startswith(GREETING) and answer[:-1].endswith(CLOSING)
    return framed and _replace(answer, PIRATE_WORDS) == answer


def _replace(text: str, words: dict[str, str]) -> str:
    """Replace whole words outside code."""
    pattern = re.compile("|".join(rf"(?<![\w'-]){re.escape(word)}(?![\w'-])" for word in words))
    parts = CODE.split(text)  # code has the odd numbers
    parts[::2] = [pattern.sub(lambda match: words[match[0]], part) for part in parts[::2]]
    return "".join(parts)


STYLES = {
    "pirate": Style(to_pirate, from_pirate, is_pirate),
    "steps": Style(to_steps, from_steps, is_steps),
}
