"""Prompts for fill-in-the-middle."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.app.chat.infill import FAMILIES, infill_prompt
from localllm.app.errors import UnsupportedParameter


class Letters:
    """A tokenizer of letters, with some control tokens."""

    def __init__(self, *controls: str, begin: bool = False) -> None:
        self.controls = {text: 1000 + index for index, text in enumerate(controls)}
        self.begin = [1] if begin else []

    def id_of(self, text: str) -> int | None:
        return self.controls.get(text)

    def protect(self, text: str) -> str:
        return text.replace("<", "\0<")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return (self.begin if add_special_tokens else []) + [ord(letter) for letter in text]


def prompt(tokenizer: Letters, prefix: str = "a", suffix: str = "b") -> Any:
    return infill_prompt(tokenizer, prefix, suffix)  # type: ignore[arg-type]


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.prefix)
def test_order_of_texts(marks: Any) -> None:
    tokenizer = Letters(*filter(None, (marks.prefix, marks.suffix, marks.middle)))
    made = prompt(tokenizer)
    texts = {1000: "P", 1001: "S", 1002: "M"}
    written = "".join(texts.get(token, chr(token)) for token in made.ids)
    assert written == ("SbPa" if marks.suffix_first else "PaSbM")
    assert made.ends == set(tokenizer.controls.values())


def test_begin_token_and_control_tokens_in_the_texts() -> None:
    marks = FAMILIES[0]
    tokenizer = Letters(marks.prefix, marks.suffix, marks.middle, begin=True)
    assert prompt(tokenizer, "", "").ids == (1, 1000, 1001, 1002)
    assert prompt(tokenizer, "<").ids == (1, 1000, 0, ord("<"), 1001, ord("b"), 1002)


def test_other_models_are_refused() -> None:
    for tokenizer in (Letters(), Letters(FAMILIES[0].prefix, FAMILIES[0].suffix)):
        with pytest.raises(UnsupportedParameter) as refused:
            prompt(tokenizer)
        assert refused.value.param == "suffix"
