"""Prompts of models that fill the middle between two texts: the tokens that mark the texts, and their order."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedParameter
from .tokenizer.base import Tokenizer
from .tokenizer.doubled import added_around


@dataclass(frozen=True, slots=True)
class Marks:
    """The control tokens of one family. `suffix_first`: the suffix precedes the prefix, and no token follows it."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


FAMILIES = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, JetBrains' Mellum
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    Marks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class Infill:
    """The ids of a prompt, and the ids that end the middle beside those that end every answer."""

    ids: tuple[int, ...]
    ends: frozenset[int]


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> Infill:
    """The prompt for the text between `prefix` and `suffix`. Control tokens in these two are plain text.

    Raises UnsupportedParameter for a model without the tokens.
    """
    for marks in FAMILIES:
        texts = filter(None, (marks.prefix, marks.suffix, marks.middle))
        ids = {text: tokenizer.id_of(text) for text in texts}
        known = {text: token for text, token in ids.items() if token is not None}
        if len(known) == len(ids):
            return _arranged(tokenizer, marks, known, prefix, suffix)
    raise UnsupportedParameter(
        "suffix: the vocabulary of this model has no tokens for fill-in-the-middle that localllm knows", param="suffix"
    )


def _arranged(tokenizer: Tokenizer, marks: Marks, found: dict[str, int], prefix: str, suffix: str) -> Infill:
    before = [found[marks.prefix], *_encoded(tokenizer, prefix)]
    after = [found[marks.suffix], *_encoded(tokenizer, suffix)]
    texts = [*after, *before] if marks.suffix_first else [*before, *after, found[marks.middle]]
    return Infill((*added_around(tokenizer)[0], *texts), frozenset(found.values()))


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(tokenizer.protect(text), add_special_tokens=False) if text else []
