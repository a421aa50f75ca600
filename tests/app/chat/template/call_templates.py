"""Chat templates that write calls exactly as a record of a format does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from localllm.app.chat.calls.records import CallFormat, Literal, Part
from localllm.app.chat.calls.writing import Notation, notation_of

_JSON = "c.function.arguments | tojson"
_ITEMS = "for k, v in c.function.arguments.items()"


def template_of(form: CallFormat) -> str:
    """A template with the roles of messages, and calls in a format. It writes no start of an answer."""
    calls = _separated(form) if form.separator is not None else _repeated(form)
    return (
        f"{_macro(form)}{{% if tools %}}<|im_start|>system\n{{{{ tools | tojson }}}}<|im_end|>\n{{% endif %}}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% if m.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    )


def _separated(form: CallFormat) -> str:
    separator = f"{{% if not loop.last %}}{_text(form.separator or '')}{{% endif %}}"
    return f"{_text(form.begin)}{{% for c in m.tool_calls %}}{_call(form)}{separator}{{% endfor %}}{_text(form.end)}"


def _repeated(form: CallFormat) -> str:
    gap = f"{{% if not loop.last %}}{_text(form.gap)}{{% endif %}}"
    one = f"{_text(form.begin)}{_call(form)}{_text(form.end)}{gap}"
    if form.at_start:  # an answer has one call
        one += "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    return f"{{% for c in m.tool_calls %}}{one}{{% endfor %}}"


def _call(form: CallFormat) -> str:
    """The text of a call. In its parameters, `loop` is another loop, so the number of the call is set before."""
    fields = {"name": "c.function.name", "index": "loop.index0", "id": "c.id", "arguments": _JSON}
    texts = {name: f"{{{{ {value} }}}}" for name, value in fields.items()}
    if form.arguments == "parameters":
        texts["parameters"] = f"{{% {_ITEMS} %}}{_filled(form.parameter_parts, _PARAMETER)}{{% endfor %}}"
    elif form.arguments != "arguments":
        notation = notation_of(form)
        comma = f"{{% if not loop.last %}}{_text(notation.comma)}{{% endif %}}"
        texts[form.arguments] = (
            f"{{% {_ITEMS} %}}{{{{ k }}}}{_text(notation.equals)}{{{{ value(v) }}}}{comma}{{% endfor %}}"
        )
    return _filled(form.parts, texts)


_PARAMETER = {
    "key": "{{ k }}",
    "value": "{{ v if v is string else v | tojson }}",
    "raw": "{{ 'true' if v is string else 'false' }}",
    "type": (
        "{{ 'string' if v is string else 'boolean' if v is boolean else 'null' if v is none"
        " else 'number' if v is number else 'object' if v is mapping else 'array' }}"
    ),
}


def _filled(parts: Sequence[Part], texts: Mapping[str, str]) -> str:
    return "".join(_text(part.text) if isinstance(part, Literal) else texts[part.name] for part in parts)


def _text(text: str) -> str:
    """A text as an expression, because a template drops some line breaks."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _macro(form: CallFormat) -> str:
    """The macro `value`, which writes a value in the notation of keywords or entries."""
    if form.arguments not in ("keywords", "entries"):
        return ""
    notation = notation_of(form)
    words = "".join(f"{{% elif v is {name} %}}{_text(notation.words[word])}" for name, word in _WORDS.items())
    comma = f"{{% if not loop.last %}}{_text(notation.comma)}{{% endif %}}"
    return (
        f"{{%- macro value(v) -%}}{{% if v is string %}}{_string(notation)}{words}"
        f"{{% elif v is mapping %}}{{{{ '{{' }}}}{{% for k, x in v.items() %}}{_key(notation)}{_text(notation.colon)}"
        f"{{{{ value(x) }}}}{comma}{{% endfor %}}{{{{ '}}' }}}}"
        f"{{% elif v is iterable %}}[{{% for x in v %}}{{{{ value(x) }}}}{comma}{{% endfor %}}]"
        "{% else %}{{ v | tojson }}{% endif %}{%- endmacro -%}"
    )


_WORDS: dict[str, bool | None] = {"none": None, "true": True, "false": False}


def _string(notation: Notation) -> str:
    quote = _text(notation.quote)
    return "{{ v | tojson }}" if notation.quote == '"' else f"{quote}{{{{ v }}}}{quote}"


def _key(notation: Notation) -> str:
    return "{{ k | tojson }}" if notation.any_key else "{{ k }}"
