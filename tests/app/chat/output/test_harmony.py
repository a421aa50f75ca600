from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.app.chat.answer import Choice, ReadingOptions
from localllm.app.chat.output.harmony import MAX_HEADER
from localllm.app.chat.prompt import Prompt, PromptMaker
from localllm.app.chat.template.renderer import TemplateRenderer
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.errors import UnsupportedParameter
from localllm.app.frames import Piece
from localllm.app.grammar.compiler import GrammarCompiler
from localllm.engine.grammar import unpack_mask
from localllm.engine.request import Delta, Finish, TokenLogprobs

from ...tiny_harmony import write_harmony_tokenizer

CHAT = Prompt((1,), harmony=True)
NEXT = "<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>hm, 日本 🙂"
FINAL = "<|channel|>final<|message|>"
THINK = "<|channel|>analysis<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>'
GENERATE = '<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>{"path": "index.html"}<|call|>'
WEATHER = [("get_weather", '{"location":"San Francisco"}')]

TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]

# output -> (reasoning, text, calls); the first rows are examples of the documentation of openai-harmony
TABLE = {
    "reasoning and answer": (
        f'{THINK}User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.{NEXT}{FINAL}2 + 2 = 4.<|return|>',
        'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.',
        "2 + 2 = 4.",
        [],
    ),
    "call": (
        f"<|channel|>analysis<|message|>Need to use function get_weather.{NEXT}{CALL}",
        "Need to use function get_weather.",
        "",
        WEATHER,
    ),
    "preamble": (
        f"{ANALYSIS}{NEXT}{PREAMBLE}**Action plan**:\n1. HTML{NEXT}{GENERATE}",
        "hm, 日本 🙂",
        "**Action plan**:\n1. HTML",
        [("generate_file", '{"path": "index.html"}')],
    ),
    "recipient before the channel": (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "recipient in the role": (
        f'{ANALYSIS}{NEXT} to=functions.f.g<|channel|>commentary<|message|>{{"a": 1}}',
        "hm, 日本 🙂",
        "",
        [("f.g", '{"a": 1}')],
    ),
    "call on the channel analysis": (
        '<|channel|>analysis to=functions.f<|message|>{"a": 1}',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "call without arguments": ("<|channel|>commentary to=functions.now<|message|><|call|>", "", "", [("now", "{}")]),
    "two calls": (f"{CALL}<|start|>assistant{CALL}", "", "", WEATHER * 2),
    "arguments that are not JSON": (
        "<|channel|>commentary to=functions.f<|message|>{oops<|call|>",
        "",
        "",
        [("f", "{oops")],
    ),
    "call of a built-in tool": (
        f"<|channel|>analysis to=browser.search code<|message|>query{NEXT}<|channel|>final<|message|>ok",
        "query",
        "ok",
        [],
    ),
    "call without a name": (
        f'<|channel|>commentary to=functions.<|message|>{{"a": 1}}{NEXT}{FINAL}b',
        '{"a": 1}',
        "b",
        [],
    ),
    "result that the model invents": (
        "<|channel|>analysis<|message|>a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>18 °C",
        "a\n\n18 °C",
        "",
        [],
    ),
    "two messages of each kind": (
        f"{THINK}a{NEXT}{THINK}b{NEXT}{PREAMBLE}c{NEXT}{FINAL}d",
        "a\n\nb",
        "c\n\nd",
        [],
    ),
    "stray channel": (
        f"<|channel|>commentary to=assistant{THINK}a{NEXT}<|channel|>commentary{FINAL}b",
        "a",
        "b",
        [],
    ),
    "stray recipient": (f"<|channel|>commentary to=assistant{FINAL}b", "", "b", []),
    "message without an end": ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", []),
    "answer without a header": ("Hello <there>, to you", "", "Hello <there>, to you", []),
    "answer that begins like a recipient": (" told you", "", " told you", []),
    "header without a channel": ("<|message|>Hello", "", "Hello", []),
    "header without a message": ("<|channel|>final Hello to you", "", "final Hello to you", []),
    "header that is cut off": (f"{ANALYSIS}{NEXT}<|channel|>fin", "hm, 日本 🙂", "", []),
    "line break between messages": (
        f"{ANALYSIS}<|end|>\n<|start|>assistant<|channel|>final<|message|>b",
        "hm, 日本 🙂",
        "b",
        [],
    ),
    "white space stays": ("<|channel|>final<|message|>  a \n", "", "  a \n", []),
    "nothing": ("", "", "", []),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_harmony_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def prompts(tokenizer: ChatTokenizer) -> Iterator[PromptMaker]:
    renderer = TemplateRenderer()
    yield PromptMaker(tokenizer, renderer)
    renderer.close()


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


def ids_of(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def feed(choice: Choice, tokenizer: ChatTokenizer, ids: list[int], cuts: list[int], end: Finish) -> list[Piece]:
    """The pieces of an answer whose deltas end at `cuts`."""
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        tokens = tuple(ids[start:stop])
        probs = tuple(TokenLogprobs(token, -1.0, ()) for token in tokens)
        pieces.append(choice.take(Delta("a/0", tokens, probs, end if stop == len(ids) else None)))
    return [piece for piece in pieces if piece is not None]


def read(
    tokenizer: ChatTokenizer,
    ids: list[int],
    cuts: list[int],
    prompt: Prompt = CHAT,
    end: Finish = "stop",
    **options: Any,
) -> tuple[str, str, list[tuple[str, str]]]:
    reading = ReadingOptions(**({"tools": TOOLS} | options))
    choice = Choice("a", 0, tokenizer, prompt, reading, stop_ids=tokenizer.eos_ids)
    pieces = feed(choice, tokenizer, ids, cuts, end)
    assert all(len(piece.logprobs) == piece.tokens for piece in pieces)
    parts = [part for piece in pieces for part in piece.tool_calls]
    calls = [part for part in parts if part.id]
    assert [call.index for call in calls] == list(range(len(calls)))
    if not options:
        has_end = end == "stop" and ids[-1:] and ids[-1] in tokenizer.eos_ids
        assert sum(piece.tokens for piece in pieces) == len(ids) - bool(has_end)
        assert (pieces[-1].finish == "tool_calls") == (bool(calls) and end == "stop")
    return (
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.text for piece in pieces),
        [(call.name, "".join(part.arguments for part in parts if part.index == call.index)) for call in calls],
    )


@pytest.mark.parametrize("name", TABLE)
def test_answers_are_split_into_channels_at_any_token(tokenizer: ChatTokenizer, name: str) -> None:
    output, *expected = TABLE[name]
    ids = ids_of(tokenizer, output)
    assert read(tokenizer, ids, []) == tuple(expected)
    assert read(tokenizer, ids, list(range(1, len(ids)))) == tuple(expected)
    for cut in range(1, len(ids)):
        assert read(tokenizer, ids, [cut]) == tuple(expected), cut


@pytest.mark.parametrize("name", TABLE)
def test_an_answer_that_ends_at_any_token_shows_no_marker(tokenizer: ChatTokenizer, name: str) -> None:
    output, reasoning, *_ = TABLE[name]
    ids = ids_of(tokenizer, output)
    for length in range(len(ids)):
        thought, text, _ = read(tokenizer, ids[:length], [], end="length")
        assert reasoning.startswith(thought.rstrip("\ufffd"))
        for marker in ("<|", "functions.", "commentary", "analysis"):
            assert marker not in thought + text


def test_marker_characters_in_ordinary_tokens_are_text(tokenizer: ChatTokenizer) -> None:
    marker = tokenizer.encode(tokenizer.protect("<|end|><|channel|>final<|message|>"), add_special_tokens=False)
    ids = [*ids_of(tokenizer, "<|channel|>final<|message|>a "), *marker, *ids_of(tokenizer, " b")]
    assert read(tokenizer, ids, list(range(1, len(ids)))) == ("", "a <|end|><|channel|>final<|message|> b", [])


@pytest.mark.parametrize("start", ["<|channel|>final ", "to=", "<|start|>assistant"])
def test_a_header_without_an_end_becomes_text(tokenizer: ChatTokenizer, start: str) -> None:
    """If it stayed a header, the answer would be hidden, and each token would take longer than the one before."""
    ids = ids_of(tokenizer, start + "word " * 4 * MAX_HEADER)
    choice = Choice("a", 0, tokenizer, CHAT)
    pieces = feed(choice, tokenizer, ids, list(range(MAX_HEADER + 10, len(ids), 50)), "length")
    assert len(pieces) > 10
    assert "word word" in pieces[0].text
    assert all(len(piece.text) < 60 for piece in pieces[1:])
    assert sum(piece.tokens for piece in pieces) == len(ids)


def test_a_header_that_repeats_the_recipient_costs_little_time(tokenizer: ChatTokenizer) -> None:
    text = "to=" * 40 + " a b"
    assert read(tokenizer, ids_of(tokenizer, text), []) == ("", text, [])


@pytest.mark.parametrize("stop", ["assistant", "final", "analysis", "channel"])
def test_stop_strings_apply_to_texts_only(tokenizer: ChatTokenizer, stop: str) -> None:
    ids = ids_of(tokenizer, f"{ANALYSIS}{NEXT}<|channel|>final<|message|>one {stop} two")
    for cuts in ([], list(range(1, len(ids)))):
        assert read(tokenizer, ids, cuts, stop=[stop]) == ("hm, 日本 🙂", "one ", [])


def test_a_cut_call_has_the_arguments_so_far(tokenizer: ChatTokenizer) -> None:
    ids = ids_of(tokenizer, "<|channel|>commentary to=functions.f<|message|>")
    assert read(tokenizer, ids, [], end="stop") == ("", "", [("f", "{}")])
    assert read(tokenizer, ids, [], end="length") == ("", "", [("f", "")])
    ids = ids_of(tokenizer, '<|channel|>commentary to=functions.f<|message|>{"a": ')
    assert read(tokenizer, ids, [], end="length") == ("", "", [("f", '{"a": ')])


def test_stop_strings_do_not_act_in_reasoning_or_calls(tokenizer: ChatTokenizer) -> None:
    call = '<|channel|>commentary to=functions.f<|message|>{"a": "END"}'
    ids = ids_of(tokenizer, f"<|channel|>analysis<|message|>no END here{NEXT}{call}")
    for cuts in ([], list(range(1, len(ids)))):
        assert read(tokenizer, ids, cuts, stop=["END", "}"]) == ("no END here", "", [("f", '{"a": "END"}')])


def test_without_tools_a_call_is_text(tokenizer: ChatTokenizer) -> None:
    assert read(tokenizer, ids_of(tokenizer, CALL), [], tools=()) == ("", WEATHER[0][1], [])


def test_without_parallel_calls_the_first_call_ends_the_answer(tokenizer: ChatTokenizer) -> None:
    ids = ids_of(tokenizer, f"{CALL}<|start|>assistant{CALL}")
    assert read(tokenizer, ids, list(range(1, len(ids))), one_call=True) == ("", "", WEATHER)


def test_call_and_return_end_an_answer(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """The configuration of a model may name only one of them."""
    assert {tokenizer.id_of("<|call|>"), tokenizer.id_of("<|return|>")} <= tokenizer.eos_ids
    assert tokenizer.id_of("<|end|>") not in tokenizer.eos_ids


USER = {"role": "user", "content": "weather?"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def call(name: str, identifier: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(identifier: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def text_of(prompts: PromptMaker, *args: Any, **kwargs: Any) -> str:
    return prompts.tokenizer.decode(prompts.from_messages(*args, **kwargs).ids)


def test_reasoning_of_open_tool_calls_stays_and_other_reasoning_is_dropped(prompts: PromptMaker) -> None:
    calls = {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [call("f", "1")]}
    open_turn = [USER, calls, result("1", "18")]
    rendered = text_of(prompts, open_turn)
    assert "<|channel|>analysis<|message|>think<|end|>" in rendered
    answer = {"role": "assistant", "content": "warm", "reasoning_content": "more"}
    closed = text_of(prompts, [*open_turn, answer, USER])
    assert "think" not in closed
    assert "more" not in closed
    assert "<|channel|>final<|message|>warm<|end|>" in closed


def test_text_and_reasoning_of_a_message_with_a_call_are_one_message(prompts: PromptMaker) -> None:
    calls = {"role": "assistant", "content": "plan", "reasoning_content": "think", "tool_calls": [call("f", "1")]}
    assert "analysis<|message|>think\n\nplan<|end|>" in text_of(prompts, [USER, calls, result("1", "18")])


def test_parallel_calls_are_rendered_one_after_the_other(prompts: PromptMaker) -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [call("f", "1", '{"a": 1}'), call("g", "2")]}
    rendered = text_of(prompts, [USER, calls, result("2", "second"), result("1", "first")])
    assert rendered == (
        "<|start|>user<|message|>weather?<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"first"<|end|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"second"<|end|><|start|>assistant'
    )


def test_instructions_are_merged_or_become_messages_of_the_user(prompts: PromptMaker) -> None:
    instructions = [{"role": "system", "content": "one"}, {"role": "developer", "content": "two"}]
    assert text_of(prompts, [*instructions, USER]).startswith("<|start|>developer<|message|>one\n\ntwo<|end|>")
    later = text_of(prompts, [USER, *instructions])
    assert later.startswith("".join(f"<|start|>user<|message|>{text}<|end|>" for text in ("weather?", "one", "two")))


def test_a_tool_needs_no_description(prompts: PromptMaker) -> None:
    assert "// \nf" in text_of(prompts, [USER], tools=[TOOL])


def test_prompts_for_structured_output_open_the_channel_final(prompts: PromptMaker, tokenizer: ChatTokenizer) -> None:
    prompt = prompts.from_messages([USER], close_reasoning=True)
    assert prompt.harmony
    assert prompt.inside_answer
    assert tokenizer.decode(prompt.ids).endswith("<|start|>assistant<|channel|>final<|message|>")
    assert read(tokenizer, ids_of(tokenizer, '{"a": 1}<|return|>'), [], prompt) == ("", '{"a": 1}', [])
    assert not prompts.from_messages([USER], tools=[TOOL], close_reasoning=True).inside_answer


def test_continued_messages_are_inside_the_answer(prompts: PromptMaker, tokenizer: ChatTokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    prompt = prompts.from_messages(messages, continue_final_message=True)
    assert tokenizer.decode(prompt.ids).endswith("<|channel|>final<|message|>It is")
    assert read(tokenizer, ids_of(tokenizer, " warm"), [], prompt) == ("", " warm", [])
    messages[-1] |= {"tool_calls": [call("f", "1")]}
    with pytest.raises(UnsupportedParameter, match="tool calls"):
        prompts.from_messages(messages, continue_final_message=True)


def accepted(compiler: GrammarCompiler, tokenizer: ChatTokenizer, text: str, *, forced: bool) -> bool:
    """Whether the grammar allows the text as a complete answer."""
    tools = [TOOL | {"function": TOOL["function"] | {"strict": True}}]
    tools.append({"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}})
    grammar = compiler.compile_harmony_calls(tools, forced=forced)
    for token in ids_of(tokenizer, text):
        if not unpack_mask(grammar.allowed(), tokenizer.vocab_size)[token]:
            return False
        grammar.accept(token)
    return bool(unpack_mask(grammar.allowed(), tokenizer.vocab_size)[tokenizer.id_of("<|call|>")])


REASONING = f"<|channel|>analysis<|message|>hm, 日本{NEXT}"
F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
G = " to=functions.g<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("text", "as_forced", "as_free"),
    [
        (F + '{"a": 1}', True, True),
        (REASONING + F + '{"a": 1}', True, True),
        (REASONING + G + '{"b": [1]}', True, True),
        (F + '{"a": "x"}', False, False),
        (REASONING + REASONING + F + '{"a": 1}', False, True),
        ("<|channel|>final<|message|>hello", False, True),
        (REASONING + "<|channel|>final<|message|>", False, True),
        ("<|channel|>commentary<|message|>plan" + NEXT + F + "{}", False, True),
        ("<|channel|>commentary to=functions.h<|message|>{}", False, False),
        ("hello", False, False),
        ("<tool_call>", False, False),
    ],
)
def test_grammars_allow_calls_in_this_format_only(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, text: str, as_forced: bool, as_free: bool
) -> None:
    assert accepted(compiler, tokenizer, text, forced=True) == as_forced
    assert accepted(compiler, tokenizer, text, forced=False) == as_free
