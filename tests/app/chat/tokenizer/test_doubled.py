"""A warning for a typed token that the tokenizer also adds, such as BOS. The ids do not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import TemplateProcessing

from localllm.app.chat.prompt import PromptMaker
from localllm.app.chat.template.renderer import TemplateRenderer
from localllm.app.chat.tokenizer.base import Tokenizer
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer

from ...tiny_qwen import write_tokenizer

BEGIN, END = "<|im_start|>", "<|endoftext|>"
TEMPLATES = {
    "once": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "twice": "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def safetensors(folder: Path, around: str, template: str = "once") -> ChatTokenizer:
    """A tokenizer that adds tokens around a text. `around`: as in TemplateProcessing; empty: no tokens."""
    write_tokenizer(folder, TEMPLATES[template])
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    if around:
        names = [(name, rust.token_to_id(name)) for name in (BEGIN, END)]
        rust.post_processor = TemplateProcessing(single=around, special_tokens=names)
    rust.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": BEGIN, "eos_token": END}))
    return ChatTokenizer(folder)


def gguf(folder: Path) -> Tokenizer:
    """The vocabulary of Llama 2, to which llama.cpp adds BOS."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from .gguf_vocabularies import pair

    return pair("llama", folder).tokenizer


@pytest.mark.parametrize(
    ("around", "text", "places"),
    [
        (f"{BEGIN} $A", f"{BEGIN}hi", ["begins"]),
        (f"{BEGIN} $A", BEGIN, ["begins"]),
        (f"{BEGIN} $A", "hi", []),
        (f"{BEGIN} $A", "", []),
        (f"{BEGIN} $A", f"hi{BEGIN}{BEGIN}", []),
        (f"{BEGIN} $A {END}", f"{BEGIN}hi{END}", ["begins", "ends"]),
        (f"{BEGIN} $A {END}", f"{END}hi{BEGIN}", []),
        (f"{BEGIN} $A {END}", "", []),
        (f"$A {END}", f"hi{END}", ["ends"]),
        (f"$A {END}", f"{END}{END}hi", []),
        (f"$A {END}", END, ["ends"]),
        ("", f"{BEGIN}{BEGIN}hi", []),  # the user wrote both
    ],
)
def test_tokens_of_safetensors_models(
    tmp_path: Path, renderer: TemplateRenderer, around: str, text: str, places: list[str]
) -> None:
    tokenizer = safetensors(tmp_path, around)
    prompt = PromptMaker(tokenizer, renderer).from_text(text)
    assert list(prompt.ids) == tokenizer.encode(text, add_special_tokens=True)
    assert [warning.split()[2] for warning in prompt.warnings] == places
    assert PromptMaker(tokenizer, renderer).from_text(text, add_special_tokens=False).warnings == ()
    assert PromptMaker(tokenizer, renderer).from_text(prompt.ids).warnings == (), "the client has chosen the ids"


@pytest.mark.parametrize(
    ("text", "twice"), [("<s>hi", True), ("<s>", True), ("hi", False), ("hi<s>", False), ("", False)]
)
def test_tokens_of_gguf_models(tmp_path: Path, renderer: TemplateRenderer, text: str, twice: bool) -> None:
    prompt = PromptMaker(gguf(tmp_path), renderer).from_text(text)
    assert prompt.ids.count(1) == 1 + text.count("<s>")
    assert [warning.startswith("the prompt begins with '<s>' twice") for warning in prompt.warnings] == [True] * twice


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats(tmp_path: Path, renderer: TemplateRenderer, template: str) -> None:
    """The text of a message never becomes BOS, and the tokenizer adds none: only the template can write it twice."""
    tokenizer = safetensors(tmp_path, f"{BEGIN} $A", template)
    prompt = PromptMaker(tokenizer, renderer).from_messages([{"role": "user", "content": f"{BEGIN}hi"}])
    count = {"once": 1, "twice": 2}[template]
    assert prompt.ids.count(tokenizer.control_tokens[BEGIN]) == count
    assert [warning.partition(": ")[2] for warning in prompt.warnings] == ["the chat template has it twice"] * (
        count - 1
    )
