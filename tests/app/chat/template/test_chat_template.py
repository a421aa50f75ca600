"""Small templates that refuse or drop parts of valid conversations, as the templates of models do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.app.chat.template.adaptation import STEPS
from localllm.app.chat.template.chat_template import MAX_PLANS, ChatTemplate
from localllm.app.chat.template.child import Job, render
from localllm.app.chat.template.messages import Conversation, in_order
from localllm.app.chat.template.renderer import TemplateExceeded, TemplateRenderer
from localllm.app.errors import TemplateFailed

CALL = "{{ c.function | tojson }}"
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}CALL</c>{% endfor %}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
RAISE = "{{ raise_exception('refused') }}"
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}" + RAISE + "{% endif %}{% endfor %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + RAISE + "{% endif %}"
    "{% if m.role not in ['user', 'assistant'] %}" + RAISE + "{% endif %}{% endfor %}"
)
# As in Mistral's templates: messages with calls, and results, do not count.
COUNTED = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
    + RAISE
    + "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
)


class LocalRenderer(TemplateRenderer):
    """Renders in this process and counts the renderings."""

    def __init__(self) -> None:
        self.count = 0

    def render(self, template: str, variables: dict[str, Any]) -> str:
        self.count += 1
        rendered = render(Job(template, json.loads(json.dumps(variables)), 10**6))
        if rendered.problem:
            raise (TemplateExceeded if rendered.exceeded else TemplateFailed)(rendered.problem)
        return rendered.text


class PlainTokenizer:
    """A tokenizer without special tokens. It shows which texts are protected, and how."""

    special_tokens = {"bos_token": "<s>"}

    def id_of(self, token: str) -> None:
        return None

    def protect(self, value: Any, *, own: bool = False) -> Any:
        if isinstance(value, str):
            return value.replace("!", "own" if own else "protected")
        if isinstance(value, dict):
            return {key: self.protect(item, own=own) for key, item in value.items()}
        return [self.protect(item, own=own) for item in value] if isinstance(value, list) else value


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, LocalRenderer(), PlainTokenizer())  # type: ignore[arg-type]


def prompt(source: str, *messages: dict[str, Any], tools: Any = None, **kwargs: Any) -> str:
    return chat_template(source).render(Conversation(in_order(messages), tools), kwargs).text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def call(identifier: str, arguments: str = '{"city": "Oslo"}', name: str = "get") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(identifier: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": text}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now"} | function}


TEXT = "{{ c.function.name + ' ' + c.function.arguments }}"
REPR = "{{ c.function.name }} {{ c.function.arguments }}"
EITHER = (
    "{{ c.function.name }} {% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}"
)
ITEMS = "{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
LETTERS = "{{ c.function.name }}{% for k in c.function.arguments %} {{ k }}={{ c.function.arguments[k] }}{% endfor %}"
OSLO = '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("how", "arguments", "expected"),
    [
        *((how, OSLO, f"get {OSLO}") for how in (TEXT, REPR, EITHER)),
        *((how, "", "get {}") for how in (TEXT, REPR, EITHER)),
        *((how, "null", "get {}") for how in (TEXT, REPR, EITHER)),
        *((how, "[1, 2]", "get [1, 2]") for how in (TEXT, REPR, EITHER)),
        *((how, "{oops", "get {oops") for how in (TEXT, REPR, EITHER)),
        *((how, json.dumps(OSLO), f"get {OSLO}") for how in (TEXT, REPR, EITHER)),
        (TEXT, '{"größe":1.50}', 'get {"größe":1.50}'),
        *((how, OSLO, "get city=Oslo") for how in (ITEMS, LETTERS)),
        *((how, "", "get") for how in (ITEMS, LETTERS)),
        *((how, "null", "get") for how in (ITEMS, LETTERS)),
        *((how, "[1, 2]", "get arguments=[1, 2]") for how in (ITEMS, LETTERS)),
        *((how, "{oops", "get arguments={oops") for how in (ITEMS, LETTERS)),
        (CALL, OSLO, '{"name": "get", "arguments": {"city": "Oslo"}}'),
        (CALL, "", '{"name": "get", "arguments": {}}'),
        (CALL, "[1]", '{"name": "get", "arguments": [1]}'),
        (CALL, '{"n": 1' + "0" * 30 + "}", '{"name": "get", "arguments": {"n": 1' + "0" * 30 + "}}"),
    ],
)
def test_arguments_are_shown_as_the_template_needs_them(how: str, arguments: str, expected: str) -> None:
    text = prompt(TURNS.replace("CALL", how), user("x"), assistant("", call("a", arguments)), result("a", "1"))
    assert text == f"<user>x</><assistant>{expected}</c></><tool>1</><assistant>"


def test_results_stand_below_their_calls() -> None:
    calls = assistant("", call("a"), call("b", '{"city": "Rome"}'))
    in_call_order = prompt(TURNS, user("x"), calls, result("a", "snow"), result("b", "sun"))
    assert in_call_order.endswith("<tool>snow</><tool>sun</><assistant>")
    assert prompt(TURNS, user("x"), calls, result("b", "sun"), result("a", "snow")) == in_call_order


NINE = "{% if c.id | length != 9 %}" + RAISE + "{% endif %}{{ c.id }} " + EITHER
NAMELESS = "{{ c.id }}({{ c.function.arguments | tojson }})"
RESULT_IDS = TURNS.replace("{{ m.content }}", "{{ m.tool_call_id }}:{{ m.content }}").replace(
    "<{{ m.role }}>", "<{{ m.name or m.role }}>"
)


def test_a_template_that_refuses_ids_gets_short_ones() -> None:
    template = chat_template(RESULT_IDS.replace("CALL", NINE))
    ids = template.call_ids([])
    assert ids.style == "nine"
    new = ids.new(0, "get")
    messages = [user("x"), assistant("", call("call_0123456789abcdef01234567"), call(new))]
    messages += [result(new, "2"), result("call_0123456789abcdef01234567", "1")]
    text = template.render(Conversation(in_order(messages)), {}).text
    short = text.partition("<assistant>:")[2][:9]
    assert f"<assistant>:{short} get {OSLO}</c>{new} get {OSLO}</c></><get>{short}:1</><get>{new}:2</>" in text


def test_a_template_that_shows_ids_in_place_of_names_gets_ids_with_names() -> None:
    template = chat_template(RESULT_IDS.replace("CALL", NAMELESS))
    messages = [user("x"), assistant("", call("a")), result("a", "1"), user("y")]
    messages += [
        assistant("", call("b", "{}", "put"), call("functions.get:7")),
        result("functions.get:7", "3"),
        result("b", "2"),
    ]
    text = template.render(Conversation(in_order(messages)), {}).text
    assert 'functions.get:0({"city": "Oslo"})</c></><get>functions.get:0:1</>' in text
    assert "functions.put:1({})</c>functions.get:7(" in text
    assert "<put>functions.put:1:2</><get>functions.get:7:3</>" in text
    assert template.call_ids(messages).new(0, "f") == "functions.f:3"


@pytest.mark.parametrize("how", [CALL, TEXT, ITEMS, "{{ c.id }} " + EITHER])
def test_other_templates_keep_ids(how: str) -> None:
    template = chat_template(RESULT_IDS.replace("CALL", how))
    assert template.call_ids([]).style == "plain"
    assert (
        "foreign:1"
        in template.render(Conversation([user("x"), assistant("", call("foreign")), result("foreign", "1")]), {}).text
    )


GET = '{"name": "get", "arguments": {}}'
OSLO_TEXT = '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo"}}\n</tool_call>'
RESULT_TEXT = "<tool_response>\n1\n</tool_response>"

CONVERSATIONS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "two systems": (FIRST_SYSTEM + TURNS, [system("a"), system("b"), user("x")], "<system>a\n\nb</><user>x</>"),
    "late system": (
        FIRST_SYSTEM + TURNS,
        [system("a"), user("x"), assistant("y"), system("b"), user("z")],
        "<system>a</><user>x</><assistant>y</><user>b</><user>z</>",
    ),
    "last system": (FIRST_SYSTEM + TURNS, [user("x"), system("b")], "<user>x</><user>b</>"),
    "no system": (ALTERNATE + TURNS, [system("a"), user("x")], "<user>a\n\nx</>"),
    "no system, two": (ALTERNATE + TURNS, [system("a"), system("b"), user("x")], "<user>a\n\nb\n\nx</>"),
    "only a system": (ALTERNATE + TURNS, [system("a")], "<user>a</>"),
    "developer": (ALTERNATE + TURNS, [{"role": "developer", "content": "a"}, user("x")], "<user>a\n\nx</>"),
    "late system, alternating": (
        ALTERNATE + TURNS,
        [user("x"), assistant("y"), system("b"), user("z")],
        "<user>x</><assistant>y</><user>b\n\nz</>",
    ),
    "two users": (
        ALTERNATE + TURNS,
        [user("x"), user("y"), assistant("z"), user("w")],
        "<user>x\n\ny</><assistant>z</><user>w</>",
    ),
    "two assistants": (
        ALTERNATE + TURNS,
        [user("x"), assistant("y"), assistant("z"), user("w")],
        "<user>x</><assistant>y\n\nz</><user>w</>",
    ),
    "assistant first": (ALTERNATE + TURNS, [assistant("y"), user("x")], "<user></><assistant>y</><user>x</>"),
    "everything": (
        ALTERNATE + TURNS,
        [
            system("a"),
            {"role": "developer", "content": "b"},
            user("x"),
            user("y"),
            assistant("z"),
            system("c"),
            user("w"),
        ],
        "<user>a\n\nb\n\nx\n\ny</><assistant>z</><user>c\n\nw</>",
    ),
    "interrupted calls": (
        COUNTED + TURNS,
        [user("x"), assistant("", call("a", "{}")), user("y")],
        '<user>x</><assistant>{"name": "get", "arguments": {}}</c></><assistant></><user>y</>',
    ),
    "commented results": (
        COUNTED + TURNS,
        [user("x"), assistant("", call("a", "{}")), result("a", "1"), user("y")],
        '<user>x</><assistant>{"name": "get", "arguments": {}}</c></><tool>1</><assistant></><user>y</>',
    ),
    "trimmed start": (
        COUNTED + TURNS,
        [assistant("", call("a", "{}")), result("a", "1"), assistant("y"), user("z")],
        '<user></><assistant>{"name": "get", "arguments": {}}</c></><tool>1</><assistant>y</><user>z</>',
    ),
    "empty answer": (
        "{% for m in messages %}{% if not m.content %}" + RAISE + "{% endif %}{% endfor %}" + TURNS,
        [user("x"), assistant(""), user("y")],
        "<user>x</><assistant> </><user>y</>",
    ),
    "null beside calls": (
        "{% for m in messages %}{% if m.tool_calls and m.content is not none %}"
        + RAISE
        + "{% endif %}{% endfor %}"
        + TURNS.replace("{{ m.content }}", "{{ m.content or '' }}"),
        [user("x"), assistant("", call("a", "{}"))],
        '<user>x</><assistant>{"name": "get", "arguments": {}}</c></>',
    ),
    "one call": (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        + RAISE
        + "{% endif %}{% endfor %}"
        + TURNS.replace("CALL", TEXT),
        [
            user("x"),
            assistant("y", call("a", "{}"), call("b", "[]"), call("a", "7")),
            result("b", "2"),
            result("a", "1"),
        ],
        "<user>x</><assistant>yget {}</c></><tool>1</><assistant>get []</c></><tool>2</><assistant>get 7</c></>",
    ),
    # No error, but a part is missing.
    "drops later systems": (
        TURNS.replace("</>{% endfor %}", "</>{% endfor %}")
        .replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' or loop.first %}", 1)
        .replace("loop.first", "m == messages[0]"),
        [system("a"), user("x"), system("b"), user("y")],
        "<system>a</><user>x</><user>b</><user>y</>",
    ),
    "drops all systems but the last": (
        "{% for m in messages if m.role == 'system' %}{% if loop.last %}<{{ m.content }}>{% endif %}{% endfor %}"
        + TURNS.replace("in messages %}", "in messages if m.role != 'system' %}", 1),
        [system("a"), system("b"), user("x")],
        "<a\n\nb><user>x</>",
    ),
    "drops systems": (
        TURNS.replace("in messages %}", "in messages if m.role != 'system' %}", 1),
        [system("a"), user("x")],
        "<user>a\n\nx</>",
    ),
    "drops developers": (
        TURNS.replace("in messages %}", "in messages if m.role != 'developer' %}", 1),
        [{"role": "developer", "content": "a"}, user("x")],
        "<system>a</><user>x</>",
    ),
    "drops later calls": (
        TURNS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        [user("x"), assistant("", call("a", "{}"), call("b", "[]")), result("b", "2"), result("a", "1")],
        f"<user>x</><assistant>{GET}</c></><tool>1</>" + f"<assistant>{GET.replace('{}', '[]')}</c></><tool>2</>",
    ),
    "drops calls": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>",
        [user("x"), assistant("y", call("a")), result("a", "1")],
        f"<user>x</><assistant>y\n{OSLO_TEXT}</><tool>1</>",
    ),
    "drops results": (
        TURNS.replace("in messages %}", "in messages if m.role != 'tool' %}", 1),
        [user("x"), assistant("", call("a", "{}")), result("a", "1"), user("y")],
        f"<user>x</><assistant>{GET}</c></><user>{RESULT_TEXT}\n\ny</>",
    ),
    "calls and results are unknown": (
        ALTERNATE + "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>",
        [user("x"), assistant("", call("a")), result("a", "1"), assistant("y"), user("z")],
        f"<user>x</><assistant>{OSLO_TEXT}</><user>{RESULT_TEXT}</><assistant>y</><user>z</>",
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_gets_the_change_that_the_template_needs(name: str) -> None:
    source, messages, expected = CONVERSATIONS[name]
    source = source.replace("CALL", CALL)
    before = json.dumps(messages)
    assert prompt(source, *messages) == expected + "<assistant>"
    assert json.dumps(messages) == before


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_template_that_shows_a_conversation_gets_it_unchanged(name: str) -> None:
    _, messages, _ = CONVERSATIONS[name]
    plain = render(
        Job(
            TURNS.replace("CALL", TEXT),
            {"messages": Conversation(in_order(messages), None, "text").for_template(), "add_generation_prompt": True},
            10**6,
        )
    )
    assert prompt(TURNS.replace("CALL", TEXT), *messages) == plain.text


TOOLS = "{% for t in tools %}TOOL{% endfor %}" + TURNS
DESCRIPTION = TOOLS.replace("TOOL", "{{ t.function.description + '.' }}")
TYPE = TOOLS.replace("TOOL", "{{ t.function.parameters.type + '.' }}")
PROPERTIES = TOOLS.replace(
    "TOOL",
    "{% for k, v in t.function.parameters.properties | items %}{{ k + v.description }}{% endfor %}"
    "{{ t.function.parameters | tojson }}.",
)


@pytest.mark.parametrize(
    ("source", "tools", "expected"),
    [
        (DESCRIPTION, [tool()], "."),
        (DESCRIPTION, [tool(description="a"), tool()], "a.."),
        (TYPE, [tool()], "object."),
        (TYPE, [tool(parameters={})], "object."),
        (PROPERTIES, [tool(description="a")], '{"type": "object", "properties": {}}.'),
        (PROPERTIES, [tool(parameters={"properties": {"a": {"type": "string"}}})], "a"),
        (TOOLS.replace("TOOL", "{{ t | tojson }}"), [tool()], '{"type": "function", "function": {"name": "now"}}'),
        (TOOLS, None, "<user>"),
        ("{% if tools is none %}none{% endif %}" + TURNS, None, "none<user>"),
    ],
)
def test_tools_get_the_fields_that_the_template_needs(source: str, tools: Any, expected: str) -> None:
    assert prompt(source, user("x"), tools=tools).startswith(expected)


def test_a_conversation_gets_only_the_changes_that_are_necessary() -> None:
    """Two changes are necessary; between them is one that shows as well."""
    content = "{% if m.content is none %}null{% else %}{{ m.content }}{% endif %}"
    source = FIRST_SYSTEM + DESCRIPTION.replace("{{ m.content }}", content).replace("CALL", CALL)
    text = prompt(source, system("a"), system("b"), user("x"), assistant("", call("a", "{}")), tools=[tool()])
    assert text == f".<system>a\n\nb</><user>x</><assistant>{GET}</c></><assistant>"


def test_the_first_error_stays_if_no_change_helps() -> None:
    source = "{% if messages | length == 2 %}" + RAISE.replace("refused", "two") + "{% endif %}" + RAISE
    with pytest.raises(TemplateFailed, match="two"):
        prompt(source, system("a"), user("x"))


def test_a_template_that_exceeds_a_limit_is_not_tried_again() -> None:
    template = chat_template("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}")
    with pytest.raises(TemplateExceeded):
        template.render(Conversation([system("a"), system("b"), user("x")]), {})
    assert template._renderer.count == 1  # type: ignore[attr-defined]


def test_a_failure_that_depends_on_the_text_is_mended() -> None:
    source = FIRST_SYSTEM.replace("not loop.first", "m.content == 'b' and not loop.first") + TURNS
    assert prompt(source, system("a"), system("b"), user("x")) == "<system>a\n\nb</><user>x</><assistant>"
    assert prompt(source, system("a"), system("c"), user("x")).startswith("<system>a</><system>c</>")


def test_conversations_of_one_shape_need_one_example() -> None:
    template = chat_template(TURNS)
    turns = [user("x"), assistant("y")]

    def renderings(count: int) -> int:
        before = template._renderer.count  # type: ignore[attr-defined]
        template.render(Conversation([*turns * count, user("z")]), {})
        return int(template._renderer.count - before)  # type: ignore[attr-defined]

    assert [renderings(count) for count in (1, 1, 2, 3, 4, 100)] == [2, 1, 1, 1, 1, 1]
    for number in range(MAX_PLANS + 1):
        template.render(Conversation([user("x")]), {"n": number})
    assert len(template._plans) <= MAX_PLANS


def test_a_template_that_makes_ids_with_names_gets_such_ids() -> None:
    """Kimi shows the id of a result, but makes the ids of calls itself."""
    source = TURNS.replace(
        "CALL", "functions.{{ c.function.name }}:{{ loop.index0 }} {{ c.function.arguments | tojson }}"
    )
    source = source.replace("m.content", "m.content ~ (m.tool_call_id or '')")
    template = chat_template(source)
    assert template.call_ids([user("x")]).new(0, "f") == "functions.f:0"
    text = template.render(Conversation([user("x"), assistant("", call("a", "{}", "f")), result("a", "1")]), {}).text
    assert "functions.f:0 {}" in text
    assert "1functions.f:0" in text


def test_texts_are_protected_and_answers_keep_their_own_markers() -> None:
    messages = [system("s!"), user("u!"), assistant("a!", call("c", '{"k": "v!"}', "f!")), result("c", "r!")]
    text = prompt(
        TURNS.replace("CALL", CALL) + "{{ k }}{{ tools[0].function.name }}", *messages, tools=[tool(name="t!")], k="k!"
    )
    for word in (
        "sprotected",
        "uprotected",
        "aown",
        "vprotected",
        "fprotected",
        "rprotected",
        "kprotected",
        "tprotected",
    ):
        assert word in text


def test_calls_and_results_with_control_tokens_in_their_ids_belong_together() -> None:
    source = TURNS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace("CALL", "{{ c | tojson }}")
    calls = assistant("", call("a!", "{}"), call("b!", "{}"))
    text = prompt(source, user("x"), calls, result("b!", "2"), result("a!", "1"))
    assert text.index("aprotected") < text.index("<tool>1") < text.index("bprotected") < text.index("<tool>2")


def test_calls_as_text_have_the_format_of_the_model() -> None:
    """The markers that they get are no text of the client, and so not protected."""
    source = "{# <|tool_call_start|>[ ]<|tool_call_end|> #}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    calls = assistant("a!", call("c", '{"k": "v!", "n": 1}', "f!"), call("d", "[1]", "g"))
    text = prompt(source, user("x"), calls, result("c", "1"), result("d", "2"))
    written = '<|tool_call_start|>[fprotected(k="vprotected", n=1), g(arguments=[1])]<|tool_call_end|>'
    assert text == f"<x><aown\n{written}><1><2>"


THINK = "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
AFTER_USER = TURNS.replace("<assistant>", "<assistant>{% if 'hard' in messages[-1].content %}<think>{% endif %}")


@pytest.mark.parametrize(
    ("source", "last", "expected"),
    [
        (TURNS, "x <think>", "</><assistant>"),
        (TURNS.replace("{% if add", "{% if false and add"), "x <think>", "</>"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "<think>", ""),
        (TURNS.replace("<assistant>", "<assistant><think>\n"), "x </think>", "</><assistant><think>\n"),
        (AFTER_USER, "hard", "<assistant><think>"),
        (AFTER_USER, "easy <think>", "</><assistant>"),
    ],
)
def test_the_opening_is_the_text_after_the_last_message(source: str, last: str, expected: str) -> None:
    assert chat_template(source).render(Conversation([user(last)]), {}).opening() == expected


def test_every_step_leaves_a_plain_conversation_unchanged() -> None:
    plain = Conversation(
        [system("a"), user("x"), assistant("y"), user("z")],
        [tool(description="d", parameters={"type": "object", "properties": {}})],
    )
    changed = [step.__name__ for step in STEPS if step(plain) != plain]
    assert changed == ["folded_instructions"]
