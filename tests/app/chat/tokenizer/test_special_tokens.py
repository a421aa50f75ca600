from __future__ import annotations

import pytest

from localllm.app.chat.tokenizer.special_tokens import control_ids, looks_like_control

MARKERS = """
<|im_start|> <|endoftext|> <|tool_call> <tool_call|> <|"|> <｜User｜> <｜tool▁calls▁begin｜> <|fim▁hole|> [|assistant|]
<think> </think> <tool_response> <start_of_turn> <s> </s> <unk> <bos> <mask> <extra_id_0> <seed:tool_call> <用户> ▁<PRE>
<reserved_106> <function_call/> [INST] [/INST] [TOOL_CALLS] [gMASK] [/AVAILABLE_TOOLS] [@BOS@] ◁think▷
""".split()
TEXTS = """
<b> </b> <table> <br/> <code> <|> <||> <- <3 <0> <0x41> [] [0] [i] [edit] [[ ``` --- naïve 日本 user don't C++ ... ü
""".split()


@pytest.mark.parametrize("text", MARKERS)
def test_the_form_of_a_marker(text: str) -> None:
    assert looks_like_control(text)


@pytest.mark.parametrize("text", [*TEXTS, "", " ", "    ", "\n\n", "▁▁", "a <b", "<a b>"])
def test_the_form_of_text(text: str) -> None:
    assert not looks_like_control(text)


def test_a_template_writes_control_tokens() -> None:
    template = (
        "{% for m in messages %}    ]~b]{{ m.role }}\n\n### User: <code> user don't {{ m.content }}---{% endfor %}"
    )
    texts = ["]~b]", "### User:", "<code>", "    ", "user", "don't", "\n\n", "---", "### Other:", "<b>"]
    assert control_ids(dict(enumerate(texts)), frozenset(), [template]) == {0, 1, 2}
    assert control_ids(dict(enumerate(texts)), frozenset(), []) == frozenset()


def test_special_tokens_and_markers_of_the_parser_are_control_tokens() -> None:
    texts = {5: "user", 6: "<b>", 7: "CALL:", 8: "x"}
    assert control_ids(texts, frozenset({5, 99}), [], frozenset({"CALL:"})) == {5, 7}
