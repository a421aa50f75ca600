"""Generates sentences from patterns, and varies sentences as people type them.

A pattern is plain text with `(one|two)` for a choice and `[maybe]` for optional text; both may be nested.
"""

from __future__ import annotations

import re
from functools import cache
from random import Random

Node = str | tuple["Node", ...] | list["Node"]  # text, sequence, choice


@cache
def _parse(pattern: str) -> Node:
    node, end = _choice(pattern, 0)
    if end != len(pattern):
        raise ValueError(f"unbalanced pattern: {pattern!r}")
    return node


def _choice(text: str, start: int) -> tuple[Node, int]:
    """Parse the options from index `start` on. Returns them, and the index of the closing bracket or the end."""
    options: list[Node] = []
    sequence: list[Node] = []
    index = start
    while index < len(text) and text[index] not in ")]":
        if text[index] in "([":
            node, index = _bracket(text, index)
            sequence.append(node)
        elif text[index] == "|":
            options.append(tuple(sequence))
            sequence = []
            index += 1
        else:
            end = index
            while end < len(text) and text[end] not in "()[]|":
                end += 1
            sequence.append(text[index:end])
            index = end
    options.append(tuple(sequence))
    return options if len(options) > 1 else options[0], index


def _bracket(text: str, start: int) -> tuple[Node, int]:
    """Parse the bracket at index `start`. Returns its content, and the index after its end."""
    closing = ")" if text[start] == "(" else "]"
    inner, end = _choice(text, start + 1)
    if end >= len(text) or text[end] != closing:
        raise ValueError(f"unbalanced pattern: {text!r}")
    return (inner if closing == ")" else [inner, ""]), end + 1


def _sample(node: Node, random: Random) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return _sample(random.choice(node), random)
    return "".join(_sample(child, random) for child in node)


def sample(pattern: str, random: Random) -> str:
    """A random sentence of a pattern, with single spaces. Raises ValueError if brackets do not match."""
    return re.sub(r"\s+", " ", _sample(_parse(pattern), random)).strip()


def count(pattern: str) -> int:
    """The number of sentences of a pattern."""

    def of(node: Node) -> int:
        if isinstance(node, str):
            return 1
        if isinstance(node, list):
            return sum(of(child) for child in node)
        total = 1
        for child in node:
            total *= of(child)
        return total

    return of(_parse(pattern))


CONTRACTIONS = (
    "what is=what's|where is=where's|who is=who's|how is=how's|that is=that's|it is=it's|i am=i'm|you are=you're|i would=i'd"
    "|do not=don't|does not=doesn't|is not=isn't|are not=aren't|cannot=can't|let us=let's"
)
SHORT = [[f"{form} " for form in pair.split("=")] for pair in CONTRACTIONS.split("|")]
OPENINGS = (
    "(hi|hey|hello|ok|so|well|hm|um|and|also|please|quick question|one more question|a question|question"
    "|just wondering|i was wondering|i am curious|sorry|excuse me|tell me|do you know|say|another thing"
    "|i have a question|maybe you can help me|thanks|great|now|next|by the way|first of all|dear guide|guide)"
)
CLOSINGS = (
    "(please|thanks|thank you|thx|pls|exactly|in localllm|with localllm|here|on my machine|on my laptop|on linux|on debian"
    "|for me|again|if i may ask|i forgot|i am new here|on this computer|right now|today|quickly|then|actually"
    "|in general|in the terminal|on the command line|i wonder|any idea|asking for a friend)"
)
ASKING = re.compile(
    r"(what|which|who|whom|whose|where|when|why|how|can|could|may|do|does|did|is|are|am|will|would|should|in which|has|have)\b"
)
KEYS = {
    "a": "sqz", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo", "j": "hk",
    "k": "jl", "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "w", "r": "et", "s": "ad", "t": "ry",
    "u": "yi", "v": "cb", "w": "qe", "x": "zc", "y": "tu", "z": "x",
}  # fmt: skip


def typo(text: str, random: Random) -> str:
    """A typing error in one of the longer words."""
    words = list(re.finditer(r"(?<![\w/_.@`-])[a-z]{4,}(?![\w/_.@`-])", text))
    if not words:
        return text
    word = random.choice(words)
    index = random.randrange(word.start() + 1, word.end())
    kind = random.choice(["swap", "drop", "double", "near"])
    if kind == "swap" and index + 1 < word.end():
        return text[:index] + text[index + 1] + text[index] + text[index + 2 :]
    if kind == "double":
        return text[:index] + text[index] + text[index:]
    if kind == "near":
        return text[:index] + random.choice(KEYS[text[index]]) + text[index + 1 :]
    return text[:index] + text[index + 1 :]


ARROW = re.compile(r"(?<![+\w])(Up|Down|Left|Right)\b")


def spelled(key: str, random: Random) -> str:
    """The name of a key as people write it: `Ctrl+X` is also `ctrl-x`, `control x` and `CTRL + X`."""
    modifier = random.choice(["Ctrl", "Ctrl", "Ctrl", "Control", "CTRL"])
    joint = random.choice(["+", "+", "+", "-", " ", " + "])
    text = re.sub(r"(Ctrl|Alt|Shift)\+", lambda match: match[1].replace("Ctrl", modifier) + joint, key)
    if random.random() < 0.4:
        text = ARROW.sub(random.choice([r"\1 arrow", r"arrow \1"]), text).replace("Esc", "Escape")
    return text if random.random() < 0.4 else text.lower()


PROPER = {
    word.lower(): word
    for word in (
        "GPU GPUs CPU CPUs RAM JSON API APIs TUI CLI HTTP REST URL TCP LAN NPU CUDA HIP XPU MLX AMD NVIDIA Intel Apple Huawei Ascend "
        "Radeon GeForce RTX GTX RX Arc Iris Quadro Tesla Titan Instinct Vega AMX AVX VNNI BF16 FP32 Python Linux Debian Ubuntu Windows "
        "OpenAI Hugging Face HF GGUF LoRA Qwen Qwen2 Qwen3 Llama Llama3 Mistral Gemma Gemma3 Phi ChatGPT GPT Claude Gemini Siri Alexa "
        "English German French Spanish Italian Chinese Japanese Russian Portuguese Dutch Polish Latin Greek Monday Friday Christmas "
        "Markdown SSE TTFT KV Esc Ctrl OpenAPI Swagger Prometheus Grafana LangChain README Mac MacBook macOS M1 M2 M3 M4 MI300 MI300X "
        "A100 H100 H200 B200 L40 A770 B580 AI LLM LLMs IDE SSD WiFi UI PC PDF PDFs Firefox  Chrome Makefile PID SQL HTML "
        "GB VRAM WSL WSL2 PyPI Homebrew Ollama vLLM Fedora Arch CentOS NixOS SUSE Xeon EPYC Ryzen Neovim XT XTX Ti "
        "Shakespeare Einstein Napoleon Cleopatra Mozart Beethoven Bach Picasso Newton Gandhi Lincoln Caesar Aristotle Plato Darwin "
        "Tesla Columbus Kubernetes Docker Rust Java JavaScript Roman Egypt Buddhism Olympics DNA Mars Titanic Hamlet"
    ).split()
}
NAMED = re.compile(r"(?<![\w/`.@_-])(" + "|".join(sorted(PROPER, key=len, reverse=True)) + r")(?![\w/`@_])(?!\.\w)")


def proper(text: str, random: Random) -> str:
    """Names and acronyms with their usual capitals; sometimes all in small letters or with one capital."""

    def with_capitals(match: re.Match[str]) -> str:
        draw = random.random()
        word = PROPER[match[0]]
        return word if draw < 0.8 else match[0] if draw < 0.9 else match[0].capitalize()

    return NAMED.sub(with_capitals, text)


def typed(text: str, random: Random, *, exact: bool = False, bare: bool = False) -> str:
    """A lower-case sentence as people type it, with contractions, fillers, typing errors, capitals and punctuation.

    `exact`: keep the words, because the answer copies from the sentence. `bare`: add no filler.
    """
    asking = ASKING.match(text) is not None
    if random.random() < 0.5:
        for long, short in SHORT:
            text = text.replace(long, short) if random.random() < 0.7 else text
    if not bare and random.random() < 0.16:
        text = sample(OPENINGS, random) + random.choice([", ", " ", ": ", ". ", ", "]) + text
    if not bare and random.random() < 0.14:
        text = text + random.choice([" ", ", "]) + sample(CLOSINGS, random)
    if not exact:
        while random.random() < 0.16:
            text = typo(text, random)
    style = random.random()
    if style < 0.62 or random.random() < 0.2:
        text = proper(text, random)
    if style < 0.62:
        text = re.sub(r"\bi\b(?=[ ']|$)", "I", text)
        text = text[:1].upper() + text[1:]
    elif style < 0.65 and not exact:
        text = text.upper()
    return text if text.endswith((".", "!", "?")) else text + _ending(text, asking, random)


def _ending(text: str, asking: bool, random: Random) -> str:
    if len(text) <= 3:
        return random.choice(["", "", "!", "?"])
    return random.choice(["?", "?", "?", "", "", " ?", "??"] if asking else ["", "", ".", ".", "!"])
