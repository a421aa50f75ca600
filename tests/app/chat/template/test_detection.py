"""The format of a template is detected from its output, or from words in the template and the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localllm.app.chat.calls.records import REASONING
from localllm.app.chat.template.detection import DetectedCalls, Detector

from .test_shipped_templates import renderer

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
NEXT = "{% if not loop.last %}, {% endif %}"
GENERATE = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def turns(call: str, *, before: str = "", after: str = "", content: str = "{{ m.content }}") -> str:
    """A template that writes `before`, each call, and `after`."""
    calls = f"{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}{{% endif %}}"
    return f"{TOOLS}{{% for m in messages %}}<|{{{{ m.role }}}}|>{content}{calls}<|end|>{{% endfor %}}{GENERATE}"


NAME = "{{ c.function.name }}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
JSON = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"

# Title of the format -> template.
RENDERED = {
    "hermes": turns(f"\n<tool_call>\n{JSON}\n</tool_call>\n"),
    "granite": turns(f"{JSON}{NEXT}", before="<|tool_call|>[", after="]"),
    "phi-4": turns(f"{JSON}{NEXT}", before="<|tool_call|>[", after="]<|/tool_call|>"),
    "granite-3.1": turns(f"{JSON}{NEXT}", before="<tool_call>[", after="]"),
    "mistral-list": turns(f"{JSON}{NEXT}", before="[TOOL_CALLS][", after="]"),
    "hunyuan": turns(
        f"\n<tool_call>{NAME}\n```json\n{ARGUMENTS}\n```\n</tool_call>", before="<tool_calls>", after="\n</tool_calls>"
    ),
    "internlm": turns(
        '<|action_start|><|plugin|>\n{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}<|action_end|>\n"
    ),
    "step-3": turns(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{NAME}">{ITEMS}'
        '<steptml:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</steptml:parameter>{% endfor %}'
        "</steptml:invoke><｜tool_call_end｜>\n",
        before="<｜tool_calls_begin｜>\n",
        after="<｜tool_calls_end｜>",
    ),
    "longcat": turns(
        f"<longcat_tool_call>{NAME}\n{ITEMS}<longcat_arg_key>{{{{ k }}}}</longcat_arg_key>\n"
        "<longcat_arg_value>{{ v if v is string else v | tojson }}</longcat_arg_value>\n{% endfor %}"
        "</longcat_tool_call>\n"
    ),
    "olmo-3": turns(
        f"{NAME}({ITEMS}{{{{ k }}}}={{{{ v | tojson }}}}{NEXT}{{% endfor %}}){{% if not loop.last %}}\n{{% endif %}}",
        before="<function_calls>",
        after="</function_calls>",
    ),
    "functiongemma": turns(
        f"<start_function_call>call:{NAME}{{ {{%- {ITEMS[3:]}{{{{ k }}}}:"
        "{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}{% endif %}"
        "{% if not loop.last %},{% endif %}{% endfor -%} }<end_function_call>"
    ),
    "llama-3": turns(
        '{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}", before="<|python_start|><|python_end|>"
    ),
    "list": turns(f"{JSON}{NEXT}", before="[", after="]"),
    "glm-4": turns(f"{NAME}\n{ARGUMENTS}", content="\n{{ m.content }}"),
}


def no_token(text: str) -> int | None:
    return None


def calls(template: str, id_of: Callable[[str], int | None] = no_token) -> DetectedCalls | None:
    return Detector(template, renderer(template), id_of).calls()


def title(template: str, id_of: Callable[[str], int | None] = no_token) -> str:
    detected = calls(template, id_of)
    assert detected is not None
    assert not detected.is_certain
    return detected.form.calls[0].title


@pytest.mark.parametrize("name", RENDERED)
def test_rendered_calls_show_their_format(name: str) -> None:
    detected = calls(RENDERED[name])
    assert detected is not None
    assert (detected.form.calls[0].title, detected.is_certain) == (name, True)
    assert detected.parallel == (name != "glm-4")


def test_template_that_refuses_two_calls_has_no_parallel_calls() -> None:
    refuse = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    detected = calls(f"{refuse}{{% endif %}}{{% endfor %}}{RENDERED['hermes']}")
    assert detected is not None
    assert not detected.parallel


def test_template_that_needs_other_ids_or_arguments_as_text() -> None:
    nine = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    )
    detected = calls(f"{nine}{{% endif %}}{{% endfor %}}{{% endfor %}}{RENDERED['hermes']}")
    assert detected is not None
    joined = "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}' }}"
    detected = calls(turns(f"<tool_call>{joined}</tool_call>"))
    assert detected is not None
    assert detected.form.calls[0].title == "hermes"


@pytest.mark.parametrize(
    "call",
    ["CALL {{ c.function | tojson }}", "<tool_call><call><name>{{ c.function.name }}</name></call></tool_call>"],
)
def test_calls_in_an_unknown_format_are_no_format(call: str) -> None:
    assert calls(turns(call)) is None


def test_texts_of_the_prompt_show_the_format() -> None:
    text = "{% if tools %}Write <tool_call><function=NAME><parameter=P>V</parameter></function></tool_call>.{% endif %}"
    assert title(text + turns("")) == "qwen3-coder"
    assert title("{% if tools %}Write JSON in <tool_call></tool_call>.{% endif %}" + turns("")) == "hermes"
    assert title("{% if tools %}List of tools: [a]{% endif %}" + turns("")) == "lfm2"
    assert title("{% if tools %}<|tool|>a<|/tool|>{% endif %}" + turns("")) == "phi-4"


def test_tokens_of_the_vocabulary_show_the_format() -> None:
    tokens = {"<tool_call>": 5, "</tool_call>": 6}
    assert title(turns("CALL {{ c.function | tojson }}"), tokens.get) == "hermes"
    assert calls(turns("<tool_call><a>{{ c.function.name }}</a></tool_call>"), tokens.get) is None


def test_reasoning_is_found_around_rendered_reasoning() -> None:
    for pair in REASONING:
        template = "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}" + pair.begin
        template += "{{ m.reasoning_content }}" + pair.end + "{% endif %}{{ m.content }}{% endfor %}" + GENERATE
        # Another pair, as in the vocabulary of a model that was trained from one that reasons.
        found = Detector(f"{{# <think></think> #}}{template}", renderer(template), no_token).reasoning()
        assert found == pair


def test_reasoning_without_a_rendered_example() -> None:
    plain = turns("")
    assert Detector(plain, renderer(plain), no_token).reasoning() is None
    tokens = {"[THINK]": 1, "[/THINK]": 2}
    assert Detector(plain, renderer(plain), tokens.get).reasoning() == REASONING[1]
    opened = plain + "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert Detector(opened, renderer(opened), no_token).reasoning() == REASONING[0]


def test_a_template_that_fails_has_no_format() -> None:
    broken = "{{ raise_exception('no') }}"
    assert calls(broken) is None
    assert Detector(broken, renderer(broken), no_token).reasoning() is None
